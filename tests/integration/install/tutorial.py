"""Runs the blocks of docs/tutorial.md, in order, in one empty folder.

"sh" blocks run in one shell each with the variables of the earlier ones; a "text" block behind one is what it must print
(lines in order; "…" stands for anything, also for lines left out). Blocks with file=NAME are written to that file.

usage: tutorial.py TUTORIAL SOURCE_FOLDER PROGRAM_FOLDER PREFIX SCRATCH_FOLDER
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys

tutorial, source, programs, prefix, scratch = (pathlib.Path(word).resolve() for word in sys.argv[1:6])


def blocks(text):
    for match in re.finditer(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", text, re.M | re.S):
        yield text.count("\n", 0, match.start()) + 1, match.group(1), match.group(2), match.group(3)


def check(line, expected, output):
    """Every expected line occurs, in order."""
    rest = output.splitlines()
    for wanted in expected.splitlines():
        if wanted == "…":
            continue
        pattern = re.compile("(.*)".join(re.escape(part) for part in wanted.split("…")) + "$")
        while rest and not pattern.match(rest[0]):
            rest.pop(0)
        if not rest:
            sys.exit(f"{tutorial.name}:{line}: expected a line {wanted!r}; the output was:\n{output}")
        rest.pop(0)


def main():
    shutil.rmtree(scratch, ignore_errors=True)
    (scratch / "tests").mkdir(parents=True)
    (scratch / "tests" / "fixtures").symlink_to(source / "tests" / "fixtures")
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "PREFIX": str(prefix), "OMP_NUM_THREADS": "1"}
    environment.pop("CMAKE_CXX_COMPILER_LAUNCHER", None)
    output, ran = "", 0
    for line, language, name, body in blocks(tutorial.read_text()):
        if name:
            (scratch / name).parent.mkdir(parents=True, exist_ok=True)
            (scratch / name).write_text(body)
        elif language == "sh":
            result = subprocess.run(["bash", "-euo", "pipefail", "-c", body], cwd=scratch, env=environment, text=True,
                                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            output, ran = result.stdout, ran + 1
            if result.returncode:
                sys.exit(f"{tutorial.name}:{line}: status {result.returncode}\n{output}")
        elif language == "text":
            check(line, body, output)
        else:
            sys.exit(f"{tutorial.name}:{line}: a {language} block that nothing runs")
    shutil.rmtree(scratch)
    print(f"{ran} blocks ran")
    sys.exit(ran < 4)


main()
