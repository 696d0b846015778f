// Draws a metric against the budget, or against a parameter of a policy for which the run has several values.
function settingsOf(params) {
  return new Map(params.split(':').filter(Boolean).map((part) => {
    const at = part.indexOf('=');
    return at < 0 ? [part, ''] : [part.slice(0, at), part.slice(at + 1)];  // some settings, such as prompt, have no value
  }));
}

/**
 * The parameters of policies for which the run has three or more values, as [{policy, parameter, rest, series}].
 * `rest` is the text of the other settings, and `series` is a list of [index of the series, value of the parameter].
 */
function sweepsOf(series) {
  const found = new Map();
  series.forEach((one, index) => {
    if (one.oracle || one.full) return;
    const settings = settingsOf(one.params);
    for (const [name, text] of settings) {
      const number = Number(text.replace(/%$/, ''));
      if (text === '' || Number.isNaN(number)) continue;
      const rest = [...settings].filter(([other]) => other !== name).map((pair) => pair.filter(Boolean).join('='));
      const key = [one.run ?? '', one.policy, name, rest.join(':'), one.prefill, one.positions, one.seed].join('\n');
      if (!found.has(key)) found.set(key, {policy: one.policy, parameter: name, rest: rest.join(':'), series: []});
      found.get(key).series.push([index, number]);
    }
  });
  return [...found.values()].filter((sweep) => sweep.series.length > 2)
    .map((sweep) => ({...sweep, series: sweep.series.sort((a, b) => a[1] - b[1])}));
}

/** A point of the figure, or null if the series has no value there. Tests also call this function. */
function dot(page, series, budget, x) {
  const {state, metricTable, data} = page;
  const at = metricTable.at(state.group, state.metric, series, budget, state.layer, state.head);
  if (!at) return null;
  const spread = state.layer < 0 ? metricTable.spread(state.group, state.metric, series, budget) : null;
  const error = Number.isNaN(at.error) ? 0 : at.error;
  return {series, budget, x, y: at.value, low: at.value - error, high: at.value + error, error: at.error,
    count: at.count, min: spread ? Math.min(...spread) : null, max: spread ? Math.max(...spread) : null,
    label: data.series[series].label, requested: data.budgets[budget].text};
}

function budgetDots(page) {
  const {data, state} = page;
  const dots = [];
  data.series.forEach((one, s) => {
    if (state.hidden.has(s) || !page.isDrawn(s)) return;
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

/**
 * The style of each line of the figure. If lines are policies, each has its usual colour; if they are budgets, colours
 * are assigned in a fixed order.
 */
function linesOf(page, sweep) {
  const {data} = page;
  if (!sweep) return data.series.map((one, s) => ({...one, line: 's' + s, label: shown(one.label)}));
  const colours = ['sky', 'blue', 'green', 'orange', 'vermilion', 'purple', 'wine', 'ink'];
  return data.budgets.map((budget, b) => ({line: 'b' + b, label: 'budget ' + shown(budget.text),
    colour: colours[b % colours.length], dash: [], shape: 'circle', filled: b < colours.length}));
}

/** The sweep that the page shows; null if it shows none. */
function currentSweep(page) {
  return page.state.over === 'budget' ? null : page.sweeps[Number(page.state.over)];
}

/**
 * Whether the axis of values is logarithmic: if the reader has chosen so or, without a choice, if the values span
 * decades.
 */
function isLogarithmic(page, dots) {
  return !page.metric().higher && (page.state.log ?? spansDecades(dots.map((d) => d.y)));
}

/** The points that the figure shows now. */
function shownDots(page) {
  const sweep = currentSweep(page);
  return sweep ? sweepDots(page, sweep) : budgetDots(page);
}

function curveSpec(page, forExport, width) {
  const sweep = currentSweep(page), dots = shownDots(page), metric = page.metric();
  const ticks = [...new Set(dots.map((d) => d.x))].sort((a, b) => a - b);
  const top = dots.flatMap((d) => [d.high, d.max ?? d.high]), floor = dots.flatMap((d) => [d.low, d.min ?? d.low]);
  const domain = metric.higher ? [Math.min(...floor, 1), Math.max(...top, 1)] : [Math.min(0, ...floor), Math.max(...top, 1e-12)];
  return plotSpec({dots, spreads: dots.filter((d) => d.min !== null && page.state.spread), forExport, width,
    lines: linesOf(page, sweep), title: page.curveTitle(), joined: true,
    x: {title: sweep ? `${sweep.policy}: ${sweep.parameter}` : page.data.x_title ?? 'budget, tokens', log: !sweep && ticks.length > 1,
      base: sweep ? 10 : 2, ticks: sweep ? [] : ticks},
    y: {title: metric.label, log: isLogarithmic(page, dots), domain}});
}

/** The switches that show or hide each policy. */
function policySwitches(page) {
  const holder = element('div', {class: 'chips', role: 'group', 'aria-label': 'policies shown'});
  const drawn = page.data.series.map((one, s) => [one, s]).filter(([, s]) => page.isDrawn(s));
  for (const [one, s] of drawn) {
    const box = element('input', {type: 'checkbox', checked: !page.state.hidden.has(s), onchange: () => {
      page.state.hidden[box.checked ? 'delete' : 'add'](s);
      page.draw('curves', 'figures');
    }});
    holder.append(element('label', {title: shown(one.label, 400)}, box,
      swatch(one), element('bdi', {}, shown(one.label))));
  }
  const all = (on) => {
    drawn.forEach(([, s]) => page.state.hidden[on ? 'delete' : 'add'](s));
    holder.querySelectorAll('input').forEach((input) => { input.checked = on; });
    page.draw('curves', 'figures');
  };
  if (drawn.length > 3) holder.append(button('all', () => all(true)), button('none', () => all(false)));
  return holder;
}
