// What the fuzz targets share. A target reads its input as a command would, and may refuse it as
// commands do; whatever else happens is a defect.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace kvlab::fuzz {

inline std::string_view text_of(const std::uint8_t* data, std::size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

/// Ends the process unless `holds`.
inline void require(bool holds, const char* what, std::string_view more = "") {
  if (holds) return;
  std::fprintf(stderr, "FUZZ: %s %.*s\n", what, static_cast<int>(more.size()), more.data());
  std::abort();
}

/// Whether `action` takes its input. It may refuse it by the exceptions that commands print, in
/// words that hold `place` (KVLAB_FUZZ_SHOW in the environment prints them); other exceptions go
/// through and end the process.
template <class Action>
bool accepts(Action action, std::string_view place = "") {
  std::string refusal;
  try {
    action();
    return true;
  } catch (const std::runtime_error& error) {
    refusal = error.what();
  } catch (const std::invalid_argument& error) {
    refusal = error.what();
  }
  static const bool shows = std::getenv("KVLAB_FUZZ_SHOW") != nullptr;
  if (shows) std::fprintf(stderr, "refused: %s\n", refusal.c_str());
  require(!refusal.empty(), "a refusal without a word");
  require(refusal.find(place) != std::string::npos, "a refusal that does not say where:", refusal);
  return false;
}

/// The parts of an input, `=== NAME` on a line before each. What stands before the first is left
/// out; of two parts of one name the last one counts.
std::map<std::string, std::string> parts_of(std::string_view input);

/// A folder in memory that holds the parts of one input as files. Where a reader checks lengths and
/// checksums, they are made right:
///   a part NAME.safetensors is a line, the JSON header, and then data, which are cut or filled
///   with zeros as the header's offsets ask for; one that begins with '!' is taken as it is;
///   "@NAME" in any other part is the XXH3-64 of that file.
class Folder {
 public:
  explicit Folder(std::string_view input);
  ~Folder();
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  /// The same for every input of a process.
  static const std::filesystem::path& path();
  std::filesystem::path operator/(std::string_view name) const { return path() / name; }
  /// A part that is no file: its name has no dot.
  std::string word(const std::string& name) const;

 private:
  void write(const std::string& name, std::string_view bytes);

  std::map<std::string, std::string> parts_;
};

}  // namespace kvlab::fuzz
