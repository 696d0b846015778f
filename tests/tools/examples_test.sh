#!/bin/sh
# examples_test.sh KVLAB SOURCE: runs the example in each command's --help unchanged. The commands run in the order in
# which a user would run them, in a folder that looks like a checkout.
set -eu
kvlab=$1 source=$2
. "$source/tests/scripts/check.sh"
enter_scratch
ln -s "$source/engine" "$source/tools" "$source/traces" .
mkdir bin
ln -s "$kvlab" bin/kvlab
PATH=$folder/bin:$PATH
for command in capture trace replay report compare deploy generate eval task verify policies manual bench demo; do
  if [ "$command" = compare ]; then  # this example needs a second run, with other policies
    kvlab replay --trace trace --policy sink,tova --budget 64,128,20% --out other-run >/dev/null 2>&1
  fi
  example=$(kvlab "$command" --help | sed -n 's/^Example: //p')
  echo "$example"
  # One benchmark needs OpenBLAS. It is left out if OpenBLAS is not installed.
  if ! said=$(sh -c "$example" 2>&1 >/dev/null); then
    case $said in
      *"OpenBLAS"*"cannot be loaded"*) echo "left out: $said" ;;
      *) echo "$said" >&2; exit 1 ;;
    esac
  fi
done
