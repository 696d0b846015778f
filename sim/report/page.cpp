#include "sim/report/page.hpp"

#include <fmt/format.h>

#include "sim/report/html.hpp"
#include "sim/report/interactive/scripts.hpp"
#include "sim/report/interactive/vega.hpp"
#include "sim/report/style.hpp"
#include "traces/base/json.hpp"

namespace kvlab {

std::string html_page(std::string_view title, const std::string& body,
                      const nlohmann::ordered_json& data) {
  const auto vega = vega_script();
  const std::string scripts =
      vega ? script_elements(data, *vega)
           : fmt::format("<style>.drawn{{display:none}}</style><p class=\"quiet\">{}</p>", kNoVega);
  // Whatever a page holds, a browser fetches nothing for it.
  const char* const allowed =
      !vega ? "default-src 'none'; style-src 'unsafe-inline'"
            : "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
              "img-src data: blob:";
  return fmt::format(
      "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<meta http-equiv=\"Content-Security-Policy\" content=\"{}\">\n"
      "<title>{}</title>\n<style>{}{}</style>\n</head>\n<body>\n<main>\n{}</main>\n{}</body>\n</"
      "html>\n",
      allowed, escape(title), style_sheet(), page_file("page.css"), body, scripts);
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
      "What each byte buys",
      "Down and to the left is better: less error, held in fewer bytes. What holds more is not "
      "better for losing less. A bar to the right ends at the most that was held at once.",
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

std::string html_terms(const std::vector<std::pair<std::string, std::string>>& terms) {
  std::string html = "<dl>";
  for (const auto& [term, meaning] : terms)
    html += fmt::format("<dt>{}</dt><dd>{}</dd>\n", escape(term), meaning);
  return html + "</dl>\n";
}

}  // namespace kvlab
