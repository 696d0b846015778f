#include "tests/kernels/paged_layer.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "policies/catalogue.hpp"
#include "policies/features/features.hpp"
#include "tests/kernels/attention_reference.hpp"

namespace kvlab {
namespace {

constexpr int kPoison = 0xFF;
constexpr int kGap = 3;          // slots between pairs, so that pairs begin at any slot
constexpr int kSpareBlocks = 5;  // unused blocks in the pool
constexpr std::int32_t kNoBlock = -(1 << 30);

template <class T>
std::unique_ptr<DeviceArray<T>> to_device(const std::vector<T>& values) {
  return std::make_unique<DeviceArray<T>>(std::span<const T>(values));
}
template <class T>
std::unique_ptr<DeviceArray<T>> make_poisoned(std::size_t size) {
  auto array = std::make_unique<DeviceArray<T>>(size);
  if (size > 0) check_cuda(cudaMemset(array->data(), kPoison, size * sizeof(T)));
  return array;
}
template <class T>
void overwrite(const DeviceArray<T>& array, const std::vector<T>& values) {
  array.assign(values);
}
void append(std::vector<std::byte>& all, const std::vector<std::byte>& more) {
  all.insert(all.end(), more.begin(), more.end());
}

}  // namespace

std::string LayerSize::name() const {
  return policy + " type " + std::to_string(type) + " numbering " + std::to_string(numbering) +
         " head size " + std::to_string(head_size) + " group " + std::to_string(group);
}

PagedCache::PagedCache(const LayerSize& size, const Paging& paging, const std::vector<int>& slots)
    : size_(size), paging_(paging), capacity_(slots) {
  for (const int capacity : capacity_) {
    first_.push_back(slots_);
    slots_ += capacity + kGap;
    max_slots_ = std::max(max_slots_, capacity);
  }
  pool_bytes_ = static_cast<std::size_t>(slots_) * row_bytes() * 2;
  if (paging_.page > 0) {
    const int rows = static_cast<int>(capacity_.size()) / (paging_.by_pair ? 1 : size_.kv_heads);
    max_blocks_ = (max_slots_ + paging_.page - 1) / paging_.page + 1;
    pool_blocks_ = rows * (max_blocks_ - 1) + kSpareBlocks;
    std::vector<std::int32_t> free(static_cast<std::size_t>(pool_blocks_));
    std::iota(free.begin(), free.end(), 0);
    std::mt19937 random(static_cast<unsigned>(paging_.page));
    std::shuffle(free.begin(), free.end(), random);
    blocks_.assign(static_cast<std::size_t>(rows * max_blocks_), kNoBlock);
    for (std::size_t pair = 0; pair < capacity_.size(); ++pair) {
      const std::size_t row =
          paging_.by_pair ? pair : pair / static_cast<std::size_t>(size_.kv_heads);
      for (int block = 0; block * paging_.page < capacity_[pair]; ++block) {
        auto& entry =
            blocks_[row * static_cast<std::size_t>(max_blocks_) + static_cast<std::size_t>(block)];
        if (entry != kNoBlock) continue;  // another KV head of the sequence has more slots
        entry = free.back();
        free.pop_back();
      }
    }
    const int heads = paging_.by_pair ? 1 : size_.kv_heads;
    pool_bytes_ = static_cast<std::size_t>(pool_blocks_ * paging_.page * heads) * row_bytes() * 2;
    device_blocks_ = to_device(blocks_);
  }
  pool_ = make_poisoned<std::byte>(pool_bytes_);
  first_slot_ = to_device(first_);
  lengths_ = std::make_unique<DeviceArray<std::int32_t>>(capacity_.size());
  next_slots_ = std::make_unique<DeviceArray<std::int32_t>>(capacity_.size());
  positions_ = make_poisoned<std::uint32_t>(this->slots());
  ages_ = make_poisoned<std::uint32_t>(this->slots());
}

std::size_t PagedCache::values_at() const {
  if (paging_.page > 0 && paging_.order == PoolOrder::keys_values)
    return static_cast<std::size_t>(paging_.page * (paging_.by_pair ? 1 : size_.kv_heads)) *
           row_bytes();
  return pool_bytes_ / 2;
}

kvlab_cache_view PagedCache::cache() const {
  kvlab_cache_view cache{};
  cache.type = size_.type;
  cache.sequences = static_cast<int>(capacity_.size()) / size_.kv_heads;
  cache.query_heads = size_.group * size_.kv_heads;
  cache.kv_heads = size_.kv_heads;
  cache.head_size = size_.head_size;
  cache.softmax_scale = 1 / std::sqrt(static_cast<float>(size_.head_size));
  cache.max_slots = max_slots_;
  cache.first_slot = first_slot_->data();
  cache.keys = pool_->data();
  cache.values = pool_->data() + values_at();
  cache.positions = positions_->data();
  cache.lengths = lengths_->data();
  cache.next_slots = next_slots_->data();
  if (size_.numbering == KVLAB_CACHE_POSITIONS) cache.ages = ages_->data();
  if (paging_.page == 0) return cache;
  const int heads = paging_.by_pair ? 1 : size_.kv_heads, dim = size_.head_size,
            page = paging_.page;
  const bool by_head = paging_.order == PoolOrder::head_slot;
  cache.pages.blocks = device_blocks_->data();
  cache.pages.page = page;
  cache.pages.max_blocks = max_blocks_;
  cache.pages.by_pair = paging_.by_pair ? 1 : 0;
  cache.pages.block_stride =
      std::int64_t{page} * heads * dim * (paging_.order == PoolOrder::keys_values ? 2 : 1);
  cache.pages.slot_stride = by_head ? dim : heads * dim;
  cache.pages.head_stride = paging_.by_pair ? 0 : by_head ? page * dim : dim;
  return cache;
}

kvlab_cache_view PagedCache::sequence(int index) const {
  kvlab_cache_view one = cache();
  const int pair = index * size_.kv_heads;
  one.sequences = 1;
  one.first_slot += pair;
  one.lengths += pair;
  one.next_slots += pair;
  if (paging_.page > 0) one.pages.blocks += (paging_.by_pair ? pair : index) * max_blocks_;
  return one;
}

void PagedCache::share_blocks(int from, int to, int count) {
  const int rows = paging_.by_pair ? size_.kv_heads : 1;
  for (int row = 0; row < rows; ++row)
    std::copy_n(blocks_.begin() + (from * rows + row) * max_blocks_, count,
                blocks_.begin() + (to * rows + row) * max_blocks_);
  device_blocks_->assign(blocks_);
}

std::size_t PagedCache::row_at(int pair, int slot) const {
  if (paging_.page == 0)
    return static_cast<std::size_t>(first_[static_cast<std::size_t>(pair)] + slot) * row_bytes();
  const int heads = paging_.by_pair ? 1 : size_.kv_heads, head = paging_.by_pair ? 0 : pair % heads;
  const int row = paging_.by_pair ? pair : pair / heads, page = paging_.page;
  const std::int64_t block = blocks_[static_cast<std::size_t>(row * max_blocks_ + slot / page)];
  const std::int64_t in_block = paging_.order == PoolOrder::head_slot ? head * page + slot % page
                                                                      : slot % page * heads + head;
  const std::int64_t rows_of_block =
      std::int64_t{page} * heads * (paging_.order == PoolOrder::keys_values ? 2 : 1);
  return static_cast<std::size_t>(block * rows_of_block + in_block) * row_bytes();
}

std::vector<std::byte> PagedCache::rows() const {
  const std::vector<std::byte> pool = pool_->to_host();
  const std::size_t values = values_at();
  std::vector<std::byte> all;
  for (std::size_t pair = 0; pair < capacity_.size(); ++pair)
    for (int slot = 0; slot < capacity_[pair]; ++slot)
      for (const std::size_t base : {std::size_t{0}, values}) {
        const auto at =
            pool.begin() + static_cast<std::ptrdiff_t>(base + row_at(static_cast<int>(pair), slot));
        all.insert(all.end(), at, at + static_cast<std::ptrdiff_t>(row_bytes()));
      }
  return all;
}

std::size_t PagedCache::strays() const {
  std::vector<std::byte> pool = pool_->to_host();
  const std::size_t values = values_at();
  for (std::size_t pair = 0; pair < capacity_.size(); ++pair)
    for (int slot = 0; slot < capacity_[pair]; ++slot)
      for (const std::size_t base : {std::size_t{0}, values})
        std::fill_n(
            pool.begin() + static_cast<std::ptrdiff_t>(base + row_at(static_cast<int>(pair), slot)),
            row_bytes(), std::byte{kPoison});
  return pool.size() - static_cast<std::size_t>(std::ranges::count(pool, std::byte{kPoison}));
}

namespace {

/// Makes one stream wait for another.
class Event {
 public:
  Event() { check_cuda(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() { cudaEventDestroy(event_); }
  void hold(cudaStream_t waiting, cudaStream_t ahead) const {
    check_cuda(cudaEventRecord(event_, ahead));
    check_cuda(cudaStreamWaitEvent(waiting, event_, 0));
  }

 private:
  cudaEvent_t event_ = nullptr;
};

/// A run: its two caches, and all other arguments of its kernels.
class Run {
 public:
  Run(const LayerSize& size, const Paging& prompt, const Paging& resident);

  void run_prompts();
  void decode(int steps);
  LayerLeft left() const;

 private:
  int sequences() const { return static_cast<int>(size_.prompts.size()); }
  int pairs() const { return sequences() * size_.kv_heads; }
  int query_heads() const { return size_.group * size_.kv_heads; }
  std::size_t row_elements() const {
    return static_cast<std::size_t>((query_heads() + 2 * size_.kv_heads) * size_.head_size);
  }
  std::size_t element() const { return size_.type == KVLAB_F32 ? 4 : 2; }
  std::vector<std::byte> sample_qkv(int tokens);
  const PagedCache& resident() const { return size_.in_place ? *prompt_ : *resident_; }
  kvlab_policy_state state(const DeviceArray<std::byte>& states,
                           const DeviceArray<float>& features) const;
  void write_prompts();
  void attend_prompt(int sequence, std::size_t first_token);
  void make_features(const kvlab_cache_view& cache, const std::byte* qkv, int tokens,
                     const std::uint32_t* now, float* unit_keys, float* to, cudaStream_t stream);
  void compact_prompts();
  void enqueue_step(cudaStream_t stream);

  LayerSize size_;
  const kvlab_policy* policy_;
  std::vector<kvlab_feature> feature_ids_;
  std::mt19937 random_{5};
  std::unique_ptr<PagedCache> prompt_, resident_;
  template <class T>
  using Array = std::unique_ptr<DeviceArray<T>>;
  Array<std::byte> qkv_, q_, out_, output_, prompt_states_, states_, params_, workspace_,
      compact_workspace_;
  Array<float> rope_, inv_freq_, lse_, unit_keys_, prompt_features_, features_;
  Array<std::int32_t> rope_rows_, token_sequences_, token_slots_;
  Array<std::uint32_t> now_, appended_, threshold16_, ids_;
  Array<std::uint64_t> seeds_;
  Array<kvlab_rule> rules_;
  Array<kvlab_observation> prompt_seen_, seen_;
  std::vector<std::byte> prompt_outputs_, step_outputs_;
  Stream second_;
  Event attended_, chosen_;
};

constexpr int kMaxPositions = 1 << 14, kHidden = 72;

std::vector<int> prompt_slots(const LayerSize& size, const std::vector<int>& budgets) {
  std::vector<int> slots;
  for (const int tokens : size.prompts)
    for (int head = 0; head < size.kv_heads; ++head)
      slots.push_back(std::max(tokens, budgets[slots.size()]));
  return slots;
}

std::vector<int> budgets_of(const LayerSize& size) {
  std::vector<int> budgets;
  while (budgets.size() < size.prompts.size() * static_cast<std::size_t>(size.kv_heads))
    budgets.push_back(size.budgets[budgets.size() % size.budgets.size()]);
  return budgets;
}

const kvlab_policy* policy_of(const LayerSize& size) {
  if (size.header.empty()) return kvlab_find_policy(size.policy.c_str());
  const std::string path = KVLAB_SOURCE_DIR "/policies/" + size.header;
  const kvlab_policy* policy = nullptr;
  std::string log(10'000, '\0');
  if (kvlab_compile_policy(path.c_str(), &policy, log.data(), log.size()) != cudaSuccess)
    throw std::invalid_argument(log);
  return policy;
}

Run::Run(const LayerSize& size, const Paging& prompt, const Paging& resident)
    : size_(size), policy_(policy_of(size)) {
  if (policy_ == nullptr) throw std::invalid_argument("no policy " + size.policy);
  for (int i = 0; const char* name = kvlab_policy_feature(policy_, i); ++i)
    feature_ids_.push_back(static_cast<kvlab_feature>(built_in_feature(name).value()));
  const std::vector<int> budgets = budgets_of(size_);
  prompt_ = std::make_unique<PagedCache>(size_, prompt, prompt_slots(size_, budgets));
  resident_ = std::make_unique<PagedCache>(size_, resident, budgets);
  const std::size_t slot_bytes = kvlab_policy_slot_bytes(policy_), features = feature_ids_.size();
  prompt_states_ = make_poisoned<std::byte>(prompt_->slots() * slot_bytes);
  states_ = make_poisoned<std::byte>(resident_->slots() * slot_bytes);
  prompt_features_ = make_poisoned<float>(prompt_->slots() * features);
  features_ = make_poisoned<float>(resident_->slots() * features);
  prompt_seen_ = std::make_unique<DeviceArray<kvlab_observation>>(prompt_->slots());
  seen_ = make_poisoned<kvlab_observation>(this->resident().slots());
  unit_keys_ =
      std::make_unique<DeviceArray<float>>(static_cast<std::size_t>(pairs() * size_.head_size));

  std::vector<kvlab_rule> rules;
  for (const int budget : budgets) {
    const auto tokens = static_cast<std::uint32_t>(budget);
    rules.push_back({tokens, std::min(4u, tokens - 1),
                     size_.numbering == KVLAB_CACHE_POSITIONS_ROTATED ? 0 : tokens / 4, 0});
  }
  rules_ = to_device(rules);
  const std::vector<double> values = parse_policy(size_.policy).params;
  std::vector<std::byte> one(kvlab_policy_params_bytes(policy_)), params;
  check_cuda(
      kvlab_policy_params(policy_, values.data(), static_cast<int>(values.size()), one.data()));
  for (int s = 0; s < sequences(); ++s) append(params, one);
  params_ = to_device(params);
  const auto count = static_cast<std::size_t>(sequences());
  threshold16_ = to_device(std::vector<std::uint32_t>(count, 655));
  std::vector<std::uint32_t> ids(count);
  std::iota(ids.begin(), ids.end(), 3u);
  ids_ = to_device(ids);
  seeds_ = to_device(std::vector<std::uint64_t>(count, 42));
  now_ = std::make_unique<DeviceArray<std::uint32_t>>(count);
  std::vector<std::uint32_t> appended(size_.prompts.begin(), size_.prompts.end());
  appended_ = to_device(appended);

  std::vector<float> rope, inv_freq;
  const int half = size_.head_size / 2;
  for (int i = 0; i < half; ++i)
    inv_freq.push_back(std::pow(10000.0f, -static_cast<float>(i) / static_cast<float>(half)));
  for (int position = 0; position < kMaxPositions; ++position)
    for (const float frequency : inv_freq) {
      const double angle = position * double{frequency};
      rope.push_back(static_cast<float>(std::cos(angle)));
      rope.push_back(static_cast<float>(std::sin(angle)));
    }
  rope_ = to_device(rope);
  inv_freq_ = to_device(inv_freq);
  const std::size_t outputs = count * static_cast<std::size_t>(query_heads());
  std::mt19937 model_random(7);
  output_ = to_device(kernels::encode(
      size_.type,
      kernels::random_values(size_.type,
                             static_cast<std::size_t>(kHidden * query_heads() * size_.head_size),
                             model_random)));
  lse_ = make_poisoned<float>(outputs);
  out_ = make_poisoned<std::byte>(outputs * static_cast<std::size_t>(size_.head_size) * element());
  const kvlab_cache_view cache = this->resident().cache();
  workspace_ =
      std::make_unique<DeviceArray<std::byte>>(kvlab_evicting_attention_workspace(policy_, &cache));
  const kvlab_cache_view from = prompt_->cache();
  compact_workspace_ = make_poisoned<std::byte>(kvlab_compact_workspace(&from));
}

std::vector<std::byte> Run::sample_qkv(int tokens) {
  return kernels::encode(
      size_.type, kernels::random_values(
                      size_.type, static_cast<std::size_t>(tokens) * row_elements(), random_));
}

kvlab_policy_state Run::state(const DeviceArray<std::byte>& states,
                              const DeviceArray<float>& features) const {
  kvlab_policy_state state{};
  state.states = states.data();
  state.rules = rules_->data();
  state.params = params_->data();
  state.threshold16 = threshold16_->data();
  state.seeds = seeds_->data();
  state.sequence_ids = ids_->data();
  state.layer = 2;
  state.features = features.data();
  return state;
}

void Run::run_prompts() {
  write_prompts();
  std::size_t first = 0;
  for (int s = 0; s < sequences(); ++s) {
    attend_prompt(s, first);
    if (!feature_ids_.empty()) {
      const auto pair = static_cast<std::size_t>(s * size_.kv_heads * size_.head_size);
      make_features(prompt_->sequence(s), qkv_->data() + first * row_elements() * element(),
                    size_.prompts[static_cast<std::size_t>(s)], nullptr, unit_keys_->data() + pair,
                    prompt_features_->data(), nullptr);
    }
    first += static_cast<std::size_t>(size_.prompts[static_cast<std::size_t>(s)]);
  }
  compact_prompts();
  check_cuda(cudaDeviceSynchronize());
}

/// Writes the tokens of all prompts in one call.
void Run::write_prompts() {
  std::vector<std::int32_t> sequence, slot;
  for (int s = 0; s < sequences(); ++s)
    for (int token = 0; token < size_.prompts[static_cast<std::size_t>(s)]; ++token) {
      sequence.push_back(s);
      slot.push_back(token);
    }
  const int tokens = static_cast<int>(slot.size());
  qkv_ = to_device(sample_qkv(tokens));
  q_ = make_poisoned<std::byte>(static_cast<std::size_t>(tokens * query_heads() * size_.head_size) *
                                element());
  token_sequences_ = to_device(sequence);
  token_slots_ = to_device(slot);
  kvlab_write_args args{.struct_size = sizeof(kvlab_write_args)};
  args.cache = prompt_->cache();
  args.tokens = tokens;
  args.qkv = qkv_->data();
  args.rotated = size_.numbering == KVLAB_CACHE_POSITIONS ? 0 : size_.head_size;
  args.rope = rope_->data();
  args.rope_rows = token_slots_->data();
  args.sequences = token_sequences_->data();
  args.slots = token_slots_->data();
  args.q = q_->data();
  check_cuda(kvlab_write(&args, nullptr));
}

void Run::attend_prompt(int sequence, std::size_t first_token) {
  const kvlab_cache_view one = prompt_->sequence(sequence);
  const int queries = size_.prompts[static_cast<std::size_t>(sequence)];
  const auto rows = static_cast<std::size_t>(queries * query_heads());
  const std::size_t head = static_cast<std::size_t>(size_.head_size) * element();
  const DeviceArray<std::byte> out(rows * head);
  const DeviceArray<kvlab_row_softmax> softmax(rows);
  kvlab_observe_args args{.struct_size = sizeof(kvlab_observe_args)};
  kvlab_prefill_args& prefill = args.prefill;
  prefill.struct_size = sizeof prefill;
  prefill.type = size_.type;
  prefill.query_heads = query_heads();
  prefill.kv_heads = size_.kv_heads;
  prefill.head_size = size_.head_size;
  prefill.softmax_scale = one.softmax_scale;
  prefill.queries = queries;
  prefill.q = q_->data() + first_token * static_cast<std::size_t>(query_heads()) * head;
  prefill.keys = one.keys;
  prefill.values = one.values;
  prefill.first_slot = one.first_slot;
  prefill.out = out.data();
  prefill.rows = softmax.data();
  prefill.pages = one.pages;
  check_cuda(kvlab_prefill_attention(&prefill, nullptr));
  append(prompt_outputs_, out.to_host());
  args.needs = kvlab_policy_needs(policy_);
  if (args.needs == KVLAB_NOTHING) return;
  args.keys_end = queries;
  args.threshold16 = threshold16_->data();
  args.seen = prompt_seen_->data();
  const DeviceArray<std::byte> workspace(kvlab_observe_workspace(&args));
  args.workspace = workspace.data();
  check_cuda(kvlab_observe(&args, nullptr));
  check_cuda(cudaDeviceSynchronize());
}

void Run::make_features(const kvlab_cache_view& cache, const std::byte* qkv, int tokens,
                        const std::uint32_t* now, float* unit_keys, float* to,
                        cudaStream_t stream) {
  kvlab_feature_args args{.struct_size = sizeof(kvlab_feature_args)};
  args.cache = cache;
  args.count = static_cast<int>(feature_ids_.size());
  std::ranges::copy(feature_ids_, args.features);
  args.slots = cache.next_slots;
  args.tokens = tokens;
  args.now = now;
  args.keys = qkv + static_cast<std::size_t>(query_heads() * size_.head_size) * element();
  args.key_row = static_cast<std::int64_t>(row_elements());
  args.unit_keys = unit_keys;
  args.to = to;
  args.output = output_->data();
  args.hidden = kHidden;
  check_cuda(kvlab_compute_features(&args, stream));
}

void Run::compact_prompts() {
  kvlab_compact_args args{.struct_size = sizeof(kvlab_compact_args)};
  args.from = prompt_->cache();
  args.to = resident().cache();
  args.policy = state(*prompt_states_, *prompt_features_);
  args.to_states = (size_.in_place ? prompt_states_ : states_)->data();
  args.to_features = (size_.in_place ? prompt_features_ : features_)->data();
  args.now = now_->data();
  args.appended = appended_->data();
  args.seen = kvlab_policy_needs(policy_) == KVLAB_NOTHING ? nullptr : prompt_seen_->data();
  args.workspace = compact_workspace_->data();
  args.weighted = 1;
  check_cuda(kvlab_compact(policy_, &args, nullptr));
  const kvlab_cache_view cache = resident().cache();
  if (cache.ages != nullptr) check_cuda(kvlab_compute_ages(&cache, nullptr));
}

void Run::enqueue_step(cudaStream_t stream) {
  const kvlab_cache_view cache = resident().cache();
  kvlab_write_args write{.struct_size = sizeof(kvlab_write_args)};
  write.cache = cache;
  write.tokens = sequences();
  write.qkv = qkv_->data();
  write.rotated = size_.numbering == KVLAB_CACHE_POSITIONS ? 0 : size_.head_size;
  write.rope = rope_->data();
  write.rope_rows = rope_rows_->data();
  write.sequences = token_sequences_->data();
  write.now = now_->data();
  write.q = q_->data();
  check_cuda(kvlab_write(&write, stream));
  const auto& features = size_.in_place ? *prompt_features_ : *features_;
  if (!feature_ids_.empty())
    make_features(cache, qkv_->data(), 1, now_->data(), unit_keys_->data(), features.data(),
                  stream);
  kvlab_evicting_attention_args args{.struct_size = sizeof(kvlab_evicting_attention_args)};
  args.cache = cache;
  args.policy = state(size_.in_place ? *prompt_states_ : *states_, features);
  args.policy.seen = seen_->data();
  args.numbering = size_.numbering;
  args.now = now_->data();
  args.q = q_->data();
  args.inv_freq = inv_freq_->data();
  args.rotated = size_.head_size;
  args.rope_factor = 1;
  args.out = out_->data();
  args.lse = lse_->data();
  args.workspace = workspace_->data();
  args.settled = size_.settled ? 1 : 0;
  if (!size_.two_streams) return check_cuda(kvlab_evicting_attention(policy_, &args, stream));
  check_cuda(kvlab_attend(policy_, &args, stream));
  attended_.hold(second_.get(), stream);
  check_cuda(kvlab_choose_victims(policy_, &args, 1, second_.get()));
  chosen_.hold(stream, second_.get());
}

void Run::decode(int steps) {
  std::vector<std::int32_t> all(static_cast<std::size_t>(sequences()));
  std::iota(all.begin(), all.end(), 0);
  token_sequences_ = to_device(all);
  rope_rows_ = to_device(all);
  qkv_ = to_device(sample_qkv(sequences()));
  q_ = make_poisoned<std::byte>(
      static_cast<std::size_t>(sequences() * query_heads() * size_.head_size) * element());
  std::vector<int> tokens = size_.prompts;
  std::unique_ptr<CapturedGraph> graph;
  const Stream stream;
  if (size_.captured)
    graph = std::make_unique<CapturedGraph>([&](cudaStream_t to) {
      enqueue_step(to);
      return cudaSuccess;
    });
  for (int step = 0; step < steps; ++step) {
    std::vector<std::uint32_t> now;
    std::vector<std::int32_t> rows;
    for (std::size_t s = 0; s < all.size(); ++s) {
      rows.push_back(tokens[s]);
      const bool idle = s == 1 && step % 3 == 2;
      now.push_back(idle ? KVLAB_IDLE : static_cast<std::uint32_t>(tokens[s]++));
    }
    overwrite(*qkv_, sample_qkv(sequences()));
    overwrite(*now_, now);
    overwrite(*rope_rows_, rows);
    check_cuda(cudaDeviceSynchronize());
    if (graph)
      graph->launch();
    else
      enqueue_step(stream.get());
    append(step_outputs_, out_->to_host());
    const auto lse = lse_->to_host();
    const auto bytes = std::as_bytes(std::span(lse));
    step_outputs_.insert(step_outputs_.end(), bytes.begin(), bytes.end());
  }
}

template <class T>
std::vector<std::byte> bytes_of(const DeviceArray<T>& array) {
  const std::vector<T> values = array.to_host();
  const auto bytes = std::as_bytes(std::span(values));
  return {bytes.begin(), bytes.end()};
}
template <class T>
std::vector<T> copied(const T* from, std::size_t count) {
  std::vector<T> values(count);
  if (from != nullptr)
    check_cuda(cudaMemcpy(values.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost));
  return values;
}

LayerLeft Run::left() const {
  check_cuda(cudaDeviceSynchronize());
  const kvlab_cache_view cache = resident().cache();
  const auto pairs_count = static_cast<std::size_t>(pairs());
  return {.prompt_outputs = prompt_outputs_,
          .step_outputs = step_outputs_,
          .rows = resident().rows(),
          .states = (size_.in_place ? prompt_states_ : states_)->to_host(),
          .features = bytes_of(size_.in_place ? *prompt_features_ : *features_),
          .seen = bytes_of(*seen_),
          .positions = copied(cache.positions, resident().slots()),
          .ages = copied(cache.ages, resident().slots()),
          .lengths = copied(cache.lengths, pairs_count),
          .next_slots = copied(cache.next_slots, pairs_count),
          .strays = prompt_->strays() + resident_->strays()};
}

}  // namespace

LayerLeft run_layer(const LayerSize& size, const Paging& prompt, const Paging& resident,
                    int steps) {
  Run run(size, prompt, resident);
  run.run_prompts();
  run.decode(steps);
  return run.left();
}

}  // namespace kvlab
