// corpus_main FOLDER...: runs a fuzz target on the files of its corpus. The limits are those of
// fuzzing: an input may take five seconds, and an allocation may not be larger than four times the
// input plus 64 MiB.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <new>
#include <string>
#include <vector>

#include "tests/fuzz/fuzz.hpp"

namespace {

std::atomic<std::size_t> max_bytes{static_cast<std::size_t>(-1)};

std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

#ifndef KVLAB_SANITIZED  // AddressSanitizer replaces these, and checks that new and delete match
void* operator new(std::size_t bytes) {
  kvlab::fuzz::require(bytes <= max_bytes, "too large an allocation");
  if (void* const block = std::malloc(std::max<std::size_t>(bytes, 1))) return block;
  throw std::bad_alloc();
}
void operator delete(void* block) noexcept { std::free(block); }
void operator delete(void* block, std::size_t) noexcept { std::free(block); }
#endif

int main(int argc, char** argv) {
  std::size_t inputs = 0;
  for (const std::string& folder : std::vector<std::string>(argv + 1, argv + argc)) {
    std::vector<std::filesystem::path> paths;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) paths.push_back(entry);
    std::sort(paths.begin(), paths.end());
    for (const std::filesystem::path& path : paths) {
      const std::string input = read_file(path);
      std::printf("%s\n", path.c_str());  // if the process crashes, the last line names the input
      std::fflush(stdout);
      ::alarm(5);
      max_bytes = 4 * input.size() + (64u << 20);
      LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(input.data()), input.size());
      max_bytes = static_cast<std::size_t>(-1);
      ++inputs;
    }
  }
  std::printf("%zu inputs\n", inputs);
  return inputs > 0 ? 0 : 1;
}
