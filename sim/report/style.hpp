// The page's style sheet.
#pragma once

#include <string>

namespace kvlab {

/// CSS, with the page's colours for light and for dark.
std::string style_sheet();

}  // namespace kvlab
