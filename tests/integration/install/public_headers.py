"""Compiles every installed header alone, so that a user may include any of them first.

The large headers of others are precompiled, each set for those of our headers alone that include all of it, directly or
through our other headers: what is loaded beforehand is what would be loaded anyway, and no missing include is hidden.
For the same reason one call of the compiler takes a chain of headers, each of which includes the one before it.

usage: public_headers.py BUILD_FOLDER INCLUDE_FOLDER
"""
import json
import pathlib
import re
import subprocess
import sys
import tempfile

# Sets of headers to precompile; the first that a header includes wholly serves it.
LARGE = [("emend/editors/editor.h",), ("emend/models/model.h",), ("ATen/core/Tensor.h", "nlohmann/json.hpp"), ("ATen/core/Tensor.h",),
         ("nlohmann/json.hpp",)]


def base_command(build, include):
    """The compiler call of a source of the libraries, on the installed headers and without the precompiled header, which
    would hide a missing include."""
    for entry in json.loads((build / "compile_commands.json").read_text()):
        if entry["file"].endswith("/cmake/pch.cpp"):
            words = entry["command"].split()
            break
    else:
        sys.exit("cmake/pch.cpp is not in compile_commands.json")
    # Whatever comes before the compiler is a launcher (ccache).
    words = words[next(i for i, word in enumerate(words) if re.search(r"(\+\+|clang)[-\d.]*$", word)):]
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word in ("-o", "-c", "-include", "-MT", "-MF"):
            skip = True
        elif word not in ("-MD", "-Winvalid-pch"):
            kept.append(f"-I{include}" if word == f"-I{build}/include" else word)
    return kept + ["-fsyntax-only", "-x", "c++", "-"]


def closure(name, include, known):
    """What the header includes, directly or through our other headers."""
    if name not in known:
        known[name] = set()
        for other in re.findall(r"^#include <([^>]+)>", (include / name).read_text(), re.M):
            known[name].add(other)
            if (include / other).exists():
                known[name] |= closure(other, include, known)
    return known[name]


def precompile(command, folder):
    """Compiles the sets of LARGE. Returns (set, arguments that load it) for each."""
    loads = []
    for number, names in enumerate(LARGE):
        header = folder / f"large{number}.h"
        header.write_text("".join(f"#include <{name}>\n" for name in names))
        words = [word for word in command if word not in ("-fsyntax-only", "-")]
        words[words.index("c++")] = "c++-header"
        if subprocess.run(words + [str(header), "-o", f"{header}.gch"]).returncode:
            sys.exit(f"{', '.join(names)} cannot be compiled")
        loads.append((set(names), ["-include", str(header)]))
    return loads


def chains(names, known):
    """The headers in as few lists as a simple search finds: each includes all that stand before it."""
    found = []
    for name in sorted(names, key=lambda name: (len(known[name]), name)):
        ends = [chain for chain in found if chain[-1] in known[name]]
        if ends:
            max(ends, key=lambda chain: len(known[chain[-1]])).append(name)
        else:
            found.append([name])
    return found


def main():
    build, include = (pathlib.Path(word).resolve() for word in sys.argv[1:3])
    command = base_command(build, include)
    names = sorted(path.relative_to(include).as_posix() for path in include.rglob("*.h"))
    if len(names) < 10:
        sys.exit(f"only {len(names)} headers in {include}: was the project installed there?")

    with tempfile.TemporaryDirectory() as folder:
        loads, known = precompile(command, pathlib.Path(folder)), {}

        def compile(chain, loaded):
            text = "".join(f"#include <{name}>\n" for name in chain)
            result = subprocess.run(command[:-1] + loaded + command[-1:], input=text, text=True, capture_output=True)
            if result.returncode or result.stderr:
                print(f"{' '.join(chain)}, each alone: {'error' if result.returncode else 'warnings'}:\n{result.stderr[:2000]}")
            return result.returncode

        groups = {}  # by what is loaded
        for name in names:
            held = closure(name, include, known)
            groups.setdefault(next((i for i, (large, _) in enumerate(loads) if large <= held), None), []).append(name)
        calls = [(chain, [] if i is None else loads[i][1]) for i, group in groups.items() for chain in chains(group, known)]
        failed = sum(compile(chain, loaded) != 0 for chain, loaded in calls)
    print(f"{len(names)} headers in {len(calls)} calls of the compiler, {failed} failed")
    sys.exit(1 if failed else 0)


main()
