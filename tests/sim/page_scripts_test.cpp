// Tests of the JavaScript of pages. It must write numbers as the terminal does. The scripts share
// one scope, so no name may be defined twice.
#include <bit>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <random>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "sim/report/text.hpp"
#include "tests/catch.hpp"
#include "tests/skip.hpp"
#include "tests/traces/temporary_folder.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

const std::filesystem::path kScripts = KVLAB_SOURCE_DIR "/sim/report/page";

std::vector<std::string> lines_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

/// Evaluates `call` with the scripts of pages in Node.js, once for each list of numbers, and
/// returns the results as text. `call` is an expression of `x`, the list.
std::vector<std::string> on_a_page(const std::string& call,
                                   const std::vector<std::vector<double>>& lists) {
  const TemporaryFolder folder;
  std::ofstream script(folder / "run.js");
  script << "'use strict';\n" << read_bytes(kScripts / "text.js");
  script << "const number = (bits) => new Float64Array(new BigUint64Array([bits]).buffer)[0];\n"
            "for (const x of [\n";
  for (const auto& list : lists) {
    script << "[";
    for (const double value : list) script << std::bit_cast<std::uint64_t>(value) << "n,";
    script << "],\n";
  }
  script << "].map((list) => list.map(number))) console.log(" << call << ");\n";
  script.close();
  const std::string out = (folder / "out").string();
  REQUIRE(std::system(("node " + (folder / "run.js").string() + " >" + out).c_str()) == 0);
  return lines_of(read_bytes(out));
}

bool has_node() { return std::system("node --version >/dev/null 2>&1") == 0; }

/// A number of either sign with a random size from 1e-12 to 1e12.
double any_size(std::mt19937_64& random) {
  std::uniform_real_distribution<double> exponent(-12, 12);
  const double size = std::pow(10, exponent(random));
  return random() % 4 == 0 ? -size : size;
}

/// Edge cases, and numbers of many kinds.
std::vector<double> numbers() {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  std::vector<double> all{0.0,         -0.0,      1e-320,    -1e-320,    5e-324, 1e300,  -1e300,
                          1e21,        1e22,      123e19,    1.5e21,     1e20,   0x1p53, 0x1p64,
                          NAN,         -NAN,      kInfinity, -kInfinity, 999.5,  9.995,  0.00000005,
                          0.999999999, 1 - 1e-16, 1024.5,    0.1 + 0.2};
  for (int power = -22; power <= 22; ++power) {
    const double ten = std::pow(10, power);
    for (const double near : {ten, std::nextafter(ten, 0), std::nextafter(ten, kInfinity)})
      all.insert(all.end(), {near, -near, near / 2, near * 5});
  }
  std::mt19937_64 random(1);
  for (int i = 0; i < 400; ++i) {
    const auto whole = static_cast<double>(random() % 3'000'000);
    all.insert(all.end(), {any_size(random), std::bit_cast<double>(random()), whole, whole + 0.5,
                           -whole / 8, whole / 1000, (whole + 0.5) / 1024, whole / 0x1p20});
  }
  return all;
}

std::vector<std::vector<double>> alone(const std::vector<double>& values) {
  std::vector<std::vector<double>> lists;
  for (const double value : values) lists.push_back({value});
  return lists;
}

}  // namespace

TEST_CASE("A page writes a number as the terminal does") {
  if (!has_node()) return skip("there is no node");
  const std::vector<double> values = numbers();
  REQUIRE(values.size() > 3000);
  const auto texts = on_a_page("numberText(x[0])", alone(values));
  REQUIRE(texts.size() == values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    CAPTURE(i, std::bit_cast<std::uint64_t>(values[i]));
    CHECK(texts[i] == number_text(values[i]));
  }
  CHECK(number_text(-0.0) == "0");
  CHECK(number_text(NAN) == "nan");
}

TEST_CASE("A page writes bytes as the terminal does") {
  if (!has_node()) return skip("there is no node");
  std::vector<double> values = numbers();
  std::erase_if(values, [](double value) { return !(value >= 0); });
  const auto texts = on_a_page("bytesText(x[0])", alone(values));
  REQUIRE(texts.size() == values.size());
  for (std::size_t i = 0; i < values.size(); ++i) CHECK(texts[i] == bytes_text(values[i]));
}

TEST_CASE("A page writes a mean and its error as the terminal does") {
  if (!has_node()) return skip("there is no node");
  std::mt19937_64 random(2);
  std::vector<std::vector<double>> lists;  // mean, error, low, high
  const std::vector<double> values = numbers();
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double mean = std::isfinite(values[i]) ? values[i] : 0.25;
    const double error = i % 7 == 0 ? NAN : i % 7 == 1 ? 0 : std::abs(any_size(random));
    const double low = i % 5 == 0 ? NAN : mean - 2 * error,
                 high = i % 5 == 0 ? NAN : mean + (i % 5 == 1 ? 3 : 2) * error;
    lists.push_back({mean, error, low, high});
  }
  const auto texts =
      on_a_page("averageText({mean: x[0], error: x[1], low: x[2], high: x[3]})", lists);
  REQUIRE(texts.size() == lists.size());
  for (std::size_t i = 0; i < lists.size(); ++i) {
    const auto& x = lists[i];
    CAPTURE(i, x);
    CHECK(texts[i] == average_text({x[0], x[1], {x[2], x[3]}}));
  }
}

TEST_CASE("A page says how the runner-up compares with the choice") {
  if (!has_node()) return skip("there is no Node.js");
  const std::string call =
      "runnerUpText({choice: 'a', runner_up: 'b', mean: 0.1, better: 'lower', "
      "reason: x[3] ? 'less memory' : 'lowest mean', "
      "difference: {mean: x[0], low: Number.isNaN(x[1]) ? null : x[1], high: x[2]}})";
  const std::string b = "b, the runner-up, is ";
  CHECK(on_a_page(call, {{0.05, 0.01, 0.09, 0},
                         {0.05, -0.01, 0.11, 0},
                         {-0.02, -0.05, 0.01, 1},
                         {0.05, NAN, NAN, 0}}) ==
        std::vector<std::string>{
            b + "significantly worse: by 0.050 (95% CI 0.010 to 0.090), which is 50% of a's.",
            b + "not significantly worse: by 0.050 (95% CI -0.010 to 0.110), which is 50% of a's.",
            b + "not significantly better: by 0.020 (95% CI -0.010 to 0.050), which is 20% of a's, "
                "and a needs "
                "less memory.",
            b + "worse: by 0.050, which is 50% of a's. No confidence interval is known."});
}

TEST_CASE("A value minus the best one is negative if it is worse and higher values are better") {
  if (!has_node()) return skip("there is no Node.js");
  const std::string call =
      "minusBest([x[0], x[1], x[2]].map((v) => (Number.isNaN(v) ? null : v)), x[3] > 0).join()";
  CHECK(on_a_page(call,
                  {{0.5, 0.25, 0.75, 0}, {0.5, 0.25, 0.75, 1}, {0.5, NAN, NAN, 1}, {0, 0, 0, 1}}) ==
        std::vector<std::string>{"0.5,0.25,0.75", "-0.5,-0.75,-0.25", "-0.5,,", "0,0,0"});
}

TEST_CASE("No two scripts of pages define the same name") {
  static const std::regex kDefinition(
      R"(^(?:async )?(?:function\*?|const|let|var|class) +([A-Za-z_$][\w$]*))");
  std::map<std::string, std::string> first;
  for (const auto& entry : std::filesystem::directory_iterator(kScripts)) {
    if (entry.path().extension() != ".js") continue;
    for (const std::string& line : lines_of(read_bytes(entry.path()))) {
      std::smatch found;
      if (!std::regex_search(line, found, kDefinition)) continue;
      CAPTURE(line);
      const std::string here = entry.path().filename().string();
      const auto [other, is_new] = first.emplace(found[1], here);
      CHECK((is_new ? here : other->second) == here);
      CHECK(is_new);
    }
  }
  CHECK(first.size() > 100);
}
