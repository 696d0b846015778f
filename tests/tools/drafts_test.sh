#!/bin/sh
# drafts_test.sh KVLAB SOURCE: tests kvlab generate --draft-policy, its output and its messages.
set -eu
kvlab=$1 source=$2
. "$source/tests/scripts/check.sh"
enter_scratch
tiny=$source/engine/models/tiny
head -c 900 "$source/tools/demo/prompt.txt" >story.txt
generate() { "$kvlab" generate --model "$tiny" --prompt-file story.txt --device cpu --threads 1 "$@"; }
# field EXPRESSION FILE: prints a value of a JSON file.
field() { python3 -c 'import json, sys; print(eval(sys.argv[1], {"j": json.load(open(sys.argv[2])), "len": len}))' "$1" "$2"; }

# With drafts, the greedy text equals that of the full cache. The messages say what was measured.
generate --max-new-tokens 40 >full.txt
generate --max-new-tokens 40 --draft-policy h2o --draft-budget 48 --gamma 3 >drafts.txt 2>drafts.err
cmp full.txt drafts.txt || fail "drafts change the greedy text"
grep -qE 'generate: [0-9.]+ tokens per verification; accepted length [0-9.]+ of 3; acceptance [01]\.[0-9]{3}$' drafts.err ||
  fail "no acceptance: $(cat drafts.err)"
grep -qE 'drafting (does not pay here|is [0-9.]+x as fast).* take [0-9.]+ ms, [0-9.]+ times as long as a step' drafts.err ||
  fail "no times: $(cat drafts.err)"
generate --max-new-tokens 3 --draft-policy h2o --draft-budget 48 >drafts.txt 2>drafts.err
grep -qF "nothing was drafted" drafts.err || fail "a short answer: $(cat drafts.err)"
generate --max-new-tokens 40 --draft-policy full --tiers 4 >drafts.txt 2>/dev/null
cmp full.txt drafts.txt || fail "drafts of a quantized cache change the greedy text"
generate --max-new-tokens 40 --draft-policy h2o --draft-budget 48 --tree 6 >drafts.txt 2>/dev/null
cmp full.txt drafts.txt || fail "a draft tree changes the greedy text"

refused "--gamma: requires --draft-policy" generate --gamma 3
refused "--tree: requires --draft-policy" generate --tree 3
refused "--draft-budget: policy h2o needs one" generate --draft-policy h2o
refused "--policy: with --draft-policy the full cache determines the text" generate --draft-policy h2o --draft-budget 8 \
  --policy sink
refused "--budget: with --draft-policy" generate --draft-policy h2o --draft-budget 8 --budget 9
refused "--gamma: --tree sets the number of draft tokens" generate --draft-policy h2o --draft-budget 8 --gamma 2 --tree 4
refused "--gamma" generate --draft-policy h2o --draft-budget 8 --gamma 0
refused "--gamma" generate --draft-policy h2o --draft-budget 8 --gamma 256
refused "--tree" generate --draft-policy h2o --draft-budget 8 --tree 1
refused "--tree" generate --draft-policy h2o --draft-budget 8 --tree 257
refused "no-such.json" generate --draft-policy h2o --draft-budget 8 --tree no-such.json
refused "draftpolicy" generate --draft-policy draftpolicy --draft-budget 8
for content in '{}' '[]' '{"draft": 3}' '{"draft": {"acceptance_by_child": []}}' \
  '{"draft": {"acceptance_by_child": [0.5], "draft_step_seconds": 1}}' \
  '{"draft": {"acceptance_by_child": [1.5], "draft_step_seconds": 1, "verification": [{"nodes": 4, "seconds": 1}]}}' \
  '{"draft": {"acceptance_by_child": [0.5], "draft_step_seconds": "1", "verification": [{"nodes": 4, "seconds": 1}]}}' \
  '{"draft": {"acceptance_by_child": [0.5], "draft_step_seconds": 1, "verification": [{"nodes": 1e9, "seconds": 1}]}}' \
  '{"draft": {"acceptance_by_child": [0.5], "draft_step_seconds": 1, "verification": [4]}}'; do
  echo "$content" >plan.json
  refused "--tree: plan.json" generate --draft-policy h2o --draft-budget 8 --tree plan.json
done

command -v python3 >/dev/null || { echo "skipped: there is no python3 for the rest"; exit 0; }
generate --max-new-tokens 40 --json >full.json
generate --max-new-tokens 40 --draft-policy h2o --draft-budget 48 --gamma 3 --json >drafts.json
[ "$(field 'j["ids"]' full.json)" = "$(field 'j["ids"]' drafts.json)" ] || fail "drafts change the greedy ids"
[ "$(field 'j["policy"], j["budget_tokens"], j["evictions"]' drafts.json)" = "('full', 'all', 0)" ] ||
  fail "the text is not said to be the full cache's"
[ "$(field 'j["draft"]["policy"], j["draft"]["budget_tokens"], j["draft"]["tree"]' drafts.json)" = \
  "('h2o', 48, [0, 0, 1, 2])" ] || fail "the drafter is not described"
[ "$(field 'len(j["draft"]["acceptance_by_depth"]), len(j["draft"]["acceptance_by_child"])' drafts.json)" = "(3, 1)" ] ||
  fail "acceptance by depth and by child"
# --tree plans a tree from the output of an earlier command.
generate --max-new-tokens 40 --draft-policy h2o --draft-budget 48 --tree drafts.json --json >planned.json
[ "$(field 'j["ids"]' full.json)" = "$(field 'j["ids"]' planned.json)" ] || fail "a planned tree changes the greedy ids"
