#include "traces/base/safetensors.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>

#include "traces/base/json.hpp"
#include "traces/base/json_fields.hpp"

namespace kvlab {
namespace {

using nlohmann::json;

constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;
constexpr std::size_t kMaxDimensions = 8;

std::optional<std::size_t> product(std::span<const std::size_t> factors) {
  std::size_t result = 1;
  for (const std::size_t factor : factors)
    if (__builtin_mul_overflow(result, factor, &result)) return std::nullopt;
  return result;
}

std::string shape_text(std::span<const std::size_t> shape) {
  std::string text = "[";
  for (const std::size_t size : shape)
    text += fmt::format("{}{}", text.size() > 1 ? ", " : "", size);
  return text + "]";
}

/// Location of a tensor in the data area.
struct Range {
  std::size_t begin, end;
  std::string name;
};

/// Reads and checks the header of one file.
class HeaderParser {
 public:
  HeaderParser(std::span<const std::byte> file, const std::filesystem::path& path)
      : file_(file), what_(path.string()) {}

  void parse(std::map<std::string, TensorView>& tensors,
             std::map<std::string, std::string>& metadata) {
    const json header = parse_json(header_text(), what_);
    if (!header.is_object()) throw error("the header is not a JSON object");
    for (const auto& [name, entry] : header.items()) {
      if (name == "__metadata__")
        read_metadata(entry, metadata);
      else
        tensors.emplace(name, read_tensor(name, entry));
    }
    check_ranges();
  }

 private:
  std::runtime_error error(std::string_view text) const {
    return std::runtime_error(fmt::format("{}: {}", what_, text));
  }

  std::string_view header_text() {
    std::uint64_t length = 0;
    if (file_.size() < sizeof length)
      throw error(
          fmt::format("is {} bytes long, but a safetensors file begins with a length of 8 bytes",
                      file_.size()));
    std::memcpy(&length, file_.data(), sizeof length);  // little-endian, as all supported hosts are
    const std::uint64_t rest = file_.size() - sizeof length;
    if (length > kMaxHeaderBytes)
      throw error(fmt::format(
          "the header has {} bytes, but at most {} are allowed (is this a safetensors file?)",
          length, kMaxHeaderBytes));
    if (length > rest)
      throw error(fmt::format("the header has {} bytes, but only {} follow; the file is truncated",
                              length, rest));
    const auto header = file_.subspan(sizeof length, length);
    data_ = file_.subspan(sizeof length + length);
    return {reinterpret_cast<const char*>(header.data()), header.size()};
  }

  void read_metadata(const json& entry, std::map<std::string, std::string>& metadata) const {
    if (!entry.is_object()) throw error("__metadata__ is not an object of strings");
    for (const auto& [key, value] : entry.items()) {
      if (!value.is_string())
        throw error(fmt::format("__metadata__ {} is not a string", json_quoted(key)));
      metadata.emplace(key, value.get<std::string>());
    }
  }

  TensorView read_tensor(const std::string& name, const json& entry) {
    const std::string where = fmt::format("{}: tensor {}", what_, json_quoted(name));
    const JsonFields fields(entry, where);
    const std::string dtype_name = fields.text("dtype");
    const auto dtype = dtype_from_safetensors(dtype_name);
    if (!dtype)
      throw std::runtime_error(fmt::format("{} has dtype {}; F32, F16, BF16 and I32 can be read",
                                           where, json_quoted(dtype_name)));
    TensorView tensor{*dtype, read_sizes(fields, "shape"), {}};
    if (tensor.shape.size() > kMaxDimensions)
      throw std::runtime_error(fmt::format("{} has {} dimensions; at most {} are allowed", where,
                                           tensor.shape.size(), kMaxDimensions));
    const auto offsets = read_sizes(fields, "data_offsets");
    if (offsets.size() != 2 || offsets[0] > offsets[1])
      throw std::runtime_error(where + ": data_offsets must be [begin, end] with begin <= end");
    const std::size_t begin = offsets[0], end = offsets[1];
    if (end > data_.size())
      throw std::runtime_error(
          fmt::format("{} ends at byte {} of the data, but there are {} bytes; the file "
                      "is truncated or its header is wrong",
                      where, end, data_.size()));
    check_size(tensor, end - begin, where);
    tensor.data = data_.subspan(begin, end - begin);
    ranges_.push_back({begin, end, name});
    return tensor;
  }

  static std::vector<std::size_t> read_sizes(const JsonFields& fields, std::string_view key) {
    std::vector<std::size_t> sizes;
    for (const json& value : fields.list(key)) {
      if (!value.is_number_unsigned()) fields.refuse(key, "non-negative integers are expected");
      sizes.push_back(value.get<std::size_t>());
    }
    return sizes;
  }

  static void check_size(const TensorView& tensor, std::size_t bytes, const std::string& where) {
    std::vector<std::size_t> factors = tensor.shape;
    factors.push_back(bytes_of(tensor.dtype));
    if (const auto wanted = product(factors); wanted != bytes)
      throw std::runtime_error(fmt::format(
          "{}: data_offsets span {} bytes, but {} {} takes {}", where, bytes,
          safetensors_name(tensor.dtype), shape_text(tensor.shape),
          wanted ? std::to_string(*wanted) : std::string("more than can be addressed")));
  }

  void check_ranges() {
    std::sort(ranges_.begin(), ranges_.end(), [](const Range& a, const Range& b) {
      return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
    });
    std::size_t covered = 0;
    for (const Range& range : ranges_) {
      if (range.begin < covered)
        throw error(fmt::format("tensor {} overlaps the one before it at byte {} of the data",
                                json_quoted(range.name), range.begin));
      if (range.begin > covered)
        throw error(
            fmt::format("bytes {} to {} of the data belong to no tensor", covered, range.begin));
      covered = range.end;
    }
    if (covered != data_.size())
      throw error(fmt::format("{} bytes follow the last tensor; there should be none",
                              data_.size() - covered));
  }

  std::span<const std::byte> file_, data_;
  std::string what_;
  std::vector<Range> ranges_;
};

}  // namespace

std::size_t TensorView::elements() const { return data.size() / bytes_of(dtype); }

SafetensorsFile SafetensorsFile::open(const std::filesystem::path& path) {
  SafetensorsFile file;
  file.path_ = path;
  file.mapping_ = std::make_shared<const MappedFile>(path);
  HeaderParser(file.bytes(), path).parse(file.tensors_, file.metadata_);
  return file;
}

bool SafetensorsFile::contains(std::string_view name) const {
  return tensors_.contains(std::string(name));
}

const TensorView& SafetensorsFile::at(std::string_view name) const {
  const auto found = tensors_.find(std::string(name));
  if (found == tensors_.end())
    throw std::runtime_error(
        fmt::format("{}: tensor {} is missing", path_.string(), json_quoted(name)));
  return found->second;
}

const TensorView& SafetensorsFile::at(std::string_view name, Dtype dtype,
                                      std::span<const std::size_t> shape) const {
  const TensorView& tensor = at(name);
  if (tensor.dtype != dtype || !std::ranges::equal(tensor.shape, shape))
    throw std::runtime_error(fmt::format("{}: tensor {} is {} {}; {} {} is expected",
                                         path_.string(), json_quoted(name),
                                         safetensors_name(tensor.dtype), shape_text(tensor.shape),
                                         safetensors_name(dtype), shape_text(shape)));
  return tensor;
}

}  // namespace kvlab
