// The random numbers of Python's module `random` and of NumPy's `numpy.random.randint`, so that a
// benchmark whose generator is written in Python gets the same samples here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

namespace kvlab {

/// `random.Random(seed)` of CPython 3.11 and later: the Mersenne Twister, seeded with an array.
class PythonRandom {
 public:
  explicit PythonRandom(std::uint64_t seed);

  /// getrandbits(count), with 1 to 32 bits.
  std::uint32_t bits(unsigned count) { return next() >> (32 - count); }
  /// A whole number below `count`, which is 1 to 2^31.
  std::uint32_t below(std::uint32_t count);
  /// random(): a number from 0 up to, but not including, 1.
  double share();
  /// An index below `count`, as choices() samples it.
  std::size_t choices(std::size_t count) {
    return static_cast<std::size_t>(share() * static_cast<double>(count));
  }
  /// sample(range(count), size): distinct numbers below `count`. `size` is at most `count`.
  std::vector<std::uint32_t> sample(std::uint32_t count, std::uint32_t size);

  template <class T>
  void shuffle(std::vector<T>& values) {
    for (std::size_t i = values.size(); i-- > 1;)
      std::swap(values[i], values[below(static_cast<std::uint32_t>(i + 1))]);
  }

 private:
  std::uint32_t next() { return static_cast<std::uint32_t>(engine_()); }

  std::mt19937 engine_;
};

/// `numpy.random.seed(seed)` with `numpy.random.randint`.
class NumpyRandom {
 public:
  explicit NumpyRandom(std::uint32_t seed) : engine_(seed) {}
  /// A whole number from `low` up to, but not including, `high`.
  std::uint32_t whole(std::uint32_t low, std::uint32_t high);

 private:
  std::mt19937 engine_;
};

}  // namespace kvlab
