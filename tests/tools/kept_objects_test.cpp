// Tests of compiled policies that are cached between runs, and of several policies in one run.
#include <stdlib.h>
#include <sys/stat.h>

#include <filesystem>
#include <optional>

#include "policies/aged_set.hpp"
#include "sim/run/run.hpp"
#include "sim/source/policy_source.hpp"
#include "tests/catch.hpp"
#include "tests/tools/command_line.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/base/files.hpp"

using namespace kvlab;
using namespace kvlab::test;
using Catch::Matchers::ContainsSubstring;
namespace fs = std::filesystem;

namespace {

/// Sets an environment variable while this object exists.
class Variable {
 public:
  Variable(const char* name, const std::string& value) : name_(name) {
    if (const char* const before = getenv(name)) before_ = before;
    setenv(name, value.c_str(), 1);
  }
  ~Variable() { before_ ? setenv(name_, before_->c_str(), 1) : unsetenv(name_); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
  std::optional<std::string> before_;
};

/// The source of a policy called `name` whose rank is the mass plus `more`.
std::string shop_text(const std::string& name, int more = 0) {
  return "#include \"policies/policy.hpp\"\n"
         "struct Own {\n"
         "  static constexpr kvlab::PolicyInfo kInfo{.name = \"" +
         name +
         "\", .summary = \"a test\", .citation = \"none\", .needs = kvlab::Needs::mass};\n"
         "  struct Params {};\n"
         "  struct Slot { std::uint64_t mass; };\n"
         "  static constexpr void append(Slot& slot, kvlab::Token, const Params&,\n"
         "                              const kvlab::Step&) { slot.mass = 0; }\n"
         "  static constexpr void observe(Slot& slot, const kvlab::Observation& seen,\n"
         "                                const Params&, const kvlab::Step&) { slot.mass = "
         "seen.mass; }\n"
         "  static constexpr std::uint64_t rank(const Slot& slot, kvlab::Token, const Params&,\n"
         "                                      const kvlab::Step&) { return slot.mass + " +
         std::to_string(more) +
         "; }\n"
         "};\n";
}

/// A new cache folder, and a compiler that can be made to fail.
class Workshop {
 public:
  Workshop()
      : cache_("XDG_CACHE_HOME", (folder_ / "cache").string()),
        compiler_("CXX", (folder_ / "compiler").string()) {
    const std::string real = "c++", broken = (folder_ / "broken").string();
    write_bytes(folder_ / "compiler",
                "#!/bin/sh\nif [ \"$1\" = --version ]; then echo one; exit; fi\nif [ -e '" +
                    broken + "' ]; then echo broken; exit 1; fi\nexec c++ \"$@\"\n");
    chmod((folder_ / "compiler").c_str(), 0700);
    fs::create_directories(folder_ / "cache");
  }

  std::shared_ptr<const PolicyEntry> compile(const std::string& text) const {
    write_bytes(folder_ / "own.hpp", text);
    return compile_policy_source(folder_ / "own.hpp");
  }
  void break_compiler() const { write_bytes(folder_ / "broken", ""); }
  fs::path kept() const { return folder_ / "cache" / "kvlab" / "policies"; }
  std::vector<fs::path> objects() const {
    std::vector<fs::path> all;
    for (const auto& entry : fs::directory_iterator(kept())) all.push_back(entry.path());
    return all;
  }
  const TemporaryFolder& folder() const { return folder_; }

 private:
  TemporaryFolder folder_;
  Variable cache_, compiler_;
};

std::uint64_t rank_of(const PolicyEntry& entry) {
  const std::uint64_t mass = 40;
  const std::uint32_t position = 0;
  std::uint64_t rank = 0;
  entry.rank(&mass, {&position, nullptr}, 1, nullptr, {}, &rank);
  return rank;
}

}  // namespace

TEST_CASE("a policy that is already compiled is not compiled again") {
  const Workshop shop;
  CHECK(rank_of(*shop.compile(shop_text("own", 1))) == 41);
  REQUIRE(shop.objects().size() == 1);
  struct stat found {};
  REQUIRE(stat(shop.kept().c_str(), &found) == 0);
  CHECK((found.st_mode & 0777) == 0700);

  shop.break_compiler();
  const auto again = shop.compile(shop_text("own", 1));
  CHECK(again->info.name == std::string("own"));
  CHECK(rank_of(*again) == 41);
  CHECK_THAT(
      error_of<std::invalid_argument>([&] { shop.compile(shop_text("own", 2)); }),  // another text
      ContainsSubstring("does not compile"));
  CHECK(shop.objects().size() == 1);
}

TEST_CASE("a damaged object is compiled again, and then stored completely") {
  const Workshop shop;
  shop.compile(shop_text("own", 3));
  REQUIRE(shop.objects().size() == 1);
  const fs::path object = shop.objects()[0];
  const std::string whole = read_bytes(object);
  for (const std::string& bytes :
       {whole.substr(0, whole.size() / 2), std::string(), "x" + whole.substr(1), whole + "\n"}) {
    fs::remove(object);
    write_bytes(object, bytes);
    CHECK(rank_of(*shop.compile(shop_text("own", 3))) == 43);
    CHECK(read_bytes(object).size() == whole.size());
  }
}

TEST_CASE("a cache folder in which other users may write is not used, and nothing else changes") {
  const Workshop shop;
  fs::create_directories(shop.kept());
  for (const fs::path& open : {shop.kept(), shop.kept().parent_path()}) {
    chmod(open.c_str(), 0777);
    CHECK(rank_of(*shop.compile(shop_text("own", 4))) == 44);
    CHECK(shop.objects().empty());
    chmod(open.c_str(), 0700);
  }
  fs::create_directory(shop.folder() / "elsewhere");
  fs::remove(shop.kept());
  fs::create_directory_symlink(shop.folder() / "elsewhere", shop.kept());
  CHECK(rank_of(*shop.compile(shop_text("own", 4))) == 44);
  CHECK(fs::is_empty(shop.folder() / "elsewhere"));
  CHECK_FALSE(ObjectCache("not/absolute").find("key"));
  CHECK_NOTHROW(ObjectCache("").keep("key", "nothing"));
}

TEST_CASE("a policy that includes a user's file is not cached, because that file may change") {
  const Workshop shop;
  const std::string other = (shop.folder() / "other.hpp").string();
  write_bytes(other, "constexpr int kMore = 5;\n");
  const auto text = "#include \"" + other + "\"\n" + shop_text("own", 6);
  CHECK(rank_of(*shop.compile(text)) == 46);
  CHECK(shop.objects().empty());
}

TEST_CASE("several policies from headers are accepted, but not two with one name") {
  const Workshop shop;
  const std::vector<std::string> paths{(shop.folder() / "a.hpp").string(),
                                       (shop.folder() / "b.hpp").string()};
  write_bytes(paths[0], shop_text("first", 1));
  write_bytes(paths[1], shop_text("second", 2));
  const CompiledPolicies both = compile_policy_sources(paths);
  REQUIRE(both.entries.size() == 2);
  CHECK(rank_of(*both.find("first")) == 41);
  CHECK(rank_of(*both.find("second")) == 42);
  CHECK_FALSE(both.find("third"));
  CHECK(parse_policy("second:recent=4", {}, both).entry == both.find("second"));

  write_bytes(paths[1], shop_text("first", 2));
  CHECK(error_of<std::invalid_argument>([&] { compile_policy_sources(paths); }) ==
        "--policy-source " + paths[1] + ": defines policy first, and so does " + paths[0] +
            "; give one of them another kInfo.name");
}

TEST_CASE("a run accepts several headers and names each; a deployed policy requires its header") {
  const Workshop shop;
  const std::string a = (shop.folder() / "a.hpp").string(), b = (shop.folder() / "b.hpp").string(),
                    run = (shop.folder() / "run").string(),
                    policy = (shop.folder() / "policy.json").string();
  write_bytes(a, shop_text("first"));
  // `second` evicts what `first` keeps, so its mean is higher.
  std::string second = shop_text("second");
  second.replace(second.find("slot.mass +"), 11, "~slot.mass +");
  write_bytes(b, second);
  CHECK(call("replay --trace " KVLAB_SOURCE_DIR
             "/traces/samples/tiny-story --device cpu --budget 32 --layers 0 --policy-source " +
             a + " --policy-source " + b + " --out " + run) == 0);
  const Run loaded = load_run(run);
  REQUIRE(loaded.info.sources.size() == 2);
  CHECK(loaded.info.sources[0].policy == "first");
  CHECK(loaded.info.sources[1].policy == "second");
  CHECK(loaded.info.sources[1].path == b);

  const std::string deploy =
      "deploy " + run + " --budget 32 --out " + policy + " --policy-source " + b;
  // The policy with the lowest mean is called first.
  CHECK_THAT(refusal(deploy), ContainsSubstring("needs the policy first"));
  CHECK(call(deploy + " --policy-source " + a) == 0);
}
