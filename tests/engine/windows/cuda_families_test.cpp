// The CUDA decoder of families of other parts, against the CPU's and under the simulator's eyes.
#include "tests/engine/windows/both_sides.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

struct Family {
  const char* name;
  nlohmann::json config;
};

std::vector<Family> families() {
  const auto with = [](nlohmann::json json, const nlohmann::json& changes) {
    json.update(changes);
    return json;
  };
  const nlohmann::json windows{{"sliding_window", 100},
                               {"layer_types", {"sliding_attention", "full_attention"}}};
  std::vector<Family> all;
  all.push_back({"fused projections, heads that turn in part",
                 with(small_config("Phi3ForCausalLM", "phi3", 4, 2, 64),
                      {{"sliding_window", nullptr}, {"partial_rotary_factor", 0.75}})});
  all.push_back(
      {"norms behind blocks, of all heads", small_config("Olmo2ForCausalLM", "olmo2", 6, 2, 96)});
  all.push_back({"norms behind blocks, of all heads, and windows",
                 with(small_config("Olmo3ForCausalLM", "olmo3", 4, 4, 64), windows)});
  return all;
}

/// Calls each(name, model) for all of them.
template <class Each>
void each_family(Each each) {
  static std::map<std::string, BothSides> models;
  for (const Family& family : families())
    each(family.name, models.try_emplace(family.name, family.config).first->second);
}

}  // namespace

TEST_CASE("Logits of each family are the CPU decoder's, in every dtype and chunk", "[gpu]") {
  if (no_device()) return;
  each_family([](const char* name, BothSides& model) {
    CAPTURE(name);
    check_logits(model, [](const CudaSequence&, Dtype) {});
  });
}

TEST_CASE("Policies act on each family as on the CPU, in every mode", "[gpu]") {
  if (no_device()) return;
  each_family([](const char* name, BothSides& model) {
    CAPTURE(name);
    check_policies(model, {"sink", "lru", "h2o"});
  });
}

TEST_CASE("A batch of each family passes the three questions", "[gpu]") {
  if (no_device()) return;
  each_family([](const char* name, BothSides& model) {
    CAPTURE(name);
    for (const char* policy : {"h2o", "lru", "streaming_h2o", "column:name=key_norm"})
      verify_batch(model, policy);
  });
}

TEST_CASE("A trace of each family that was captured on the device verifies", "[gpu]") {
  if (no_device()) return;
  each_family([](const char* name, BothSides& model) {
    CAPTURE(name);
    const TemporaryFolder folder;
    const TraceReader trace = capture_on_device(model, folder.path());
    CHECK(trace.has_residuals() == model.cpu().config().norms.behind_attention.empty());
  });
}
