#!/usr/bin/env bash
# Tests the Python package as users install it: in an empty virtual environment, with pip, its tests and its types.
# kvlab.hf is tested with the newest transformers and with the oldest supported one.
#
#       tools/scripts/test_python.sh [PYTHON]
#       tools/scripts/test_python.sh --sanitize
#
# KVLAB_COMMAND: the path of a kvlab command, whose results are compared with the package's. KVLAB_BUILD: the folder of
# a release build, whose objects are reused, so that only the extension is compiled. --sanitize repeats the tests with
# the extension under ASan and UBSan. It needs a run without --sanitize first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
folder=$PWD/build-python/venv

sanitize() {
  local build library preload="" package=$PWD/build-python/asan
  [[ -x $folder/bin/python ]] || { echo "skipped: tools/scripts/test_python.sh has installed nothing"; return; }
  # Reuses what pip built. Only the extension's own files, and the code that reads Python's arrays, are compiled again.
  build=${KVLAB_BUILD:-$(dirname "$(ls -t build-python/*/CMakeInit.txt | head -1)")}
  "$folder/bin/pip" install --quiet --disable-pip-version-check nanobind
  cmake "$build" -U 'NB_*' -U nanobind_DIR -DKVLAB_SANITIZE_EXTENSION=ON -DPython_EXECUTABLE="$folder/bin/python" >/dev/null
  cmake --build "$build" --target _kvlab
  rm -rf "$package"
  mkdir "$package"
  cp -r tools/python/kvlab "$package"
  mv "$build"/tools/python/_kvlab*.so "$package/kvlab"
  cp -r "$folder"/lib/python3*/site-packages/kvlab/share "$package/kvlab"
  for library in libasan.so libubsan.so libstdc++.so; do
    preload+="$(g++ -print-file-name=$library) "
  done
  # Leaks are not reported, because Python itself leaks by design. The tests that are left out use PyTorch, the command,
  # or code that is compiled at run time, which are not part of the extension.
  local left_out=(commands.py experiments.py pages.py notebooks.py words.py cache.py hf.py families.py calls.py capture.py sensitivities.py evicting.py evicting_cuda.py ops.py exports.py)
  ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0 LD_PRELOAD=$preload PYTHONPATH=$package \
    "$folder/bin/python" -m pytest -q -p no:cacheprovider tests/python "${left_out[@]/#/--ignore=tests/python/test_}" \
    -k "not header_of_ones_own and not libcachesim and not opening_copies"
}

if [[ ${1:-} == --sanitize ]]; then
  sanitize
  exit
fi
python=$(command -v "${1:-python3}")
"$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
  { echo "skipped: $python is not Python 3.10 or newer with venv"; exit 0; }
"$python" -m venv --clear "$folder"
# install PACKAGE...: installs with uv, which takes a fifth of pip's time, or else with pip.
install() {
  "$folder/bin/uv" pip install --quiet --python "$folder/bin/python" "$@" ||
    "$folder/bin/pip" install --quiet --disable-pip-version-check "$@"
}
"$folder/bin/pip" install --quiet --disable-pip-version-check uv
began=$SECONDS shared=()
if [[ -n ${KVLAB_BUILD:-} ]]; then
  shared=(-C build-dir="$KVLAB_BUILD")
  # The options of the reused objects, instead of those of pyproject.toml.
  for switch in $(sed -nE 's/^(KVLAB_(COMMAND|CUDA|MPI|TESTS|WERROR)):BOOL=/\1=/p' "$KVLAB_BUILD/CMakeCache.txt"); do
    shared+=(-C cmake.define."$switch")
  done
fi
wheels=$PWD/build-python/checked  # the wheel that pip would install from the checkout, kept so that its contents can be
                                  # checked
rm -rf "$wheels"
"$folder/bin/pip" wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$wheels" "${shared[@]}" . &&
  "$folder/bin/pip" install --quiet --disable-pip-version-check "$(echo "$wheels"/kvlab-*.whl)" &&
  install "$(echo "$wheels"/kvlab-*.whl)[all]" ||
  { echo "pip could not install kvlab" >&2; exit 1; }
echo "pip install took $((SECONDS - began)) s"
"$folder/bin/python" tools/scripts/check_wheel.py "$wheels"/kvlab-*.whl
install pytest mypy pandas-stubs types-tqdm papermill ipykernel gguf==0.19.0 libcachesim
install xllamacpp==2026.10.11549 pyyaml ||
  echo "xllamacpp could not be installed: exports are not given to llama.cpp's parser" >&2
# For kvlab.hf: 3 GB.
install torch==2.11.0 transformers safetensors peft torchao bitsandbytes accelerate optimum-quanto==0.2.7 ||
  echo "PyTorch could not be installed: the tests of kvlab.hf are skipped" >&2
"$folder/bin/python" -m pytest -q -p no:cacheprovider tests/python
# Long tests whose result does not depend on the version of transformers. They are left out with the oldest version.
long="real_model and not differing_traces and not finite_differences and not unreachable_hub and not parts_that_bound"
oldest=$PWD/build-python/oldest-transformers  # searched before the newest; contains only what differs
rm -rf "$oldest"
if "$folder/bin/uv" pip install --quiet --python "$folder/bin/python" --no-deps --target "$oldest" \
  transformers==4.54.1 tokenizers==0.21.4 huggingface-hub==0.36.2; then
  PYTHONPATH=$oldest "$folder/bin/python" -m pytest -q -p no:cacheprovider \
    tests/python/test_{hf,cache,families,calls,evicting,capture,sensitivities}.py \
    -k "not quantised and not $long"  # current quantisers do not work with that version of transformers
else
  echo "transformers 4.54.1 could not be installed: the tests of kvlab.hf with it are skipped" >&2
fi
# Tests features without transformers, with the Python and the PyTorch that ./dev test --optional installed.
old=${KVLAB_HF_PYTHON:-$PWD/build-python/bin/python} package=$PWD/build-python/package
mkdir -p "$package"
ln -sfn "$("$folder/bin/python" -c 'import pathlib, kvlab; print(pathlib.Path(kvlab.__file__).parent)')" "$package/kvlab"
if PYTHONPATH=$package "$old" -c 'import pytest, torch, kvlab' 2>/dev/null; then
  PYTHONPATH=$package "$old" -m pytest -q -p no:cacheprovider tests/python/test_{features,presses}.py
else
  echo "$old cannot import pytest, torch and kvlab: the tests of features with it are skipped" >&2
fi
presses=$PWD/build-python/kvpress  # kvpress needs an older transformers
if "$folder/bin/uv" venv --quiet --clear --python "$python" "$presses" &&
  "$folder/bin/uv" pip install --quiet --python "$presses/bin/python" torch==2.11.0 kvpress==0.5.5 pytest; then
  PYTHONPATH=$package "$presses/bin/python" -m pytest -q -p no:cacheprovider tests/python/test_kvpress.py
else
  echo "kvpress could not be installed: its tests are skipped" >&2
fi
mypy=("$folder/bin/python" -m mypy --strict --cache-dir build-python/mypy)
"${mypy[@]}" -m kvlab._accesses -m kvlab._commands -m kvlab._policy -m kvlab._progress -m kvlab._run -m kvlab._trace
"${mypy[@]}" -p kvlab.hf
"${mypy[@]}" tools/examples/compare_policies.py
