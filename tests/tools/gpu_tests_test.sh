#!/usr/bin/env bash
# gpu_tests_test.sh SOURCE: runs tools/scripts/gpu_tests.sh on programs that behave like Catch2 2 and Catch2 3 tests.
set -euo pipefail
source=${1:?SOURCE}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# program NAME MAJOR NAMES [LISTED]: makes a program that behaves like a test program of Catch2 MAJOR. Its test cases
# are the lines of the file NAMES, and it lists only the first LISTED of them (default: all). The name of a case says
# whether it passes, is skipped or fails.
program() {
  local name=$1 major=$2 names=$3 listed=${4:-1000}
  cat >"$folder/build/tests/$name" <<TEXT
#!/usr/bin/env bash
major=$major names=$names listed=$listed
TEXT
  cat >>"$folder/build/tests/$name" <<'TEXT'
list() { head -n "$listed" "$names"; }
case "$major $*" in
  *--libidentify) printf 'description: a test\nversion:        %s.7.1\n' "$major" ;;
  "2 --list-test-names-only [gpu]~[.]") list; exit "$(list | wc -l)" ;;
  "3 --list-tests --verbosity quiet [gpu]~[.]") list ;;
  "2 -w NoTests "* | "3 -w UnmatchedTestSpec "*)
    while read -r name; do
      [[ $(sed 's/[][\\",*]/\\&/g' <<<"$name") == "$3" ]] || continue
      [[ $name != *skips* ]] || echo "skipped: no CUDA device: $name"
      [[ $name != *fails* ]]
      exit
    done <"$names"
    echo "No test cases matched '$3'"
    exit 2
    ;;
  *) echo "unrecognized: $*" >&2; exit 1 ;;
esac
TEXT
  chmod +x "$folder/build/tests/$name"
  while read -r case; do echo "TEST_CASE(\"$case\", \"[gpu]\") {}"; done <"$names" >"$folder/$name.cpp"
  echo 'TEST_CASE("hidden", "[.][long][gpu]") {}' >>"$folder/$name.cpp"
  echo "tests/$name $folder/$name.cpp" >>"$folder/build/tests/programs.txt"
}
new_build() { rm -rf "$folder/build" && mkdir -p "$folder/build/tests"; }
gpu_tests() { "$source/tools/scripts/gpu_tests.sh" "$folder/build" 2 '^test_' >"$folder/out" 2>&1; }
fail() { echo "$1" && cat "$folder/out" && exit 1; }
# refused WHAT PATTERN: checks that the script fails, and that its last line matches PATTERN.
refused() {
  ! gpu_tests || fail "$1: the script should fail, but reports success"
  tail -1 "$folder/out" | grep -qE -e "$2" || fail "$1: the last line should match $2"
}

printf '%s\n' 'a device adds' 'a name with, a comma' 'rows [8] and "quotes" and * stars' >"$folder/three"
printf '%s\n' 'another device adds' >"$folder/one"
printf '%s\n' 'it fails' >"$folder/fails"
printf '%s\n' 'it skips' >"$folder/skips"

for major in 2 3; do
  new_build
  program test_a $major "$folder/three"
  program test_b $major "$folder/one"
  : >"$folder/host.cpp"
  echo "tests/test_host $folder/host.cpp" >>"$folder/build/tests/programs.txt" # not built; host.cpp has no GPU test
  gpu_tests || fail "Catch2 $major: four cases that pass"
  grep -qE '^ *[0-9]+\.[0-9] s  passed: test_a: a name with, a comma$' "$folder/out" || fail "Catch2 $major: no time"
  grep -qx '4 passed, 0 failed, 0 skipped; 4 of 4 GPU test cases passed' "$folder/out" || fail "Catch2 $major: counts"

  program test_c $major "$folder/one" 0
  refused "Catch2 $major: a program that lists nothing" 'tests/test_c lists 0 GPU tests, but its sources have 1'
  new_build
  program test_a $major "$folder/three" 2
  refused "Catch2 $major: a program that lists fewer" 'lists 2 GPU tests, but its sources have 3'
  new_build
  program test_a $major "$folder/three"
  program test_b $major "$folder/one"
  rm "$folder/build/tests/test_b"
  refused "Catch2 $major: a program that is missing" 'tests/test_b is not built, but has 1 GPU tests'
  new_build
  program test_a $major "$folder/three"
  program test_b $major "$folder/fails"
  refused "Catch2 $major: a case that fails" '^3 passed, 1 failed, 0 skipped; 3 of 4 '
  new_build
  program test_a $major "$folder/three"
  program test_b $major "$folder/skips"
  refused "Catch2 $major: a case that finds no GPU" '^3 passed, 1 failed, 0 skipped; 3 of 4 '
done
new_build
program test_a 4 "$folder/three"
refused "another Catch2" "names no Catch2 of version 2 or 3"
new_build
echo "tests/test_host $folder/host.cpp" >"$folder/build/tests/programs.txt"
refused "no GPU test" 'has a case with the tag \[gpu\]'
new_build
refused "no list of programs" 'programs.txt is missing'
