// A metric against the budget, or against a parameter that a policy was given several values of.
const kDashes = {1: [], 2: [7, 4], 3: [2, 3], 4: [7, 3, 2, 3], 5: [10, 3, 2, 3, 2, 3]};
const kShapes = {2: 'cross', 4: 'square', 5: 'square', 6: 'circle', 7: 'circle', 8: 'triangle-up',
  9: 'triangle-up', 10: 'triangle-down', 11: 'triangle-down', 12: 'diamond', 13: 'diamond'};

function settingsOf(params) {
  return new Map(params.split(':').filter(Boolean).map((part) => {
    const at = part.indexOf('=');
    return [part.slice(0, at), part.slice(at + 1)];
  }));
}

/** What policies were given three or more numbers of: [{policy, parameter, series: [index, number]}]. */
function sweepsOf(series) {
  const found = new Map();
  series.forEach((one, index) => {
    if (one.reference || one.full) return;
    const settings = settingsOf(one.params);
    for (const [name, text] of settings) {
      const number = Number(text.replace(/%$/, ''));
      if (text === '' || Number.isNaN(number)) continue;
      const rest = [...settings].filter(([other]) => other !== name).map((pair) => pair.join('='));
      const key = [one.run ?? '', one.policy, name, rest.join(':'), one.prefill, one.positions, one.seed].join('\n');
      if (!found.has(key)) found.set(key, {policy: one.policy, parameter: name, rest: rest.join(':'), series: []});
      found.get(key).series.push([index, number]);
    }
  });
  return [...found.values()].filter((sweep) => sweep.series.length > 2)
    .map((sweep) => ({...sweep, series: sweep.series.sort((a, b) => a[1] - b[1])}));
}

/** A dot of the figure: what a reader sees, and what the tests read back. */
function dot(page, series, budget, x) {
  const {state, figures, data} = page;
  const at = figures.at(state.group, state.metric, series, budget, state.layer, state.head);
  if (!at) return null;
  const spread = state.layer < 0 ? figures.spread(state.group, state.metric, series, budget) : null;
  const error = Number.isNaN(at.error) ? 0 : at.error;
  return {series, budget, x, y: at.value, low: at.value - error, high: at.value + error, error: at.error,
    count: at.count, least: spread ? Math.min(...spread) : null, most: spread ? Math.max(...spread) : null,
    label: data.series[series].label, asked: data.budgets[budget].text};
}

function budgetDots(page) {
  const {data, state} = page;
  const dots = [];
  data.series.forEach((one, s) => {
    if (one.full || state.hidden.has(s) || one.bound === false) return;
    data.budgets.forEach((budget, b) => {
      const made = dot(page, s, b, budget.tokens);
      if (made) dots.push({...made, line: 's' + s});
    });
  });
  return dots;
}

function sweepDots(page, sweep) {
  return page.data.budgets.flatMap((budget, b) => sweep.series.map(([s, number]) => {
    const made = dot(page, s, b, number);
    return made && {...made, line: 'b' + b};
  }).filter(Boolean));
}

/** How each line looks, by its id: of a policy its own colours; of budgets from faint to strong. */
function linesOf(page, sweep) {
  const {data} = page;
  if (!sweep)
    return data.series.map((one, s) => ({line: 's' + s, label: shown(one.label), colour: pageColour(one.colour),
      dash: kDashes[one.dash] ?? [], shape: kShapes[one.point] ?? 'circle', size: one.point ? 46 : 0}));
  const colours = ['sky', 'blue', 'green', 'orange', 'vermilion', 'purple', 'wine', 'ink'];
  return data.budgets.map((budget, b) => ({line: 'b' + b, label: 'budget ' + shown(budget.text),
    colour: pageColour(colours[b % colours.length]), dash: [], shape: 'circle', size: 46}));
}

function curveMarks(byLine) {
  const x = {scale: 'x', field: 'x'}, colour = {scale: 'colour', field: 'line'};
  const rule = (low, high, opacity, width) => ({type: 'rule', from: {data: 'dots'}, encode: {enter: {x,
    y: {scale: 'y', field: low}, y2: {scale: 'y', field: high}, stroke: colour,
    strokeWidth: {value: width}, opacity: {value: opacity}}}});
  const spread = rule('least', 'most', 0.22, 6);
  spread.from = {data: 'spreads'};
  return [spread, rule('low', 'high', 1, 1.3),
    {type: 'group', from: {facet: {name: 'own', data: 'dots', groupby: 'line'}}, marks: [{type: 'line',
      from: {data: 'own'}, encode: {enter: {x, y: {scale: 'y', field: 'y'}, stroke: colour,
        strokeDash: {scale: 'dash', field: 'line'}, strokeWidth: {value: 1.8}}}}]},
    {type: 'symbol', from: {data: 'dots'}, encode: {enter: {x, y: {scale: 'y', field: 'y'}, fill: colour,
      shape: {scale: 'shape', field: 'line'}, size: {scale: 'size', field: 'line'}}}},
    {type: 'symbol', from: {data: 'focus'}, encode: {enter: {x, y: {scale: 'y', field: 'y'}, size: {value: 180},
      stroke: {value: pageColour('ink')}, strokeWidth: {value: 1.5}, fill: {value: 'transparent'}}}}];
}

function ordinal(name, lines, key) {
  return {name, type: 'ordinal', domain: lines.map((l) => l.line), range: lines.map((l) => l[key])};
}

/** The sweep that the page shows, if it does. */
function currentSweep(page) {
  return page.state.over === 'budget' ? null : page.sweeps[Number(page.state.over)];
}

function curveSpec(page, forExport) {
  const sweep = currentSweep(page), dots = sweep ? sweepDots(page, sweep) : budgetDots(page);
  const metric = page.metric(), lines = linesOf(page, sweep);
  const drawn = lines.filter((line) => dots.some((d) => d.line === line.line));
  const xs = dots.map((d) => d.x), ticks = [...new Set(xs)].sort((a, b) => a - b);
  const logarithmic = !sweep && ticks.length > 1;
  const labels = Object.fromEntries(lines.map((l) => [l.line, l.label]));
  const top = dots.flatMap((d) => [d.high, d.most ?? d.high]), floor = dots.flatMap((d) => [d.low, d.least ?? d.low]);
  const domain = metric.higher ? [Math.min(...floor, 1), Math.max(...top, 1)] : [Math.min(0, ...floor), Math.max(...top, 1e-12)];
  const bottom = {orient: 'bottom', scale: 'x', title: sweep ? `${sweep.policy}: ${sweep.parameter}` : page.data.x_title ?? 'budget, tokens',
    labelOverlap: 'parity', format: 'd'};
  if (sweep) delete bottom.format;
  else bottom.values = ticks;
  return {
    height: forExport ? 420 : 340,
    title: forExport ? {text: page.curveTitle()} : undefined,
    data: [{name: 'dots', values: dots}, {name: 'focus', values: []},
      {name: 'spreads', values: dots.filter((d) => d.least !== null && page.state.spread)}],
    scales: [
      {name: 'x', type: logarithmic ? 'log' : 'linear', ...(logarithmic ? {base: 2} : {zero: false}),
        domain: [Math.min(...xs), Math.max(...xs)], range: 'width', padding: 14},
      {name: 'y', type: 'linear', domain, range: 'height', nice: true, zero: false},
      ordinal('colour', drawn, 'colour'), ordinal('dash', drawn, 'dash'), ordinal('shape', drawn, 'shape'),
      ordinal('size', drawn, 'size'),
    ],
    axes: [bottom, {orient: 'left', scale: 'y', grid: true, tickCount: 6, title: shown(metric.label), domain: false}],
    legends: forExport ? [{stroke: 'colour', strokeDash: 'dash', symbolType: 'stroke', orient: 'bottom', columns: 3,
      symbolStrokeWidth: 2, symbolSize: 300,
      encode: {labels: {update: {text: {signal: labelSignal(drawn.map((l) => l.line), labels)}}}}}] : [],
    marks: curveMarks(),
  };
}

/** An expression that gives a line's label; labels are data, so they go in as JSON strings. */
function labelSignal(ids, labels) {
  return `${JSON.stringify(ids.map((id) => labels[id]))}[indexof(${JSON.stringify(ids)}, datum.value)]`;
}

const kNearDots = {
  points(view) {
    const x = view.scale('x'), y = view.scale('y');
    return view.data('dots').map((datum) => ({datum, px: x(datum.x), py: y(datum.y)}));
  },
};

/** Policies to switch on and off. */
function policySwitches(page) {
  const holder = element('div', {class: 'chips', role: 'group', 'aria-label': 'policies shown'});
  const drawn = page.data.series.map((one, s) => [one, s]).filter(([one]) => !one.full && one.bound !== false);
  for (const [one, s] of drawn) {
    const box = element('input', {type: 'checkbox', checked: !page.state.hidden.has(s), onchange: () => {
      page.state.hidden[box.checked ? 'delete' : 'add'](s);
      page.draw('curves');
    }});
    holder.append(element('label', {title: shown(one.label, 400)}, box,
      element('span', {class: 'dot', style: `background:var(--${one.colour})`}), element('bdi', {}, shown(one.label))));
  }
  const all = (on) => {
    drawn.forEach(([, s]) => page.state.hidden[on ? 'delete' : 'add'](s));
    holder.querySelectorAll('input').forEach((input) => { input.checked = on; });
    page.draw('curves');
  };
  if (drawn.length > 3) holder.append(button('all', () => all(true)), button('none', () => all(false)));
  return holder;
}
