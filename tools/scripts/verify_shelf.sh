#!/usr/bin/env bash
# Runs kvlab verify for every policy that decodes, in every mode, several at a time:
#
#       tools/scripts/verify_shelf.sh KVLAB MODEL OUT [AT_ONCE] [OPTION...]
#
# Modes: original and cache positions; prompts dense, in chunks and as a stream; every=1 and 64; scope=head and layer;
# budgets by KV head (with scope=head, for which they are meant); a second turn. OPTION: further options of verify, such
# as --device cuda. OUT/table has a line for each configuration, OUT/failed those that failed. Exits with 1 unless all
# pass.
set -euo pipefail
kvlab=$1 model=$2 out=$3 at_once=${4:-2}
shift $(($# < 4 ? $# : 4))
source=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
mkdir -p "$out"
: >"$out/table"
: >"$out/failed"
head -c 700 "$source/tools/texts/austen-emma.txt" >"$out/prompt.txt"
python3 - "$model/config.json" >"$out/heads.json" <<'PYTHON'
import json, sys
config = json.load(open(sys.argv[1]))
heads = config["num_key_value_heads"]
print(json.dumps([[(34, 48, 96, 33)[(heads * l + h) % 4] for h in range(heads)] for l in range(config["num_hidden_layers"])]))
PYTHON

# verify POSITIONS BUDGET POLICIES [OPTION...]: verifies these policies in one mode.
verify() {
  local positions=$1 budget=$2 policies=$3 one
  shift 3
  one=$(mktemp "$out/one.XXXXXX")
  if "$kvlab" verify --model "$model" --prompt-file "$out/prompt.txt" \
    --turn "And what did she say to him then, when the door had closed and the carriage was gone?" --policy "$policies" \
    --budget "$budget" --prefill dense,chunk:16,stream --positions "$positions" --json "$@" >"$one" 2>>"$out/failed"; then
    python3 -c '
import json, sys
for c in json.load(open(sys.argv[1]))["configurations"]:
    s, o = c["states"], c["observations"]
    print(c["policy"], c["params"], c["budget"].split("/")[-1], c["prefill"], c["positions"], s["appends"], s["evictions"],
          o["worst_error"], o["tolerance"], o["wrong_requests"], len(c["free_running"]["partings"]))' "$one" >>"$out/table"
  else
    echo "failed: $positions $budget $policies" >>"$out/failed"
  fi
  rm "$one"
}

for policy in $("$kvlab" policies --json | python3 -c '
import json, sys
print(*(p["name"] for p in json.load(sys.stdin)["policies"] if p["decodes"] and p["evicts"]))'); do
  late=$policy:every=64
  case $policy in snapkv | nacl) late=$policy:once=no:every=64 ;; esac
  for positions in original cache; do
    while [ "$(jobs -rp | wc -l)" -ge "$at_once" ]; do sleep 0.05; done
    { verify $positions 48 "$policy,$late,$policy:scope=layer,$late:scope=layer" "$@"
      verify $positions "@$out/heads.json" "$policy,$late" "$@"; } &
  done
done
wait
echo "verify: $(wc -l <"$out/table") configurations passed, $(grep -c '^failed: ' "$out/failed") calls failed"
[ ! -s "$out/failed" ]
