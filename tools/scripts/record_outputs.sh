#!/usr/bin/env bash
# record_outputs.sh KVLAB OUT [cpu|cuda]: runs a fixed list of commands (captures, replays, end-to-end evaluations,
# generations and verifications), and stores their output in OUT, without times and versions. To show that a change has
# no effect on results, run the script before and after the change, then `diff -r BEFORE AFTER`.
set -euo pipefail
kvlab=$(realpath "$1") out=$2 device=${3:-cpu}
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
mkdir -p "$out"
out=$(realpath "$out")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
model=engine/models/tiny text=tools/demo/prompt.txt sample=traces/samples/tiny-story

# keep NAME COMMAND...: stores standard output, standard error and the exit status.
keep() {
  local name=$1 code=0
  shift
  "$kvlab" "$@" >"$out/$name.txt" 2>"$work/errors" || code=$?
  sed -E "s#$work#WORK#g; s#$PWD#SOURCE#g" "$work/errors" >>"$out/$name.txt"
  echo "exit $code" >>"$out/$name.txt"
  # Replaces times, paths and thread counts, which differ between machines.
  sed -i -E "s#$work#WORK#g; s#$PWD#SOURCE#g; s/[0-9.]+ (s|ms|µs|tokens\/s|tok\/s|KB\/s|MB\/s)\b/N \1/g; s/\"(seconds|[a-z_]*_seconds|tokens_per_second|threads)\": ?[0-9.e+-]+/\"\1\": N/g" "$out/$name.txt"
}
# keep_run NAME RUN: stores a run's metrics and configuration.
keep_run() {
  cp "$2/results.csv" "$out/$1.results.csv"
  sed -E "s#$work#WORK#g; s#$PWD#SOURCE#g; s/\"(kvlab|version)\": ?\"[^\"]*\"/\"\1\": N/g" "$2/run.json" >"$out/$1.run.json"
  [[ ! -f $2/kept.json ]] || cp "$2/kept.json" "$out/$1.kept.json"
}

all=full,window,sink,lru,h2o,streaming_h2o,random,lru:sinks=4:recent=50%,h2o:recent=25%,random:sinks=2
keep capture capture --model $model --prompt-file $text --teacher-forced --prompt-tokens 256 --max-tokens 700 --device cpu \
  --out "$work/trace"
(cd "$work/trace" && sha256sum ./*.safetensors) >"$out/trace.sha256"
keep verify-trace trace verify "$work/trace"
for trace in "$work/trace" $sample; do
  name=$(basename "$trace")
  for positions in original cache; do
    keep "replay-$name-$positions" replay --trace "$trace" --policy $all --budget 16,64,20%,60% --positions $positions \
      --prefill dense,chunk:48,stream --output-error all --out "$work/run-$name-$positions" --device "$device"
    keep_run "replay-$name-$positions" "$work/run-$name-$positions"
  done
done
keep replay-queries replay --trace "$work/trace" --policy $all --budget 5%,10%,33%,128 --queries all --request-threshold 0.05 \
  --seed 7 --layers 0,2 --threads 1 --out "$work/run-queries" --device "$device"
keep_run replay-queries "$work/run-queries"
sed -n '/^```cpp$/,/^```$/p' docs/guides/write-a-policy.md | awk '/^```/ {n++; next} n == 1' >"$work/peak.hpp"
keep replay-source replay --trace "$work/trace" --policy-source "$work/peak.hpp" --policy peak,h2o --budget 48,20% \
  --prefill dense,stream --out "$work/run-source" --device "$device"
keep_run replay-source "$work/run-source"
keep deploy deploy "$work/run-trace-original" --budget 64 --out "$work/policy.json"
# The hash is left out, because it depends on run.json, which contains the name of the temporary folder.
sed -E "s#$work#WORK#g; s/\"hash\": ?\"[0-9a-f]*\"/\"hash\": N/" "$work/policy.json" >"$out/policy.json"
for policy in full window sink lru h2o streaming_h2o random; do
  budget=(--budget 40)
  [[ $policy != full ]] || budget=()
  keep "generate-$policy" generate --model $model --prompt-file $text --max-new-tokens 120 --policy $policy \
    ${budget[@]+"${budget[@]}"} --prefill chunk:64 --turn "And then?" --device "$device"
done
keep generate-file generate --model $model --prompt "It was a dark night" --policy-file "$work/policy.json" --device "$device"
keep eval eval --model $model --text $text --policy $all --budget 32,96 --prefill dense,stream --max-tokens 400 --json \
  --device "$device"
keep eval-source eval --model $model --text $text --policy-source "$work/peak.hpp" --budget 48 --max-tokens 300 --json \
  --device "$device"
for positions in original cache; do
  keep "verify-$positions" verify --model $model --prompt-file $text --policy $all --budget 40 --positions $positions \
    --prefill dense,chunk:32,stream --max-new-tokens 60 --turn "And then?" --device "$device"
done
echo "recorded $(find "$out" -type f | wc -l) files in $out"
