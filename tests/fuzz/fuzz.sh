#!/usr/bin/env bash
# fuzz.sh BINARIES CORPORA OUT SECONDS [TARGET...]: runs one target after another on all cores, SECONDS seconds each.
# New inputs go to OUT/corpora/TARGET, and inputs that crash a target go to OUT/crashes. Prints one line per target.
# Exits with 1 if a target crashed. Inputs have at most 64 KiB. A target crashes if an input takes more than five
# seconds or allocates more than 64 MiB at once.
set -euo pipefail
binaries=$1 corpora=$2 out=$3 seconds=$4
shift 4
[[ $# -gt 0 ]] || set -- $(cd "$binaries" && ls -d fuzz_* | grep -v '\.' | sed 's/^fuzz_//')
cores=$(nproc)
limits=(-timeout=5 -malloc_limit_mb=64 -rss_limit_mb=2048 -max_len=65536)
export ASAN_OPTIONS=quarantine_size_mb=16:malloc_context_size=0
mkdir -p "$out/crashes" "$out/logs"

# worker TARGET NUMBER: runs the target until the time is over. If an input crashes it, it is started again.
worker() {
  local target=$1 number=$2 end=$((SECONDS + seconds)) left
  for ((run = 0; run < 20; ++run)); do
    left=$((end - SECONDS))
    ((left > 0)) || break
    "$binaries/fuzz_$target" "${limits[@]}" -max_total_time=$left -print_final_stats=1 -reload=1 -entropic=0 \
      ${dictionary:+"-dict=$dictionary"} "-artifact_prefix=$out/crashes/$target-" \
      "$out/corpora/$target" "$corpora/$target" >"$out/logs/$target.$number.$run" 2>&1 && break
  done
}

dictionary=
[[ ! -e $binaries/words.dict ]] || dictionary=$binaries/words.dict
failed=0
for target in "$@"; do
  [[ -x $binaries/fuzz_$target ]] || { echo "fuzz.sh: $target: $binaries has no fuzz_$target" >&2; exit 2; }
  rm -f "$out/logs/$target".* "$out/crashes/$target"-*
  mkdir -p "$out/corpora/$target"
  began=$SECONDS
  for ((number = 0; number < cores; ++number)); do worker "$target" "$number" & done
  wait
  took=$((SECONDS - began > 0 ? SECONDS - began : 1))
  # A process that crashed did not print its number of executions, so the number in its last line of progress is used.
  count=$(for log in "$out/logs/$target".*; do
    grep -hoP '(?<=number_of_executed_units: )\d+' "$log" || grep -hoP '^#\K\d+' "$log" | tail -1
  done | awk '{ sum += $1 } END { printf "%d", sum }')
  crashes=$(find "$out/crashes" -name "$target-*" | wc -l)
  echo "$target: $count executions, $((count / took)) a second, $crashes crashes"
  [[ $count -gt 0 && $crashes -eq 0 ]] || failed=1
done
exit $failed
