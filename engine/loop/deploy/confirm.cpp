#include "engine/loop/deploy/confirm.hpp"

#include "engine/loop/deploy/candidates.hpp"
#include "engine/loop/eval/table.hpp"
#include "traces/base/json.hpp"

namespace kvlab {

std::vector<Confirmed> confirm(const Evaluation& evaluation, const Figures& figures,
                               Ballot& ballot) {
  const std::string budget = evaluation.scores[1].config.budget.text();
  std::vector<Confirmed> confirmed;
  std::vector<Candidate> candidates;
  for (const Evaluation::Contender& contender : evaluation.contenders(budget)) {
    const std::size_t standing = contender.score - 1;  // behind the full cache
    confirmed.push_back({standing, evaluation.scores[contender.score], contender.behind});
    candidates.push_back(candidate_of(figures, ballot, standing, confirmed.back().ties()));
  }
  ballot.winner = confirmed[preferred(candidates)].standing;
  return confirmed;
}

nlohmann::ordered_json confirmed_json(const std::vector<Confirmed>& confirmed,
                                      const Figures& figures, const Ballot& ballot) {
  auto list = nlohmann::ordered_json::array();
  for (const Confirmed& entry : confirmed)
    list.push_back({{"policy", figures.series()[ballot.standings[entry.standing].series].label},
                    {"kl", number_or_null(entry.score.kl)},
                    {"kl_stderr", number_or_null(entry.score.kl_error)},
                    {"behind", difference_json(entry.behind)},
                    {"ties_with_first", entry.ties()},
                    {"perplexity", number_or_null(entry.score.perplexity)},
                    {"perplexity_stderr", number_or_null(entry.score.perplexity_error)},
                    {"same_first", number_or_null(entry.score.same_first)},
                    {"kl_deviation", number_or_null(entry.score.kl_deviation)},
                    {"tokens", entry.score.tokens}});
  return list;
}

}  // namespace kvlab
