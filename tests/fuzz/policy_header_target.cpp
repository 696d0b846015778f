// Input: the header of --policy-source. The target finds the struct of its policy.
#include "policies/policy_struct.hpp"
#include "tests/fuzz/fuzz.hpp"

using namespace kvlab;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::accepts(
      [&] {
        const PolicyStruct found = find_policy_struct(fuzz::text_of(data, size), "x.hpp");
        fuzz::require(!found.name.empty() && found.line <= size + 1, "no place:", found.name);
      },
      "x.hpp");
  return 0;
}
