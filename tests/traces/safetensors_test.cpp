#include "traces/base/safetensors.hpp"

#include <array>
#include <cstring>

#include "tests/catch.hpp"
#include "tests/error_of.hpp"
#include "tests/traces/temporary_folder.hpp"

namespace kvlab {
namespace {

using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::StartsWith;
using test::error_of;
using test::read_bytes;
using test::TemporaryFolder;
using test::write_bytes;

std::string length_bytes(std::uint64_t length) {
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  return bytes;
}

/// A file with this header and `data_bytes` zero bytes of data.
std::string craft(const std::string& header, std::size_t data_bytes) {
  return length_bytes(header.size()) + header + std::string(data_bytes, '\0');
}

/// The error of opening a file with these bytes.
std::string open_error(const std::string& bytes) {
  const TemporaryFolder folder;
  const auto path = folder / "x.safetensors";
  write_bytes(path, bytes);
  const std::string error = error_of([&] { SafetensorsFile::open(path); });
  if (error.empty()) return "";
  CHECK(error.starts_with(path.string() + ": "));
  CHECK(error.find('\n') == std::string::npos);
  return error.substr(path.string().size() + 2);
}

std::string open_error(const std::string& header, std::size_t data_bytes) {
  return open_error(craft(header, data_bytes));
}

template <class T>
std::span<const std::byte> bytes_of_values(const T& values) {
  return std::as_bytes(std::span(values));
}

const std::array<float, 6> kFloats{1, 2, 3, -4, 0.5f, 6};
const std::array<std::int32_t, 2> kIntegers{7, -8};
const std::array<std::uint16_t, 3> kHalves{0x3f80, 0x4000, 0xbf80};

std::string write_sample(const std::filesystem::path& path) {
  const std::vector<TensorToWrite> tensors{
      {"halves", Dtype::bf16, {3}, bytes_of_values(kHalves)},
      {"floats", Dtype::f32, {2, 3}, bytes_of_values(kFloats)},
      {"integers", Dtype::i32, {2}, bytes_of_values(kIntegers)},
      {"nothing", Dtype::f16, {0, 4}, {}}};
  return write_safetensors(path, tensors, {{"by", "a test"}});
}

TEST_CASE("A file reads back as it was written, aligned and with its checksum") {
  const TemporaryFolder folder;
  const std::string hash = write_sample(folder / "a.safetensors");
  const auto file = SafetensorsFile::open(folder / "a.safetensors");
  CHECK(hash == xxh3_hex(file.bytes()));
  CHECK(hash.size() == 16);
  CHECK(file.metadata() == std::map<std::string, std::string>{{"by", "a test"}});
  CHECK(file.tensors().size() == 4);
  const TensorView& floats = file.at("floats", Dtype::f32, std::array<std::size_t, 2>{2, 3});
  CHECK(floats.elements() == 6);
  CHECK(std::memcmp(floats.data.data(), kFloats.data(), sizeof kFloats) == 0);
  CHECK(std::memcmp(file.at("halves").data.data(), kHalves.data(), sizeof kHalves) == 0);
  CHECK(file.at("nothing").elements() == 0);
  for (const auto& [name, tensor] : file.tensors())
    CHECK((tensor.data.data() - file.bytes().data()) % static_cast<long>(bytes_of(tensor.dtype)) ==
          0);
  CHECK(!std::filesystem::exists(folder / "a.safetensors.part"));
  CHECK(error_of([&] { file.at("absent"); }).ends_with("tensor \"absent\" is missing"));
  CHECK(error_of([&] {
          file.at("floats", Dtype::f16, std::array<std::size_t, 1>{6});
        }).ends_with("tensor \"floats\" is F32 [2, 3]; F16 [6] is expected"));
}

TEST_CASE("A file with a valid header opens") {
  CHECK(open_error(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8) == "");
  CHECK(open_error(R"({"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}})", 4) == "");
  CHECK(open_error(R"({"b":{"dtype":"F16","shape":[1],"data_offsets":[4,6]},)"
                   R"("a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                   R"("e":{"dtype":"F32","shape":[0],"data_offsets":[4,4]}})",
                   6) == "");
  CHECK(open_error("{}", 0) == "");
}

TEST_CASE("A header longer than the file or than the limit is refused") {
  CHECK_THAT(open_error(length_bytes(3) + "{}"),
             ContainsSubstring("the header has 3 bytes, but only 2 follow"));
  CHECK_THAT(open_error(length_bytes(100'000'001) + "{}"), ContainsSubstring("at most 100000000"));
  CHECK_THAT(open_error(length_bytes(~std::uint64_t{0}) + "{}"),
             ContainsSubstring("at most 100000000"));
  CHECK_THAT(open_error(length_bytes(0)), ContainsSubstring("not valid JSON from byte"));
  CHECK_THAT(open_error(""), ContainsSubstring("is 0 bytes long, but a safetensors file begins"));
}

TEST_CASE("A header that is not a JSON object of tensors is refused") {
  CHECK_THAT(open_error("[]", 0), ContainsSubstring("the header is not a JSON object"));
  CHECK_THAT(open_error("{\"a\":", 0), ContainsSubstring("not valid JSON from byte"));
  CHECK_THAT(open_error(R"({"a":1})", 0), ContainsSubstring("a JSON object is expected"));
  CHECK_THAT(open_error(R"({"a":{"shape":[],"data_offsets":[0,4]}})", 4),
             ContainsSubstring("key \"dtype\" is missing"));
  CHECK_THAT(open_error(R"({"a":{"dtype":"F32","data_offsets":[0,4]}})", 4),
             ContainsSubstring("key \"shape\" is missing"));
  CHECK_THAT(open_error(R"({"a":{"dtype":"F32","shape":[]}})", 4),
             ContainsSubstring("key \"data_offsets\" is missing"));
  CHECK_THAT(open_error(std::string(5000, '['), 0), ContainsSubstring("nested more than"));
}

TEST_CASE("A tensor named twice is refused") {
  CHECK_THAT(open_error(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
                        R"("a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
                        8),
             ContainsSubstring("key \"a\" appears twice"));
}

TEST_CASE("A dtype that kvlab cannot read is refused by name") {
  for (const std::string dtype : {"I64", "F8_E4M3", "F64", "BOOL", "f32", ""})
    CHECK_THAT(
        open_error(R"({"a":{"dtype":")" + dtype + R"(","shape":[1],"data_offsets":[0,8]}})", 8),
        ContainsSubstring("tensor \"a\" has dtype \"" + dtype + "\"; F32, F16, BF16 and I32"));
}

TEST_CASE("A shape that does not fill its bytes, or overflows, is refused") {
  const auto shaped = [](const std::string& shape, const std::string& offsets) {
    return open_error(
        R"({"a":{"dtype":"F32","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}", 8);
  };
  CHECK(shaped("[2]", "[0,8]") == "");
  CHECK_THAT(shaped("[3]", "[0,8]"), ContainsSubstring("span 8 bytes, but F32 [3] takes 12"));
  CHECK_THAT(shaped("[1]", "[0,8]"), ContainsSubstring("span 8 bytes, but F32 [1] takes 4"));
  CHECK_THAT(shaped("[4294967296,4294967296]", "[0,8]"),
             ContainsSubstring("more than can be addressed"));
  // 2^62 + 2 floats: the number of bytes wraps around to 8.
  CHECK_THAT(shaped("[4611686018427387906]", "[0,8]"),
             ContainsSubstring("more than can be addressed"));
  CHECK_THAT(shaped("[-2]", "[0,8]"), ContainsSubstring("non-negative integers"));
  CHECK_THAT(shaped("[2.0]", "[0,8]"), ContainsSubstring("non-negative integers"));
  CHECK_THAT(shaped("[1,1,1,1,1,1,1,1,2]", "[0,8]"), ContainsSubstring("at most 8"));
  CHECK_THAT(shaped("{}", "[0,8]"), ContainsSubstring("an array is expected"));
  CHECK_THAT(shaped("[2]", "[0]"), ContainsSubstring("[begin, end]"));
  CHECK_THAT(shaped("[2]", "[8,0]"), ContainsSubstring("[begin, end]"));
  CHECK_THAT(shaped("[2]", "[-1,8]"), ContainsSubstring("non-negative integers"));
  CHECK_THAT(shaped("[2]", "[8,16]"),
             ContainsSubstring("ends at byte 16 of the data, but there are 8"));
  CHECK_THAT(shaped("[2]", "[18446744073709551608,18446744073709551615]"),
             ContainsSubstring("truncated"));
}

TEST_CASE("Overlapping tensors, holes and extra bytes are refused") {
  const auto two = [](const std::string& first, const std::string& second, std::size_t data_bytes) {
    return open_error(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":)" + first +
                          R"(},"b":{"dtype":"F32","shape":[2],"data_offsets":)" + second + "}}",
                      data_bytes);
  };
  CHECK(two("[0,8]", "[8,16]", 16) == "");
  CHECK_THAT(two("[0,8]", "[4,12]", 12), ContainsSubstring("tensor \"b\" overlaps"));
  CHECK_THAT(two("[0,8]", "[0,8]", 8), ContainsSubstring("overlaps"));
  CHECK_THAT(two("[0,8]", "[12,20]", 20),
             ContainsSubstring("bytes 8 to 12 of the data belong to no tensor"));
  CHECK_THAT(two("[4,12]", "[12,20]", 20), ContainsSubstring("bytes 0 to 4"));
  CHECK_THAT(two("[0,8]", "[8,16]", 17), ContainsSubstring("1 bytes follow the last tensor"));
}

TEST_CASE("Metadata must be strings") {
  CHECK(open_error(R"({"__metadata__":{"k":"v"}})", 0) == "");
  CHECK_THAT(open_error(R"({"__metadata__":{"k":1}})", 0),
             ContainsSubstring("__metadata__ \"k\" is not a string"));
  CHECK_THAT(open_error(R"({"__metadata__":"k"})", 0),
             ContainsSubstring("not an object of strings"));
}

TEST_CASE("A file truncated at any byte is refused by name") {
  const TemporaryFolder folder;
  write_sample(folder / "a.safetensors");
  const std::string whole = read_bytes(folder / "a.safetensors");
  for (std::size_t size = 0; size < whole.size(); ++size) {
    INFO(size);
    write_bytes(folder / "b", whole.substr(0, size));
    CHECK_THAT(error_of([&] { SafetensorsFile::open(folder / "b"); }),
               StartsWith((folder / "b").string() + ": "));
  }
}

TEST_CASE("A missing file, a folder and a pipe are refused by name") {
  const TemporaryFolder folder;
  CHECK_THAT(error_of([&] { SafetensorsFile::open(folder / "none"); }),
             ContainsSubstring("none: cannot open: No such file or directory"));
  CHECK_THAT(error_of([&] { SafetensorsFile::open(folder.path()); }),
             ContainsSubstring("is not a regular file"));
  CHECK_THAT(error_of([&] { SafetensorsFile::open("/dev/null"); }),
             ContainsSubstring("is not a regular file"));
}

TEST_CASE("A text file longer than the limit is refused") {
  const TemporaryFolder folder;
  write_file_atomically(folder / "t", "12345");
  CHECK(read_text_file(folder / "t", 5) == "12345");
  CHECK_THAT(error_of([&] { read_text_file(folder / "t", 4); }),
             ContainsSubstring("is 5 bytes long, but at most 4"));
}

TEST_CASE("An abandoned file leaves neither itself nor a .part, and an older file stays") {
  const TemporaryFolder folder;
  write_file_atomically(folder / "t", "old");
  {
    AtomicFile file(folder / "t");
    file.write(std::as_bytes(std::span(std::string_view("new"))));
    CHECK(test::names_in(folder.path()).size() == 2);
  }
  CHECK(test::names_in(folder.path()) == std::vector<std::string>{"t"});
  CHECK(read_bytes(folder / "t") == "old");
}

TEST_CASE("An abandoned folder also removes the parents that were made for it") {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder / "there");
  const auto deep = folder / "there/a/b/out";
  {
    const AtomicFolder out(deep);
    write_file_atomically(out / "t", "text");
  }
  CHECK(std::filesystem::is_directory(folder / "there"));
  CHECK(std::filesystem::is_empty(folder / "there"));
  {
    const AtomicFolder out(deep);
    write_file_atomically(folder / "there/a/theirs", "text");
  }
  CHECK(std::filesystem::exists(folder / "there/a/theirs"));
  CHECK(!std::filesystem::exists(folder / "there/a/b"));
  {
    AtomicFolder out(deep);
    out.commit();
  }
  CHECK(std::filesystem::is_directory(deep));
  // A file exists where a parent folder should be created.
  CHECK_THROWS_AS(AtomicFolder(folder / "there/a/theirs/c/out"), std::runtime_error);
  CHECK(std::filesystem::is_regular_file(folder / "there/a/theirs"));
}

TEST_CASE("Only a regular file is replaced: not a link, not a folder, not a device") {
  const TemporaryFolder folder;
  std::filesystem::create_symlink("elsewhere", folder / "link");
  std::filesystem::create_directory(folder / "folder");
  for (const auto& path : {folder / "link", folder / "folder", std::filesystem::path("/dev/null")})
    CHECK_THAT(error_of([&] { write_file_atomically(path, "text"); }),
               ContainsSubstring("is not a regular file"));
  CHECK(std::filesystem::is_symlink(folder / "link"));
  CHECK(std::filesystem::is_directory(folder / "folder"));
  CHECK(std::filesystem::is_character_file("/dev/null"));
  CHECK(!std::filesystem::exists("/dev/null.part"));
}

TEST_CASE("Tensors that do not match their shape, or share a name, are not written") {
  const TemporaryFolder folder;
  const std::vector<TensorToWrite> wrong{{"a", Dtype::f32, {5}, bytes_of_values(kFloats)}};
  CHECK_THROWS_AS(write_safetensors(folder / "x", wrong, {}), std::invalid_argument);
  const std::vector<TensorToWrite> twice(2, {"a", Dtype::f32, {6}, bytes_of_values(kFloats)});
  CHECK_THROWS_AS(write_safetensors(folder / "x", twice, {}), std::invalid_argument);
  CHECK(std::filesystem::is_empty(folder.path()));
}

}  // namespace
}  // namespace kvlab
