#!/bin/sh
# installed_test.sh BUILD SOURCE: tests that an installed kvlab runs its demo in an empty folder, and that it includes
# its man pages.
set -eu
build=$1 source=$2
. "$source/tests/scripts/check.sh"
enter_scratch
cmake --install "$build" --prefix "$folder/prefix" --component command >install.log
prefix/bin/kvlab demo >demo.log 2>&1 || { cat demo.log; fail "the demo of an installed kvlab"; }
grep -q -- "--model prefix/share/kvlab/engine/models/tiny" demo.log || fail "the demo ran on the checkout's model"
[ -s demo/report.html ] || fail "the demo left no report"
# An installation's Vega has priority over Debian's.
vega=${KVLAB_VEGA:-/usr/share/javascript/vega}
if [ -d "$vega" ]; then
  mkdir -p prefix/share/kvlab/javascript
  cp -r "$vega" prefix/share/kvlab/javascript/vega
  sed -i '1s|^|/* the installed Vega */|' prefix/share/kvlab/javascript/vega/vega-util.min.js
  env -u KVLAB_VEGA prefix/bin/kvlab report demo/run --out again.html >report.log
  grep -q "the installed Vega" again.html || fail "the report has another Vega than the installed one"
fi
if grep -q "^KVLAB_HELP2MAN:FILEPATH=/" "$build/CMakeCache.txt"; then
  grep -q "^\.TH KVLAB " prefix/share/man/man1/kvlab.1 || fail "no man page was installed"
  grep -q "request\\\\-threshold" prefix/share/man/man1/kvlab-replay.1 || fail "the man page of replay lacks its options"
else
  [ ! -e prefix/share/man ] || fail "man pages were installed, although the build made none"
fi
