// Replaces this standard header, which NVRTC lacks, with what kvlab.h uses.
#pragma once
#include <cstddef>
using std::size_t;
