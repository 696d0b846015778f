# Lines of code and of comment, blank ones aside: awk -f lines.awk FILE... prints "CODE COMMENT". In C, C++, CUDA,
# JavaScript and CSS a comment is a line that begins with // or lies in /* */; in Python # and docstrings; else #.
FNR == 1 { inside = 0; language = FILENAME ~ /\.pyi?$/ ? "python" : FILENAME ~ /\.(sh|awk|cmake)$/ ? "shell" : "c" }
/^[ \t\r]*$/ { next }
{ sub(/^[ \t]+/, "") }
language == "python" { is_comment() ? ++comments : ++code; next }
language == "shell" { /^#/ ? ++comments : ++code; next }
inside || /^\/[\/*]/ { ++comments; inside = (inside || /^\/\*/) && !/\*\//; next }
{ ++code }
END { print code + 0, comments + 0 }

# Of a line of Python: a text in """ that no name is given is a docstring.
function is_comment(    quotes, is) {
  quotes = gsub(/"""/, "&")
  if (inside) { is = docstring; inside = quotes % 2 == 0; return is }
  if (/^#/) return 1
  inside = quotes % 2
  docstring = /^[rR]?"""/
  return docstring
}
