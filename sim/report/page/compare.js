// The page of `kvlab compare`: how do several runs differ?

/** How often the last run is better on the texts that it shares with the first. */
function sharedAnswer({runs, shared, warning}) {
  const {configurations, better, worse, similar} = shared;
  if (!configurations)
    return answer(`No policy has the same settings and budget in ${named(runs[0].name)} and ${named(runs.at(-1).name)}, so there ` +
      'is no difference to show.');
  const paired = better + worse + similar;
  const count = counted(paired || configurations, 'configuration is', 'configurations are');
  if (paired === 0)
    return answer(`${count} in both, but the runs scored nothing in common, so differences cannot be paired and are not ` +
      'shown.');
  return answer(`${count} in both and measured on the same texts. `, strong(runs.at(-1).name), ' is significantly better than ',
    strong(runs[0].name), ` in ${better}, significantly worse in ${worse}, and not significantly different in ${similar}.` +
    (warning ? ' Differences use only texts that are in both runs.' : ''));
}

/** The configurations that runs share: each run's value, and the last run minus the first. */
function sharedTable({runs, rows}) {
  if (!rows.length) return section('Configurations that the runs share', 'No configuration is in two of the runs.');
  const names = runs.map((run) => run.name), paired = rows.some((row) => row.interval);
  const missing = ({scores}) => ['–', '', '', scores[0] && scores.at(-1) ? 'nothing scored in common' : 'not in both'];
  const difference = ({interval}) => [numberCell(interval.mean), numberCell(interval.low), numberCell(interval.high),
    interval.significantly_different ? 'significant' : 'not significant'];
  return section('Configurations that the runs share', '', dataTable(['policy', 'budget', 'model', ...names,
    ...(paired ? [`${names.at(-1)} − ${names[0]}`, '95% CI from', 'to', ''] : [])], rows.map((row) => [named(row.label),
    named(row.budget), named(row.model), ...row.scores.map(averageCell), ...(paired ? (row.interval ? difference : missing)(row) : [])]),
  {texts: ['policy', 'model', '']}));
}

function comparePage(data) {
  const {facts} = data, names = facts.runs.map((run) => shown(run.name, 100));
  return {
    command: 'kvlab compare',
    question: `How do ${joinNames(names)} differ?`,
    context: `${names.length} ${facts.of}s, compared by ${facts.metric}. Models: ` +
      `${[...new Set(data.groups.map((group) => named(group.name)))].sort().join('; ')}. Values are not averaged over models.`,
    front: [sharedAnswer(facts), ...facts.runs.filter((run) => run.budgets.length).flatMap((run) =>
      recommended(run, '', run.name)), nextCommand(`kvlab report ${facts.runs.at(-1).name} --out page.html`)],
    sections: [frontierSection(data), exploreSection(data, `Each policy of each ${facts.of}`, data.description),
      data.heads > 0 ? drawnSection('heads', 'By layer and head', data.note) : null, sharedTable(facts)],
  };
}
