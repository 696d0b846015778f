#include <cmath>

#include "kernels/host/transfer.hpp"
#include "sim/device/head_tasks.hpp"

namespace kvlab {
namespace {

// The angle at a position is the sum of two angles: at the largest multiple of kFine up to the
// position, and at the remainder.
constexpr std::uint32_t kFine = 64;

std::vector<float2> rope_of(const RopeTable& rope) {
  std::vector<float2> angles;
  for (std::uint32_t position = 0; position < rope.positions(); ++position)
    for (std::size_t d = 0; d < rope.cosines(position).size(); ++d)
      angles.push_back({rope.cosines(position)[d], rope.sines(position)[d]});
  return angles;
}

/// The angles at multiples of kFine, [multiple, pair of dimensions]. Dimensions that RoPE does not
/// rotate get angle 0.
std::vector<float2> coarse_rope_of(const RopeTable& rope, int pairs) {
  std::vector<float2> angles;
  for (std::uint32_t position = 0; position < rope.positions(); position += kFine) {
    const auto cosines = rope.cosines(position), sines = rope.sines(position);
    for (std::size_t d = 0; d < static_cast<std::size_t>(pairs); ++d)
      angles.push_back(d < cosines.size() ? float2{cosines[d], sines[d]} : float2{1, 0});
  }
  return angles;
}

std::vector<float2> fine_rope_of(const Rope& rope, int pairs) {
  std::vector<float2> angles;
  for (std::uint32_t position = 0; position < kFine; ++position)
    for (std::size_t d = 0; d < static_cast<std::size_t>(pairs); ++d) {
      const double frequency = d < rope.inv_freq.size() ? rope.inv_freq[d] : 0.0,
                   angle = position * frequency;
      angles.push_back({static_cast<float>(std::cos(angle)), static_cast<float>(std::sin(angle))});
    }
  return angles;
}

std::vector<std::int32_t> measured_of(const HeadTaskPlan& plan) {
  std::vector<std::int32_t> index;
  std::int32_t next = 0;
  for (std::uint32_t query = 0; query < plan.tokens; ++query)
    index.push_back(plan.measured.contains(query) ? next++ : -1);
  return index;
}

std::vector<int2> named_of(const HeadTaskPlan& plan) {
  std::vector<int2> ends;
  for (const Passage& passage : plan.measured.passages())
    ends.push_back(
        {static_cast<int>(passage.start), static_cast<int>(passage.start + passage.tokens)});
  return ends;
}

}  // namespace

Tables::Tables(const HeadTaskPlan& plan)
    : rope(cuda::upload(rope_of(plan.angles), "the angles")),
      coarse(cuda::upload(coarse_rope_of(plan.angles, pairs_of(plan.shape)), "the angles")),
      fine(cuda::upload(fine_rope_of(plan.rope, pairs_of(plan.shape)), "the angles")),
      measured(cuda::upload(measured_of(plan), "the measured queries")),
      named(cuda::upload(named_of(plan), "the measured queries")) {}

}  // namespace kvlab
