// The parts that pages are made of: sections, tables, terms, recommendations.

/** Text with `code` between backticks. */
function marked(text) {
  return shown(text, 5000).split('`').map((part, i) => (i % 2 ? element('code', {}, part) : part));
}

function strong(text) {
  return element('strong', {}, named(text));
}

/** A paragraph in small print. */
function quiet(text) {
  return element('p', {class: 'quiet prose'}, ...marked(text));
}

/** The sentence that answers the page's question. */
function answer(...parts) {
  return element('p', {class: 'answer'}, ...parts);
}

/** A section; `text` may be empty. */
function section(heading, text, ...content) {
  return element('section', {}, element('h2', {}, heading),
    ...(text ? [element('p', {class: 'prose'}, ...marked(text))] : []), ...content);
}

/** A section of figures that the reader can change. main.js fills it. Returns null without Vega. */
function drawnSection(id, heading, text) {
  if (!vega) return null;
  const made = section(heading, text);
  made.id = id;
  return made;
}

/** The section of the curve over budgets and of the ranking at one budget. */
function exploreSection(data, heading, text) {
  return data.budgets.length ? drawnSection('explore', heading, text) : null;
}

/** A section of figures whose points are in the page's data. points.js draws them. */
function figuresSection(heading, text, figures) {
  if (!vega || !figures.length) return null;
  return section(heading, text, element('div', {class: 'figures'},
    ...figures.map((figure) => element('div', {id: 'figure-' + figure.name}))));
}

/** The figures of a page's data that have one of the names. */
function figuresOf({figures}, ...names) {
  return (figures ?? []).filter((figure) => names.includes(figure.name));
}

/** Upper case for the first letter. */
function upperFirst(text) {
  return text[0].toUpperCase() + text.slice(1);
}

/** The deciding metric against the memory of keys and values. A page without a list of metrics decides by KL. */
function frontierSection(data) {
  const figures = figuresOf(data, 'frontier'), metric = data.metrics?.find(({name}) => name === data.headline);
  if (!figures.length) return null;
  const better = metric?.higher ? 'higher' : 'lower';
  return figuresSection(upperFirst(shown(figures[0].title, 100)), `${upperFirst(better)} and further left is better. Compare points at ` +
    `equal memory: a ${better} value that needs more memory does not show a better policy. A horizontal bar ends at the peak ` +
    'memory.', figures);
}

/** Terms and their meanings; a meaning is text or a node. */
function terms(pairs, properties = {}) {
  return element('dl', properties, ...pairs.flatMap(([term, meaning]) => [element('dt', {}, term),
    element('dd', {}, ...(typeof meaning === 'string' ? marked(meaning) : [meaning].flat()))]));
}

function code(text) {
  return text ? element('code', {}, shown(text, 2000)) : '–';
}

/** Puts a line break between the nodes. */
function lines(nodes) {
  return nodes.flatMap((node, i) => (i ? [element('br'), node] : [node]));
}

// A table's cell is text, a node, or {content, value, error, kind}. value and error are written to CSV files.

function numberCell(value, text = numberText) {
  return Number.isFinite(value) ? {content: text(value), value} : '–';
}
function bytesCell(bytes) {
  return numberCell(bytes, bytesText);
}
function averageCell(average) {
  return average ? {content: averageText(average), value: average.mean, error: average.error} : '–';
}

function tableCell(cell, kind) {
  const {content, value, error, label, kind: own} = cell?.content === undefined ? {content: cell} : cell, properties = {};
  if (own ?? kind) properties.class = own ?? kind;
  if (Number.isFinite(value)) properties['data-value'] = String(value);
  if (Number.isFinite(error)) properties['data-error'] = String(error);
  if (label) properties['data-label'] = label;
  return element('td', properties, ...[content].flat());
}

/** Numbers are aligned to the right, except in the columns whose headings are in `texts`. */
function dataTable(headings, rows, {caption = '', texts = [], kind = ''} = {}) {
  const kinds = headings.map((heading) => (kind || texts.includes(heading) ? '' : 'n'));
  return element('div', {class: 'scroll'}, element('table', {class: kind},
    ...(caption ? [element('caption', {}, named(caption))] : []),
    element('thead', {}, element('tr', {}, ...headings.map((heading, i) =>
      element('th', {scope: 'col', class: kinds[i]}, named(heading))))),
    element('tbody', {}, ...rows.map((row) => element('tr', {}, ...row.map((cell, i) => tableCell(cell, kinds[i])))))));
}

function colourDot(colour) {
  return colour ? [element('span', {class: 'dot', style: `background:var(--${colour})`})] : [];
}

/** The policies that do not differ significantly from the choice. */
function similarTo(made) {
  const names = made.not_significantly_different.map(named);
  if (made.order.length > 1 && made.order.every((one) => one.from_choice.low === null)) return 'no interval known';
  if (!names.length) return {content: 'none', kind: 'none'};
  if (names.length <= 3) return joinNames(names);
  return element('details', {}, element('summary', {}, `${names.length} policies`), joinNames(names));
}

/** One row of the first table: the recommendation at a budget. */
function recommendedRow(made) {
  const {kv_bytes_mean: memory, full_bytes: full, difference} = made, absent = {content: '–', kind: 'none'};
  const share = memory > 0 && full > 0 ? ` (${fixed((100 * memory) / full, 1)}% of full)` : '';
  const forMemory = made.order[0].policy !== made.choice ? [' (needs less memory)'] : [];
  const mean = {content: Number.isFinite(made.mean) ? numberText(made.mean) : '–', value: made.mean, label: named(made.metric)};
  const row = [named(made.budget), {content: (memory > 0 ? bytesText(memory) : '–') + share, value: memory},
    {content: [...colourDot(made.colour), strong(made.choice), ...forMemory]}, mean];
  if (made.runner_up === null) return [...row, absent, absent, absent];
  return [...row, named(made.runner_up), {content: differenceText(difference.mean, difference.low, difference.high),
    value: difference.mean}, similarTo(made)];
}

/** The recommendation at one budget in sentences. */
function recommendedAnswer(made, warning) {
  const {budget, metric, choice, mean, kv_bytes_mean: memory, full_bytes: full} = made;
  const share = memory > 0 && full > 0 ? `, ${fixed((100 * memory) / full, 1)}% of the full cache` : '';
  const unit = /^\d+$/.test(budget) ? ' tokens' : '', size = memory > 0 ? ` (${bytesText(memory)}${share})` : '';
  const first = [`At ${named(budget)}${unit}${size}, use `, strong(choice), `. Its ${named(metric)} is ${numberText(mean)}` +
    ` (${made.better} is better).`];
  const scored = made.tokens > 0 ? `${numberText(made.tokens)} tokens were scored.` : '';
  const ending = warning ? `${sentence(shown(warning, 2000))}.` : scored;
  return answer(...first, ...(made.runner_up === null ? [] : [` ${runnerUpText(made)}`]), ending && ` ${ending}`);
}

/**
 * The recommendations of one model or run: a sentence for the budget at which a page opens, the next command, a row for
 * each budget, and notes. `opened`: the data of the page, or none for a page of several runs.
 */
function recommended({budgets, notes, warnings}, next = '', caption = '', opened = null) {
  if (!budgets.length) return [element('p', {}, 'No configuration evicts, so there is nothing to compare.')];
  const shownBudget = opened?.budgets?.[opened.budget]?.text;
  const summary = budgets.length === 1 ? budgets[0] : budgets.find(({budget}) => budget === shownBudget);
  return [...(summary ? [recommendedAnswer(summary, warnings[0])] : []), ...(next ? [nextCommand(next)] : []),
    dataTable(['budget', 'memory', 'choice', budgets[0].metric, 'runner-up', 'runner-up worse by, 95% CI',
      'not significantly different from the choice'], budgets.map(recommendedRow), {caption, kind: 'recommendations'}),
    element('p', {class: 'quiet prose'}, shown(notes.join(' '), 5000)),
    ...(summary ? warnings.slice(1) : warnings).map((warning) => element('p', {class: 'quiet prose'}, `Note: ${shown(warning, 2000)}.`))];
}

function nextCommand(command) {
  const words = named(command).split(' ').flatMap((word, i) => [i ? ' ' : '', element('span', {}, word)]);
  return element('p', {class: 'next'}, element('strong', {}, 'Next:'), ' ', element('code', {}, ...words));
}

/**
 * Builds a page from its parts. `front`: the elements that answer the question. Sections that are null are left out.
 */
function layOut({command, question, context, front, sections}) {
  document.title = `kvlab: ${named(question)}`;
  document.querySelector('main').append(element('header', {}, element('p', {class: 'quiet'}, command),
    element('h1', {}, named(question)), ...(context ? [element('p', {class: 'prose'}, context)] : []), ...front),
  ...sections.filter(Boolean));
}
