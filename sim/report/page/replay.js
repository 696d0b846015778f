// The page of a replay: which tokens should the cache keep?

/** The rank correlations that a fidelity measurement on a real model gave (docs/internals/measurements/fidelity.md). */
const kEvidence = {kl_estimate_joint: ['0.87', '0.98'], kl_estimate: ['0.83', '0.95'], residual_error: ['0.65', '0.91'],
  layer_error: ['0.50', '0.92'], nll_recall: ['0.41', '0.91']};

/** By metric: what it means. */
const kReplayMeanings = {
  fetch_rate: 'share of the selected tokens that were not in the buffer and had to be fetched',
  fetch_bytes: 'bytes of keys and values fetched for a query, summed over the KV heads',
  selection_recall: 'share of the selected tokens that are among the K most probable tokens, if K tokens are selected',
  recall: 'share of the full cache’s attention that the kept tokens hold; mean over queries',
  recall_p10: '10th percentile of recall over a head’s queries',
  nll_recall: 'mean over queries of −ln of the share of attention that the kept tokens hold: the divergence of the kept attention from ' +
    'the full attention',
  miss_rate: 'share of requested tokens that had been evicted',
  output_error: '‖o − ô‖ / ‖o‖ of a head’s output, before the output projection',
  layer_error: '‖o − ô‖ / ‖o‖ of the concatenated outputs of a layer’s heads, before the output projection',
  residual_error: 'squared norm of the change that evictions cause in the residual stream, divided by the squared norm of the ' +
    'stream, summed over layers',
  kl_estimate: 'divergence of the model’s predictions from those with the full cache, in nats, estimated from gradients: the ' +
    'sum over the layers, as if each layer evicted alone',
  kl_estimate_joint: 'kl_estimate with evictions in all layers together',
  acceptance: 'share of drafted tokens that the model would accept if the policy’s cache drafted them, estimated from gradients',
  live_max: 'largest number of tokens that a head held at once; during a dense prompt a head holds all tokens, at every budget',
};
/** By oracle: what it does. */
const kOracles = {
  belady: 'evicts the token whose next selection is farthest in the future; no policy fetches fewer tokens',
  oracle_attention: 'evicts the token with the least future attention; it is a heuristic, not a bound',
  oracle_residual: 'evicts the token whose loss changes the residual stream least; it is a heuristic, not a bound',
  oracle_topk: 'keeps each query’s most probable tokens; bounds recall and the miss rate',
};

const kCurves = 'Error bars show one standard error. The full cache has recall 1 and no error.';
const kBuffers = 'Lower and further left is better. The solid grey line is `lru` without protected tokens at all ' +
  'sizes, from one pass over each trace.';
const kKept = 'The text that the model read, up to one query. Shading: attention in the full cache, averaged over the query ' +
  'heads of the KV head. Evicted tokens are struck out. Those evicted since the previous step are framed. Evicted tokens to ' +
  'which the query attends in the full cache are red.';

/** How well the deciding metric predicted end-to-end KL in measurements. */
function evidenceOf({headline, metrics}) {
  if (!(headline in kEvidence)) return '';
  const label = metrics.find((metric) => metric.name === headline).label, [lowest, highest] = kEvidence[headline];
  return `${upperFirst(label)} predicts the order of policies by end-to-end KL with rank correlation ` +
    `${lowest} to ${highest} (measured on SmolLM2, 20 policies, 8 texts). \`kvlab fidelity\` measures it on your model.`;
}

/** The oracles of the run, each once. */
function oraclesOf({series}) {
  return Object.keys(kOracles).filter((name) => series.some((one) => one.oracle && one.policy === name));
}

/** What the curves show, and what each oracle of the run does. */
function curvesText(data) {
  const oracles = oraclesOf(data);
  if (!oracles.length) return kCurves;
  return `${kCurves} Lines without markers are oracles, which know the future and cannot be deployed. They are drawn only for ` +
    `metrics for which they are a fair comparison. ${oracles.map((name) => `\`${name}\` ${kOracles[name]}.`).join(' ')}`;
}

function metricTerms(data) {
  return [...data.metrics.filter(({name}) => name in kReplayMeanings).map(({name, label}) => [label, kReplayMeanings[name]]),
    ...oraclesOf(data).map((name) => [name, kOracles[name]])];
}

/** The question of the page. It depends on whether evicted tokens return (refetch). */
function replayQuestion({facts, groups}) {
  const models = joinNames(groups.map((group) => shown(group.name, 100)));
  return facts.refetch ? `Which tokens should ${models} hold in a buffer on the GPU?` : `Which eviction policy should the KV cache of ${models} use?`;
}

/** 6 policies; 2 policies in 5 variants. */
function policiesText({series}) {
  const evicting = series.filter((one) => !one.oracle && !one.full), names = new Set(evicting.map((one) => one.policy));
  return counted(names.size, 'policy', 'policies') +
    (evicting.length > names.size ? ` in ${evicting.length} variants` : '');
}

/** Every metric of one model: a row for each policy and budget. */
function allMetrics(data, group) {
  const table = new MetricTable(data), caption = data.groups.length > 1 ? data.groups[group].name : '';
  const cell = (metric, s, b) => {
    const at = table.at(group, metric.name, s, b);
    if (!at) return '–';
    return metric.name.includes('_bytes') ? bytesCell(at.value) : averageCell({mean: at.value, error: at.error});
  };
  const row = (one, s, b, budget) => [{content: [...colourDot(one.colour), named(one.label)]}, named(budget),
    ...data.metrics.map((metric) => cell(metric, s, b))];
  const rows = data.series.flatMap((one, s) => {
    // A trace of selections has no recall.
    const has = (b) => data.metrics.some((metric) => table.at(group, metric.name, s, b));
    const budgets = data.budgets.map(({text}, b) => [text, b]).filter(([, b]) => has(b));
    return one.full ? [row(one, s, 0, 'all')] : budgets.map(([text, b]) => row(one, s, b, text));
  });
  return dataTable(['policy', 'budget', ...data.metrics.map((metric) => metric.label)], rows, {caption, texts: ['policy']});
}

function traceTerm(trace) {
  return lines([
    element('span', {}, `${named(trace.name)}: ${trace.tokens} tokens, ${trace.prompt_tokens} of them prompt; manifest `,
      code(trace.hash)),
    element('span', {}, `${named(trace.model)}, ${trace.layers} layers, ${trace.query_heads} query and ${trace.kv_heads} KV ` +
      `heads of ${trace.head_size}, ${named([trace.dtype, trace.windows].filter(Boolean).join('; '))}; weights `, code(trace.weights)),
    element('span', {}, 'captured by ', code(trace.capture))]);
}

function replayProvenance({facts, series}) {
  const policies = series.map((one) => element('span', {}, code(one.policy + (one.params && ':' + one.params)),
    ` (${one.positions} positions, ${one.prefill} prefill)`));
  return section('Where this comes from', 'Offline replay: queries and keys come from the full-cache run, so the effect of ' +
    'eviction on later layers and tokens is not included. `kvlab eval` measures it.', terms([
    ...facts.traces.map((trace) => ['trace', traceTerm(trace)]), ['policies', lines(policies)], ['queries', facts.queries],
    ['layers', facts.layers.length ? facts.layers.join(', ') : 'all'], ['request threshold', String(facts.threshold)],
    ...(facts.refetch ? [['selector', code(facts.refetch)]] : []),
    ['run', code(facts.run)], ['kvlab', named(facts.kvlab)]]));
}

function replayPage(data) {
  const {facts, groups} = data, one = groups.length === 1, tokens = facts.traces.reduce((sum, trace) => sum + trace.tokens, 0);
  return {
    command: 'kvlab report',
    question: replayQuestion(data),
    context: `${policiesText(data)} at ${counted(data.budgets.length, 'budget')}, replayed over ` +
      `${counted(facts.traces.length, 'captured text')} (${numberText(tokens)} tokens).`,
    front: [...data.recommendations.flatMap((made) => recommended(made, facts.next, one ? '' : made.name, data)),
      quiet(evidenceOf(data))],
    sections: [frontierSection(data),
      figuresSection('Which size of the buffer?', `${facts.buffer_sizes} ${kBuffers}`, figuresOf(data, 'buffers')),
      exploreSection(data, 'Metrics by budget', curvesText(data)),
      data.heads > 0 ? drawnSection('heads', 'By layer and head', data.note) : null,
      data.kept ? drawnSection('kept', 'Which tokens were kept', kKept) : null,
      section('What the metrics mean', '', terms(metricTerms(data), {class: 'prose'})), replayProvenance(data),
      section('All metrics', `Over all layers and heads${facts.traces.length > groups.length ? ', averaged over the sequences'
        : ''}. By layer and by head: \`results.csv\`.`, ...groups.map((_, g) => allMetrics(data, g)))],
  };
}
