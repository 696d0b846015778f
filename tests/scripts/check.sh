# Sourced by the tests that are scripts: where they work, and what to say of a command.
export LC_ALL=C # what sort, awk and brackets mean
# enter_scratch: an empty folder, $folder, that goes with the script.
enter_scratch() {
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
  cd "$folder"
}
fail() { echo "FAILED: $*" | cut -b1-4000; exit 1; }
# refused WORDS COMMAND...: it exits 2 and says WORDS, on one line without a control character.
refused() {
  words=$1 code=0
  shift
  "$@" >out.txt 2>err.txt || code=$?
  [ $code -eq 2 ] || fail "exit code $code, not 2, of: $*: $(cat err.txt)"
  said "$words" "$*"
}
# control_free FILE: holds no control character but line ends, and no mark of direction (U+202A to U+202E).
control_free() { ! grep -q -e "$(printf '[\001-\011\013-\037\177]')" -e "$(printf '\342\200[\252-\256]')" "$1"; }
# said WORDS WHAT: err.txt is one line that holds WORDS, not too long, and no control character.
said() {
  grep -qF -- "$1" err.txt || fail "not '$1', but: $(cat err.txt), of: $2"
  [ "$(wc -l <err.txt)" -eq 1 ] || fail "more than one line of: $2: $(cat err.txt)"
  [ "$(wc -c <err.txt)" -lt 1100 ] || fail "a line of $(wc -c <err.txt) bytes of: $2"
  control_free err.txt || fail "a control character of: $2"
}
