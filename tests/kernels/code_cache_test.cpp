// Tests of the cache of device code. NVRTC needs no device, so they run on any machine with NVRTC.
#include "kernels/runtime/code_cache.hpp"

#include <fmt/format.h>

#include "tests/catch.hpp"
#include "tests/skip.hpp"
#include "tests/traces/temporary_folder.hpp"

using namespace kvlab;
using namespace kvlab::kernels;
using namespace kvlab::test;
namespace fs = std::filesystem;

namespace {

DeviceProgram program(int value, const std::string& type = "int", int architecture = 90) {
  return {.text = fmt::format("#include \"fill.cuh\"\nconstexpr int kValue = {};\n", value),
          .headers = {{"fill.cuh", "template <class T> __global__ void fill(T* to) { *to = 1; }"}},
          .kernels = {fmt::format("fill<{}>", type)},
          .architecture = architecture};
}

bool has_nvrtc() {
  try {
    program(0).key();
  } catch (const std::runtime_error&) {
    return false;
  }
  return true;
}

std::vector<fs::path> files_of(const fs::path& folder) {
  std::vector<fs::path> files;
  for (const auto& file : fs::directory_iterator(folder)) files.push_back(file.path());
  return files;
}

bool equal(const DeviceCode& a, const DeviceCode& b) {
  return a.image == b.image && a.symbols == b.symbols;
}

}  // namespace

TEST_CASE("device code is compiled once and then read from the cache") {
  if (!has_nvrtc()) return skip("no NVRTC");
  const TemporaryFolder root;
  const std::string folder = root / "new" / "device";
  const DeviceCode first = CodeCache(folder).code_of(program(1));
  CHECK(equal(first, compile(program(1))));
  REQUIRE(files_of(folder).size() == 1);
  CHECK(fs::status(folder).permissions() == fs::perms::owner_all);
  const auto written = fs::last_write_time(files_of(folder).front());
  CHECK(equal(CodeCache(folder).code_of(program(1)), first));
  REQUIRE(files_of(folder).size() == 1);
  CHECK(fs::last_write_time(files_of(folder).front()) == written);
}

TEST_CASE("a device that is newer than NVRTC gets PTX, which its driver compiles") {
  if (!has_nvrtc()) return skip("no NVRTC");
  constexpr int kOfTheFuture = 990;
  const DeviceCode known = compile(program(1)), future = compile(program(1, "int", kOfTheFuture));
  const auto begin = [](const DeviceCode& code) {
    return std::string(code.image.data(), std::min<std::size_t>(code.image.size(), 4));
  };
  CHECK(begin(known) ==
        "\x7f"
        "ELF");
  REQUIRE(begin(future).starts_with("//"));
  CHECK(future.image.back() == '\0');
  CHECK_THAT(std::string(future.image.data()), Catch::Matchers::ContainsSubstring(".target sm_"));
  CHECK(future.symbols == known.symbols);
  CHECK(program(1, "int", kOfTheFuture).key() != program(1).key());
}

TEST_CASE("a different text, kernel or architecture gives a different program key") {
  if (!has_nvrtc()) return skip("no NVRTC");
  const TemporaryFolder root;
  const std::string folder = root / "device";
  const CodeCache cache(folder);
  DeviceProgram header = program(1);
  header.headers.front().text += "\n";
  const std::vector<DeviceProgram> programs{program(1), program(2), program(1, "float"),
                                            program(1, "int", 80), header};
  for (std::size_t i = 0; i < programs.size(); ++i) {
    cache.code_of(programs[i]);
    CHECK(files_of(folder).size() == i + 1);
  }
}

TEST_CASE("device code that is damaged or belongs to another program is compiled again") {
  if (!has_nvrtc()) return skip("no NVRTC");
  const TemporaryFolder root;
  const std::string folder = root / "device";
  const CodeCache cache(folder);
  const DeviceCode first = cache.code_of(program(1));
  const fs::path file = files_of(folder).front();
  const std::string good = read_bytes(file);
  std::string flipped = good;
  flipped[good.size() / 2] ^= 1;
  cache.code_of(program(2));
  std::string other;
  for (const fs::path& one : files_of(folder))
    if (one != file) other = read_bytes(one);
  for (const std::string& bad :
       {flipped, good.substr(0, good.size() - 1), std::string(), std::string("\n\n"), other}) {
    write_bytes(file, bad);
    CHECK(equal(cache.code_of(program(1)), first));
    CHECK(equal(cache.code_of(program(1)), first));
    CHECK(read_bytes(file).size() == good.size());
  }
}

TEST_CASE("device code that another user could have written is compiled again") {
  if (!has_nvrtc()) return skip("no NVRTC");
  const TemporaryFolder root;
  const std::string folder = root / "device";
  const CodeCache cache(folder);
  const DeviceCode first = cache.code_of(program(1));
  const fs::path file = files_of(folder).front();
  fs::permissions(file, fs::perms::others_write, fs::perm_options::add);
  CHECK(equal(cache.code_of(program(1)), first));
  CHECK(fs::status(file).permissions() == (fs::perms::owner_read | fs::perms::owner_write));

  const fs::path elsewhere = root / "elsewhere";
  fs::rename(file, elsewhere);
  fs::create_symlink(elsewhere, file);
  CHECK(equal(cache.code_of(program(1)), first));
  CHECK_FALSE(fs::is_symlink(file));

  // In a folder that other users may write, nothing is read or written.
  fs::remove(file);
  fs::permissions(folder, fs::perms::group_write, fs::perm_options::add);
  CHECK(equal(cache.code_of(program(1)), first));
  CHECK(files_of(folder).empty());
  fs::permissions(folder, fs::perms::owner_all);
  fs::permissions(root.path(), fs::perms::group_write, fs::perm_options::add);
  CHECK(equal(cache.code_of(program(1)), first));
  CHECK(files_of(folder).empty());
}

TEST_CASE("without a usable folder, device code is compiled every time") {
  if (!has_nvrtc()) return skip("no NVRTC");
  const DeviceCode first = compile(program(1));
  for (const char* folder : {"", "/dev/null/kvlab", "a/relative/folder"})
    CHECK(equal(CodeCache(folder).code_of(program(1)), first));
  CHECK_THROWS_AS(CodeCache("").code_of({"no C++", {}, {}, 90}), std::invalid_argument);
}
