#include "policies/rungs/ladder.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <stdexcept>

#include "policies/budgets/budget.hpp"
#include "policies/catalogue.hpp"

namespace kvlab {
namespace {

constexpr std::uint32_t kWhole = 1'000'000;  // parts of 100%
constexpr std::size_t kShown = 60;           // bytes of a text in a message

[[noreturn]] void refuse(std::string_view text, const std::string& why) {
  throw std::invalid_argument(fmt::format("ladder '{}{}': {}", text.substr(0, kShown),
                                          text.size() > kShown ? "..." : "", why));
}

const KvForm& form_named(std::string_view name, std::string_view text) {
  const auto* const form = std::ranges::find(kKvForms, name, &KvForm::name);
  if (form != std::end(kKvForms)) return *form;
  std::vector<std::string_view> known;
  for (const KvForm& one : kKvForms) known.push_back(one.name);
  refuse(text, fmt::format("'{}' is no rung; known: {}", name, fmt::join(known, ", ")));
}

Extent share_of(std::string_view share, std::string_view text) {
  if (!share.ends_with('t') && !share.ends_with('%'))
    refuse(text, fmt::format("'{}' should be tokens such as 16t, or a share such as 25%", share));
  if (share.ends_with('t')) share.remove_suffix(1);
  return parse_extent(share, fmt::format("ladder '{}': share", text), 1);
}

/// Before anything is made of them: each costs time in the length of the text.
void refuse_many(std::string_view text) {
  const auto tiers = std::ranges::count_if(text, [](char c) { return c == ',' || c == '+'; }) + 1;
  if (static_cast<std::size_t>(tiers) <= kMaxTiers) return;
  refuse(text, fmt::format("a plan of {} tiers; at most {} are allowed", tiers, kMaxTiers));
}

void check(const Ladder& ladder, std::string_view text) {
  std::uint64_t shares = 0;
  const KvForm* above = kKvForms;
  for (const Ladder::Rung& rung : ladder.rungs) {
    if (rung.form < above)
      refuse(text, fmt::format("{} under {}: rungs go down", rung.form->name, above->name));
    above = rung.form;
    if (rung.form->kivi && ladder.rungs.size() > 1)
      refuse(text,
             fmt::format("{} keeps all tokens in its own way; it stands alone", rung.form->name));
    if (rung.share.is_share) shares += rung.share.share_ppm;
  }
  if (shares != kWhole)
    refuse(text, fmt::format("shares come to {:g}%; 100% are expected",
                             static_cast<double>(shares) / 1e4));
}

}  // namespace

std::uint32_t tokens_of(std::span<const RungSlots> ladder) {
  std::uint64_t tokens = 0;
  for (const RungSlots& rung : ladder) tokens += rung.slots;
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(tokens, 0x7fff'ffffu));
}

std::vector<const KvForm*> way_down(std::span<const RungSlots> ladder, int from, int to) {
  std::vector<const KvForm*> forms;
  const std::size_t next = from < 0 ? 0 : static_cast<std::size_t>(from) + 1;
  const KvForm* above = next == 0 ? &kKvForms[0] : ladder[next - 1].form;
  for (std::size_t r = next; r <= static_cast<std::size_t>(to); ++r) {
    if (*ladder[r].form != *above) forms.push_back(ladder[r].form);
    above = ladder[r].form;
  }
  return forms;
}

void check_coded_heads(std::uint32_t head_size) {
  if (head_size % kCodeBlock != 0)
    throw std::invalid_argument(
        fmt::format("a ladder of codes: heads of {} channels; whole blocks of {} are expected",
                    head_size, kCodeBlock));
}

std::string Ladder::text(char between, char of) const {
  if (rungs.size() == 1) return std::string(rungs.front().form->name);
  std::string text;
  for (const Rung& rung : rungs)
    text += fmt::format("{}{}{}{}{}", text.empty() ? "" : std::string(1, between), rung.form->name,
                        of, text_of(rung.share), rung.share.is_share ? "" : "t");
  return text;
}

std::vector<RungSlots> Ladder::slots(std::uint64_t bytes, std::uint32_t blocks) const {
  std::uint64_t rest = bytes, left = bytes;
  const auto bytes_of = [&](const Rung& rung) {
    return std::uint64_t{rung.form->block_bytes()} * blocks;
  };
  for (const Rung& rung : rungs)
    if (!rung.share.is_share) rest -= std::min(rest, rung.share.tokens * bytes_of(rung));
  std::vector<RungSlots> slots;
  for (const Rung& rung : rungs) {
    std::uint64_t own = left;
    if (!rung.share.is_share)
      own = std::min(left, rung.share.tokens * bytes_of(rung));
    else if (&rung != &rungs.back())
      own = static_cast<std::uint64_t>(static_cast<unsigned __int128>(rest) * rung.share.share_ppm /
                                       kWhole);
    const std::uint64_t count = std::min<std::uint64_t>(own / bytes_of(rung), 0x7fff'ffffu);
    slots.push_back({rung.form, static_cast<std::uint32_t>(count)});
    left -= count * bytes_of(rung);
  }
  if (slots.front().slots == 0)
    throw BudgetTooSmall(
        fmt::format(
            "ladder {}: {} bytes are too few for one token on its first tier, which takes {}",
            text(), bytes, bytes_of(rungs.front())),
        "");
  return slots;
}

std::uint64_t Ladder::least_token_bytes(std::uint32_t head_size) const {
  std::uint32_t least = kKvForms[0].block_bytes();
  for (const Rung& rung : rungs) least = std::min(least, rung.form->block_bytes());
  return std::uint64_t{least} * head_size / kCodeBlock;
}

Ladder parse_ladder(std::string_view text) {
  refuse_many(text);
  Ladder ladder{.rungs = {}};
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find_first_of(",+", begin), text.size());
    const std::string_view rung = text.substr(begin, end - begin);
    const std::size_t colon = std::min(rung.find_first_of(":@"), rung.size());
    ladder.rungs.push_back({&form_named(rung.substr(0, colon), text)});
    if (colon < rung.size()) ladder.rungs.back().share = share_of(rung.substr(colon + 1), text);
    begin = end + 1;
  }
  check(ladder, text);
  return ladder;
}

}  // namespace kvlab
