#include "engine/cuda/cache/cache_watch.hpp"

#include <algorithm>
#include <numeric>

#include "kernels/host/transfer.hpp"

namespace kvlab {
namespace {

/// Copies an array, which may be null, to the host.
template <class T>
std::vector<T> to_host(const T* from, std::size_t count, cudaStream_t stream) {
  return from ? cuda::read(from, count, stream, "watching the cache") : std::vector<T>{};
}

void append(std::vector<float>& to, const std::vector<float>& more) {
  to.insert(to.end(), more.begin(), more.end());
}

/// Row `row` of a layer that was captured for `rows` rows.
CapturedLayer row_of(const CapturedLayer& all, std::size_t row, std::size_t rows) {
  const auto part = [&](const std::vector<float>& values) {
    const auto size = static_cast<std::ptrdiff_t>(values.size() / rows);
    const auto first = values.begin() + static_cast<std::ptrdiff_t>(row) * size;
    return std::vector<float>(first, first + size);
  };
  return {part(all.q), part(all.k), part(all.v), part(all.out), part(all.lse)};
}

}  // namespace

CacheWatch::CacheWatch(const EvictingCache& cache, const ModelConfig& config,
                       const CaptureShape& shape, int sequences, cudaStream_t stream)
    : cache_(cache),
      config_(config),
      shape_(shape),
      sequences_(static_cast<std::size_t>(sequences)),
      stream_(stream) {}

void CacheWatch::watch(int sequence, DecoderObserver* observer) {
  if (observer)
    observers_[sequence] = observer;
  else
    observers_.erase(sequence);
}

CacheWatch::Head CacheWatch::Slots::head(std::size_t first, std::size_t count) const {
  std::vector<std::size_t> by_age(count);
  std::iota(by_age.begin(), by_age.end(), first);
  std::ranges::sort(by_age, {}, [&](std::size_t slot) { return positions[slot]; });
  Head head;
  for (const std::size_t slot : by_age) {
    head.positions.push_back(positions[slot]);
    const auto append_to = [&](auto& own, const auto& all) {
      const std::size_t each = all.size() / positions.size();
      const auto from = all.begin() + static_cast<std::ptrdiff_t>(slot * each);
      own.insert(own.end(), from, from + static_cast<std::ptrdiff_t>(each));
    };
    append_to(head.states, states);
    append_to(head.features, features);
    append_to(head.seen, seen);
  }
  return head;
}

CacheWatch::Slots CacheWatch::read(const kvlab_cache_view& cache, const std::byte* states,
                                   const float* features, const kvlab_observation* seen,
                                   std::size_t count) const {
  return {.positions = to_host(cache.positions, count, stream_),
          .states = to_host(states, count * config_of().kernels.slot_bytes, stream_),
          .features = to_host(
              features, count * static_cast<std::size_t>(config_of().features.count), stream_),
          .seen = to_host(reinterpret_cast<const Observation*>(seen), count, stream_)};
}

void CacheWatch::begin(int sequence, std::span<const std::int32_t> ids, std::uint32_t first,
                       SegmentKind kind, bool new_segment) {
  sequence_ = sequence;
  first_ = first;
  appended_ = static_cast<std::uint32_t>(ids.size());
  captured_ = {};
  observers_.at(sequence)->begin_append(ids, first, kind, new_segment);
}

void CacheWatch::part(std::uint32_t layer, const PromptChunk& part, const LayerOutputs& outputs) {
  const auto tokens = static_cast<std::size_t>(part.rows);
  const auto data = to_host(outputs.qkv, shape_.offsets(tokens).end, stream_);
  CapturedLayer more;
  more.read(shape_, data.data(), tokens);
  append(captured_.q, more.q);
  append(captured_.k, more.k);
  append(captured_.v, more.v);
  append(captured_.out, more.out);
  append(captured_.lse, more.lse);
  if (part.first + tokens == appended_) show_append(layer);
}

/// The heads of a layer with a ring. A ring does not store positions, because they follow from the
/// number of tokens. The cache's policy does not act on such a layer.
std::vector<CacheWatch::Head> CacheWatch::ring(std::uint32_t layer, std::uint32_t first,
                                               std::uint32_t appended) const {
  const std::uint32_t older = live_before_append(first, config_.rows[layer].window);
  Head head;
  head.positions.resize(older + appended);
  std::iota(head.positions.begin(), head.positions.end(), first - older);
  return std::vector(config_.kv_heads, head);
}

void CacheWatch::show_append(std::uint32_t layer) {
  if (cache_.rings().has(layer)) {
    show_layer(sequence_, layer, first_, appended_, ring(layer, first_, appended_), captured_);
    captured_ = {};
    return;
  }
  const kernels::AppendMemory& memory = cache_.slots().append_memory(cache_.index_of(layer));
  const auto slots = static_cast<std::size_t>(memory.cache.max_slots);
  const auto older = to_host(memory.cache.lengths, config_.kv_heads, stream_);
  const Slots all =
      read(memory.cache, memory.states, memory.features, memory.seen, slots * config_.kv_heads);
  std::vector<Head> heads;
  for (std::size_t h = 0; h < config_.kv_heads; ++h)
    heads.push_back(all.head(h * slots, static_cast<std::size_t>(older[h]) + appended_));
  show_layer(sequence_, layer, first_, appended_, heads, captured_);
  captured_ = {};
}

void CacheWatch::end() { observers_.at(sequence_)->end_append(); }

void CacheWatch::report_step(std::span<const Fed> fed, const std::byte* outputs) {
  const std::size_t layer_bytes = shape_.offsets(sequences_).end;
  const auto data = to_host(outputs, config_.layers * layer_bytes, stream_);
  const kernels::SlotStorage& storage = cache_.slots().storage();
  const kvlab_cache_view cache = storage.cache(0, static_cast<int>(sequences_));
  const kernels::PairSlots& slots = cache_.slots().slots();
  const Slots all = read(cache, storage.states, storage.features, storage.seen,
                         static_cast<std::size_t>(slots.total()));
  const auto lengths = to_host(cache.lengths, slots.all(), stream_);

  for (const Fed& one : fed)
    observers_.at(one.sequence)
        ->begin_append({&one.id, 1}, one.position, one.kind, one.new_segment);
  for (std::uint32_t layer = 0; layer < config_.layers; ++layer) {
    CapturedLayer captured;
    captured.read(shape_, data.data() + layer * layer_bytes, sequences_);
    for (const Fed& one : fed) {
      const auto row = static_cast<std::size_t>(one.sequence);
      std::vector<Head> heads;
      const bool is_ring = cache_.rings().has(layer);
      if (is_ring) heads = ring(layer, one.position, 1);
      for (std::size_t h = 0; !is_ring && h < config_.kv_heads; ++h) {
        const std::size_t at = cache_.index_of(layer) * slots.pairs() + row * config_.kv_heads + h;
        heads.push_back(all.head(static_cast<std::size_t>(slots.first_slots()[at]),
                                 static_cast<std::size_t>(lengths[at])));
      }
      show_layer(one.sequence, layer, one.position, 1, heads, row_of(captured, row, sequences_));
    }
  }
  for (const Fed& one : fed) observers_.at(one.sequence)->end_append();
}

void CacheWatch::show_layer(int sequence, std::uint32_t layer, std::uint32_t first,
                            std::uint32_t appended, const std::vector<Head>& heads,
                            const CapturedLayer& captured) {
  DecoderObserver& observer = *observers_.at(sequence);
  for (std::uint32_t h = 0; h < heads.size(); ++h) {
    const std::vector<std::uint32_t>& now = heads[h].positions;
    std::vector<std::uint32_t>& before = live_[{sequence, layer, h}];
    std::vector<std::uint32_t> victims;
    std::ranges::set_difference(before, std::span(now).first(now.size() - appended),
                                std::back_inserter(victims));
    observer.evicted(layer, h, first, victims);
    before = now;
  }
  for (std::uint32_t h = 0; h < heads.size(); ++h)
    observer.observed(layer, h, {heads[h].positions, heads[h].states, heads[h].features},
                      heads[h].seen);
  observer.layer(layer, captured.q, captured.k, captured.v, captured.out, captured.lse);
}

}  // namespace kvlab
