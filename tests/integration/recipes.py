"""Runs the Python recipes on the tiny model and compares what they print with examples/recipes/expected.

usage: recipes.py RECIPES_FOLDER MODEL_FOLDER      (the package is found by PYTHONPATH)
"""
import ast
import contextlib
import io
import os
import pathlib
import runpy
import subprocess
import sys

import torch

folder, model = pathlib.Path(sys.argv[1]), sys.argv[2]
page = (folder.parent.parent / "docs" / "recipes.md").read_text()
torch.set_num_threads(1)


def output(recipe):
    """In this process, which has torch already; the sweep starts processes, which need a program of their own."""
    words = [str(recipe), model, f"{model}/rome.yaml"]
    if recipe.stem == "sweep":
        return subprocess.run([sys.executable, *words], check=True, capture_output=True, text=True, env=os.environ).stdout
    sys.argv, printed = words, io.StringIO()
    with contextlib.redirect_stdout(printed), torch.enable_grad():
        runpy.run_path(str(recipe), run_name="__main__")
    torch.set_grad_enabled(True)
    return printed.getvalue()


def statements(recipe):
    """Those of the program, its docstring and imports left out."""
    nodes = ast.walk(ast.parse(recipe.read_text()))
    return sum(isinstance(node, ast.stmt) and not isinstance(node, (ast.Import, ast.ImportFrom)) for node in nodes) - 1


recipes = sorted(folder.glob("*.py"))
wrong = []
for recipe in recipes:
    twin = recipe.with_suffix(".cpp")
    for file in (recipe, twin):
        if len(file.read_text().splitlines()) > 40:
            wrong.append(f"{file.name} is longer than 40 lines")
    if f"| `{recipe.stem}` |" not in page or f" {statements(recipe)} |\n" not in page.split(f"| `{recipe.stem}` |")[1].split("| `")[0]:
        wrong.append(f"docs/recipes.md does not say that {recipe.stem} has {statements(recipe)} statements")
    got, expected = output(recipe), (folder / "expected" / f"{recipe.stem}.txt").read_text()
    if got != expected:
        wrong.append(f"{recipe.name} printed\n{got}instead of\n{expected}")
assert len(recipes) == 10, [recipe.name for recipe in recipes]
sys.exit("\n".join(wrong) or print("10 recipes"))
