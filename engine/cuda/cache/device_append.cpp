#include <stdexcept>

#include "engine/cuda/cache/device_cache.hpp"

namespace kvlab {

void DeviceAppend::expect(std::uint32_t layer, std::uint32_t first, bool written) const {
  if (layer != layer_ || first != next_ || written != written_)
    throw std::logic_error(
        "an append has to write every part of a layer, in order, before the layer attends");
}

kernels::RopeWriteArgs DeviceAppend::write(std::uint32_t layer, const PromptChunk& part) {
  expect(layer, part.first, false);
  const kernels::RopeWriteArgs args = write_part(layer, part);
  written_ = true;
  return args;
}

void DeviceAppend::attend(std::uint32_t layer, const PromptChunk& part, const LayerOutputs& to) {
  expect(layer, part.first, true);
  attend_part(layer, part, to);
  written_ = false;
  next_ += static_cast<std::uint32_t>(part.rows);
  if (next_ < tokens_) return;
  ++layer_;
  if (layer_ < layers_) next_ = 0;
}

void DeviceAppend::finish() const { expect(layers_, tokens_, false); }

}  // namespace kvlab
