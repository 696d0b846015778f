#!/bin/sh
# first_hour_test.sh KVLAB SOURCE: runs the commands of docs/start/first-hour.md unchanged, twice, in a folder that
# looks like a checkout. Then it runs the quickstart of the README, and commands at which new users once failed.
set -eu
kvlab=$1 source=$2
. "$source/tests/scripts/check.sh"
enter_scratch
ln -s "$source/engine" "$source/tools" "$source/traces" .
mkdir build
ln -s "$kvlab" build/kvlab
PATH=$folder/build:$PATH

# has TEXT FILE: checks that FILE contains TEXT.
has() { grep -qF -- "$1" "$2" || { cat "$2"; fail "$2 should contain '$1'"; }; }
# hour.sh has all shell blocks of the page.
awk '/^```$/ {on = 0} on {print} /^```sh$/ {on = 1}' "$source/docs/start/first-hour.md" >hour.sh
[ "$(grep -c '^kvlab ' hour.sh)" -gt 10 ] || fail "the commands of docs/start/first-hour.md were not found"
for round in first second; do
  sh -e hour.sh >"$round.out" 2>&1 || { cat "$round.out"; fail "the first hour, the $round time"; }
done
grep -Eq '^kvlab generate: evicted [1-9][0-9]* tokens of each KV head; KV [0-9.]+ of [0-9.]+ KiB' first.out ||
  fail "the policy file evicted nothing"
! grep -q '0\.[0-9]*99999' first.out || fail "a parameter has sixteen digits"

# Runs the quickstart of the README, with the files of the checkout instead of those of an installed wheel.
awk '/^<!-- try_wheel.sh -->$/ {marked = 1; next}
  on && /^```$/ {exit} on {print} marked && /^```sh$/ {on = 1} {marked = 0}' "$source/README.md" |
  sed 's/^share=.*/share=./' >quickstart.sh
[ "$(grep -c '^kvlab ' quickstart.sh)" = 4 ] || fail "README's quickstart was not found"
sh -e quickstart.sh >quickstart.out 2>&1 || { cat quickstart.out; fail "README's quickstart"; }
[ -s report.html ] && [ -s policy.json ] || fail "README's quickstart left no page or no policy"

tiny=engine/models/tiny run=hour/run
kvlab task passkey --model $tiny --policy window,h2o --budget 64,128 --words 100 --depth 50% --samples 2 >task.out
has "The full cache answers no question right" task.out
kvlab help replay >help.out
has "Usage: kvlab replay" help.out
kvlab help help >help.out
has "New here?" help.out
kvlab trace --help >trace.out
! grep -q -e --device -e --action trace.out || fail "trace --help lists options that it does not have"
kvlab replay --trace hour/trace --policy "window, h2o" --budget "64, 128" --show recall --out spaces >spaces.out
kvlab replay --trace hour/trace --policy full --budget 64 --out full >full.out
! grep -q recall full.out || fail "replay --policy full prints empty tables"
has "loses nothing" full.out
has "is a bound for recall and misses only" spaces.out
refused "--budget 128" kvlab generate --model $tiny --policy h2o --prompt x
refused "Hugging Face hub" kvlab generate --model Qwen/Qwen2-0.5B --prompt x
refused "make it first" kvlab replay --trace hour/trace --policy window --budget 64 --out nowhere/x
kvlab verify --model $tiny --prompt-file tools/demo/prompt.txt --policy-file hour/policy.json >verify.out
has "sink:sinks=4:recent=0 budget 97" verify.out
refused "budget: --policy-file already sets it" kvlab verify --model $tiny --prompt x --policy-file hour/policy.json --budget 9
has "most live tokens" hour/report.html
has "lowest mean of residual error" hour/report.html
printf 'ab\377\376' >bytes.txt
kvlab generate --model $tiny --prompt-file bytes.txt --max-new-tokens 1 >out 2>err
has "not valid UTF-8 at byte 2" err
kvlab generate --model $tiny --prompt x --policy sink --budget 64 --max-new-tokens 2 >out 2>err
has "evicted nothing" err
echo 'abc de fg' >nine.txt
kvlab eval --model $tiny --text nine.txt --policy sink:sinks=1 --budget 4 >out 2>err
has "confidence intervals are wide" err
kvlab eval --model $tiny --text tools/demo/prompt.txt --max-tokens 200 --policy sink --budget 24 >dense.out
has "over decoded queries" dense.out

# Replays a user's policy (the header in docs/guides/write-a-policy.md) and then runs the next command that each command
# prints.
awk '/^```cpp$/ {on = 1; next} on && /^```$/ {exit} on' "$source/docs/guides/write-a-policy.md" >peak.hpp
kvlab replay --trace hour/trace --policy-source peak.hpp --budget 64 --out mine >/dev/null
kvlab deploy mine --budget 64 --policy-source peak.hpp --out mine.json >deploy.out
has "--policy-file mine.json --policy-source peak.hpp" deploy.out
kvlab generate --model $tiny --prompt x --policy-file mine.json --policy-source peak.hpp --max-new-tokens 2 >out 2>err

# Comparisons and shell completion.
kvlab compare $run spaces --out compare.html >compare.out
has "(95% CI)" compare.out
has "not significant" compare.out
has "No policy has the same" compare.out
kvlab compare spaces spaces >same.out
has "h2o  " same.out
! grep -qE "sinks=0|recent=50%" same.out || fail "a row shows default settings"
! grep -q "No policy has the same" same.out || fail "compare does not find the policies that two runs share"
refused "of one kind" kvlab compare $run hour/eval
refused "two or more" kvlab compare $run
refused "not every run has" kvlab compare $run spaces --metric nonsense
for shell in bash zsh fish; do
  kvlab manual $shell >completion
  for word in replay request-threshold compare; do has "$word" completion; done
done
kvlab manual bash | bash -n
refused "bash, zsh or fish" kvlab manual csh
for figure in residual_error nll_recall residual_error_by_head; do
  has "vega-lite/v5.json" hour/figures/$figure.vl.json
done
refused "exists" kvlab report $run --figures hour/figures --out again.html
[ ! -e again.html ] || fail "a refused report left a page"

# README and docs name only existing commands and options.
(cd "$source" && sed -e ':a' -e '/\\$/N; s/\\\n//; ta' README.md docs/*.md docs/*/*.md docs/*/*/*.md) |
  grep -oE '(^|[ `])kvlab [a-z]+ [^`#|┤─]*' | sed 's/^[ `]*kvlab //' | sort -u >named.txt
[ "$(wc -l <named.txt)" -gt 50 ] || fail "no commands were found in docs"
while read -r command words; do
  kvlab help "$command" >help.out 2>&1 || continue # a word of the text; the next loop finds unknown commands
  for option in $(echo "$words" | grep -oE -e '--[a-z][a-z-]*'); do
    grep -qE -e "(^|[^a-z-])$option([^a-z-]|\$)" help.out || fail "docs: kvlab $command has no $option"
  done
done <named.txt
for command in $(cd "$source" && cat README.md docs/*.md docs/*/*.md docs/*/*/*.md | sed -nE 's/.*(`|^    )kvlab ([a-z]+).*/\2/p' | sort -u); do
  kvlab help "$command" >help.out 2>&1 || fail "docs: there is no kvlab $command"
done

# Options that would have no effect are refused, and lists may have spaces.
refused "model: requires --confirm" kvlab deploy $run --budget 64 --model $tiny --out no.json
refused "words: --task none evaluates no task" kvlab tune --model $tiny --text tools/demo/prompt.txt --budget 64 --task none --words 7 --out no.json
refused "threads: is for" kvlab trace info hour/trace --threads 2
refused "budget: the full cache has no budget" kvlab generate --model $tiny --prompt x --policy full --budget 64
refused "prefill: it has no effect on the full cache" kvlab eval --model $tiny --text nine.txt --prefill stream
refused "window: --stream scores" kvlab eval --model $tiny --text nine.txt --stream --window 32
refused "prefill: --policy-file already sets it" kvlab eval --model $tiny --text nine.txt --policy-file hour/policy.json --prefill stream
kvlab replay --trace hour/trace --layers "0, 1" --policy "window, sink" --budget "32, 64" --out listed >listed.out
has "window" listed.out

# Without vl-convert, figures are written as Vega-Lite only, and one line says so. With it, they are pictures, too.
mkdir bin
printf '#!/bin/sh\nexit 127\n' >bin/vl-convert
cp bin/vl-convert bin/python3
chmod +x bin/vl-convert bin/python3
PATH=$folder/bin:$PATH kvlab report $run --figures spec --out spec.html >out 2>err
has "vl-convert is not installed" err
[ "$(grep -vc "libjs-vega" err)" = 1 ] && [ -s spec/frontier.vl.json ] && [ ! -e spec/frontier.svg ] || fail "figures without vl-convert"
printf '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; echo drawn >"$2"\n' >bin/vl-convert
PATH=$folder/bin:$PATH kvlab report hour/eval --figures pictures --out spec.html >out 2>err
[ "$(grep -vc "libjs-vega" err)" = 0 ] && [ -s pictures/kl.svg ] && [ -s pictures/frontier.png ] || fail "figures of an evaluation"

# Without Vega, a report has its data and the scripts that make its tables, and one line says what is missing.
for what in $run hour/eval hour/tuned.json; do
  KVLAB_VEGA=/nowhere kvlab report $what --out bare.html >out 2>err
  has "libjs-vega" err
  has "libjs-vega" bare.html
  has 'id="data"' bare.html
  [ "$(wc -l <err)" = 1 ] && ! grep -q "vegaModule(" bare.html || fail "a page without Vega has its modules"
done
KVLAB_VEGA=/nowhere kvlab compare $run spaces --out bare.html >out 2>err
has "libjs-vega" err
refused "holds no successive halving" kvlab report hour/policy.json --out none.html
cp -r hour/eval broken && echo 'all,h2o,,64' >>broken/eval.csv
refused "eval.csv: line" kvlab report broken --out none.html
mkdir other
sed 's/}$/ }/' $tiny/tokenizer.json >other/tokenizer.json
echo >>other/tokenizer.json
refused "is not the model of trace" kvlab report $run --model other --out none.html
[ ! -e none.html ] || fail "a refused report left a page"
