"""The wheel for other machines, made of the installed library, in an environment that has torch and nothing else of this project: the
programs, and the package's own tests.

usage: pip_install.py SOURCE_FOLDER PREFIX SCRATCH_FOLDER      (status 77: skipped, with the reason)
"""
import json
import os
import pathlib
import shutil
import stat
import subprocess
import sys
import zipfile

source, prefix, scratch = (pathlib.Path(word).resolve() for word in sys.argv[1:4])
TINY = source / "tests/fixtures/tiny_llama"


def run(*words, **more):
    done = subprocess.run([str(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=scratch, **more)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}: {done.returncode}\n{done.stdout[-6000:]}")
    return done.stdout


def look_at_modes():
    """What pip makes of the members of the wheel before auditwheel packs it anew: it runs regular files alone."""
    sys.path.insert(0, str(source / "tools/python"))
    import build_backend
    for file, runs in (("emend/bin/emend", True), ("emend-1.data/scripts/emend", True), ("emend/__init__.py", False)):
        mode = build_backend.entry_of(file).external_attr >> 16
        assert stat.S_ISREG(mode) and bool(mode & 0o111) == runs, (file, oct(mode))
    assert build_backend.metadata().split("\n\n", 1)[1].startswith((source / "README.md").read_text()[:40])


def look_into(wheel):
    """No LibTorch, a tag that other machines know, and search paths that begin at the package."""
    assert "manylinux" in wheel.name, wheel.name
    site = scratch / "unpacked"
    zipfile.ZipFile(wheel).extractall(site)
    libraries = [file for file in site.rglob("*") if file.is_file() and file.read_bytes()[:4] == b"\x7fELF"]
    names = {file.name.split("-")[0] for file in libraries}
    assert {"emend", "memit_edit", "libspdlog"} <= names and not any(name.startswith(("libtorch", "libc10")) for name in names), names
    for file in libraries:
        paths = [line.split("[")[1].rstrip("]") for line in run("readelf", "-d", file).splitlines() if "PATH)" in line]
        assert all(part.startswith("$ORIGIN") for path in paths for part in path.split(":")), (file.name, paths)


def main():
    python = pathlib.Path(os.environ.get("EMEND_TEST_PYTHON", source / ".venv-tests" / "bin" / "python"))
    if not python.exists() or subprocess.run([python, "-c", "import auditwheel, torch"], capture_output=True).returncode:
        print("skipped: needs the Python libraries that ./run-tests installs into .venv-tests (or EMEND_TEST_PYTHON)")
        sys.exit(77)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    run(python, source / "tools/python/wheel.py", prefix, scratch, env=os.environ | {"TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"})
    wheel, = scratch.glob("*.whl")
    look_at_modes()
    look_into(wheel)

    # torch and what it needs are named by a .pth file; nothing tells the programs where this project was built.
    run(python, "-m", "venv", scratch / "venv")
    site, = scratch.glob("venv/lib/python3*/site-packages")
    lent = run(python, "-c", "import numpy, torch, pathlib; print(*{str(pathlib.Path(m.__file__).parent.parent) for m in (numpy, torch)}, sep='\\n')")
    (site / "torch.pth").write_text(lent)
    bin = scratch / "venv/bin"
    run(bin / "pip", "install", "--no-deps", "--no-index", wheel)
    environment = {"OMP_NUM_THREADS": "1", "PATH": f"{bin}:/usr/bin:/bin", "HOME": str(scratch)}
    quick = "import emend, sys; assert 'torch' not in sys.modules and 'load' in dir(emend); print(emend.__version__, emend.load.__name__)"
    version = run(bin / "python", "-c", quick, env=environment).split()[0]
    assert version in run("emend", "--version", env=environment) and "emend VERB" in run("emend", "--help", env=environment)
    run("memit_edit", "--model", TINY, "--facts", TINY / "facts.jsonl", "--hparams", TINY / "memit.yaml", "--corpus", TINY / "corpus.txt",
        "--stats-tokens", "400", "--out", scratch / "program", env=environment)
    assert json.loads((scratch / "program/results.json").read_text())["edits"]["applied"] > 0
    print(run(bin / "python", source / "tests/integration/python_package.py", TINY, scratch, site, env=environment))
    shutil.rmtree(scratch)


main()
