#!/bin/sh
# together_test.sh KVLAB SOURCE: tests commands that write the same output at the same time. One command must write it
# completely, and the others must be refused. Reports and policy files may replace older files, so a second command may
# also succeed if it starts writing after the first one has ended.
set -eu
kvlab=$1 source=$2
. "$source/tests/scripts/check.sh"
enter_scratch
ln -s "$source/traces/samples/tiny-story" story
ln -s "$source/engine/models/tiny" tiny
head -c 1000 "$source/tools/texts/austen-emma.txt" >text

capture() { "$kvlab" capture --model tiny --prompt-file text --teacher-forced --prompt-tokens 16 --out "$1"; }
replay() { "$kvlab" replay --trace story --policy h2o --budget 16 --layers 0 --no-references --out "$1"; }
evaluate() { "$kvlab" eval --model tiny --text text --policy h2o --budget 32 --max-tokens 48 --out "$1"; }
report() { "$kvlab" report whole-replay --out "$1"; }
deploy() { "$kvlab" deploy whole-replay --budget 16 --out "$1"; }

# at_once COMMAND: runs COMMAND four times at once, and sets $won to the number of those that succeed.
at_once() {
  won=0 pids=
  for i in 1 2 3 4; do
    "$1" out >/dev/null 2>err$i.txt &
    pids="$pids $!"
  done
  i=0
  for pid in $pids; do
    i=$((i + 1)) code=0
    wait "$pid" || code=$?
    case $code in
      0) won=$((won + 1)) ;;
      2) mv err$i.txt err.txt && said out "$1" ;;
      *) fail "exit code is $code and should be 0 or 2: command: $1: $(cat err$i.txt)" ;;
    esac
  done
  rm err*.txt
  [ $won -ge 1 ] || fail "no $1 succeeded"
  [ -z "$(ls -A | grep -E 'part|out.+')" ] || fail "$1 left files: $(ls -A)"
  diff -r out "whole-$1" || fail "the output of $1 differs"
  rm -r out
}

for command in capture replay evaluate report deploy; do
  $command whole-$command >/dev/null 2>&1
  for round in 1 2 3; do
    at_once $command
    case $command:$won in
      capture:1 | replay:1 | evaluate:1 | report:* | deploy:*) ;;
      *) fail "$won of 4 runs of $command succeeded, and only 1 should" ;;
    esac
  done
done

# While another command is writing the output, commands are refused. After that command is killed, the .part file that
# it left does not matter.
touch out.0123abcd.part
for command in report deploy; do
  flock --no-fork out.0123abcd.part sleep 60 &
  pid=$!
  while flock -n out.0123abcd.part true; do sleep 0.01; done
  refused "out: another command is writing it" $command out
  [ ! -e out ] || fail "$command wrote a file that another command is writing"
  kill $pid
  wait $pid || true
  $command out >/dev/null
  rm out
done
echo "together: one output each"
