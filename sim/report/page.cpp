#include "sim/report/page.hpp"

#include <fmt/format.h>

#include <string>

#include "sim/report/figure.hpp"
#include "sim/report/html.hpp"
#include "sim/report/interactive/dataset.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

// The page's style sheet.

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

/// CSS with the page's colours for light and dark mode.
std::string style_sheet() {
  std::string light = "--page:#fff;", dark = "--page:#15181b;";
  for (const PageColour& colour : page_colours()) {
    light += fmt::format("--{}:{};", colour.name, colour.light);
    dark += fmt::format("--{}:{};", colour.name, colour.dark);
  }
  // The reader's choice takes precedence over the system's setting.
  return fmt::format(
      ":root{{{0}}}\n@media (prefers-color-scheme: dark){{:root{{{1}}}}}\n"
      ":root[data-theme=\"light\"]{{{0}}}\n:root[data-theme=\"dark\"]{{{1}}}{2}",
      light, dark, kRules);
}

/// Hides the places of figures, and says why.
constexpr const char* kNoScript =
    "<noscript><style>.drawn{display:none}</style><p class=\"quiet\">The figures of this page need "
    "JavaScript, which is turned off here. The tables are complete without it.</p></noscript>\n";

}  // namespace

std::string html_page(std::string_view title, const std::string& body,
                      const nlohmann::ordered_json& data) {
  const auto vega = vega_script();
  const std::string scripts =
      vega ? script_elements(data, *vega)
           : fmt::format("<style>.drawn{{display:none}}</style><p class=\"quiet\">{}</p>", kNoVega);
  // The policy forbids all requests, whatever the page contains.
  const char* const allowed =
      !vega ? "default-src 'none'; style-src 'unsafe-inline'"
            : "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
              "img-src data: blob:";
  return fmt::format(
      "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<meta http-equiv=\"Content-Security-Policy\" content=\"{}\">\n"
      "<title>{}</title>\n<style>{}{}</style>\n</head>\n<body>\n<main>\n{}{}</main>\n{}</body>\n</"
      "html>\n",
      allowed, escape(title), style_sheet(), page_file("page.css"), vega ? kNoScript : "", body,
      scripts);
}

std::string html_open_section(std::string_view id, std::string_view heading,
                              std::string_view text) {
  return fmt::format("<section id=\"{}\" class=\"drawn\">\n<h2>{}</h2>\n{}</section>\n", id,
                     heading, text.empty() ? "" : fmt::format("<p class=\"prose\">{}</p>\n", text));
}

std::string html_section(std::string_view heading, std::string_view text,
                         const std::string& content, std::string_view content_class) {
  std::string html = fmt::format("<section>\n<h2>{}</h2>\n", heading);
  if (!text.empty()) html += fmt::format("<p class=\"prose\">{}</p>\n", text);
  if (content_class.empty()) return html + content + "</section>\n";
  return html + fmt::format("<div class=\"{}\">\n{}</div>\n</section>\n", content_class, content);
}

std::string figures_section(std::string_view heading, std::string_view text,
                            const std::vector<Figure>& figures, nlohmann::ordered_json& data) {
  std::string places;
  for (const Figure& figure : figures) {
    if (figure.series.empty()) continue;
    data["figures"].push_back(page_json(figure));
    places += fmt::format("<div id=\"figure-{}\"></div>\n", escape(figure.name));
  }
  if (places.empty()) return "";
  return fmt::format(
      "<section class=\"drawn\">\n<h2>{}</h2>\n<p class=\"prose\">{}</p>\n"
      "<div class=\"figures\">\n{}</div>\n</section>\n",
      heading, text, places);
}

std::string frontier_section(const Figure& frontier, nlohmann::ordered_json& data) {
  return figures_section(
      "Error against memory",
      "Down and to the left is better: a lower error with less memory. Compare points at equal "
      "memory: a lower error at higher memory is not a win. A bar to the right ends at the peak.",
      {frontier}, data);
}

std::string html_header(std::string_view kind, std::string_view question, std::string_view context,
                        std::string_view answer, std::string_view accent, std::string_view note) {
  return fmt::format(
      "<header>\n<p class=\"quiet\">{}</p>\n<h1>{}</h1>\n<p>{}</p>\n"
      "<p class=\"answer\" style=\"--accent:var(--{})\">{}</p>\n<p class=\"quiet\">{}</p>\n"
      "</header>\n",
      kind, question, context, accent, answer, note);
}

std::string html_front(std::string_view kind, std::string_view question, std::string_view context,
                       std::string_view front) {
  return fmt::format(
      "<header>\n<p class=\"quiet\">{}</p>\n<h1>{}</h1>\n<p class=\"prose\">{}</p>\n{}</header>\n",
      kind, question, context, front);
}

std::string html_terms(const std::vector<std::pair<std::string, std::string>>& terms) {
  std::string html = "<dl>";
  for (const auto& [term, meaning] : terms)
    html += fmt::format("<dt>{}</dt><dd>{}</dd>\n", escape(term), meaning);
  return html + "</dl>\n";
}

}  // namespace kvlab
