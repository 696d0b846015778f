#include "kernels/why_not.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <initializer_list>
#include <string_view>
#include <utility>

#include "kernels/decode/pair_attention.hpp"
#include "kernels/evict/eviction.hpp"
#include "kernels/types.hpp"

namespace kvlab::kernels {
namespace {

/// Collects requirements, and keeps the message of the first requirement that is not met.
class Wants {
 public:
  explicit Wants(std::string prefix = "") : prefix_(std::move(prefix)) {}

  /// `said` follows the struct's name in the message: what the value is, and what is expected.
  template <class... Parts>
  Wants& that(bool holds, fmt::format_string<const Parts&...> said, const Parts&... parts) {
    if (!holds && missing_.empty()) missing_ = prefix_ + fmt::format(said, parts...);
    return *this;
  }
  Wants& pointers(std::initializer_list<std::pair<const void*, const char*>> all) {
    for (const auto& [pointer, name] : all) that(pointer != nullptr, "{} is NULL", name);
    return *this;
  }
  /// Requires arrays of keys, values, queries and outputs.
  Wants& rows(std::initializer_list<std::pair<const void*, const char*>> all) {
    pointers(all);
    for (const auto& [pointer, name] : all)
      that(aligned16(pointer), "{} does not begin at a multiple of 16 bytes", name);
    return *this;
  }
  Wants& also(const std::string& missing) {
    if (missing_.empty()) missing_ = missing;
    return *this;
  }
  std::string missing() const { return missing_; }

 private:
  std::string prefix_, missing_;
};

void want_type(Wants& wants, kvlab_type type) {
  wants.that(is_type(type), "type is {}; it should be KVLAB_BF16, KVLAB_F16 or KVLAB_F32",
             static_cast<int>(type));
}

void want_page(Wants& wants, int page) {
  wants.that(page >= kMinSlotsOfBlock && page <= 1 << 20 &&
                 std::has_single_bit(static_cast<unsigned>(page)),
             "page is {}; it should be a power of two from {} to 2^20", page, kMinSlotsOfBlock);
}

/// Kernels count rows and thread blocks in signed 32-bit integers, and round slots up.
constexpr std::int64_t kMaxRows = std::int64_t{1} << 31;

std::string why_not(const kvlab_pages& pages, int head_size, kvlab_type type, std::int64_t slots,
                    const std::string& prefix) {
  Wants wants(prefix + "pages.");
  if (pages.blocks == nullptr)
    return wants
        .that(pages.page == 0, "blocks is NULL, but page is {}; give both or neither", pages.page)
        .missing();
  const std::int64_t in_16_bytes = 16 / static_cast<std::int64_t>(bytes_of(type));
  want_page(wants, pages.page);
  wants.that(std::int64_t{pages.page} * pages.max_blocks >= slots,
             "max_blocks is {}, of {} slots each; {} slots are needed", pages.max_blocks,
             pages.page, slots);
  for (const auto& [stride, name] : {std::pair{pages.block_stride, "block_stride"},
                                     {pages.slot_stride, "slot_stride"},
                                     {pages.head_stride, "head_stride"}})
    wants.that(stride >= 0 && stride % in_16_bytes == 0,
               "{} is {}; it should be a multiple of {} elements (16 bytes)", name, stride,
               in_16_bytes);
  wants.that(pages.slot_stride >= head_size && pages.slot_stride <= 1 << 24,
             "slot_stride is {}; it should be at least head_size, {}, and at most 2^24",
             pages.slot_stride, head_size);
  wants.that(pages.by_pair != 0 || pages.head_stride >= head_size,
             "head_stride is {}; it should be at least head_size, {}", pages.head_stride,
             head_size);
  return wants.missing();
}

/// The requirements of every attention on a shape.
void want_shape(Wants& wants, kvlab_type type, int query_heads, int kv_heads, int head_size,
                int max_group = kMaxPagedGroup) {
  want_type(wants, type);
  wants
      .that(kv_heads > 0 && query_heads > 0 && query_heads % kv_heads == 0,
            "query_heads is {}, kv_heads {}; query_heads should be a multiple of kv_heads",
            query_heads, kv_heads)
      .that(kv_heads < 1 || query_heads / kv_heads <= max_group,
            "query_heads is {}, kv_heads {}; at most {} query heads for each KV head are supported",
            query_heads, kv_heads, max_group)
      .that(is_head_size(head_size), "head_size is {}; it should be 64, 96, 128 or 256", head_size);
}

std::string why_not(const DevicePolicy& policy, const kvlab_policy_state& state) {
  Wants wants("policy.");
  wants.pointers(
      {{state.rules, "rules"}, {state.seeds, "seeds"}, {state.sequence_ids, "sequence_ids"}});
  const std::string_view name = policy.name;
  return wants
      .that(policy.slot_bytes == 0 || state.states,
            "states is NULL, but policy {} needs {} bytes per slot", name, policy.slot_bytes)
      .that(policy.params_bytes == 0 || state.params,
            "params is NULL, but policy {} reads {} bytes per sequence", name, policy.params_bytes)
      .that(policy.features.empty() || state.features,
            "features is NULL, but policy {} reads features ({} per slot)", name,
            policy.features.size())
      .missing();
}

std::string why_not(const kvlab_cache_view& cache, const char* name) {
  return Wants(std::string(name) + ".")
      .rows({{cache.keys, "keys"}, {cache.values, "values"}})
      .pointers({{cache.first_slot, "first_slot"},
                 {cache.positions, "positions"},
                 {cache.lengths, "lengths"},
                 {cache.next_slots, "next_slots"}})
      .also(why_not_shape(cache, name))
      .missing();
}

}  // namespace

std::string why_not_size(std::size_t given, std::size_t wanted) {
  return Wants()
      .that(given == wanted,
            "struct_size is {}; it should be the sizeof of the struct, {} in kvlab.h {}.{}", given,
            wanted, KVLAB_VERSION_MAJOR, KVLAB_VERSION_MINOR)
      .missing();
}

bool is_type(kvlab_type type) { return type >= KVLAB_BF16 && type <= KVLAB_F32; }

std::string why_not_shape(const kvlab_cache_view& cache, const char* name) {
  const std::string prefix = std::string(name) + ".";
  Wants wants(prefix);
  want_type(wants, cache.type);
  return wants
      .that(cache.sequences > 0 && cache.kv_heads > 0 && cache.max_slots > 0,
            "sequences is {}, kv_heads {}, max_slots {}; each should be at least 1",
            cache.sequences, cache.kv_heads, cache.max_slots)
      .that(cache.max_slots <= kMaxSlots, "max_slots is {}; it should be at most 2^30",
            cache.max_slots)
      .that(std::int64_t{cache.sequences} * cache.kv_heads <= 65535,
            "sequences times kv_heads is {}; it should be at most 65535",
            std::int64_t{cache.sequences} * cache.kv_heads)
      .also(is_type(cache.type)
                ? why_not(cache.pages, cache.head_size, cache.type, cache.max_slots, prefix)
                : "")
      .missing();
}

std::string why_not_shape(const kvlab_cache_view& cache, const char* name, int max_group) {
  Wants wants(std::string(name) + ".");
  want_shape(wants, cache.type, cache.query_heads, cache.kv_heads, cache.head_size, max_group);
  return wants.also(why_not_shape(cache, name)).missing();
}

std::string why_not_shape(const kvlab_cache_view& cache, std::int64_t slots) {
  kvlab_cache_view plain = cache;
  plain.pages = {};
  const std::int64_t max_slots = std::int64_t{cache.sequences} * cache.kv_heads * cache.max_slots;
  Wants wants, page("cache.pages.");
  if (cache.pages.page != 0) want_page(page, cache.pages.page);
  return wants.also(why_not_shape(plain, "cache", kMaxPagedGroup))
      .also(page.missing())
      .that(slots >= 1 && slots <= max_slots,
            "slots is {}; it should be 1 to {}, which is sequences times kv_heads times max_slots",
            slots, max_slots)
      .missing();
}

std::string why_not(const kvlab_write_args& args) {
  const kvlab_cache_view& cache = args.cache;
  Wants wants;
  want_type(wants, cache.type);
  return wants.that(args.tokens > 0, "tokens is {}; it should be at least 1", args.tokens)
      .that(cache.query_heads > 0 && cache.kv_heads > 0 && cache.head_size > 0 &&
                cache.head_size <= 1024,
            "cache.query_heads is {}, kv_heads {}, head_size {}; each should be at least 1, and "
            "head_size at most 1,024",
            cache.query_heads, cache.kv_heads, cache.head_size)
      .that(args.rotated >= 0 && args.rotated % 2 == 0 && args.rotated <= cache.head_size,
            "rotated is {}; it should be even and at most head_size, {}", args.rotated,
            cache.head_size)
      .pointers({{args.qkv, "qkv"}, {args.sequences, "sequences"}, {args.q, "q"}})
      .pointers({{cache.keys, "cache.keys"},
                 {cache.values, "cache.values"},
                 {cache.first_slot, "cache.first_slot"},
                 {cache.next_slots, "cache.next_slots"}})
      .that(args.rotated == 0 || (args.rope && args.rope_rows),
            "rope or rope_rows is NULL, but rotated is {}", args.rotated)
      .also(why_not(cache.pages, cache.head_size, cache.type, 1, "cache."))
      .missing();
}

std::string why_not(const kvlab_feature_args& args) {
  const kvlab_cache_view& cache = args.cache;
  Wants wants;
  want_type(wants, cache.type);
  wants
      .that(cache.sequences > 0 && cache.kv_heads > 0 && cache.head_size > 0 &&
                cache.head_size <= 1024,
            "cache.sequences is {}, kv_heads {}, head_size {}; each should be at least 1, and "
            "head_size at most 1,024",
            cache.sequences, cache.kv_heads, cache.head_size)
      .that(args.count >= 1 && args.count <= static_cast<int>(kMaxFeatures),
            "count is {}; it should be 1 to {}", args.count, kMaxFeatures);
  for (int at = 0; wants.missing().empty() && at < args.count; ++at) {
    const kvlab_feature feature = args.features[at];
    wants
        .that(feature >= KVLAB_KEY_NORM && feature <= KVLAB_VALUE_OUT_NORM1,
              "features[{}] is {}, which is not a kvlab_feature", at, static_cast<int>(feature))
        .that(feature != KVLAB_KEY_COSINE || args.unit_keys,
              "unit_keys is NULL, but KVLAB_KEY_COSINE needs it for the mean key")
        .that(feature != KVLAB_VALUE_OUT_NORM1 || (args.output && args.hidden > 0),
              "output is NULL or hidden is {}, but KVLAB_VALUE_OUT_NORM1 reads W_o", args.hidden)
        .that(feature != KVLAB_VALUE_OUT_NORM1 ||
                  (cache.query_heads > 0 && cache.query_heads % cache.kv_heads == 0 &&
                   cache.query_heads <= kMaxGroup * cache.kv_heads),
              "cache.query_heads is {}, kv_heads {}; query_heads should be a multiple of kv_heads, "
              "and KVLAB_VALUE_OUT_NORM1 supports at most {} query heads for each KV head",
              cache.query_heads, cache.kv_heads, kMaxGroup);
  }
  return wants.that(args.tokens > 0, "tokens is {}; it should be at least 1", args.tokens)
      .pointers({{args.slots, "slots"}, {args.keys, "keys"}, {args.to, "to"}})
      .pointers({{cache.first_slot, "cache.first_slot"}, {cache.values, "cache.values"}})
      .also(why_not(cache.pages, cache.head_size, cache.type, args.tokens, "cache."))
      .missing();
}

std::string why_not(const DevicePolicy& policy, const kvlab_evicting_attention_args& args) {
  Wants wants("cache.");
  want_shape(wants, args.cache.type, args.cache.query_heads, args.cache.kv_heads,
             args.cache.head_size);
  wants.also(why_not(args.cache, "cache")).also(why_not(policy, args.policy));
  Wants rest;
  rest.that(!needs_requests(policy.needs) || args.policy.threshold16,
            "policy.threshold16 is NULL, but {} counts requests, which needs it",
            std::string_view(policy.name))
      .that(args.numbering >= KVLAB_ORIGINAL_POSITIONS &&
                args.numbering <= KVLAB_CACHE_POSITIONS_ROTATED,
            "numbering is {}, which is not a kvlab_numbering", static_cast<int>(args.numbering))
      .pointers({{args.now, "now"}})
      .rows({{args.q, "q"}, {args.out, "out"}, {args.workspace, "workspace"}});
  if (args.numbering != KVLAB_ORIGINAL_POSITIONS) {
    rest.pointers({{args.inv_freq, "inv_freq, of cache positions,"}})
        .that(args.rotated == args.cache.head_size,
              "rotated is {}; at cache positions it should be head_size, {}", args.rotated,
              args.cache.head_size)
        .that(args.numbering != KVLAB_CACHE_POSITIONS || args.cache.ages,
              "cache.ages is NULL; numbering KVLAB_CACHE_POSITIONS needs it")
        .that(args.numbering != KVLAB_CACHE_POSITIONS_ROTATED || policy.oldest_first,
              "numbering is KVLAB_CACHE_POSITIONS_ROTATED, which only window and sink support, not "
              "{}",
              std::string_view(policy.name));
  }
  return wants.also(rest.missing()).missing();
}

std::string why_not(const DevicePolicy& policy, const kvlab_evicting_attention_args* layers,
                    int count) {
  Wants wants;
  wants.that(count >= 1 && count <= kMaxObservedLayers, "count is {}; it should be 1 to {}", count,
             kMaxObservedLayers);
  for (int i = 0; wants.missing().empty() && i < count; ++i) {
    const std::string missing = why_not(policy, layers[i]);
    wants.also(missing.empty() ? "" : fmt::format("layers[{}]: {}", i, missing));
  }
  return wants.missing();
}

std::string why_not(const kvlab_prefill_args& args) {
  Wants wants;
  want_shape(wants, args.type, args.query_heads, args.kv_heads, args.head_size);
  constexpr int kMax = 1 << 26;
  return wants
      .that(args.first >= 0 && args.first < kMax && args.queries >= 1 && args.queries < kMax,
            "first is {}, queries {}; first should be at least 0, queries at least 1, and both "
            "below 2^26",
            args.first, args.queries)
      .that(std::int64_t{args.queries} * args.query_heads < kMaxRows,
            "queries is {}, query_heads {}; their product should be below 2^31, so give fewer "
            "queries at once",
            args.queries, args.query_heads)
      .that((args.sequences == 0) == (args.first_query == nullptr),
            "sequences is {}, and first_query is {}; give both, for a batch, or neither",
            args.sequences, args.first_query == nullptr ? "NULL" : "given")
      .that(args.sequences >= 0 && args.sequences <= 65535,
            "sequences is {}; it should be 0 to 65535", args.sequences)
      .that(args.sequences == 0 ? args.all_queries == 0
                                : args.all_queries >= args.queries && args.all_queries < kMax,
            "all_queries is {} and sequences is {}; all_queries should be at least queries, {}, "
            "for a batch, and 0 if sequences is 0",
            args.all_queries, args.sequences, args.queries)
      .that(args.workspace == nullptr || args.keys_end >= 1,
            "keys_end is {}, but workspace is given; keys_end should be at least 1", args.keys_end)
      .pointers({{args.first_slot, "first_slot"}})
      .rows({{args.q, "q"}, {args.keys, "keys"}})
      .also(is_type(args.type) ? why_not(args.pages, args.head_size, args.type,
                                         std::int64_t{args.first} + args.queries, "")
                               : "")
      .missing();
}

std::string why_not_attended(const kvlab_prefill_args& args) {
  return Wants()
      .rows({{args.values, "values"}, {args.out, "out"}})
      .that(aligned16(args.workspace), "workspace does not begin at a multiple of 16 bytes")
      .missing();
}

std::string why_not_params(const DevicePolicy& policy, int count, bool counts) {
  return Wants()
      .that(counts, "count is {}; {} has {} parameters", count, std::string_view(policy.name),
            policy.params_bytes / sizeof(double))
      .missing();
}

std::string why_not_values(const DevicePolicy& policy) {
  return fmt::format(
      "a value is outside its range; docs/reference/policies.md has the ranges of {}'s parameters",
      std::string_view(policy.name));
}

namespace {

/// Maximum number of thread blocks that observe a prompt, given its number of keys, queries and KV
/// heads.
std::int64_t observing_blocks(const kvlab_observe_args& args) {
  constexpr std::int64_t kMinKeys = 32, kQueries = 1024;  // per thread block
  return (args.keys_end + kMinKeys - 1) / kMinKeys *
         ((args.prefill.queries + kQueries - 1) / kQueries) * args.prefill.kv_heads;
}

}  // namespace

std::string why_not(const kvlab_observe_args& args) {
  Wants wants;
  const std::string prefill = why_not(args.prefill);
  return wants.also(prefill.empty() ? "" : "prefill." + prefill)
      .that(args.needs >= KVLAB_MASS && args.needs <= KVLAB_BOTH,
            "needs is {}; it should be KVLAB_MASS, KVLAB_REQUESTS or KVLAB_BOTH",
            static_cast<int>(args.needs))
      .that(args.younger >= 0 && args.keys_end >= 1,
            "younger is {}, keys_end {}; younger should be at least 0, and keys_end at least 1",
            args.younger, args.keys_end)
      .that(!prefill.empty() || observing_blocks(args) < kMaxRows,
            "keys_end is {}, prefill.queries {}: too many for one launch, so give fewer queries at "
            "once",
            args.keys_end, args.prefill.queries)
      .pointers({{args.prefill.rows, "prefill.rows"}, {args.seen, "seen"}})
      .rows({{args.workspace, "workspace"}})
      .that(
          args.needs == KVLAB_MASS || args.threshold16,
          "threshold16 is NULL, but needs is {}, which counts requests; give threshold16, or needs "
          "KVLAB_MASS",
          static_cast<int>(args.needs))
      .missing();
}

std::string why_not_shared(const DevicePolicy& policy) {
  const bool unit = std::ranges::any_of(policy.features, [](std::string_view feature) {
    return feature.substr(feature.find('=') + 1) == "key_cosine";
  });
  constexpr auto kDepends =
      "policy {} {}, so the result for the prefix depends on the tokens that follow it";
  return Wants()
      .that(!policy.weighted, kDepends, std::string_view(policy.name),
            "weighs queries by the number of later queries")
      .that(!unit, kDepends, std::string_view(policy.name),
            "reads key_cosine, which depends on all keys")
      .missing();
}

std::string why_not(const DevicePolicy& policy, const kvlab_prefix_args& args) {
  const bool seen = policy.needs != Needs::nothing, features = !policy.features.empty();
  return Wants()
      .that(
          args.sequences > 0 && args.kv_heads > 0 && args.tokens > 0 &&
              std::int64_t{args.sequences} * args.kv_heads <= 65535,
          "sequences is {}, kv_heads {}, tokens {}; each should be at least 1, and sequences times "
          "kv_heads at most 65535",
          args.sequences, args.kv_heads, args.tokens)
      .pointers({{args.first_slot, "first_slot"}, {args.to_first_slot, "to_first_slot"}})
      .that(!seen || (args.seen && args.to_seen),
            "seen or to_seen is NULL, but {} needs the numbers of queries that saw each token",
            std::string_view(policy.name))
      .that(!features || (args.features && args.to_features),
            "features or to_features is NULL, but policy {} reads features ({} per slot)",
            std::string_view(policy.name), policy.features.size())
      .missing();
}

std::string why_not(const DevicePolicy& policy, const kvlab_compact_args& args) {
  Wants wants;
  const kvlab_cache_view &from = args.from, &to = args.to;
  return wants.also(why_not(from, "from"))
      .also(why_not(to, "to"))
      .that(from.type == to.type && from.sequences == to.sequences &&
                from.kv_heads == to.kv_heads && from.head_size == to.head_size,
            "to and from differ in their type or shape; these should be equal")
      .that(from.head_size >= 1 && from.head_size * bytes_of(from.type) % 16 == 0,
            "from.head_size is {}; a row should have a multiple of 16 bytes", from.head_size)
      .also(why_not(policy, args.policy))
      .that(policy.slot_bytes == 0 || args.to_states, "to_states is NULL, but policy.states is not")
      .that(policy.features.empty() || args.to_features,
            "to_features is NULL, but policy.features is not")
      .pointers({{args.workspace, "workspace"}, {args.now, "now"}, {args.appended, "appended"}})
      .missing();
}

std::string why_not_ranks(const kvlab_compact_args& args, const std::uint64_t* ranks, int devices) {
  return Wants()
      .that(args.by_layer != 0,
            "by_layer is 0, so ranks of other devices are not used; call kvlab_compact, or set "
            "by_layer")
      .pointers({{ranks, "ranks"}})
      .that(devices >= 1 && std::int64_t{devices} * args.from.kv_heads <= 65535,
            "devices is {}, with {} KV heads each; give 1 or more devices, and at most 65535 heads",
            devices, args.from.kv_heads)
      .missing();
}

}  // namespace kvlab::kernels
