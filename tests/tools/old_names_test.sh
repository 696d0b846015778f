#!/bin/sh
# old_names_test.sh KVLAB SOURCE: tests that files of versions before 0.6, and command lines with their names, are
# accepted for one more release. tests/data/old_names was made by such a version.
set -eu
kvlab=$1 source=$2
. "$source/tests/scripts/check.sh"
enter_scratch
cp -r "$source/tests/data/old_names/." .
ln -s "$source/traces/samples/tiny-story" story

# Old names in options, in policies and in a user's headers are accepted. For each of them, one line gives the new name.
"$kvlab" replay --trace story --span decode --budget 16 --layers 0 --policy-source old_peak.hpp \
  --policy 'h2o:ladder=4,column:name=key_norm,old_peak' --out again >said 2>warned || fail "old options: $(cat warned)"
for line in '--span is called --queries now' 'policy h2o:ladder=4 is written h2o:tiers=4 now' \
  'policy column:name=key_norm is written feature:name=key_norm now' 'old_peak.hpp: uses names of versions before 0.6'; do
  grep -qF -- "$line" warned || fail "no line: $line: $(cat warned)"
done
[ "$(wc -l <warned)" -eq 4 ] || fail "warnings: $(cat warned)"
refused "ladder" "$kvlab" report again --ladder 4 # report never had that option

# The command allocate is a mode of plan now, with the same budgets.
"$kvlab" capture --model "$source/engine/models/tiny" --prompt-file "$source/tools/demo/prompt.txt" --teacher-forced \
  --prompt-tokens 60 --max-tokens 120 --device cpu --out new >/dev/null 2>&1
"$kvlab" replay --trace new --policy h2o --budget 16,32,64 --out curves >/dev/null 2>&1
"$kvlab" allocate curves --budget 40 --out before.json >said 2>warned || fail "the old command allocate: $(cat warned)"
[ "$(cat warned)" = "kvlab: allocate is called plan --by head now; the next release will refuse allocate" ] ||
  fail "warnings about allocate: $(cat warned)"
"$kvlab" plan curves --by head --budget 40 --out now.json >said_now 2>warned || fail "plan --by head: $(cat warned)"
[ ! -s warned ] && cmp before.json now.json || fail "the budgets of allocate differ, or a warning: $(cat warned)"
"$kvlab" help allocate 2>/dev/null | grep -qF "Usage: kvlab plan" || fail "help allocate should describe plan"

# The results of an old run are the same under the new names. Numbers may differ in their last digits, because sums may
# be added in another order.
same_results() { # OLD NEW
  [ "$(wc -l <"$1")" -eq "$(wc -l <"$2")" ] && paste -d, "$1" "$2" | awk -F, '{
    for (i = 1; i <= NF / 2; i++) {
      a = $i; b = $(i + NF / 2); d = a > b ? a - b : b - a
      if (a != b && (a + 0 == 0 || d > 1e-6 * (a < 0 ? -a : a))) exit 1
    }
  }'
}
"$kvlab" compare run again --json >compared || fail "an old run beside a new one"
rename='s/oracle_mass/oracle_attention/; s/,column,/,feature,/; s/ladder=/tiers=/; s/code_error/quantization_error/; s/regret_mass/regret_recall/'
sed -e 1d -e "$rename" run/results.csv | sort >before
sed 1d again/results.csv | sort >now
same_results before now || fail "an old run's results"
"$kvlab" replay --trace story --budget 16 --layers 0 --policy h2o:tiers=4 --show code_error,recall --out shown >said 2>warned ||
  fail "a metric by its old name: $(cat warned)"
grep -qF "code_error,recall is called quantization_error,recall now" warned || fail "no line for a metric's old name: $(cat warned)"

# Every kind of old result gives a page.
for result in run eval fidelity task tuned.json; do
  "$kvlab" report $result --out page.html >said 2>&1 || fail "$result: $(cat said)"
  for old in ladder= oracle_mass told_apart; do
    ! grep -q "$old" page.html || fail "$result: its page says $old"
  done
  rm page.html
done

# An old policy file can be used.
"$kvlab" generate --model "$source/engine/models/tiny" --prompt "Once upon a time" --max-new-tokens 40 \
  --policy-file tuned.json --device cpu >said 2>&1 || fail "an old policy file: $(cat said)"

# The time for renaming must be proportional to the length of a file. Tested are a file of 12 MB that repeats one
# setting, and a header with a line of 40 MB.
{ printf '{"format": 1, "x": "'; yes ':ladder=4' | head -n 1200000 | tr -d '\n'; printf '"}'; } >long.json
refused 'unknown key' in_time "$kvlab" generate --model "$source/engine/models/tiny" --prompt x --policy-file long.json
mkdir long
cp run/run.json long
yes , | head -n 40000000 | tr -d '\n' >long/results.csv
refused 'results.csv' in_time "$kvlab" report long --out long.html
