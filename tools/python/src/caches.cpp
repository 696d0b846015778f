// The caches of a model whose other layers run elsewhere.
#include <fmt/format.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>
#include <vector>

#include "engine/layer_cache.hpp"
#include "policies/executor.hpp"
#include "sim/budgets/grid.hpp"
#include "tools/python/src/array.hpp"
#include "tools/python/src/bindings.hpp"
#include "tools/python/src/policy.hpp"

namespace kvlab::python {
namespace {

using Rows = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

class Caches {
 public:
  Caches(const std::string& policy, const std::vector<Policy>& own, const std::string& budget,
         const std::string& prefill, const std::string& positions, std::uint64_t seed,
         double threshold, std::uint32_t length, std::uint32_t layers, std::uint32_t query_heads,
         std::uint32_t kv_heads, std::uint32_t head_size, const std::vector<float>& inv_freq,
         float rope_factor, float softmax_scale)
      : kv_heads_(kv_heads), group_(query_heads / kv_heads), head_size_(head_size) {
    GridRequest request{
        .policies = {policy}, .prefills = {prefill}, .seed = seed, .threshold = threshold};
    if (!budget.empty()) request.budgets = {budget};
    if (!positions.empty()) request.positions = {positions};
    const HeadCounts model{layers, kv_heads};
    const ResolvedConfig config =
        resolve(make_grid(request, {}, compiled_from(own)).front(), length, 0, model);
    check_held(kDecoder, config, model);
    const HeadShape shape{head_size, group_, config.positions, softmax_scale, config.threshold16()};
    for (std::uint32_t layer = 0; layer < layers; ++layer)
      layers_.push_back(std::make_unique<LayerCache>(config, shape, kv_heads, layer,
                                                     Rope{inv_freq, rope_factor}));
  }

  Caches(const Caches&) = delete;
  Caches& operator=(const Caches&) = delete;

  /// [token, query_heads, head_size], the outputs of tokens that come together.
  FloatArray attend(std::uint32_t layer, const Rows& q, const Rows& k, const Rows& v,
                    bool is_prompt, unsigned threads) {
    check(q, "q", q.shape(0), kv_heads_ * group_);
    check(k, "k", q.shape(0), kv_heads_);
    check(v, "v", q.shape(0), kv_heads_);
    std::vector<float> out(q.size());
    {
      const nb::gil_scoped_release no_gil;
      layers_.at(layer)->attend({.q = q.data(),
                                 .k = k.data(),
                                 .v = v.data(),
                                 .out = out.data(),
                                 .tokens = static_cast<std::uint32_t>(q.shape(0)),
                                 .is_prompt = is_prompt},
                                threads);
    }
    return array_of(std::move(out), {q.shape(0), q.shape(1), q.shape(2)});
  }

  std::uint32_t tokens(std::uint32_t layer) const { return layers_.at(layer)->tokens(); }
  Array<std::uint32_t> kept(std::uint32_t layer, std::uint32_t kv_head) const {
    const auto positions = layers_.at(layer)->live(kv_head).positions();
    return array_of(std::vector<std::uint32_t>(positions.begin(), positions.end()),
                    {positions.size()});
  }
  template <class Of>
  std::uint64_t sum(Of of) const {
    std::uint64_t all = 0;
    for (const auto& layer : layers_)
      for (std::uint32_t head = 0; head < kv_heads_; ++head) all += of(layer->live(head));
    return all;
  }
  std::uint64_t evictions() const {
    return sum([](const LiveSet& live) { return live.evictions(); });
  }
  /// Of keys and values of the live tokens.
  std::uint64_t kv_bytes() const {
    return sum([](const LiveSet& live) { return std::uint64_t{live.size()}; }) * 2 * head_size_ *
           sizeof(float);
  }

 private:
  void check(const Rows& rows, std::string_view name, std::size_t tokens, std::size_t heads) const {
    if (rows.shape(0) != tokens || rows.shape(1) != heads || rows.shape(2) != head_size_)
      throw std::invalid_argument(fmt::format("{}: [{}, {}, {}]; [{}, {}, {}] is expected", name,
                                              rows.shape(0), rows.shape(1), rows.shape(2), tokens,
                                              heads, head_size_));
  }

  std::uint32_t kv_heads_, group_, head_size_;
  std::vector<std::unique_ptr<LayerCache>> layers_;
};

}  // namespace

void bind_caches(nb::module_& module) {
  nb::class_<Caches>(module, "Caches", "The caches of every layer of a model, for one sequence.")
      .def(nb::init<const std::string&, const std::vector<Policy>&, const std::string&,
                    const std::string&, const std::string&, std::uint64_t, double, std::uint32_t,
                    std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t,
                    const std::vector<float>&, float, float>(),
           nb::arg("policy"), nb::arg("own"), nb::arg("budget"), nb::arg("prefill"),
           nb::arg("positions"), nb::arg("seed"), nb::arg("threshold"), nb::arg("length"),
           nb::arg("layers"), nb::arg("query_heads"), nb::arg("kv_heads"), nb::arg("head_size"),
           nb::arg("inv_freq"), nb::arg("rope_factor"), nb::arg("softmax_scale"))
      .def("attend", &Caches::attend, nb::arg("layer"), nb::arg("q"), nb::arg("k"), nb::arg("v"),
           nb::arg("is_prompt"), nb::arg("threads"),
           "q [tokens, query_heads, head_size], k and v before RoPE; returns the outputs.")
      .def("tokens", &Caches::tokens, nb::arg("layer"))
      .def("kept", &Caches::kept, nb::arg("layer"), nb::arg("kv_head"), "Positions, ascending.")
      .def_prop_ro("evictions", &Caches::evictions)
      .def_prop_ro("kv_bytes", &Caches::kv_bytes);
}

}  // namespace kvlab::python
