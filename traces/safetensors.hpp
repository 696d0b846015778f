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

#include "traces/numeric/dtype.hpp"

namespace kvlab {

/// One tensor of a file: its bytes are a view into the mapping and need not be aligned.
struct TensorView {
  Dtype dtype;
  std::vector<std::size_t> shape;
  std::span<const std::byte> data;

  std::size_t elements() const;
};

/// A memory-mapped file. Everything in the header is checked when it is opened: header length, JSON,
/// dtypes, shapes against byte ranges (no overflow), no overlap, no hole, nothing past the end.
/// Throws std::runtime_error that names the file, what is wrong and what would be right.
class SafetensorsFile {
 public:
  static SafetensorsFile open(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  const std::map<std::string, TensorView>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  bool contains(std::string_view name) const;
  /// Throws std::runtime_error if there is no such tensor.
  const TensorView& at(std::string_view name) const;
  /// The same, and throws unless dtype and shape are these.
  const TensorView& at(std::string_view name, Dtype dtype, std::span<const std::size_t> shape) const;
  /// The whole file, header included, as mapped: what checksums are taken of.
  std::span<const std::byte> bytes() const;

 private:
  class Mapping;
  std::shared_ptr<const Mapping> mapping_;
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

/// Writes PATH.part, syncs it and renames it to PATH (header padded to 64 bytes). Returns the XXH3-64
/// of the file as 16 hex digits. Throws std::runtime_error; nothing is left at PATH then, and no .part.
std::string write_safetensors(const std::filesystem::path& path,
                              std::span<const TensorToWrite> tensors,
                              const std::map<std::string, std::string>& metadata);

/// Writes `text` to PATH by PATH.part, fsync and rename. Throws std::runtime_error.
void write_file_atomically(const std::filesystem::path& path, std::string_view text);
/// The whole of a text file of at most `max_bytes`. Throws std::runtime_error.
std::string read_text_file(const std::filesystem::path& path, std::size_t max_bytes);
/// XXH3-64 as 16 hex digits.
std::string xxh3_hex(std::span<const std::byte> bytes);

}  // namespace kvlab
