#!/usr/bin/env bash
# coverage.sh [CORPORA]: for each source file that reads input, counts how many of its lines the fuzz targets reach. A
# target runs its corpus in tests/data/fuzz and its folder in CORPORA, such as build-fuzz/found/corpora, which `./dev
# fuzz` makes. Builds in build-coverage. With KVLAB_SHOW=FILE in the environment, it prints the lines of FILE that are
# not reached.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
build=${KVLAB_COVERAGE_BUILD:-build-coverage} corpora=${1:-}
targets=$(cd tests/fuzz && ls ./*_target.cpp | sed 's|./||; s/_target.cpp//')
readers=(
  traces/base/{json,json_fields,json_value,safetensors,text}.cpp
  traces/{extras,manifest,shard,trace_reader,trace_verify}.cpp
  engine/tokenizer/*.cpp engine/checkpoint/{checkpoint,model_config}.cpp engine/evaluation/{policy_file,task/sample}.cpp
  sim/run/{results,run,run_folder}.cpp sim/budgets/budget_file.cpp
  policies/{catalogue,cache_config,policy_struct,budgets/budget}.cpp)
ls "${readers[@]}" >/dev/null # fails if one of them is missing
cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_COMPILER=clang++-14 -DKVLAB_WERROR=OFF -DKVLAB_CUDA=OFF \
  -DKVLAB_MPI=OFF "-DCMAKE_CXX_FLAGS=-O1 -fprofile-instr-generate -fcoverage-mapping -Wno-unknown-warning-option" >/dev/null
# shellcheck disable=SC2046
ninja -C "$build" $(for target in $targets; do echo "fuzz_$target"; done) >&2
objects=()
for target in $targets; do
  folders=("tests/data/fuzz/$target")
  [[ -z $corpora || ! -d $corpora/$target ]] || folders+=("$corpora/$target")
  LLVM_PROFILE_FILE=$build/$target.profraw "$build/tests/fuzz/fuzz_$target" "${folders[@]}" >/dev/null
  objects+=(${objects[@]:+-object} "$build/tests/fuzz/fuzz_$target")
done
llvm-profdata-14 merge -sparse "$build"/*.profraw -o "$build/all.profdata"
if [[ -n ${KVLAB_SHOW:-} ]]; then
  llvm-cov-14 show "${objects[@]}" -instr-profile "$build/all.profdata" "$KVLAB_SHOW" | grep -E '^ +[0-9]+\| +0\|'
  exit
fi
llvm-cov-14 export -summary-only "${objects[@]}" -instr-profile "$build/all.profdata" | python3 -c '
import json, os, sys
rows = [(os.path.relpath(file["filename"]), file["summary"]["lines"]) for file in json.load(sys.stdin)["data"][0]["files"]]
rows = [row for row in rows if row[0] in sys.argv[1:]]
for name, lines in sorted(rows) + [("all", {k: sum(row[1][k] for row in rows) for k in ("count", "covered")})]:
    reached, there = lines["covered"], lines["count"]
    print(f"{name:45} {reached:5} of {there:5} {100 * reached / there:6.1f}%")' "${readers[@]}"
