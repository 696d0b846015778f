// Tables that the reader can sort, by a click on a column's heading, and download as CSV. No ranking is computed here:
// rows come in the order of the page's data.
function sortKey(cell) {
  const text = (cell.dataset.value ?? cell.textContent).trim();
  const number = Number(text.replaceAll(',', '').replace('−', '-').split(' ')[0].replace(/%$/, ''));
  return text !== '' && !Number.isNaN(number) ? number : text;
}

function compareKeys(a, b) {
  if (typeof a === typeof b) return a < b ? -1 : a > b ? 1 : 0;
  return typeof a === 'number' ? -1 : 1;
}

function sortBy(table, column, header) {
  const down = header.getAttribute('aria-sort') === 'ascending';
  table.querySelectorAll('th').forEach((th) => th.removeAttribute('aria-sort'));
  header.setAttribute('aria-sort', down ? 'descending' : 'ascending');
  const body = table.tBodies[0];
  const rows = [...body.rows].map((row) => [sortKey(row.cells[column]), row]);
  rows.sort((a, b) => compareKeys(a[0], b[0]) * (down ? -1 : 1));
  body.append(...rows.map(([, row]) => row));
}

/** The table as CSV. A mean and its error get separate columns. */
function csvOf(table) {
  const body = [...table.tBodies[0].rows], heads = [...table.tHead.rows[0].cells];
  const hasError = heads.map((_, column) => body.some((row) => row.cells[column]?.dataset.error !== undefined));
  const line = (cells, own, error) => [...cells].flatMap((cell, column) =>
    (hasError[column] ? [own(cell), error(cell)] : [own(cell)])).map(csvField).join(',');
  const text = (cell) => cell.textContent.trim();
  return [line(heads, text, (cell) => `${text(cell)}, standard error`), ...body.map((row) => line(row.cells,
    (cell) => cell.dataset.value ?? cell.dataset.text ?? text(cell), (cell) => cell.dataset.error ?? ''))].join('\n') + '\n';
}

/** Makes a table of the page sortable, and adds a button that downloads it as CSV. */
function enliven(table, name) {
  breakNames(table);
  [...table.tHead.rows[0].cells].forEach((header, column) => {
    if (!header.textContent) return;
    const sorter = button('', () => sortBy(table, column, header), {class: 'sort'});
    sorter.append(...header.childNodes);
    header.append(sorter);
  });
  const holder = table.closest('.scroll');
  holder.after(element('p', {class: 'tools'},
    button('CSV', () => save(new Blob([csvOf(table)], {type: 'text/csv'}), fileName(name) + '.csv'))));
}

/** The note at the end of a row. It is derived from the results of sim/run/comparison.*. */
function rankingNote(series, table, place, difference) {
  const [mean, low, high, over] = difference;
  if (over) return 'over budget, not ranked';
  if (series === table.choice) return 'chosen';
  if (mean === null || place === 0) return '';
  if (low === null) return 'no interval known';
  return low > 0 || high < 0 ? 'significant' : 'not significant';
}

/**
 * A row: the policy, and its value and error for the chosen layer and head. The difference is only shown for all layers
 * together.
 */
function rankingRow(page, table, [s, ...difference], place) {
  const {state, data, metricTable} = page, one = data.series[s];
  const at = metricTable.at(state.group, state.metric, s, state.budget, state.layer, state.head);
  if (!at) return null;
  const number = (value) => (value === null || Number.isNaN(value) ? element('td', {class: 'n'}, '–')
    : element('td', {class: 'n', 'data-value': String(value)}, page.valueText(value)));
  const note = rankingNote(s, table, place, difference), over = difference[3];
  const [mean, low, high] = minusBest(difference, page.metric().higher);
  const cells = [element('td', {'data-text': one.label}, swatch(one), element('bdi', {}, shown(one.label, 60))),
    number(at.value), number(at.error), element('td', {class: 'n'}, String(at.count))];
  if (page.isOverall()) {
    const known = !over && place > 0 && mean !== null;
    cells.push(known ? element('td', {class: 'n', 'data-value': String(mean)}, differenceText(mean, low, high))
      : element('td', {class: 'n'}, '–'), element('td', {}, note));
  }
  return element('tr', {'data-series': String(s), ...(note === 'not significant' ? {class: 'similar'} : {})}, ...cells);
}

/** The policies at the current budget and metric, in the order of the page's data. */
function rankingTable(page) {
  const {state, data} = page, table = data.ranking[state.group][state.metric][state.budget];
  const rows = table.rows.map((row, place) => rankingRow(page, table, row, place)).filter(Boolean);
  const similar = rows.filter((row) => row.className === 'similar').length, folds = page.isOverall() && similar > 6;
  const heads = ['policy', page.metric().label, 'standard error', 'count',
    ...(page.isOverall() ? [`minus the ${page.metric().higher ? 'highest' : 'lowest'} (95% CI)`, ''] : [])];
  const made = element('table', {class: folds && !state.unfolded ? 'folded' : ''},
    element('caption', {}, page.rankingTitle()), element('thead', {}, element('tr', {}, ...heads.map((text, i) =>
      element('th', {scope: 'col', class: i === 0 || i === 5 ? '' : 'n'}, text)))), element('tbody', {}, ...rows));
  const parts = [element('div', {class: 'scroll'}, made)];
  if (folds)
    parts.push(button(state.unfolded ? 'hide policies that are not significantly different'
      : `show ${similar} policies that are not significantly different`, () => {
      state.unfolded = !state.unfolded;
      page.draw('ranking');
    }));
  return [parts, made];
}
