#!/bin/sh
# terminal_test.sh KVLAB SOURCE: tests commands under difficult conditions: their output streams are closed, full or
# without a reader; names and tokens have terminal control characters; or the system limits memory, stacks and files. No
# command may abort or lose results, and each failure must be explained in one line.
set -eu
kvlab=$1 source=$2
. "$source/tests/scripts/check.sh"
enter_scratch
ln -s "$source/traces/samples/tiny-story" story
ln -s "$source/engine/models/tiny" tiny
head -c 2000 "$source/tools/texts/austen-emma.txt" >text
replay() { "$kvlab" replay --trace story --policy h2o --budget 16 --layers 0 --no-references --out "$1"; }
evaluate() { "$kvlab" eval --model tiny --text text --policy h2o --budget 32 --max-tokens 48 --threads 1 --out "$1"; }
replay run >/dev/null

# ends CODE COMMAND...: checks the exit code of COMMAND.
ends() {
  expected=$1 code=0
  shift
  "$@" || code=$?
  [ $code -eq "$expected" ] || fail "exit code is $code and should be $expected: command: $*"
}

# Standard error is closed, full, or a pipe without a reader. A warning or an error must not lose results or abort.
closed() { "$@" >out.txt 2>&-; }
full() { "$@" >out.txt 2>/dev/full; }
unread() { "$@" 2>&1 >out.txt | true; }
for broken in closed full; do
  ends 2 $broken "$kvlab" nonsense
  ends 2 $broken "$kvlab" generate --model nowhere --prompt x
  ends 0 $broken evaluate scores-$broken
  [ -s scores-$broken/eval.csv ] || fail "no scores with a standard error that is $broken"
  ends 0 $broken "$kvlab" generate --model tiny --prompt x --policy h2o --budget 8 --max-new-tokens 20
done
ends 0 unread evaluate scores-unread
[ -s scores-unread/eval.csv ] || fail "no scores with a standard error without reader"
# No file may get the descriptor of a closed stream.
ends 0 closed replay run-closed
diff -r run run-closed || fail "the run differs if standard error is closed"

# If standard output is closed or full, that is an error.
refused "standard output: cannot write: No space left" sh -c "'$kvlab' policies >/dev/full"
refused "standard output: cannot write: Bad file" sh -c "'$kvlab' policies >&-"
refused "standard output: cannot write: No space left" sh -c "exec '$kvlab' generate --model tiny --prompt x >/dev/full"
"$kvlab" policies 2>err.txt | true
[ ! -s err.txt ] || fail "a reader that ended is reported as an error: $(cat err.txt)"

# Terminal control characters in names and in generated text are escaped; --json contains them unchanged.
odd=$(printf 'a\033[31m\302\233b\342\200\256c\233')
control_free_of() {
  "$@" >out.txt 2>err.txt || true
  for file in out.txt err.txt; do control_free $file || fail "$file has a control character: command: $*"; done
  ! grep -q -e "$(printf '\302\233')" -e "$(printf 'c\233')" out.txt err.txt ||
    fail "the output has a C1 control character: command: $*"
}
cp -r run "$odd"
cp text "text $odd"
control_free_of "$kvlab" report "$odd" --out "$odd.html"
control_free_of "$kvlab" deploy "$odd" --budget 16 --out "$odd.json"
control_free_of "$kvlab" compare "$odd" run
control_free_of "$kvlab" trace info "$odd"
control_free_of "$kvlab" eval --model tiny --text "text $odd" text --policy "h2o:$odd" --budget 32 --max-tokens 48
control_free_of "$kvlab" eval --model tiny --text "text $odd" text --policy h2o --budget 32 --max-tokens 48 --out "$odd/scores"
mkdir says
cp tiny/config.json tiny/model.safetensors says/
# With this tokenizer, the model generates control characters in place of each e.
sed '/"decoder": {/,/},/c\
  "decoder": {"type": "Sequence", "decoders": [{"type": "ByteLevel"}, {"type": "Replace", "pattern": {"String": "e"},\
    "content": "\\u202e\\u001b[2J\\u009b\\u0007"}]},' tiny/tokenizer.json >says/tokenizer.json
"$kvlab" generate --model says --prompt 'It was' --max-new-tokens 40 --json >out.txt
grep -qF '\u001b[2J\u009b\u0007' out.txt || fail "--json should have the generated text unchanged: $(cat out.txt)"
control_free out.txt || fail "the JSON has a control character"
control_free_of "$kvlab" generate --model says --prompt 'It was' --max-new-tokens 40
grep -qF '?' out.txt || fail "control characters should be replaced by '?': $(cat out.txt)"

# An error is one short line for any name, and it always contains a name. An error replaces a warning.
long=$(head -c 100000 /dev/zero | tr '\0' x)
refused "unknown command" "$kvlab" "$long"
refused "unknown option" "$kvlab" replay "--$long"
refused "unknown policy" "$kvlab" replay --trace story --policy "$long" --budget 16 --out other
refused "File name too long" "$kvlab" generate --model tiny --prompt x --policy-file "$long"
refused "--text: is empty" "$kvlab" eval --model tiny --text ""
refused "--text: is empty" "$kvlab" eval --model tiny --text text ""
refused "--trace: is empty" "$kvlab" replay --trace "" --policy h2o --budget 16 --out other
refused "--out: is empty" "$kvlab" demo --out ""
refused "--run: is empty" "$kvlab" compare run ""
refused "nowhere/config.json" "$kvlab" generate --model nowhere --prompt "$(printf 'a\377')"

# The system's limits: memory, stacks, file size.
ended_in_time() { timeout -k 1 60 "$@"; }
if ! ldd "$kvlab" | grep -q asan; then
  ! ldd "$kvlab" | grep -qi openblas || fail "kvlab links OpenBLAS, which only one benchmark needs"
  # CUDA's libraries take more address space than this limit, so a build with CUDA is left out.
  ldd "$kvlab" | grep -q cublas || ends 0 ended_in_time sh -c "ulimit -v 100000; exec '$kvlab' policies >out.txt"
fi
refused "the stack is limited to 64 KiB" sh -c "ulimit -s 64; exec '$kvlab' generate --model tiny --prompt x"
for words in "eval --model tiny --text text --policy h2o --budget 32 --max-tokens 48 --threads 2" \
  "generate --model tiny --prompt x" "trace verify story" "report run --out page.html"; do
  ldd "$kvlab" | grep -q asan || ends 0 sh -c "ulimit -s 256; exec '$kvlab' $words >out.txt 2>&1"
done
limited() { (ulimit -f "$1"; shift; exec "$@"); } # a file size limit simulates a full disk
refused "cannot write: File too large" limited 4 "$kvlab" capture --model tiny --prompt hello --max-new-tokens 8 --out trace
[ ! -e trace ] || fail "a trace that could not be written was left"
refused "cannot write: File too large" limited 4 "$kvlab" report run --out large.html
if [ -e "${KVLAB_VEGA:-/usr/share/javascript/vega}" ]; then # a report without it would fit
  refused "cannot write: File too large" limited 60 "$kvlab" report run --figures large --out large.html
  refused "demo has been removed" limited 200 "$kvlab" demo
else
  echo "left out, because there is no Vega: a disk that becomes full after some figures"
fi
[ -z "$(ls -d demo* large* 2>/dev/null)" ] || fail "files remain: $(ls)"

# An output that cannot be written is refused before the work.
mkdir closed
chmod a-w closed
fidelity="$kvlab fidelity --model tiny --text text --policy window,sink,lru --budget 32,64 --max-tokens 500 --prompt-tokens 100 --out fidelity"
began=$(date +%s%N)
refused "nowhere/page.html: parent directory nowhere does not exist" $fidelity --report nowhere/page.html
refused "File name too long" $fidelity --report "$(head -c 300 /dev/zero | tr '\0' n).html"
[ "$(id -u)" -eq 0 ] || refused "closed/page.html: cannot create: Permission denied" $fidelity --report closed/page.html
[ $((($(date +%s%N) - began) / 1000000)) -lt 5000 ] || fail "the output was checked after the work"
[ ! -e fidelity ] || fail "fidelity left its folder"

# The prompt is longer than the model's context.
for i in 1 2 3 4 5; do cat "$source/tools/texts/austen-emma.txt"; done >book
for command in "generate" "verify --policy h2o --budget 32"; do
  refused "--beyond-context" "$kvlab" $command --model tiny --prompt-file book
done
echo "terminal: all said as it should be"
