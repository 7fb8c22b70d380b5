"""The build backend of the Python package (PEP 517): calls CMake and packs a wheel. Needs nothing beside Python, CMake
and a compiler. wheel.py makes of it a wheel for other machines.

Environment:
  EMEND_DIR       where emend is installed: only the module is compiled. Unset: everything is, which takes minutes.
  LIBTORCH_ROOT   the LibTorch to build against; default: torch of the Python that runs pip
  EMEND_JOBS      compiler jobs at once
"""
import base64
import hashlib
import os
import pathlib
import re
import stat
import subprocess
import sys
import sysconfig
import tempfile
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
TOP = HERE.parent.parent
PROGRAMS = ("emend", "memit_edit")


def project():
    """Name, version, … of pyproject.toml (tomllib comes with Python 3.11 only)."""
    text = (TOP / "pyproject.toml").read_text()
    one = lambda key: re.search(rf'^{key} = "(.*)"$', text, re.M).group(1)
    dependencies = re.search(r"^dependencies = \[(.*)\]$", text, re.M).group(1)
    return {"name": one("name"), "version": one("version"), "summary": one("description"), "python": one("requires-python"),
            "dependencies": re.findall(r'"([^"]+)"', dependencies)}


def metadata():
    info = project()
    lines = ["Metadata-Version: 2.1", f"Name: {info['name']}", f"Version: {info['version']}", f"Summary: {info['summary']}",
             f"Requires-Python: {info['python']}", "Description-Content-Type: text/markdown"]
    return "\n".join(lines + [f"Requires-Dist: {name}" for name in info["dependencies"]]) + "\n\n" + (TOP / "README.md").read_text()


def entry_of(file):
    """A member of the wheel, the same bytes from the same files. pip makes regular files alone executable."""
    entry = zipfile.ZipInfo(file, (1980, 1, 1, 0, 0, 0))
    entry.external_attr = (stat.S_IFREG | (0o755 if "/bin/" in file or "/scripts/" in file else 0o644)) << 16
    return entry


def tag():
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return f"{python}-{python}-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def installed(package, *parts):
    """A folder of a package of the Python that runs pip; build isolation hides it from imports, not from a new process."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    code = f"import importlib.util as u; s = u.find_spec('{package}'); print(list(s.submodule_search_locations)[0] if s else '')"
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True).stdout.strip()
    return pathlib.Path(found, *parts) if found else None


def compile_package(output, build):
    """Builds the module into `output`; returns the folder of the programs."""
    emend = os.environ.get("EMEND_DIR")
    options = [f"-DEMEND_PYTHON_OUTPUT={output}", "-DCMAKE_BUILD_TYPE=Release", f"-DPython3_EXECUTABLE={sys.executable}"]
    torch = os.environ.get("LIBTORCH_ROOT") or installed("torch")
    if torch:
        options.append(f"-DLIBTORCH_ROOT={torch}")
    ggml = os.environ.get("GGML_ROOT") or installed("libggml")
    if ggml:
        options.append(f"-DGGML_ROOT={ggml}")
    if emend:
        source = HERE
        options.append(f"-DCMAKE_PREFIX_PATH={pathlib.Path(emend).resolve()}")
    else:
        source = TOP
        options += ["-DEMEND_BUILD_TESTS=OFF", "-DEMEND_BUILD_PYTHON=ON"]
    subprocess.run(["cmake", "-S", source, "-B", build, "-G", "Ninja", *options], check=True)
    jobs = ["-j", os.environ["EMEND_JOBS"]] if "EMEND_JOBS" in os.environ else []
    subprocess.run(["cmake", "--build", build, "--target", "emend_python", *([] if emend else PROGRAMS), *jobs], check=True)
    return pathlib.Path(emend or build, "bin")


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    info = project()
    name = f"{info['name']}-{info['version']}"
    path = pathlib.Path(wheel_directory) / f"{name}-{tag()}.whl"
    with tempfile.TemporaryDirectory() as scratch:
        output = pathlib.Path(scratch, "emend")
        programs = compile_package(output, pathlib.Path(scratch, "build"))
        modules = list(output.glob("_emend*.so"))
        if len(modules) != 1:
            raise RuntimeError("no module was built: Python headers (python3-dev) or LibTorch's Python part are missing")
        files = {f"emend/{file.name}": file.read_bytes() for file in sorted(HERE.glob("emend/*")) + modules if file.is_file()}
        for program in PROGRAMS:
            files[f"emend/bin/{program}"] = (programs / program).read_bytes()
            files[f"{name}.data/scripts/{program}"] = (HERE / "start_program.py").read_bytes().replace(b"@PROGRAM@", program.encode())
    files[f"{name}.dist-info/METADATA"] = metadata().encode()
    files[f"{name}.dist-info/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: emend\nRoot-Is-Purelib: false\nTag: {tag()}\n".encode()
    record = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for file, data in files.items():
            wheel.writestr(entry_of(file), data, zipfile.ZIP_DEFLATED)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{file},sha256={digest},{len(data)}")
        wheel.writestr(f"{name}.dist-info/RECORD", "\n".join(record + [f"{name}.dist-info/RECORD,,"]) + "\n")
    return path.name


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    info = project()
    folder = pathlib.Path(metadata_directory) / f"{info['name']}-{info['version']}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(metadata())
    (folder / "WHEEL").write_text(f"Wheel-Version: 1.0\nGenerator: emend\nRoot-Is-Purelib: false\nTag: {tag()}\n")
    return folder.name


class UnsupportedOperation(Exception):
    """By this name PEP 517 knows it."""


def build_sdist(sdist_directory, config_settings=None):
    raise UnsupportedOperation("the source is distributed as a git repository: pip install <folder>")
