#!/usr/bin/env bash
# Checks the docs: links, anchors and paths in the tree exist; README names policies that exist;
# docs/reference/python.md has every public name; lines have at most 120 characters (tables may be wider).
set -euo pipefail
export LC_ALL=C.UTF-8
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
failed=0
complain() { echo "$*" && failed=1; }

anchors() {
  sed -n 's/^##* //p' "$1" | tr '[:upper:]' '[:lower:]' | sed 's/[^[:alnum:]_ -]//g; s/ /-/g'
}
# A page's paths in the tree, except the example policies/peak.hpp.
paths() {
  grep -oE '`(docs|engine|kernels|policies|sim|tests|tools|traces)/[^` ]*`' "$1" | tr -d '`' | grep -v '/peak\.hpp$' || true
}
links() { grep -oE '\]\([^)]+\)' "$1" | sed 's/^](//; s/)$//' | grep -vE '^https?:' || true; }

for page in README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md docs/*.md docs/*/*.md docs/*/*/*.md; do
  while IFS=: read -r line _; do
    complain "$page:$line: over 120 characters"
  done < <(grep -nE '^[^|].{120,}' "$page")
  while read -r link; do
    target=$page
    [[ $link == '#'* ]] || target=$(dirname "$page")/${link%%#*}
    if [[ ! -e $target ]]; then
      complain "$page: $link does not exist"
    elif [[ $link == *'#'* ]] && ! anchors "$target" | grep -qx -- "${link#*#}"; then
      complain "$page: $link names a heading that does not exist"
    fi
  done < <(links "$page")
  while read -r path; do
    [[ $page == CHANGELOG.md ]] || compgen -G "$path" >/dev/null || complain "$page: $path does not exist"
  done < <(paths "$page")
done
while read -r policy; do
  grep -qF ".name = \"$policy\"" policies/*/*.hpp || complain "README.md: policy $policy does not exist"
done < <(sed -n '/^| policy |/,/^$/s/^| \(`[^|]*`\) |.*/\1/p' README.md | grep -o '[a-z0-9_]*')
while read -r name; do
  grep -qE "kvlab\.(hf\.)?$name\b" docs/reference/python.md || complain "docs/reference/python.md: kvlab.$name is missing"
done < <(sed -n '/^__all__/,/^$/p' tools/python/kvlab/__init__.py tools/python/kvlab/hf/__init__.py | grep -oE '"\w+"' | tr -d '"')
python3 tools/experiments/summary.py --check || failed=1
exit $failed
