// A model's output projections, which some features are computed from.
#include <fmt/format.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>
#include <vector>

#include "engine/capture.hpp"
#include "tools/python/src/bindings.hpp"
#include "tools/python/src/long_call.hpp"

namespace kvlab::python {
namespace {

using Weights = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

std::shared_ptr<OutputProjections> projections_of(const std::vector<Weights>& layers,
                                                  std::uint32_t kv_heads, std::uint32_t head_size) {
  if (layers.empty() || kv_heads == 0 || head_size == 0)
    throw std::invalid_argument("output projections: the model has no layers or no heads");
  const std::size_t inputs = layers.front().shape(0), hidden = layers.front().shape(1);
  auto all = std::make_shared<OutputProjections>(
      OutputProjections{.hidden = static_cast<std::uint32_t>(hidden),
                        .group = static_cast<std::uint32_t>(inputs / head_size / kv_heads),
                        .head_size = head_size});
  for (const Weights& weights : layers) {
    if (weights.shape(0) != inputs || weights.shape(1) != hidden ||
        inputs != std::size_t{all->group} * kv_heads * head_size)
      throw std::invalid_argument(fmt::format(
          "output projections: layer {} has shape [{}, {}]; it should be [{}, {}], with whole "
          "query heads of {} KV heads",
          all->layers.size(), weights.shape(0), weights.shape(1), inputs, hidden, kv_heads));
    all->layers.emplace_back(weights.data(), weights.data() + weights.size());
  }
  return all;
}

std::shared_ptr<OutputProjections> read(const std::string& directory) {
  return result_of_long(
      [&] { return std::make_shared<OutputProjections>(read_output_projections(directory)); });
}

}  // namespace

void bind_projections(nb::module_& module) {
  nb::class_<OutputProjections>(module, "OutputProjections",
                                "The output projection W_o of each layer of a model.")
      .def(nb::new_(&projections_of), nb::arg("layers"), nb::arg("kv_heads"), nb::arg("head_size"),
           "`layers`: float32 [query_heads * head_size, hidden] for each layer.")
      .def_static("read", read, nb::arg("directory"), "Reads them from a checkpoint's folder.");
}

}  // namespace kvlab::python
