// kvlab_kv_cache, the C interface of KvCache. It also counts the tokens that each layer was fed,
// and refuses calls in a wrong order.
#include <algorithm>
#include <exception>
#include <limits>
#include <new>

#include "kernels/cache/kv_cache.hpp"
#include "kernels/cache/library_config.hpp"
#include "kernels/host/transfer.hpp"
#include "kernels/why_not.hpp"

using namespace kvlab;
using namespace kvlab::kernels;

namespace {

/// Runs a call. If it throws, returns an error that kvlab_last_error() explains.
template <class Call>
cudaError_t record_call(const char* name, Call call) try {
  call();
  return record_error(name, cudaSuccess);
} catch (const std::invalid_argument& error) {
  return record_error(name, cudaErrorInvalidValue, error.what());
} catch (const cuda::Error& error) {
  return record_error(name, error.code, error.what());
} catch (const std::bad_alloc&) {
  return record_error(name, cudaErrorMemoryAllocation, "the host has too little memory");
} catch (const std::exception& error) {
  return record_error(name, cudaErrorUnknown, error.what());
}

template <class Args>
void want_args(const Args* args) {
  want(args != nullptr, "an argument is NULL");
  if (const std::string why = why_not_size(*args); !why.empty()) throw std::invalid_argument(why);
}

void want_rows(const kvlab_kv_cache* cache, const void* qkv, const void* out) {
  want(cache && aligned16(qkv) && aligned16(out) && qkv && out,
       "cache, qkv or out is NULL, or qkv or out does not begin at a multiple of 16 bytes");
}

/// Refuses a call if its stream is being captured. Such calls count tokens on the host, and
/// replaying the graph would not repeat the count.
void want_no_capture(cudaStream_t stream) {
  cudaStreamCaptureStatus status{};
  cuda::check(cudaStreamIsCapturing(stream, &status), "the state of the stream");
  want(status == cudaStreamCaptureStatusNone,
       "the stream is being captured, but only kvlab_kv_cache_step can be captured, because the "
       "other calls update counts on the host");
}

}  // namespace

struct kvlab_kv_cache {
  kvlab_kv_cache(KvCacheConfig config, cudaStream_t stream)
      : cache(std::move(config), stream),
        sequences(cache.config().sequences.size()),
        layers(cache.config().layers.size()),
        now("positions", sequences),
        fed(layers * sequences),
        fed_before(sequences),
        appended(sequences),
        chunk_tokens(layers) {
    set_idle(0, sequences);
  }

  struct Now {
    Now(cuda::Arena& arena, std::size_t sequences)
        : positions(arena.take<std::uint32_t>(sequences)) {}
    Now() = default;
    std::uint32_t* positions = nullptr;  // [sequence]
  };
  /// The append that KvCache::begin() was called for.
  struct CurrentAppend {
    int sequence = -1;
    std::uint32_t fed = 0, tokens = 0;
    bool ends_prompt = false;
    bool operator==(const CurrentAppend&) const = default;
  };

  /// Marks sequences as idle, so that a step without begin_step() does nothing. Enqueued on the
  /// stream.
  void set_idle(std::size_t sequence, std::size_t count) const {
    static_assert(kIdle == ~std::uint32_t{0});
    cuda::check(cudaMemsetAsync(now->positions + sequence, 0xff, count * sizeof *now->positions,
                                cache.stream()),
                "positions");
  }
  std::uint32_t& fed_of(std::size_t layer, std::size_t sequence) {
    return fed[layer * sequences + sequence];
  }
  void want_sequence(int sequence, const char* name = "sequence") const {
    want(sequence >= 0 && static_cast<std::size_t>(sequence) < sequences,
         "{} is {}; it should be at least 0 and below {}", name, sequence, sequences);
  }
  void want_layer(int layer) const {
    want(layer >= 0 && static_cast<std::size_t>(layer) < layers,
         "layer is {}; it should be at least 0 and below {}", layer, layers);
  }
  /// Whether some layer has received some chunks of the append, but not all.
  bool is_chunked() const {
    return std::ranges::any_of(chunk_tokens, [](std::uint32_t tokens) { return tokens > 0; });
  }
  /// Whether the append is complete in some layers and not in others.
  bool between_layers() {
    if (current.sequence < 0) return false;
    const auto sequence = static_cast<std::size_t>(current.sequence);
    for (std::size_t layer = 1; layer < layers; ++layer)
      if (fed_of(layer, sequence) != fed_of(0, sequence)) return true;
    return false;
  }
  /// Throws unless all layers were fed the same number of the sequence's tokens. Returns that
  /// number.
  std::uint32_t want_whole(std::size_t sequence) {
    const std::uint32_t first = fed_of(0, sequence);
    for (std::size_t layer = 0; layer < layers; ++layer)
      want(fed_of(layer, sequence) == first,
           "sequence {} is in the middle of an append: layer {} has had {} tokens, and layer 0 "
           "{}; complete the append, or drop the sequence by kvlab_kv_cache_start",
           sequence, layer, fed_of(layer, sequence), first);
    return first;
  }
  void check_capacity(std::size_t sequence, std::uint64_t tokens) const {
    const std::uint32_t max_tokens = std::min(cache.slots().max_tokens(sequence), kMaxTokens);
    want(tokens <= max_tokens,
         "the sequence would have {} tokens, but the cache has slots for at most {}", tokens,
         max_tokens);
  }
  /// Throws if drafts are being verified.
  void want_no_drafts() const {
    want(drafted.empty(),
         "drafts are being verified; call kvlab_kv_cache_verify_drafts for all layers and then "
         "kvlab_kv_cache_accept_drafts, or kvlab_kv_cache_clear");
  }
  void forget_append() {
    current = {};
    std::ranges::fill(chunk_tokens, 0u);
  }
  void want_order(const kvlab_append_chunk& chunk, const CurrentAppend& requested);

  void clear();
  void start(int sequence, const SequenceSettings& settings);
  void copy_sequence(int from, int to);
  void append(const kvlab_append_chunk& chunk);
  void append_one_token(const kvlab_append_chunk& chunk);
  void begin_step(const unsigned char* decodes);
  void step(int layer, const void* qkv, void* out, float* lse);
  void begin_drafts(const std::uint32_t* tokens);
  void verify_drafts(int layer, const void* qkv, void* out, float* lse);
  void accept_drafts(const std::uint32_t* accepted);
  void attend(std::uint32_t layer, const StepRows& rows, const void* qkv, void* out,
              float* lse) const;
  void fill_ropes(std::uint32_t first, int rows);
  void write(RopeWriteArgs args, const void* qkv, int rows) const;
  AttendedRows attended_rows(const void* qkv, void* out, float* lse) const;

  KvCache cache;
  std::size_t sequences, layers;
  cuda::Placed<Now> now;
  std::vector<std::uint32_t> fed;         // [layer, sequence]
  std::vector<std::uint32_t> fed_before;  // [sequence]: before the last append or step
  std::vector<bool> appended;  // [sequence]: whether the last append or step was an append
  CurrentAppend current;
  std::vector<std::uint32_t>
      chunk_tokens;  // [layer]: number of the append's tokens that the layer has had so far
  int next_step_layer = 0;
  // [sequence]: number of tokens that are being verified; empty if there is no verification
  std::vector<std::uint32_t> drafted;
  int next_draft_layer = 0;
  std::uint32_t rope_first = 0;  ///< position of the first of the `rope_rows` filled rows
  int rope_rows = 0;
};

/// Completes a write's arguments with the projection's output, and launches the write.
void kvlab_kv_cache::write(RopeWriteArgs args, const void* qkv, int rows) const {
  args.tokens = rows;
  args.qkv = qkv;
  cuda::check(rope_write(args, cache.stream()), "writing keys and values");
}

AttendedRows kvlab_kv_cache::attended_rows(const void* qkv, void* out, float* lse) const {
  const KvCacheConfig& config = cache.config();
  const auto queries = static_cast<std::size_t>(config.query_heads);
  const auto all = static_cast<std::size_t>(config.query_heads + 2 * config.kv_heads);
  return {out, lse, static_cast<const std::byte*>(qkv) + queries * config.key_bytes(),
          all * static_cast<std::size_t>(config.head_size)};
}

void kvlab_kv_cache::fill_ropes(std::uint32_t first, int rows) {
  if (first == rope_first && rows <= rope_rows) return;
  cache.fill_ropes(RopeRows::append, nullptr, first, rows);
  rope_first = first, rope_rows = rows;
}

// --- Sequences -----------------------------------------------------------------------------------

void kvlab_kv_cache::clear() {
  cache.clear();
  set_idle(0, sequences);
  std::ranges::fill(fed, 0u);
  std::ranges::fill(fed_before, 0u);
  forget_append();
  next_step_layer = 0;
  drafted.clear();
}

void kvlab_kv_cache::start(int sequence, const SequenceSettings& settings) {
  const auto at = static_cast<std::size_t>(sequence);
  cache.start(sequence, settings);
  set_idle(at, 1);
  for (std::size_t layer = 0; layer < layers; ++layer) fed_of(layer, at) = 0;
  fed_before[at] = 0;
  if (current.sequence == sequence) forget_append();
  if (!drafted.empty()) drafted[at] = 0;
}

void kvlab_kv_cache::copy_sequence(int from, int to) {
  const auto source = static_cast<std::size_t>(from), target = static_cast<std::size_t>(to);
  want_no_drafts();
  want_whole(source);
  want(!is_chunked() || current.sequence != from,
       "sequence {} is in the middle of an append; complete the append first", from);
  cache.copy_sequence(from, to);
  if (from == to) return;
  set_idle(target, 1);
  for (std::size_t layer = 0; layer < layers; ++layer)
    fed_of(layer, target) = fed_of(layer, source);
  fed_before[target] = fed_before[source];
  appended[target] = appended[source];
  if (current.sequence == to) forget_append();
}

// --- Appends -------------------------------------------------------------------------------------

void kvlab_kv_cache::append(const kvlab_append_chunk& chunk) {
  want_no_drafts();
  want_sequence(chunk.sequence);
  want_layer(chunk.layer);
  want(chunk.qkv && chunk.out && aligned16(chunk.qkv) && aligned16(chunk.out),
       "qkv or out is NULL, or does not begin at a multiple of 16 bytes");
  const auto sequence = static_cast<std::size_t>(chunk.sequence),
             layer = static_cast<std::size_t>(chunk.layer);
  want(chunk.fed == fed_of(layer, sequence),
       "fed is {}; layer {} has had {} tokens of sequence {}, and fed should be that number",
       chunk.fed, layer, fed_of(layer, sequence), sequence);
  want(chunk.count > 0 && chunk.count <= chunk.tokens && chunk.first <= chunk.tokens - chunk.count,
       "first is {}, count {}; count should be above 0, and first + count at most tokens, {}",
       chunk.first, chunk.count, chunk.tokens);
  check_capacity(sequence, std::uint64_t{chunk.fed} + chunk.tokens);
  if (chunk.tokens == 1 && cache.is_quantized()) return append_one_token(chunk);

  const CurrentAppend requested{chunk.sequence, chunk.fed, chunk.tokens, chunk.ends_prompt != 0};
  want_order(chunk, requested);
  if (requested != current) {
    forget_append();  // if begin() throws for lack of memory, no append is active
    cache.begin(chunk.sequence, chunk.fed, chunk.tokens, requested.ends_prompt);
    current = requested;
  }

  const KvCacheConfig& config = cache.config();
  const std::size_t row =
      static_cast<std::size_t>(config.query_heads + 2 * config.kv_heads) * config.key_bytes();
  const auto queries = static_cast<std::size_t>(config.query_heads);
  for (std::uint32_t at = 0; at < chunk.count; at += config.part) {
    const AppendChunk some{chunk.first + at,
                           static_cast<int>(std::min(config.part, chunk.count - at))};
    const std::byte* const qkv = static_cast<const std::byte*>(chunk.qkv) + at * row;
    fill_ropes(chunk.fed + some.first, some.rows);
    write(cache.write(static_cast<std::uint32_t>(layer), some), qkv, some.rows);
    cache.attend(
        static_cast<std::uint32_t>(layer), some,
        attended_rows(qkv, static_cast<std::byte*>(chunk.out) + at * queries * config.key_bytes(),
                      chunk.lse ? chunk.lse + at * queries : nullptr));
  }
  chunk_tokens[layer] = chunk.first + chunk.count;
  if (chunk_tokens[layer] < chunk.tokens) return;
  chunk_tokens[layer] = 0;
  fed_of(layer, sequence) += chunk.tokens;
  fed_before[sequence] = chunk.fed;
  appended[sequence] = true;
}

/// Throws unless this chunk is the next one.
void kvlab_kv_cache::want_order(const kvlab_append_chunk& chunk, const CurrentAppend& requested) {
  const auto layer = static_cast<std::size_t>(chunk.layer);
  const bool interleaves = cache.config().interleaves_appends;
  for (std::size_t other = 0; other < layers; ++other)
    want(chunk_tokens[other] == 0 || (requested == current && (interleaves || other == layer)),
         "layer {} of sequence {} has had {} of the {} tokens of an append; give this layer the "
         "rest of them first. All chunks of an append go through a layer before the next layer "
         "begins, unless the cache was created with interleaves_appends. To drop the append "
         "instead, call kvlab_kv_cache_start",
         other, current.sequence, chunk_tokens[other], current.tokens);
  // With interleaves_appends, an append must be complete in all layers before another one begins.
  // Without interleaves_appends, another append may run after an append is complete in one layer
  // and before it begins in the next, because each layer fills the append memory anew.
  want(!interleaves || requested == current || !between_layers(),
       "sequence {} is in the middle of an append; complete it in all layers, or drop it by "
       "kvlab_kv_cache_start",
       current.sequence);
  want(chunk.first == chunk_tokens[layer],
       "first is {}; layer {} has had {} tokens of this append, and first should be that number",
       chunk.first, layer, chunk_tokens[layer]);
}

/// Appends a single token as a decode step does, so the token is quantized before its query
/// attends.
void kvlab_kv_cache::append_one_token(const kvlab_append_chunk& chunk) {
  const bool interleaves = cache.config().interleaves_appends;
  want(!is_chunked() || (interleaves && current.sequence != chunk.sequence),
       "sequence {} is in the middle of an append; complete it, or drop it by "
       "kvlab_kv_cache_start",
       current.sequence);
  const auto layer = static_cast<std::uint32_t>(chunk.layer);
  const LayerRange own{layer, layer + 1};
  if (!interleaves) forget_append();
  cache.reserve();  // because appends of several tokens do so too
  cache.before_token(chunk.sequence, chunk.fed, own);
  cuda::check(cudaMemcpyAsync(now->positions + chunk.sequence, &chunk.fed, sizeof chunk.fed,
                              cudaMemcpyHostToDevice, cache.stream()),
              "positions");
  fill_ropes(chunk.fed, 1);
  attend(layer, {1, now->positions + chunk.sequence, chunk.sequence, RopeRows::append}, chunk.qkv,
         chunk.out, chunk.lse);
  set_idle(static_cast<std::size_t>(chunk.sequence), 1);
  if (chunk.ends_prompt) cache.end_prompt(chunk.sequence, chunk.fed + 1, own);
  fed_of(layer, static_cast<std::size_t>(chunk.sequence)) += 1;
  fed_before[static_cast<std::size_t>(chunk.sequence)] = chunk.fed;
}

// --- Steps ---------------------------------------------------------------------------------------

void kvlab_kv_cache::begin_step(const unsigned char* decodes) {
  want_no_drafts();
  const bool interleaves = cache.config().interleaves_appends;
  want(interleaves || !is_chunked(),
       "sequence {} is in the middle of an append, and the step needs its memory; complete the "
       "layer, drop the sequence by kvlab_kv_cache_start, or create the cache with "
       "interleaves_appends",
       current.sequence);
  std::vector<std::uint32_t> at(sequences, kIdle);
  for (std::size_t s = 0; s < sequences; ++s) {
    if (decodes && decodes[s] == 0) continue;
    want(!is_chunked() || static_cast<std::size_t>(current.sequence) != s,
         "sequence {} should decode in this step, but is in the middle of an append; complete the "
         "append first",
         s);
    at[s] = want_whole(s);
    check_capacity(s, std::uint64_t{at[s]} + 1);
  }
  if (!interleaves) forget_append();  // the step may overwrite the append's memory
  cache.reserve_for_steps();
  for (std::size_t s = 0; s < sequences; ++s) {
    if (at[s] == kIdle) continue;
    cache.before_token(static_cast<int>(s), at[s]);
    fed_before[s] = at[s];
    appended[s] = false;
    for (std::size_t layer = 0; layer < layers; ++layer) ++fed_of(layer, s);
  }
  next_step_layer = 0;
  cuda::check(cudaMemcpyAsync(now->positions, at.data(), at.size() * sizeof at[0],
                              cudaMemcpyHostToDevice, cache.stream()),
              "positions");
}

void kvlab_kv_cache::step(int layer, const void* qkv, void* out, float* lse) {
  want(layer == next_step_layer || layer == 0,
       "layer is {}; a step goes through the layers in order, and {} is next", layer,
       next_step_layer);
  const StepRows rows{static_cast<int>(sequences), now->positions};
  if (layer == 0)
    cache.fill_ropes(RopeRows::step, reinterpret_cast<const std::int32_t*>(now->positions), 0,
                     rows.count);
  attend(static_cast<std::uint32_t>(layer), rows, qkv, out, lse);
  const bool is_last = static_cast<std::size_t>(layer) + 1 == layers;
  if (is_last) set_idle(0, sequences);
  next_step_layer = is_last ? 0 : layer + 1;
}

void kvlab_kv_cache::attend(std::uint32_t layer, const StepRows& rows, const void* qkv, void* out,
                            float* lse) const {
  write(cache.write(layer, rows), qkv, rows.count);
  cache.store_in_tiers(layer, rows);
  const AttendedRows to = attended_rows(qkv, out, lse);
  EvictingAttentionArgs args = cache.step(layer, rows, to);
  args.workspace = cache.workspace(0);
  args.settled = false;  // another step may follow immediately
  const EvictionKernels& kernels = cache.config().kernels;
  const bool computes_features = cache.config().features.count > 0;
  cuda::check(kernels.attend(kernels, args, cache.stream()), "evicting attention");
  if (computes_features) cache.compute_features(layer, rows, to);
  cuda::check(kernels.observe(kernels, {&args, 1}, !computes_features, cache.stream()),
              "observing attention");
}

// --- Drafts --------------------------------------------------------------------------------------

void kvlab_kv_cache::begin_drafts(const std::uint32_t* tokens) {
  const std::uint32_t most = cache.config().draft_tokens;
  want(most > 0,
       "the cache was created with draft_tokens 0; set it to the maximum number of tokens of a "
       "sequence in a verification");
  want_no_drafts();
  std::vector<std::uint32_t> at(sequences);
  for (std::size_t s = 0; s < sequences; ++s) {
    if (tokens[s] == 0) continue;
    want(tokens[s] <= most, "tokens[{}] is {}; it should be at most draft_tokens, {}", s, tokens[s],
         most);
    want(!is_chunked() || static_cast<std::size_t>(current.sequence) != s,
         "sequence {} has drafts, but is in the middle of an append; complete the append first", s);
    at[s] = want_whole(s);
    check_capacity(s, std::uint64_t{at[s]} + tokens[s]);
  }
  const std::vector<std::uint32_t> counts(tokens, tokens + sequences);
  want(std::ranges::any_of(counts, [](std::uint32_t count) { return count > 0; }),
       "tokens is 0 for every sequence; give at least one sequence a token");
  cache.begin_drafts(at, counts);
  drafted = counts;
  next_draft_layer = 0;
}

void kvlab_kv_cache::verify_drafts(int layer, const void* qkv, void* out, float* lse) {
  want(!drafted.empty(), "no drafts are being verified; call kvlab_kv_cache_begin_drafts first");
  want(layer == next_draft_layer,
       "layer is {}; drafts go through the layers in order, and {} is next", layer,
       next_draft_layer);
  const auto own = static_cast<std::uint32_t>(layer);
  const RopeWriteArgs args = cache.write_drafts(own);
  write(args, qkv, args.tokens);
  cache.attend_drafts(own, attended_rows(qkv, out, lse));
  ++next_draft_layer;
}

void kvlab_kv_cache::accept_drafts(const std::uint32_t* accepted) {
  want(!drafted.empty(), "no drafts are being verified; call kvlab_kv_cache_begin_drafts first");
  want(static_cast<std::size_t>(next_draft_layer) == layers,
       "layer {} has not verified the drafts; call kvlab_kv_cache_verify_drafts for it first",
       next_draft_layer);
  std::vector<std::uint32_t> counts(sequences);
  for (std::size_t s = 0; s < sequences; ++s) {
    if (drafted[s] == 0) continue;
    want(accepted[s] <= drafted[s],
         "accepted[{}] is {}; it should be at most {}, which is verified", s, accepted[s],
         drafted[s]);
    counts[s] = accepted[s];
  }
  cache.accept_drafts(counts);
  for (std::size_t s = 0; s < sequences; ++s) {
    if (drafted[s] == 0) continue;
    appended[s] = true;  // even if no token is accepted, because begin_drafts() has evicted
    if (counts[s] == 0) continue;
    fed_before[s] = fed_of(0, s);
    for (std::size_t layer = 0; layer < layers; ++layer) fed_of(layer, s) += counts[s];
  }
  drafted.clear();
}

// --- The calls -----------------------------------------------------------------------------------

extern "C" {

cudaError_t kvlab_kv_cache_memory(const kvlab_kv_cache_config* config, size_t* bytes) {
  return record_call(__func__, [&] {
    want_args(config);
    want(bytes != nullptr, "bytes is NULL");
    const KvCache::Bytes taken = KvCache::bytes(config_of(*config), config->longest);
    *bytes = taken.storage + taken.work +
             cuda::Placed<kvlab_kv_cache::Now>::bytes(static_cast<std::size_t>(config->sequences));
  });
}

cudaError_t kvlab_kv_cache_slots(const kvlab_kv_cache_config* config, int* slots) {
  return record_call(__func__, [&] {
    want_args(config);
    want(slots != nullptr, "slots is NULL");
    kvlab_kv_cache_config plain = *config;
    plain.pages = {};
    std::vector<kvlab_layer> layers;
    if (config->layers && config->layer_count > 0)
      layers.assign(config->layers, config->layers + config->layer_count);
    for (kvlab_layer& layer : layers) layer.keys = layer.values = nullptr;
    if (!layers.empty()) plain.layers = layers.data();
    *slots = PairSlots(config_of(plain)).max_slots();
  });
}

cudaError_t kvlab_kv_cache_create(const kvlab_kv_cache_config* config, cudaStream_t stream,
                                  kvlab_kv_cache** cache) {
  return record_call(__func__, [&] {
    want_args(config);
    want(cache != nullptr, "cache is NULL");
    want_no_capture(stream);
    auto made = std::make_unique<kvlab_kv_cache>(config_of(*config), stream);
    if (config->longest > 0) made->cache.reserve(config->longest);
    *cache = made.release();
  });
}

void kvlab_kv_cache_destroy(kvlab_kv_cache* cache) { delete cache; }

cudaError_t kvlab_kv_cache_clear(kvlab_kv_cache* cache, cudaStream_t stream) {
  return record_call(__func__, [&] {
    want(cache != nullptr, "cache is NULL");
    want_no_capture(stream);
    cache->cache.enqueue_on(stream);
    cache->clear();
  });
}

cudaError_t kvlab_kv_cache_start(kvlab_kv_cache* cache, int sequence,
                                 const kvlab_sequence_settings* settings, cudaStream_t stream) {
  return record_call(__func__, [&] {
    want(cache != nullptr, "cache is NULL");
    if (settings != nullptr) want_args(settings);
    cache->want_sequence(sequence);
    want_no_capture(stream);
    cache->cache.enqueue_on(stream);
    cache->start(sequence,
                 settings ? settings_of(*settings, cache->cache.config()) : SequenceSettings{});
  });
}

cudaError_t kvlab_kv_cache_copy(kvlab_kv_cache* cache, int from, int to, cudaStream_t stream) {
  return record_call(__func__, [&] {
    want(cache != nullptr, "cache is NULL");
    cache->want_sequence(from, "from");
    cache->want_sequence(to, "to");
    want_no_capture(stream);
    cache->cache.enqueue_on(stream);
    cache->copy_sequence(from, to);
  });
}

cudaError_t kvlab_kv_cache_append(kvlab_kv_cache* cache, const kvlab_append_chunk* chunk,
                                  cudaStream_t stream) {
  return record_call(__func__, [&] {
    want(cache != nullptr, "cache is NULL");
    want_args(chunk);
    want_no_capture(stream);
    cache->cache.enqueue_on(stream);
    cache->append(*chunk);
  });
}

cudaError_t kvlab_kv_cache_begin_step(kvlab_kv_cache* cache, const unsigned char* decodes,
                                      cudaStream_t stream) {
  return record_call(__func__, [&] {
    want(cache != nullptr, "cache is NULL");
    want_no_capture(stream);
    cache->cache.enqueue_on(stream);
    cache->begin_step(decodes);
  });
}

cudaError_t kvlab_kv_cache_step(kvlab_kv_cache* cache, int layer, const void* qkv, void* out,
                                float* lse, cudaStream_t stream) {
  return record_call(__func__, [&] {
    want_rows(cache, qkv, out);
    cache->want_layer(layer);
    cache->cache.enqueue_on(stream);
    cache->step(layer, qkv, out, lse);
  });
}

cudaError_t kvlab_kv_cache_begin_drafts(kvlab_kv_cache* cache, const uint32_t* tokens,
                                        cudaStream_t stream) {
  return record_call(__func__, [&] {
    want(cache && tokens, "cache or tokens is NULL");
    want_no_capture(stream);
    cache->cache.enqueue_on(stream);
    cache->begin_drafts(tokens);
  });
}

cudaError_t kvlab_kv_cache_verify_drafts(kvlab_kv_cache* cache, int layer, const void* qkv,
                                         void* out, float* lse, cudaStream_t stream) {
  return record_call(__func__, [&] {
    want_rows(cache, qkv, out);
    cache->want_layer(layer);
    want_no_capture(stream);
    cache->cache.enqueue_on(stream);
    cache->verify_drafts(layer, qkv, out, lse);
  });
}

cudaError_t kvlab_kv_cache_accept_drafts(kvlab_kv_cache* cache, const uint32_t* accepted,
                                         cudaStream_t stream) {
  return record_call(__func__, [&] {
    want(cache && accepted, "cache or accepted is NULL");
    want_no_capture(stream);
    cache->cache.enqueue_on(stream);
    cache->accept_drafts(accepted);
  });
}

cudaError_t kvlab_kv_cache_sequence_info(const kvlab_kv_cache* cache, int sequence,
                                         kvlab_sequence_info* info) {
  return record_call(__func__, [&] {
    want(cache != nullptr, "cache is NULL");
    want_args(info);
    cache->want_sequence(sequence);
    const auto s = static_cast<std::size_t>(sequence);
    info->tokens = cache->fed[s];
    info->evictions = cache->cache.evictions(sequence, cache->fed_before[s]);
    info->kv_bytes = cache->cache.held_bytes(sequence, info->tokens, cache->appended[s]);
    info->until_eviction = cache->cache.until_eviction(sequence, info->tokens);
    info->allocated = cache->cache.allocated_bytes();
  });
}

cudaError_t kvlab_kv_cache_positions(kvlab_kv_cache* cache, int sequence, int layer, int kv_head,
                                     uint32_t* positions, uint32_t capacity, uint32_t* count,
                                     cudaStream_t stream) {
  return record_call(__func__, [&] {
    want(cache && positions && count, "cache, positions or count is NULL");
    cache->want_sequence(sequence);
    cache->want_layer(layer);
    want(kv_head >= 0 && kv_head < cache->cache.config().kv_heads,
         "kv_head is {}; it should be at least 0 and below {}", kv_head,
         cache->cache.config().kv_heads);
    want_no_capture(stream);
    cache->cache.enqueue_on(stream);
    const auto kept = cache->cache.kept_positions(sequence, static_cast<std::uint32_t>(layer),
                                                  static_cast<std::uint32_t>(kv_head));
    want(kept.size() <= capacity,
         "capacity is {}, but the pair keeps {} tokens; give at least that capacity", capacity,
         kept.size());
    std::ranges::copy(kept, positions);
    *count = static_cast<std::uint32_t>(kept.size());
  });
}

}  // extern "C"
