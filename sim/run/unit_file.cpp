#include "sim/run/unit_file.hpp"

#include <fmt/format.h>

#include <cstring>
#include <stdexcept>

#include "traces/base/files.hpp"

namespace kvlab {
namespace {

constexpr std::string_view kMagic = "kvunit 4";
constexpr std::size_t kHashDigits = 16;

/// Writes, field after field; little endian, as all of our machines are.
class Packer {
 public:
  explicit Packer(std::string& bytes) : bytes_(bytes) {}

  void operator()(const std::uint64_t& value) { append(&value, sizeof(value)); }
  void operator()(const std::vector<double>& values) {
    (*this)(std::uint64_t{values.size()});
    append(values.data(), values.size() * sizeof(double));
  }
  void operator()(const std::vector<float>& values) {
    (*this)(std::uint64_t{values.size()});
    append(values.data(), values.size() * sizeof(float));
  }
  template <class T, class Each>
  void list(const std::vector<T>& values, Each each) {
    (*this)(std::uint64_t{values.size()});
    for (const T& value : values) each(*this, value);
  }

 private:
  void append(const void* data, std::size_t size) {
    if (size) bytes_.append(static_cast<const char*>(data), size);
  }
  std::string& bytes_;
};

/// Reads the same fields. Throws std::runtime_error where the bytes end too early.
class Unpacker {
 public:
  explicit Unpacker(std::string_view bytes) : rest_(bytes) {}

  void operator()(std::uint64_t& value) { take(&value, 1, sizeof(value)); }
  void operator()(std::vector<double>& values) {
    values.resize(count(sizeof(double)));
    take(values.data(), values.size(), sizeof(double));
  }
  void operator()(std::vector<float>& values) {
    values.resize(count(sizeof(float)));
    take(values.data(), values.size(), sizeof(float));
  }
  template <class T, class Each>
  void list(std::vector<T>& values, Each each) {
    values.resize(count(sizeof(std::uint64_t)));
    for (T& value : values) each(*this, value);
  }
  bool empty() const { return rest_.empty(); }

 private:
  /// A length whose entries, of at least `least` bytes each, can be there.
  std::size_t count(std::size_t least) {
    std::uint64_t value = 0;
    (*this)(value);
    if (value > rest_.size() / least) throw std::runtime_error("a length is past its end");
    return static_cast<std::size_t>(value);
  }
  void take(void* to, std::size_t number, std::size_t size) {
    if (number * size > rest_.size()) throw std::runtime_error("it ends too early");
    if (number) std::memcpy(to, rest_.data(), number * size);
    rest_.remove_prefix(number * size);
  }
  std::string_view rest_;
};

// One list of fields for both directions: `Stream` packs or unpacks.

template <class Stream, class Id>
void id_fields(Stream& stream, Id& id) {
  stream(id.job);
  stream(id.trace);
  stream(id.unit);
}

template <class Stream, class Outcome>
void outcome_fields(Stream& stream, Outcome& outcome) {
  stream(outcome.evictions);
  stream(outcome.live_max);
  stream(outcome.live_end);
  stream(outcome.stats.error2);
  stream(outcome.stats.output2);
  stream(outcome.stats.residual);
  stream(outcome.stats.changes);
  stream.list(outcome.stats.heads, [](auto& s, auto& head) {
    s(head.zero_outputs);
    const auto ratio = [](auto& to, auto& of) {
      to(of.above);
      to(of.below);
    };
    for (auto* of : {&head.recall, &head.nll, &head.miss, &head.error}) ratio(s, *of);
    s.list(head.spans, ratio);
  });
}

std::vector<HeadOutcome> unpack(const UnitId& id, std::string_view bytes) {
  if (!bytes.starts_with(kMagic) || bytes.size() < kMagic.size() + kHashDigits)
    throw std::runtime_error("it is no unit of this version's, or cut short");
  const std::string_view body = bytes.substr(0, bytes.size() - kHashDigits);
  if (bytes.substr(body.size()) != xxh3_hex(body))
    throw std::runtime_error("its checksum does not match");
  Unpacker unpacker(body.substr(kMagic.size()));
  UnitId found;
  id_fields(unpacker, found);
  if (found != id) throw std::runtime_error("it is another unit, or of another replay");
  std::vector<HeadOutcome> outcomes;
  unpacker.list(outcomes, [](auto& s, auto& outcome) { outcome_fields(s, outcome); });
  if (!unpacker.empty()) throw std::runtime_error("something follows its end");
  return outcomes;
}

}  // namespace

std::string pack_unit(const UnitId& id, std::span<const HeadOutcome> outcomes) {
  std::string bytes(kMagic);
  Packer packer(bytes);
  id_fields(packer, id);
  packer(std::uint64_t{outcomes.size()});
  for (const HeadOutcome& outcome : outcomes) outcome_fields(packer, outcome);
  return bytes + xxh3_hex(bytes);
}

std::vector<HeadOutcome> unpack_unit(const UnitId& id, std::string_view bytes,
                                     std::string_view file) {
  try {
    return unpack(id, bytes);
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(fmt::format("{}: {}", file, error.what()));
  }
}

}  // namespace kvlab
