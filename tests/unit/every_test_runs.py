"""Every test that the test programs hold is run by exactly one entry of ctest: each entry runs one file's tests by name.

usage: every_test_runs.py CTEST BUILD_FOLDER
"""
import collections
import fnmatch
import json
import os
import subprocess
import sys


def names_in(program):
    """The full names that `program --gtest_list_tests` prints."""
    output = subprocess.run([program, "--gtest_list_tests"], check=True, capture_output=True, text=True).stdout
    suite, names = "", []
    for line in output.splitlines():
        word = line.split("#")[0].rstrip()
        if line.startswith("  "):
            names.append(suite + word.strip())
        elif word.endswith("."):
            suite = word
    return names


def main():
    ctest, build = sys.argv[1:3]
    shown = subprocess.run([ctest, "--test-dir", build, "--show-only=json-v1"], check=True, capture_output=True, text=True).stdout
    filters = collections.defaultdict(dict)
    for test in json.loads(shown)["tests"]:
        command = test.get("command", [])
        if len(command) == 2 and command[1].startswith("--gtest_filter="):
            filters[command[0]][test["name"]] = command[1].split("=", 1)[1].split(":")[:-1]
    problems, total = [], 0
    for program, entries in filters.items():
        names = names_in(program)
        total += len(names)
        exact = {pattern: entry for entry, patterns in entries.items() for pattern in patterns if "*" not in pattern}
        wild = [(pattern, entry) for entry, patterns in entries.items() for pattern in patterns if "*" in pattern]
        used = set()
        for name in names:
            found = {exact[name]} if name in exact else {e for p, e in wild if fnmatch.fnmatchcase(name, p)}
            used |= found
            if len(found) != 1:
                problems.append(f"{os.path.basename(program)}: {name} is run by {sorted(found) or 'no entry'}")
        problems += [f"{entry} runs no test" for entry in entries if entry not in used]
    if not filters or problems:
        sys.exit("\n".join(problems) or "ctest names no test program")
    print(f"{total} tests in {len(filters)} programs, each run by one entry")


main()
