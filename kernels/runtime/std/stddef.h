// For NVRTC, which brings no headers of the language: what kvlab.h uses of this.
#pragma once
#include <cstddef>
using std::size_t;
