#include "traces/trace.hpp"
