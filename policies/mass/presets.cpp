#include "policies/mass/presets.hpp"

namespace kvlab {

std::span<const Preset> h2o_presets() {
  static constexpr Preset kPresets[] = {
      {"paper", "h2o:recent=1", "Zhang et al. 2023, algorithm 1",
       "there the token that comes in may be its own first victim"},
      {"mask_sim", "h2o", "FMInference/H2O, h2o_hf/utils_hh",
       "there a token that leaves the recent ones is unseen for one step and may come back; sums "
       "are in float16 and freeze"},
      {"real_drop", "h2o", "FMInference/H2O, h2o_hf/utils_real_drop",
       "there a decoded query sees one token more; sums are over the batch, in float16"},
      {"flexgen", "h2o", "FMInference/H2O, h2o_flexgen",
       "there the oldest recent token always becomes a heavy one, whatever it received"},
      {"lm_eval", "", "FMInference/H2O, h2o_hf/utils_lm_eval",
       "its sums look at queries that are still to come"},
      {"llama_recipes", "h2o", "meta-llama/llama-recipes, H2O",
       "there the first query head of each group counts alone"},
      {"kvcache_factory", "h2o:recent=64:once", "KVCache-Factory, H2OKVCluster",
       "there every query head keeps its own set by default"},
      {"r_kv", "tova:recent=1", "R-KV, H2O: what the last query gave",
       "there the softmax leaves out the last key"},
      {"kvpress", "h2o_mean:recent=0:once", "kvpress, ObservedAttentionPress",
       "nothing that changes an order: means instead of sums over the group"},
      {"cold_compress", "h2o_mean:sinks=1:recent=10", "cold-compress, KVCacheHeavyHitter",
       "there a mean goes back 400 steps at most, if a history is requested"},
      {"keys_values", "h2o:recent=1", "awslabs/keys_values, h2o",
       "there new tokens have a grace period that is a parameter: recent=N here"},
      {"sparse_vllm", "h2o:every=128:scope=layer:group=max", "Sparse-vLLM, H2O",
       "there raw products are compared, before the softmax"},
      {"openvino", "", "OpenVINO GenAI, block H2O", "it evicts whole blocks of tokens"},
      {"h2o_press", "", "minghui-liu/kvpress, H2OPress",
       "as it reads, a layer's sums begin with those of the layer before"},
      {"veloxquant", "", "VeloxQuant-MLX",
       "without a grace period the newest token is always evicted: the cache stays the prompt"},
      {"sinkvis", "", "SinkVis", "it looks at one matrix after the end, not at a cache"},
  };
  return kPresets;
}

}  // namespace kvlab
