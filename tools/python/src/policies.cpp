#include <fmt/format.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "policies/catalogue.hpp"
#include "policies/features/features.hpp"
#include "policies/modifiers/ranks.hpp"
#include "sim/report/describe_policy.hpp"
#include "sim/source/policy_source.hpp"
#include "tools/python/src/array.hpp"
#include "tools/python/src/bindings.hpp"
#include "tools/python/src/long_call.hpp"
#include "tools/python/src/policy.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"

namespace kvlab::python {
namespace {

// Policies that are Python functions over arrays of all live tokens of a cache.

/// A Python policy: its description, and the function to call.
struct OwnPolicy {
  std::string name, summary;
  std::string path, text;  ///< the file of the function, and its source
  std::string needs;       ///< nothing, mass, requests, both
  std::vector<std::string> features;
  std::string defaults;  ///< default protected tokens and modifiers, as on the command line; may be
                         ///< empty
  std::string positions;        ///< original, cache
  std::size_t state_bytes = 0;  ///< bytes of state for each token
  /// [i]: weight of the query that has i younger queries in its append. Queries for which there is
  /// no entry have weight 0. If the list is empty, all weights are 1.
  std::vector<float> weights;
  bool by_head = false;  ///< the function reads the mass of each query head
  /// Called as (state, mass, requests, last_request, queries, mass_by_head, position, features,
  /// step), and returns ranks. state: uint8 [live, state_bytes], which is changed in place. Arrays
  /// that the policy does not need are None. step: a tuple.
  nb::object function;
  /// None, or an object with two methods: rows(sequence, layer, first, q, k, v, inv_freq,
  /// rope_factor, softmax_scale), which gets copies of arrays [token, head, dim], and
  /// trace(sequence, path). They are called as PolicyEntry::see_rows and see_trace are.
  nb::object sight;
};

/// The first part of a slot. The token's features follow, then the state that the Python function
/// keeps for the token.
struct SlotHead {
  std::uint64_t rank;  // the rank that the function returned last, as a sortable key
  std::uint32_t position;
  RankType type;  // type of the rank
};

/// The object to which the argument `params` of the policy's hooks points.
struct Host {
  OwnPolicy own;
  Needs needs;

  std::size_t features_bytes() const { return own.features.size() * sizeof(float); }
  std::size_t slot_bytes() const {
    constexpr std::size_t kAlign = alignof(SlotHead);
    const std::size_t bytes = sizeof(SlotHead) + features_bytes() + own.state_bytes;
    return (bytes + kAlign - 1) / kAlign * kAlign;
  }
  ~Host() {
    const nb::gil_scoped_acquire gil;
    own.function.reset();
    own.sight.reset();
  }
};

const Host& host_of(const void* params) {
  Host* host = nullptr;
  std::memcpy(&host, params, sizeof(host));
  return *host;
}

/// The states of a cache's live tokens, oldest first.
class Slots {
 public:
  Slots(void* slots, const Host& host) : slots_(static_cast<std::byte*>(slots)), host_(host) {}

  SlotHead head(std::size_t i) const {
    SlotHead head;
    std::memcpy(&head, at(i), sizeof(head));
    return head;
  }
  void put(std::size_t i, const SlotHead& head) const { std::memcpy(at(i), &head, sizeof(head)); }
  std::byte* features(std::size_t i) const { return at(i) + sizeof(SlotHead); }
  std::byte* state(std::size_t i) const { return features(i) + host_.features_bytes(); }

 private:
  std::byte* at(std::size_t i) const { return slots_ + i * host_.slot_bytes(); }
  std::byte* slots_;
  const Host& host_;
};

/// The arguments of one call of the function. Needs the GIL.
struct Call {
  nb::object state = nb::none(), mass = nb::none(), requests = nb::none(),
             last_request = nb::none(), queries = nb::none(), by_head = nb::none(),
             positions = nb::none(), features = nb::none();

  Ranks ranks(const Host& host, std::size_t count, const Step& step) const {
    using Given = nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
    const nb::object result = host.own.function(
        state, mass, requests, last_request, queries, by_head, positions, features,
        nb::make_tuple(step.now, step.budget, step.live, step.queries, step.seed, step.sequence,
                       step.layer, step.kv_head));
    const auto given = nb::cast<Given>(result);
    if (given.shape(0) != count)
      throw std::logic_error(
          "a Python policy: the number of ranks differs from the number of tokens");
    Ranks ranks{.keys = std::vector<std::uint64_t>(count)};
    const auto take = [&](const auto* from) {
      for (std::size_t i = 0; i < count; ++i) ranks.keys[i] = rank_key(from[i]);
    };
    if (given.dtype() == nb::dtype<double>()) {
      ranks.type = RankType::real;
      take(static_cast<const double*>(given.data()));
    } else {
      take(static_cast<const std::uint64_t*>(given.data()));
    }
    return ranks;
  }
};

template <class T, class Fill>
nb::object fill_array(std::size_t count, Fill fill) {
  std::vector<T> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = fill(i);
  return nb::cast(array_of(std::move(values), {count}));
}

/// An array of `width` values of T for each token, copied from from(i).
template <class T, class From>
nb::object gather_array(std::size_t count, std::size_t width, From from) {
  if (width == 0) return nb::none();
  std::vector<T> values(count * width);
  for (std::size_t i = 0; i < count; ++i)
    std::memcpy(values.data() + i * width, from(i), width * sizeof(T));
  return nb::cast(array_of(std::move(values), {count, width}));
}

/// Fills in the observations of the tokens. `seen(i)` is an Observation.
template <class SeenAt>
void fill_seen(Call& call, const Host& host, std::size_t count, SeenAt seen) {
  if (needs_mass(host.needs))
    call.mass = fill_array<std::uint64_t>(count, [&](std::size_t i) { return seen(i).mass; });
  if (needs_requests(host.needs)) {
    call.requests =
        fill_array<std::uint32_t>(count, [&](std::size_t i) { return seen(i).requests; });
    call.last_request =
        fill_array<std::uint32_t>(count, [&](std::size_t i) { return seen(i).last_request; });
  }
  call.queries = fill_array<std::uint32_t>(count, [&](std::size_t i) { return seen(i).queries; });
}

/// Calls the Python function after an append, and stores the states and ranks that it returns. The
/// ranks are those for the next position. `heads`: empty unless the function reads the mass of each
/// head.
template <class SeenAt>
void observe_all(void* data, std::size_t count, const void* params, Step step, SeenAt seen,
                 std::span<const std::uint64_t> heads = {}) {
  const Host& host = host_of(params);
  const Slots slots(data, host);
  step.now += step.queries;
  const nb::gil_scoped_acquire gil;
  Call call;
  call.state = gather_array<std::uint8_t>(count, host.own.state_bytes,
                                          [&](std::size_t i) { return slots.state(i); });
  fill_seen(call, host, count, seen);
  if (!heads.empty())
    call.by_head = nb::cast(array_of(std::vector<std::uint64_t>(heads.begin(), heads.end()),
                                     {heads.size() / count, count}));
  call.positions =
      fill_array<std::uint32_t>(count, [&](std::size_t i) { return slots.head(i).position; });
  call.features = gather_array<float>(count, host.own.features.size(),
                                      [&](std::size_t i) { return slots.features(i); });
  const Ranks ranks = call.ranks(host, count, step);
  for (std::size_t i = 0; i < count; ++i)
    slots.put(i, {ranks.keys[i], slots.head(i).position, ranks.type});
  if (host.own.state_bytes == 0) return;
  const auto states = nb::cast<nb::ndarray<const std::uint8_t, nb::c_contig>>(call.state);
  for (std::size_t i = 0; i < count; ++i)
    std::memcpy(slots.state(i), states.data() + i * host.own.state_bytes, host.own.state_bytes);
}

void append(void* data, Tokens tokens, std::size_t count, const void* params, const Step&) {
  const Host& host = host_of(params);
  const Slots slots(data, host);
  std::memset(data, 0, count * host.slot_bytes());
  for (std::size_t i = 0; i < count; ++i) {
    slots.put(i, {0, tokens.positions[i], RankType::whole});
    if (tokens.features)
      std::memcpy(slots.features(i), tokens.features + i * host.own.features.size(),
                  host.features_bytes());
  }
}

void observe(void* data, const Seen& seen, std::size_t count, const void* params,
             const Step& step) {
  observe_all(data, count, params, step, [&](std::size_t i) {
    Observation one;
    if (seen.mass) one.mass = seen.mass[i];
    if (seen.requests) one.requests = seen.requests[i];
    if (one.requests > 0) one.last_request = seen.last_request ? seen.last_request[i] : seen.query;
    one.queries = std::min(static_cast<std::uint32_t>(count - i), seen.queries);
    return one;
  });
}

void observe_each(void* data, const Observation* seen, std::size_t count, const void* params,
                  const Step& step) {
  observe_all(data, count, params, step, [&](std::size_t i) { return seen[i]; });
}

void observe_heads(void* data, const Observation* seen, std::span<const std::uint64_t> heads,
                   std::size_t count, const void* params, const Step& step) {
  observe_all(
      data, count, params, step, [&](std::size_t i) { return seen[i]; }, heads);
}

/// The ranks of all live tokens. They are the stored ones or, if the policy observes nothing, the
/// result of a new call.
Ranks all_ranks(const void* data, const Tokens& tokens, const void* params, const Step& step) {
  const Host& host = host_of(params);
  const std::size_t count = step.live;
  if (host.needs != Needs::nothing) {
    const Slots slots(const_cast<void*>(data), host);
    Ranks ranks{.keys = std::vector<std::uint64_t>(count), .type = slots.head(0).type};
    for (std::size_t i = 0; i < count; ++i) ranks.keys[i] = slots.head(i).rank;
    return ranks;
  }
  const nb::gil_scoped_acquire gil;
  Call call;
  call.positions =
      fill_array<std::uint32_t>(count, [&](std::size_t i) { return tokens.positions[i]; });
  const std::size_t width = host.own.features.size();
  call.features =
      gather_array<float>(count, width, [&](std::size_t i) { return tokens.features + i * width; });
  return call.ranks(host, count, step);
}

RankType rank(const void* data, Tokens tokens, std::size_t count, const void* params,
              const Step& step, std::uint64_t* ranks) {
  const Ranks all = all_ranks(data, tokens, params, step);
  if (all.keys.size() != count) throw std::logic_error("a Python policy: some tokens have no rank");
  std::ranges::copy(all.keys, ranks);
  return all.type;
}

std::size_t find_min_rank(const void* data, Tokens tokens, std::size_t begin, std::size_t end,
                          const void* params, const Step& step) {
  const auto all = all_ranks(data, tokens, params, step).keys;
  const auto first = all.begin() + static_cast<std::ptrdiff_t>(begin),
             last = all.begin() + static_cast<std::ptrdiff_t>(end);
  return static_cast<std::size_t>(std::min_element(first, last) - all.begin());
}

float weight(std::uint32_t age, const void* params) {
  const std::vector<float>& weights = host_of(params).own.weights;
  return weights.empty() ? 1.0f : age < weights.size() ? weights[age] : 0.0f;
}

std::uint32_t tail(const void* params) {
  const std::size_t given = host_of(params).own.weights.size();
  return given == 0 ? kNoTail : static_cast<std::uint32_t>(given);
}

/// A copy of rows for Python.
FloatArray shown(const float* rows, const SeenRows& seen, std::uint32_t heads) {
  const std::size_t count = std::size_t{seen.tokens} * heads * seen.head_size;
  return array_of(std::vector<float>(rows, rows + count), {seen.tokens, heads, seen.head_size});
}

void show_rows(const Host& host, const SeenRows& seen) {
  const nb::gil_scoped_acquire gil;
  host.own.sight.attr("rows")(
      seen.sequence, seen.layer, seen.first, shown(seen.q, seen, seen.query_heads),
      shown(seen.k, seen, seen.kv_heads), shown(seen.v, seen, seen.kv_heads),
      array_of(std::vector<float>(seen.inv_freq.begin(), seen.inv_freq.end()),
               {seen.inv_freq.size()}),
      seen.rope_factor, seen.softmax_scale);
}

Needs needs_from(const std::string& text) {
  if (text == "nothing") return Needs::nothing;
  if (text == "mass") return Needs::mass;
  if (text == "requests") return Needs::requests;
  if (text == "both") return Needs::both;
  throw std::invalid_argument(
      fmt::format("needs: '{}' should be nothing, mass, requests or both", text));
}

PolicyInfo info_of(const Host& host) {
  const OwnPolicy& own = host.own;
  if (own.features.size() > kMaxFeatures)
    throw std::invalid_argument(fmt::format("features: {} are given; a policy has at most {}",
                                            own.features.size(), kMaxFeatures));
  PolicyInfo info{.name = own.name.c_str(),
                  .summary = own.summary.c_str(),
                  .citation = own.path.c_str(),
                  .needs = host.needs,
                  .order = Order::feedback,
                  .weighted = !own.weights.empty(),
                  .positions = parse_positions(own.positions)};
  for (std::size_t c = 0; c < own.features.size(); ++c) {
    if (!is_feature_name(own.features[c]))
      throw std::invalid_argument(fmt::format(
          "features: '{}' is not a name; use letters, digits, '_', '-' and '.'", own.features[c]));
    info.features[c] = own.features[c].c_str();
  }
  if (own.defaults.empty()) return info;
  // The defaults are parsed from the same words as on the command line.
  auto plain = std::make_shared<PolicyEntry>();
  plain->info = info;
  CompiledPolicies known;
  known.entries.push_back(std::move(plain));
  const PolicySpec spec = parse_policy(own.name + ":" + own.defaults, {}, known);
  if (spec.prompt)
    throw std::invalid_argument(
        "modifiers: prompt cannot be a default; write it after the policy's name");
  info.sinks = spec.sinks;
  info.recent = spec.recent;
  info.modifiers = spec.modifiers;
  return info;
}

/// Makes a policy. The caller has checked that the name is free. Throws std::invalid_argument for
/// features, protected tokens or modifiers that no policy may have.
Policy make_own_policy(OwnPolicy own) {
  const Needs needs = needs_from(own.needs);
  if (needs == Needs::nothing && own.state_bytes > 0)
    throw std::invalid_argument(
        "state: a policy that observes nothing has no state; give needs=\"mass\" or \"requests\"");
  if (own.by_head && !needs_mass(needs))
    throw std::invalid_argument("by_head: requires mass; give needs=\"mass\" or \"both\"");
  auto source = std::make_shared<PolicySource>(PolicySource{
      .path = own.path, .text = own.text, .xxh3 = xxh3_hex(own.text), .type = own.name});
  const auto host = std::make_shared<Host>(Host{std::move(own), needs});
  auto entry = std::make_shared<PolicyEntry>();
  static_cast<PolicyOps&>(*entry) = {
      .info = info_of(*host),
      .params = {},
      .slot_bytes = host->slot_bytes(),
      .params_bytes = sizeof(void*),
      .write_params = [](std::span<const double>, std::byte*) { return true; },
      .append = append,
      .observe = observe,
      .observe_each = observe_each,
      .rank = rank,
      .find_min_rank = find_min_rank,
      .weight = weight,
      .tail = tail,
      .clear_padding = [](void*) {},
      .observe_heads = host->own.by_head ? observe_heads : nullptr};
  entry->source = std::move(source);
  entry->host = host;
  if (!host->own.sight.is_none()) {
    entry->see_rows = [host](const SeenRows& seen) { show_rows(*host, seen); };
    entry->see_trace = [host](std::uint32_t sequence, const std::string& path) {
      const nb::gil_scoped_acquire gil;
      host->own.sight.attr("trace")(sequence, path);
    };
  }
  return {std::move(entry)};
}

std::string json_of(const PolicyEntry& entry) { return json_text(describe_policy(entry)); }

std::vector<std::string> list_registered() {
  std::vector<std::string> all;
  for (const PolicyEntry& entry : policy_catalogue()) all.push_back(json_of(entry));
  return all;
}

Policy compile(const std::string& path) {
  return result_of_long([&] { return Policy{compile_policy_source(path)}; });
}

Policy own(const std::string& name, const std::string& summary, const std::string& path,
           const std::string& text, const std::string& needs,
           const std::vector<std::string>& features, const std::string& defaults,
           const std::string& positions, std::size_t state_bytes, const std::vector<float>& weights,
           bool by_head, nb::object function, nb::object sight) {
  return make_own_policy({.name = name,
                          .summary = summary,
                          .path = path,
                          .text = text,
                          .needs = needs,
                          .features = features,
                          .defaults = defaults,
                          .positions = positions,
                          .state_bytes = state_bytes,
                          .weights = weights,
                          .by_head = by_head,
                          .function = std::move(function),
                          .sight = std::move(sight)});
}

}  // namespace

CompiledPolicies compiled_from(const std::vector<Policy>& policies) {
  CompiledPolicies compiled;
  for (const Policy& policy : policies) compiled.entries.push_back(policy.entry);
  return compiled;
}

void bind_policies(nb::module_& module) {
  nb::class_<Policy>(module, "Policy", "A policy that is not in the registry.")
      .def_static("compile", compile, nb::arg("path"),
                  "Compiles a policy's header with the C++ compiler of this machine.")
      .def_static("own", own, nb::arg("name"), nb::arg("summary"), nb::arg("path"), nb::arg("text"),
                  nb::arg("needs"), nb::arg("features"), nb::arg("defaults"), nb::arg("positions"),
                  nb::arg("state_bytes"), nb::arg("weights"), nb::arg("by_head"),
                  nb::arg("function"), nb::arg("sight").none(),
                  "A policy whose ranks a Python function computes.")
      .def_prop_ro("name", [](const Policy& p) { return std::string(p.entry->info.name); })
      .def_prop_ro(
          "json", [](const Policy& p) { return json_of(*p.entry); },
          "The policy's entry in `kvlab policies --json`.");
  module.def("registered_policies", list_registered,
             "The entry of each registered policy in `kvlab policies --json`.");
  module.def("is_taken", is_taken, nb::arg("name"), "Whether a policy or an oracle has the name.");
}

}  // namespace kvlab::python
