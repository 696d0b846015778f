#include "sim/refetch/refetch_run.hpp"

#include <algorithm>
#include <numeric>

#include "traces/base/cancel.hpp"
#include "traces/base/numeric/panels.hpp"

namespace kvlab {
namespace {

/// Number of queries between two checks of whether the replay was cancelled.
constexpr std::uint32_t kBlockWithoutRows = 64;

}  // namespace

void ResidentSet::evict_except(const std::vector<bool>& kept, std::uint32_t count,
                               std::uint32_t now) {
  if (count == 0) return;
  const std::vector<EvictionKey> keys = eviction_keys(now);
  victims_.clear();
  for (std::uint32_t age = 0; age < size(); ++age)
    if (!kept[positions()[age]]) victims_.push_back(age);
  const auto first = [&](std::uint32_t a, std::uint32_t b) { return keys[a] < keys[b]; };
  const auto end = victims_.begin() + count;
  if (count == 1)
    std::iter_swap(victims_.begin(), std::ranges::min_element(victims_, first));
  else
    std::nth_element(victims_.begin(), end - 1, victims_.end(), first);
  victims_.erase(end, victims_.end());
  std::ranges::sort(victims_);
  evict(victims_);
}

std::vector<std::uint32_t> ResidentSet::eviction_order(std::uint32_t now) const {
  std::vector<EvictionKey> keys = eviction_keys(now);
  std::sort(keys.begin(), keys.end());
  std::vector<std::uint32_t> order;
  for (const EvictionKey& key : keys) order.push_back(key.position);
  return order;
}

RefetchRun::RefetchRun(ResidentSet set, const ResolvedConfig& config, const Selection& selection,
                       const HeadView& view, std::uint32_t threshold16,
                       const MeasuredQueries& selecting, const MeasuredQueries* measured)
    : set_(std::move(set)),
      config_(config),
      selection_(selection),
      view_(view),
      threshold16_(threshold16),
      selecting_(selecting),
      features_(config.policy.features, view, config.appends),
      measure_(measured, view),
      selected_(view.tokens) {}

bool RefetchRun::wants_row(std::uint32_t query) const {
  return selecting_.contains(query) || set_.needs() != Needs::nothing;
}

void RefetchRun::run(std::uint32_t query, SharedRows* rows) {
  if (!selecting_.contains(query)) return run_without_selection(query, rows);
  for (const std::uint32_t position : selection_.positions(query)) selected_[position] = true;
  fetch(query);
  attend(query, rows);
  for (const std::uint32_t position : selection_.positions(query)) selected_[position] = false;
  if (watcher_) watcher_(query, set_.positions());
  ++next_;
}

/// Steps 1 to 3 of refetch_run.hpp.
void RefetchRun::fetch(std::uint32_t query) {
  missing_.clear();
  std::ranges::set_difference(selection_.positions(query), set_.positions(),
                              std::back_inserter(missing_));
  // Evicts until `incoming` more tokens fit. After a prompt, this may need several evictions.
  const auto make_room = [&](std::uint64_t incoming) {
    const std::uint64_t all = set_.size() + incoming, budget = set_.budget();
    if (all > budget) set_.evict_except(selected_, static_cast<std::uint32_t>(all - budget), query);
  };
  for (const std::uint32_t position : missing_) {
    make_room(1);
    set_.bring_back(position, query, features_.from(position));
  }
  make_room(1);
  set_.append(query, 1, features_.from(query));
}

/// Step 4 of refetch_run.hpp.
void RefetchRun::attend(std::uint32_t query, SharedRows* rows) {
  Tally tally(set_, threshold16_, set_.size());
  if (rows) {
    list_attended(query);
    add_rows(query, *rows, tally);
  } else if (measure_.measures(query)) {
    measure_.begin_query(query);
  }
  add_selection(query);
  tally.end_query(query);
  tally.set_queries(1);
  observe(query, tally);
}

void RefetchRun::list_attended(std::uint32_t query) {
  attended_.clear();
  ages_.clear();
  for (std::uint32_t age = 0; age < set_.size(); ++age) {
    const std::uint32_t position = set_.positions()[age];
    if (!selected_[position] && position != query &&
        config_.protected_tokens.protection(position, query) == 0)
      continue;
    attended_.push_back(position);
    ages_.push_back(age);
  }
}

void RefetchRun::add_rows(std::uint32_t query, SharedRows& rows, Tally& tally) {
  p_.resize(attended_.size());
  by_age_.assign(set_.size(), 0.0f);
  for (std::uint32_t head = 0; head < view_.group; ++head) {
    rows.probabilities(query, head, attended_, p_.data());
    for (std::size_t i = 0; i < ages_.size(); ++i) by_age_[ages_[i]] = p_[i];
    if (set_.needs() != Needs::nothing) tally.add_row(by_age_, 0);
    if (!measure_.measures(query)) continue;
    measure_.add_row(query, head, attended_, rows, [&](float* out) {
      accumulate_rows(p_, attended_, view_.v, view_.kv_token_stride, view_.head_size, out);
    });
  }
}

void RefetchRun::add_selection(std::uint32_t query) {
  if (!measure_.measures(query)) return;
  for (std::uint32_t head = 0; head < view_.group; ++head)
    measure_.add_selection(
        head, {.fetched = static_cast<std::uint32_t>(missing_.size()),
               .selected = static_cast<std::uint32_t>(selection_.positions(query).size()),
               .agreed = selection_.agreed(query)});
}

void RefetchRun::observe(std::uint32_t query, const Tally& tally) {
  std::vector<Observation> seen(tally.observations().begin(), tally.observations().end());
  for (std::size_t age = 0; needs_requests(set_.needs()) && age < seen.size(); ++age) {
    const bool requested = selected_[set_.positions()[age]];
    seen[age].requests = requested;
    seen[age].last_request = requested ? query : 0;
  }
  set_.observe(seen, tally.heads());
}

void RefetchRun::run_without_selection(std::uint32_t query, SharedRows* rows) {
  const Append append = current_append();
  if (query == append.first) {
    set_.evict_to_budget(query);
    set_.append(query, append.tokens, features_.from(query));
    tally_ = Tally(set_, threshold16_, set_.size());
  }
  const std::uint32_t younger = append_end() - 1 - query;
  const auto visible = set_.positions().first(set_.size() - younger);
  if (rows && set_.needs() != Needs::nothing &&
      (needs_requests(set_.needs()) || younger < set_.tail())) {
    p_.resize(visible.size());
    for (std::uint32_t head = 0; head < view_.group; ++head) {
      rows->probabilities(query, head, visible, p_.data());
      tally_.add_row(p_, younger);
    }
    tally_.end_query(query);
  }
  if (watcher_) watcher_(query, visible);
  if (younger > 0) return;
  tally_.set_queries(append.tokens);
  set_.observe(tally_.observations(), tally_.heads());
  if (append.ends_prompt) set_.end_prompt();
  ++next_;
}

void run_with_refetch(std::uint32_t tokens, SharedRows* rows,
                      std::span<const std::unique_ptr<RefetchRun>> runs) {
  const std::uint32_t block = rows ? rows->block_queries() : kBlockWithoutRows;
  for (std::uint32_t first = 0; first < tokens; first += block) {
    const std::uint32_t end = std::min(first + block, tokens);
    throw_if_cancelled();
    bool wanted = false;
    for (std::uint32_t query = first; query < end; ++query)
      for (const auto& run : runs) wanted = wanted || run->wants_row(query);
    if (rows && wanted) rows->compute(first, end - first);
    for (const auto& run : runs)
      for (std::uint32_t query = first; query < end; ++query) run->run(query, rows);
  }
}

}  // namespace kvlab
