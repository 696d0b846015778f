#!/bin/sh
# comparisons_test.sh KVLAB SOURCE: tests the commands that compare configurations over several texts. If two texts have
# tokens in common, a command must count these only once and name both texts. It must warn if texts are longer than the
# model's trained context. If the full cache fails a task, configurations must be compared by log p.
set -eu
kvlab=$1 source=$2
. "$source/tests/scripts/check.sh"
enter_scratch
tiny=$source/engine/models/tiny
prints() { grep -qF -- "$1" "$2" || { cat "$2"; fail "$2 should contain '$1'"; }; }
silent_of() { ! grep -qF -- "$1" "$2" || { cat "$2"; fail "$2 should not contain '$1'"; }; }

# The texts are a text, a copy of it, and the text with a few more words.
head -c 1500 "$source/tools/texts/carroll-alice.txt" >a.txt
cp a.txt copy.txt
{ cat a.txt; echo " and another word"; } >longer.txt
eval_texts() { "$kvlab" eval --model "$tiny" --text "$@" --policy h2o,sink --budget 32 --prompt-tokens 50 --device cpu; }
eval_texts a.txt >alone.out 2>/dev/null
eval_texts a.txt copy.txt >copy.out 2>copy.err
prints "a and copy have text in common; a text counts only once" copy.err
cmp alone.out copy.out || fail "a copy of a text changes the evaluation: $(cat copy.out)"
eval_texts a.txt longer.txt >longer.out 2>longer.err
prints "longer and a have text in common; a text counts only once" longer.err
prints "1 text," longer.out

common="a and longer have text in common; a text counts only once"
few="--text a.txt longer.txt --max-tokens 200 --prompt-tokens 50 --device cpu"
"$kvlab" fidelity --model "$tiny" $few --policy window,sink,h2o --budget 32 --out fidelity >fidelity.out 2>fidelity.err
prints "$common" fidelity.err
! grep -q '^longer,' fidelity/fidelity.csv || fail "fidelity counts a text that another text contains"
"$kvlab" tune --model "$tiny" $few --policy h2o,sink --budget 32 --task none --out tuned.json >tune.out 2>tune.err
prints "$common" tune.err

# Two traces of one text, with prompts of different lengths, are replayed. The confirmation of a deployment runs over
# texts that have most tokens in common.
for prompt in 60 61; do
  "$kvlab" capture --model "$tiny" --prompt-file a.txt --teacher-forced --prompt-tokens $prompt --max-tokens 200 --device cpu \
    --out of$prompt >/dev/null 2>&1
done
"$kvlab" replay --trace of60 of61 --policy h2o,sink --budget 32 --out run >run.out 2>run.err
prints "of60 and of61 have the same text; a text counts only once, so comparisons leave of61 out" run.err
prints "1 text, " run.out
"$kvlab" deploy run --budget 32 --confirm 2 --model "$tiny" --text a.txt longer.txt --max-tokens 200 --task none --device cpu \
  --out policy.json >deploy.out 2>deploy.err
prints "$common" deploy.err

# Texts are longer than the trained context. (messages_test.sh does this with `kvlab eval`.)
beyond="are longer than the 1024 that the model was trained on"
for length in 1024 1030; do
  "$kvlab" fidelity --model "$tiny" --text "$source/tools/texts/carroll-alice.txt" --policy window,sink,h2o --budget 32 \
    --max-tokens $length --prompt-tokens 1000 --device cpu --out fidelity$length >/dev/null 2>fidelity$length.err
  "$kvlab" tune --model "$tiny" --text "$source/tools/texts/carroll-alice.txt" --policy sink,h2o --budget 32 \
    --max-tokens $length --prompt-tokens 1000 --task none --device cpu --out tuned$length.json >/dev/null 2>tune$length.err
done
for command in fidelity tune; do
  prints "sequences of up to 1030 tokens $beyond" ${command}1030.err
  prints "give --max-tokens 1024 or less" ${command}1030.err
  silent_of "trained on" ${command}1024.err
done

# With `prompt` the budget counts the tokens after the prompt, so the deployed budget is the requested one.
"$kvlab" replay --trace of60 --policy h2o:prompt,window:prompt --budget 32 --out keeps >/dev/null 2>&1
"$kvlab" deploy keeps --budget 32 --out keeps.json >/dev/null 2>&1
grep -q '"budget": 32,' keeps.json || fail "a deployed budget includes the prompt: $(cat keeps.json)"

# A share of the bytes is deployed in bytes, which a tier plan uses entirely.
"$kvlab" replay --trace of60 --policy h2o,window --tiers 4 --budget 10%bytes --out bytes >/dev/null 2>&1
"$kvlab" deploy bytes --budget 10%bytes --out bytes.json >/dev/null 2>&1
grep -qE '"budget": "[0-9]+(B|KiB)",' bytes.json || fail "a budget in bytes is deployed in tokens: $(cat bytes.json)"

# Only the full cache in 16 bit is the full cache with which memory is compared.
"$kvlab" replay --trace of60 --policy h2o --budget 32 --out plain >plain.out 2>/dev/null
"$kvlab" replay --trace of60 --policy full,h2o --tiers 4 --budget 32 --out four >four.out 2>/dev/null
[ "$(grep '^Full cache' plain.out)" = "$(grep '^Full cache' four.out)" ] || fail "a 4-bit cache is called the full cache"

# Runs that scored other queries, tokens or samples are not paired.
"$kvlab" replay --trace of60 --policy h2o --budget 32 --queries all --out all >/dev/null 2>&1
"$kvlab" replay --trace of60 --policy h2o --budget 32 --layers 1 --out layer >/dev/null 2>&1
for other in all layer; do
  "$kvlab" compare plain $other >pairs.out 2>pairs.err
  prints "the runs did not score the same: plain scored queries of decoded tokens, all layers" pairs.err
  prints "differences cannot be paired" pairs.out
done

# The difference is that of the last and the first run, also if only other runs share a configuration.
"$kvlab" replay --trace of60 --policy window --budget 32 --out windows >/dev/null 2>&1
"$kvlab" replay --trace of60 --policy window,h2o --budget 32 --out both >/dev/null 2>&1
"$kvlab" compare both windows plain >three.out 2>three.err
grep -q '^window .* not in both$' three.out || { cat three.out; fail "a difference is not that of the last run and the first"; }
grep -q '^h2o .* not significant$' three.out || { cat three.out; fail "the first and the last run both have h2o"; }

for tokens in 150 200; do
  "$kvlab" eval --model "$tiny" --text a.txt --policy h2o --budget 32 --max-tokens $tokens --device cpu --out eval$tokens \
    >/dev/null 2>&1
done
"$kvlab" compare eval150 eval200 >pairs.out 2>pairs.err
prints "differences cannot be paired" pairs.out
for samples in 2 3; do
  "$kvlab" task recall --model "$tiny" --policy window --budget 16 --words 12 --samples $samples --device cpu \
    --out recall$samples >/dev/null 2>&1
done
"$kvlab" compare recall2 recall3 >pairs.out 2>pairs.err
prints "differences cannot be paired" pairs.out
silent_of "not significant" pairs.out

# The full cache answers no question right, so the share of right answers is 0 for every configuration. Therefore log p
# decides, also on the page.
"$kvlab" task passkey --model "$tiny" --policy h2o,sink --budget 32 --words 60 --depth 50% --samples 8 --device cpu --out task \
  >task.out 2>task.err
prints "compare log p only" task.out
prints "Choice: highest mean of log p of the right answer" task.out
silent_of "have equal means" task.out
grep -q '"metric": "log p of the right answer"' task/task.json || fail "task.json recommends by another metric"
"$kvlab" report task --out task.html >/dev/null
grep -qE '"headline": ?"log_likelihood"' task.html || fail "the page of a task begins with shares that are all 0"

! grep -qiw nan -- *.out *.err || fail "nan is printed: $(grep -iw nan -- *.out *.err)"
