"""`pip install .` against the installed library, then the package's own tests with what pip installed.

usage: pip_install.py SOURCE_FOLDER PREFIX SCRATCH_FOLDER      (status 77: skipped, with the reason)
"""
import os
import pathlib
import shutil
import subprocess
import sys

source, prefix, scratch = (pathlib.Path(word).resolve() for word in sys.argv[1:4])


def main():
    python = pathlib.Path(os.environ.get("EMEND_TEST_PYTHON", source / ".venv-tests" / "bin" / "python"))
    if not python.exists():
        print("skipped: needs the Python libraries that ./run-tests installs into .venv-tests (or EMEND_TEST_PYTHON)")
        sys.exit(77)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    environment = os.environ | {"EMEND_DIR": str(prefix), "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "OMP_NUM_THREADS": "1",
                                "TMPDIR": str(scratch)}
    for path in source.glob(".venv/lib/python3*/site-packages/libggml"):
        environment.setdefault("GGML_ROOT", str(path))
    site = scratch / "site"
    pip = subprocess.run([python, "-m", "pip", "install", "--no-deps", "--target", site, source], env=environment, text=True, cwd=scratch,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if pip.returncode:
        sys.exit(f"pip failed ({pip.returncode}):\n{pip.stdout[-6000:]}")
    environment["PYTHONPATH"] = str(site)
    tests = subprocess.run([python, source / "tests/integration/python_package.py", source / "tests/fixtures/tiny_llama", scratch, site],
                           env=environment, cwd=scratch)
    if tests.returncode == 0:
        shutil.rmtree(scratch)
    sys.exit(tests.returncode)


main()
