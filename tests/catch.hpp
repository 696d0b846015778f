// One set of names for Catch2 2 (Debian 12) and Catch2 3.
#pragma once

#ifdef KVLAB_CATCH2_V2
#include <catch2/catch.hpp>
namespace Catch::Matchers {
inline auto ContainsSubstring(const std::string& part) { return Contains(part); }
}  // namespace Catch::Matchers
#else
#include <catch2/catch_all.hpp>
using Catch::Approx;
#endif
