#!/bin/sh
# guides_test.sh KVLAB SOURCE: runs the shell blocks of the guides that need only the bundled model, trace and texts.
set -eu
kvlab=$1 source=$2
. "$source/tests/scripts/check.sh"
enter_scratch
mkdir bin
ln -s "$kvlab" bin/kvlab
PATH=$folder/bin:$PATH

for page in choose-a-policy report evaluate precision-tiers fidelity; do
  mkdir "$page" && cd "$page"
  ln -s "$source/engine" "$source/tools" "$source/traces" .
  awk '/^```$/ {on = 0} on {print} /^```sh$/ {on = 1}' "$source/docs/guides/$page.md" >blocks.sh
  grep -q '^kvlab ' blocks.sh || fail "docs/guides/$page.md: no commands were found"
  sh -e blocks.sh >out 2>&1 || { cat out; fail "docs/guides/$page.md"; }
  cd ..
done
grep -qF "These policies peak over budget and are not ranked: snapkv" choose-a-policy/out ||
  fail "docs/guides/choose-a-policy.md shows a policy over budget, and the output of the command does not"
for file in choose-a-policy/policy.json report/report.html evaluate/eval.html precision-tiers/tiered/results.csv \
  fidelity/fidelity.html; do
  [ -s "$file" ] || fail "$file was not written"
done
