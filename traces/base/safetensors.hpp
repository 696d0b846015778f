// safetensors files: a validated, memory-mapped reader and an atomic writer.
#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "traces/base/files.hpp"
#include "traces/base/numeric/dtype.hpp"

namespace kvlab {

/// One tensor of a file: its bytes are a view into the mapping and need not be aligned.
struct TensorView {
  Dtype dtype;
  std::vector<std::size_t> shape;
  std::span<const std::byte> data;

  std::size_t elements() const;
};

/// A memory-mapped file. Everything in the header is checked when it is opened: header length,
/// JSON, dtypes, shapes against byte ranges (no overflow), no overlap, no hole, nothing past the
/// end. A file with any tensor whose dtype is not in `Dtype` is refused, used or not. Throws
/// std::runtime_error that names the file, what is wrong and what would be right.
class SafetensorsFile {
 public:
  static SafetensorsFile open(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  const std::map<std::string, TensorView>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  bool contains(std::string_view name) const;
  /// Throws std::runtime_error if there is no such tensor.
  const TensorView& at(std::string_view name) const;
  /// The tensor of this name. Throws too unless dtype and shape are these.
  const TensorView& at(std::string_view name, Dtype dtype,
                       std::span<const std::size_t> shape) const;
  /// The whole file, header included, as mapped: what checksums are taken of.
  std::span<const std::byte> bytes() const { return mapping_->bytes(); }
  /// See MappedFile::release.
  void release() const { mapping_->release(); }

 private:
  std::shared_ptr<const MappedFile> mapping_;
  std::filesystem::path path_;
  std::map<std::string, TensorView> tensors_;
  std::map<std::string, std::string> metadata_;
};

/// A tensor to be written.
struct TensorToWrite {
  std::string name;
  Dtype dtype;
  std::vector<std::size_t> shape;
  std::span<const std::byte> data;
};

/// Writes PATH by an AtomicFile. The header is padded so that the data begin
/// at a multiple of 64 bytes; wider dtypes come first, so every tensor is aligned. Returns the
/// XXH3-64 of the file as 16 hex digits. Throws std::runtime_error: PATH is then as it was, and no
/// .part is left. Throws std::invalid_argument for two tensors of one name, or data that do not fit
/// their shape.
std::string write_safetensors(const std::filesystem::path& path,
                              std::span<const TensorToWrite> tensors,
                              const std::map<std::string, std::string>& metadata);

}  // namespace kvlab
