# Sourced by ./quickstart and ./run-tests: how they talk, run long commands and explain failures.
# shellcheck shell=bash

log=build/setup.log
step_number=0
step_count=1
heartbeat_pid=

say() { printf '%s\n' "$*"; }

# step TEXT: "[2/5] TEXT"
step() {
  step_number=$((step_number + 1))
  say "[$step_number/$step_count] $*"
}

# die WHAT WHY DO: the three parts of every failure message
die() {
  {
    printf '\nerror: %s\n' "$1"
    [ -z "${2:-}" ] || printf '  why:        %s\n' "$2"
    [ -z "${3:-}" ] || printf '  what to do: %s\n' "$3"
  } >&2
  exit 1
}

usage_error() {
  printf 'error: %s; see %s --help\n' "$1" "$2" >&2
  exit 2
}

stop_heartbeat() {
  [ -n "$heartbeat_pid" ] || return 0
  kill "$heartbeat_pid" 2>/dev/null || true
  wait "$heartbeat_pid" 2>/dev/null || true
  heartbeat_pid=
}
trap stop_heartbeat EXIT

last_log_line() { tail -n 1 "$log" | tr -dc '[:print:]' | cut -c 1-60; }

# heartbeat WHAT PROGRESS: says every few seconds that WHAT goes on, with what the function PROGRESS prints
heartbeat() {
  local every=10 start=$SECONDS
  [ ! -t 1 ] || every=1
  # The sleeper outlives a stopped heartbeat: it must hold neither the terminal nor the lock.
  while sleep "$every" >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
    if [ -t 1 ]; then
      printf '\r      %s: %d s, %s\033[K' "$1" $((SECONDS - start)) "$($2)"
    else
      printf '      %s: %d s, %s\n' "$1" $((SECONDS - start)) "$($2)"
    fi
  done
}

# run_logged WHAT PROGRESS COMMAND...: runs COMMAND with its output in the log; a failure is explained and ends the script
run_logged() {
  local what=$1 progress=$2 start=$SECONDS status=0 from
  shift 2
  printf '\n== %s\n' "$*" >>"$log"
  from=$(wc -c <"$log")
  heartbeat "$what" "$progress" 9>&- &
  heartbeat_pid=$!
  "$@" >>"$log" 2>&1 </dev/null || status=$?
  stop_heartbeat
  [ ! -t 1 ] || printf '\r\033[K'
  if [ "$status" -eq 0 ]; then
    say "      $what: done in $((SECONDS - start)) s"
    return 0
  fi
  tail -c "+$((from + 1))" "$log" | tail -n 15 | sed 's/^/      | /' >&2
  explain_failure "$what" "$status" <(tail -c "+$((from + 1))" "$log")
}

# explain_failure WHAT STATUS OUTPUT: ends the script with the likely reason, judged by the command's output
explain_failure() {
  local what=$1 status=$2 text
  text=$(cat "$3")
  local full="the whole output is in $PWD/$log"
  if grep -qiE 'No space left on device|enough free space|Errno 28' <<<"$text"; then
    die "$what failed: the disk is full" "$(df -Ph . | awk 'NR == 2 {print $4 " free on " $6}'); the project needs about 5 GB" \
      "make room, then run the same command again; $full"
  fi
  if grep -qiE 'certificate.?verify.?failed|certificate verification failed' <<<"$text"; then
    die "$what failed: the package server's certificate is not trusted" "a proxy that reads along, or a clock that is wrong; here it is $(date)" \
      "add the proxy's certificate (apt: /usr/local/share/ca-certificates and update-ca-certificates; pip: PIP_CERT=FILE), then run the same command again; $full"
  fi
  if grep -qiE 'could not resolve|temporary failure (in name|resolv)|name or service not known|failed to establish a new connection|network is unreachable|connection (timed out|refused|reset)|could not connect|failed to fetch|read timed out' <<<"$text"; then
    die "$what failed: the package server cannot be reached" "no network, or a proxy that is not configured" \
      "connect (apt and pip use their usual proxy settings), then run the same command again; $full"
  fi
  if grep -qiE 'could not get lock|unable to (acquire|lock)' <<<"$text"; then
    die "$what failed: another package manager is at work" "the package database is locked" \
      "wait until it has finished, then run the same command again"
  fi
  if grep -qiE 'unable to locate package|no installation candidate' <<<"$text"; then
    die "$what failed: this system has no such package" "the package names are those of Debian 12; this is $(system_name)" \
      "use Debian 12, or install the equivalents of tools/setup/debian-packages.txt by hand; $full"
  fi
  if grep -qiE 'no matching distribution found' <<<"$text"; then
    die "$what failed: no package for this machine" \
      "the packages are for Python 3.11 on x86-64; this is $(python_version) on $(uname -m), $(system_name)" \
      "use Debian 12 on x86-64, or LIBTORCH_ROOT=FOLDER for your own LibTorch 2.11; $full"
  fi
  if [ "$status" -eq 137 ] || grep -qiE 'killed|memoryerror|cannot allocate memory|out of memory' <<<"$text"; then
    die "$what failed: out of memory" "$(awk '/MemTotal/ {printf "%.1f GB of memory", $2 / 1e6}' /proc/meminfo); a compiler job needs about 1.5 GB" \
      "close other programs, or run it again with EMEND_JOBS=1"
  fi
  die "$what failed (exit status $status)" "see the lines above" "$full"
}

system_name() { (. /etc/os-release 2>/dev/null && printf '%s' "${PRETTY_NAME:-an unknown system}") || uname -s; }

python_version() { /usr/bin/python3 -c 'import sys; print("Python %d.%d" % sys.version_info[:2])' 2>/dev/null || echo "no Python"; }
