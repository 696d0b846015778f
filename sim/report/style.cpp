#include "sim/report/style.hpp"

#include <fmt/format.h>

#include "sim/report/palette.hpp"

namespace kvlab {
namespace {

constexpr const char* kRules = R"css(
* { box-sizing: border-box; }
html { color-scheme: light dark; -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 17px/1.6 system-ui, -apple-system, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 3rem 1.5rem 4rem; }
header p, .prose { max-width: 46rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .4rem; font-weight: 650; letter-spacing: -.01em; }
h2 { font-size: 1.25rem; margin: 3.2rem 0 .5rem; font-weight: 650; }
h3 { font-size: 1rem; margin: 0 0 .3rem; font-weight: 600; }
p { margin: .5rem 0; }
.quiet, caption { color: var(--muted); }
.quiet { font-size: .92rem; }
.answer { font-size: 1.18rem; line-height: 1.55; margin: 1.6rem 0 .4rem; padding: .1rem 0 .1rem 1.1rem;
  border-left: 4px solid var(--accent); }
.figures { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 2.2rem 2.4rem;
  margin: 1.2rem 0; }
.figures.small { grid-template-columns: repeat(3, minmax(0, 1fr)); gap: 1.6rem 2rem; }
.figures > div:only-child { grid-column: 1 / -1; }
.scroll { overflow-x: auto; margin: 1rem 0; width: fit-content; max-width: 100%; border-right: 1px solid var(--rule); }
table { border-collapse: separate; border-spacing: 0; font-size: .88rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding-bottom: .4rem; font-size: .88rem; }
th, td { padding: .28rem 1.3rem .28rem 0; text-align: left; vertical-align: baseline; white-space: nowrap; }
th { font-weight: 600; border-bottom: 1.5px solid var(--muted); vertical-align: bottom; }
td { border-bottom: 1px solid var(--rule); }
.n { text-align: right; }
th:first-child, td:first-child { position: sticky; left: 0; background: var(--page); text-align: left; z-index: 1;
  max-width: 24rem; overflow: hidden; text-overflow: ellipsis; }
.w { white-space: normal; min-width: 15rem; max-width: 26rem; }
.dot { display: inline-block; width: .62em; height: .62em; border-radius: 50%; margin-right: .5em; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .25rem 1.4rem; margin: .8rem 0;
  font-size: .92rem; }
dt { color: var(--muted); }
dd { margin: 0; overflow-wrap: anywhere; }
code { font: .88em ui-monospace, "DejaVu Sans Mono", monospace; }
summary { cursor: pointer; }
@media (max-width: 820px) {
  main { padding: 1.6rem 1rem 3rem; }
  th:first-child, td:first-child { min-width: 7rem; max-width: 9.5rem; white-space: normal; overflow-wrap: anywhere; }
  .figures, .figures.small { grid-template-columns: minmax(0, 1fr); }
  h1 { font-size: 1.5rem; }
  .answer { font-size: 1.05rem; }
  dl { grid-template-columns: minmax(0, 1fr); gap: 0; }
  dd { margin-bottom: .5rem; }
}
@media print { main { max-width: none; padding: 0; } .figures > div { break-inside: avoid; } }
)css";

}  // namespace

std::string style_sheet() {
  std::string light = "--page:#fff;", dark = "--page:#15181b;";
  for (const PageColour& colour : page_colours()) {
    light += fmt::format("--{}:{};", colour.name, colour.light);
    dark += fmt::format("--{}:{};", colour.name, colour.dark);
  }
  // What a reader chose comes before what the system asks for.
  return fmt::format(
      ":root{{{0}}}\n@media (prefers-color-scheme: dark){{:root{{{1}}}}}\n"
      ":root[data-theme=\"light\"]{{{0}}}\n:root[data-theme=\"dark\"]{{{1}}}{2}",
      light, dark, kRules);
}

}  // namespace kvlab
