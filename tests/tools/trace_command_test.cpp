// Tests of the exit codes and errors of `kvlab trace`.
#include <filesystem>
#include <stdexcept>

#include "tests/catch.hpp"
#include "tests/tools/command_line.hpp"
#include "tests/traces/sample_trace.hpp"
#include "tests/traces/temporary_folder.hpp"

namespace kvlab {
namespace {

using Catch::Matchers::Message;
using test::Mistake;

using test::call;

std::string write(const test::TemporaryFolder& folder, Mistake mistake) {
  const auto path = folder / "t";
  test::write_trace(path, test::make_sample(40, Dtype::f32, Rounding::none, mistake), 30);
  return path.string();
}

TEST_CASE("info and verify exit 0 for a correct trace, with and without --json") {
  const test::TemporaryFolder folder;
  const std::string path = write(folder, Mistake::none);
  CHECK(call("trace info " + path) == 0);
  CHECK(call("trace info " + path + " --json") == 0);
  CHECK(call("trace verify " + path) == 0);
  CHECK(call("trace verify " + path + " --json --threads 2") == 0);
}

TEST_CASE("verify exits 1 for a wrong trace, also if an error is NaN") {
  for (const Mistake mistake : {Mistake::scale, Mistake::nan_output}) {
    const test::TemporaryFolder folder;
    const std::string path = write(folder, mistake);
    CHECK(call("trace verify " + path) == 1);
    CHECK(call("trace verify " + path + " --json") == 1);
    CHECK(call("trace info " + path) == 0);
  }
}

TEST_CASE("An unfinished trace is refused until it is sealed") {
  const test::TemporaryFolder folder;
  const std::string path = write(folder, Mistake::none);
  std::filesystem::remove(path + "/manifest.json");
  CHECK_THROWS_AS(call("trace info " + path), std::runtime_error);
  CHECK_THROWS_AS(call("trace verify " + path), std::runtime_error);
  CHECK(call("trace seal " + path) == 0);
  CHECK(call("trace verify " + path) == 0);
  CHECK_THROWS_AS(call("trace seal " + path), std::runtime_error);
}

TEST_CASE("A missing or unknown action is named with what is expected") {
  CHECK_THROWS_MATCHES(call("trace verify"), std::invalid_argument,
                       Message("give an action and one trace: kvlab trace info|verify|seal TRACE"));
  CHECK_THROWS_AS(call("trace"), std::invalid_argument);
  CHECK_THROWS_AS(call("trace verify a b"), std::invalid_argument);
  CHECK_THROWS_MATCHES(call("trace check a"), std::invalid_argument,
                       Message("unknown action 'check': kvlab trace info|verify|seal TRACE"));
}

}  // namespace
}  // namespace kvlab
