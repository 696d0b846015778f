#include "traces/base/message.hpp"

#include "traces/base/text.hpp"

namespace kvlab {

std::string brief_line(std::string_view text) {
  constexpr std::size_t kLongest = 1000;
  std::string line = printable(text);
  if (line.size() <= kLongest) return line;
  // A character that is cut in two is not valid UTF-8; printable() replaces it.
  return printable(line.substr(0, kLongest / 2) + " ... " +
                   line.substr(line.size() - kLongest / 2));
}

}  // namespace kvlab
