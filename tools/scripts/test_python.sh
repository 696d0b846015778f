#!/usr/bin/env bash
# The Python package as people install it: an empty virtual environment, pip install, its tests, its types.
# tools/scripts/test_python.sh [PYTHON]; KVLAB_COMMAND names a kvlab whose results are compared.
set -euo pipefail
python=$(command -v "${1:-python3}")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
"$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
  { echo "skipped: $python is no Python 3.10 with venv"; exit 0; }
folder=$PWD/build-python/venv
"$python" -m venv --clear "$folder"
began=$SECONDS
"$folder/bin/pip" install --quiet --disable-pip-version-check '.[all]' || { echo "pip could not install kvlab" >&2; exit 1; }
echo "pip install took $((SECONDS - began)) s"
"$folder/bin/pip" install --quiet --disable-pip-version-check pytest mypy pandas-stubs
"$folder/bin/python" -m pytest -q -p no:cacheprovider tests/python
"$folder/bin/python" -m mypy --strict --cache-dir build-python/mypy -m kvlab._commands -m kvlab._policy -m kvlab._run -m kvlab._trace
"$folder/bin/python" -m mypy --strict --cache-dir build-python/mypy tools/examples/compare_policies.py
