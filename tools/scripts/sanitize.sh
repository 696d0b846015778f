#!/usr/bin/env bash
# Runs compute-sanitizer on every test case with the tag [gpu], several at a time:
#
#       tools/scripts/sanitize.sh BUILD TOOL [AT_ONCE] [SECONDS] [PROGRAMS]
#
# BUILD contains tests/. TOOL is memcheck, racecheck, initcheck or synccheck. At most AT_ONCE (4) programs run at the
# same time, because the tool keeps a copy of each program's device memory, and more copies would fill the GPU. A case
# that takes longer than SECONDS (300) is stopped. Cases that only repeat others ("200 times") are left out. PROGRAMS: a
# pattern of program names.
#
# It prints a line for each case that is not clean, then the number of clean cases. Logs stay in BUILD/sanitize/TOOL. It
# exits with 1 unless all cases are clean.
#
# The environment variable COMPUTE_SANITIZER names another compute-sanitizer than the toolkit's, such as the one in
# PyPI's package nvidia-cuda-sanitizer-api. A newer one is needed for initcheck: before 2025.4 it does not follow copies
# by the copy engine. See docs/internals/measurements/README.md.
set -euo pipefail

build=${1:?BUILD} tool=${2:?TOOL} at_once=${3:-4} seconds=${4:-300} programs=${5:-.}
build=$(cd "$build" && pwd)
sanitizer=${COMPUTE_SANITIZER:-compute-sanitizer}
# Excludes kernels of other libraries. States the number of barriers, because the compiler counts only those of type
# cuda::barrier.
options="--tool $tool --error-exitcode 77"
[[ $tool == memcheck ]] || options+=" --kernel-name kns=kvlab --num-cuda-barriers 32"
logs=$build/sanitize/$tool
source=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# shellcheck source=tools/scripts/gpu_cases.sh
source "$source/tools/scripts/gpu_cases.sh"
rm -rf "$logs" && mkdir -p "$logs"

# Prints PROGRAM|CASE of each test case, in the order of the folders. Excludes test_api_calls, which uses the profiling
# interface that the tools occupy, and test_device_lost, which faults on purpose.
cases() {
  list_gpu_cases "$build" "$source" >"$logs/listed" || exit 1
  grep -vE '^[^|]*/test_(api_calls|device_lost)[|]|200 ' "$logs/listed" | grep -E -e "^[^|]*($programs)[^|]*[|]" || true
}

check() {
  program=${1%%|*} name=${1#*|}
  log=$logs/$(basename "$program").$(md5sum <<< "$name" | cut -c1-8)
  # shellcheck disable=SC2086  # options are words
  if (cd "$(dirname "$program")" && timeout -s KILL "$seconds" "$sanitizer" $options \
    "$program" "$(case_pattern "$name")") > "$log" 2>&1; then
    echo "clean: $(basename "$program"): $name"
  else
    case $? in
      137) why="cut short" ;;
      77) why=$(grep -m1 -o -E '(Halving reported|Uninitialized|Invalid|Barrier error|Internal Sanitizer Error).{0,60}' "$log" || echo "named") ;;
      *) why="the test itself failed" ;;
    esac
    echo "$(basename "$program"): $name: $why ($log)"
  fi
}
export -f check case_pattern
export seconds logs sanitizer options

# shellcheck disable=SC2016  # for the inner shell
cases > "$logs/cases"
tr '\n' '\0' < "$logs/cases" | xargs -0 -n1 -P "$at_once" bash -c 'check "$0"' > "$logs/results"
grep -v '^clean: ' "$logs/results" || true
clean=$(grep -c '^clean: ' "$logs/results" || true)
echo "$tool: $clean of $(wc -l < "$logs/results") cases are clean"
[[ $clean -gt 0 && $clean -eq $(wc -l < "$logs/results") ]]
