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
          .windows = grid.windows.size(),
          .queries = plan.span.size(),
          .samples = plan.span.samples(),
          .block_samples = (kernels::kMostReplayQueries + plan.span.sample_every() - 1) /
                           plan.span.sample_every(),
          .named = plan.span.named().size(),
          .token_columns = grid.column_count,
          .slot_stride = static_cast<std::size_t>(grid.slot_stride),
          .product_bytes = kernels::bytes_of(rounding),
          .element_bytes = bytes_of(plan.shape.dtype),
          .copies = grid.rungs.copies(),
          .key_parts = static_cast<std::size_t>(kernels::replay_parts(rounding)),
          .value_parts = static_cast<std::size_t>(kernels::replay_parts(type_of(plan.shape.dtype))),
          .squeezed = grid.squeezed,
          .rounds = rounding != Type::f32,
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
             Streams& streams)
    : plan_(plan),
      grid_(grid),
      sizes_(sizes),
      count_(units.size()),
      product_(product),
      streams_(streams) {
  args_.shape = {.units = static_cast<int>(units.size()),
                 .tokens = static_cast<int>(sizes.tokens),
                 .group = static_cast<int>(plan.shape.group()),
                 .head_size = static_cast<int>(plan.shape.head_size),
                 .rotated = static_cast<int>(plan.rope.rotated()),
                 .softmax_scale = plan.arithmetic.softmax_scale,
                 .rounding = type_of(plan.arithmetic.rounding),
                 .threshold16 = plan.arithmetic.threshold16};
  args_.tensors.type = type_of(plan.shape.dtype);
  args_.tensors.rope = tables.rope.as<float2>();
  args_.tensors.coarse = tables.coarse.as<float2>();
  args_.tensors.fine = tables.fine.as<float2>();
  args_.span = {tables.span.as<std::int32_t>(),
                static_cast<int>(plan.span.size()),
                static_cast<int>(plan.span.blocks()),
                static_cast<int>(plan.span.sample_every()),
                tables.named.as<int2>(),
                static_cast<int>(plan.span.named().size())};
  args_.sequence = plan.sequence;
  grid.describe(args_);
  allocate(units);
  clear();
}

void Units::allocate(std::span<const ReplayUnit> units) {
  std::vector<std::uint32_t> layers, kv_heads;
  for (const ReplayUnit& unit : units) {
    layers.push_back(plan_.shape.number(unit.layer));
    kv_heads.push_back(unit.kv_head);
  }
  layers_ = cuda::upload(layers, "the replay");
  kv_heads_ = cuda::upload(kv_heads, "the replay");
  args_.layers = layers_.as<std::uint32_t>();
  args_.kv_heads = kv_heads_.as<std::uint32_t>();
  memory_ =
      cuda::placed([&](cuda::Arena& arena) { lay_out(arena, sizes_, units.size(), parts_, args_); },
                   "the replay");
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

/// The arguments of the members' walk.
kernels::ReplayArgs Units::args_of(const Members& members) const {
  kernels::ReplayArgs args = args_;
  args.members = members.on_device.as<std::int32_t>();
  args.member_count = static_cast<int>(members.configs.size());
  args.slot_bytes = members.kind.policy->slot_bytes;
  args.squeezed = members.kind.squeezed;
  args.largest = members.kind.largest;
  args.layer_heads = members.kind.by_layer ? static_cast<int>(plan_.shape.kv_heads) : 0;
  args.room_slots = members.most_slots;
  args.most_rungs = static_cast<int>(members.most_rungs);
  return args;
}

Walk Units::walk_of(const Members& members) const {
  kernels::ReplayArgs args = args_of(members);
  args.rows.count = 1;  // any
  Walk walk{members.kind.policy, {}};
  check(kernels::walk_variant(args, walk.variant), "asking for the device's limits");
  return walk;
}

std::vector<Walk> Units::walks() const {
  std::vector<Walk> all;
  for (const Members& members : grid_.members) all.push_back(walk_of(members));
  return all;
}

kernels::ReplayRotateArgs Units::rotation_of(const kernels::ReplayVectors& from) const {
  return {.from = from,
          .rope = args_.tensors.rope,
          .rows = static_cast<int>(plan_.tokens),
          .tokens = static_cast<int>(plan_.tokens),
          .head_size = args_.shape.head_size,
          .rotated = args_.shape.rotated,
          .group = 1,
          .group_head = 0,
          .plain = nullptr,
          .parts = nullptr,
          .rounded = nullptr,
          .rounding = args_.shape.rounding};
}

void Units::copy(const kernels::ReplayVectors& from, std::size_t unit, Part part) {
  kernels::ReplayRotateArgs args = rotation_of(from);
  args.rotated = 0;
  args.rounding = args_.tensors.type;
  args.rounded = (part == Part::k ? parts_.keys : parts_.values) +
                 unit * sizes_.tokens * sizes_.dim * sizes_.element_bytes;
  check(kernels::replay_rotate(args, stream()), "reading keys and values");
}

void Units::take_keys(const kernels::ReplayVectors& from, std::size_t unit) {
  const UnitSizes& s = sizes_;
  const std::size_t of_unit = unit * s.tokens * s.dim;
  if (parts_.paired_keys)
    check(kernels::replay_pair_keys(
              args_.shape, static_cast<int>(plan_.tokens), from, args_.tensors.type,
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
    check(kernels::replay_codes({args_.shape, args_.copies, keys, type, exact, args_.own_units},
                                stream()),
          "coding keys and values");
  };
  make(true, args_.shape.rounding, parts_.rounded_keys);
  make(false, args_.tensors.type, parts_.values);
}

void Units::multiply_rows(std::uint32_t first, std::uint32_t count) {
  multiply_rows(first, count, parts_.rounded_keys, Output::float32);
}

void Units::multiply_rows(std::uint32_t first, std::uint32_t count, const std::byte* keys,
                          Output output) {
  const auto tokens = static_cast<std::int64_t>(sizes_.tokens),
             group = static_cast<std::int64_t>(sizes_.group),
             dim = static_cast<std::int64_t>(sizes_.dim);
  product_({.type = args_.shape.rounding,
            .batches = static_cast<int>(count_),
            .rows = static_cast<int>(count * group),
            .n = static_cast<int>(first + count),
            .k = static_cast<int>(dim),
            .x = parts_.rounded_queries + first * sizes_.group * sizes_.dim * sizes_.product_bytes,
            .x_row = dim,
            .x_batch = tokens * group * dim,
            .w = keys,
            .w_row = dim,
            .w_batch = tokens * dim,
            .y = parts_.products,
            .y_row = tokens,
            .y_batch = static_cast<std::int64_t>(sizes_.block) * group * tokens,
            .output = output,
            .alignment = kProductAlignment},
           stream());
}

/// Of queries and keys that were not rounded, in float32, by three products in TF32.
void Units::multiply_parts(std::uint32_t first, std::uint32_t count) {
  check(kernels::replay_query_parts(args_.shape, static_cast<int>(first), static_cast<int>(count),
                                    args_.rows.block, parts_.queries, parts_.query_parts, stream()),
        "computing rows");
  const auto tokens = static_cast<std::int64_t>(sizes_.tokens),
             rows = static_cast<std::int64_t>(sizes_.block * sizes_.group),
             parts = static_cast<std::int64_t>(3 * sizes_.dim);
  product_({.type = Type::f32,
            .batches = static_cast<int>(count_),
            .rows = static_cast<int>(count * sizes_.group),
            .n = static_cast<int>(first + count),
            .k = static_cast<int>(parts),
            .x = parts_.query_parts,
            .x_row = parts,
            .x_batch = rows * parts,
            .w = parts_.key_parts,
            .w_row = parts,
            .w_batch = tokens * parts,
            .y = parts_.unrounded_products,
            .y_row = tokens,
            .y_batch = rows * tokens,
            .tf32 = true,
            .alignment = kProductAlignment},
           stream());
}

void Units::make_rows(std::uint32_t first, std::uint32_t count) {
  args_.rows.first = static_cast<int>(first);
  args_.rows.count = static_cast<int>(count);
  multiply_rows(first, count);
  if (parts_.key_parts) multiply_parts(first, count);
  const kernels::ReplayRowsArgs rows{.shape = args_.shape,
                                     .span = args_.span,
                                     .rows = args_.rows,
                                     .products = parts_.products,
                                     .unrounded = parts_.unrounded_products,
                                     .tensors = args_.tensors};
  check(kernels::replay_rows(rows, stream()), "computing rows");
  const std::size_t part = static_cast<std::size_t>(args_.copies.vectors) * sizes_.product_bytes;
  const std::byte* keys = parts_.coded_keys;
  for (int copy = 1; copy <= args_.copies.count; ++copy) {
    for (std::size_t p = 0; p < sizes_.key_parts; ++p, keys += part)
      multiply_rows(first, count, keys, p == 0 ? Output::float32 : Output::add_float32);
    check(kernels::replay_coded_rows(rows, args_.copies, copy, stream()), "computing rows");
  }
}

void Units::walk(const Walks& walks) {
  streams_.fork();
  for (std::size_t m = 0; m < grid_.members.size(); ++m) {
    const Members& members = grid_.members[m];
    check(
        kernels::replay_walk(walks.kernel(walk_of(members)), args_of(members), streams_.branch(m)),
        fmt::format("replaying {}", members.kind.policy->info.name));
  }
  if (!grid_.windows.empty()) {
    kernels::ReplayArgs args = args_;
    args.members = grid_.windows_on_device.as<std::int32_t>();
    args.member_count = static_cast<int>(grid_.windows.size());
    check(kernels::replay_windows(args, streams_.branch(grid_.members.size())),
          "replaying windows");
  }
  streams_.join();
}

/// Gradients of the block's queries of the span by all values that they see.
void Units::multiply_terms(std::uint32_t first, std::uint32_t count) {
  std::uint32_t begin = first, end = first + count;
  while (begin < end && !plan_.span.contains(begin)) ++begin;
  while (begin < end && !plan_.span.contains(end - 1)) --end;
  if (begin == end) return;
  args_.samples.first_term = static_cast<int>(plan_.span.index(begin));
  multiply_terms(begin, end, parts_.values, 0, Output::float32);
  const std::size_t part = static_cast<std::size_t>(args_.copies.vectors) * sizes_.element_bytes;
  const std::byte* values = parts_.coded_values;
  for (int copy = 1; copy <= args_.copies.count; ++copy)
    for (std::size_t p = 0; p < sizes_.value_parts; ++p, values += part)
      multiply_terms(begin, end, values, copy, p == 0 ? Output::float32 : Output::add_float32);
}

/// Of queries [begin, end), with a part of a copy's values.
void Units::multiply_terms(std::uint32_t begin, std::uint32_t end, const std::byte* values,
                           int copy, Output output) {
  const std::size_t queries = plan_.span.index(end - 1) - plan_.span.index(begin) + 1;
  const auto tokens = static_cast<std::int64_t>(sizes_.tokens),
             dim = static_cast<std::int64_t>(sizes_.dim),
             of_token = static_cast<std::int64_t>(kernels::kReplayTerms * sizes_.terms());
  product_(
      {.type = args_.tensors.type,
       .batches = static_cast<int>(count_),
       .rows = static_cast<int>(end),
       .n = static_cast<int>(queries * sizes_.terms()),
       .k = static_cast<int>(dim),
       .x = values,
       .x_row = dim,
       .x_batch = tokens * dim,
       .w = parts_.gradients + plan_.span.index(begin) * sizes_.gradient() * sizes_.element_bytes,
       .w_row = dim,
       .w_batch = static_cast<std::int64_t>(sizes_.queries * sizes_.gradient()),
       .y = parts_.terms + copy * args_.copies.terms,
       .y_row = of_token,
       .y_batch = tokens * of_token,
       .output = output,
       .alignment = kProductAlignment},
      stream());
}

void Units::replay_block(const Walks& walks, std::uint32_t first, std::uint32_t count) {
  make_rows(first, count);
  if (sizes_.columns.draws) multiply_terms(first, count);
  walk(walks);
  check(kernels::replay_outputs(args_, stream()), "computing outputs");
}

int Units::waves(const Walks& walks) const {
  int all = 0;
  for (const Members& members : grid_.members) {
    kernels::ReplayArgs args = args_of(members);
    args.rows.count = 1;
    int own = 0;
    check(kernels::replay_waves(walks.kernel(walk_of(members)), args, own),
          "asking for the device's limits");
    all += own;
  }
  return all;
}

}  // namespace kvlab
