#include "sim/refetch/lru_curve.hpp"

#include <algorithm>
#include <numeric>

namespace kvlab {
namespace {

/// Keeps the tokens in the order of their last use. Finds in O(log n) how many tokens were used
/// after a given token.
class UseOrder {
 public:
  explicit UseOrder(std::uint32_t tokens) : place_(tokens, kNever), sums_(2 * tokens + 2) {}

  /// Makes the token the most recently used one.
  void use(std::uint32_t token) {
    if (next_ + 1 == sums_.size()) renumber();
    if (place_[token] != kNever)
      add(place_[token], -1);
    else
      ++count_;
    place_[token] = next_++;
    add(place_[token], 1);
  }
  /// Number of tokens that were used after this one.
  std::uint32_t distance(std::uint32_t token) const { return count_ - up_to(place_[token]); }

 private:
  static constexpr std::uint32_t kNever = ~0u;

  /// Gives the tokens new places 0, 1, 2, …, without changing their order.
  void renumber() {
    std::vector<std::uint32_t> order;
    for (std::uint32_t token = 0; token < place_.size(); ++token)
      if (place_[token] != kNever) order.push_back(token);
    std::ranges::sort(order, {}, [&](std::uint32_t token) { return place_[token]; });
    std::ranges::fill(sums_, 0);
    next_ = 0;
    for (const std::uint32_t token : order) {
      place_[token] = next_++;
      add(place_[token], 1);
    }
  }
  // A Fenwick tree of the number of tokens at each place.
  void add(std::uint32_t place, std::int32_t change) {
    for (std::size_t i = place + std::size_t{1}; i < sums_.size(); i += i & -i) sums_[i] += change;
  }
  std::uint32_t up_to(std::uint32_t place) const {
    std::int32_t sum = 0;
    for (std::size_t i = place + std::size_t{1}; i > 0; i -= i & -i) sum += sums_[i];
    return static_cast<std::uint32_t>(sum);
  }

  std::vector<std::uint32_t> place_;  // [token]: its place in the order
  std::vector<std::int32_t> sums_;    // [place + 1]: Fenwick tree
  std::uint32_t next_ = 0, count_ = 0;
};

}  // namespace

std::vector<std::uint64_t> lru_fetches(const Selection& selection,
                                       std::span<const std::uint32_t> used) {
  const std::uint32_t tokens = selection.tokens();
  const auto first = static_cast<std::uint32_t>(used.size());
  UseOrder order(tokens);
  for (const std::uint32_t token : used) order.use(token);
  std::vector<std::uint64_t> at_distance(tokens + std::size_t{1});
  std::uint64_t selected = 0;
  for (std::uint32_t query = first; query < tokens; ++query) {
    selected += selection.positions(query).size();
    if (query > first)
      for (const std::uint32_t token : selection.positions(query))
        ++at_distance[order.distance(token)];
    for (const std::uint32_t token : selection.positions(query)) order.use(token);
    order.use(query);
  }
  // A token at distance d is fetched with every budget from 0 to d.
  std::vector<std::uint64_t> fetches(at_distance.size());
  std::partial_sum(at_distance.rbegin(), at_distance.rend(), fetches.rbegin());
  fetches[0] = selected;
  return fetches;
}

}  // namespace kvlab
