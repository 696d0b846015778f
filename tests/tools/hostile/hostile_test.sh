#!/bin/sh
# hostile_test.sh KVLAB SOURCE TRUNCATING_MMAP: tests inputs that once crashed a command, made it run for ever, or made
# it lose a file. Each must give exit code 2 and one line.
set -eu
kvlab=$1 source=$2 truncating=$3
. "$source/tests/scripts/check.sh"
enter_scratch
cp -r "$source/traces/samples/tiny-story" story
ln -s "$source/engine/models/tiny" tiny

# Paths end in a slash, which a shell's completion adds.
for end in / /. //; do
  rm -rf run
  "$kvlab" replay --trace "story$end" --policy h2o,lru --budget 32 --out run >/dev/null 2>&1
  cut -d, -f1 run/results.csv | tail -n +2 | sort -u | grep -qx story || fail "story$end should be named story"
  "$kvlab" report run --out page.html >/dev/null
  "$kvlab" deploy run --budget 32 --out policy.json >/dev/null
done

# Invalid tier plans.
for tier_plan in 8:25%,4:50%:100% 4:100%,8:0% 5 16:16t; do
  refused "tiers" "$kvlab" replay --trace story --policy h2o --budget 32 --tiers "$tier_plan" --out other
done
# Invalid values of --centre.
for centre in model.safetensors /dev/zero prompt:4; do
  refused "centre" "$kvlab" replay --trace story --policy h2o --budget 32 --tiers 4 --centre "$centre" --out other
done
# Invalid centre files: missing, a folder, endless, empty, of another kind, of another model, with NaN, and too large.
centred() { "$kvlab" replay --trace story --policy full --tiers 4 --centre "@$1" --out other; }
"$kvlab" plan --trace story --centre-out centre >/dev/null
centred centre >/dev/null 2>&1 || fail "the centre file of a trace is refused"
rm -r other
refused "none: cannot open" centred none
for place in . /dev/zero; do refused "is not a regular file" centred $place; done
: >empty
refused "empty: is 0 bytes long" centred empty
refused "is not of a centre file" centred story/shard-00000.safetensors
refused "cannot contain ':' or ','" centred a:b
sed 's/\[2,64\]/[9,64]/' centre >shape
refused "but F32 [9, 64] takes 2304" centred shape
sed 's/layers.3/layers.7/' centre >layer
refused "layer: layer 3 of the model needs vectors of shape [2, 64], and the file has none" centred layer
{ head -c -4 centre; printf '\377\377\377\177'; } >nan
refused "layers.3.centre has nan at [1, 63]; finite numbers are expected" centred nan
cp centre large
truncate -s 100G large
refused "large: is larger than 64 MiB" centred large
refused "exists and is not a centre file" "$kvlab" plan --trace story --centre-out story/tokens.safetensors
refused "--centre-out: centre is also the input of --centre" "$kvlab" plan --trace story --budget 4bits --out plan.json \
  --centre @centre --centre-out centre
refused "--formats: --centre-out alone makes no plan" "$kvlab" plan --trace story --formats 8 --centre-out centre
refused "no plan of --tiers quantizes keys" "$kvlab" replay --trace story --policy h2o --budget 32 --centre prompt --out other
refused "use --prefill dense or chunk:128" "$kvlab" replay --trace story --policy h2o --budget 32 --tiers 4 \
  --centre prompt --prefill stream --out other
echo '{"format": 1, "tiers": "4", "layers": [0], "centre": "prompt"}' >plan.json
refused "the plan is for centred keys; add --centre prompt" "$kvlab" replay --trace story --policy full --tiers @plan.json --out other
refused "does not centre keys" "$kvlab" export plan.json --for vllm
refused "shares add up to 75%" "$kvlab" eval --model tiny --text policy.json --policy h2o --budget 32 --tiers 8:25%,4:50%
refused "tiers must be in order of decreasing precision" "$kvlab" tune --model tiny --text policy.json --budget 32 --tiers 4:50%,8:50% --out other.json
refused "is less than one token" "$kvlab" replay --trace story --policy h2o --budget 79B --tiers 4 --out other
refused "too few for one token on its first tier" "$kvlab" replay --trace story --policy h2o --budget 32 --tiers 16:1%,4:99% --out other
[ ! -e other ] && [ ! -e other.json ] || fail "a command with a refused tier plan left files"
# The scripts of tools/ also refuse such a plan.
if command -v python3 >/dev/null; then
  board() { python3 "$source/tools/experiments/leaderboard.py" --kvlab "$kvlab" --model tiny --quick --out other "$@"; }
  refused "is not a file of \`kvlab plan\`" board --tiers @nowhere
  for text in '' '{' '[]' '{"plan": []}' '{"plan": {"tiers": 5}}' "$(head -c 100000 /dev/zero | tr '\0' '[')" "$(printf '\377')"; do
    printf %s "$text" >plan.json
    refused "is not a file of \`kvlab plan\`" board --tiers 16 @plan.json
  done
fi
[ ! -e other ] || fail "a script with a refused plan left files"

# Outputs have the path of an input.
cp run/run.json whole.json
refused "--out: run/run.json is part of a trace" "$kvlab" deploy run --budget 32 --out run/run.json
refused "--out: run is also the input of --run" "$kvlab" report run --out run
cmp -s run/run.json whole.json || fail "run.json was replaced"

# A policy file is followed by a NUL, or has control characters in a name. The name of a folder has terminal control
# characters.
{ cat policy.json; printf '\0 rubbish'; } >nul.json
refused "is NUL" "$kvlab" generate --model tiny --prompt hi --policy-file nul.json
sed 's/"name": "tiny"/"name": "tiny\\u001b[2J"/' policy.json >obeyed.json
! cmp -s policy.json obeyed.json || fail "sed did not find the model's name in policy.json"
refused "without control characters" "$kvlab" generate --model tiny --prompt hi --policy-file obeyed.json
sed 's/"weights_xxh3": "[0-9a-f]*"/"weights_xxh3": "\\u001b[2J"/' policy.json >hashed.json
! cmp -s policy.json hashed.json || fail "sed did not find the hash of the weights in policy.json"
refused "without control characters" "$kvlab" generate --model tiny --prompt hi --policy-file hashed.json
sed 's/"weights_xxh3":/"weights": 1, "weights_xxh3":/' policy.json >more.json
refused "is not known to this version" "$kvlab" generate --model tiny --prompt hi --policy-file more.json
refused "no such directory" "$kvlab" trace info "$(printf 'a\033[2Jb\nc')"

# Another program prints an error message of several lines.
mkdir bin
printf '#!/bin/sh\nprintf "one\\ntwo\\033[2J\\nthree\\n"\nexit 1\n' >bin/vl-convert
chmod +x bin/vl-convert
refused "vl-convert failed" env "PATH=$PWD/bin:$PATH" "$kvlab" report run --figures drawn --out other.html
[ ! -e other.html ] && [ ! -e drawn ] || fail "a report whose figures failed left files"

# A symbolic link at the path of a temporary file is not written through.
echo theirs >theirs
for part in made.json.part made.json.00000000.part; do ln -s theirs $part; done
"$kvlab" deploy run --budget 32 --out made.json >/dev/null
[ "$(cat theirs)" = theirs ] || fail "the target of a symbolic link was overwritten"

# A tokenizer.json that is broken or of another kind gives one line, even if there are more errors.
mkdir broken
cp tiny/config.json tiny/model.safetensors broken/
for json in '{' '{}' '{"model":{"type":"WordPiece"}}' '{"model":{"type":"BPE","vocab":{"a":0},"merges":["a a"]}}'; do
  echo "$json" >broken/tokenizer.json
  refused "broken/tokenizer.json: " "$kvlab" capture --model broken --prompt hi --max-new-tokens 100000 --beyond-context --out trace
  refused "broken/tokenizer.json: " "$kvlab" generate --model broken --prompt hi
  refused "broken/tokenizer.json: " "$kvlab" eval --model broken --text policy.json
done
# A tokenizer.json that is far too long is refused by its length, without reading it.
truncate -s 100G broken/tokenizer.json
refused "broken/tokenizer.json: is 107374182400 bytes long, but at most" in_time "$kvlab" generate --model broken --prompt hi
refused "broken/tokenizer.json: is 107374182400 bytes long, but at most" in_time "$kvlab" capture --model broken --prompt hi --out trace
# A model that has SentencePiece's tokenizer.model, but no tokenizer.json.
rm broken/tokenizer.json
: >broken/tokenizer.model
refused 'broken: has "tokenizer.model", but kvlab needs tokenizer.json' "$kvlab" generate --model broken --prompt hi

# A complete tokenizer.json of another model, with fewer tokens, and with ids that this model lacks.
echo '{"pre_tokenizer":{"type":"ByteLevel"},"decoder":{"type":"ByteLevel"},"model":{"type":"BPE","vocab":{"a":0,"t":1},"merges":[]}}' >few.json
sed 's/^\( *"t": \)[0-9]*/\19084/' tiny/tokenizer.json >far.json
! cmp -s far.json tiny/tokenizer.json || fail "sed did not find the token t in tokenizer.json"
echo t >t.txt
for kind in few far; do
  mv $kind.json broken/tokenizer.json
  refused "of this model" "$kvlab" capture --model broken --prompt t --max-new-tokens 3000 --beyond-context --out trace
  refused "of this model" "$kvlab" generate --model broken --prompt t --max-new-tokens 3000 --beyond-context
  refused "of this model" "$kvlab" eval --model broken --text t.txt
  [ ! -e trace ] || fail "a refused capture left a trace"
done

# Weights that are finite but too large to compute with (bytes 0x7f in layer 0).
mkdir huge
cp tiny/config.json tiny/tokenizer.json huge/
{
  head -c 5000000 tiny/model.safetensors
  head -c 100000 /dev/zero | tr '\0' '\177'
  tail -c +5100001 tiny/model.safetensors
} >huge/model.safetensors
refused "not finite; the checkpoint's weights may be damaged" "$kvlab" capture --model huge --prompt hi --out trace
[ ! -e trace ] || fail "a capture that failed left a trace"
refused "logits are not finite" "$kvlab" generate --model huge --prompt hi
refused "scored token 0 is not finite" "$kvlab" eval --model huge --text "$source/tools/demo/prompt.txt" --max-tokens 60

# The scratch folder does not exist.
head -c 2000 "$source/tools/texts/austen-emma.txt" >text
tune() { "$@" "$kvlab" tune --model tiny --text text --max-tokens 500 --prompt-tokens 100 --budget 64 --policy h2o,lru --out tuned.json; }
refused "TMPDIR: " tune env TMPDIR=/nowhere
tune env TMPDIR= >/dev/null 2>&1 || fail "an empty TMPDIR should be the same as an unset one"
rm tuned.json
# If a command was killed, running it again removes the files that it left in the scratch folder.
mkdir scratch
TMPDIR=$PWD/scratch "$kvlab" tune --model tiny --text text --max-tokens 500 --prompt-tokens 100 --budget 64 --policy h2o,lru \
  --out tuned.json >/dev/null 2>&1 &
pid=$!
while [ -z "$(ls scratch)" ]; do
  kill -0 $pid 2>/dev/null || fail "tune was over before it was killed"
  sleep 0.01
done
kill -9 $pid
wait $pid 2>/dev/null || true
[ -n "$(ls scratch)" ] || fail "the tune that was killed left no scratch folder"
tune env "TMPDIR=$PWD/scratch" >/dev/null 2>&1 || fail "tune fails after another one was killed"
[ -z "$(ls scratch)" ] || fail "files remain in TMPDIR: $(ls scratch)"
rm tuned.json
# The combinations of several lists would not fit in memory, or a plan has more tiers than a cache supports.
many=$(seq -s, 2 20000)
refused "up to 19999 configurations are requested" in_time "$kvlab" replay --trace "$source/traces/samples/tiny-story" --policy h2o --budget "$many" --out lists
refused "--trace: 10001 values are given; at most 10000" in_time "$kvlab" replay --policy h2o --budget 16 --out lists \
  --trace $(seq 10001)
# Many texts have equal names. Comparing each name with all others would take too long.
refused "1: cannot open" in_time "$kvlab" eval --model tiny --policy h2o --budget 16 --text $(seq 10000)
tiers=$(head -c 1275 /dev/zero | sed 's/\x0/16:1t,/g')4:100%
refused "a plan of 1276 tiers; at most 16" in_time "$kvlab" replay --trace "$source/traces/samples/tiny-story" --policy h2o --budget 16 --tiers "$tiers" --out lists

# TMPDIR, paths and names are longer than the system allows. Every message has to contain the reason.
name=$(head -c 250 /dev/zero | tr '\0' n)
deep=$PWD
while [ ${#deep} -lt 3800 ]; do
  deep=$deep/$name
  mkdir "$deep"
done
deep=$deep/$(head -c $((4080 - ${#deep})) /dev/zero | tr '\0' n) # the folder can be created, but no file in it
mkdir "$deep"
refused "TMPDIR: should be a directory" tune env "TMPDIR=$deep/$name"
refused "File name too long" tune env "TMPDIR=$deep"
for path in "${name}s.longer" "$(head -c 5000 /dev/zero | tr '\0' p)"; do
  refused "File name too long" "$kvlab" trace verify "$path"
  refused "File name too long" "$kvlab" trace seal "$path"
  refused "File name too long" "$kvlab" capture --model "$path" --prompt hi --out trace
  refused "File name too long" "$kvlab" capture --model tiny --prompt-file "$path" --out trace
  refused "File name too long" "$kvlab" capture --model tiny --prompt hi --out "$path"
  refused "File name too long" "$kvlab" replay --trace story --policy h2o --budget "@$path" --out other
  refused "File name too long" "$kvlab" replay --trace story --policy h2o --budget 16 --policy-source "$path" --out other
  refused "File name too long" "$kvlab" replay --trace story --policy h2o --budget 16 --out "$path"
  refused "File name too long" "$kvlab" report run --out "$path"
  refused "File name too long" "$kvlab" deploy "$path" --budget 32 --out made.json
  refused "File name too long" "$kvlab" deploy run --budget 32 --out "$path"
  refused "File name too long" "$kvlab" generate --model tiny --prompt hi --policy-file "$path"
  refused "File name too long" "$kvlab" eval --model tiny --text text --policy h2o --budget 16 --max-tokens 60 --out "$path"
done

# A shard is truncated while it is mapped.
if ldd "$kvlab" | grep -q asan; then
  echo "not tried with the address sanitizer: a shard that is truncated"
else
  cp -r story truncates
  refused "a file became shorter while it was read" env TRUNCATES=truncates/shard-00000 LD_PRELOAD="$truncating" \
    "$kvlab" trace verify truncates
fi

echo "hostile inputs: all refused"
