// Replaces this standard header, which NVRTC lacks, with what kvlab.h uses.
#pragma once
#include <cstdint>
using std::int32_t;
using std::int64_t;
using std::uint32_t;
using std::uint64_t;
