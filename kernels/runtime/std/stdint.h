// For NVRTC, which brings no headers of the language: what kvlab.h uses of this.
#pragma once
#include <cstdint>
using std::int32_t;
using std::int64_t;
using std::uint32_t;
using std::uint64_t;
