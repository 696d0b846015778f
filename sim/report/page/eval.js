// The page of an end-to-end evaluation: what do evictions cost the model?

const kEvalNote = 'End-to-end evaluation with teacher forcing: evictions change what later layers see. A difference is ' +
  'significant if its 95% interval, paired over texts or over the blocks of one text, excludes zero.';
const kEvalMeanings = [
  ['KL', 'divergence of the next token’s distribution from the full cache’s, in nats; mean, and percentiles over the tokens'],
  ['perplexity', 'exp of the mean negative log-likelihood of the tokens of the text'],
  ['top-1', 'share of tokens at which the most likely next token is the same as with the full cache'],
];
const kDraftMeanings = [
  ['acceptance', 'share of the tokens drafted with the policy’s cache that the full cache accepts, at temperature 1'],
  ['tokens per verification', 'expected tokens that one verification yields, its own one included'],
];

/** Every configuration at one budget, in the order of the recommendation. */
function candidatesTable(made) {
  const row = (one, ...compared) => [named(one.policy), numberCell(one.mean), ...compared, bytesCell(one.kv_bytes_mean),
    bytesCell(one.kv_bytes_peak)];
  const ranked = made.order.map((one) => {
    const {mean: worse, low: from, high: to} = one.from_choice;
    const [mean, low, high] = minusBest([worse, from, to], made.better === 'higher');
    return one.policy === made.choice ? row(one, '', '', '', 'chosen')
      : row(one, numberCell(mean), numberCell(low), numberCell(high), significance(one.from_choice));
  });
  const over = made.over_budget.map((one) => row(one, '', '', '', 'over budget'));
  return dataTable(['policy', made.metric, made.metric === 'acceptance' ? 'minus the choice' : 'minus the choice, nats', '95% CI from', 'to', '', 'mean KV', 'peak KV'],
    [...ranked, ...over], {caption: `budget ${made.budget}`, texts: ['policy', '']});
}

function draftMetrics(configurations) {
  return dataTable(['policy', 'budget', 'acceptance', 'tokens per verification', 'top-1', 'mean KV'], configurations.map((one) => [
    named(one.label), named(one.budget), ...['acceptance', 'tokens_per_verification', 'top1_agreement'].map((metric) =>
      numberCell(one[metric])), bytesCell(one.kv_bytes_mean)]), {texts: ['policy']});
}

function evalMetrics(configurations) {
  const metrics = ['perplexity', 'kl', 'kl_p50', 'kl_p90', 'kl_p99', 'kl_deviation', 'top1_agreement'];
  return dataTable(['policy', 'budget', 'positions', 'perplexity', 'KL', 'KL, median', 'KL, 90%', 'KL, 99%',
    'KL, standard deviation over texts', 'top-1', 'mean KV', 'peak KV'], configurations.map((one) => [
    named(one.label), named(one.budget), named(one.positions), ...metrics.map((metric) => numberCell(one[metric])), bytesCell(one.kv_bytes_mean),
    bytesCell(one.kv_bytes_peak)]), {texts: ['policy', 'positions']});
}

function evalFront(data) {
  const {facts, recommendations} = data;
  if (!facts.has_recommendations)
    return [answer('This evaluation was made by an older kvlab and has no recommendations. Run kvlab eval again.')];
  const [made] = recommendations, warnings = [...new Set([...made.warnings, ...facts.warnings])];
  return [...recommended({...made, warnings}, facts.next, '', data), quiet(kEvalNote)];
}

function evalPage(data) {
  const {facts} = data, full = facts.configurations.filter((one) => one.policy === 'full').length;
  const evicting = facts.configurations.length - full, texts = joinNames(facts.texts.map(named));
  const budgets = facts.has_recommendations ? data.recommendations[0].budgets : [];
  return {
    command: 'kvlab eval',
    question: data.headline === 'acceptance' ? `How many drafted tokens does ${shown(facts.model, 100)} accept?`
      : `What do evictions cost ${shown(facts.model, 100)}?`,
    context: `${counted(evicting, 'configuration')}${full ? ' and the full cache' : ''}, over ${facts.tokens} scored tokens of ` +
      `${texts}.`,
    front: evalFront(data),
    sections: [frontierSection(data), exploreSection(data, 'Metrics by budget', data.description),
      budgets.length ? section('All policies at each budget', 'Differences are paired over the same tokens. The metric is KL, or ' +
        'the negative log-likelihood if the full cache was not evaluated; with drafts, it is acceptance.', ...budgets.map(candidatesTable)) : null,
      facts.draft ? section('Drafts', `Each cache drafts ${facts.draft} tokens before a verification.`,
        draftMetrics(facts.configurations)) : null,
      section('All metrics', '', evalMetrics(facts.configurations)),
      section('What the metrics mean', '', terms([...facts.draft ? kDraftMeanings : [], ...kEvalMeanings], {class: 'prose'})),
      section('Where this comes from', '', terms([['weights', code(facts.weights_xxh3)], ['texts', texts],
        ['queries', named(facts.queries)], ['kvlab', named(facts.kvlab)]]))],
  };
}
