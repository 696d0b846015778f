#include "sim/head_view.hpp"

#include <algorithm>

namespace kvlab {

void rotate_original(const RopeTable& rope, const HeadArithmetic& arithmetic, const float* x,
                     std::uint32_t head_size, std::uint32_t position, float* y) {
  rope.rotate(x, head_size, position, y);
  if (arithmetic.rounding)
    for (std::uint32_t d = 0; d < head_size; ++d) y[d] = round_to(*arithmetic.rounding, y[d]);
}

std::vector<Admission> admissions_of(const std::vector<Segment>& segments, Prefill prefill) {
  std::vector<Admission> admissions;
  for (const Segment& segment : segments) {
    std::uint32_t chunk = 1;
    if (segment.kind == SegmentKind::prompt)
      chunk = prefill.chunk == 0 ? segment.tokens : prefill.chunk;
    for (std::uint32_t done = 0; done < segment.tokens; done += chunk)
      admissions.push_back({segment.start + done, std::min(chunk, segment.tokens - done)});
  }
  return admissions;
}

}  // namespace kvlab
