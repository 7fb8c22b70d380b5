"""Compiles every installed header alone, so that a user may include any of them first.

usage: public_headers.py BUILD_FOLDER INCLUDE_FOLDER
"""
import concurrent.futures
import json
import pathlib
import re
import subprocess
import sys


def base_command(build, include):
    """The compiler call of one of core's sources, on the installed headers and without the precompiled header, which
    would hide a missing include."""
    for entry in json.loads((build / "compile_commands.json").read_text()):
        if entry["file"].endswith("/core/error.cpp"):
            words = entry["command"].split()
            break
    else:
        sys.exit("core/error.cpp is not in compile_commands.json")
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


def main():
    build, include = (pathlib.Path(word).resolve() for word in sys.argv[1:3])
    command = base_command(build, include)
    names = sorted(path.relative_to(include).as_posix() for path in include.rglob("*.h"))
    if len(names) < 10:
        sys.exit(f"only {len(names)} headers in {include}: was the project installed there?")

    def check(name):
        text = f"#include <{name}>\n"
        result = subprocess.run(command, input=text, text=True, capture_output=True)
        return name, result.returncode, result.stderr

    failed = 0
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for name, status, text in pool.map(check, names):
            if status or text:
                failed += status != 0
                print(f"{name} {'does not compile alone' if status else 'gives warnings'}:\n{text[:2000]}")
    print(f"{len(names)} headers, {failed} failed")
    sys.exit(1 if failed else 0)


main()
