// Input: results.csv. Accepted input is written and read back unchanged.
#include "sim/run/results.hpp"
#include "tests/fuzz/fuzz.hpp"

using namespace kvlab;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::accepts(
      [&] {
        const std::string text = results_csv(parse_results_csv(fuzz::text_of(data, size), "x.csv"));
        fuzz::require(results_csv(parse_results_csv(text, "x.csv")) == text, "it changed:", text);
      },
      "x.csv");
  return 0;
}
