#!/usr/bin/env bash
# Runs everything that needs a GPU, from a build folder and the sources alone:
#
#       tools/scripts/gpu_tests.sh BUILD [AT_ONCE] [PATTERN]
#
# BUILD is a build with the preset cuda. ctest's test "a separate engine builds against the installed package" must have
# run there, because it makes the package and the examples.
#
# It runs every test case with the tag [gpu], the examples in C, the example in Python and the Python tests with
# KVLAB_PYTHON's kvlab and PyTorch. AT_ONCE (10) of them run in parallel. The examples in the commands' help run on the
# device after the others, because they need it alone. PATTERN: run only tests whose names match.
#
# It prints a line with the time of each, slowest first. Logs stay in BUILD/gpu-tests. It exits with 1 if anything
# failed, if no test with the tag passed, or if a program whose sources have the tag is missing or does not list all of
# their cases. It works with Catch2 2 and 3.
set -euo pipefail

build=$(cd "${1:?BUILD}" && pwd) at_once=${2:-10} pattern=${3:-.}
source=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
logs=$build/gpu-tests
installed=$build/tests/kernels/installed
export LD_LIBRARY_PATH=$installed/prefix/lib:${LD_LIBRARY_PATH:-} KVLAB_COMMAND=$build/kvlab
export XDG_CACHE_HOME=$build/test-cache  # cache of NVRTC's output, shared with ctest's tests
# shellcheck source=tools/scripts/gpu_cases.sh
source "$source/tools/scripts/gpu_cases.sh"
rm -rf "$logs" && mkdir -p "$logs"

# These functions print NAME|COMMAND of each test.
tagged() {
  list_gpu_cases "$build" "$source" | while IFS='|' read -r program name; do
    printf '%s: %s|run_gpu_case %q %q\n' "$(basename "$program")" "${name//|/ }" "$program" "$name"
  done
}
others() {
  printf 'example %s.c|%q\n' evict "$installed/build/evict" paged "$installed/build/paged" batch "$installed/build/batch"
  printf 'python engine.py|python_with torch,kvlab %q %q --layers 8\n' "${KVLAB_PYTHON:-python3}" \
    "$source/tools/examples/engine.py"
  for tests in evicting_cuda ops replay; do
    printf 'python test_%s.py|python_with torch,pytest,kvlab %q -m pytest -q -p no:cacheprovider %q\n' $tests \
      "${KVLAB_PYTHON:-python3}" "$source/tests/python/test_$tests.py"
  done
}
alone() {
  printf 'the examples of --help|sh %q %q %q\n' "$source/tests/tools/examples_test.sh" "$build/kvlab" "$source"
}

# python_with MODULES PYTHON WORD...
python_with() {
  local modules=$1 python=$2
  shift 2
  "$python" -c "import $modules" 2>/dev/null || { echo "skipped: $python cannot import $modules"; return; }
  "$python" "$@"
}

# try NAME|COMMAND: runs a test and prints a line "SECONDS passed|skipped|FAILED: NAME...".
try() {
  local name=${1%%|*} log began=${EPOCHREALTIME/[.,]/} status=0 result
  log=$logs/$(md5sum <<<"$1" | cut -c1-12)
  echo "$1" >"$log"
  (cd "$logs" && eval "${1#*|}") >>"$log" 2>&1 || status=$?
  if [[ $status -ne 0 ]]; then
    result="FAILED: $name ($log)"
  elif grep -qE '^skipped: .*(no CUDA device|no device)' "$log"; then
    result="FAILED: $name: it found no GPU ($log)"
  elif grep -q '^skipped: ' "$log"; then
    result="skipped: $name: $(grep -m1 '^skipped: ' "$log")"
  else
    result="passed: $name"
  fi
  local took=$(((${EPOCHREALTIME/[.,]/} - began) / 100000))
  printf '%5d.%d s  %s\n' $((took / 10)) $((took % 10)) "$result"
}
export -f try python_with run_gpu_case case_pattern catch2_major
export logs

tagged >"$logs/tagged" || exit 1
[[ -s $logs/tagged ]] || { echo "no test program of $build has a case with the tag [gpu]" >&2; exit 1; }
others >>"$logs/tagged"
alone >"$logs/alone"
for group in tagged alone; do
  # shellcheck disable=SC2016  # for the inner shell
  { grep -E -e "$pattern" "$logs/$group" || true; } | tr '\n' '\0' |
    xargs -0 -r -n1 -P "$at_once" bash -c 'try "$0"'
done >"$logs/results"
sort -rn "$logs/results"
count() { grep -cE "^ *[0-9.]+ s  $1: " "$logs/results" || true; }
echo "$(count passed) passed, $(count FAILED) failed, $(count skipped) skipped;" \
  "$(count 'passed: test_[^ ]*') of $(grep -c '|run_gpu_case ' "$logs/tagged") GPU test cases passed"
[[ $(count FAILED) -eq 0 && $(count 'passed: test_[^ ]*') -gt 0 ]]
