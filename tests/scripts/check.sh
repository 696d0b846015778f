# Common functions of the tests that are shell scripts, which source this file.
export LC_ALL=C # so that sort, awk and ranges in brackets do not depend on the locale
# enter_scratch: changes to a new, empty folder, $folder, which is removed when the script ends.
enter_scratch() {
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
  cd "$folder"
}
fail() { echo "FAILED: $*" | cut -b1-4000; exit 1; }
# in_time COMMAND...: runs COMMAND, and stops it after 60 seconds of CPU time, which unlike the time of day does not depend
# on what else runs. Commands that once needed minutes have this limit.
in_time() { (ulimit -t 60 && exec "$@"); }
# refused WORDS COMMAND...: checks that COMMAND exits with 2 and prints WORDS in a one-line message (see `said`).
refused() {
  words=$1 code=0
  shift
  "$@" >out.txt 2>err.txt || code=$?
  [ $code -eq 2 ] || fail "exit code is $code and should be 2: command: $*: $(cat err.txt)"
  said "$words" "$*"
}
# control_free FILE: whether FILE has no control character except line ends, and no mark of direction (U+202A to
# U+202E).
control_free() { ! grep -q -e "$(printf '[\001-\011\013-\037\177]')" -e "$(printf '\342\200[\252-\256]')" "$1"; }
# said WORDS COMMAND: checks that err.txt is one line of less than 1,100 bytes that contains WORDS and no control
# character. If the check fails, its message names COMMAND.
said() {
  grep -qF -- "$1" err.txt || fail "message should contain '$1', but is: $(cat err.txt): command: $2"
  [ "$(wc -l <err.txt)" -eq 1 ] || fail "message should be one line: command: $2: $(cat err.txt)"
  [ "$(wc -c <err.txt)" -lt 1100 ] || fail "message has $(wc -c <err.txt) bytes, and 1099 are allowed: command: $2"
  control_free err.txt || fail "message has a control character: command: $2"
}
