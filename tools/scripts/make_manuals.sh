#!/bin/sh
# make_manuals.sh KVLAB OUT: writes man pages with help2man from the help texts: kvlab(1), and kvlab-COMMAND(1) for each
# command.
set -eu
kvlab=$(realpath "$1") out=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
version=$("$kvlab" --version | sed -n 's/^kvlab //p')

# page NAME SUMMARY: writes the man page NAME from the help text that the program NAME in $work prints.
page() {
  chmod +x "$work/$1"
  help2man --no-info --version-string="$version" --name="$2" "$work/$1" >"$out/$1.1"
}

printf '#!/bin/sh\nexec "%s" --help\n' "$kvlab" >"$work/kvlab"
page kvlab "design KV-cache eviction policies offline, deploy them online"
"$kvlab" --help | sed -n '/^Commands/,$ s/^  \([a-z]*\)  *\(.*\)/\1 \2/p' >"$work/commands"
while read -r command summary; do
  # help2man expects each usage on one line.
  "$kvlab" "$command" --help | awk '
    /^Usage/ {usage = 1}
    usage && /^$/ {print line; usage = 0}
    usage && /^       kvlab/ {print line; line = "  or:  " substr($0, 8); next}
    usage {sub(/^ +/, " "); line = line $0; next}
    {print}' >"$work/$command.help"
  printf '#!/bin/sh\nexec cat "%s"\n' "$work/$command.help" >"$work/kvlab-$command"
  page "kvlab-$command" "$summary"
done <"$work/commands"
