#include "sim/device/head_tasks.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "kernels/host/transfer.hpp"

namespace kvlab {

using cuda::check;
using kernels::Type;
using Output = cuda::ProductArgs::Output;

namespace {

constexpr double kUsableMemory = 0.9;     // share of the free device memory that is used
constexpr std::size_t kMaxTasks = 65535;  // maximum number of head tasks in a kernel launch

}  // namespace

HeadTaskSizes sizes_of(const HeadTaskPlan& plan, const DeviceSweep& sweep, std::size_t configs) {
  if (sweep.tiers.copies() > 0) check_quantized_heads(plan.shape.head_size);
  const Type rounding = type_of(plan.arithmetic.rounding);
  return {.tokens = padded_tokens(plan.tokens),
          .group = plan.shape.group(),
          .dim = plan.shape.head_size,
          .pairs = static_cast<std::size_t>(pairs_of(plan.shape)),
          .head_groups = (plan.shape.group() + 3) / 4,
          .block = kernels::kMaxReplayQueries,
          .slots = static_cast<std::size_t>(sweep.task_slots),
          .configs = configs,
          .queries = plan.measured.size(),
          .samples = plan.measured.samples(),
          .block_samples = (kernels::kMaxReplayQueries + plan.measured.sample_every() - 1) /
                           plan.measured.sample_every(),
          .named = plan.measured.passages().size(),
          .token_features = sweep.feature_count,
          .state_stride = static_cast<std::size_t>(sweep.state_stride),
          .product_bytes = kernels::bytes_of(rounding),
          .element_bytes = bytes_of(plan.shape.dtype),
          .copies = sweep.tiers.copies(),
          .key_parts = static_cast<std::size_t>(kernels::replay_parts(rounding)),
          .value_parts = static_cast<std::size_t>(kernels::replay_parts(type_of(plan.shape.dtype))),
          .cache_positions = sweep.cache_positions,
          .rounds = rounding != KVLAB_F32,
          .uses_tiers = sweep.uses_tiers};
}

std::size_t tasks_at_once(const HeadTaskSizes& sizes, std::size_t landing, std::size_t together) {
  const cuda::MemoryInfo memory = cuda::memory_info();
  const auto usable = static_cast<std::size_t>(kUsableMemory * static_cast<double>(memory.free));
  const std::size_t task_bytes = bytes_of(sizes, 1),
                    fit = (usable - std::min(usable, landing)) / task_bytes;
  if (fit < together)
    throw std::runtime_error(fmt::format(
        "device memory: {} of this replay needs {}; only {} of {} are free; use fewer budgets at "
        "once, or --device cpu",
        together == 1 ? "one KV head" : "one layer",
        cuda::bytes_text(together * task_bytes + landing), cuda::bytes_text(memory.free),
        cuda::bytes_text(memory.total)));
  return std::min(fit, kMaxTasks) / together * together;
}

HeadTasks::HeadTasks(const HeadTaskPlan& plan, const DeviceSweep& sweep, const HeadTaskSizes& sizes,
                     std::span<const HeadTask> tasks, const Tables& tables, cuda::Products& product,
                     Streams& streams, std::size_t layers)
    : plan_(plan),
      sweep_(sweep),
      sizes_(sizes),
      count_(tasks.size() / layers),
      product_(product),
      streams_(streams),
      tables_(tables) {
  memory_ = cuda::allocate_layout(
      [&](cuda::Arena& arena) { lay_out(arena, sizes_, count_, parts_); }, "the replay");
  rules_ = cuda::upload(
      sweep.rules_of(plan.shape, plan.sequence, tasks, count_, parts_.features, sizes.tokens),
      "the replay");
  kernels::ReplayBlock& block = parts_.block;
  block.shape = {.tasks = static_cast<int>(count_),
                 .tokens = static_cast<int>(sizes.tokens),
                 .group = static_cast<int>(plan.shape.group()),
                 .head_size = static_cast<int>(plan.shape.head_size),
                 .rotated = static_cast<int>(plan.rope.rotated_dims()),
                 .softmax_scale = plan.arithmetic.softmax_scale,
                 .type = type_of(plan.shape.dtype),
                 .rounding = type_of(plan.arithmetic.rounding),
                 .threshold16 = plan.arithmetic.threshold16};
  block.measured = {tables.measured.as<std::int32_t>(),
                    static_cast<int>(plan.measured.size()),
                    static_cast<int>(plan.measured.blocks()),
                    static_cast<int>(plan.measured.sample_every()),
                    tables.named.as<int2>(),
                    static_cast<int>(plan.measured.passages().size())};
  block.sweep = {nullptr, static_cast<int>(sizes.configs), sweep.config_tasks()};
  block.sets.every = sizes.columns.gradient_samples ? 1 : block.measured.sample_every;
  set_layer(0);
  clear();
}

void HeadTasks::clear() {
  const auto zero = [&](auto part) {
    if (part.empty()) return;
    check(cudaMemsetAsync(part.data(), 0, part.size_bytes(), stream()), "clearing");
  };
  zero(parts_.progress);
  zero(parts_.sums);
  zero(parts_.errors);
}

kernels::ReplayKeepArgs HeadTasks::keep_args() const {
  const kernels::ReplayTensors tensors{parts_.queries,
                                       parts_.keys,
                                       parts_.values,
                                       tables_.rope.as<float2>(),
                                       tables_.coarse.as<float2>(),
                                       tables_.fine.as<float2>()};
  return {parts_.block, tensors, parts_.terms, parts_.counts, kept_bits_};
}
kernels::ReplayKeptArgs HeadTasks::kept_args() const {
  return {parts_.block, parts_.cache_positions.e, sweep_.sets(), parts_.copies};
}

template <class Use>
void HeadTasks::visit_walk(const Members& members, Use use) const {
  using kernels::ReplayTokens;
  const Members::Kind& kind = members.kind;
  const int layer_heads = kind.by_layer ? static_cast<int>(plan_.shape.kv_heads) : 0,
            max_tiers = static_cast<int>(members.max_tiers);
  const kernels::ReplayWalkArgs args{
      keep_args(), parts_.slots,      parts_.progress.data(), members.on_device.as<std::int32_t>(),
      layer_heads, members.max_slots, parts_.sums.data()};
  kernels::ReplayWalkPlan plan;
  check(kernels::plan_walk(args,
                           {static_cast<int>(members.configs.size()), kind.tokens, kind.largest,
                            kind.policy->slot_bytes, max_tiers},
                           plan),
        "querying the device's limits");
  if (kind.tokens == ReplayTokens::cache_positions)
    use(kernels::ReplayCachePositionArgs{args, parts_.cache_positions, parts_.paired_keys,
                                         parts_.key_scales, parts_.positions_in_cache},
        plan);
  else if (kind.tokens == ReplayTokens::tiered)
    use(kernels::ReplayTierArgs{args, parts_.copies, sweep_.tiers.tiers(), max_tiers,
                                parts_.slot_tiers},
        plan);
  else
    use(args, plan);
}

std::vector<Walk> HeadTasks::walks() const {
  std::vector<Walk> all;
  for (const Members& members : sweep_.members)
    visit_walk(members, [&](const auto&, const auto& plan) {
      all.push_back({members.kind.policy, plan.variant});
    });
  return all;
}

kernels::ReplayRotateArgs HeadTasks::rotation_of(const kernels::ReplayVectors& from) const {
  return {.from = from,
          .rope = tables_.rope.as<float2>(),
          .tokens = static_cast<int>(plan_.tokens),
          .head_size = parts_.block.shape.head_size,
          .rotated = parts_.block.shape.rotated,
          .rounding = parts_.block.shape.rounding};
}

void HeadTasks::copy(const kernels::ReplayVectors& from, std::size_t task, Part part) {
  kernels::ReplayRotateArgs args = rotation_of(from);
  args.rotated = 0;
  args.rounding = parts_.block.shape.type;
  args.rounded = (part == Part::k ? parts_.keys : parts_.values) +
                 task * sizes_.tokens * sizes_.dim * sizes_.element_bytes;
  check(kernels::replay_rotate(args, stream()), "reading keys and values");
}

void HeadTasks::take_keys(const kernels::ReplayVectors& from, std::size_t task) {
  const HeadTaskSizes& s = sizes_;
  const std::size_t task_offset = task * s.tokens * s.dim;
  if (parts_.paired_keys)
    check(kernels::replay_pair_keys(
              parts_.block.shape, static_cast<int>(plan_.tokens), from, parts_.block.shape.type,
              parts_.paired_keys + task * s.tokens * 2 * s.pairs * s.element_bytes,
              parts_.key_scales + task * s.tokens, stream()),
          "pairing keys");
  kernels::ReplayRotateArgs args = rotation_of(from);
  args.parts = parts_.key_parts ? parts_.key_parts + 3 * task_offset : nullptr;
  args.rounded = parts_.rounded_keys + task_offset * s.product_bytes;
  check(kernels::replay_rotate(args, stream()), "rotating keys");
}

void HeadTasks::take_queries(const kernels::ReplayVectors& from, std::size_t task,
                             std::uint32_t head) {
  const HeadTaskSizes& s = sizes_;
  const std::size_t task_offset = task * s.tokens * s.dim * s.group;
  kernels::ReplayRotateArgs args = rotation_of(from);
  args.group = static_cast<int>(s.group);
  args.group_head = static_cast<int>(head);
  if (parts_.plain_queries) {
    kernels::ReplayRotateArgs plain = args;
    plain.rotated = 0;
    plain.plain = parts_.plain_queries + task_offset;
    check(kernels::replay_rotate(plain, stream()), "reading queries");
  }
  args.plain = parts_.queries + task_offset;
  args.rounded = parts_.rounded_queries + task_offset * s.product_bytes;
  check(kernels::replay_rotate(args, stream()), "rotating queries");
}

void HeadTasks::make_copies() {
  if (sizes_.copies == 0) return;
  const auto make = [&](bool keys, Type type, const std::byte* exact) {
    check(kernels::replay_quantize({parts_.block.shape, parts_.copies, sweep_.tiers.paths(),
                                    sweep_.config_tasks(), keys, type, exact},
                                   stream()),
          "quantizing keys and values");
  };
  make(true, parts_.block.shape.rounding, parts_.rounded_keys);
  make(false, parts_.block.shape.type, parts_.values);
}

void HeadTasks::multiply(const HeadTaskProduct& product) {
  const auto stride = [](std::size_t n) { return static_cast<std::int64_t>(n); };
  product_({.type = product.type,
            .batches = static_cast<int>(count_),
            .rows = static_cast<int>(product.rows),
            .n = static_cast<int>(product.n),
            .k = static_cast<int>(product.k),
            .x = product.x.data,
            .x_row = stride(product.x.row),
            .x_batch = stride(product.x.task),
            .w = product.w.data,
            .w_row = stride(product.w.row),
            .w_batch = stride(product.w.task),
            .w_by_k = product.w_by_k,
            .y = product.y.data,
            .y_row = stride(product.y.row),
            .y_batch = stride(product.y.task),
            .output = product.output,
            .tf32 = product.tf32,
            .alignment = product.alignment},
           stream());
}

void HeadTasks::multiply_rows(std::uint32_t first, std::uint32_t count, std::byte* keys,
                              Output output) {
  const HeadTaskSizes& s = sizes_;
  const std::size_t query_size = s.group * s.dim;
  multiply({.type = parts_.block.shape.rounding,
            .rows = count * s.group,
            .n = first + count,
            .k = s.dim,
            .x = {parts_.rounded_queries + first * query_size * s.product_bytes, s.dim,
                  s.tokens * query_size},
            .w = {keys, s.dim, s.tokens * s.dim},
            .y = {parts_.products, s.tokens, s.block * s.group * s.tokens},
            .output = output});
}

/// Multiplies queries by keys that were not rounded. The result is the sum of three TF32 products
/// and has float32 precision.
void HeadTasks::multiply_parts(std::uint32_t first, std::uint32_t count) {
  check(kernels::replay_query_parts(parts_.block.shape, static_cast<int>(first),
                                    static_cast<int>(count), parts_.block.rows.block,
                                    parts_.queries, parts_.query_parts, stream()),
        "computing rows");
  const std::size_t tokens = sizes_.tokens, rows = sizes_.block * sizes_.group,
                    parts = 3 * sizes_.dim;
  multiply({.type = KVLAB_F32,
            .rows = count * sizes_.group,
            .n = first + count,
            .k = parts,
            .x = {parts_.query_parts, parts, rows * parts},
            .w = {parts_.key_parts, parts, tokens * parts},
            .y = {parts_.unrounded_products, tokens, rows * tokens},
            .tf32 = true});
}

void HeadTasks::make_rows(std::uint32_t first, std::uint32_t count) {
  parts_.block.rows.first = static_cast<int>(first);
  parts_.block.rows.count = static_cast<int>(count);
  multiply_rows(first, count, parts_.rounded_keys);
  if (parts_.key_parts) multiply_parts(first, count);
  const kernels::ReplayRowsArgs rows{.shape = parts_.block.shape,
                                     .measured = parts_.block.measured,
                                     .rows = parts_.block.rows,
                                     .cache_positions = parts_.cache_positions,
                                     .products = parts_.products,
                                     .unrounded = parts_.unrounded_products,
                                     .plain_queries = parts_.plain_queries,
                                     .rope = tables_.rope.as<float2>(),
                                     .values = parts_.values,
                                     .outputs = parts_.outputs,
                                     .exact_max = parts_.exact_max};
  check(kernels::replay_rows(rows, stream()), "computing rows");
  const std::size_t part = static_cast<std::size_t>(parts_.copies.vectors) * sizes_.product_bytes;
  std::byte* keys = parts_.quantized_keys;
  for (int copy = 1; copy <= parts_.copies.count; ++copy) {
    for (std::size_t p = 0; p < sizes_.key_parts; ++p, keys += part)
      multiply_rows(first, count, keys, p == 0 ? Output::float32 : Output::add_float32);
    check(kernels::replay_quantized_rows(rows, parts_.copies, copy, stream()), "computing rows");
  }
}

void HeadTasks::walk(const Walks& walks) {
  streams_.fork();
  for (std::size_t m = 0; m < sweep_.members.size(); ++m) {
    const std::shared_ptr<const PolicyEntry>& policy = sweep_.members[m].kind.policy;
    visit_walk(sweep_.members[m], [&](const auto& args, const auto& plan) {
      check(kernels::replay_walk(walks.kernel({policy, plan.variant}), plan, args,
                                 streams_.branch(m)),
            fmt::format("replaying {}", policy->info.name));
    });
  }
  if (!sweep_.windows.empty())
    check(kernels::replay_windows(
              {keep_args(), parts_.cache_positions, sweep_.windows_on_device.as<std::int32_t>(),
               static_cast<int>(sweep_.windows.size())},
              streams_.branch(sweep_.members.size())),
          "replaying windows");
  streams_.join();
}

/// Multiplies the gradients of the block's measured queries by all values that these queries see.
void HeadTasks::multiply_terms(std::uint32_t first, std::uint32_t count) {
  std::uint32_t begin = first, end = first + count;
  while (begin < end && !plan_.measured.contains(begin)) ++begin;
  while (begin < end && !plan_.measured.contains(end - 1)) --end;
  if (begin == end) return;
  parts_.terms.first = static_cast<int>(plan_.measured.index(begin));
  multiply_terms(begin, end, parts_.values, 0, Output::float32);
  const std::size_t part = static_cast<std::size_t>(parts_.copies.vectors) * sizes_.element_bytes;
  std::byte* values = parts_.quantized_values;
  for (int copy = 1; copy <= parts_.copies.count; ++copy)
    for (std::size_t p = 0; p < sizes_.value_parts; ++p, values += part)
      multiply_terms(begin, end, values, copy, p == 0 ? Output::float32 : Output::add_float32);
}

/// Multiplies the gradients of queries [begin, end) by one part of the values of copy `copy` of the
/// tokens (see kernels::ReplayCopies). Copy 0 holds the exact tokens.
void HeadTasks::multiply_terms(std::uint32_t begin, std::uint32_t end, std::byte* values, int copy,
                               Output output) {
  const HeadTaskSizes& s = sizes_;
  const std::size_t before = plan_.measured.index(begin),
                    queries = plan_.measured.index(end - 1) - before + 1,
                    token_terms = kernels::kMaxReplayQueries * s.terms();
  multiply(
      {.type = parts_.block.shape.type,
       .rows = end,
       .n = queries * s.terms(),
       .k = s.dim,
       .x = {values, s.dim, s.tokens * s.dim},
       .w = {parts_.gradients + before * s.gradient() * s.element_bytes, s.dim,
             s.queries * s.gradient()},
       .y = {parts_.terms.data + copy * parts_.copies.terms, token_terms, s.tokens * token_terms},
       .output = output});
}

void HeadTasks::replay_block(const Walks& walks, std::uint32_t first, std::uint32_t count,
                             void* outputs) {
  make_rows(first, count);
  if (sizes_.columns.gradient_samples) multiply_terms(first, count);
  walk(walks);
  check(kernels::replay_outputs({kept_args(), parts_.values, parts_.outputs, parts_.block_errors,
                                 sizes_.columns.residual > 0, outputs},
                                stream()),
        "computing outputs");
}

void HeadTasks::change() {
  check(kernels::replay_changes(
            {kept_args(), parts_.terms, parts_.term_scales, parts_.changes.data()}, stream()),
        "computing changes");
}

void HeadTasks::sum_metrics() {
  const auto fp16_copies = static_cast<int>(sizes_.configs - sweep_.fp16_copy.size());
  check(kernels::replay_metrics(
            {parts_.block, fp16_copies, static_cast<int>(sizes_.samples), parts_.counts,
             parts_.block_errors, parts_.block_residual, parts_.sums.data(), parts_.recalls.data(),
             parts_.errors.data(), parts_.residual.data()},
            stream()),
        "computing metrics");
}

int HeadTasks::waves(const Walks& walks) const {
  int all = 0;
  for (const Members& members : sweep_.members)
    visit_walk(members, [&](const auto&, const auto& plan) {
      int own = 0;
      check(kernels::replay_waves(walks.kernel({members.kind.policy, plan.variant}), plan, own),
            "querying the device's limits");
      all += own;
    });
  return all;
}

}  // namespace kvlab
