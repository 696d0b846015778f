// Sequences side by side on the CPU.
#pragma once

#include "engine/batch_decoder.hpp"

namespace kvlab {

class CpuBatches final : public BatchBackend {
 public:
  /// `model` must outlive it.
  CpuBatches(const Model& model, unsigned threads) : model_(model), threads_(threads) {}

  const ModelConfig& config() const override { return model_.config(); }
  std::unique_ptr<BatchDecoder> batch_decoder(std::span<const ResolvedConfig> caches,
                                              std::uint32_t tokens) override;
  std::unique_ptr<LogitMemory> logit_memory(std::size_t floats) override;
  std::vector<RowScore> score(const ScoredRows& rows) override;

 private:
  const Model& model_;
  unsigned threads_;
};

}  // namespace kvlab
