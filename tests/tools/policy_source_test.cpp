// Tests of policies that are compiled at run time. A policy must be found in its header and
// checked, and it must behave like a built-in one.
#include "sim/source/policy_source.hpp"

#include <algorithm>
#include <random>

#include "engine/evaluation/deploy/deploy.hpp"
#include "engine/evaluation/policy_file.hpp"
#include "policies/aged_set.hpp"
#include "policies/policy_struct.hpp"
#include "tests/catch.hpp"
#include "tests/tools/command_line.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/base/files.hpp"

using namespace kvlab;
using namespace kvlab::test;
using Catch::Matchers::ContainsSubstring;

namespace {

/// The example of docs/guides/write-a-policy.md.
std::string peak_text() {
  const std::string page = read_bytes(KVLAB_SOURCE_DIR "/docs/guides/write-a-policy.md");
  const std::size_t begin = page.find("```cpp\n// peak: ") + 7;
  return page.substr(begin, page.find("```", begin) - begin);
}

std::string replaced(std::string text, std::string_view old, std::string_view fresh) {
  const std::size_t at = text.find(old);
  REQUIRE(at != std::string::npos);
  return text.replace(at, old.size(), fresh);
}

std::string policy_text(const std::string& file) {
  return read_bytes(KVLAB_SOURCE_DIR "/policies/" + file);
}

template <class Action>
std::string refused(Action action) {
  return error_of<std::invalid_argument>(action);
}

/// Compiles `text` as my.hpp.
std::shared_ptr<const PolicyEntry> compiled(const std::string& text) {
  const TemporaryFolder folder;
  write_bytes(folder / "my.hpp", text);
  return compile_policy_source(folder / "my.hpp");
}

std::string compile_error(const std::string& text) {
  const TemporaryFolder folder;
  write_bytes(folder / "my.hpp", text);
  std::string message = refused([&] { compile_policy_source(folder / "my.hpp"); });
  const std::string prefix = folder.path().string() + "/";
  for (std::size_t at; (at = message.find(prefix)) != std::string::npos;)
    message.erase(at, prefix.size());
  return message;
}

PolicyStruct found(std::string_view text) { return find_policy_struct(text, "my.hpp"); }

/// The live positions after each of many steps with random observations.
std::vector<std::vector<std::uint32_t>> kept(const PolicySpec& spec) {
  std::mt19937 random(7);
  LiveSet live(spec, 24, {.seed = 3, .sequence = 1, .layer = 2, .kv_head = 0});
  std::vector<std::vector<std::uint32_t>> sets;
  for (std::uint32_t now = 0; now < 400; ++now) {
    live.evict_to_budget(now);
    live.append(now, 1);
    std::vector<Observation> seen(live.size());
    for (Observation& one : seen) one = {.mass = random() % 100, .queries = 1};
    live.observe(seen);
    sets.emplace_back(live.positions().begin(), live.positions().end());
  }
  return sets;
}

}  // namespace

TEST_CASE("the policy of a header is the struct that declares kInfo") {
  const PolicyStruct peak = found(peak_text());
  CHECK(peak.name == "kvlab::Peak");
  CHECK(peak.line == 15);
  CHECK(found("struct A { static constexpr PolicyInfo kInfo{}; };").name == "A");
  CHECK(found("namespace a::b {\nstruct X {};\n struct P final : X {\n struct Params {};\n"
              "static constexpr kvlab::PolicyInfo\n kInfo{.name = \"p\"};\n};\nstruct Y {};}")
            .name == "a::b::P");
  CHECK(found(policy_text("mass/h2o.hpp")).name == "kvlab::H2O");
  CHECK(found(policy_text("baseline/random.hpp")).name == "kvlab::Random");
}

TEST_CASE("comments, literals and functions are not mistaken for structs") {
  const PolicyStruct policy = found(
      "// struct Comment { PolicyInfo kInfo }\n"
      "/* struct Other { static constexpr PolicyInfo kInfo{}; */\n"
      "#define NOTHING struct Macro {\n"
      "struct Real {\n"
      "  static constexpr const char* text = \"struct Text { PolicyInfo kInfo \\\" }\";\n"
      "  static constexpr char brace = '{';\n"
      "  static constexpr long big = 1'000'000;\n"
      "  static constexpr int f(int x) { if (x) { return 1; } return 0; }\n"
      "  static constexpr PolicyInfo kInfo{.name = \"real\"};\n"
      "};\n");
  CHECK(policy.name == "Real");
  CHECK(policy.line == 4);
}

TEST_CASE("the search for a struct handles texts of any length") {
  const std::string spaces(1'000'000, ' '), name(900'000, 'a'),
      info = " { static constexpr PolicyInfo" + spaces + "kInfo{}; };";
  CHECK(found("struct A" + spaces + info).name == "A");
  CHECK(found("struct" + spaces + "A" + spaces + "final" + info).name == "A");
  CHECK(found("struct " + name + info).name == name);
  CHECK(found("namespace " + name + " { struct B : C<D>" + info + "}").name == name + "::B");
}

TEST_CASE("a header without a kInfo names the struct that should have one") {
  CHECK(found("namespace kvlab {\nstruct First { struct Slot {}; };\nstruct Last {};\n}").name ==
        "kvlab::Last");
  CHECK(refused([] { found("// nothing\n"); }).starts_with("my.hpp: holds no struct"));
  const std::string info = "static constexpr PolicyInfo kInfo{};";
  CHECK(refused([&] { found("struct A {" + info + "};\nstruct B {" + info + "};"); }) ==
        "my.hpp:2: B has a kInfo, and so does A; a policy source should hold one policy");
  CHECK(found("struct A { static constexpr PolicyInfo kInformation{}; };").name == "A");
  CHECK_NOTHROW(found("}}}} struct A {"));
  CHECK_NOTHROW(found("struct A { /* never ends"));
}

TEST_CASE("a compiled policy behaves like the registry's policy") {
  const auto entry = compiled(replaced(policy_text("mass/h2o.hpp"), "\"h2o\"", "\"mine\""));
  CHECK(entry->info.name == std::string("mine"));
  CHECK(entry->slot_bytes == 8);
  CHECK(entry->source->type == "kvlab::H2O");
  CHECK(entry->source->xxh3.size() == 16);
  const PolicySpec mine = parse_policy("mine:sinks=2:recent=25%", {}, entry);
  CHECK(mine.text() == "mine:sinks=2:recent=25%");
  CHECK(kept(mine) == kept(parse_policy("h2o:sinks=2:recent=25%")));
  CHECK_FALSE(kept(mine) == kept(parse_policy("h2o:sinks=2:recent=50%")));
}

TEST_CASE("two texts with the same struct name can be used together") {
  const auto lowest = compiled(peak_text());
  const auto highest =
      compiled(replaced(peak_text(), "return slot.max_mass;", "return ~slot.max_mass;"));
  const auto live = [](const auto& entry) {
    return kept(parse_policy("peak:recent=4", {}, entry));
  };
  CHECK_FALSE(live(lowest) == live(highest));
  CHECK_FALSE(lowest->source->xxh3 == highest->source->xxh3);
}

TEST_CASE("parameters of a compiled policy are checked like any other's") {
  const auto entry = compiled(read_bytes(KVLAB_SOURCE_DIR "/tests/policies/leaky.hpp"));
  CHECK(parse_policy("leaky:slope=0.25", {}, entry).params.size() == entry->params.size());
  CHECK(refused([&] { parse_policy("leaky:kep=1", {}, entry); }) ==
        "policy leaky: unknown parameter 'kep'; did you mean 'keep'?");
}

TEST_CASE("a header's ranks are integers or doubles, as its return type says") {
  const std::string real = replaced(peak_text(), "std::uint64_t rank", "double rank");
  CHECK(compiled(peak_text())->rank_type == RankType::whole);
  const auto entry =
      compiled(replaced(real, "return slot.max_mass;", "return -1.0 * slot.max_mass;"));
  CHECK(entry->rank_type == RankType::real);
  LiveSet live(parse_policy("peak", {}, entry), kNoBudget, {});
  live.append(0, 2);
  live.observe(std::vector<Observation>{{.mass = 3, .queries = 2}, {.mass = 8, .queries = 1}});
  CHECK(live.ranks(2).keys == std::vector{rank_key(-3.0), rank_key(-8.0)});
}

TEST_CASE("an error is reported at the header's line") {
  const std::string broken = compile_error(replaced(peak_text(), "= seen.mass >", "= sen.mass >"));
  CHECK(broken.starts_with("my.hpp: does not compile\n"));
  CHECK_THAT(broken, ContainsSubstring("\nmy.hpp:32:21: error: "));
  CHECK_THAT(broken, !ContainsSubstring("policies/"));
  CHECK_THAT(broken, !ContainsSubstring("entry.cpp"));
}

TEST_CASE("messages of check_policy are shown, at the struct's line") {
  CHECK(
      compile_error(replaced(peak_text(), "void observe", "void obsrve")) ==
      "my.hpp: does not compile\n"
      "my.hpp:15: error: policy: kInfo.needs requests observations, so it needs `static constexpr "
      "void observe(Slot&, const Observation&, const Params&, const Step&)`");
  CHECK(compile_error(replaced(peak_text(), "PolicyInfo kInfo", "PolicyInfo info")) ==
        "my.hpp: does not compile\n"
        "my.hpp:15: error: policy: needs `static constexpr PolicyInfo kInfo{...}`");
  CHECK(
      compile_error(replaced(peak_text(), "constexpr std::uint64_t rank", "std::uint64_t rank")) ==
      "my.hpp: does not compile\n"
      "my.hpp:34: error: policy: rank() must be constexpr, and call only constexpr functions, so "
      "that one text compiles for host and device");
  CHECK_THAT(
      compile_error(replaced(peak_text(), "static constexpr void observe", "static void observe")),
      ContainsSubstring("my.hpp:31: error: policy: observe() must be constexpr"));
  CHECK_THAT(
      compile_error(replaced(peak_text(), "static constexpr float weight", "static float weight")),
      ContainsSubstring("error: policy: weight() must be constexpr"));
}

TEST_CASE("messages of check_policy are shown with clang, which warns about GCC's options") {
  const std::string log =
      "clang: warning: argument unused during compilation: '-fmax-errors=20' "
      "[-Wunused-command-line-argument]\n"
      "In file included from entry.cpp:1:\n"
      "policies/policy_checks.hpp:149:5: error: static_assert failed \"policy: a check\"\n";
  CHECK(complaint(log, "/folder", {.path = "my.hpp", .text = {}, .xxh3 = {}, .type = {}}, 15) ==
        "\nmy.hpp:15: error: policy: a check");
}

TEST_CASE("a policy's error is shown without the errors that follow from it") {
  const std::string broken =
      compile_error(replaced(peak_text(), "std::uint64_t rank", "std::uint64 rank"));
  CHECK_THAT(broken, ContainsSubstring("\nmy.hpp:34:"));
  CHECK_THAT(broken, !ContainsSubstring("policy: needs"));
}

TEST_CASE("functions of the math library are refused by name") {
  const auto refused = [](const std::string& call) {
    return compile_error("#include <cmath>\n" +
                         replaced(peak_text(), "return slot.max_mass;", "return " + call + ";"));
  };
  CHECK_THAT(refused("std::exp(-1.0 * double(slot.max_mass))"),
             ContainsSubstring("\nmy.hpp:16: error: calls exp; a policy may not call"));
  CHECK_THAT(refused("std::log(1.0f + float(slot.max_mass))"), ContainsSubstring(": calls logf; "));
}

TEST_CASE("names that kvlab uses are refused") {
  CHECK(compile_error(replaced(peak_text(), "\"peak\"", "\"h2o\"")) ==
        "my.hpp: kInfo.name 'h2o' is already used by a policy of kvlab; give another");
  CHECK_THAT(compile_error(replaced(peak_text(), "\"peak\"", "\"oracle_attention\"")),
             ContainsSubstring("is already used"));
  CHECK_THAT(compile_error(replaced(peak_text(), "\"peak\"", "\"pe:ak\"")),
             ContainsSubstring("should be letters, digits and underscores"));
}

TEST_CASE("a path with unusual characters works") {
  const TemporaryFolder folder;
  const auto path = folder / "my \"odd\\ {0}.hpp";
  write_bytes(path, peak_text());
  CHECK(compile_policy_source(path)->source->path == path.string());
}

TEST_CASE("without a compiler the error says what to do") {
  const TemporaryFolder folder;
  write_bytes(folder / "my.hpp", peak_text());
  const char* const before = getenv("CXX");
  const std::string restored = before ? before : "";
  setenv("CXX", "/nowhere/c++", 1);
  const std::string message = error_of([&] { compile_policy_source(folder / "my.hpp"); });
  before ? setenv("CXX", restored.c_str(), 1) : unsetenv("CXX");
  CHECK(
      message ==
      "--policy-source: cannot run the compiler '/nowhere/c++': No such file or directory; install "
      "a C++20 compiler, or name one in the environment's CXX");
}

TEST_CASE("a policy file names its source, and runs only with the same text") {
  const TemporaryFolder folder;
  const auto path = folder / "policy.json";
  const auto entry = compiled(peak_text());
  const auto other = compiled(peak_text() + "// another text\n");
  const auto renamed = compiled(replaced(peak_text(), "\"peak\"", "\"leak\""));
  PolicyFile file{.cache = {.policy = parse_policy("peak:sinks=1", {}, entry),
                            .budget = {.extent = tokens(64)}}};
  file.model = "tiny";
  write_policy_file(path, file);
  CHECK(read_policy_file(path, entry).cache.policy.text() == "peak:sinks=1:recent=0");
  CHECK(read_policy_file(path, entry).cache.policy.entry == entry);

  const auto refusal = [&](const auto& given) {
    return error_of([&] { read_policy_file(path, given); });
  };
  CHECK_THAT(refusal(nullptr), ContainsSubstring("policy.json: policy peak was compiled from ") &&
                                   ContainsSubstring("give this file: --policy-source "));
  CHECK_THAT(refusal(other), ContainsSubstring("was compiled from another text"));
  CHECK_THAT(refusal(renamed), ContainsSubstring("defines leak"));
}

TEST_CASE("a Python function is not a source: the error says what to write instead") {
  for (const std::string path : {"notes/dep.py", "<stdin>"})
    for (const CompiledPolicies& given :
         {CompiledPolicies{}, CompiledPolicies(compiled(peak_text()))})
      CHECK(refused([&] { require_source(given, "peak", path, "0", "run.json"); }) ==
            "run.json: policy peak is a Python function of " + path +
                ", and these run in replays only; write it as a header "
                "(docs/guides/write-a-policy.md) and replay it with --policy-source");
}

TEST_CASE("the loop runs with a policy from a source: replay, deploy, generate, eval, verify") {
  const TemporaryFolder folder;
  const std::string source = (folder / "peak.hpp").string(), run = (folder / "run").string(),
                    policy = (folder / "policy.json").string();
  write_bytes(source, peak_text());
  const auto with = [&](const std::string& line) {
    return call(line + " --policy-source " + source);
  };
  CHECK(with("replay --trace " KVLAB_SOURCE_DIR
             "/traces/samples/tiny-story --budget 32 --layers 0 --out " +
             run) == 0);
  const Run loaded = load_run(run);
  REQUIRE(loaded.info.sources.size() == 1);
  CHECK(loaded.info.sources[0].policy == "peak");
  const std::string text = peak_text();
  CHECK(loaded.info.sources[0].xxh3 == xxh3_hex(std::as_bytes(std::span(text))));

  const std::string deploy = "deploy " + run + " --budget 32 --out " + policy;
  CHECK_THAT(refusal(deploy), ContainsSubstring("--policy-source"));
  CHECK(with(deploy) == 0);
  const std::string tiny = " --model " + kTiny + " ";
  CHECK(with("generate" + tiny + "--prompt Once --max-new-tokens 40 --policy-file " + policy) == 0);
  CHECK(with("eval" + tiny +
             "--text " KVLAB_SOURCE_DIR "/tools/demo/prompt.txt --max-tokens 80 --policy-file " +
             policy) == 0);
  CHECK(with("verify" + tiny + "--prompt 'Once upon a time' --budget 16 --max-new-tokens 40") == 0);
  CHECK(with("policies") == 0);

  write_bytes(source, peak_text() + "\n");
  CHECK_THAT(error_of([&] { with(deploy); }), ContainsSubstring("another text"));
}
