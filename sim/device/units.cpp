#include "sim/device/units.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "kernels/host/transfer.hpp"

namespace kvlab {

using cuda::check;
using kernels::Type;
using Output = cuda::ProductArgs::Output;

namespace {

constexpr double kUsableMemory = 0.9;      // of what is free
constexpr std::size_t kMostUnits = 65535;  // of a grid

}  // namespace

UnitSizes sizes_of(const UnitsPlan& plan, const Grid& grid, std::size_t configs) {
  if (grid.rungs.copies() > 0) check_coded_heads(plan.shape.head_size);
  const Type rounding = type_of(plan.arithmetic.rounding);
  return {.tokens = padded_tokens(plan.tokens),
          .group = plan.shape.group(),
          .dim = plan.shape.head_size,
          .pairs = static_cast<std::size_t>(pairs_of(plan.shape)),
          .quads = (plan.shape.group() + 3) / 4,
          .block = kernels::kMostReplayQueries,
          .slots = static_cast<std::size_t>(grid.unit_slots),
          .configs = configs,
          .queries = plan.span.size(),
          .samples = plan.span.samples(),
          .block_samples = (kernels::kMostReplayQueries + plan.span.sample_every() - 1) /
                           plan.span.sample_every(),
          .named = plan.span.named().size(),
          .token_columns = grid.column_count,
          .state_stride = static_cast<std::size_t>(grid.state_stride),
          .product_bytes = kernels::bytes_of(rounding),
          .element_bytes = bytes_of(plan.shape.dtype),
          .copies = grid.rungs.copies(),
          .key_parts = static_cast<std::size_t>(kernels::replay_parts(rounding)),
          .value_parts = static_cast<std::size_t>(kernels::replay_parts(type_of(plan.shape.dtype))),
          .squeezed = grid.squeezed,
          .rounds = rounding != KVLAB_F32,
          .on_rungs = grid.on_rungs};
}

std::size_t units_at_once(const UnitSizes& sizes, std::size_t landing, std::size_t together) {
  const cuda::MemoryInfo memory = cuda::memory_info();
  const auto usable = static_cast<std::size_t>(kUsableMemory * static_cast<double>(memory.free));
  const std::size_t of_unit = bytes_of(sizes, 1),
                    fit = (usable - std::min(usable, landing)) / of_unit;
  if (fit < together)
    throw std::runtime_error(fmt::format(
        "device memory: {} of this replay needs {}, {} of {} are free; fewer budgets "
        "at once need less, or use --device cpu",
        together == 1 ? "one KV head" : "one layer", cuda::bytes_text(together * of_unit + landing),
        cuda::bytes_text(memory.free), cuda::bytes_text(memory.total)));
  return std::min(fit, kMostUnits) / together * together;
}

Units::Units(const UnitsPlan& plan, const Grid& grid, const UnitSizes& sizes,
             std::span<const ReplayUnit> units, const Tables& tables, cuda::Products& product,
             Streams& streams, std::size_t layers)
    : plan_(plan),
      grid_(grid),
      sizes_(sizes),
      count_(units.size() / layers),
      product_(product),
      streams_(streams),
      tables_(tables) {
  memory_ = cuda::placed([&](cuda::Arena& arena) { lay_out(arena, sizes_, count_, parts_); },
                         "the replay");
  rules_ = cuda::upload(
      grid.rules_of(plan.shape, plan.sequence, units, count_, parts_.columns, sizes.tokens),
      "the replay");
  kernels::ReplayBlock& block = parts_.block;
  block.shape = {.units = static_cast<int>(count_),
                 .tokens = static_cast<int>(sizes.tokens),
                 .group = static_cast<int>(plan.shape.group()),
                 .head_size = static_cast<int>(plan.shape.head_size),
                 .rotated = static_cast<int>(plan.rope.rotated()),
                 .softmax_scale = plan.arithmetic.softmax_scale,
                 .type = type_of(plan.shape.dtype),
                 .rounding = type_of(plan.arithmetic.rounding),
                 .threshold16 = plan.arithmetic.threshold16};
  block.span = {tables.span.as<std::int32_t>(),
                static_cast<int>(plan.span.size()),
                static_cast<int>(plan.span.blocks()),
                static_cast<int>(plan.span.sample_every()),
                tables.named.as<int2>(),
                static_cast<int>(plan.span.named().size())};
  block.grid = {nullptr, static_cast<int>(sizes.configs), grid.config_units()};
  block.sets.every = sizes.columns.draws ? 1 : block.span.sample_every;
  set_layer(0);
  clear();
}

void Units::clear() {
  const auto zero = [&](auto part) {
    if (part.empty()) return;
    check(cudaMemsetAsync(part.data(), 0, part.size_bytes(), stream()), "clearing");
  };
  zero(parts_.progress);
  zero(parts_.sums);
  zero(parts_.errors);
}

kernels::ReplayKeepArgs Units::keep_args() const {
  const kernels::ReplayTensors tensors{parts_.queries,
                                       parts_.keys,
                                       parts_.values,
                                       tables_.rope.as<float2>(),
                                       tables_.coarse.as<float2>(),
                                       tables_.fine.as<float2>()};
  return {parts_.block, tensors, parts_.terms, parts_.counts, kept_bits_};
}
kernels::ReplayKeptArgs Units::kept_args() const {
  return {parts_.block, parts_.squeezed.e, grid_.sets(), parts_.copies};
}

template <class Use>
void Units::with_walk(const Members& members, Use use) const {
  using kernels::ReplayTokens;
  const Members::Kind& kind = members.kind;
  const int layer_heads = kind.by_layer ? static_cast<int>(plan_.shape.kv_heads) : 0,
            most_rungs = static_cast<int>(members.most_rungs);
  const kernels::ReplayWalkArgs args{
      keep_args(), parts_.slots,       parts_.progress.data(), members.on_device.as<std::int32_t>(),
      layer_heads, members.most_slots, parts_.sums.data()};
  kernels::ReplayWalkPlan plan;
  check(kernels::plan_walk(args,
                           {static_cast<int>(members.configs.size()), kind.tokens, kind.largest,
                            kind.policy->slot_bytes, most_rungs},
                           plan),
        "asking for the device's limits");
  if (kind.tokens == ReplayTokens::squeezed)
    use(kernels::ReplaySqueezedArgs{args, parts_.squeezed, parts_.paired_keys, parts_.key_scales,
                                    parts_.places},
        plan);
  else if (kind.tokens == ReplayTokens::ladder)
    use(kernels::ReplayLadderArgs{args, parts_.copies, grid_.rungs.rungs(), most_rungs,
                                  parts_.slot_rungs},
        plan);
  else
    use(args, plan);
}

std::vector<Walk> Units::walks() const {
  std::vector<Walk> all;
  for (const Members& members : grid_.members)
    with_walk(members, [&](const auto&, const auto& plan) {
      all.push_back({members.kind.policy, plan.variant});
    });
  return all;
}

kernels::ReplayRotateArgs Units::rotation_of(const kernels::ReplayVectors& from) const {
  return {.from = from,
          .rope = tables_.rope.as<float2>(),
          .tokens = static_cast<int>(plan_.tokens),
          .head_size = parts_.block.shape.head_size,
          .rotated = parts_.block.shape.rotated,
          .rounding = parts_.block.shape.rounding};
}

void Units::copy(const kernels::ReplayVectors& from, std::size_t unit, Part part) {
  kernels::ReplayRotateArgs args = rotation_of(from);
  args.rotated = 0;
  args.rounding = parts_.block.shape.type;
  args.rounded = (part == Part::k ? parts_.keys : parts_.values) +
                 unit * sizes_.tokens * sizes_.dim * sizes_.element_bytes;
  check(kernels::replay_rotate(args, stream()), "reading keys and values");
}

void Units::take_keys(const kernels::ReplayVectors& from, std::size_t unit) {
  const UnitSizes& s = sizes_;
  const std::size_t of_unit = unit * s.tokens * s.dim;
  if (parts_.paired_keys)
    check(kernels::replay_pair_keys(
              parts_.block.shape, static_cast<int>(plan_.tokens), from, parts_.block.shape.type,
              parts_.paired_keys + unit * s.tokens * 2 * s.pairs * s.element_bytes,
              parts_.key_scales + unit * s.tokens, stream()),
          "pairing keys");
  kernels::ReplayRotateArgs args = rotation_of(from);
  args.parts = parts_.key_parts ? parts_.key_parts + 3 * of_unit : nullptr;
  args.rounded = parts_.rounded_keys + of_unit * s.product_bytes;
  check(kernels::replay_rotate(args, stream()), "rotating keys");
}

void Units::take_queries(const kernels::ReplayVectors& from, std::size_t unit, std::uint32_t head) {
  const UnitSizes& s = sizes_;
  const std::size_t of_unit = unit * s.tokens * s.dim * s.group;
  kernels::ReplayRotateArgs args = rotation_of(from);
  args.group = static_cast<int>(s.group);
  args.group_head = static_cast<int>(head);
  if (parts_.plain_queries) {
    kernels::ReplayRotateArgs plain = args;
    plain.rotated = 0;
    plain.plain = parts_.plain_queries + of_unit;
    check(kernels::replay_rotate(plain, stream()), "reading queries");
  }
  args.plain = parts_.queries + of_unit;
  args.rounded = parts_.rounded_queries + of_unit * s.product_bytes;
  check(kernels::replay_rotate(args, stream()), "rotating queries");
}

void Units::make_copies() {
  if (sizes_.copies == 0) return;
  const auto make = [&](bool keys, Type type, const std::byte* exact) {
    check(kernels::replay_codes({parts_.block.shape, parts_.copies, grid_.rungs.ways(),
                                 grid_.config_units(), keys, type, exact},
                                stream()),
          "coding keys and values");
  };
  make(true, parts_.block.shape.rounding, parts_.rounded_keys);
  make(false, parts_.block.shape.type, parts_.values);
}

void Units::multiply(const UnitProduct& of) {
  const auto stride = [](std::size_t n) { return static_cast<std::int64_t>(n); };
  product_({.type = of.type,
            .batches = static_cast<int>(count_),
            .rows = static_cast<int>(of.rows),
            .n = static_cast<int>(of.n),
            .k = static_cast<int>(of.k),
            .x = of.x.data,
            .x_row = stride(of.x.row),
            .x_batch = stride(of.x.unit),
            .w = of.w.data,
            .w_row = stride(of.w.row),
            .w_batch = stride(of.w.unit),
            .w_by_k = of.w_by_k,
            .y = of.y.data,
            .y_row = stride(of.y.row),
            .y_batch = stride(of.y.unit),
            .output = of.output,
            .tf32 = of.tf32,
            .alignment = of.alignment},
           stream());
}

void Units::multiply_rows(std::uint32_t first, std::uint32_t count, std::byte* keys,
                          Output output) {
  const UnitSizes& s = sizes_;
  const std::size_t of_query = s.group * s.dim;
  multiply({.type = parts_.block.shape.rounding,
            .rows = count * s.group,
            .n = first + count,
            .k = s.dim,
            .x = {parts_.rounded_queries + first * of_query * s.product_bytes, s.dim,
                  s.tokens * of_query},
            .w = {keys, s.dim, s.tokens * s.dim},
            .y = {parts_.products, s.tokens, s.block * s.group * s.tokens},
            .output = output});
}

/// Of queries and keys that were not rounded, in float32, by three products in TF32.
void Units::multiply_parts(std::uint32_t first, std::uint32_t count) {
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

void Units::make_rows(std::uint32_t first, std::uint32_t count) {
  parts_.block.rows.first = static_cast<int>(first);
  parts_.block.rows.count = static_cast<int>(count);
  multiply_rows(first, count, parts_.rounded_keys);
  if (parts_.key_parts) multiply_parts(first, count);
  const kernels::ReplayRowsArgs rows{.shape = parts_.block.shape,
                                     .span = parts_.block.span,
                                     .rows = parts_.block.rows,
                                     .squeezed = parts_.squeezed,
                                     .products = parts_.products,
                                     .unrounded = parts_.unrounded_products,
                                     .plain_queries = parts_.plain_queries,
                                     .rope = tables_.rope.as<float2>(),
                                     .values = parts_.values,
                                     .outputs = parts_.outputs,
                                     .exact_most = parts_.exact_most};
  check(kernels::replay_rows(rows, stream()), "computing rows");
  const std::size_t part = static_cast<std::size_t>(parts_.copies.vectors) * sizes_.product_bytes;
  std::byte* keys = parts_.coded_keys;
  for (int copy = 1; copy <= parts_.copies.count; ++copy) {
    for (std::size_t p = 0; p < sizes_.key_parts; ++p, keys += part)
      multiply_rows(first, count, keys, p == 0 ? Output::float32 : Output::add_float32);
    check(kernels::replay_coded_rows(rows, parts_.copies, copy, stream()), "computing rows");
  }
}

void Units::walk(const Walks& walks) {
  streams_.fork();
  for (std::size_t m = 0; m < grid_.members.size(); ++m) {
    const std::shared_ptr<const PolicyEntry>& policy = grid_.members[m].kind.policy;
    with_walk(grid_.members[m], [&](const auto& args, const auto& plan) {
      check(kernels::replay_walk(walks.kernel({policy, plan.variant}), plan, args,
                                 streams_.branch(m)),
            fmt::format("replaying {}", policy->info.name));
    });
  }
  if (!grid_.windows.empty())
    check(kernels::replay_windows(
              {keep_args(), parts_.squeezed, grid_.windows_on_device.as<std::int32_t>(),
               static_cast<int>(grid_.windows.size())},
              streams_.branch(grid_.members.size())),
          "replaying windows");
  streams_.join();
}

/// Gradients of the block's queries of the span by all values that they see.
void Units::multiply_terms(std::uint32_t first, std::uint32_t count) {
  std::uint32_t begin = first, end = first + count;
  while (begin < end && !plan_.span.contains(begin)) ++begin;
  while (begin < end && !plan_.span.contains(end - 1)) --end;
  if (begin == end) return;
  parts_.terms.first = static_cast<int>(plan_.span.index(begin));
  multiply_terms(begin, end, parts_.values, 0, Output::float32);
  const std::size_t part = static_cast<std::size_t>(parts_.copies.vectors) * sizes_.element_bytes;
  std::byte* values = parts_.coded_values;
  for (int copy = 1; copy <= parts_.copies.count; ++copy)
    for (std::size_t p = 0; p < sizes_.value_parts; ++p, values += part)
      multiply_terms(begin, end, values, copy, p == 0 ? Output::float32 : Output::add_float32);
}

/// Of queries [begin, end), with a part of a copy's values.
void Units::multiply_terms(std::uint32_t begin, std::uint32_t end, std::byte* values, int copy,
                           Output output) {
  const UnitSizes& s = sizes_;
  const std::size_t before = plan_.span.index(begin),
                    queries = plan_.span.index(end - 1) - before + 1,
                    of_token = kernels::kMostReplayQueries * s.terms();
  multiply({.type = parts_.block.shape.type,
            .rows = end,
            .n = queries * s.terms(),
            .k = s.dim,
            .x = {values, s.dim, s.tokens * s.dim},
            .w = {parts_.gradients + before * s.gradient() * s.element_bytes, s.dim,
                  s.queries * s.gradient()},
            .y = {parts_.terms.of + copy * parts_.copies.terms, of_token, s.tokens * of_token},
            .output = output});
}

void Units::replay_block(const Walks& walks, std::uint32_t first, std::uint32_t count,
                         void* outputs) {
  make_rows(first, count);
  if (sizes_.columns.draws) multiply_terms(first, count);
  walk(walks);
  check(kernels::replay_outputs({kept_args(), parts_.values, parts_.outputs, parts_.block_errors,
                                 sizes_.columns.residual > 0, outputs},
                                stream()),
        "computing outputs");
}

void Units::change() {
  check(kernels::replay_changes(
            {kept_args(), parts_.terms, parts_.term_scales, parts_.changes.data()}, stream()),
        "computing changes");
}

void Units::sum_figures() {
  const auto twins = static_cast<int>(sizes_.configs - grid_.twin.size());
  check(
      kernels::replay_figures({parts_.block, twins, static_cast<int>(sizes_.samples), parts_.counts,
                               parts_.block_errors, parts_.block_residual, parts_.sums.data(),
                               parts_.recalls.data(), parts_.errors.data(), parts_.residual.data()},
                              stream()),
      "computing figures");
}

int Units::waves(const Walks& walks) const {
  int all = 0;
  for (const Members& members : grid_.members)
    with_walk(members, [&](const auto&, const auto& plan) {
      int own = 0;
      check(kernels::replay_waves(walks.kernel({members.kind.policy, plan.variant}), plan, own),
            "asking for the device's limits");
      all += own;
    });
  return all;
}

}  // namespace kvlab
