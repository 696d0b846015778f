#include "policies/columns/product.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "policies/columns/columns.hpp"

namespace kvlab {
namespace {

constexpr std::size_t kPointer = sizeof(void*);

/// What `params` are: a pointer to the base's hooks, then the base's parameters.
struct Base {
  const PolicyOps* ops = nullptr;
  const std::byte* params;

  explicit Base(const void* packed) : params(static_cast<const std::byte*>(packed) + kPointer) {
    std::memcpy(&ops, packed, kPointer);
  }
  std::size_t columns() const { return ops->info.column_count(); }
};

/// Tokens without the factor.
class OwnTokens {
 public:
  OwnTokens(const Tokens& tokens, std::size_t count, std::size_t own)
      : positions_(tokens.positions) {
    for (std::size_t i = 0; own > 0 && i < count; ++i)
      columns_.insert(columns_.end(), tokens.columns + i * (own + 1),
                      tokens.columns + i * (own + 1) + own);
  }
  Tokens tokens() const { return {positions_, columns_.empty() ? nullptr : columns_.data()}; }

 private:
  const std::uint32_t* positions_;
  std::vector<float> columns_;
};

void admit(void* slots, Tokens tokens, std::size_t count, const void* params, const Step& step) {
  const Base base(params);
  const OwnTokens own(tokens, count, base.columns());
  base.ops->admit(slots, own.tokens(), count, base.params, step);
}

void observe(void* slots, const Seen& seen, std::size_t count, const void* params,
             const Step& step) {
  const Base base(params);
  base.ops->observe(slots, seen, count, base.params, step);
}

void observe_each(void* slots, const Observation* seen, std::size_t count, const void* params,
                  const Step& step) {
  const Base base(params);
  base.ops->observe_each(slots, seen, count, base.params, step);
}

RankType rank(const void* slots, Tokens tokens, std::size_t count, const void* params,
              const Step& step, std::uint64_t* ranks) {
  const Base base(params);
  const std::size_t own = base.columns();
  const RankType type = base.ops->rank(slots, OwnTokens(tokens, count, own).tokens(), count,
                                       base.params, step, ranks);
  for (std::size_t i = 0; i < count; ++i)
    ranks[i] = rank_key(rank_number(type, ranks[i]) *
                        static_cast<double>(tokens.columns[i * (own + 1) + own]));
  return RankType::real;
}

std::size_t first_least(const void* slots, Tokens tokens, std::size_t begin, std::size_t end,
                        const void* params, const Step& step) {
  const Base base(params);
  std::vector<std::uint64_t> ranks(end - begin);
  rank(static_cast<const std::byte*>(slots) + begin * base.ops->slot_bytes,
       {tokens.positions + begin, tokens.columns + begin * (base.columns() + 1)}, ranks.size(),
       params, step, ranks.data());
  return begin + static_cast<std::size_t>(std::ranges::min_element(ranks) - ranks.begin());
}

float weight(std::uint32_t age, const void* params) {
  const Base base(params);
  return base.ops->weight(age, base.params);
}

std::uint32_t tail(const void* params) {
  const Base base(params);
  return base.ops->tail(base.params);
}

/// What a product's texts point to.
struct Texts {
  std::shared_ptr<const PolicyEntry> base;
  std::string name, column;
};

}  // namespace

std::shared_ptr<const PolicyEntry> product_of(const std::shared_ptr<const PolicyEntry>& base,
                                              const std::string& name, const std::string& column) {
  const PolicyInfo& own = base->info;
  const auto refuse = [&](const std::string& why) {
    throw std::invalid_argument(fmt::format("policy {}: {}", name, why));
  };
  if (!own.evicts) refuse(fmt::format("{} never evicts, so it ranks nothing", own.name));
  if (base->host) refuse(fmt::format("{} is a function, which multiplies by itself", own.name));
  if (!is_column_name(column))
    refuse("a column's name should stand behind the *, such as h2o*value_norm");
  if (own.column_count() == kMaxColumns)
    refuse(fmt::format("{} has {} columns, and no room for another", own.name, kMaxColumns));
  const auto texts = std::make_shared<const Texts>(Texts{base, name, column});
  auto product = std::make_shared<PolicyEntry>(*base);
  product->info.name = texts->name.c_str();
  product->info.oldest_first = false;
  product->info.columns[own.column_count()] = texts->column.c_str();
  product->rank_type = RankType::real;
  product->admit = admit;
  product->observe = observe;
  product->observe_each = observe_each;
  product->rank = rank;
  product->first_least = first_least;
  product->weight = weight;
  product->tail = tail;
  product->factored = std::shared_ptr<const PolicyEntry>(texts, base.get());
  return product;
}

std::vector<std::byte> product_params(const PolicyEntry& product,
                                      const std::vector<std::byte>& own) {
  const PolicyOps* const ops = product.factored.get();
  std::vector<std::byte> packed(kPointer + own.size());
  std::memcpy(packed.data(), &ops, kPointer);
  std::ranges::copy(own, packed.begin() + kPointer);
  return packed;
}

}  // namespace kvlab
