# Prints functions that are too long, by their braces: awk -v most=70 -f house.awk FILE... (C++ formatted by
# clang-format, or Python). It prints FILE:LINE: N lines, and the beginning of the function.
#
# A brace opens a function if the text before it contains a parenthesis and no enclosing brace is a function's.
# Preprocessor branches with unbalanced braces are not handled.
FNR == 1 { close_python(); text = ""; depth = inside = comment = raw = 0; python = FILENAME ~ /\.py$/ }

python { scan_python($0); next }
{ scan_line($0) }
END { close_python() }

function report(file, line, lines, head) {
  if (lines <= most) return
  printf "%s:%d: %d lines: %s\n", file, line, lines, substr(head, 1, 60)
}

# --- Python: a def ends before the next line that is not indented more than the def ------------------------

function scan_python(line,    indent) {
  if (line ~ /^[ \t]*($|#|\))/) return
  match(line, /^ */)
  indent = RLENGTH
  if (open_def && indent <= def_indent) close_python()
  if (!open_def && line ~ /^ *(async )?def /) {
    open_def = 1; def_indent = indent; def_line = FNR; def_file = FILENAME; def_head = line
  }
  last_line = FNR
}
function close_python() {
  if (open_def) report(def_file, def_line, last_line - def_line + 1, def_head)
  open_def = 0
}

# --- C++ ---------------------------------------------------------------------------------------------

# A line without comments and without the contents of its strings.
function bare(line,    out, at, rest) {
  out = ""
  while (line != "") {
    if (comment) {
      at = index(line, "*/")
      if (!at) return out
      comment = 0; line = substr(line, at + 2)
    } else if (raw) {
      at = index(line, raw_end)
      if (!at) return out
      raw = 0; line = substr(line, at + length(raw_end))
    } else if (match(line, /\/\/|\/\*|R"[^( ]*\(|"|'[^']'|'\\.[^']*'/)) {
      out = out substr(line, 1, RSTART - 1)
      rest = substr(line, RSTART, RLENGTH)
      line = substr(line, RSTART + RLENGTH)
      if (rest == "//") return out
      if (rest == "/*") comment = 1
      else if (rest == "\"") line = after_string(line)
      else if (substr(rest, 1, 1) == "R") {
        raw = 1; raw_end = ")" substr(rest, 3, length(rest) - 3) "\""
      }
    } else {
      return out line
    }
  }
  return out
}
function after_string(line) {
  while (match(line, /\\.|"/)) {
    if (substr(line, RSTART, 1) == "\"") return substr(line, RSTART + 1)
    line = substr(line, RSTART + 2)
  }
  return ""
}

function scan_line(line,    code, i, c) {
  if (line ~ /^ *(#|(public|private|protected):)/) return
  code = bare(line)
  if (code !~ /[{};]/) { add_text(code); return }
  for (i = 1; i <= length(code); ++i) {
    c = substr(code, i, 1)
    if (c == "{") open_brace(substr(code, i - 1, 1))
    else if (c == "}") close_brace(substr(code, i + 1))
    else if (c == ";" && !inside) text = ""
    else if (!inside) add_text(c)
  }
}
function add_text(more) {
  if (inside) return
  if (text == "" && more ~ /^ *$/) return
  if (text == "") text_line = FNR
  text = text more
}
# `before`: the character before the brace. A brace directly after a name initializes a member.
function open_brace(before) {
  ++depth
  if (inside) return
  if (before ~ /[A-Za-z0-9_>]/ && text ~ /\)/) kind[depth] = "value"
  else if (text ~ /\(/ && text !~ /(^|[ >])(namespace|enum) /) {
    kind[depth] = "function"
    inside = depth; function_line = text_line; function_head = text
  } else {
    kind[depth] = "scope"
    text = ""
  }
}
function close_brace(behind) {
  if (inside == depth) {
    inside = 0
    report(FILENAME, function_line, FNR - function_line + 1, function_head)
  }
  if (!inside && kind[depth] != "value") text = ""
  --depth
}
