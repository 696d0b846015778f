#!/usr/bin/env bash
# To be sourced: functions that list and run a build's Catch2 test cases with the tag [gpu], with Catch2 2 or 3. Hidden
# cases ([.]), which take minutes, are left out.

# program_files BUILD: prints a line "PROGRAM SOURCE..." for each test program, from a file that CMake wrote. PROGRAM is
# relative to BUILD, sources to the source tree.
program_files() {
  local list=$1/tests/programs.txt
  [[ -s $list ]] || { echo "$list is missing; run cmake on $1 again" >&2; return 1; }
  cat "$list"
}

# catch2_major PROGRAM: prints 2 or 3.
catch2_major() {
  local version
  version=$("$1" --libidentify 2>/dev/null | sed -nE 's/^version: *([0-9]+)\..*/\1/p')
  [[ $version == 2 || $version == 3 ]] || { echo "$1: '--libidentify' names no Catch2 of version 2 or 3" >&2; return 1; }
  echo "$version"
}

# gpu_cases_of PROGRAM: prints the names of its test cases with the tag [gpu], one in a line. Fails if they cannot be
# listed.
gpu_cases_of() {
  local major names status=0
  major=$(catch2_major "$1") || return 1
  if [[ $major == 2 ]]; then
    names=$("$1" --list-test-names-only '[gpu]~[.]') || status=$?
    # Catch2 2 exits with the number of names.
    [[ $status -eq $(grep -c . <<<"$names") ]] || { echo "$1: listing its cases exited with $status" >&2; return 1; }
  else
    names=$("$1" --list-tests --verbosity quiet '[gpu]~[.]') || { echo "$1: listing its cases failed" >&2; return 1; }
  fi
  sed 's/^ *//; /^$/d' <<<"$names"
}

# case_pattern NAME: prints the pattern that matches only that case in Catch2.
# shellcheck disable=SC2001
case_pattern() { sed 's/[][\\",*]/\\&/g' <<<"$1"; }

# run_gpu_case PROGRAM NAME: runs a case. Also fails if no case has that name.
run_gpu_case() {
  local major
  major=$(catch2_major "$1") || return 1
  if [[ $major == 2 ]]; then
    "$1" -w NoTests "$(case_pattern "$2")"
  else
    "$1" -w UnmatchedTestSpec "$(case_pattern "$2")"
  fi
}

# list_gpu_cases BUILD SOURCE: prints a line "PROGRAM|NAME" for each case. Fails if the sources of a program have the
# tag, but the program does not exist or lists fewer or more cases than its sources have.
list_gpu_cases() {
  local build=$1 source=$2 programs program files cases listed wanted
  programs=$(program_files "$build") || return 1
  while read -r program files; do
    # shellcheck disable=SC2015,SC2086  # a file without cases is no error; $files are several words
    wanted=$(cd "$source" && cat $files | grep '\[gpu\]' | grep -vcF '[.]' || true)
    [[ $wanted -gt 0 ]] || continue
    [[ -x $build/$program ]] || { echo "$build/$program is not built, but has $wanted GPU tests; build it first" >&2; return 1; }
    cases=$(gpu_cases_of "$build/$program") || return 1
    listed=$(grep -c . <<<"$cases" || true)
    [[ $listed -eq $wanted ]] ||
      { echo "$program lists $listed GPU tests, but its sources have $wanted; build it again" >&2; return 1; }
    sed "s|^|$build/$program\||" <<<"$cases"
  done <<<"$programs"
}
