#!/bin/sh
# Tries a wheel on an empty system that has only python3 and its venv module:
#
#       tools/scripts/try_wheel.sh WHEEL README
#
# It installs WHEEL to a new virtual environment in the current folder, which may take at most 60 s. Then it runs the
# commands and the Python code of README that follow a comment "try_wheel.sh". Finally it runs `kvlab demo` and checks
# that its page has figures.
#
# To make such a system on Debian, as root:
#
#       debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm /tmp/empty
#       mkdir /tmp/empty/try && cp WHEEL README.md tools/scripts/try_wheel.sh /tmp/empty/try
#       chroot /tmp/empty sh -c 'cd /try && sh try_wheel.sh *.whl README.md'
set -eu
wheel=$1 readme=$2
fail() { echo "try_wheel.sh: $*" >&2; exit 1; }
# block LANGUAGE: prints the block of README that is marked for this script.
block() {
  awk -v fence="\`\`\`$1" '/^<!-- try_wheel.sh -->$/ {marked = 1; next}
    inside && /^```$/ {exit} inside {print} marked && $0 == fence {inside = 1} {marked = 0}' "$readme"
}

! command -v c++ >/dev/null || echo "try_wheel.sh: this system has a compiler; an empty one tests more"
python3 -m venv env
before=$(date +%s)
env/bin/pip install --quiet --disable-pip-version-check "$wheel"
took=$(($(date +%s) - before))
echo "pip installed it in $took s"
[ $took -le 60 ] || fail "pip took longer than 60 s"
PATH=$PWD/env/bin:$PATH
kvlab --version
for language in sh python; do
  block $language >quickstart.$language
  [ -s quickstart.$language ] || fail "$readme has no block of $language that is marked"
done
sh -ex quickstart.sh
python3 quickstart.python
kvlab demo --out empty-demo
grep -q "vegaModule('vega-view'" empty-demo/report.html || fail "the demo's page has no figures"
echo "try_wheel.sh: passed"
