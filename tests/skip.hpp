// A test that cannot run on this machine calls skip(), which prints the reason and the name of the
// test. ctest then lists the test as skipped.
#pragma once

#include <iostream>
#include <string_view>

#include "tests/catch.hpp"

namespace kvlab {

/// Usage: `if (!device) return skip("no CUDA device");`.
inline void skip(std::string_view why) {
  std::cout << "skipped: " << why << ": " << Catch::getResultCapture().getCurrentTestName()
            << std::endl;
}

}  // namespace kvlab
