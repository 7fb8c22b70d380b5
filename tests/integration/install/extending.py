"""Adds one of each, as docs/extending.md says, to a copy of the tree, builds it and uses what was added.

usage: extending.py SOURCE_FOLDER BUILD_FOLDER SCRATCH_FOLDER

Only what the recipes add is compiled, with the sources that hold the lists: the rest is linked from the build.
"""
import json
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

SOURCE, BUILD, SCRATCH = (pathlib.Path(word).resolve() for word in sys.argv[1:4])
TREE = SCRATCH / "tree"
FOLDERS = ["cmake", "core", "datasets", "devices", "docs", "editors", "evaluation", "hooks", "hparams", "models", "tests/oracle", "tools", "workflow"]


def recipes():
    """(new file, its text, list, line) of each code block of the page."""
    page = (SOURCE / "docs" / "extending.md").read_text()
    found = re.findall(r"^`(\S+\.cpp)`, and in `(\S+\.def)` the line `([^\n]+)`:\n```cpp\n(.*?)^```", page, re.M | re.S)
    if len(found) != 6:
        sys.exit(f"docs/extending.md: {len(found)} recipes, 6 expected")
    return [(new, text, table, line) for new, table, line, text in found]


def follow(steps):
    """One new file and one line each; nothing else in the copy is touched."""
    shutil.rmtree(SCRATCH, ignore_errors=True)
    for folder in FOLDERS:
        shutil.copytree(SOURCE / folder, TREE / folder)
    shutil.copy(SOURCE / "CMakeLists.txt", TREE)
    for new, text, table, line in steps:
        if (TREE / new).exists():
            sys.exit(f"{new} is there already")
        (TREE / new).write_text(text)
        with (TREE / table).open("a") as file:
            file.write(line + "\n")
    (SCRATCH / "include").mkdir()
    (SCRATCH / "include" / "emend").symlink_to(TREE)


def configure(steps):
    """The build of the copy compiles the new files without being told."""
    build = SCRATCH / "build"
    cache = (BUILD / "CMakeCache.txt").read_text()
    known = [f"-D{name}={value}" for name, value in re.findall(r"^((?:LIBTORCH|GGML)_\w+):\w+=(.+)$", cache, re.M)]
    run(["cmake", "-S", TREE, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DEMEND_BUILD_TESTS=OFF",
         "-DEMEND_BUILD_PYTHON=OFF", "-DEMEND_UNITY=OFF", *known])
    plan = (build / "build.ninja").read_text()
    for new, *_ in steps:
        if str(TREE / new) not in plan:
            sys.exit(f"{new}: the line in the list does not make the build compile it")
    return build


def run(words, **more):
    result = subprocess.run([str(word) for word in words], capture_output=True, text=True, **more)
    if result.returncode:
        sys.exit(f"{' '.join(map(str, words))}\nended with {result.returncode}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}")
    return result.stdout


def compiler_words():
    """How the libraries are compiled, with their precompiled header, on the headers of the copy."""
    for entry in json.loads((BUILD / "compile_commands.json").read_text()):
        if entry["file"].endswith("/cmake/pch.cpp") and "GTest" not in entry["command"] and "gtest" not in entry["command"]:
            words = shlex.split(entry["command"])
            break
    else:
        sys.exit("cmake/pch.cpp is not in compile_commands.json")
    words = words[next(i for i, word in enumerate(words) if re.search(r"(\+\+|clang)[-\d.]*$", word)):words.index("-o")]
    words = [f"-I{SCRATCH}/include" if word == f"-I{BUILD}/include" else word for word in words]
    return words + [f"-I{TREE}/tools", f"-I{BUILD}/tools", f"-I{BUILD}/workflow"]


def build_program(steps):
    tables = sorted({pathlib.Path(table).name for _, _, table, _ in steps})
    holds_list = re.compile(r'#include ["<][\w/]*(' + "|".join(map(re.escape, tables)) + r')[">]')
    sources = [TREE / new for new, *_ in steps]
    sources += [path for folder in FOLDERS for path in sorted((TREE / folder).rglob("*.cpp")) if holds_list.search(path.read_text())]
    words = compiler_words()

    def compile_one(source):
        target = SCRATCH / (str(source.relative_to(TREE)).replace("/", "_") + ".o")
        run([*words, "-c", source, "-o", target], cwd=BUILD)
        return target

    objects = [compile_one(source) for source in sources]
    link = run(["ninja", "-C", BUILD, "-t", "commands", "bin/emend"]).strip().splitlines()[-1]
    link = shlex.split(link.removeprefix(": && ").removesuffix(" && :"))
    out = link.index("-o")
    link[out + 1] = str(SCRATCH / "emend")
    # The sources that hold the lists are in the libraries too, without the new lines: the first definition counts.
    link[out:out] = ["-Wl,--allow-multiple-definition", *map(str, objects)]
    run(link, cwd=BUILD)
    return SCRATCH / "emend"


def use(emend):
    tiny = SOURCE / "tests" / "fixtures" / "tiny_llama"
    model = SCRATCH / "alpaca"
    shutil.copytree(tiny, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "alpaca", "architectures": ["AlpacaForCausalLM"]}))
    facts = SCRATCH / "facts.json"
    facts.write_text(json.dumps([{"say": "{} is in the city of", "subject": "The Eiffel Tower", "answer": "Rome"}]))
    if run([emend, "count", "--facts", facts]) != "1\n":
        sys.exit("the new verb does not count the facts of the new format")
    run([emend, "edit", "--model", model, "--facts", facts, "--format", "says", "--editor", "tenth", "--hparams", tiny / "memit.yaml",
         "--corpus", tiny / "corpus.txt", "--eval", "opening", "--save", "pack,names", "--cache", SCRATCH / "cache", "--out", SCRATCH / "run"])
    results = json.loads((SCRATCH / "run" / "results.json").read_text())
    if results["model"]["family"] != "alpaca" or results["editor"] != "tenth":
        sys.exit(f"family {results['model']['family']}, editor {results['editor']}")
    if set(results["metrics"]) != {"opening"} or results["metrics"]["opening"]["post"]["n"] != 1:
        sys.exit(f"metrics: {results['metrics']}")
    if (SCRATCH / "run" / "names.txt").read_text().split() != results["weights_changed"]:
        sys.exit("the new form of saving does not hold the changed weights")
    run([emend, "convert", model, SCRATCH / "alpaca.gguf", "--type", "F32"])
    texts = [run([emend, "generate", "--model", source, "--prompt", "The Eiffel Tower", "--json"])
             for source in (model, SCRATCH / "alpaca.gguf")]
    if texts[0] != texts[1]:
        sys.exit(f"from the folder {texts[0]}, from its GGUF file {texts[1]}")


def main():
    steps = recipes()
    follow(steps)
    configure(steps)
    use(build_program(steps))
    print(f"{len(steps)} recipes, one file and one line each")
    shutil.rmtree(SCRATCH)


main()
