#!/bin/sh
# sweep_test.sh KVLAB SOURCE kill|refuse|mpi: tests sweeps that are killed and resumed, or spread over several
# processes. They must write the same bytes as one process that runs to its end.
set -eu
kvlab=$1 source=$2 part=$3
. "$source/tests/scripts/check.sh"
enter_scratch
for name in first second; do ln -s "$source/traces/samples/tiny-story" $name; done

sweep="--policy h2o,lru,streaming_h2o --budget 16,32,64,128"
units=16 # 2 traces, 4 layers, 2 KV heads
children() { cat /proc/$1/task/$1/children; }
# start RUN OPTION...: replaces the shell by a replay of both traces, so that $! is the process of kvlab.
start() {
  run=$1
  shift
  exec "$kvlab" replay --trace first second $sweep --out "$run" "$@"
}
replay() { (start "$@"); }
same() {
  for file in results.csv run.json kept.json; do
    cmp "reference/$file" "$1/$file" || fail "$1 differs from the undisturbed run"
  done
  [ ! -e "$1.part" ] || fail "$1.part was left behind"
}
finished() { ls "$1.part" 2>/dev/null | grep -c 'unit$' || true; }
# has_units RUN COUNT: whether at least COUNT units are finished. This starts no process, because a whole replay takes
# only a third of a second.
has_units() {
  wanted=$2
  set -- "$1".part/*unit
  [ -e "$1" ] && [ $# -ge "$wanted" ]
}
# kill_at RUN COUNT PID: kills PID with SIGKILL when COUNT units of RUN are finished.
kill_at() {
  until has_units "$1" "$2"; do
    kill -0 "$3" 2>/dev/null || fail "the replay was over before it could be killed"
  done
  kill -9 "$3" || fail "the replay was over before it could be killed"
  wait "$3" 2>/dev/null || true
  [ ! -e "$1" ] || fail "a killed replay left $1"
}

reference() { replay reference --threads 1 >/dev/null; }

killed_at_several_moments() {
  reference
  for threads in 1 2; do
    start run$threads --threads $threads >/dev/null 2>&1 &
    kill_at run$threads 1 $!
    start run$threads --threads $threads >/dev/null 2>&1 &
    kill_at run$threads $((units / 2)) $!
    # One finished unit is truncated, one has a changed byte, one has the contents of another unit, and one file is half
    # written.
    set -- run$threads.part/*.unit
    truncate -s 100 "$1"
    printf X | dd of="$2" bs=1 seek=200 conv=notrunc 2>/dev/null
    cp "$4" "$3"
    printf 'half' >"$5.part"
    before=$(finished run$threads)
    replay run$threads --threads $threads >/dev/null 2>err.txt
    for file in "$1" "$2" "$3"; do grep -qF "$file: " err.txt || fail "no message names $file"; done
    grep -qF "$((before - 3)) of $units head tasks are finished" err.txt || fail "not resumed: $(cat err.txt)"
    same run$threads
  done
}

refused_or_afresh() {
  reference
  start run --threads 1 >/dev/null 2>&1 &
  pid=$!
  until has_units run 1; do :; done
  kill -STOP $pid
  refused "another kvlab replay is running" replay run
  kill_at run 1 $pid
  cp -r run.part kept.part
  refused "differs in: sweep" replay run --seed 3
  refused "differs in: queries" replay run --queries all
  refused "differs in: traces" "$kvlab" replay --trace first $sweep --out run
  refused "differs in: build" sh -c "cp '$kvlab' . && printf x >>kvlab && exec ./kvlab replay --trace first second $sweep --out run"
  diff -r run.part kept.part >/dev/null || fail "a refused replay changed what was kept"
  "$kvlab" replay --trace first --policy window --budget 16 --out run --fresh >/dev/null
  [ -e run/results.csv ] && [ ! -e run.part ] || fail "--fresh did not start again"
  mkdir mine.part && echo work >mine.part/novel.txt
  refused "novel.txt: was not made by" replay mine
  refused "novel.txt: was not made by" replay mine --fresh
  [ "$(cat mine.part/novel.txt)" = work ] || fail "a file of the user is gone"

  # A file size limit simulates a full disk.
  limited() { (ulimit -f "$1"; shift; replay "$@"); }
  refused "cannot write" limited 1 small
  grep -q '^kvlab replay: small[:/]' err.txt || fail "the error should begin with the path of the run: $(cat err.txt)"
  [ ! -e small ] && [ ! -e small.part ] || fail "a replay without a finished unit left files"
  refused "small/results.csv: cannot write" limited 320 small
  grep -qF "kept in small.part" err.txt || fail "the error does not say what is kept: $(cat err.txt)"
  replay small >/dev/null 2>&1
  same small
}

several_processes() {
  command -v mpirun >/dev/null || { echo "skipped: there is no mpirun"; exit 0; }
  [ -e "$(dirname "$kvlab")/kvlab_mpi.so" ] || { echo "skipped: this build has no MPI"; exit 0; }
  # The number of processes may exceed the number of cores.
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
  export OMPI_MCA_btl_base_warn_component_unused=0
  export ASAN_OPTIONS="${ASAN_OPTIONS:-}:detect_leaks=0" # Open MPI leaks memory
  # mpirun also prints lines, so this replaces said() of check.sh, which requires a single line.
  said() { grep -qF -- "$1" err.txt || fail "message should contain '$1', but is: $(cat err.txt): command: $2"; }
  reference
  start_spread() { # start_spread N RUN OPTION...
    processes=$1 run=$2
    shift 2
    exec timeout -k 5 120 mpirun --oversubscribe --bind-to none -np "$processes" \
      "$kvlab" replay --trace first second $sweep --out "$run" "$@"
  }
  spread() { (start_spread "$@"); }
  for processes in 1 2 4; do
    spread $processes run$processes --threads 2 >out.txt
    [ "$(wc -l <out.txt)" -lt 60 ] && [ "$(grep -c 'Next: kvlab report' out.txt)" -eq 1 ] ||
      fail "more than one process printed"
    same run$processes
  done
  # If one of the processes is killed, all of them end. Then a single process finishes the work.
  start_spread 4 dead --threads 1 >/dev/null 2>&1 &
  mpirun=$!
  until has_units dead 2; do :; done
  set -- $(children $(children $mpirun)) # the children of mpirun, which is a child of timeout
  [ $# -eq 4 ] || fail "there should be 4 processes, but there are $#"
  kill -9 "$4"
  code=0
  wait $mpirun || code=$?
  [ $code -ne 0 ] && [ ! -e dead ] || fail "a process died, and the others went on"
  [ "$(finished dead)" -ge 2 ] || fail "finished units were lost"
  replay dead >/dev/null 2>err.txt
  grep -qF "head tasks are finished" err.txt || fail "not resumed: $(cat err.txt)"
  same dead
  # If the leader fails, here because a unit file is a folder, its error is printed once and all processes end.
  start blocked --threads 1 >/dev/null 2>&1 &
  kill_at blocked 1 $!
  mkdir blocked.part/trace1-unit7.unit
  refused "blocked/trace1-unit7.unit: exists and is not a regular file" spread 3 blocked --threads 1
  [ "$(grep -c 'exists and is not a regular file' err.txt)" -eq 1 ] || fail "the error should be printed once: $(cat err.txt)"
  rmdir blocked.part/trace1-unit7.unit
  spread 3 blocked >/dev/null 2>&1
  same blocked
  # Bad input is reported once, by the leader.
  for bad in "--layers: 'x'|--layers x" "unknown option '--layer'|--layer 1" "--threads: 0 should be|--threads 0" \
    "should be a whole number|--seed x"; do
    # shellcheck disable=SC2086 # two words
    refused "${bad%%|*}" spread 3 bad ${bad#*|}
    [ "$(grep -c 'kvlab replay: ' err.txt)" -eq 1 ] || fail "the error should be printed once: $(cat err.txt)"
  done
  # The warning about an old name, and the help, are printed once.
  spread 3 old --show recall,span_recall:x 2>err.txt >/dev/null || true
  [ "$(grep -c 'is called' err.txt)" -eq 1 ] || fail "the warning should be printed once: $(cat err.txt)"
  spread 3 none --help >out.txt
  [ "$(grep -c '^Usage: kvlab replay' out.txt)" -eq 1 ] || fail "the help should be printed once: $(cat out.txt)"
  # If processes have different command lines, the first process of each reports its errors.
  refused "--seed: 'x' should be a whole number" timeout -k 5 120 mpirun --oversubscribe \
    -np 2 "$kvlab" replay --trace first second $sweep --out odd : \
    -np 2 "$kvlab" replay --trace first second $sweep --out odd --seed x
  [ "$(grep -c 'kvlab replay: ' err.txt)" -eq 1 ] || fail "the error should be printed once: $(cat err.txt)"
  refused "process 1 of 2: the traces, the options or the build differ" timeout -k 5 120 mpirun --oversubscribe \
    -np 1 "$kvlab" replay --trace first second $sweep --out odd : \
    -np 1 "$kvlab" replay --trace first $sweep --out odd
  [ ! -e odd ] && [ ! -e odd.part ] || fail "a refused replay left files"
}

case $part in
  kill) killed_at_several_moments ;;
  refuse) refused_or_afresh ;;
  mpi) several_processes ;;
esac
