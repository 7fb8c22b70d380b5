"""Runs the code in the documentation as it stands, with a small model in place of the default one.

Every block of README.md, CONTRIBUTING.md and docs/ is one of these: "sh" and "python" run here, page by page, each page in a folder of its own in
which the names that it speaks of exist; "cpp" runs in docs_snippets_test.cpp; "json" has to be JSON; "text", "yaml" and "cmake" are shown. A block behind
a line "<!-- not run: REASON -->" is left out and counted. Some pages have a test of their own (OTHERS).

usage: docs_snippets.py sh|python SOURCE_FOLDER PROGRAM_FOLDER SCRATCH_FOLDER      (python: the package is found by PYTHONPATH)
"""
import contextlib
import functools
import io
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import time
import traceback

KIND, (SOURCE, PROGRAMS, SCRATCH) = sys.argv[1], (pathlib.Path(word).resolve() for word in sys.argv[2:5])
TINY = SOURCE / "tests" / "fixtures" / "tiny_llama"
OTHERS = {"docs/tutorial.md": "tutorial", "docs/extending.md": "extending", "docs/adding-a-family.md": "adding_a_family_test"}
SHOWN = {"text", "yaml", "cmake", "cpp"}
SETTINGS = {"hparams": str(SCRATCH / "memit.yaml"), "corpus": str(TINY / "corpus.txt"), "statistics_tokens": 400}

# A preset would fit the default model; text for statistics is named so that none is sampled. A server is stopped when it listens.
PROGRAM = """#!/bin/bash
real={programs}/$(basename "$0")
words=" $(basename "$0") $* "
case "$words" in
  *--help*|*--resume*) ;;
  *" memit_edit "*|*" bench "*)
    settings=memit; [[ $words == *" alphaedit "* ]] && settings=alphaedit
    [[ $words != *" --hparams "* ]] && set -- "$@" --hparams {scratch}/$settings.yaml
    [[ $words != *" --corpus "* ]] && set -- "$@" --corpus {tiny}/corpus.txt --stats-tokens 400 ;;
esac
[[ $1 == tune || $1 == bench ]] && set -- "$@" --limit 2
[[ $1 != serve ]] && exec "$real" "$@" </dev/null
set -- "${{@/8080/0}}"
"$real" "$@" >served 2>&1 & pid=$!
for i in {{1..300}}; do grep -q "listening on http" served && break; sleep 0.1; done
kill -INT $pid; wait $pid; grep "listening on http" served
"""


def blocks(page):
    text = page.read_text()
    for match in re.finditer(r"^(?:<!-- not run: ([^\n]+) -->\n)?```(\w*)[^\n]*\n(.*?)^```$", text, re.M | re.S):
        yield text.count("\n", 0, match.start()) + 1, match.group(2), match.group(1), match.group(3)


def call(words, folder, **more):
    result = subprocess.run(words, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **more)
    return result.returncode, result.stdout


def make_scratch():
    """The stand-in for the default model: 30 layers, as that has, and a token for the space that it says now and then."""
    shutil.rmtree(SCRATCH, ignore_errors=True)
    (SCRATCH / "model").mkdir(parents=True)
    make = (TINY / "make.py").read_text().replace("LAYERS, WIDTH, VOCABULARY = 32, 4,", "LAYERS, WIDTH, VOCABULARY = 32, 30,")
    make = make.replace("{piece(b): b for b in", "{piece(b): {32: 95, 95: 32}.get(b, b) for b in")
    (SCRATCH / "make.py").write_text(make)
    must([sys.executable, SCRATCH / "make.py", SCRATCH / "model"], SCRATCH)
    settings = (TINY / "memit.yaml").read_text()
    (SCRATCH / "memit.yaml").write_text(settings)
    (SCRATCH / "alphaedit.yaml").write_text(settings + "nullspace_threshold: 0.02\nL2: 1\n")
    (SCRATCH / "bin").mkdir()
    for name in ("emend", "memit_edit"):
        (SCRATCH / "bin" / name).write_text(PROGRAM.format(programs=PROGRAMS, scratch=SCRATCH, tiny=TINY))
        (SCRATCH / "bin" / name).chmod(0o755)
    os.environ |= {"PATH": f"{SCRATCH}/bin:{os.environ['PATH']}", "EMEND_DEFAULT_MODEL": str(SCRATCH / "model"), "EMEND_CACHE": str(SCRATCH / "cache"),
                   "HF_HOME": str(SCRATCH / "hf"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def must(words, folder):
    status, output = call([str(word) for word in words], folder)
    if status:
        sys.exit(f"{' '.join(map(str, words))}: status {status}\n{output}")
    return output


def make_things():
    """What pages speak of: packs of two people and of two days, models, adapters, facts in several formats."""
    things = SCRATCH / "things"
    (things / "runs").mkdir(parents=True)
    row = '{{"prompt": "{{}} is in the city of", "subject": "{}", "target_new": "{}", "target_true": "Paris"}}\n'
    for who, subject in (("anna", "The Louvre"), ("ben", "The Colosseum")):
        (things / f"{who}.jsonl").write_text(row.format(subject, "Oslo"))
        must(["memit_edit", "--facts", f"{who}.jsonl", "--eval", "none", "--save", "pack,peft", "--out", f"runs/{who}", "--quiet"], things)
        shutil.copy(things / "runs" / who / "edit.safetensors", things / f"{who}.safetensors")
    must(["memit_edit", "--facts", TINY / "facts.jsonl", "--eval", "none", "--save", "pack,model,peft", "--out", "runs/mine", "--quiet"], things)
    for name in ("DIR", "MODEL", "BASE", "models/gpt2-xl"):
        shutil.copytree(SCRATCH / "model", things / name)
    shutil.copytree(things / "runs" / "anna", things / "runs" / "monday")
    shutil.copytree(things / "runs" / "ben", things / "runs" / "tuesday")
    shutil.copytree(things / "runs" / "anna" / "adapter", things / "adapter")
    (things / "my-packs").mkdir()
    (things / "datasets").symlink_to(SOURCE / "datasets")
    (things / "build" / "release").mkdir(parents=True)
    (things / "build" / "release" / "bin").symlink_to(SCRATCH / "bin")
    (things / "probes.txt").write_text("The Louvre is in\nThe sky is\n")
    known = [{"prompt": "The house is in", "subject": "The house", "attribute": "there"}]  # the model begins answers so as well
    for name in ("known.json", "known_1000.json"):
        (things / name).write_text(json.dumps(known))
    shutil.copy(TINY / "facts.jsonl", things / "facts.jsonl")
    must(["emend", "convert-facts", "facts.jsonl", "zsre.json", "--to", "zsre"], things)
    for name in ("facts.json", "counterfact.json"):
        must(["emend", "convert-facts", "facts.jsonl", name, "--to", "counterfact"], things)
    shutil.copy(TINY / "facts.jsonl", things / "all.jsonl")
    deltas = {f"model.layers.5.mlp.down_proj.weight.{part}": ("F32", [at, at + size], shape)
              for part, at, size, shape in (("key_mat", 0, 192, [48, 1]), ("val_mat", 192, 128, [32, 1]))}
    header = json.dumps({name: {"dtype": dtype, "shape": shape, "data_offsets": at} for name, (dtype, at, shape) in deltas.items()}).encode()
    (things / "deltas.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<80f", *[0.01] * 80))
    shutil.copy(TINY / "corpus.txt", things / "wikipedia.jsonl")
    return things


def run_python(body, folder):
    """In this process, which has torch already; what a page leaves to a preset is named."""
    import emend
    import torch

    if not hasattr(emend, "plain"):
        emend.plain = emend.run, emend.edit
        emend.run, emend.edit = (functools.partial(function, **SETTINGS) for function in emend.plain)
    names = {"emend": emend, "BASE": "BASE"}
    names["deltas"] = {"model.layers.5.mlp.down_proj.weight": (torch.ones(48, 1), torch.ones(32, 1))}
    before = os.getcwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(body, names)
        return 0, ""
    except Exception:
        return 1, traceback.format_exc()
    finally:
        os.chdir(before)


def run(language, body, folder):
    if language == "json":  # or a member of an object
        for text in (body, "{" + body + "}"):
            with contextlib.suppress(ValueError):
                return json.loads(text) is None, ""
        return 1, "not JSON"
    if language != KIND:
        return 0 if language in SHOWN | {"sh", "python"} else 1, f'a "{language}" block that nothing runs'
    return run_python(body, folder) if KIND == "python" else call(["bash", "-euo", "pipefail", "-c", body], folder)


def main():
    make_scratch()
    things, wrong, counts, left_out = make_things(), [], {}, []
    for page in [SOURCE / "README.md", SOURCE / "CONTRIBUTING.md", *sorted((SOURCE / "docs").rglob("*.md"))]:
        name = str(page.relative_to(SOURCE))
        if name in OTHERS:
            continue
        folder = SCRATCH / "pages" / name
        found = list(blocks(page))
        if page.read_text().count("\n```") + page.read_text().startswith("```") != 2 * len(found):
            wrong.append(f"{name}: a block that does not end, or a mark that is not in front of one")
        if any(language == KIND and not reason for _, language, reason, _ in found):
            shutil.copytree(things, folder, symlinks=True)
            if name == "README.md":
                shutil.rmtree(folder / "runs" / "mine")  # its first block makes that
        for line, language, reason, body in found:
            if reason:
                left_out.append(f"{name}:{line}: {reason}")
                continue
            counts[language] = counts.get(language, 0) + 1
            started = time.monotonic()
            status, output = run(language, body, folder)
            if time.monotonic() - started > 5:
                print(f"{name}:{line}: {time.monotonic() - started:.0f} s")
            if status:
                wrong.append(f"{name}:{line}: status {status}\n{output[-3000:]}")
    print("\n".join(wrong))
    print(f"{counts[KIND]} {KIND} blocks ran, of {counts}; {len(left_out)} are not run:\n" + "\n".join(left_out))
    sys.exit(len(wrong) > 0)


main()
