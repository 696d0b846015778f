// NVRTC has no standard headers: the part of this one that kvlab.h uses.
#pragma once
#include <cstddef>
using std::size_t;
