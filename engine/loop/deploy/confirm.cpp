#include "engine/loop/deploy/confirm.hpp"

#include "sim/report/verdict.hpp"
#include "traces/base/json.hpp"

namespace kvlab {

std::vector<Confirmed> confirm(const Evaluation& evaluation, Ballot& ballot) {
  const auto judged = evaluation.judged(evaluation.scores[1].config.budget.text());
  std::vector<Confirmed> confirmed;
  const auto add = [&](std::size_t c, const Difference& behind, bool holds_more) {
    const std::size_t score = judged.scores[c];  // behind the full cache
    confirmed.push_back({score - 1, evaluation.scores[score], behind, holds_more});
  };
  for (std::size_t i = 0; i < judged.verdict.order.size(); ++i)
    add(judged.verdict.order[i], judged.verdict.behind[i], false);
  for (const std::size_t c : judged.verdict.more) add(c, {}, true);
  ballot.winner = judged.scores[judged.verdict.winner()] - 1;
  return confirmed;
}

nlohmann::ordered_json confirmed_json(const std::vector<Confirmed>& confirmed,
                                      const Figures& figures, const Ballot& ballot) {
  auto list = nlohmann::ordered_json::array();
  for (const Confirmed& entry : confirmed)
    list.push_back({{"policy", figures.series()[ballot.standings()[entry.standing].series].label},
                    {"kl", number_or_null(entry.score.kl)},
                    {"kl_stderr", number_or_null(entry.score.kl_error)},
                    {"behind", difference_json(entry.behind)},
                    {"ties_with_first", entry.ties()},
                    {"holds_more", entry.holds_more},
                    {"perplexity", number_or_null(entry.score.perplexity)},
                    {"perplexity_stderr", number_or_null(entry.score.perplexity_error)},
                    {"same_first", number_or_null(entry.score.same_first)},
                    {"kl_deviation", number_or_null(entry.score.kl_deviation)},
                    {"tokens", entry.score.tokens}});
  return list;
}

}  // namespace kvlab
