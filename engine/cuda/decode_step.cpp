#include "engine/cuda/decode_step.hpp"

namespace kvlab {

DecodeStep::DecodeStep(const On& on, int rows, Next next)
    : on_(on), rows_(rows), next_(next), cache_(on.cache.step(rows, on.outputs)) {}

void DecodeStep::enqueue() const {
  const auto& [model, layers, batch, cache, outputs, x, logits] = on_;
  layers.embed(batch.state().ids, rows_, x);
  cache_->begin();
  for (std::uint32_t layer = 0; layer < model.config().layers; ++layer) {
    const LayerOutputs to = outputs.step(layer);
    layers.qkv(layer, rows_, x, to, cache_->write(layer));
    cache_->attend(layer);
    layers.output(layer, rows_, x, to);
    cache_->observe(layer);
    layers.gate_up(layer, rows_, x);
    layers.down(layer, rows_, x);
  }
  layers.head(x, rows_, logits);
  if (next_ == Next::sampled) batch.sample(rows_, logits);
  cache_->end();
  if (next_ == Next::sampled)
    batch.finish(rows_, true);
  else
    batch.advance(rows_);
}

std::vector<DecodeStep::Part> DecodeStep::parts(std::uint64_t live_bytes) const {
  DeviceLayers& layers = on_.layers;
  const auto every_layer = [this](auto body) {
    return [this, body] {
      for (std::uint32_t layer = 0; layer < on_.model.config().layers; ++layer)
        body(layer, on_.outputs.step(layer));
    };
  };
  return {
      {"norm, qkv, rope", layers.weight_bytes(&DeviceLayer::qkv),
       every_layer([this](std::uint32_t layer, const LayerOutputs& to) {
         on_.layers.qkv(layer, rows_, on_.x, to, cache_->write(layer));
       })},
      {"attention", live_bytes,
       [this] {
         for (std::uint32_t layer = 0; layer < on_.model.config().layers; ++layer) {
           cache_->attend(layer);
           cache_->observe(layer);
         }
         cache_->end();
       }},
      {"output", layers.weight_bytes(&DeviceLayer::output),
       every_layer([this](std::uint32_t layer, const LayerOutputs& to) {
         on_.layers.output(layer, rows_, on_.x, to);
       })},
      {"norm, gate, up", layers.weight_bytes(&DeviceLayer::gate_up),
       every_layer([this](std::uint32_t layer, const LayerOutputs&) {
         on_.layers.gate_up(layer, rows_, on_.x);
       })},
      {"down", layers.weight_bytes(&DeviceLayer::down),
       every_layer([this](std::uint32_t layer, const LayerOutputs&) {
         on_.layers.down(layer, rows_, on_.x);
       })},
      {"norm, head", layers.head_bytes(), [this] { on_.layers.head(on_.x, rows_, on_.logits); }},
      {"sample",
       std::uint64_t{static_cast<unsigned>(rows_)} * on_.model.config().vocab * sizeof(float),
       [this] { on_.batch.sample(rows_, on_.logits); }},
  };
}

}  // namespace kvlab
