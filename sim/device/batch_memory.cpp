#include "sim/device/batch_memory.hpp"

namespace kvlab {

using cuda::Arena;
using kernels::ReplayArgs;

namespace {

template <class T>
std::span<T> take_span(Arena& arena, std::size_t count) {
  return {arena.take<T>(count), count};
}

void lay_out_tensors(Arena& arena, const UnitSizes& s, std::size_t units, BatchParts& parts,
                     ReplayArgs& args) {
  const std::size_t rows = units * s.tokens, vectors = rows * s.dim;
  parts.queries = arena.take<float>(vectors * s.group);
  parts.keys = arena.take<std::byte>(vectors * s.element_bytes);
  parts.values = arena.take<std::byte>(vectors * s.element_bytes);
  parts.rounded_queries = arena.take<std::byte>(vectors * s.group * s.product_bytes);
  parts.rounded_keys = arena.take<std::byte>(vectors * s.product_bytes);
  kernels::ReplayCopies& copies = args.copies;
  copies.count = static_cast<int>(s.copies);
  copies.vectors = static_cast<std::int64_t>(vectors);
  copies.keys = parts.coded_keys =
      arena.take<std::byte>(s.copies * vectors * s.key_parts * s.product_bytes);
  copies.values = parts.coded_values =
      arena.take<std::byte>(s.copies * vectors * s.value_parts * s.element_bytes);
  if (s.unrounded()) {
    parts.key_parts = arena.take<float>(vectors * 3);
    parts.query_parts = arena.take<float>(units * s.block * s.group * 3 * s.dim);
  }
  if (s.squeezed) {
    parts.plain_queries = arena.take<float>(vectors * s.group);
    parts.paired_keys = arena.take<std::byte>(rows * 2 * s.pairs * s.element_bytes);
    parts.key_scales = arena.take<float>(rows);
  }
  parts.columns = arena.take<float>(rows * s.token_columns);
  args.columns = parts.columns;
  args.column_count = static_cast<std::uint32_t>(s.token_columns);
  args.tensors.queries = parts.queries;
  args.tensors.keys = parts.keys;
  args.tensors.values = parts.values;
  args.tensors.plain_queries = parts.plain_queries;
  args.tensors.paired_keys = parts.paired_keys;
  args.tensors.key_scales = parts.key_scales;
}

void lay_out_rows(Arena& arena, const UnitSizes& s, std::size_t units, BatchParts& parts,
                  ReplayArgs& args) {
  const std::size_t queries = units * s.block, quads = queries * s.quads;
  parts.products = arena.take<float>(queries * s.group * s.tokens);
  if (s.unrounded()) parts.unrounded_products = arena.take<float>(queries * s.group * s.tokens);
  kernels::ReplayRows& rows = args.rows;
  rows.block = static_cast<int>(s.block);
  args.copies.rows = static_cast<std::int64_t>(quads * s.tokens);
  rows.e = arena.take<float4>((1 + s.copies) * quads * s.tokens);
  if (s.copies) rows.exact_most = arena.take<float4>(quads);
  if (s.squeezed) {
    rows.squeezed = s.unrounded() ? arena.take<float4>(quads * s.tokens) : rows.e;
    rows.most = arena.take<float4>(quads);
    rows.fragments = arena.take<uint4>(quads * s.pairs * 2);
    rows.scales = arena.take<float4>(quads);
  }
  rows.sums = arena.take<float4>(quads);
  rows.least = arena.take<float4>(quads);
  rows.wanted = arena.take<uint4>(quads);
  if (!s.figures) return;
  rows.outputs = arena.take<float>(queries * s.group * s.dim);
  args.windows = arena.take<float4>(s.windows * quads * 4);  // by query head
}

void lay_out_caches(Arena& arena, const UnitSizes& s, std::size_t units, ReplayArgs& args) {
  const std::size_t slots = units * s.slots;
  kernels::ReplayCaches& caches = args.caches;
  caches.unit_slots = static_cast<std::int64_t>(s.slots);
  caches.slot_stride = static_cast<int>(s.slot_stride);
  caches.planes = s.squeezed ? kernels::kReplayAhead : 1;
  caches.states = arena.take<std::byte>(slots * s.slot_stride);
  caches.positions = arena.take<std::uint32_t>(slots);
  caches.places = arena.take<std::uint32_t>(slots);
  caches.holes = arena.take<std::uint32_t>(slots);
  caches.fillers = arena.take<std::uint32_t>(slots);
  caches.ranks = arena.take<std::uint64_t>(slots);
  caches.seen = arena.take<Observation>(slots);
  if (s.on_rungs) caches.rungs = arena.take<std::uint8_t>(slots);
  caches.own = arena.take<float4>(slots * s.quads * static_cast<std::size_t>(caches.planes));
}

void lay_out_figures(Arena& arena, const UnitSizes& s, std::size_t units, BatchParts& parts,
                     ReplayArgs& args) {
  const std::size_t caches = units * s.configs, sampled = caches * s.block_samples,
                    kept = caches * s.block_kept();
  parts.progress = take_span<kernels::ReplayProgress>(arena, caches);
  args.caches.progress = parts.progress.data();
  kernels::ReplaySamples& samples = args.samples;
  samples.capacity = static_cast<int>(s.block_samples);
  samples.kept_capacity = static_cast<int>(s.block_kept());
  samples.kept_every = s.columns.draws ? 1 : args.span.sample_every;
  samples.words = static_cast<int>(s.words());
  samples.shared = arena.take<std::uint32_t>(kept * s.words());
  samples.coded = arena.take<std::uint32_t>(kept * s.copies * s.words());
  samples.samples = arena.take<kernels::ReplaySample>(kept);
  samples.own = arena.take<float>(sampled * s.group * s.dim);
  if (!s.figures) return;
  samples.errors = arena.take<double2>(sampled * kernels::kMostReplayGroup);
  if (s.columns.residual) {
    parts.sketches = arena.take<float>(units * s.group * s.dim * kernels::kReplayResiduals);
    samples.residual = arena.take<float>(sampled * kernels::kReplayResiduals);
    parts.residual = take_span<float>(arena, caches * s.samples * kernels::kReplayResiduals);
  }
  if (s.columns.draws) {
    samples.draws = static_cast<int>(s.columns.draws);
    parts.gradients = arena.take<std::byte>(units * s.queries * s.gradient() * s.element_bytes);
    const std::size_t terms = units * s.tokens * kernels::kReplayTerms * s.terms();
    args.copies.terms = static_cast<std::int64_t>(terms);
    samples.terms = parts.terms = arena.take<float>((1 + s.copies) * terms);
    samples.term_scales = parts.term_scales = arena.take<float>(units * s.queries);
    samples.own_changes = arena.take<float>(kept * s.terms());
    parts.changes = take_span<float>(arena, caches * s.queries * s.columns.draws);
  }

  parts.sums = take_span<double>(arena, caches * SumsShape{s.quads, s.named}.size());
  parts.recalls = take_span<float>(arena, caches * s.queries * s.group);
  parts.errors = take_span<double>(arena, caches * s.samples * 2);
  kernels::ReplayFigures& figures = args.figures;
  figures.configs = static_cast<int>(s.configs);
  figures.samples = static_cast<int>(s.samples);
  figures.sums = parts.sums.data();
  figures.errors = parts.errors.data();
  figures.recalls = parts.recalls.data();
  figures.residual = parts.residual.data();
  figures.changes = parts.changes.data();
}

}  // namespace

void lay_out(Arena& arena, const UnitSizes& sizes, std::size_t units, BatchParts& parts,
             ReplayArgs& args) {
  lay_out_tensors(arena, sizes, units, parts, args);
  lay_out_rows(arena, sizes, units, parts, args);
  lay_out_caches(arena, sizes, units, args);
  lay_out_figures(arena, sizes, units, parts, args);
}

std::size_t bytes_of(const UnitSizes& sizes, std::size_t units) {
  BatchParts parts{};
  ReplayArgs args{};
  return cuda::measured([&](Arena& arena) { lay_out(arena, sizes, units, parts, args); });
}

}  // namespace kvlab
