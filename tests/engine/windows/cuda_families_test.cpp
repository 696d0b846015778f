// Compares the CUDA decoder with the CPU decoder and the simulator, for model families whose layers
// differ from Llama's.
#include "tests/engine/windows/both_sides.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

struct Family {
  const char* name;
  nlohmann::json config;
  double bf16_tolerance = kBf16Tolerance;
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
  // If two experts have nearly equal logits, a model with rounded weights may choose another
  // expert, so the tolerance is larger.
  constexpr double kOtherExperts = 0.1;
  all.push_back({"experts behind a dense layer",
                 with(small_config("Qwen3MoeForCausalLM", "qwen3_moe", 16, 1, 64),
                      {{"num_experts", 9},
                       {"num_experts_per_tok", 3},
                       {"moe_intermediate_size", 72},
                       {"norm_topk_prob", true},
                       {"mlp_only_layers", {0}}}),
                 kOtherExperts});
  nlohmann::json gpt_oss = with(small_config("GptOssForCausalLM", "gpt_oss", 8, 2, 64), windows);
  gpt_oss.update({{"num_local_experts", 5},
                  {"num_experts_per_tok", 4},
                  {"rope_parameters", {{"rope_type", "default"}}}});
  all.push_back({"experts with biases and a clamp, sink logits, windows", gpt_oss, kOtherExperts});
  return all;
}

/// Calls each(family, model) for all families.
template <class Each>
void each_family(Each each) {
  static std::map<std::string, BothSides> models;
  for (const Family& family : families()) {
    CAPTURE(family.name);
    each(family, models.try_emplace(family.name, family.config).first->second);
  }
}

}  // namespace

TEST_CASE("Logits of each family equal the CPU decoder's, for every dtype and chunk size",
          "[gpu]") {
  if (no_device()) return;
  each_family([](const Family& family, BothSides& model) {
    check_logits(
        model, [](const CudaSequence&, Dtype) {}, family.bf16_tolerance);
  });
}

TEST_CASE("Policies keep the same tokens as on the CPU, in each family and every mode", "[gpu]") {
  if (no_device()) return;
  each_family([](const Family&, BothSides& model) {
    check_policies(model, {"sink", "lru", "h2o"});
  });
}

TEST_CASE("A batch of each family passes verify's three checks", "[gpu]") {
  if (no_device()) return;
  each_family([](const Family&, BothSides& model) {
    for (const char* policy : {"h2o", "lru", "streaming_h2o", "feature:name=key_norm"})
      verify_batch(model, policy);
  });
}

TEST_CASE("A trace of each family captured on the device verifies", "[gpu]") {
  if (no_device()) return;
  each_family([](const Family&, BothSides& model) {
    const TemporaryFolder folder;
    const TraceReader trace = capture_on_device(model, folder.path());
    CHECK(trace.extras().residual_norm2 == model.cpu().config().norms.post_attention.empty());
  });
}
