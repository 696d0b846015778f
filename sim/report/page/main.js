// The interactive part of a page: the reader's choices (a metric, a budget, a layer and so on), and the figures and
// tables that show them.
class Page {
  constructor(data) {
    this.data = data;
    this.metricTable = new MetricTable(data);
    this.sweeps = sweepsOf(data.series);
    this.state = {group: 0, metric: data.headline, budget: data.budget, layer: -1, head: -1, over: 'budget',
      hidden: new Set(), spread: true, log: null, unfolded: false, shown: data.winner ?? 0, base: -1};
    const window = data.series.findIndex((one, s) => one.policy === 'window' && s !== this.state.shown);
    if (window >= 0 && data.winner !== null) this.state.base = window;
    this.hideMany();
    this.parts = {};
  }

  /** Hides series if there are more than fourteen. The first ten of the ranking, `window` and oracles stay visible. */
  hideMany() {
    const {group, metric, budget} = this.state;
    const best = (this.data.ranking[group][metric][budget]?.rows ?? []).slice(0, 10).map(([s]) => s);
    if (this.data.series.length > 14)
      this.data.series.forEach((one, s) => {
        if (!best.includes(s) && !one.oracle && one.policy !== 'window') this.state.hidden.add(s);
      });
  }

  /** Whether to draw a line for the series: an oracle only for some metrics, the full cache for none. */
  isDrawn(s) {
    const one = this.data.series[s];
    return !one.full && one.bound !== false && (!one.oracle || this.metric().oracles.includes(one.policy));
  }
  /** Whether the page shows all layers together. Only then do recommendations apply. */
  isOverall() {
    return this.state.layer < 0;
  }
  metric() {
    return this.data.metrics.find((metric) => metric.name === this.state.metric);
  }
  /** The current metric or, if it has no values by head, the metric that the page's data names for heads. */
  headMetric() {
    const own = this.metricTable.has(this.state.group, this.state.metric, 'head');
    return own ? this.metric() : this.data.metrics.find((metric) => metric.name === this.data.by_head) ?? this.metric();
  }
  valueText(value) {
    return numberText(value);
  }
  place() {
    const {layer, head} = this.state;
    if (layer < 0) return this.data.layers.length ? 'all layers' : '';
    return `layer ${this.data.layers[layer]}` + (head < 0 ? '' : `, KV head ${head}`);
  }
  where() {
    const group = this.data.groups.length > 1 ? shown(this.data.groups[this.state.group].name) : '';
    return [this.place(), group].filter(Boolean).join(', ');
  }
  curveTitle() {
    const place = this.where();
    return `${this.metric().label}${place ? ', ' + place : ''}`;
  }
  headTitle() {
    const base = this.state.base < 0 ? '' : ` minus ${shown(this.data.series[this.state.base].label)}`;
    return `${this.headMetric().label} of ${shown(this.data.series[this.state.shown].label)}${base}, budget ` +
      shown(this.data.budgets[this.state.budget].text);
  }
  rankingTitle() {
    const place = this.where();
    return `${this.metric().label} at a budget of ${shown(this.data.budgets[this.state.budget].text)}` +
      (place ? `, ${place}` : '') + (this.isOverall() ? '' : ', sorted as for all layers together');
  }
  errorText(error) {
    return Number.isNaN(error) ? '' : ` ± ${this.valueText(error)}`;
  }
  dotText(dot) {
    const spread = dot.min === null ? '' : `; single sequences ${this.valueText(dot.min)} to ${this.valueText(dot.max)}`;
    return `${shown(dot.label)} at ${shown(dot.requested)}: ${this.valueText(dot.y)}${this.errorText(dot.error)}` +
      `, from ${dot.count.toLocaleString('en-US')} values${spread}`;
  }
  cellText(cell) {
    const base = cell.base === null ? '' : ` (${this.valueText(cell.own)} minus ${this.valueText(cell.base)})`;
    return `layer ${cell.layer}, KV head ${cell.head}: ${this.valueText(cell.value)}${base}` +
      `${this.errorText(cell.error)}, from ${cell.count.toLocaleString('en-US')} values`;
  }

  set(name, value, ...parts) {
    this.state[name] = value;
    for (const part of parts) this.draw(part);
  }

  draw(...parts) {
    return Promise.all(parts.map((part) => this.parts[part]?.()));
  }

  /**
   * The controls with which the reader chooses the metric, the layer, the head and so on. Some metrics exist only for
   * all layers together.
   */
  controls(holder) {
    const {data, state} = this;
    const index = (value) => Number(value);
    const all = ['controls', 'switches', 'curves', 'heads', 'ranking'];
    const levels = (level) => this.metricTable.has(state.group, state.metric, level);
    holder.replaceChildren(
      chooser('group', 'results of', data.groups.map((group, g) => [g, group.name]), state.group,
        (value) => this.set('group', index(value), ...all)),
      chooser('metric', 'metric', data.metrics.map((metric) => [metric.name, metric.label]), state.metric, (value) => {
        if (!this.metricTable.has(state.group, value, 'head')) state.head = -1;
        if (!this.metricTable.has(state.group, value, 'layer')) state.layer = -1;
        state.log = null;
        this.set('metric', value, ...all);
      }),
      chooser('layer', 'layer', [[-1, 'all'], ...(levels('layer') ? data.layers.map((l, i) => [i, l]) : [])], state.layer,
        (value) => {
          if (value < 0) state.head = -1;
          this.set('layer', index(value), ...all);
        }),
      chooser('head', 'KV head', [[-1, 'all'], ...(levels('head') && state.layer >= 0
        ? Array.from({length: data.heads}, (_, h) => [h, h]) : [])], state.head,
        (value) => this.set('head', index(value), ...all)),
      chooser('budget', 'budget', data.budgets.map((budget, b) => [b, budget.text]), state.budget,
        (value) => this.set('budget', index(value), 'heads', 'ranking')),
      chooser('over', 'against', [['budget', 'budget'], ...this.sweeps.map((sweep, i) =>
        [i, `${sweep.policy}: ${sweep.parameter}${sweep.rest ? ` (${sweep.rest})` : ''}`])], state.over,
        (value) => this.set('over', value, 'controls', 'curves')),
      chooser('axis', 'axis', this.metric().higher ? [] : [['linear', 'linear'], ['log', 'logarithmic']],
        isLogarithmic(this, shownDots(this)) ? 'log' : 'linear', (value) => this.set('log', value === 'log', 'curves')));
    if (data.groups.some((group) => group.sequences > 1))
      holder.append(element('label', {class: 'choice'}, element('input', {type: 'checkbox', name: 'spread',
        checked: state.spread, onchange: (event) => this.set('spread', event.target.checked, 'curves')}),
      ' range over sequences'));
  }

  explore(section) {
    const controls = element('div', {class: 'controls'}), figure = element('div'), ranking = element('div');
    const curve = new Chart(figure, () => this.curveTitle(), (...how) => curveSpec(this, ...how),
      {...kNearDots, text: (dot) => this.dotText(dot)});
    const switches = element('div'), note = element('p', {class: 'prose quiet'});
    section.append(controls, figure, switches, note, ranking);
    this.parts.switches = () => {
      switches.replaceChildren(policySwitches(this));
      note.textContent = this.data.oracle_notes?.[this.state.metric] ?? '';
    };
    this.parts.controls = () => this.controls(controls);
    this.parts.curves = () => curve.draw();
    this.parts.ranking = () => {
      const [parts, table] = rankingTable(this);
      ranking.replaceChildren(...parts);
      enliven(table, this.rankingTitle());
    };
  }

  heads(section) {
    const {data, state} = this, controls = element('div', {class: 'controls'}), figure = element('div');
    const chart = new Chart(figure, () => this.headTitle(), (forExport) => headSpec(this, forExport),
      {...kNearCells, text: (cell) => this.cellText(cell)});
    const note = element('p', {class: 'prose quiet'});
    section.append(controls, note, figure);
    const names = data.series.map((one, s) => [s, one.label]);
    controls.append(chooser('shown', 'policy', names, state.shown, (value) => this.set('shown', Number(value), 'heads')),
      chooser('base', 'minus', [[-1, 'nothing'], ...names], state.base, (value) => this.set('base', Number(value), 'heads')));
    this.parts.heads = () => {
      const there = this.metricTable.has(state.group, this.headMetric().name, 'head');
      note.textContent = there ? this.headTitle() + (isSigned(this, cells(this)) ? '. Blue is negative, orange is positive.'
        : '. Darker is higher.') : 'This metric is not available by head on this page.';
      figure.hidden = !there;
      return there ? chart.draw() : null;
    };
  }

  open() {
    for (const [name, build] of [['explore', this.explore], ['heads', this.heads]]) {
      const section = document.getElementById(name);
      if (section) build.call(this, section);
    }
    const kept = document.getElementById('kept');
    if (kept && this.data.kept) keptView(this, kept);
  }
}

const kPages = {replay: replayPage, eval: evalPage, task: taskPage, fidelity: fidelityPage, tune: tunePage, plan: planPage, compare: comparePage};

/** Builds the texts and tables of the page, then draws its figures. */
async function openPage(data) {
  if (!vega) document.querySelector('main').append(quiet(data.without_figures));
  layOut(kPages[data.kind](data));
  const page = data.series ? new Page(data) : null;
  page?.open();
  const labels = (figure) => figure?.series.map((one) => one.label).join('\n');
  const brought = (vega ? data.figures ?? [] : []).map((figure, i, all) =>
    new BroughtFigure(figure, page, figure.name === 'frontier' || labels(figure) !== labels(all[i + 1])));
  const drawBrought = () => Promise.all(brought.map((figure) => figure.draw()));
  document.querySelectorAll('main table').forEach((table) => {
    if (!table.closest('#explore')) enliven(table, table.closest('section')?.querySelector('h2')?.textContent ?? 'best');
  });
  globalThis.kvlabPage = {page, charts, csvOf, drawnAt: innerWidth};
  if (page) page.parts.figures = drawBrought;
  await (page ? page.draw(...Object.keys(page.parts)) : drawBrought());
}

function themeSwitch() {
  const root = document.documentElement, themes = ['system setting', 'light', 'dark'];
  const set = (value) => {
    if (value === themes[0]) delete root.dataset.theme;
    else root.dataset.theme = value;
    redrawAll();
  };
  const choice = chooser('theme', 'colours', themes.map((t) => [t, t]), themes[0], set);
  choice.classList.add('theme');
  document.querySelector('main').prepend(choice);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redrawAll);
}

themeSwitch();
openPage(JSON.parse(document.getElementById('data').textContent)).then(() => {
  document.documentElement.dataset.ready = 'yes';
  let width = innerWidth;
  addEventListener('resize', () => {
    if (innerWidth === width) return;
    width = innerWidth;
    redrawAll().then(() => { kvlabPage.drawnAt = innerWidth; });
  });
});
