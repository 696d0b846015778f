// Tables: columns that sort, and a file to take away.
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

/** Numbers alone: an error is a column of its own. */
function csvOf(table) {
  const body = [...table.tBodies[0].rows], heads = [...table.tHead.rows[0].cells];
  const hasError = heads.map((_, column) => body.some((row) => row.cells[column]?.dataset.error !== undefined));
  const line = (cells, own, error) => [...cells].flatMap((cell, column) =>
    (hasError[column] ? [own(cell), error(cell)] : [own(cell)])).map(csvField).join(',');
  const text = (cell) => cell.textContent.trim();
  return [line(heads, text, (cell) => `${text(cell)}, standard error`), ...body.map((row) => line(row.cells,
    (cell) => cell.dataset.value ?? cell.dataset.text ?? text(cell), (cell) => cell.dataset.error ?? ''))].join('\n') + '\n';
}

/** Makes a table of the page sort and go away as CSV. */
function enliven(table, name) {
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

/** The policies at the present budget, place and metric; those that tie with the first are folded. */
function rankingTable(page) {
  const {state, data} = page, ranked = standings(page);
  const body = element('tbody');
  const tied = ranked.filter(([, at], i) => i > 0 &&
    Math.abs(at.value - ranked[0][1].value) <= 2 * Math.hypot(at.error, ranked[0][1].error));
  const errorsKnown = (at) => !Number.isNaN(at.error) && !Number.isNaN(ranked[0][1].error);
  const isTied = new Set(tied.map(([s]) => s));
  ranked.forEach(([s, at], place) => {
    const one = data.series[s];
    const row = element('tr', {}, element('td', {'data-text': one.label}, swatch(one), element('bdi', {}, shown(one.label, 60))),
      element('td', {class: 'n', 'data-value': String(at.value)}, page.valueText(at.value)),
      Number.isNaN(at.error) ? element('td', {class: 'n'}, '–')
        : element('td', {class: 'n', 'data-value': String(at.error)}, page.valueText(at.error)),
      element('td', {class: 'n'}, String(at.count)),
      element('td', {}, place === 0 ? 'first' : isTied.has(s) ? 'ties with the first' : errorsKnown(at) ? 'behind' : ''));
    if (isTied.has(s) && tied.length > 3) row.className = 'tied';
    body.append(row);
  });
  const heads = ['policy', page.metric().label, 'standard error', 'count', ''].map((text, i) =>
    element('th', {scope: 'col', class: i === 0 || i === 4 ? '' : 'n'}, text));
  const table = element('table', {class: tied.length > 3 && !state.unfolded ? 'folded' : ''},
    element('caption', {}, page.rankingTitle()), element('thead', {}, element('tr', {}, ...heads)), body);
  const parts = [element('div', {class: 'scroll'}, table)];
  if (tied.length > 3)
    parts.push(button(state.unfolded ? 'fold ties' : `show ${tied.length} that tie with the first`, () => {
      state.unfolded = !state.unfolded;
      page.draw('ranking');
    }));
  return [parts, table];
}
