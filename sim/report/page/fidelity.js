// The page of a fidelity measurement: which metric of a replay predicts the end-to-end KL?

const kFidelityNote = 'Rho: Spearman’s rank correlation among the policies of one budget, averaged over texts; its 95% ' +
  'interval is a bootstrap over texts. Regret: KL of the policy that the metric puts first, divided by the lowest KL.';
const kScatter = 'Each point is a policy, averaged over texts. If a metric predicts KL, the points rise from left to right.';
const kWrong = 'Pairs of policies that differ significantly in KL (paired block bootstrap, 95%) and that the metric puts in ' +
  'the opposite order, worst first. Ratio: KL of the policy that the metric prefers, divided by the KL of the other.';
const kCeiling = 'The metric that predicts the order of policies best comes first. The last row compares KL on one text with KL on ' +
  'another. A metric that is measured on one text cannot be expected to predict better.';
const kMaxWrong = 5;  // pairs shown for a budget

function rhoText(rho) {
  return fixed(rho, 2);
}

function fidelityAnswer({budgets, standard, metrics}) {
  const own = metrics.find((metric) => metric.name === standard), known = own.budgets.map(({within}) =>
    (within === null ? '–' : rhoText(within)));
  const worst = own.budgets.reduce((a, {regret}, b) => (regret > a.regret ? {regret, b} : a), {regret: 0, b: 0});
  return answer(element('code', {}, 'kvlab deploy'), ' chooses by ', strong(standard), ' here. It predicts the order of ' +
    `end-to-end KL with rank correlation ${joinNames(known.map((rho, b) => `${rho} at ${named(budgets[b])}`))}. The policy that ` +
    `it puts first has at most ${rhoText(worst.regret)} times the lowest KL (at ${named(worst.regret ? budgets[worst.b] : '')}).`);
}

function predictionTable({budgets, standard, metrics, ceiling}) {
  const rho = (value) => numberCell(value, rhoText);
  const rows = metrics.map((metric) => [metric.name === standard ? strong(metric.name) : named(metric.name),
    ...metric.budgets.flatMap(({within, low, high, regret}) => [within, low, high, regret].map(rho)), rho(metric.pooled)]);
  return section('Within a budget', kCeiling, dataTable(['metric', ...budgets.flatMap((budget) => [`rho at ${budget}`, 'from',
    'to', 'regret']), 'pooled'], [...rows, ['KL of one text against another', ...ceiling.flatMap((value) => [rho(value), '', '', '']), '']],
  {texts: ['metric']}));
}

function wrongTable({budgets, standard, metrics}) {
  const own = metrics.find((metric) => metric.name === standard);
  const rows = own.budgets.flatMap(({misordered, significantly_different: all, wrong}, b) => {
    const pairs = wrong.slice(0, kMaxWrong).map((pair) => [named(pair.preferred), named(pair.better), numberCell(pair.kl_ratio)]);
    return (pairs.length ? pairs : [['', '', '']]).map((pair) => [named(budgets[b]), String(misordered), String(all), ...pair]);
  });
  return section(`Where ${named(standard)} is wrong`, kWrong, dataTable(['budget', 'misordered pairs', 'significant pairs',
    'preferred by the metric', 'lower KL', 'ratio'], rows, {texts: ['preferred by the metric', 'lower KL']}));
}

/** The texts' lengths: one if all are equal, else in the order of the texts. */
function lengthsText(texts) {
  const lengths = texts.map((text) => `${text.tokens}, ${text.prompt_tokens} of them prompt`);
  return (new Set(lengths).size > 1 ? lengths : lengths.slice(0, 1)).join('; ');
}

function fidelityPage(data) {
  const {facts, figures} = data;
  return {
    command: 'kvlab fidelity',
    question: `Which metric predicts the end-to-end KL of ${shown(facts.model, 100)}?`,
    context: `${facts.policies.length} policies at ${facts.budgets.length} budgets over ${facts.texts.length} texts: metrics of ` +
      'an offline replay, against the KL to the full cache of an end-to-end evaluation.',
    front: [fidelityAnswer(facts), element('p', {class: 'quiet'}, kFidelityNote)],
    sections: [frontierSection(data), predictionTable(facts), figuresSection(`${named(facts.standard)} against KL`, kScatter,
      figures.filter((figure) => figure.name !== 'frontier')), wrongTable(facts),
    section('Where this comes from', '', terms([['weights', code(facts.weights_xxh3)],
      ['texts', joinNames(facts.texts.map((text) => named(text.name)))], ['tokens', lengthsText(facts.texts)],
      ['policies', lines(facts.policies.map(code))], ['kvlab', named(facts.kvlab)]]))],
  };
}
