#!/bin/sh
# signals_test.sh KVLAB SOURCE: tests that SIGINT, SIGTERM and SIGHUP end a command with the exit codes 130, 143 and
# 129, and with one line that says how to continue. The command may leave only files from which the next command
# continues.
set -eu
kvlab=$1 source=$2
. "$source/tests/scripts/check.sh"
enter_scratch
ln -s "$source/traces/samples/tiny-story" story
ln -s "$source/engine/models/tiny" tiny
for i in 1 2 3; do cat "$source/tools/texts/austen-emma.txt"; done >text
printf '#!/bin/sh\n[ "$1" != --version ] || exit 0\nsleep 60 &\necho $! >%s\nwait\n' "$folder/compiling" >slow
chmod +x slow
mkdir scratch
export TMPDIR=$PWD/scratch

# ended SIGNAL WHAT WORDS COMMAND...: runs COMMAND and sends it SIGNAL, $delay seconds after a file WHAT (a name or a
# pattern) exists. Checks that COMMAND ends with a message that contains WORDS.
delay=0.1
ended() {
  signal=$1 what=$2 words=$3 code=0
  shift 3
  # A background job of a shell ignores SIGINT, which env changes.
  env --default-signal=INT,TERM,HUP "$@" >out.txt 2>err.txt &
  pid=$!
  while ! ls $what >/dev/null 2>&1; do
    kill -0 $pid 2>/dev/null || fail "the command ended before the signal: $*: $(cat err.txt)"
    sleep 0.01
  done
  sleep $delay
  kill -"$signal" $pid
  wait $pid || code=$?
  case $signal in INT) expected=130 ;; TERM) expected=143 ;; HUP) expected=129 ;; esac
  [ $code -eq $expected ] || fail "exit code is $code and should be $expected: command: $*: $(cat err.txt)"
  grep -v 'the text may degrade' err.txt >line.txt || true # a warning that may come before
  mv line.txt err.txt
  said "$words" "$*"
  said "stopped by SIG$signal" "$*"
  [ -z "$(ls scratch)" ] || fail "files remain in TMPDIR: $(ls scratch): command: $*"
}

again="; nothing was kept, and the same command starts from the beginning"
for signal in INT TERM HUP; do
  # The first shard may or may not be complete when the signal arrives. The message must match the files.
  delay=0
  ended $signal trace "" "$kvlab" capture --model tiny --prompt-file text --teacher-forced --prompt-tokens 12000 \
    --beyond-context --out trace
  if [ -e trace/shard-00000.safetensors ]; then
    said '; trace is unfinished' "a capture with a shard"
    rm -r trace
  else
    said "$again" "a capture without a shard"
    [ ! -e trace ] || fail "capture left a folder"
  fi
  delay=0.1
  ended $signal 'trace/shard-00000.safetensors' '; trace is unfinished; `kvlab trace seal trace` makes a trace of its complete shards' \
    "$kvlab" capture --model tiny --prompt-file text --prefill chunk:256 --teacher-forced --prompt-tokens 12000 --beyond-context --out trace
  "$kvlab" trace seal trace >/dev/null
  "$kvlab" trace verify trace >/dev/null
  rm -r trace

  # The signal comes when the first unit is finished, and when the last unit is finished and the results are combined.
  delay=0
  for unit in 0 7; do
    ended $signal "run.part/trace0-unit$unit.unit" \
      '; the finished part is kept in run.part, and the same command continues it' \
      "$kvlab" replay --trace story --policy h2o,lru,streaming_h2o,tova,roco,lfu --threads 1 --out run \
      --budget "$(seq -s, 16 6 200)"
    [ ! -e run ] || fail "replay left an incomplete run"
    rm -r run.part
  done
  delay=0.1

  ended $signal 'scores.*.part' "$again" \
    "$kvlab" eval --model tiny --text text --policy h2o,lru --budget 16,64 --out scores
  ended $signal 'scratch/*' "$again" \
    "$kvlab" tune --model tiny --text text --budget 64 --policy h2o,lru --out policy.json
  [ -z "$(ls | grep -E 'scores|policy')" ] || fail "left: $(ls)"

  # The signal comes while a slow compiler runs, which has started another process.
  began=$(date +%s)
  ended $signal compiling "$again" env "CXX=$folder/slow" XDG_CACHE_HOME="$folder/cache" \
    "$kvlab" policies --policy-source "$source/policies/recency/lru.hpp"
  [ $(($(date +%s) - began)) -lt 20 ] || fail "SIG$signal waited for the compiler"
  case $(cut -d' ' -f3 "/proc/$(cat compiling)/stat" 2>/dev/null) in
    '' | Z | X) ;;
    *) fail "the compiler's child process still runs after SIG$signal" ;;
  esac
  rm compiling
done

# A command that was started with SIGINT ignored continues.
(trap '' INT; exec "$kvlab" replay --trace story --policy h2o --budget 16,32,64 --threads 1 --out other >/dev/null 2>&1) &
pid=$!
while ! ls other.part/*.unit >/dev/null 2>&1; do
  kill -0 $pid || fail "the command ended before the signal"
  sleep 0.01
done
kill -INT $pid
wait $pid || fail "an ignored signal was not ignored"
[ -e other/results.csv ] || fail "an ignored signal ended a replay"
echo "signals: all commands ended as they should"
