#include "sim/run/unit_file.hpp"

#include <fmt/format.h>

#include <cstring>
#include <stdexcept>

#include "traces/base/files.hpp"

namespace kvlab {
namespace {

constexpr std::string_view kMagic = "kvunit 6";
constexpr std::size_t kHashDigits = 16;

/// Calls each(count, or list of plain values) for what an outcome is made of: what is written and
/// read, in this order; little endian, as all of our machines are.
template <class Outcome, class Each>
void for_fields(Outcome& outcome, Each each) {
  each(outcome.evictions);
  each(outcome.live_max);
  each(outcome.live_end);
  each(outcome.stats.sums);
  each(outcome.stats.quantiles);
  each(outcome.stats.errors);
  each(outcome.stats.residual);
  each(outcome.stats.changes);
}

void append(std::string& bytes, const std::uint64_t& value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
}
template <class T>
void append(std::string& bytes, const std::vector<T>& values) {
  append(bytes, std::uint64_t{values.size()});
  bytes.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

/// Reads the same. Throws std::runtime_error where the bytes end too early.
class Unpacker {
 public:
  explicit Unpacker(std::string_view bytes) : rest_(bytes) {}

  void operator()(std::uint64_t& value) { take(&value, sizeof(value)); }
  template <class T>
  void operator()(std::vector<T>& values) {
    values.resize(count(sizeof(T)));
    take(values.data(), values.size() * sizeof(T));
  }
  /// A length whose entries, of at least `least` bytes each, can be there.
  std::size_t count(std::size_t least) {
    std::uint64_t value = 0;
    (*this)(value);
    if (value > rest_.size() / least) throw std::runtime_error("a length is past its end");
    return static_cast<std::size_t>(value);
  }
  bool empty() const { return rest_.empty(); }

 private:
  void take(void* to, std::size_t size) {
    if (size > rest_.size()) throw std::runtime_error("it ends too early");
    if (size) std::memcpy(to, rest_.data(), size);
    rest_.remove_prefix(size);
  }
  std::string_view rest_;
};

std::vector<HeadOutcome> unpack(const UnitId& id, std::string_view bytes) {
  if (!bytes.starts_with(kMagic) || bytes.size() < kMagic.size() + kHashDigits)
    throw std::runtime_error("it is no unit of this version's, or cut short");
  const std::string_view body = bytes.substr(0, bytes.size() - kHashDigits);
  if (bytes.substr(body.size()) != xxh3_hex(body))
    throw std::runtime_error("its checksum does not match");
  Unpacker unpacker(body.substr(kMagic.size()));
  UnitId found;
  for (auto* part : {&found.job, &found.trace, &found.unit}) unpacker(*part);
  if (found != id) throw std::runtime_error("it is another unit, or of another replay");
  std::vector<HeadOutcome> outcomes(unpacker.count(sizeof(std::uint64_t)));
  for (HeadOutcome& outcome : outcomes) for_fields(outcome, [&](auto& field) { unpacker(field); });
  if (!unpacker.empty()) throw std::runtime_error("something follows its end");
  return outcomes;
}

}  // namespace

std::string pack_unit(const UnitId& id, std::span<const HeadOutcome> outcomes) {
  std::string bytes(kMagic);
  for (const std::uint64_t part : {id.job, id.trace, id.unit, std::uint64_t{outcomes.size()}})
    append(bytes, part);
  for (const HeadOutcome& outcome : outcomes)
    for_fields(outcome, [&](const auto& field) { append(bytes, field); });
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
