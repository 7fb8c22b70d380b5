"""The same ten tasks in several libraries: statements, seconds, and whether they agree.

usage: compare.py MODEL_FOLDER [LIBRARY…]      (default: emend nnsight transformer_lens baukit)

Run it with a Python in which the libraries are installed, with PYTHONPATH naming emend. Every library has a process of its own, in which the model
stays loaded; for every task they take turns, and only one works at a time. Best of ROUNDS after a first in which caches warm up.
Statements are those of the function, `return` included. The task "edit" runs once.
"""
import ast
import json
import pathlib
import subprocess
import sys
import time

HERE, ROUNDS = pathlib.Path(__file__).resolve().parent, 3
sys.path.insert(0, str(HERE))


def work(library, folder):
    """A process that does the tasks whose names it reads."""
    import importlib
    import torch
    chosen = importlib.import_module(f"with_{library}")
    torch.set_grad_enabled(False)
    model = chosen.load(folder)
    print("ready", flush=True)
    for line in sys.stdin:
        task = getattr(chosen, line.strip(), None)
        if task is None:
            print("null", flush=True)
            continue
        torch.set_grad_enabled(task.__name__ == "gradient")
        start = time.perf_counter()
        result = task(model)
        seconds = time.perf_counter() - start
        flat = result.detach().flatten()[::97].tolist() if isinstance(result, torch.Tensor) else None
        print(json.dumps([seconds, flat]), flush=True)


def statements(library):
    tree = ast.parse((HERE / f"with_{library}.py").read_text())
    return {node.name: sum(isinstance(part, ast.stmt) for part in ast.walk(node)) - 1 for node in tree.body if isinstance(node, ast.FunctionDef)}


def answer(process):
    """The next line that is ours; libraries print too."""
    for line in process.stdout:
        if line.startswith(("ready", "null", "[")):
            return line.strip()
    sys.exit("a library's process ended; what it said is above")


def apart(mine, theirs):
    """The largest difference, as a share of the largest value."""
    if len(mine) != len(theirs):
        return float("inf")
    return max(abs(a - b) for a, b in zip(mine, theirs)) / max(map(abs, mine))


def main(folder, libraries):
    from tasks import TASKS
    processes = {library: subprocess.Popen([sys.executable, __file__, "--work", library, folder], text=True, stdin=subprocess.PIPE,
                                           stdout=subprocess.PIPE) for library in libraries}
    for process in processes.values():
        answer(process)
    counts = {library: statements(library) for library in libraries}
    print("| task | " + " | ".join(libraries) + " |\n|---|" + "---|" * len(libraries))
    for task, meaning in TASKS.items():
        best, results = {}, {}
        for turn in range(ROUNDS + 1 if task != "edit" else 1):
            for library, process in processes.items():
                process.stdin.write(f"{task}\n")
                process.stdin.flush()
                got = json.loads(answer(process))
                if got:
                    results[library] = got[1]
                    best[library] = min(got[0], best.get(library, 1e9) if turn > 1 else 1e9)
        for library, result in results.items():
            difference = apart(results[libraries[0]], result) if result else 0
            if not difference < 1e-3:
                print(f"{task}: {library} and {libraries[0]} are {difference:.1e} apart", file=sys.stderr)
        cells = [f"{counts[library][task]} · {best[library]:.3g} s" if library in best else "–" for library in libraries]
        print(f"| {meaning} | " + " | ".join(cells) + " |", flush=True)


if sys.argv[1] == "--work":
    work(*sys.argv[2:])
else:
    main(sys.argv[1], sys.argv[2:] or ["emend", "nnsight", "transformer_lens", "baukit"])
