// Tests of policies whose headers only the device compiler (NVRTC) reads. Their names and
// parameters come from a description in the compiled code.
#include <cstring>

#include "kernels/runtime/policy_kernels.hpp"
#include "policies/registry.hpp"
#include "tests/catch.hpp"
#include "tests/device.hpp"
#include "tests/policies/leaky.hpp"
#include "tests/skip.hpp"
#include "tests/traces/temporary_folder.hpp"

using namespace kvlab;
using namespace kvlab::kernels;
using namespace kvlab::test;
using Catch::Matchers::ContainsSubstring;

namespace {

/// A policy whose kParams lists the parameters in another order than the members of Params.
struct Turned : Leaky {
  static constexpr Param<Params> kParams[] = {{"span", "", &Params::span, 64, 1, 1e6},
                                              {"keep", "", &Params::keep, 0.9, 0, 1},
                                              {"slope", "", &Params::slope, 0.125, 0, 10}};
};

bool has_nvrtc() {
  try {
    compile({.text = "", .headers = {}, .kernels = {}, .architecture = 90});
  } catch (const std::runtime_error&) {
    return false;
  }
  return true;
}

DeviceCode code_of(const std::string& header, int architecture) {
  const std::string path = std::string(KVLAB_SOURCE_DIR) + "/" + header;
  return code_of_header(path, read_bytes(path), architecture);
}

template <class P>
constexpr bool kHasOrderHooks = hooks::HasEvicted<P> || hooks::HasReorder<P>;

/// Calls check(description, the library's entry) for every registered policy that the device
/// supports.
template <class Check, class... P>
void for_each_policy(Check check, PolicyList<P...>) {
  std::size_t index = 0;
  const auto run = [&](const PolicyDescription& about) {
    const DevicePolicy& known = device_policies()[index++];
    INFO(known.name);
    check(about, known);
  };
  ((kHasOrderHooks<P> ? void() : run(describe<P>())), ...);
}

bool holds(const DeviceCode& code, const PolicyDescription& about) {
  const std::string_view bytes(reinterpret_cast<const char*>(&about), sizeof about);
  return std::string_view(code.image.data(), code.image.size()).find(bytes) !=
         std::string_view::npos;
}

}  // namespace

TEST_CASE("A description says which parameter each double of Params is") {
  constexpr PolicyDescription leaky = describe<Leaky>(), turned = describe<Turned>();
  CHECK(leaky.needs == Needs::both);
  CHECK(leaky.weighted);
  CHECK(leaky.slot_bytes == sizeof(Leaky::Slot));
  CHECK(leaky.param_count == 3);
  CHECK(std::vector<std::uint32_t>(leaky.param_of, leaky.param_of + 3) ==
        std::vector<std::uint32_t>{0, 1, 2});
  CHECK(std::vector<std::uint32_t>(turned.param_of, turned.param_of + 3) ==
        std::vector<std::uint32_t>{1, 2, 0});
}

TEST_CASE("NVRTC and the host give equal descriptions of every registered header") {
  if (!has_nvrtc()) return skip("no NVRTC");
  for_each_policy(
      [](const PolicyDescription& about, const DevicePolicy& known) {
        const DeviceCode code = code_of("policies/" + std::string(known.header), 90);
        CHECK(holds(code, about));
        PolicyDescription other = about;
        ++other.param_count;
        CHECK_FALSE(holds(code, other));
        CHECK(about.needs == known.needs);
        CHECK(about.evicts == known.evicts);
        CHECK(about.oldest_first == known.oldest_first);
        CHECK(about.weighted == known.weighted);
        CHECK(about.slot_bytes == known.slot_bytes);
        CHECK(about.param_count * sizeof(double) == known.params_bytes);
        REQUIRE(about.feature_count == known.features.size());
        for (std::size_t c = 0; c < known.features.size(); ++c)
          CHECK(std::string(about.features[c]) == known.features[c]);
      },
      Registry{});
  CHECK(holds(code_of("tests/policies/leaky.hpp", 80), describe<Leaky>()));
}

TEST_CASE("A header whose hooks only the CPU calls is refused for the device") {
  if (!has_nvrtc()) return skip("no NVRTC");
  for (const char* const header : {"clock", "sieve", "hisparse"})
    CHECK_THROWS_WITH(code_of("policies/recency/" + std::string(header) + ".hpp", 90),
                      ContainsSubstring("order_hooks.hpp"));
}

TEST_CASE("On the device, a policy from a header equals the registry's policy", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for_each_policy(
      [](const PolicyDescription& about, const DevicePolicy& known) {
        const HeaderPolicy held(
            code_of("policies/" + std::string(known.header), current_architecture()));
        const DevicePolicy& own = held.policy();
        CHECK(own.needs == known.needs);
        CHECK(own.evicts == known.evicts);
        CHECK(own.oldest_first == known.oldest_first);
        CHECK(own.weighted == known.weighted);
        CHECK(own.rank_type == known.rank_type);
        CHECK(own.slot_bytes == known.slot_bytes);
        REQUIRE(own.params_bytes == known.params_bytes);
        REQUIRE(own.features.size() == known.features.size());
        for (std::size_t c = 0; c < known.features.size(); ++c)
          CHECK(std::string(own.features[c]) == known.features[c]);

        std::vector<double> values;
        for (std::uint32_t i = 0; i < about.param_count; ++i)
          values.push_back(about.min_values[i] +
                           (about.max_values[i] - about.min_values[i]) / (3 + i));
        std::vector<std::byte> params(known.params_bytes), wanted(known.params_bytes);
        CHECK(held.write_params(values, params.data()));
        CHECK(known.params(values, wanted.data()));
        CHECK(params == wanted);
        constexpr std::uint32_t kQueries = 300;
        std::vector<float> weights(kQueries, -1);
        std::uint32_t tail = 0;
        check_cuda(held.weigh(params.data(), kQueries, weights.data(), &tail));
        CHECK(tail == known.tail(params.data()));
        for (std::uint32_t age = 0; age < kQueries; ++age)
          REQUIRE(weights[age] == (age < tail ? known.weight(age, params.data()) : 0.0f));
        check_cuda(held.weigh(params.data(), 0, weights.data(), &tail));
      },
      Registry{});
}
