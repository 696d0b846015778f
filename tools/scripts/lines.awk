# Counts lines of code and of comments, without blank lines: awk -f lines.awk FILE... prints "CODE COMMENT". In C, C++,
# CUDA, JavaScript and CSS a comment is a line that begins with // or is inside /* */. In Python it is a line that
# begins with # or is inside a docstring. In other languages it is a line that begins with #.
FNR == 1 { inside = 0; language = FILENAME ~ /\.pyi?$/ ? "python" : FILENAME ~ /\.(sh|awk|cmake)$/ ? "shell" : "c" }
/^[ \t\r]*$/ { next }
{ sub(/^[ \t]+/, "") }
language == "python" { is_comment() ? ++comments : ++code; next }
language == "shell" { /^#/ ? ++comments : ++code; next }
inside || /^\/[\/*]/ { ++comments; inside = (inside || /^\/\*/) && !/\*\//; next }
{ ++code }
END { print code + 0, comments + 0 }

# In Python, a string in """ that is not assigned to a name is a docstring.
function is_comment(    quotes, is) {
  quotes = gsub(/"""/, "&")
  if (inside) { is = docstring; inside = quotes % 2 == 0; return is }
  if (/^#/) return 1
  inside = quotes % 2
  docstring = /^[rR]?"""/
  return docstring
}
