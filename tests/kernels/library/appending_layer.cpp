#include "tests/kernels/library/appending_layer.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "policies/catalogue.hpp"
#include "policies/features/features.hpp"
#include "tests/catch.hpp"
#include "tests/kernels/attention_reference.hpp"
#include "tests/policies/sample.hpp"

namespace kvlab {
namespace {

constexpr int kHiddenSize = 24;

std::vector<int> slots_of(const LayerSize& size, int free_slots) {
  std::vector<int> slots;
  while (slots.size() < size.prompts.size() * static_cast<std::size_t>(size.kv_heads))
    slots.push_back(size.budgets[slots.size() % size.budgets.size()] + free_slots);
  return slots;
}
template <class T>
std::vector<T> to_host(const T* from, std::size_t count) {
  std::vector<T> values(count);
  check_cuda(cudaMemcpy(values.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost));
  return values;
}
template <class T>
std::vector<std::byte> bytes(const std::vector<T>& values, std::size_t first, std::size_t count) {
  const auto all = std::as_bytes(std::span(values).subspan(first, count));
  return {all.begin(), all.end()};
}
std::vector<std::byte> params_of(const kvlab_policy* policy, const std::string& name, int count) {
  const std::vector<double> values = parse_policy(name).params;
  std::vector<std::byte> one(kvlab_policy_params_bytes(policy)), all;
  check_cuda(
      kvlab_policy_params(policy, values.data(), static_cast<int>(values.size()), one.data()));
  for (int s = 0; s < count; ++s) all.insert(all.end(), one.begin(), one.end());
  return all;
}

}  // namespace

int first_difference(std::span<const std::byte> a, std::span<const std::byte> b) {
  const auto [in_a, in_b] = std::ranges::mismatch(a, b);
  return in_a == a.end() && in_b == b.end() ? -1 : static_cast<int>(in_a - a.begin());
}

void check_equal(const LiveTokens& expected, const LiveTokens& found) {
  for (const auto& [name, bytes] : expected) {
    INFO(name);
    CHECK(first_difference(bytes, found.at(name)) == -1);
  }
}

AppendingLayer::AppendingLayer(const LayerSize& size, const Paging& paging, int free_slots,
                               OwnHeads heads)
    : size_(size),
      own_heads_(heads.all == 0 ? OwnHeads{0, size.kv_heads} : heads),
      policy_(kvlab_find_policy(size.policy.c_str())),
      max_tokens_(sequences() * free_slots),
      position_(size.prompts.size()),
      total_(size.prompts.size()),
      cache_(size, paging, slots_of(size, free_slots)),
      states_(cache_.slots() * kvlab_policy_slot_bytes(policy_)),
      params_(params_of(policy_, size.policy, sequences())),
      qkv_(static_cast<std::size_t>(max_tokens_ * this->heads()) * head_bytes()),
      q_(static_cast<std::size_t>(max_tokens_) * query_bytes()),
      out_(static_cast<std::size_t>(max_tokens_) * query_bytes()),
      output_(std::size_t{kHiddenSize} * query_bytes()),
      features_(cache_.slots() * kMaxFeatures),
      unit_keys_(static_cast<std::size_t>(pairs() * size.head_size)),
      weights_(static_cast<std::size_t>(free_slots)),
      rows_(static_cast<std::size_t>(max_tokens_ * size.group * size.kv_heads)),
      seen_(cache_.slots()),
      rules_(static_cast<std::size_t>(pairs())),
      now_(size.prompts.size()),
      positions_(size.prompts.size()),
      appended_(size.prompts.size()),
      ended_(size.prompts.size()),
      threshold16_(std::vector<std::uint32_t>(size.prompts.size(), 655)),
      ids_(size.prompts.size()),
      seeds_(std::vector<std::uint64_t>(size.prompts.size(), 42)),
      sequences_(static_cast<std::size_t>(max_tokens_)),
      slots_(static_cast<std::size_t>(max_tokens_)),
      first_query_(size.prompts.size() + 1),
      new_slots_(static_cast<std::size_t>(pairs())) {
  for (; kvlab_policy_feature(policy_, static_cast<int>(feature_count_)); ++feature_count_)
    if (const auto feature =
            built_in_feature(kvlab_policy_feature(policy_, static_cast<int>(feature_count_))))
      computed_.push_back(static_cast<kvlab_feature>(*feature));
  if (computed_.size() < feature_count_) computed_.clear();
  std::vector<kvlab_rule> rules;
  for (const int slots : slots_of(size, 0)) {
    const auto budget = static_cast<std::uint32_t>(slots);
    rules.push_back({budget, std::min(2u, budget - 1), budget / 4, 0});
  }
  rules_.assign(rules);
  std::vector<std::uint32_t> ids(size.prompts.size());
  std::iota(ids.begin(), ids.end(), 3u);
  ids_.assign(ids);
  std::vector<float> weights(static_cast<std::size_t>(free_slots));
  const auto params = params_.to_host();
  check_cuda(kvlab_policy_weights(policy_, params.data(), static_cast<std::uint32_t>(free_slots),
                                  weights.data(), &tail_));
  weights_.assign(weights);
  const auto type = size.type;
  std::mt19937 random(1);
  const auto model = kernels::random_values(
      type, static_cast<std::size_t>(kHiddenSize * own_heads_.all * size.group * size.head_size),
      random);
  std::vector<float> own;
  const auto row = static_cast<std::ptrdiff_t>(size.group * size.head_size);
  for (int hidden = 0; hidden < kHiddenSize; ++hidden) {
    const auto begin = model.begin() + (hidden * own_heads_.all + own_heads_.first) * row;
    own.insert(own.end(), begin, begin + size.kv_heads * row);
  }
  output_.assign(kernels::encode(type, own));
  tokens_.assign(size.prompts.size(), free_slots);
  const kvlab_prefill_args all_args = prefill();
  if (size.in_parts)
    parts_ = std::make_unique<Array<std::byte>>(kvlab_prefill_workspace(&all_args));
  const kvlab_cache_view cache = cache_.cache();
  workspace_ =
      std::make_unique<Array<std::byte>>(kvlab_evicting_attention_workspace(policy_, &cache));
  compact_workspace_ = std::make_unique<Array<std::byte>>(kvlab_compact_workspace(&cache));
}

/// Samples a token's queries, keys and values for all KV heads of the model. Returns those of the
/// KV heads that this layer has.
std::vector<std::byte> AppendingLayer::sample(int sequence, std::uint32_t position,
                                              bool right) const {
  if (position < alike_) sequence = 0;
  std::mt19937 random(static_cast<unsigned>(sequence) << 20 | position << 1 | (right ? 0 : 1));
  const auto type = size_.type;
  const auto dim = static_cast<std::size_t>(size_.head_size);
  std::vector<float> all = kernels::random_values(
      type, static_cast<std::size_t>((size_.group + 2) * own_heads_.all) * dim, random);
  // Makes some logits far larger than others.
  for (float& value : all) value *= position % 5 == 0 ? 2.0f : 1.0f;
  std::vector<float> own;
  const auto take = [&](int first, int count) {
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(first) * size_.head_size;
    own.insert(own.end(), begin, begin + static_cast<std::ptrdiff_t>(count) * size_.head_size);
  };
  take(own_heads_.first * size_.group, size_.kv_heads * size_.group);
  take(own_heads_.all * size_.group + own_heads_.first, size_.kv_heads);
  take(own_heads_.all * (size_.group + 1) + own_heads_.first, size_.kv_heads);
  return kernels::encode(type, own);
}

void AppendingLayer::put(const Counts& tokens, const Counts& right) {
  tokens_ = tokens;
  right_ = right;
  begun_ = total_.front();  // chunks of an append have equal lengths
  std::vector<std::byte> qkv;
  std::vector<std::int32_t> sequence, slots, first{0};
  std::vector<std::uint32_t> now, positions, appended, ended;
  for (int s = 0; s < sequences(); ++s) {
    const auto at = static_cast<std::size_t>(s);
    for (int token = 0; token < tokens[at]; ++token) {
      const auto one =
          sample(s, position_[at] + static_cast<std::uint32_t>(begun_ + token), token < right[at]);
      qkv.insert(qkv.end(), one.begin(), one.end());
      sequence.push_back(s);
      slots.push_back(begun_ + token);
    }
    total_[at] += right[at];
    first.push_back(first.back() + tokens[at]);
    now.push_back(total_[at] == 0 ? KVLAB_IDLE : position_[at]);
    positions.push_back(position_[at] + static_cast<std::uint32_t>(begun_));
    appended.push_back(static_cast<std::uint32_t>(right[at]));
    ended.push_back(static_cast<std::uint32_t>(total_[at]));
  }
  qkv_.assign(qkv);
  sequences_.assign(sequence);
  slots_.assign(slots);
  first_query_.assign(first);
  now_.assign(now);
  positions_.assign(positions);
  appended_.assign(appended);
  ended_.assign(ended);
  auto new_slots = to_host(cache_.cache().next_slots, static_cast<std::size_t>(pairs()));
  for (std::int32_t& slot : new_slots) slot += begun_;
  new_slots_.assign(new_slots);
  if (computed_.empty() && feature_count_ > 0) put_features(new_slots);
  check_cuda(cudaDeviceSynchronize());
}

/// Writes the features that the library does not compute.
void AppendingLayer::put_features(const std::vector<std::int32_t>& new_slots) {
  const auto first = to_host(cache_.cache().first_slot, static_cast<std::size_t>(pairs()));
  for (std::size_t pair = 0; pair < first.size(); ++pair) {
    const std::size_t s = pair / static_cast<std::size_t>(size_.kv_heads);
    const auto sampled = sample_features(position_[s] + static_cast<std::uint32_t>(begun_),
                                         static_cast<std::uint32_t>(right_[s]), feature_count_);
    const auto slot = static_cast<std::size_t>(first[pair] + new_slots[pair]);
    check_cuda(cudaMemcpy(features_.data() + slot * feature_count_, sampled.data(),
                          sampled.size() * sizeof(float), cudaMemcpyHostToDevice));
  }
}

kvlab_policy_state AppendingLayer::state() const {
  return {.states = states_.data(),
          .rules = rules_.data(),
          .params = params_.data(),
          .threshold16 = threshold16_.data(),
          .seeds = seeds_.data(),
          .sequence_ids = ids_.data(),
          .layer = 2,
          .first_head = static_cast<std::uint32_t>(own_heads_.first),
          .features = features_.data()};
}

kvlab_prefill_args AppendingLayer::prefill() const {
  const kvlab_cache_view cache = cache_.cache();
  return {.struct_size = sizeof(kvlab_prefill_args),
          .type = cache.type,
          .query_heads = cache.query_heads,
          .kv_heads = cache.kv_heads,
          .head_size = cache.head_size,
          .softmax_scale = cache.softmax_scale,
          .first = begun_,
          .queries = std::max(1, std::ranges::max(tokens_)),
          .q = q_.data(),
          .keys = cache.keys,
          .values = cache.values,
          .first_slot = cache.first_slot,
          .older = cache.lengths,
          .out = out_.data(),
          .rows = rows_.data(),
          .pages = cache.pages,
          .sequences = sequences(),
          .all_queries = max_tokens_,
          .first_query = first_query_.data(),
          .workspace = parts_ ? parts_->data() : nullptr,
          .keys_end = cache.max_slots};
}

void AppendingLayer::attend(cudaStream_t stream) {
  kvlab_write_args write{.struct_size = sizeof(kvlab_write_args)};
  write.cache = cache_.cache();
  write.tokens = std::accumulate(tokens_.begin(), tokens_.end(), 0);
  write.qkv = qkv_.data();
  write.sequences = sequences_.data();
  write.slots = slots_.data();
  write.q = q_.data();
  check_cuda(kvlab_write(&write, stream));
  const kvlab_prefill_args args = prefill();
  check_cuda(kvlab_prefill_attention(&args, stream));
}

void AppendingLayer::observe(cudaStream_t stream) {
  if (!computed_.empty()) make_features(stream);
  kvlab_observe_args args{.struct_size = sizeof(kvlab_observe_args)};
  args.prefill = prefill();
  args.needs = kvlab_policy_needs(policy_);
  if (args.needs == KVLAB_NOTHING) return;
  args.keys_end = cache_.cache().max_slots;
  args.threshold16 = threshold16_.data();
  args.seen = seen_.data();
  if (kvlab_policy_weighted(policy_)) args.weights = weights_.data(), args.tail = tail_;
  args.positions = positions_.data();
  args.appended = appended_.data();
  if (!observe_workspace_)
    observe_workspace_ = std::make_unique<Array<std::byte>>(kvlab_observe_workspace(&args));
  args.workspace = observe_workspace_->data();
  check_cuda(kvlab_observe(&args, stream));
}

void AppendingLayer::make_features(cudaStream_t stream) {
  kvlab_feature_args args{.struct_size = sizeof(kvlab_feature_args)};
  args.count = static_cast<int>(computed_.size());
  std::ranges::copy(computed_, args.features);
  args.key_row = static_cast<std::int64_t>(heads()) * size_.head_size;
  args.to = features_.data();
  args.output = output_.data();
  args.hidden = kHiddenSize;
  const std::byte* keys = qkv_.data() + query_bytes();
  for (int s = 0; s < sequences(); ++s) {
    args.cache = cache_.sequence(s);
    args.slots = new_slots_.data() + s * size_.kv_heads;
    args.tokens = tokens_[static_cast<std::size_t>(s)];
    args.keys = keys;
    args.unit_keys = unit_keys_.data() + s * size_.kv_heads * size_.head_size;
    args.appended = appended_.data() + s;
    if (args.tokens > 0) check_cuda(kvlab_compute_features(&args, stream));
    keys += static_cast<std::size_t>(args.tokens * heads()) * head_bytes();
  }
}

kvlab_compact_args AppendingLayer::end_args(const AppendingLayer& to) const {
  kvlab_compact_args args{.struct_size = sizeof(kvlab_compact_args)};
  args.from = cache_.cache();
  args.to = to.cache_.cache();
  args.policy = state();
  args.to_states = to.states_.data();
  args.to_features = to.features_.data();
  args.now = now_.data();
  args.appended = ended_.data();
  args.seen = kvlab_policy_needs(policy_) == KVLAB_NOTHING ? nullptr : seen_.data();
  args.workspace = compact_workspace_->data();
  args.weighted = 1;
  return args;
}

void AppendingLayer::ended(AppendingLayer& to) {
  keep_outputs();
  for (std::size_t s = 0; s < total_.size(); ++s)
    to.position_[s] = position_[s] + static_cast<std::uint32_t>(std::exchange(total_[s], 0));
  begun_ = 0;
  seen_.clear();
}

void AppendingLayer::keep_outputs() {
  const auto all = out_.to_host();
  auto from = all.begin();
  for (std::size_t s = 0; s < tokens_.size(); ++s) {
    const auto row = static_cast<std::ptrdiff_t>(query_bytes());
    outputs_.insert(outputs_.end(), from, from + right_[s] * row);
    from += tokens_[s] * row;
  }
}

cudaError_t AppendingLayer::share_prefix(int page) {
  const kvlab_cache_view cache = cache_.cache();
  const kvlab_prefix_args args{.struct_size = sizeof(kvlab_prefix_args),
                               .sequences = sequences() - 1,
                               .kv_heads = size_.kv_heads,
                               .tokens = total_.front(),
                               .first_slot = cache.first_slot,
                               .to_first_slot = cache.first_slot + size_.kv_heads,
                               .seen = seen_.data(),
                               .to_seen = seen_.data(),
                               .features = features_.data(),
                               .to_features = features_.data()};
  for (int s = 1; s < sequences(); ++s) {
    cache_.share_blocks(0, s, args.tokens / page);
    total_[static_cast<std::size_t>(s)] = args.tokens;
  }
  return kvlab_copy_prefix(policy_, &args, nullptr);
}

void AppendingLayer::append(const Counts& tokens, const Counts& right) {
  put(tokens, right);
  attend();
  observe();
  const kvlab_compact_args args = end_args(*this);
  check_cuda(kvlab_compact(policy_, &args, nullptr));
  ended(*this);
}

void AppendingLayer::decode() {
  const Counts one(position_.size(), 1);
  put(one, one);
  kvlab_evicting_attention_args args{.struct_size = sizeof(kvlab_evicting_attention_args)};
  args.cache = cache_.cache();
  args.policy = state();
  args.now = now_.data();
  args.q = q_.data();
  args.out = out_.data();
  args.workspace = workspace_->data();
  kvlab_write_args write{.struct_size = sizeof(kvlab_write_args)};
  write.cache = args.cache;
  write.tokens = sequences();
  write.qkv = qkv_.data();
  write.sequences = sequences_.data();
  write.now = now_.data();
  write.q = q_.data();
  check_cuda(kvlab_write(&write, nullptr));
  if (!computed_.empty()) make_features(nullptr);
  check_cuda(kvlab_evicting_attention(policy_, &args, nullptr));
  ended(*this);
}

void AppendingLayer::evict_to_budget() {
  const Counts none(position_.size(), 0);
  kvlab_compact_args args = end_args(*this);
  args.seen = nullptr;
  ended_.assign(std::vector<std::uint32_t>(position_.size()));
  now_.assign(position_);
  check_cuda(kvlab_compact(policy_, &args, nullptr));
  check_cuda(cudaDeviceSynchronize());
}

LiveTokens AppendingLayer::live(int pair) const {
  const kvlab_cache_view cache = cache_.cache();
  const auto count = static_cast<std::size_t>(pairs()), at = static_cast<std::size_t>(pair);
  const std::size_t slot_bytes = kvlab_policy_slot_bytes(policy_);
  const auto dim = static_cast<std::size_t>(size_.head_size);
  const auto first = static_cast<std::size_t>(to_host(cache.first_slot, count)[at]);
  const auto lengths = to_host(cache.lengths, count);
  const auto length = static_cast<std::size_t>(lengths[at]);
  std::size_t before = 0;  // rows() has no gaps between pairs
  const std::vector<int> capacities = slots_of(size_, max_tokens_ / sequences());
  for (std::size_t p = 0; p < at; ++p) before += static_cast<std::size_t>(capacities[p]);
  return {{"length", bytes(lengths, at, 1)},
          {"next slot", bytes(to_host(cache.next_slots, count), at, 1)},
          {"positions", bytes(to_host(cache.positions, cache_.slots()), first, length)},
          {"rows", bytes(cache_.rows(), before * 2 * head_bytes(), length * 2 * head_bytes())},
          {"states", bytes(states_.to_host(), first * slot_bytes, length * slot_bytes)},
          {"features", bytes(features_.to_host(), first * feature_count_, length * feature_count_)},
          {"unit keys", bytes(unit_keys_.to_host(), at * dim, dim)}};
}

}  // namespace kvlab
