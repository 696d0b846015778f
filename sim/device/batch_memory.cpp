#include "sim/device/batch_memory.hpp"

namespace kvlab {

using cuda::Arena;

namespace {

template <class T>
std::span<T> take_span(Arena& arena, std::size_t count) {
  return {arena.take<T>(count), count};
}

void lay_out_tensors(Arena& arena, const HeadTaskSizes& s, std::size_t tasks, BatchParts& parts) {
  const std::size_t rows = tasks * s.tokens, vectors = rows * s.dim;
  parts.queries = arena.take<float>(vectors * s.group);
  parts.keys = arena.take<std::byte>(vectors * s.element_bytes);
  parts.values = arena.take<std::byte>(vectors * s.element_bytes);
  parts.rounded_queries = arena.take<std::byte>(vectors * s.group * s.product_bytes);
  parts.rounded_keys = arena.take<std::byte>(vectors * s.product_bytes);
  kernels::ReplayCopies& copies = parts.copies;
  copies.count = static_cast<int>(s.copies);
  copies.vectors = static_cast<std::int64_t>(vectors);
  copies.keys = parts.quantized_keys =
      arena.take<std::byte>(s.copies * vectors * s.key_parts * s.product_bytes);
  copies.values = parts.quantized_values =
      arena.take<std::byte>(s.copies * vectors * s.value_parts * s.element_bytes);
  if (s.keeps_unrounded()) {
    parts.key_parts = arena.take<float>(vectors * 3);
    parts.query_parts = arena.take<float>(tasks * s.block * s.group * 3 * s.dim);
  }
  if (s.cache_positions) {
    parts.plain_queries = arena.take<float>(vectors * s.group);
    parts.paired_keys = arena.take<std::byte>(rows * 2 * s.pairs * s.element_bytes);
    parts.key_scales = arena.take<float>(rows);
  }
  parts.features = arena.take<float>(rows * s.token_features);
}

void lay_out_rows(Arena& arena, const HeadTaskSizes& s, std::size_t tasks, BatchParts& parts) {
  const std::size_t queries = tasks * s.block, head_groups = queries * s.head_groups;
  parts.products = arena.take<float>(queries * s.group * s.tokens);
  if (s.keeps_unrounded())
    parts.unrounded_products = arena.take<float>(queries * s.group * s.tokens);
  kernels::ReplayRows& rows = parts.block.rows;
  rows.block = static_cast<int>(s.block);
  parts.copies.rows = static_cast<std::int64_t>(head_groups * s.tokens);
  rows.e = arena.take<float4>((1 + s.copies) * head_groups * s.tokens);
  if (s.copies) parts.exact_max = arena.take<float4>(head_groups);
  if (s.cache_positions)
    parts.cache_positions = {
        .e = s.keeps_unrounded() ? arena.take<float4>(head_groups * s.tokens) : rows.e,
        .max_logits = arena.take<float4>(head_groups),
        .fragments = arena.take<uint4>(head_groups * s.pairs * 2),
        .scales = arena.take<float4>(head_groups)};
  rows.sums = arena.take<float4>(head_groups);
  rows.request_threshold = arena.take<float4>(head_groups);
  rows.wanted = arena.take<uint4>(head_groups);
  if (s.metrics) parts.outputs = arena.take<float>(queries * s.group * s.dim);
}

void lay_out_slots(Arena& arena, const HeadTaskSizes& s, std::size_t tasks, BatchParts& parts) {
  const std::size_t count = tasks * s.slots;
  kernels::ReplaySlots& slots = parts.slots;
  slots.task_stride = static_cast<std::int64_t>(s.slots);
  slots.state_stride = static_cast<int>(s.state_stride);
  slots.planes = s.cache_positions ? kernels::kReplayAhead : 1;
  slots.states = arena.take<std::byte>(count * s.state_stride);
  slots.positions = arena.take<std::uint32_t>(count);
  slots.holes = arena.take<std::uint32_t>(count);
  slots.fillers = arena.take<std::uint32_t>(count);
  slots.ranks = arena.take<std::uint64_t>(count);
  slots.seen = arena.take<Observation>(count);
  slots.direct = arena.take<float4>(count * s.head_groups * static_cast<std::size_t>(slots.planes));
  if (s.cache_positions) parts.positions_in_cache = arena.take<std::uint32_t>(count);
  if (s.uses_tiers) parts.slot_tiers = arena.take<std::uint8_t>(count);
}

void lay_out_sets(Arena& arena, const HeadTaskSizes& s, std::size_t caches, BatchParts& parts) {
  const std::size_t sampled = caches * s.block_samples, kept = caches * s.block_kept();
  kernels::ReplayKeptSets& sets = parts.block.sets;
  sets.capacity = static_cast<int>(s.block_kept());
  sets.samples = static_cast<int>(s.block_samples);
  sets.shared = arena.take<std::uint32_t>(kept * s.words());
  sets.quantized = arena.take<std::uint32_t>(kept * s.copies * s.words());
  sets.kept = arena.take<kernels::ReplayKept>(kept);
  sets.values = arena.take<float>(sampled * s.group * s.dim);
  sets.changes = arena.take<float>(kept * s.terms());
}

void lay_out_metrics(Arena& arena, const HeadTaskSizes& s, std::size_t tasks, BatchParts& parts) {
  const std::size_t caches = tasks * s.configs, sampled = caches * s.block_samples;
  const auto counts = caches * s.block * s.head_groups * 4;
  parts.counts = {arena.take<float>(counts), arena.take<std::uint32_t>(counts),
                  arena.take<std::uint32_t>(caches * s.block)};
  parts.block_errors = arena.take<double2>(sampled * kernels::kMaxReplayGroup);
  if (s.columns.residual) {
    parts.sketches = arena.take<float>(tasks * s.group * s.dim * kernels::kReplayResiduals);
    parts.block_residual = arena.take<float>(sampled * kernels::kReplayResiduals);
    parts.residual = take_span<float>(arena, caches * s.samples * kernels::kReplayResiduals);
  }
  if (s.columns.gradient_samples) {
    parts.gradients = arena.take<std::byte>(tasks * s.queries * s.gradient() * s.element_bytes);
    const std::size_t terms = tasks * s.tokens * kernels::kMaxReplayQueries * s.terms();
    parts.copies.terms = static_cast<std::int64_t>(terms);
    parts.terms.gradient_samples = static_cast<int>(s.columns.gradient_samples);
    parts.terms.data = arena.take<float>((1 + s.copies) * terms);
    parts.term_scales = arena.take<float>(tasks * s.queries);
    parts.changes = take_span<float>(arena, caches * s.queries * s.columns.gradient_samples);
  }
  parts.sums = take_span<double>(arena, caches * SumsShape{s.head_groups, s.named}.size());
  parts.recalls = take_span<float>(arena, caches * s.queries * s.group);
  parts.errors = take_span<double>(arena, caches * s.samples * 2);
}

}  // namespace

void lay_out(Arena& arena, const HeadTaskSizes& sizes, std::size_t tasks, BatchParts& parts) {
  const std::size_t caches = tasks * sizes.configs;
  lay_out_tensors(arena, sizes, tasks, parts);
  lay_out_rows(arena, sizes, tasks, parts);
  lay_out_slots(arena, sizes, tasks, parts);
  parts.progress = take_span<kernels::ReplayProgress>(arena, caches);
  lay_out_sets(arena, sizes, caches, parts);
  if (sizes.metrics) lay_out_metrics(arena, sizes, tasks, parts);
}

std::size_t bytes_of(const HeadTaskSizes& sizes, std::size_t tasks) {
  BatchParts parts{};
  return cuda::layout_bytes([&](Arena& arena) { lay_out(arena, sizes, tasks, parts); });
}

}  // namespace kvlab
