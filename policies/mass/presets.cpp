#include "policies/mass/presets.hpp"

namespace kvlab {

std::span<const Preset> h2o_presets() {
  static constexpr Preset kPresets[] = {
      {"paper", "h2o:recent=1", "Zhang et al. 2023, algorithm 1",
       "the new token may be evicted first"},
      {"mask_sim", "h2o", "FMInference/H2O, h2o_hf/utils_hh",
       "a token that is no longer recent is invisible for one step and may come back; large "
       "float16 sums stop growing"},
      {"real_drop", "h2o", "FMInference/H2O, h2o_hf/utils_real_drop",
       "a decoded query sees one token more; sums run over the batch, in float16"},
      {"flexgen", "h2o", "FMInference/H2O, h2o_flexgen",
       "the oldest recent token always becomes a heavy hitter, whatever attention it received"},
      {"lm_eval", "", "FMInference/H2O, h2o_hf/utils_lm_eval",
       "its sums include queries that come later"},
      {"llama_recipes", "h2o", "meta-llama/llama-recipes, H2O",
       "only the first query head of each group counts"},
      {"kvcache_factory", "h2o:recent=64:once", "KVCache-Factory, H2OKVCluster",
       "every query head keeps its own set by default"},
      {"r_kv", "tova:recent=1", "R-KV, H2O: attention of the last query",
       "the softmax leaves out the last key"},
      {"kvpress", "h2o_mean:recent=0:once", "kvpress, ObservedAttentionPress",
       "means instead of sums over the group, which does not change the order"},
      {"cold_compress", "h2o_mean:sinks=1:recent=10", "cold-compress, KVCacheHeavyHitter",
       "if its history option is on, a mean covers at most 400 steps"},
      {"keys_values", "h2o:recent=1", "awslabs/keys_values, h2o",
       "the grace period of new tokens is a parameter, as recent=N in kvlab"},
      {"sparse_vllm", "h2o:every=128:scope=layer:group=max", "Sparse-vLLM, H2O",
       "raw products are compared, before the softmax"},
      {"openvino", "", "OpenVINO GenAI, block H2O", "it evicts whole blocks of tokens"},
      {"h2o_press", "", "minghui-liu/kvpress, H2OPress",
       "a layer's sums start from those of the previous layer"},
      {"veloxquant", "", "VeloxQuant-MLX",
       "it has no grace period, so the newest token is always evicted, and only prompt tokens "
       "stay"},
      {"sinkvis", "", "SinkVis",
       "it analyses the attention matrix of a finished run and has no cache"},
  };
  return kPresets;
}

std::span<const Preset> presets_of(std::string_view policy) {
  static constexpr Preset kLru[] = {
      {"hisparse", "hisparse", "SGLang and vLLM, HiSparse",
       "the newest token has a slot outside the order, which the next token takes"}};
  if (policy == "h2o") return h2o_presets();
  return policy == "lru" ? std::span<const Preset>(kLru) : std::span<const Preset>();
}

}  // namespace kvlab
