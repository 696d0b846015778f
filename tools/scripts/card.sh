#!/usr/bin/env bash
# All that needs a card, in one go, from a build folder and the sources alone:
#
#   tools/scripts/card.sh BUILD [AT_ONCE] [PATTERN]
#
# BUILD was made with the preset cuda, and ctest's "an engine of its own builds against the installed package" has run
# there: it leaves the package and the examples. AT_ONCE (10) side by side: every test case with the tag [gpu], the
# examples in C; the example in Python by KVLAB_HF_PYTHON's PyTorch, the Python tests by KVLAB_PYTHON's kvlab; last, alone,
# the example of each command's help, which run on the device. PATTERN: those of a name that matches. Prints what failed and
# what was skipped; logs stay in BUILD/card. Exits 1 if anything failed, or nothing passed.
set -euo pipefail

build=$(cd "${1:?BUILD}" && pwd) at_once=${2:-10} pattern=${3:-.}
source=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
logs=$build/card
installed=$build/tests/kernels/installed
export LD_LIBRARY_PATH=$installed/prefix/lib:${LD_LIBRARY_PATH:-} KVLAB_COMMAND=$build/kvlab
rm -rf "$logs" && mkdir -p "$logs"

# NAME|COMMAND of each.
side_by_side() {
  find "$build/tests" -name 'test_*' -type f -executable | sort | while read -r program; do
    { "$program" --list-test-names-only '[gpu]' 2>/dev/null || true; } | sed 's/^ *//; /^$/d' | while read -r name; do
      printf '%s: %s|%q %q\n' "$(basename "$program")" "$name" "$program" "${name//,/\\,}"
    done
  done
  printf 'example %s.c|%q\n' evict "$installed/build/evict" paged "$installed/build/paged"
  printf 'example torch_evict.py|python_with torch %q %q --library %q\n' "${KVLAB_HF_PYTHON:-python3}" \
    "$source/tools/examples/torch_evict.py" "$installed/prefix/lib/libkvlab_kernels.so"
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

# try NAME|COMMAND: a line that begins with passed, skipped or FAILED.
try() {
  local name=${1%%|*} log
  log=$logs/$(md5sum <<<"$1" | cut -c1-12)
  echo "$1" >"$log"
  if ! (cd "$logs" && eval "${1#*|}") >>"$log" 2>&1; then
    echo "FAILED: $name ($log)"
  elif grep -qE '^skipped: .*(no CUDA device|no device)' "$log"; then
    echo "FAILED: $name: it found no card ($log)"
  elif grep -q '^skipped: ' "$log"; then
    echo "skipped: $name: $(grep -m1 '^skipped: ' "$log")"
  else
    echo "passed: $name"
  fi
}
export -f try python_with
export logs

for group in side_by_side alone; do
  # shellcheck disable=SC2016  # for the inner shell
  $group | { grep -E -e "$pattern" || true; } | tr '\n' '\0' | xargs -0 -r -n1 -P "$at_once" bash -c 'try "$0"'
done >"$logs/results"
grep -v '^passed: ' "$logs/results" || true
count() { grep -c "^$1: " "$logs/results" || true; }
echo "$(count passed) passed, $(count FAILED) failed, $(count skipped) skipped"
[[ $(count FAILED) -eq 0 && $(count passed) -gt 0 ]]
