#!/bin/sh
# installed_test.sh BUILD SOURCE: an installed kvlab runs its demo in an empty folder, and brings its manual.
set -eu
build=$1 source=$2
. "$source/tests/scripts/check.sh"
enter_scratch
cmake --install "$build" --prefix "$folder/prefix" --component command >install.log
prefix/bin/kvlab demo >demo.log 2>&1 || { cat demo.log; fail "the demo of an installed kvlab"; }
grep -q -- "--model prefix/share/kvlab/engine/models/tiny" demo.log || fail "the demo ran on the checkout's model"
[ -s demo/report.html ] || fail "the demo left no report"
grep -q "TH KVLAB" prefix/share/man/man1/kvlab.1 || fail "no man page was installed"
