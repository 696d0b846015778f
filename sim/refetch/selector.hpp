// The text of --refetch: which tokens a query selects.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace kvlab {

/// How to select the tokens to which a query attends.
struct Selector {
  /// top: the most probable tokens of the full cache. page: the tokens of the pages with the
  /// largest bounds. logged: the tokens that the trace lists.
  enum class Kind { top, page, logged };

  Kind kind = Kind::top;
  /// Maximum number of tokens that a query selects (K); 0 for `logged`, because the trace
  /// determines it.
  std::uint32_t tokens = 1;
  std::uint32_t page = 1;  ///< tokens per page (P)
  std::string text;        ///< as requested
};

/// Parses `top:K`, `page:P:K` and `logged`. Throws std::invalid_argument for any other text.
Selector parse_selector(const std::string& text);

}  // namespace kvlab
