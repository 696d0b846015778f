#include <fmt/core.h>
#include <xxhash.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <set>
#include <stdexcept>

#include "traces/base/json.hpp"
#include "traces/base/safetensors.hpp"

namespace kvlab {
namespace {

using nlohmann::json;

constexpr std::size_t kAlignment = 64;

/// Writes to a file and hashes what it writes.
class HashedFile {
 public:
  explicit HashedFile(const std::filesystem::path& path) : file_(path) {
    XXH3_64bits_reset(&state_);
  }

  void write(std::span<const std::byte> bytes) {
    XXH3_64bits_update(&state_, bytes.data(), bytes.size());
    file_.write(bytes);
  }
  std::string commit() {
    file_.commit();
    return fmt::format("{:016x}", XXH3_64bits_digest(&state_));
  }

 private:
  AtomicFile file_;
  XXH3_state_t state_;
};

std::size_t size_of(const TensorToWrite& tensor) {
  return std::accumulate(tensor.shape.begin(), tensor.shape.end(), bytes_of(tensor.dtype),
                         std::multiplies<>());
}

void check(std::span<const TensorToWrite> tensors) {
  std::set<std::string_view> names;
  for (const TensorToWrite& tensor : tensors) {
    const std::size_t bytes = size_of(tensor);
    if (bytes != tensor.data.size())
      throw std::invalid_argument(fmt::format("tensor '{}': {} bytes given, its shape takes {}",
                                              tensor.name, tensor.data.size(), bytes));
    if (!names.insert(tensor.name).second || tensor.name == "__metadata__")
      throw std::invalid_argument(fmt::format("tensor name '{}' is taken already", tensor.name));
  }
}

/// Wider dtypes first, otherwise as given: then every tensor is aligned to its element.
std::vector<const TensorToWrite*> in_file_order(std::span<const TensorToWrite> tensors) {
  std::vector<const TensorToWrite*> order;
  for (const TensorToWrite& tensor : tensors) order.push_back(&tensor);
  std::stable_sort(order.begin(), order.end(), [](const TensorToWrite* a, const TensorToWrite* b) {
    return bytes_of(a->dtype) > bytes_of(b->dtype);
  });
  return order;
}

/// With its length in front.
std::string header_text(const std::vector<const TensorToWrite*>& order,
                        const std::map<std::string, std::string>& metadata) {
  json header = json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::size_t offset = 0;
  for (const TensorToWrite* tensor : order) {
    const std::size_t end = offset + size_of(*tensor);
    header[tensor->name] = {{"dtype", safetensors_name(tensor->dtype)},
                            {"shape", tensor->shape},
                            {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.dump(-1, ' ', false, json::error_handler_t::replace);
  const std::size_t length = sizeof(std::uint64_t) + text.size();
  text.append((kAlignment - length % kAlignment) % kAlignment, ' ');
  const std::uint64_t size = text.size();
  return std::string(reinterpret_cast<const char*>(&size), sizeof size) + text;
}

}  // namespace

std::string write_safetensors(const std::filesystem::path& path,
                              std::span<const TensorToWrite> tensors,
                              const std::map<std::string, std::string>& metadata) {
  check(tensors);
  const auto order = in_file_order(tensors);
  const std::string header = header_text(order, metadata);
  HashedFile file(path);
  file.write(std::as_bytes(std::span(header)));
  for (const TensorToWrite* tensor : order) file.write(tensor->data);
  return file.commit();
}

SafetensorsDraft::SafetensorsDraft(const std::filesystem::path& path,
                                   std::span<const TensorToWrite> tensors)
    : file_(path) {
  const auto order = in_file_order(tensors);
  const std::string header = header_text(order, {});
  std::size_t at = header.size();
  for (const TensorToWrite* tensor : order) at += size_of(*tensor);
  bytes_ = file_.map(at);
  std::memcpy(bytes_.data(), header.data(), at = header.size());
  for (const TensorToWrite* tensor : order) {
    tensors_.emplace(tensor->name, bytes_.subspan(at, size_of(*tensor)));
    at += size_of(*tensor);
  }
}

std::string SafetensorsDraft::commit() {
  const std::string hash = xxh3_hex(bytes_);
  file_.commit();
  return hash;
}

}  // namespace kvlab
