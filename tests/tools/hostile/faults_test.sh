#!/bin/sh
# faults_test.sh KVLAB SOURCE FAULTS [STEPS [COMMAND...]]: runs capture and replay (with KVLAB_EVERY also eval and
# tune), each with one fault at a time. Faults: the command is killed before a call that changes files, the call fails
# or writes less, or an allocation fails. Sealed files must be complete, the same command must continue or say why it
# does not, and no other file may change.
# STEPS: the number of moments of each kind of fault (default: 1, with KVLAB_EVERY 6), or `all` (for allocations, 400 of
# about a hundred thousand).
# Environment: KINDS: only these kinds of faults. KILLS: how often capture and replay are also killed at random moments,
# in larger jobs with one to four threads (default: 2, with KVLAB_EVERY 12). SEED: the random seed of these moments.
set -eu
kvlab=$1 source=$2 faults=$3 steps=${4:-$((${KVLAB_EVERY:+5} + 1))}
shift 3
[ $# -eq 0 ] || shift
[ $# -gt 0 ] || set -- capture replay ${KVLAB_EVERY:+evaluate tune}
commands=$*
. "$source/tests/scripts/check.sh"
enter_scratch
ln -s "$source/traces/samples/tiny-story" story
ln -s "$source/engine/models/tiny" tiny
head -c 3600 "$source/tools/texts/austen-emma.txt" >text
head -c 9000 "$source/tools/texts/austen-emma.txt" >long
for name in trace.part run.part.more tuned.part shard-00000.safetensors.part; do echo theirs >$name; done
mkdir scratch
export TMPDIR=$PWD/scratch
ours='line.txt|'$(ls -A | paste -sd '|')
tried=0 threads=1 text=text sweep='--policy h2o --budget 16 --layers 0'

capture() {
  "$@" "$kvlab" capture --model tiny --prompt-file $text --teacher-forced --prompt-tokens 16 --prefill chunk:512 \
    --beyond-context --threads $threads --out trace
}
replay() { "$@" "$kvlab" replay --trace story $sweep --threads $threads --no-references --out run; }
evaluate() {
  "$@" "$kvlab" eval --model tiny --text text --policy h2o --budget 32 --max-tokens 48 --threads 1 --out scores
}
tune() {
  "$@" "$kvlab" tune --model tiny --text text --max-tokens 300 --prompt-tokens 50 --budget 64 --policy h2o,lru \
    --threads 1 --device cpu --out tuned
}

# others PATTERN: the files that exist in addition to those before the command, except those that match PATTERN.
others() { ls -A | grep -vxE "whole|(out|err|count).txt|$ours" | grep -vxE "$1" || true; }

# ended_at_once FAULT: whether the command had no chance to clean up: it was killed, or memory ran out in a destructor
# (the destructor of JSON allocates).
ended_at_once() {
  case $1 in
    kill*) ;;
    memory*) grep -q 'unfinished results are kept' err.txt ;;
    *) false ;;
  esac
}

check_capture() {
  [ -z "$(others trace)" ] || fail "capture, $1: leaves $(others trace)"
  if [ -e trace/manifest.json ]; then
    diff -r trace whole/trace || fail "capture, $1: another trace"
  elif [ -e trace/shard-00000.safetensors ]; then
    for shard in trace/shard-?????.safetensors; do cmp "$shard" "whole/$shard" || fail "capture, $1: $shard"; done
    refused "kvlab trace seal" capture env
    "$kvlab" trace seal trace >/dev/null || fail "capture, $1: it cannot be sealed"
    "$kvlab" trace verify trace >/dev/null || fail "capture, $1: it does not verify"
  else
    capture env >/dev/null 2>err.txt || fail "capture, $1: the next run fails: $(cat err.txt)"
    diff -r trace whole/trace || fail "capture, $1: another trace"
  fi
  rm -rf trace
}
check_replay() {
  [ -z "$(others 'run|run.part')" ] || fail "replay, $1: leaves $(others 'run|run.part')"
  [ -e run ] || replay env >/dev/null 2>err.txt || fail "replay, $1: the next run does not continue: $(cat err.txt)"
  for file in results.csv run.json kept.json; do
    cmp "run/$file" "whole/run/$file" || fail "replay, $1: $file differs"
  done
  rm -rf run run.part
}
check_evaluate() {
  left=scores
  ! ended_at_once "$1" || left='scores|scores.[0-9a-f]{8}.part'
  [ -z "$(others "$left")" ] || fail "eval, $1: leaves $(others "$left")"
  [ -z "$(ls -d scores.*.part 2>/dev/null)" ] || rm -rf scores # so that the next run starts again
  [ -e scores ] || evaluate env >/dev/null 2>err.txt || fail "eval, $1: the next run fails: $(cat err.txt)"
  diff -r scores whole/scores || fail "eval, $1: the scores differ"
  [ -z "$(others scores)" ] || fail "eval, $1: the next run does not remove $(others scores)"
  rm -r scores
}
check_tune() {
  left=tuned
  ! ended_at_once "$1" || left='tuned|tuned.[0-9a-f]{8}.part'
  [ -z "$(others "$left")" ] || fail "tune, $1: leaves $(others "$left")"
  case $1:${code:-} in
    ENOSPC*:0 | EIO*:0) ;; # the failed call was the one that should remove the file
    *) ended_at_once "$1" || [ -z "$(ls scratch)" ] || fail "tune, $1: leaves in TMPDIR: $(ls scratch)" ;;
  esac
  rm -rf scratch/*
  [ -z "$(ls -d tuned.*.part 2>/dev/null)" ] || rm -f tuned # so that the next run starts again
  [ -e tuned ] || tune env >/dev/null 2>err.txt || fail "tune, $1: the next run fails: $(cat err.txt)"
  cmp tuned whole/tuned || fail "tune, $1: the policy file differs"
  [ -z "$(others tuned)" ] || fail "tune, $1: the next run does not remove $(others tuned)"
  rm tuned
}

# one COMMAND KIND N: runs COMMAND with a fault of KIND at call N, and checks its exit code, its message and its files.
one() {
  code=0
  $1 env "FAULT=$2" "FAULT_AT=$3" "LD_PRELOAD=$faults" >out.txt 2>err.txt || code=$?
  grep -vE 'the text may degrade|intervals are wide|no 95% interval' err.txt >line.txt || true # warnings
  mv line.txt err.txt
  case $2:$code in
    kill:137 | ENOSPC:0 | EIO:0 | EINTR:0 | short:0 | memory:0) ;; # 0: the file is removed anyway
    ENOSPC:2 | EIO:2) [ "$(wc -l <err.txt)" -eq 1 ] || fail "$1, $2 $3: more than one line: $(cat err.txt)" ;;
    memory:2) said "out of memory" "$1, $2 $3" ;;
    *) fail "$1, $2 $3: exit code $code: $(cat err.txt)" ;;
  esac
  "check_$1" "$2 at $3"
  tried=$((tried + 1))
}

# walk COMMAND KIND: tests faults of KIND at evenly spaced calls.
walk() {
  if [ "$2" = memory ] && nm --defined-only "$kvlab" | grep -qw _Znwm; then
    echo "$1, memory: not tested, because the command contains its own operator new (as from a static library of CUDA's)"
    return
  fi
  $1 env "FAULT=$2" FAULT_COUNT="$folder/count.txt" "LD_PRELOAD=$faults" >/dev/null 2>&1 || fail "$1 by itself"
  "check_$1" "without a fault"
  count=$(cat count.txt)
  [ "$count" -gt 10 ] || fail "$1: only $count calls were counted"
  step=1
  case $steps:$2 in
    all:memory) step=$(((count + 399) / 400)) ;;
    all:*) ;;
    *) step=$(((count + steps - 1) / steps)) ;;
  esac
  n=1
  while [ $n -le "$count" ]; do
    one "$1" "$2" $n
    n=$((n + step))
  done
  [ "$steps" = all ] || one "$1" "$2" "$count"
  echo "$1, $2: $count calls in all"
}

# storm COMMAND OUT: kills the command before counted calls, and every fourth time after a part of its run time.
storm() {
  rm -r "whole/$2"
  killed=0
  began=$(date +%s%N)
  $1 env FAULT_COUNT="$folder/count.txt" "LD_PRELOAD=$faults" >/dev/null 2>&1 || fail "$1 by itself"
  took=$((($(date +%s%N) - began) / 1000))
  mv "$2" whole
  for draw in $(awk -v kills="$kills" -v calls="$(cat count.txt)" -v took=$took -v seed="${SEED:-1}" 'BEGIN {
      srand(seed)
      for (i = 0; i < kills; ++i) {
        threads = 1 + int(4 * rand())
        if (i % 4) printf "%d:%d:-\n", threads, 1 + int(calls * rand())
        else printf "%d:-:%.4f\n", threads, 0.001 + took * rand() / 1e6
      } }'); do
    IFS=: read -r threads call time <<END
$draw
END
    code=0
    case $time in
      -) $1 env FAULT=kill "FAULT_AT=$call" "LD_PRELOAD=$faults" >out.txt 2>err.txt || code=$? ;;
      *) $1 timeout --foreground -s KILL "$time" >out.txt 2>err.txt || code=$? ;;
    esac
    case $code:$time in
      137:*) killed=$((killed + 1)) ;;
      0:[0-9]* | 124:[0-9]*) ;; # the command ended before the kill, or at that moment; 124 comes from timeout
      *) fail "$1, kill $draw: exit code $code: $(cat err.txt)" ;;
    esac
    threads=1
    "check_$1" "kill $draw (threads:call:time)"
    tried=$((tried + 1))
  done
  echo "$1, killed at random: $killed times, $(cat count.txt) calls in all"
}

mkdir whole
for command in capture replay evaluate tune; do $command env >/dev/null 2>&1; done
mv trace run scores tuned whole
for command in $commands; do
  for kind in ${KINDS:-kill ENOSPC EIO EINTR short memory}; do walk $command $kind; done
done
kills=${KILLS:-$((${KVLAB_EVERY:+10} + 2))} text=long sweep='--policy h2o,lru --budget 16,32'
case "$commands" in *capture*) storm capture trace ;; esac
case "$commands" in *replay*) storm replay run ;; esac
[ "$(cat ./*.part run.part.more | sort -u)" = theirs ] || fail "a file of another program was changed"
echo "faults: $tried tried"
