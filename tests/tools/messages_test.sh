#!/bin/sh
# messages_test.sh KVLAB SOURCE: tests the output of commands that have little to show, and their messages for common
# mistakes.
set -eu
kvlab=$1 source=$2
. "$source/tests/scripts/check.sh"
enter_scratch
tiny=$source/engine/models/tiny trace=$source/traces/samples/tiny-story text=$source/tools/demo/prompt.txt
# prints TEXT FILE: checks that FILE contains TEXT. silent_of TEXT FILE: checks that it does not.
prints() { grep -qF -- "$1" "$2" || { cat "$2"; fail "$2 should contain '$1'"; }; }
silent_of() { ! grep -qF -- "$1" "$2" || { cat "$2"; fail "$2 should not contain '$1'"; }; }

# A full cache with quantized tiers has an error. The exact full cache has none.
"$kvlab" replay --trace "$trace" --policy full --tiers 4 --out full4 >full4.out
silent_of "loses nothing" full4.out
prints "full:tiers=4 evicts nothing; its quantization costs layer error 0." full4.out
"$kvlab" replay --trace "$trace" --policy full,h2o --tiers 4 --budget 64 --out both >both.out
prints "full:tiers=4 evicts nothing; its quantization costs layer error 0." both.out
"$kvlab" replay --trace "$trace" --policy full --out full >full.out
prints "Only the full cache was replayed; it loses nothing." full.out

# An evaluation of the full cache with quantized tiers needs no --policy.
"$kvlab" eval --model "$tiny" --text "$text" --window 200 --tiers 4 --device cpu >full4.out 2>/dev/null
prints "full:tiers=4" full4.out
"$kvlab" task passkey --model "$tiny" --tiers 4 --words 60 --depth 50% --samples 1 --device cpu >full4.out
prints "full:tiers=4" full4.out
for mode in "--prefill stream" "--positions cache"; do
  refused "it has no effect on the full cache" "$kvlab" eval --model "$tiny" --text "$text" $mode
  refused "it has no effect on the full cache" "$kvlab" task passkey --model "$tiny" $mode
done
for command in "eval --text $text" "generate --prompt hi" "verify --prompt hi"; do
  for option in "--tiers 4" "--tiers 4 --centre prompt" "--budget 32"; do
    refused "--policy-file already sets it" "$kvlab" $command --model "$tiny" --policy-file policy.json $option
  done
done

for bench in decode link replay; do
  refused "--policy: bench $bench does not use it; leave it out" "$kvlab" bench $bench --policy h2o
done

# The bytes of exempt layers are those of one configuration, also if there are several kinds of prefill.
echo '[32, null, 32, 32]' >exempt.json
for modes in dense dense,stream; do
  "$kvlab" replay --trace "$trace" --policy sink --budget @exempt.json --prefill $modes --no-references --out exempt-$modes \
    >exempt.out 2>/dev/null
  prints "sink, @exempt.json, prefill dense, positions cache: at most 0.05 MiB" exempt.out
done

# These budgets keep every token.
"$kvlab" replay --trace "$trace" --policy h2o,tova --budget all --out all >all.out
prints "budget all keeps every token, so no policy evicted anything" all.out
silent_of "layer error" all.out
refused "the run has no budget at which a policy evicts" "$kvlab" deploy all --budget all --out policy.json
refused "the run has no budget at which a policy evicts" "$kvlab" report all --out page.html
refused "the run has no budget at which a policy evicts" "$kvlab" plan all --by head --budget 10% --out budgets.json
refused "the run has no budget at which a policy evicts" "$kvlab" plan full --by head --budget 10% --out budgets.json
refused "--formats: --by head plans budgets from the run, not formats; leave it out" "$kvlab" plan full --by head \
  --budget 10% --formats 8,4 --out budgets.json
refused "--run: it is for --by head, and formats by layer need --trace TRACE; leave it out" "$kvlab" plan full \
  --budget 4bits --out plan.json
refused "--by: 'kv' should be layer or head" "$kvlab" plan full --by kv --budget 10% --out budgets.json
refused "budget: '4bits' should be a whole number of tokens" "$kvlab" plan full --by head --budget 4bits --out budgets.json
refused "--budget: '10%' should be a mean per element" "$kvlab" plan --trace "$trace" --budget 10% --out plan.json
"$kvlab" compare all all >all.out
prints "budget all keeps every token, so no policy evicted anything" all.out
"$kvlab" compare full full >full.out
prints "No policy has the same settings and budget in two of the runs" full.out
silent_of "no policy evicted" full.out
refused "--budget: all keeps every token, so there is nothing to predict" "$kvlab" fidelity --model "$tiny" --text "$text" \
  --policy window,sink,h2o --budget all --out other
"$kvlab" eval --model "$tiny" --text "$text" --window 200 --policy h2o,sink --budget all --device cpu --out evalall \
  >all.out 2>all.err
prints "budget all holds all 200 tokens of the longest sequence, so nothing is evicted" all.err
silent_of "Choice:" all.out
"$kvlab" report evalall --out evalall.html >/dev/null || fail "an evaluation at budget all makes no page"
"$kvlab" task passkey --model "$tiny" --policy h2o,sink --budget all --words 60 --depth 50% --samples 1 --device cpu >all.out
silent_of "Choice:" all.out
[ ! -e page.html ] && [ ! -e budgets.json ] || fail "a refused command left files"
"$kvlab" replay --trace "$trace" --policy h2o --budget 64,100000 --out large >large.out 2>large.err
prints "budget 100000 holds all 1012 tokens of the longest trace, so nothing is evicted" large.err
"$kvlab" eval --model "$tiny" --text "$text" --window 200 --policy h2o --budget 5000 >large.out 2>large.err
prints "budget 5000 holds all 200 tokens of the longest sequence, so nothing is evicted" large.err

# Memory is given for elements of 16 bit, for every dtype in which the engine computes.
"$kvlab" generate --model "$tiny" --prompt-file "$text" --max-new-tokens 20 --policy sink --budget 64 --device cpu \
  >/dev/null 2>bytes.err
grep -qE 'KV 128\.0 of [0-9.]+ KiB in 16 bit \(256\.0 KiB in float32, which the CPU computes in\)' bytes.err ||
  { cat bytes.err; fail "generate does not print the bytes in 16 bit"; }
"$kvlab" generate --model "$tiny" --prompt-file "$text" --max-new-tokens 20 --policy h2o --tiers 4 --budget 64 \
  --device cpu >/dev/null 2>bytes.err
grep -qE 'KV 12[0-9]\.[0-9] of [0-9.]+ KiB in 16 bit' bytes.err || { cat bytes.err; fail "4 bits take more than 16"; }

# A policy that does not fit a budget is left out, and the others run. If none is left, the command is refused.
"$kvlab" replay --trace "$trace" --policy h2o,snapkv --budget 2%,64 --out pairs >pairs.out 2>pairs.err
prints "left out at budget 2%: policy snapkv: sinks=0 and recent=32 tokens exceed the budget of 20 tokens" pairs.err
prints "use snapkv:recent=10" pairs.err
[ "$(wc -l <pairs.err)" -eq 1 ] || fail "one pair is left out, and more than one line says so"
[ "$(cut -d, -f2,4 pairs/results.csv | grep -v oracle | sort -u | grep -c '^[hs]')" -eq 3 ] || fail "other pairs ran"
"$kvlab" replay --trace "$trace" --policy h2o,snapkv --budget 20,64 --out tokens >/dev/null 2>pairs.err
prints "left out at budget 20: policy snapkv" pairs.err
refused "exceed the budget of 20 tokens" "$kvlab" replay --trace "$trace" --policy snapkv --budget 20 --out other
refused "exceed the budget of 20 tokens" "$kvlab" replay --trace "$trace" --policy snapkv,full --budget 2% --out other
"$kvlab" eval --model "$tiny" --text "$text" --window 400 --policy h2o,snapkv --budget 5% >eval.out 2>pairs.err
prints "left out at budget 5%: policy snapkv" pairs.err
prints "h2o" eval.out
silent_of "snapkv" eval.out
# Drafts.
"$kvlab" eval --model "$tiny" --text "$text" --window 200 --policy h2o,sink --budget 40 --draft 3 --out drafts >drafts.out 2>/dev/null
prints "at depth 1 to 3" drafts.out
prints "tokens: expected tokens that one verification yields, at most 4" drafts.out
grep -q '"acceptance_by_depth": \[' drafts/eval.json || fail "eval.json should have acceptance_by_depth"
"$kvlab" report drafts --out drafts.html >/dev/null || fail "an evaluation of drafts makes no page"
for wrong in "--no-full" "--by-tokens" "--queries all"; do
  refused "--draft" "$kvlab" eval --model "$tiny" --text "$text" --policy h2o --budget 40 --draft 3 $wrong
done
refused "--draft: requires --policy" "$kvlab" eval --model "$tiny" --text "$text" --draft 3
refused "fewer than --draft 50; give a longer text or a smaller --draft" \
  "$kvlab" eval --model "$tiny" --text "$text" --window 64 --policy h2o --budget 40 --draft 50
refused "exceed the budget of 20 tokens" "$kvlab" eval --model "$tiny" --text "$text" --window 400 --policy snapkv --budget 5%
for budget in 20 5%; do # the number of tokens of 5% is not known before the prompt
  "$kvlab" verify --model "$tiny" --prompt-file "$text" --max-new-tokens 3 --policy h2o,snapkv --budget $budget --skip-logits \
    --device cpu >pairs.out 2>pairs.err || { cat pairs.err; fail "verify refuses all for one pair"; }
  prints "left out at budget $budget: policy snapkv" pairs.err
  prints "h2o" pairs.out
  silent_of "snapkv" pairs.out
  "$kvlab" task passkey --model "$tiny" --policy h2o,snapkv --budget $budget --words 100 --depth 50% --samples 1 --device cpu \
    --out task$budget >pairs.out 2>pairs.err || { cat pairs.err; fail "task refuses all for one pair"; }
  prints "left out at budget $budget: policy snapkv" pairs.err
  prints "h2o" pairs.out
  silent_of "snapkv" pairs.out
  "$kvlab" fidelity --model "$tiny" --text "$text" --policy window,sink,h2o,snapkv --budget $budget --max-tokens 200 \
    --device cpu --out fidelity$budget >pairs.out 2>pairs.err || { cat pairs.err; fail "fidelity refuses all for one pair"; }
  prints "left out at budget $budget: policy snapkv" pairs.err
  silent_of "snapkv" "fidelity$budget/fidelity.csv"
done
grep -q '"recommendations"' task20/task.json || fail "task.json has no recommendations"
refused "exceed the budget of 20 tokens" "$kvlab" verify --model "$tiny" --prompt hi --policy snapkv --budget 20
refused "exceed the budget of 20 tokens" "$kvlab" task passkey --model "$tiny" --policy snapkv --budget 20 --out other
refused "exceed the budget of 20 tokens" "$kvlab" fidelity --model "$tiny" --text "$text" --policy snapkv --budget 20 --out other

# A long name of a metric is printed above the table.
"$kvlab" deploy pairs --budget 64 --out deployed.json >deploy.out 2>deploy.err
prints "mean: layer error" deploy.out

# A refusal of a tier plan names the policy.
refused "policy sink: tiers 16:4t,4:100%: quantized keys need original positions" \
  "$kvlab" replay --trace "$trace" --policy window,h2o,sink --tiers 16:4t,4:100% --budget 64 --out other

# The windows are longer than the trained context.
cat "$source/tools/texts/carroll-alice.txt" | head -c 9000 >long.txt
"$kvlab" eval --model "$tiny" --text long.txt --window 1100 --policy sink --budget 64 >/dev/null 2>context.err
prints "are longer than the 1024 that the model was trained on" context.err
"$kvlab" eval --model "$tiny" --text long.txt --window 1024 --policy sink --budget 64 >/dev/null 2>context.err
silent_of "trained on" context.err

# For texts that are shorter than twice the default of --prompt-tokens, the default is half of the text.
"$kvlab" fidelity --model "$tiny" --text "$text" --policy window,sink,h2o --budget 32 --max-tokens 200 --out fidelity \
  >/dev/null 2>fidelity.err || { cat fidelity.err; fail "the default of --prompt-tokens does not fit --max-tokens"; }
refused "--prompt-tokens: 512 should be between 1 and 198" "$kvlab" fidelity --model "$tiny" --text "$text" \
  --policy window,sink,h2o --budget 32 --max-tokens 200 --prompt-tokens 512 --out other

# The text is short.
printf 'a' >one.txt
"$kvlab" eval --model "$tiny" --text one.txt --queries all --device cpu >/dev/null 2>one.err
prints "only 1 token was scored, so confidence intervals are wide; use at least 1000 (a longer text, or several)" one.err
"$kvlab" eval --model "$tiny" --text one.txt --queries all --policy h2o --budget 4 --device cpu >/dev/null 2>one.err
[ "$(grep -c "was scored" one.err)" -eq 1 ] || { cat one.err; fail "a warning should be printed once"; }
refused "a sequence of 2 tokens with a prompt of 1 leaves no token to score" \
  "$kvlab" eval --model "$tiny" --text one.txt --device cpu

# These are common mistakes.
for name in streaming_llm StreamingLLM streaming-llm; do
  refused "StreamingLLM is the policy 'sink'" "$kvlab" replay --trace "$trace" --policy $name --budget 64 --out other
done
refused "--budget 'pyramid(20%)'" "$kvlab" replay --trace "$trace" --policy pyramidkv --budget 64 --out other
refused "--budget 'ada(20%)'" "$kvlab" replay --trace "$trace" --policy adakv --budget 64 --out other
refused "for this share write 10%" "$kvlab" replay --trace "$trace" --policy h2o --budget 0.1 --out other
refused "no/such/run: there is no such directory" "$kvlab" report no/such/run --budget 10% --out page.html
refused 'task: "passky" should be passkey, needle, recall or ruler; did you mean passkey?' \
  "$kvlab" task passky --model "$tiny" --policy h2o --budget 64
: >model.gguf
refused "gguf_to_checkpoint.py" "$kvlab" generate --model model.gguf --prompt hi
refused "is the run.json of a replay, not a policy file; make one: \`kvlab deploy RUN" \
  "$kvlab" generate --model "$tiny" --prompt hi --policy-file pairs/run.json
: >empty.txt
refused "--prompt-file empty.txt: is empty; give some text" \
  "$kvlab" capture --model "$tiny" --prompt-file empty.txt --out other
refused "--prompt: is empty" "$kvlab" generate --model "$tiny" --prompt ""
[ ! -e other ] || fail "a refused command left files"

# If texts give no standard error, none is printed.
"$kvlab" tune --model "$tiny" --text "$text" --budget 32 --policy sink:sinks=4,h2o:recent=8,snapkv:recent=40 --task none \
  --max-tokens 150 --out tuned.json >tune.out 2>tune.err || { cat tune.err; fail "tune"; }
prints "left out at budget 32: policy snapkv" tune.err
! grep -qiw nan -- *.out *.err || fail "nan is printed: $(grep -iw nan -- *.out *.err)"
