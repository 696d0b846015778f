// Backends with a fault, which `kvlab verify` has to find.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "engine/backend.hpp"
#include "traces/base/json.hpp"

namespace kvlab::test {

/// Changes the attention outputs [token, query head, dim] of a layer.
using Fault = std::function<void(std::uint32_t layer, std::span<float> out)>;

/// An observer that forwards all calls to another one, with a fault in the attention outputs.
class FaultyObserver final : public DecoderObserver {
 public:
  FaultyObserver(DecoderObserver& to, Fault fault) : to_(to), fault_(std::move(fault)) {}

  void begin_append(std::span<const std::int32_t> ids, std::uint32_t first, SegmentKind kind,
                    bool new_segment) override {
    to_.begin_append(ids, first, kind, new_segment);
  }
  void evicted(std::uint32_t layer, std::uint32_t kv_head, std::uint32_t now,
               std::span<const std::uint32_t> victims) override {
    to_.evicted(layer, kv_head, now, victims);
  }
  void observed(std::uint32_t layer, std::uint32_t kv_head, const LiveTokens& live,
                std::span<const Observation> seen) override {
    to_.observed(layer, kv_head, live, seen);
  }
  void layer(std::uint32_t layer, std::span<const float> q, std::span<const float> k,
             std::span<const float> v, std::span<const float> out,
             std::span<const float> lse) override {
    std::vector<float> changed(out.begin(), out.end());
    fault_(layer, changed);
    to_.layer(layer, q, k, v, changed, lse);
  }
  void residual(std::uint32_t layer, std::span<const float> x) override { to_.residual(layer, x); }
  void end_append() override { to_.end_append(); }

 private:
  DecoderObserver& to_;
  Fault fault_;
};

/// A backend that claims to run the model of `named`. If a decoder has an observer, the backend
/// takes it from `watched` and adds a fault to its outputs. It takes other decoders from `alone`.
class FaultyBackend final : public Backend {
 public:
  FaultyBackend(Backend& named, Backend& watched, Backend& alone, Fault fault = {})
      : named_(named), watched_(watched), alone_(alone), fault_(std::move(fault)) {}

  const ModelConfig& config() const override { return named_.config(); }
  std::string weights_xxh3() const override { return named_.weights_xxh3(); }
  std::shared_ptr<const OutputProjections> output_projections() const override {
    return named_.output_projections();
  }
  std::optional<Dtype> rounding() const override { return named_.rounding(); }
  std::unique_ptr<SequenceDecoder> decoder(const ResolvedConfig& cache,
                                           std::uint32_t tokens) override {
    return alone_.decoder(cache, tokens);
  }
  std::unique_ptr<SequenceDecoder> watched_decoder(const ResolvedConfig& cache,
                                                   std::uint32_t tokens,
                                                   DecoderObserver& observer) override {
    if (!fault_) return watched_.watched_decoder(cache, tokens, observer);
    observer_ = std::make_unique<FaultyObserver>(observer, fault_);
    return watched_.watched_decoder(cache, tokens, *observer_);
  }
  BatchBackend& batches() override { return named_.batches(); }
  TraceHeader trace_header(nlohmann::json options) const override {
    return named_.trace_header(std::move(options));
  }
  std::unique_ptr<SequenceDecoder> capturing_decoder(
      const ResolvedConfig& cache, std::uint32_t tokens, TraceWriter& writer,
      std::function<void(std::uint32_t)> progress) override {
    return named_.capturing_decoder(cache, tokens, writer, std::move(progress));
  }

 private:
  Backend &named_, &watched_, &alone_;
  Fault fault_;
  std::unique_ptr<FaultyObserver> observer_;
};

}  // namespace kvlab::test
