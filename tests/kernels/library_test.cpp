// kvlab.h beside the host's catalogue, and what it refuses: without a device.
#include <cstddef>
#include <vector>

#include "kernels/kvlab.h"
#include "policies/catalogue.hpp"
#include "tests/catch.hpp"

using namespace kvlab;

namespace {

std::vector<double> defaults_of(const PolicyEntry& entry) {
  return parse_policy(entry.info.name).params;
}

}  // namespace

TEST_CASE("The library weighs a prompt's queries as the host does") {
  int weighted = 0;
  for (const PolicyEntry& entry : policy_catalogue()) {
    CAPTURE(entry.info.name);
    const kvlab_policy* const held = kvlab_find_policy(std::string(entry.info.name).c_str());
    REQUIRE(held);
    CHECK(kvlab_policy_weighted(held) == (entry.info.weighted ? 1 : 0));
    weighted += kvlab_policy_weighted(held);

    const std::vector<double> values = defaults_of(entry);
    std::vector<std::byte> params(kvlab_policy_params_bytes(held));
    REQUIRE(kvlab_policy_params(held, values.data(), static_cast<int>(values.size()),
                                params.data()) == cudaSuccess);
    std::vector<float> weights(100, -1);
    std::uint32_t tail = 0;
    REQUIRE(kvlab_policy_weights(held, params.data(), 100, weights.data(), &tail) == cudaSuccess);
    CHECK(tail == entry.tail(params.data()));
    for (std::uint32_t age = 0; age < 100; ++age)
      REQUIRE(weights[age] == (age < tail ? entry.weight(age, params.data()) : 0.0f));
  }
  CHECK(weighted > 0);
}

TEST_CASE("The library refuses what it cannot do before any launch") {
  const kvlab_policy* const snapkv = kvlab_find_policy("snapkv");
  float weight = 0;
  std::uint32_t tail = 0;
  CHECK(kvlab_policy_weights(nullptr, nullptr, 1, &weight, &tail) == cudaErrorInvalidValue);
  CHECK(kvlab_policy_weights(snapkv, nullptr, 1, &weight, &tail) == cudaErrorInvalidValue);
  CHECK(kvlab_policy_weighted(nullptr) == 0);

  CHECK(kvlab_write(nullptr, nullptr) == cudaErrorInvalidValue);
  kvlab_write_args write{};
  CHECK(kvlab_write(&write, nullptr) == cudaErrorInvalidValue);

  kvlab_columns_args columns{};
  CHECK(kvlab_columns(&columns, nullptr) == cudaErrorInvalidValue);  // none
  columns.count = 5;
  CHECK(kvlab_columns(&columns, nullptr) == cudaErrorInvalidValue);
  columns.count = 1;
  columns.columns[0] = static_cast<kvlab_column>(5);
  CHECK(kvlab_columns(&columns, nullptr) == cudaErrorInvalidValue);

  kvlab_observation seen{};
  kvlab_shrink_args shrink{};
  shrink.seen = &seen;
  CHECK(kvlab_shrink(snapkv, &shrink, nullptr) == cudaErrorNotSupported);
  shrink.weighted = 1;
  CHECK(kvlab_shrink(snapkv, &shrink, nullptr) == cudaErrorInvalidValue);
}
