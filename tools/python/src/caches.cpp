// The caches of a model whose other computations run elsewhere, such as in PyTorch.
#include <fmt/format.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <stdexcept>
#include <vector>

#include "sim/cache/growing_rope.hpp"
#include "sim/cache/layer_cache.hpp"
#include "tools/python/src/array.hpp"
#include "tools/python/src/bindings.hpp"
#include "tools/python/src/cache_request.hpp"
#include "tools/python/src/rows.hpp"

namespace kvlab::python {
namespace {

using ProjectionsOf = nb::typed<nb::callable, OutputProjections()>;
using Rows = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

class Caches {
 public:
  Caches(const CacheRequest& requested, std::uint32_t query_heads, std::uint32_t head_size,
         const Tables& inv_freq, const Factors& rope_factor, const std::vector<nb::dict>& rows,
         const ProjectionsOf& projections)
      : own_(requested.own),
        kv_heads_(requested.model.kv_heads),
        group_(query_heads / kv_heads_),
        head_size_(head_size),
        tokens_(requested.model.layers) {
    const ResolvedConfig config = resolve(requested, kDecoder);
    const std::vector<Rope> ropes = ropes_of(inv_freq, rope_factor);
    for (const Rope& rope : ropes) ropes_.emplace_back(rope);
    if (wants_projections(config.policy.features))
      output_ = nb::cast<std::shared_ptr<OutputProjections>>(projections());
    chunk_ = config.prefill.chunk;
    for (std::uint32_t layer = 0; layer < requested.model.layers; ++layer) {
      const RowSpec row = row_of(rows.at(layer), ropes, 0);
      tables_.push_back(row.table);
      const HeadShape shape{.head_size = head_size,
                            .group = group_,
                            .positions = config.positions_of(layer),
                            .softmax_scale = row.scale,
                            .threshold16 = config.threshold16(),
                            .softcap = row.softcap,
                            .sinks = row.sinks};
      layers_.emplace_back(config, shape, kv_heads_, layer, output_.get());
    }
  }

  Caches& operator=(const Caches&) = delete;

  /// Copies the caches, for a sequence that will continue in another way. Throws
  /// std::invalid_argument if a policy reads rows, because such a policy remembers the rows of only
  /// one sequence.
  std::unique_ptr<Caches> copy() const {
    for (const Policy& policy : own_)
      if (policy.entry->see_rows)
        throw std::invalid_argument(
            fmt::format("policy {} reads the rows of one sequence, so its cache cannot be copied; "
                        "compute the prefix again for each copy",
                        policy.entry->info.name));
    return std::unique_ptr<Caches>(new Caches(*this));
  }

  /// Appends tokens together and returns their attention outputs [token, query_heads, head_size].
  FloatArray attend(std::uint32_t layer, const Rows& q, const Rows& k, const Rows& v,
                    bool is_prompt, unsigned threads) {
    check(q, "q", q.shape(0), kv_heads_ * group_);
    check(k, "k", q.shape(0), kv_heads_);
    check(v, "v", q.shape(0), kv_heads_);
    std::vector<float> out(q.size());
    {
      const nb::gil_scoped_release no_gil;
      feed(layer,
           {.tokens = static_cast<std::uint32_t>(q.shape(0)),
            .q = q.data(),
            .k = k.data(),
            .v = v.data(),
            .out = out.data()},
           is_prompt, threads);
    }
    return array_of(std::move(out), {q.shape(0), q.shape(1), q.shape(2)});
  }

  /// Drops all but the first `tokens` tokens. If the cache of a layer cannot do that, throws
  /// std::invalid_argument before anything is dropped.
  void crop(std::uint32_t tokens) {
    for (const LayerCache& layer : layers_)
      for (const HostCache& head : layer.heads())
        if (const std::string why = head.live().crop_obstacle(tokens); !why.empty())
          throw std::invalid_argument(
              fmt::format("the cache cannot be cropped to {} of its {} tokens: {}; copy the cache "
                          "before you feed tokens that you may remove",
                          tokens, tokens_.front(), why));
    for (LayerCache& layer : layers_)
      for (HostCache& head : layer.heads()) head.crop(tokens);
    for (std::uint32_t& fed : tokens_) fed = std::min(fed, tokens);
  }

  std::uint32_t tokens(std::uint32_t layer) const { return tokens_.at(layer); }
  Array<std::uint32_t> kept(std::uint32_t layer, std::uint32_t kv_head) const {
    const auto positions = layers_.at(layer).heads().at(kv_head).live().positions();
    return array_of(std::vector<std::uint32_t>(positions.begin(), positions.end()),
                    {positions.size()});
  }
  template <class Amount>
  std::uint64_t sum(Amount amount) const {
    std::uint64_t all = 0;
    for (const LayerCache& layer : layers_)
      for (const HostCache& head : layer.heads()) all += amount(head);
    return all;
  }
  std::uint64_t evictions() const {
    return sum([](const HostCache& head) { return head.live().evictions(); });
  }
  /// Bytes of the live tokens' keys and values.
  std::uint64_t kv_bytes() const {
    return sum([](const HostCache& head) { return head.live_bytes(); });
  }
  std::uint64_t allocated_bytes() const {
    return sum([](const HostCache& head) { return head.bytes(); });
  }

 private:
  Caches(const Caches&) = default;

  /// Runs the four steps of each append: evict to the budget, append, attend, observe. A prompt is
  /// appended as the prefill mode says, decoded tokens one by one.
  void feed(std::uint32_t layer, LayerRows rows, bool is_prompt, unsigned threads) {
    LayerCache& cache = layers_.at(layer);
    const std::size_t keys = std::size_t{kv_heads_} * head_size_, queries = keys * group_;
    const std::uint32_t all = rows.tokens, max_rows = !is_prompt ? 1 : chunk_ == 0 ? all : chunk_;
    for (std::uint32_t done = 0; done < all; done += rows.tokens) {
      rows.first = tokens_[layer];
      rows.tokens = std::min(max_rows, all - done);
      cache.step(rows, ropes_[tables_[layer]].covering(rows.first + rows.tokens), threads);
      tokens_[layer] += rows.tokens;
      rows.q += rows.tokens * queries;
      rows.out += rows.tokens * queries;
      rows.k += rows.tokens * keys;
      rows.v += rows.tokens * keys;
    }
    if (!is_prompt) return;
    cache.end_prompt();
    // Evicts now and not at the next append, so that only one layer at a time holds a whole prompt.
    // The kept tokens are the same, because they do not depend on the tokens that follow.
    for (HostCache& head : cache.heads()) head.evict_to_budget(tokens_[layer]);
  }

  void check(const Rows& rows, std::string_view name, std::size_t tokens, std::size_t heads) const {
    if (rows.shape(0) != tokens || rows.shape(1) != heads || rows.shape(2) != head_size_)
      throw std::invalid_argument(
          fmt::format("{}: the shape is [{}, {}, {}]; it should be [{}, {}, {}]", name,
                      rows.shape(0), rows.shape(1), rows.shape(2), tokens, heads, head_size_));
  }

  std::vector<Policy> own_;  // policies whose hooks the layers call
  std::uint32_t kv_heads_, group_, head_size_;
  std::uint32_t chunk_ = 0;  // number of tokens in an append of a prompt; 0: all
  std::vector<GrowingRope> ropes_;
  std::vector<std::uint32_t> tables_;                // [layer]: index in ropes_
  std::shared_ptr<const OutputProjections> output_;  // null if no feature reads it
  std::deque<LayerCache> layers_;
  std::vector<std::uint32_t> tokens_;  // [layer]: tokens so far
};

}  // namespace

void bind_caches(nb::module_& module) {
  nb::class_<Caches>(module, "Caches", "The caches of every layer of a model, for one sequence.")
      .def(nb::init<const CacheRequest&, std::uint32_t, std::uint32_t, const Tables&,
                    const Factors&, const std::vector<nb::dict>&, const ProjectionsOf&>(),
           nb::arg("asked"), nb::arg("query_heads"), nb::arg("head_size"), nb::arg("inv_freq"),
           nb::arg("rope_factor"), nb::arg("rows"), nb::arg("projections"),
           "`rows`: as in TraceWriter, one for each layer, without windows. `projections` returns "
           "the OutputProjections; it is called only if the policy reads them.")
      .def("attend", &Caches::attend, nb::arg("layer"), nb::arg("q"), nb::arg("k"), nb::arg("v"),
           nb::arg("is_prompt"), nb::arg("threads"),
           "Appends tokens and returns their attention outputs [tokens, query_heads, head_size]. "
           "`q` has that shape; `k`, `v`: [tokens, kv_heads, head_size]; all before RoPE.")
      .def("copy", &Caches::copy,
           "Returns a copy that continues independently. For use between two calls of the model.")
      .def("crop", &Caches::crop, nb::arg("tokens"), "Removes all tokens after the first `tokens`.")
      .def("tokens", &Caches::tokens, nb::arg("layer"))
      .def("kept", &Caches::kept, nb::arg("layer"), nb::arg("kv_head"), "Positions, ascending.")
      .def_prop_ro("evictions", &Caches::evictions)
      .def_prop_ro("kv_bytes", &Caches::kv_bytes)
      .def_prop_ro("allocated_bytes", &Caches::allocated_bytes);
}

}  // namespace kvlab::python
