"""Checks what ./quickstart left behind: one finished run whose edit took.

usage: check_first_run.py RUNS_FOLDER
"""
import json
import pathlib
import sys

FACTS = 32


def main():
    runs = sorted(pathlib.Path(sys.argv[1]).glob("*/results.json"))
    if len(runs) != 1:
        sys.exit(f"ci: {len(runs)} files results.json under {sys.argv[1]}, one expected")
    results = json.loads(runs[0].read_text())
    pre, post = (results["metrics"]["counterfact"][state] for state in ("pre", "post"))
    problems = []
    if results["edits"]["applied"] != FACTS or results["edits"]["failed"] != 0:
        problems.append(f"edits: {results['edits']}, {FACTS} applied expected")
    if results["edits"]["said"] < 0.8 * FACTS:
        problems.append(f"the model says {results['edits']['said']} of {FACTS} facts")
    if not results["weights_changed"]:
        problems.append("no weight was changed")
    if post["n"] != FACTS or post["efficacy_success"] < 90 or post["efficacy_success"] <= pre["efficacy_success"]:
        problems.append(f"efficacy {pre['efficacy_success']} before, {post['efficacy_success']} after, {post['n']} facts")
    for name in ("cases.jsonl", "report.html", "edit.safetensors"):
        if not (runs[0].parent / name).stat().st_size:
            problems.append(f"{name} is empty")
    if problems:
        sys.exit("ci: the first run is not what it should be: " + "; ".join(problems))
    print(f"ci: first run: {results['edits']}, efficacy {pre['efficacy_success']:.1f} -> {post['efficacy_success']:.1f}")


main()
