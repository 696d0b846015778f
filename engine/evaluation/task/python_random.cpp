#include "engine/evaluation/task/python_random.hpp"

#include <algorithm>
#include <bit>
#include <numeric>
#include <unordered_set>

namespace kvlab {
namespace {

/// A seed sequence for std::mt19937, which copies the numbers of a seed sequence into its state.
/// The numbers are those that init_by_array(), the function of the Mersenne Twister's authors,
/// writes.
class ArraySeed {
 public:
  using result_type = std::uint32_t;

  explicit ArraySeed(std::vector<std::uint32_t> key) : key_(std::move(key)) {}

  template <class Iterator>
  void generate(Iterator begin, Iterator end) const {
    const auto size = static_cast<std::size_t>(end - begin);
    std::vector<std::uint32_t> state(size);
    state[0] = 19650218u;
    for (std::size_t i = 1; i < size; ++i)
      state[i] =
          1812433253u * (state[i - 1] ^ (state[i - 1] >> 30)) + static_cast<std::uint32_t>(i);
    std::size_t i = 1;
    const auto mix = [&](std::uint32_t factor) {
      state[i] ^= (state[i - 1] ^ (state[i - 1] >> 30)) * factor;
    };
    const auto advance = [&] {
      if (++i < size) return;
      state[0] = state[size - 1];
      i = 1;
    };
    for (std::size_t step = 0; step < std::max(size, key_.size()); ++step) {
      const std::size_t j = step % key_.size();
      mix(1664525u);
      state[i] += key_[j] + static_cast<std::uint32_t>(j);
      advance();
    }
    for (std::size_t step = 1; step < size; ++step) {
      mix(1566083941u);
      state[i] -= static_cast<std::uint32_t>(i);
      advance();
    }
    state[0] = 0x80000000u;
    std::ranges::copy(state, begin);
  }

 private:
  std::vector<std::uint32_t> key_;
};

std::mt19937 seed_engine(std::uint64_t seed) {
  std::vector<std::uint32_t> key{static_cast<std::uint32_t>(seed)};
  if (seed >> 32) key.push_back(static_cast<std::uint32_t>(seed >> 32));
  ArraySeed sequence(std::move(key));
  return std::mt19937(sequence);
}

}  // namespace

PythonRandom::PythonRandom(std::uint64_t seed) : engine_(seed_engine(seed)) {}

std::uint32_t PythonRandom::below(std::uint32_t count) {
  const auto width = static_cast<unsigned>(std::bit_width(count));
  std::uint32_t number = bits(width);
  while (number >= count) number = bits(width);
  return number;
}

double PythonRandom::share() {
  const std::uint32_t high = next() >> 5, low = next() >> 6;
  return (static_cast<double>(high) * 0x1p26 + static_cast<double>(low)) * 0x1p-53;
}

std::vector<std::uint32_t> PythonRandom::sample(std::uint32_t count, std::uint32_t size) {
  // As in Python: samples from a list if the list needs no more memory than a set of the samples.
  std::uint64_t set_size = 21;
  if (size > 5) {
    std::uint64_t power = 1;
    while (power < std::uint64_t{3} * size) power *= 4;
    set_size += power;
  }
  std::vector<std::uint32_t> samples;
  if (count <= set_size) {
    std::vector<std::uint32_t> left(count);
    std::iota(left.begin(), left.end(), 0u);
    for (std::uint32_t i = 0; i < size; ++i) {
      const std::uint32_t taken = below(count - i);
      samples.push_back(left[taken]);
      left[taken] = left[count - i - 1];
    }
    return samples;
  }
  std::unordered_set<std::uint32_t> known;
  while (samples.size() < size)
    if (const std::uint32_t one = below(count); known.insert(one).second) samples.push_back(one);
  return samples;
}

std::uint32_t NumpyRandom::whole(std::uint32_t low, std::uint32_t high) {
  const std::uint32_t max_number = high - 1 - low;
  const std::uint32_t mask = std::bit_ceil(max_number + 1) - 1;
  while (true)
    if (const auto number = static_cast<std::uint32_t>(engine_()) & mask; number <= max_number)
      return low + number;
}

}  // namespace kvlab
