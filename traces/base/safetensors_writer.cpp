#include <fmt/core.h>
#include <xxhash.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <stdexcept>

#include "traces/base/json.hpp"
#include "traces/base/safetensors.hpp"

namespace kvlab {
namespace {

using nlohmann::json;

constexpr std::size_t kAlignment = 64;

/// Writes to a file and hashes the written bytes.
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

void check(std::span<const TensorToWrite> tensors) {
  std::set<std::string_view> names;
  for (const TensorToWrite& tensor : tensors) {
    std::size_t bytes = bytes_of(tensor.dtype);
    for (const std::size_t size : tensor.shape) bytes *= size;
    if (bytes != tensor.data.size())
      throw std::invalid_argument(fmt::format("tensor '{}': {} bytes given, its shape takes {}",
                                              tensor.name, tensor.data.size(), bytes));
    if (!names.insert(tensor.name).second || tensor.name == "__metadata__")
      throw std::invalid_argument(
          fmt::format("tensor name '{}' is used twice or reserved", tensor.name));
  }
}

/// Wider dtypes first, otherwise in the given order, so that every tensor is aligned to its element
/// size.
std::vector<const TensorToWrite*> in_file_order(std::span<const TensorToWrite> tensors) {
  std::vector<const TensorToWrite*> order;
  for (const TensorToWrite& tensor : tensors) order.push_back(&tensor);
  std::stable_sort(order.begin(), order.end(), [](const TensorToWrite* a, const TensorToWrite* b) {
    return bytes_of(a->dtype) > bytes_of(b->dtype);
  });
  return order;
}

std::string header_text(const std::vector<const TensorToWrite*>& order,
                        const std::map<std::string, std::string>& metadata) {
  json header = json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::size_t offset = 0;
  for (const TensorToWrite* tensor : order) {
    const std::size_t end = offset + tensor->data.size();
    header[tensor->name] = {{"dtype", safetensors_name(tensor->dtype)},
                            {"shape", tensor->shape},
                            {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.dump(-1, ' ', false, json::error_handler_t::replace);
  const std::size_t length = sizeof(std::uint64_t) + text.size();
  text.append((kAlignment - length % kAlignment) % kAlignment, ' ');
  return text;
}

}  // namespace

std::string write_safetensors(const std::filesystem::path& path,
                              std::span<const TensorToWrite> tensors,
                              const std::map<std::string, std::string>& metadata) {
  check(tensors);
  const auto order = in_file_order(tensors);
  const std::string header = header_text(order, metadata);
  const std::uint64_t length = header.size();
  HashedFile file(path);
  file.write(std::as_bytes(std::span(&length, 1)));
  file.write(std::as_bytes(std::span(header)));
  for (const TensorToWrite* tensor : order) file.write(tensor->data);
  return file.commit();
}

}  // namespace kvlab
