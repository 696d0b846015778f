// A figure: a Vega view that follows the page's width and theme, with buttons to download it.
const vega = typeof joinedVega === 'function' ? joinedVega() : null;  // null: Vega was not found
const charts = [];

function viewOf(spec, width, options = {}) {
  const whole = {
    $schema: 'https://vega.github.io/schema/vega/v5.json',
    width,
    description: options.description,
    autosize: {type: 'fit', contains: 'padding'},
    padding: 4,
    background: pageColour('page'),
    config: {
      axis: {
        labelColor: pageColour('muted'), titleColor: pageColour('muted'), domainColor: pageColour('muted'),
        tickColor: pageColour('muted'), gridColor: pageColour('rule'), labelFontSize: 12, titleFontSize: 12,
        titleFontWeight: 'normal', labelFont: 'sans-serif', titleFont: 'sans-serif',
      },
      legend: {
        labelColor: pageColour('ink'), titleColor: pageColour('muted'), labelFont: 'sans-serif',
        titleFont: 'sans-serif', labelLimit: 260,
      },
      title: {color: pageColour('ink'), font: 'sans-serif', fontSize: 13, anchor: 'start'},
    },
    ...spec,
  };
  // No eval: expressions are interpreted, because the page's content policy forbids eval.
  return new vega.View(vega.parse(whole, null, {ast: true}),
    {renderer: 'svg', expr: vega.expressionInterpreter, container: options.container});
}

const kExportWidth = 720;

/**
 * Chart draws the specification that `specOf(forExport, width)` returns, now and whenever the page changes. `near`
 * provides the values that can be read by pointing: points(view) returns the points, and text(datum) the readout of one
 * point. null: no values can be read.
 */
class Chart {
  constructor(holder, title, specOf, near = null) {
    this.title = title;
    this.specOf = specOf;
    this.near = near;
    this.box = element('div', {class: 'chart', tabindex: '0', role: 'group', 'aria-label': title()});
    this.readout = element('output', {class: 'readout', 'aria-live': 'polite'});
    const tools = element('p', {class: 'tools'}, button('SVG', () => this.svg()), button('PNG', () => this.png()));
    holder.append(this.box, element('div', {class: 'under'}, this.readout, tools));
    this.index = -1;
    this.box.addEventListener('mousemove', (event) => this.hover(event));
    this.box.addEventListener('mouseleave', () => this.select(-1));
    this.box.addEventListener('keydown', (event) => this.key(event));
    charts.push(this);
  }

  async draw() {
    this.drawn = (this.drawn ?? Promise.resolve()).then(() => this.redraw());
    return this.drawn;
  }

  async redraw() {
    this.view?.finalize();
    this.index = -1;
    this.box.setAttribute('aria-label', this.title());
    const width = Math.max(240, this.box.clientWidth);
    this.view = viewOf(this.specOf(false, width), width, {container: this.box, description: this.description()});
    await this.view.runAsync();
    this.readout.value = this.near ? 'Point at the figure or use the arrow keys to read values.' : '';
  }

  /** The text for screen readers: the figure's title, and how to reach its values by keyboard. */
  description() {
    return this.near ? `${this.title()}. The arrow keys read its values one by one.` : this.title();
  }

  hover(event) {
    if (!this.view || !this.near) return;
    const box = this.box.querySelector('svg').getBoundingClientRect(), origin = this.view.origin();
    const x = event.clientX - box.left - origin[0] , y = event.clientY - box.top - origin[1];
    let best = -1, nearest = 40 * 40;
    this.points().forEach((point, i) => {
      const away = (point.px - x) ** 2 + (point.py - y) ** 2;
      if (away < nearest) [best, nearest] = [i, away];
    });
    if (best !== this.index) this.select(best);
  }

  points() {
    return this.near.points(this.view);
  }

  select(index) {
    if (!this.near || !this.view) return;
    this.index = index;
    const point = this.points()[index];
    this.readout.value = point ? this.near.text(point.datum) : '';
    this.view.change('focus', this.view.changeset().remove(() => true).insert(point ? [{...point.datum}] : [])).run();
  }

  /** Left and right: the previous and the next value. Up and down: the nearest value of the previous and the next line. */
  key(event) {
    const step = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[event.key];
    if (!step || !this.near || !this.view) return;
    event.preventDefault();
    const points = this.points(), count = points.length, here = points[this.index];
    if (!count) return;
    const lines = [...new Set(points.map((point) => point.datum.line))];
    if (!here || lines.length < 2 || event.key === 'ArrowRight' || event.key === 'ArrowLeft')
      return this.select((Math.max(this.index, step > 0 ? -1 : 0) + step + count) % count);
    const line = lines[(lines.indexOf(here.datum.line) + step + lines.length) % lines.length];
    const away = (point) => Math.abs(point.px - here.px);
    const nearest = points.filter((point) => point.datum.line === line).reduce((a, b) => (away(b) < away(a) ? b : a));
    this.select(points.indexOf(nearest));
  }

  async exported() {
    const view = viewOf(this.specOf(true, kExportWidth), kExportWidth);
    await view.runAsync();
    return view;
  }
  async svgText() {
    return (await this.exported()).toSVG();
  }
  async svg() {
    save(new Blob([await this.svgText()], {type: 'image/svg+xml'}), fileName(this.title()) + '.svg');
  }
  async pngBlob() {
    const canvas = await (await this.exported()).toCanvas(2);
    return new Promise((done) => canvas.toBlob(done, 'image/png'));
  }
  async png() {
    save(await this.pngBlob(), fileName(this.title()) + '.png');
  }
}

async function redrawAll() {
  await Promise.all(charts.map((chart) => chart.draw()));
}
