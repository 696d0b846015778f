#include "tests/kernels/evicting_batch.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "policies/observation.hpp"
#include "tests/catch.hpp"
#include "tests/kernels/attention_reference.hpp"
#include "tests/policies/sample.hpp"
#include "tests/policies/unmodified.hpp"

namespace kvlab::kernels {
namespace {

constexpr int kPoison = 0xFF;  // all ones is NaN in every type
constexpr std::uint64_t kSeed = 42;
constexpr std::uint32_t kLayer = 3;
constexpr int kGap = 3;  // slots between pairs, so that pairs begin at any slot
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

const char* name_of(Type type) {
  constexpr const char* kNames[] = {"bf16", "f16", "f32"};
  return kNames[static_cast<int>(type)];
}

template <class T>
std::unique_ptr<DeviceArray<T>> to_device(const std::vector<T>& values) {
  return std::make_unique<DeviceArray<T>>(values);
}
template <class T>
void overwrite(const DeviceArray<T>& array, const std::vector<T>& values) {
  array.assign(values);
}
template <class T>
void append(std::vector<std::byte>& bytes, const std::vector<T>& values) {
  const auto more = std::as_bytes(std::span(values));
  bytes.insert(bytes.end(), more.begin(), more.end());
}

/// The error that the rotation in the kernel may add to a logit of a few units. Each rotated
/// element is computed from two elements, with sines and cosines that are accurate to 2^-20.
double rotation_error(Type type) { return std::ldexp(1.0, type == KVLAB_BF16 ? -15 : -18); }

/// A key rotated back by `distance` positions.
std::vector<float> turned_back(std::span<const float> key, double distance,
                               std::span<const float> inv_freq) {
  std::vector<float> to(key.size());
  const std::size_t half = key.size() / 2;
  for (std::size_t i = 0; i < half; ++i) {
    const double angle = -distance * double{inv_freq[i]};
    const double c = std::cos(angle), s = std::sin(angle), low = key[i], high = key[i + half];
    to[i] = static_cast<float>(low * c - high * s);
    to[i + half] = static_cast<float>(high * c + low * s);
  }
  return to;
}

}  // namespace

std::string EvictingSize::name() const {
  return policy + " " + name_of(type) + " head size " + std::to_string(head_size) + " group " +
         std::to_string(group) + (numbering == Positions::cache ? " at cache positions" : "") +
         " budget " + std::to_string(budgets[0]);
}

EvictingBatch::EvictingBatch(const EvictionKernels& kernels, const EvictingSize& size)
    : kernels_(kernels),
      size_(size),
      spec_(parse_policy(test::unmodified(size.policy))),
      tokens_(static_cast<std::size_t>(size.sequences), size.prompt),
      now_(tokens_) {
  if (size_.scale == 0) size_.scale = 1 / std::sqrt(static_cast<float>(size_.head_size));
  for (std::size_t i = 0; i < dim() / 2; ++i)
    inv_freq_.push_back(static_cast<float>(
        std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(dim()))));
  all_.resize(static_cast<std::size_t>(pairs()));
  slots_ = 1;
  for (int index = 0; index < pairs(); ++index) begin_pair(index);
  states_.assign(slots_ * kernels_.slot_bytes, std::byte{kPoison});
  host_positions_.assign(slots_, ~0u);
  features_.assign(slots_ * kernels_.features.size(), kNaN);
  keys_.assign(slots_ * dim(), kNaN);
  values_.assign(slots_ * dim(), kNaN);
  for (Pair& pair : all_) {
    std::vector<std::uint32_t> slots(pair.live->size());
    std::iota(slots.begin(), slots.end(), 0u);
    // If keys are stored rotated, sinks have to be in the slots of their positions, so they are not
    // shuffled.
    const std::uint32_t sinks = keeps_rotated_keys() ? pair.sinks : 0;
    std::shuffle(slots.begin() + std::min<std::ptrdiff_t>(sinks, std::ssize(slots)), slots.end(),
                 random_);
    for (std::size_t i = 0; i < slots.size(); ++i) {
      put(pair, pair.live->positions()[i], slots[i]);
      const auto state = pair.live->state(i);
      std::ranges::copy(
          state, states_.begin() +
                     static_cast<std::ptrdiff_t>((static_cast<std::size_t>(pair.first) + slots[i]) *
                                                 kernels_.slot_bytes));
    }
    pair.next = static_cast<int>(slots.size());
  }
  upload();
}

void EvictingBatch::begin_pair(int index) {
  Pair& pair = all_[static_cast<std::size_t>(index)];
  const std::uint32_t requested =
      size_.budgets[static_cast<std::size_t>(index) % size_.budgets.size()];
  const bool bounded = requested != 0 && spec_.entry->info.evicts;
  const LiveSet::Identity identity{.seed = kSeed + static_cast<unsigned>(index / size_.kv_heads),
                                   .sequence = 7u + static_cast<unsigned>(index / size_.kv_heads),
                                   .layer = kLayer,
                                   .kv_head = static_cast<unsigned>(index % size_.kv_heads)};
  pair.live = std::make_unique<LiveSet>(spec_, bounded ? requested : kNoBudget, identity);
  if (size_.prompt > 0) {
    pair.live->append(0, size_.prompt,
                      sample_features(0, size_.prompt, kernels_.features.size()).data());
    std::vector<Observation> seen(size_.prompt);
    for (Observation& o : seen) {
      o.mass = random_() % 5 == 0 ? 77 : random_() * std::uint64_t{3};
      o.requests = random_() % 2;
      o.last_request = static_cast<std::uint32_t>(random_()) % size_.prompt;
      o.queries = 1;
    }
    pair.live->observe(seen);
    pair.live->evict_to_budget(size_.prompt);
  }
  if (bounded) pair.sinks = resolve_protected_tokens(spec_, requested).sinks;
  pair.capacity =
      bounded ? static_cast<int>(requested) : static_cast<int>(size_.prompt) + size_.steps;
  pair.first = static_cast<std::int64_t>(slots_);
  slots_ += static_cast<std::size_t>(pair.capacity + kGap);
  max_slots_ = std::max(max_slots_, pair.capacity);
}

/// Samples a token's key, value and features, and writes them to its slot.
void EvictingBatch::put(Pair& pair, std::uint32_t position, std::uint32_t slot) {
  const std::size_t at = static_cast<std::size_t>(pair.first) + slot;
  auto key = random_values(size_.type, dim(), random_);
  if (size_.equal_keys) key.assign(dim(), 0.25f);
  std::ranges::copy(key, keys_.begin() + static_cast<std::ptrdiff_t>(at * dim()));
  std::ranges::copy(random_values(size_.type, dim(), random_),
                    values_.begin() + static_cast<std::ptrdiff_t>(at * dim()));
  std::ranges::copy(sample_features(position, 1, kernels_.features.size()),
                    features_.begin() + static_cast<std::ptrdiff_t>(at * kernels_.features.size()));
  host_positions_[at] = position;
  if (pair.slot_of.size() <= position) pair.slot_of.resize(position + 1);
  pair.slot_of[position] = slot;
}

void EvictingBatch::upload() {
  const auto heads = static_cast<std::size_t>(pairs()) * group();
  std::vector<std::int64_t> first_slot;
  std::vector<std::int32_t> lengths, next_slots;
  std::vector<kvlab_rule> rules;
  for (const Pair& pair : all_) {
    const std::uint32_t requested = size_.budgets[first_slot.size() % size_.budgets.size()];
    const bool bounded = requested != 0 && spec_.entry->info.evicts;
    const ProtectedTokens protected_tokens =
        bounded ? resolve_protected_tokens(spec_, requested) : ProtectedTokens{};
    first_slot.push_back(pair.first);
    lengths.push_back(static_cast<std::int32_t>(pair.live->size()));
    next_slots.push_back(pair.next);
    rules.push_back(
        {bounded ? requested : kUnlimited, protected_tokens.sinks, protected_tokens.recent});
  }
  std::vector<std::uint64_t> seeds;
  std::vector<std::uint32_t> ids, thresholds;
  std::vector<std::byte> params;
  for (int s = 0; s < size_.sequences; ++s) {
    seeds.push_back(kSeed + static_cast<unsigned>(s));
    ids.push_back(7u + static_cast<unsigned>(s));
    thresholds.push_back(request_threshold16(size_.tau));
    std::vector<std::byte> one(kernels_.params_bytes);
    kernels_.params(spec_.params, one.data());
    params.insert(params.end(), one.begin(), one.end());
  }
  device_keys_ = to_device(encode(size_.type, keys_));
  device_values_ = to_device(encode(size_.type, values_));
  device_q_ = std::make_unique<DeviceArray<std::byte>>(heads * dim() * bytes_of(size_.type));
  out_ = std::make_unique<DeviceArray<std::byte>>(heads * dim() * bytes_of(size_.type));
  device_lse_ = std::make_unique<DeviceArray<float>>(heads);
  device_inv_freq_ = to_device(inv_freq_);
  sinks_ = sample_sinks(static_cast<std::size_t>(size_.kv_heads) * group(), size_.sinks);
  if (size_.sinks) device_sinks_ = to_device(sinks_);
  device_states_ = to_device(states_);
  device_features_ = to_device(features_);
  params_ = to_device(params);
  positions_ = to_device(host_positions_);
  ages_ = std::make_unique<DeviceArray<std::uint32_t>>(slots_);
  threshold16_ = to_device(thresholds);
  sequence_ids_ = to_device(ids);
  device_now_ = to_device(now_);
  seeds_ = to_device(seeds);
  first_slot_ = to_device(first_slot);
  lengths_ = to_device(lengths);
  next_slots_ = to_device(next_slots);
  rules_ = to_device(rules);
  device_seen_ = std::make_unique<DeviceArray<Observation>>(slots_);
  const std::size_t bytes = kernels_.attention_workspace(args().cache, false);
  REQUIRE(bytes > 0);
  workspace_ = std::make_unique<DeviceArray<std::byte>>(bytes);
  check_cuda(fill_ages(args().cache, nullptr));
  check_cuda(cudaDeviceSynchronize());
}

EvictingAttentionArgs EvictingBatch::args() const {
  return {{.cache = {.type = size_.type,
                     .sequences = size_.sequences,
                     .query_heads = size_.group * size_.kv_heads,
                     .kv_heads = size_.kv_heads,
                     .head_size = size_.head_size,
                     .softmax_scale = size_.scale,
                     .max_slots = max_slots_,
                     .first_slot = first_slot_->data(),
                     .keys = device_keys_->data(),
                     .values = device_values_->data(),
                     .positions = positions_->data(),
                     .lengths = lengths_->data(),
                     .next_slots = next_slots_->data(),
                     .ages = ages_->data()},
           .policy = {.states = device_states_->data(),
                      .rules = rules_->data(),
                      .params = params_->data(),
                      .threshold16 = threshold16_->data(),
                      .seeds = seeds_->data(),
                      .sequence_ids = sequence_ids_->data(),
                      .layer = kLayer,
                      .seen = reinterpret_cast<kvlab_observation*>(device_seen_->data()),
                      .features = device_features_->data()},
           .numbering = keeps_rotated_keys()                  ? KVLAB_CACHE_POSITIONS_ROTATED
                        : size_.numbering == Positions::cache ? KVLAB_CACHE_POSITIONS
                                                              : KVLAB_ORIGINAL_POSITIONS,
           .now = device_now_->data(),
           .q = device_q_->data(),
           .inv_freq = device_inv_freq_->data(),
           .rotated = size_.head_size,
           // Rotated keys and queries already include this factor.
           .rope_factor = keeps_rotated_keys() ? 1.5f : 1.0f,
           .out = out_->data(),
           .lse = device_lse_->data(),
           .workspace = workspace_ ? workspace_->data() : nullptr,
           .settled = size_.settled},
          nullptr,
          size_.sinks ? device_sinks_->data() : nullptr};
}

cudaError_t EvictingBatch::enqueue(cudaStream_t stream) const {
  return kernels_.attention(args(), stream);
}

cudaError_t EvictingBatch::enqueue_with_rotated_keys() const {
  EvictingAttentionArgs requested = args();
  requested.numbering = KVLAB_CACHE_POSITIONS_ROTATED;
  return kernels_.attention(requested, nullptr);
}

void EvictingBatch::sample_tokens(const std::vector<bool>& idle) {
  q_ = random_values(size_.type, static_cast<std::size_t>(pairs()) * group() * dim(), random_);
  overwrite(*device_q_, encode(size_.type, q_));
  before_ = {lengths_->to_host(), next_slots_->to_host(), device_states_->to_host(),
             ages_->to_host()};
  now_ = tokens_;
  for (std::size_t s = 0; s < now_.size(); ++s)
    if (!idle.empty() && idle[s]) now_[s] = kIdle;
  for (int index = 0; index < pairs(); ++index) {
    Pair& pair = all_[static_cast<std::size_t>(index)];
    const std::uint32_t at = now_[static_cast<std::size_t>(index / size_.kv_heads)];
    if (at == kIdle) continue;
    pair.live->append(at, 1, sample_features(at, 1, kernels_.features.size()).data());
    put(pair, at, static_cast<std::uint32_t>(pair.next));
  }
  overwrite(*device_now_, now_);
  overwrite(*device_keys_, encode(size_.type, keys_));
  overwrite(*device_values_, encode(size_.type, values_));
  overwrite(*device_features_, features_);
  overwrite(*positions_, host_positions_);
  poison();
}

void EvictingBatch::poison() {
  check_cuda(
      cudaMemset(out_->data(), kPoison,
                 static_cast<std::size_t>(pairs()) * group() * dim() * bytes_of(size_.type)));
  check_cuda(
      cudaMemset(device_lse_->data(), kPoison, static_cast<std::size_t>(pairs()) * group() * 4));
  check_cuda(cudaMemset(device_seen_->data(), kPoison, slots_ * sizeof(Observation)));
  const std::size_t bytes = kernels_.attention_workspace(args().cache, false);
  if (bytes > kSignalBytes)
    check_cuda(cudaMemset(workspace_->data() + kSignalBytes, kPoison, bytes - kSignalBytes));
  check_cuda(cudaDeviceSynchronize());
}

std::vector<float> EvictingBatch::gather(const std::vector<float>& from, const Pair& pair) const {
  std::vector<float> rows;
  for (const std::uint32_t position : pair.live->positions()) {
    const auto at = (static_cast<std::size_t>(pair.first) + pair.slot_of[position]) * dim();
    rows.insert(rows.end(), from.begin() + static_cast<std::ptrdiff_t>(at),
                from.begin() + static_cast<std::ptrdiff_t>(at + dim()));
  }
  return rows;
}

/// Compares outputs and observations with float64. The live tokens are ordered by age.
void EvictingBatch::check_observations(const Pair& pair, int index, AttentionErrors& errors) {
  const std::vector<float> values = gather(values_, pair), plain = gather(keys_, pair);
  std::vector<float> keys = plain;
  const std::size_t count = pair.live->size();
  const std::uint32_t now = now_[static_cast<std::size_t>(index / size_.kv_heads)];
  if (size_.numbering == Positions::cache)
    for (std::size_t i = 0; i < count; ++i) {
      const std::span key(&plain[i * dim()], dim());
      double distance = static_cast<double>(count - 1 - i);
      if (keeps_rotated_keys()) distance -= now - pair.live->positions()[i];
      std::ranges::copy(turned_back(key, distance, inv_freq_),
                        keys.begin() + static_cast<std::ptrdiff_t>(i * dim()));
    }
  const std::vector<float> out = decode(size_.type, bytes_out_);
  std::vector<double> mass(count);
  // `sure`: how the token is requested under any rounding. `possible`: how it may be requested, if
  // rounding decides so.
  std::vector<int> sure(count), possible(count);
  const double tau = request_threshold16(size_.tau) / 65536.0;
  for (std::size_t head = 0; head < group(); ++head) {
    const std::size_t row = static_cast<std::size_t>(index) * group() + head;
    const std::span<const float> query(&q_[row * dim()], dim());
    const float sink = size_.sinks ? sinks_[row % sinks_.size()] : kNoSink;
    const AttentionRow exact = exact_row(query, keys, values, size_.scale, sink);
    errors.add(std::span(&out[row * dim()], dim()), lse_[row], exact,
               naive_row(size_.type, query, keys, values, size_.scale, sink));
    std::vector<double> p(count);
    for (std::size_t i = 0; i < count; ++i) {
      double dot = 0;
      for (std::size_t d = 0; d < dim(); ++d) dot += double{query[d]} * double{keys[i * dim() + d]};
      p[i] = std::exp(dot * double{size_.scale} - exact.lse);
      mass[i] += p[i];
    }
    const double floor = tau * *std::ranges::max_element(p);
    for (std::size_t i = 0; i < count; ++i) {
      sure[i] |= p[i] > floor * 1.001 + 1e-9;
      possible[i] |= p[i] > floor * 0.999 - 1e-9;
    }
  }
  const Needs needs = spec_.entry->info.needs;
  double worst = 0;
  int wrong = 0;
  for (std::size_t i = 0; i < count && needs != Needs::nothing; ++i) {
    const std::uint32_t position = pair.live->positions()[i];
    const Observation& seen = seen_[static_cast<std::size_t>(pair.first) + pair.slot_of[position]];
    wrong += seen.queries == 1 ? 0 : 1;
    if (!needs_requests(needs)) wrong += seen.requests == 0 && seen.last_request == 0 ? 0 : 1;
    if (!needs_mass(needs)) wrong += seen.mass == 0 ? 0 : 1;
    if (needs_mass(needs)) {
      if (!spec_.entry->info.weighted)
        worst = std::max(
            worst, std::abs(static_cast<double>(seen.mass) * 0x1p-32 - mass[i]) / (mass[i] + 1e-6));
    }
    if (needs_requests(needs)) {
      wrong += seen.last_request == (seen.requests ? now : 0) ? 0 : 1;
      wrong += static_cast<int>(seen.requests) >= sure[i] &&
                       static_cast<int>(seen.requests) <= possible[i]
                   ? 0
                   : 1;
    }
  }
  CHECK(wrong == 0);
  CHECK(worst < 1e-3);
}

void EvictingBatch::check_pair(int index) {
  Pair& pair = all_[static_cast<std::size_t>(index)];
  std::vector<Observation> seen;
  for (const std::uint32_t position : pair.live->positions())
    seen.push_back(seen_[static_cast<std::size_t>(pair.first) + pair.slot_of[position]]);
  pair.live->observe(seen);
  int different = 0;
  for (std::size_t i = 0; i < pair.live->size(); ++i) {
    const auto expected = pair.live->state(i);
    const std::size_t slot =
        static_cast<std::size_t>(pair.first) + pair.slot_of[pair.live->positions()[i]];
    different += std::ranges::equal(expected, std::span(states_).subspan(slot * kernels_.slot_bytes,
                                                                         expected.size()))
                     ? 0
                     : 1;
  }
  CHECK(different == 0);
  const std::uint32_t next = now_[static_cast<std::size_t>(index / size_.kv_heads)] + 1;
  const auto before = std::vector(pair.live->positions().begin(), pair.live->positions().end());
  const auto victims = pair.live->evict_to_budget(next);
  CHECK(victims.size() <= 1);
  pair.next = static_cast<int>(victims.empty() ? before.size() : pair.slot_of[before[victims[0]]]);
}

void EvictingBatch::check() {
  bytes_out_ = out_->to_host();
  lse_ = device_lse_->to_host();
  seen_ = device_seen_->to_host();
  states_ = device_states_->to_host();
  const auto lengths = lengths_->to_host(), next_slots = next_slots_->to_host();
  AttentionErrors errors(size_.type);
  if (size_.numbering == Positions::cache) errors.allow(rotation_error(size_.type));
  for (int index = 0; index < pairs(); ++index) {
    Pair& pair = all_[static_cast<std::size_t>(index)];
    const std::uint32_t now = now_[static_cast<std::size_t>(index / size_.kv_heads)];
    if (now == kIdle) {
      const auto rows = decode(size_.type, bytes_out_);
      for (std::size_t i = 0; i < group() * dim(); ++i)
        CHECK(std::isnan(rows[static_cast<std::size_t>(index) * group() * dim() + i]));
    } else {
      const auto live = static_cast<int>(pair.live->size());
      check_observations(pair, index, errors);
      check_pair(index);
      CHECK(lengths[static_cast<std::size_t>(index)] == live);
    }
    CHECK(next_slots[static_cast<std::size_t>(index)] == pair.next);
  }
  INFO("error " << errors.out() << ", naive " << errors.naive_out());
  CHECK(errors.good());
  for (std::size_t s = 0; s < now_.size(); ++s)
    if (now_[s] != kIdle) ++tokens_[s];
}

std::vector<std::byte> EvictingBatch::bits() const {
  std::vector<std::byte> all;
  append(all, out_->to_host());
  append(all, device_states_->to_host());
  append(all, device_seen_->to_host());
  append(all, lengths_->to_host());
  append(all, next_slots_->to_host());
  append(all, ages_->to_host());
  return all;
}

void EvictingBatch::restore() {
  overwrite(*lengths_, before_.lengths);
  overwrite(*next_slots_, before_.next_slots);
  overwrite(*device_states_, before_.states);
  overwrite(*ages_, before_.ages);
  poison();
}

}  // namespace kvlab::kernels
