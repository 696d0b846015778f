#!/bin/sh
# hostile_test.sh KVLAB SOURCE SHRINKING_MMAP: inputs that once crashed a command, made it run for ever, or lost a file. Each gives
# exit code 2 and one line.
set -eu
kvlab=$1 source=$2 shrinking=$3
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cp -r "$source/traces/samples/tiny-story" story
ln -s "$source/engine/models/tiny" tiny
fail() { echo "FAILED: $*"; exit 1; }
# refused WORDS COMMAND...: it exits 2 and says WORDS, on one line without a control character.
refused() {
  words=$1 code=0
  shift
  "$@" >out.txt 2>err.txt || code=$?
  [ $code -eq 2 ] || fail "exit code $code, not 2, of: $*: $(cat err.txt)"
  grep -qF -- "$words" err.txt || fail "not '$words', but: $(cat err.txt)"
  [ "$(wc -l <err.txt)" -eq 1 ] || fail "more than one line of: $*: $(cat err.txt)"
  ! grep -q "$(printf '[\001-\011\013-\037]')" err.txt || fail "a control character of: $*"
}

# A path that ends in a slash, as a shell completes it.
for end in / /. //; do
  rm -rf run
  "$kvlab" replay --trace "story$end" --policy h2o,lru --budget 32 --out run >/dev/null 2>&1
  cut -d, -f1 run/results.csv | tail -n +2 | sort -u | grep -qx story || fail "the name of story$end"
  "$kvlab" report run --out page.html >/dev/null
  "$kvlab" deploy run --budget 32 --out policy.json >/dev/null
done

# An output in the place of an input.
cp run/run.json whole.json
refused "--out: run/run.json is part of a trace" "$kvlab" deploy run --budget 32 --out run/run.json
refused "--out: run is what --run reads" "$kvlab" report run --out run
cmp -s run/run.json whole.json || fail "run.json was replaced"

# A NUL behind a whole policy file, control characters in its names, a folder of a name that a terminal would obey.
{ cat policy.json; printf '\0 rubbish'; } >nul.json
refused "is a NUL" "$kvlab" generate --model tiny --prompt hi --policy-file nul.json
sed 's/"name": "tiny"/"name": "tiny\\u001b[2J"/' policy.json >obeyed.json
! cmp -s policy.json obeyed.json || fail "the model's name is not where it was"
refused "without control characters" "$kvlab" generate --model tiny --prompt hi --policy-file obeyed.json
refused "no such folder" "$kvlab" trace info "$(printf 'a\033[2Jb\nc')"

# A scratch folder that is not there.
refused "TMPDIR: " env TMPDIR=/nowhere "$kvlab" report run --out page.html

# A shard that becomes shorter while it is mapped.
if ldd "$kvlab" | grep -q asan; then
  echo "not tried with the address sanitizer: a shard that shrinks"
else
  cp -r story shrinks
  refused "a file became shorter while it was read" env SHRINKS=shrinks/shard-00000 LD_PRELOAD="$shrinking" \
    "$kvlab" trace verify shrinks
fi

echo "hostile inputs: all refused"
