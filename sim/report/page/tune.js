// The page of a policy file that tune wrote: which policy, and how the others were eliminated.

const kHalvingNote = 'Offline replay ordered the sweep; the first configurations of that order were evaluated end to end, in ' +
  'rounds with more and more text. A configuration is eliminated when the 95% CI of its paired KL difference from the leader ' +
  'is entirely above zero. KL values of different rounds are measured on different amounts of text, so do not compare them.';

/** The best policy by each criterion, and the reason for the deployed one. */
function criteriaText({distribution, task_accuracy: tasks, why}) {
  const name = (policy) => (policy === null ? 'none (tasks skipped)' : named(policy));
  return ` Best by KL: ${name(distribution)}. Best by task accuracy: ${name(tasks)}. Reason: ${named(why)}.`;
}

/** The choice, its budget, the criteria and the texts. */
function tuneAnswer({budget, winner, texts, criteria}) {
  const tokens = texts.reduce((sum, text) => sum + text.tokens - text.prompt_tokens, 0);
  return answer(`At a budget of ${budget} tokens `, strong(winner.policy), ` was chosen: KL ${numberText(winner.kl)} nats to ` +
    `the full cache, over ${tokens} decoded tokens of ${joinNames(texts.map((text) => named(text.name)))}.` +
    (criteria ? criteriaText(criteria) : ''));
}

function accuracyTable(criteria) {
  const asked = criteria?.policies.filter((one) => one.task_accuracy) ?? [];
  if (!asked.length) return null;
  return section('Task accuracy', 'Share of right answers. The question comes after the eviction. KL is given as a multiple of ' +
    'the lowest.', dataTable(['policy', 'KL / lowest KL', ...criteria.evaluated.flatMap((task) =>
    [`${task.task}, ${task.words} words, ${task.samples} samples`, '95% CI from', 'to'])], asked.map((one) => [named(one.policy),
    numberCell(one.kl_over_lowest), ...one.task_accuracy.flatMap(({right, low, high}) => [right, low, high].map((value) =>
      numberCell(value)))]), {texts: ['policy']}));
}

function scoresTable(scores, step) {
  if (!scores) return null;
  return section('Compared with the full cache', step ? `A decoded token takes ${numberText(step.deployed)} ms; with the full cache ` +
    `${numberText(step.full)} ms.` : '', dataTable(['policy', 'perplexity', 'KL, nats', 'standard deviation over texts', 'top-1',
    'scored tokens'], scores.map((one) => [named(one.policy), ...[one.perplexity, one.kl, one.kl_deviation, one.same_first,
    one.tokens].map((value) => numberCell(value))]), {texts: ['policy']}));
}

/** A row for each policy, the last round first: its KL in each round, and when it was eliminated. */
function roundsTable({rounds, ended}) {
  const inRound = (round, policy) => rounds[round]?.find((one) => one.policy === policy);
  const rowsOf = (round, last) => round.filter((one) => !inRound(last + 1, one.policy)).map((one) => {
    const kl = rounds.map((_, r) => (inRound(r, one.policy) ? numberCell(inRound(r, one.policy).kl) : ''));
    const difference = one === round[0] ? ['leads', '', '']
      : [one.from_lowest.mean, one.from_lowest.low, one.from_lowest.high].map((value) => numberCell(value));
    const status = last + 1 < rounds.length ? `eliminated after round ${last + 1}: ${one.status}` : one.status;
    return [named(one.policy), ...kl, ...difference, named(status)];
  });
  return section('Rounds of successive halving', `${kHalvingNote} Ended: ${named(ended)}.`, dataTable(['policy',
    ...rounds.map((_, r) => `KL, round ${r + 1}`), 'minus the leader', '95% CI from', 'to', 'outcome'], rounds.map(rowsOf).reverse().flat(),
  {texts: ['policy', 'outcome']}));
}

function offlineOrder({metric, ranking}) {
  return section('Order by offline replay', '', element('details', {}, element('summary', {},
    `all ${ranking.length} configurations`), dataTable(['policy', metric], ranking.map((one) => [named(one.policy),
    numberCell(one.value)]), {texts: ['policy']})));
}

function tunePage(data) {
  const {facts, figures} = data, last = facts.rounds.at(-1).length, drawn = figures[0].series.length;
  return {
    command: 'kvlab tune',
    question: `Which policy should ${shown(facts.model, 100)} use?`,
    front: [tuneAnswer(facts)],
    // The answer and its figure fill one screen. The rounds follow below.
    sections: [figuresSection('Difference from the leader', 'The last round: the KL of each policy minus that of the leader, with ' +
      'the 95% interval. A difference is not significant if its interval includes zero.' + (last > drawn ?
      ` Shown: the first ${drawn} of ${last}.` : ''),
    figures),
    section('Recommendation by KL', '', ...data.recommendations.flatMap((made) => recommended(made, facts.next))),
    accuracyTable(facts.criteria), scoresTable(facts.scores, facts.step), roundsTable(facts), offlineOrder(facts.offline)],
  };
}
