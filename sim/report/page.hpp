// The parts of every page: frame, sections, figures.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "sim/report/figure.hpp"

namespace kvlab {

/// One self-contained HTML file that makes no requests. `title` is text, `body` HTML, `data` the
/// input of its scripts. Without Vega the page has no scripts and says so.
std::string html_page(std::string_view title, const std::string& body,
                      const nlohmann::ordered_json& data);

/// A section that the page's scripts fill with `figures`, which are added to `data`. Empty if there
/// are none.
std::string figures_section(std::string_view heading, std::string_view text,
                            const std::vector<Figure>& figures, nlohmann::ordered_json& data);

/// The section of error against bytes, which comes first.
std::string frontier_section(const Figure& frontier, nlohmann::ordered_json& data);

/// A section that the page's scripts fill, found by its id. Heading and text are HTML.
std::string html_open_section(std::string_view id, std::string_view heading, std::string_view text);

/// A section of HTML content, in a <div> of `content_class` unless that is empty.
std::string html_section(std::string_view heading, std::string_view text,
                         const std::string& content, std::string_view content_class = {});

/// The top of a page: a question, the sentence that answers it, and a note in small print. All are
/// HTML.
std::string html_header(std::string_view kind, std::string_view question, std::string_view context,
                        std::string_view answer, std::string_view accent, std::string_view note);

/// The top of a page with the answer as a table or other HTML.
std::string html_front(std::string_view kind, std::string_view question, std::string_view context,
                       std::string_view front);

/// A list of terms (text) and their meanings (HTML).
std::string html_terms(const std::vector<std::pair<std::string, std::string>>& terms);

}  // namespace kvlab
