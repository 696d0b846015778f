// Draws figures of points and lines.

/** The scales that give each line its colour, dash and marker. */
function lookScales(lines) {
  const ordinal = (name, style) => ({name, type: 'ordinal', domain: lines.map((l) => l.line), range: lines.map(style)});
  return [ordinal('colour', (l) => pageColour(l.colour)), ordinal('dash', (l) => l.dash),
    ordinal('shape', (l) => l.shape || 'circle'), ordinal('size', (l) => (l.shape ? 46 : 0)),
    ordinal('fill', (l) => pageColour(l.filled ? l.colour : 'page'))];
}

const kMarker = {fill: {scale: 'fill', field: 'line'}, stroke: {scale: 'colour', field: 'line'}, strokeWidth: {value: 1.5},
  shape: {scale: 'shape', field: 'line'}, size: {scale: 'size', field: 'line'}};

function plotMarks(joined) {
  const x = {scale: 'x', field: 'at.x'}, y = {scale: 'y', field: 'at.y'}, colour = {scale: 'colour', field: 'line'};
  const rule = (data, places, opacity, width) => ({type: 'rule', from: {data}, encode: {enter: {...places, stroke: colour,
    strokeWidth: {value: width}, opacity: {value: opacity}}}});
  const upright = (low, high) => ({x, y: {scale: 'y', field: 'at.' + low}, y2: {scale: 'y', field: 'at.' + high}});
  const line = {type: 'group', from: {facet: {name: 'own', data: 'dots', groupby: 'line'}}, marks: [{type: 'line',
    from: {data: 'own'}, encode: {enter: {x, y, stroke: colour, strokeDash: {scale: 'dash', field: 'line'},
      strokeWidth: {value: 1.8}}}}]};
  return [rule('spreads', upright('min', 'max'), 0.22, 6), rule('dots', upright('low', 'high'), 1, 1.3),
    rule('dots', {y, x: {scale: 'x', field: 'at.x_low'}, x2: {scale: 'x', field: 'at.x_high'}}, 0.8, 1.3), ...(joined ? [line] : []),
    {type: 'symbol', from: {data: 'dots'}, encode: {enter: {x, y, ...kMarker}}},
    {type: 'symbol', from: {data: 'focus'}, encode: {enter: {x, y, size: {value: 180},
      stroke: {value: pageColour('ink')}, strokeWidth: {value: 1.5}, fill: {value: 'transparent'}}}}];
}

/** A legend under the figure that shows line, dash and marker together, which Vega's legends do not. */
function legendMarks(joined) {
  const y = {signal: 'height + 62 + 20 * datum.row'}, left = (more) => ({signal: `240 * datum.column + ${more}`});
  const line = {type: 'rule', from: {data: 'lines'}, encode: {enter: {y, x: left(0), x2: left(34), strokeWidth: {value: 1.8},
    stroke: {scale: 'colour', field: 'line'}, strokeDash: {scale: 'dash', field: 'line'}}}};
  return [...(joined ? [line] : []), {type: 'symbol', from: {data: 'lines'}, encode: {enter: {y, x: left(17), ...kMarker}}},
    {type: 'text', from: {data: 'lines'}, encode: {enter: {y, x: left(40), text: {field: 'label'}, baseline: {value: 'middle'},
      fill: {value: pageColour('ink')}, font: {value: 'sans-serif'}, fontSize: {value: 12}, limit: {value: 195}}}}];
}

/** Adds the position of a dot: its numbers, or the scale's floor where a number is below the floor. */
function placed(dot, x, y) {
  const at = {x: x.at(dot.x), x_low: x.at(dot.x_low), x_high: x.at(dot.x_high)};
  for (const name of ['y', 'low', 'high', 'min', 'max']) at[name] = y.at(dot[name]);
  return {...dot, at};
}

/**
 * Makes the Vega specification of a figure. Dots are {line, x, y, low, high, x_low, x_high}. If a dot has no error bar,
 * both of its ends are at the dot.
 */
function plotSpec({dots, spreads = [], lines, x, y, joined, title, forExport, width = 720, height = 340}) {
  const whole = dots.map((d) => ({...d, low: d.low ?? d.y, high: d.high ?? d.y, x_low: d.x_low ?? d.x, x_high: d.x_high ?? d.x}));
  const drawn = lines.filter((line) => whole.some((d) => d.line === line.line));
  const upright = [...whole.flatMap((d) => (y.log ? [d.y, d.high] : [d.low, d.y, d.high])),
    ...spreads.flatMap((d) => [d.min, d.max])];
  const xs = scaleOf('x', 'width', x, whole.flatMap((d) => [d.x_low, d.x, d.x_high]), width - 80);
  const ys = scaleOf('y', 'height', {...y, zeros: whole.some((d) => d.y === 0)}, upright, height - 60);
  const place = (d) => placed(d, xs, ys);
  return {
    height: forExport ? Math.max(height, 420) : height,
    title: forExport ? {text: title} : undefined,
    ...(forExport ? {autosize: 'pad'} : {}),
    data: [{name: 'dots', values: whole.map(place)}, {name: 'focus', values: []}, {name: 'spreads', values: spreads.map(place)},
      {name: 'lines', values: forExport ? drawn.map((l, i) => ({...l, row: Math.floor(i / 3), column: i % 3})) : []}],
    scales: [xs.spec, ys.spec, ...lookScales(drawn)],
    axes: [axisOf('bottom', xs, x), axisOf('left', ys, y)],
    // One description for the figure; a screen reader need not read each mark.
    marks: [...plotMarks(joined), ...(y.names?.length ? [] : legendMarks(joined))].map((mark) => ({...mark, aria: false})),
  };
}

const kNearDots = {
  points(view) {
    const x = view.scale('x'), y = view.scale('y');
    return view.data('dots').map((datum) => ({datum, px: x(datum.at.x), py: y(datum.at.y)}));
  },
};

/** A figure whose points are in the page's data. It is drawn in the element `figure-NAME`. */
class BroughtFigure {
  /** `legend`: whether to draw a legend. Figures with the same lines share the legend of the last one. */
  constructor(figure, page, legend) {
    this.figure = figure;
    this.page = page;
    const holder = document.getElementById('figure-' + figure.name);
    holder.append(element('h3', {}, shown(figure.title, 90)));
    this.chart = new Chart(holder, () => figure.title, (...how) => this.spec(...how),
      {...kNearDots, text: (dot) => this.text(dot)});
    if (!legend || figure.series.length < 2 || figure.y.names.length) return;
    this.legend = element('p', {class: 'chips'});
    holder.append(this.legend);
  }

  draw() {
    this.legend?.replaceChildren(...this.series().map((one) =>
      element('span', {}, swatch(one, this.figure.joined), element('bdi', {}, shown(one.label)))));
    return this.chart.draw();
  }

  /** The series of the figure without those that the reader has hidden. */
  series() {
    const hidden = [...(this.page?.state.hidden ?? [])].map((s) => this.page.data.series[s].label);
    return this.figure.series.filter((one) => !hidden.includes(one.label));
  }

  spec(forExport, width) {
    const {x, y, joined, title} = this.figure, series = this.series();
    const dots = series.flatMap((one, s) => one.points.map((p) => ({...p, line: 's' + s, label: one.label, low: p.y_low,
      high: p.y_high})));
    return plotSpec({dots, lines: series.map((one, s) => ({...one, line: 's' + s, label: shown(one.label)})), x, y, joined, title,
      forExport, width, height: y.names.length ? 60 + 24 * y.names.length : 320});
  }

  text(dot) {
    const {x, y} = this.figure, bar = (low, high) => (low < high ? ` (${numberText(low)} to ${numberText(high)})` : '');
    const part = (axis, value, low, high) => `${axis.title} ${numberText(value)}${bar(low, high)}`;
    return `${shown(dot.label)}${dot.note ? ', ' + shown(dot.note) : ''}: ${part(x, dot.x, dot.x_low, dot.x_high)}` +
      (y.names.length ? '' : `; ${part(y, dot.y, dot.low, dot.high)}`);
  }
}
