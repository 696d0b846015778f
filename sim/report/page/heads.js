// Draws a metric by layer and KV head, for one policy or as the difference of two policies.
function cells(page) {
  const {state, metricTable, data} = page, metric = page.headMetric().name, made = [];
  for (let l = 0; l < data.layers.length; ++l)
    for (let h = 0; h < data.heads; ++h) {
      const own = metricTable.at(state.group, metric, state.shown, state.budget, l, h);
      const base = state.base < 0 ? null : metricTable.at(state.group, metric, state.base, state.budget, l, h);
      if (!own || (state.base >= 0 && !base)) continue;
      made.push({layer: data.layers[l], head: h, value: own.value - (base?.value ?? 0), own: own.value,
        base: base?.value ?? null, error: own.error, count: own.count});
    }
  return made;
}

/** Whether the map has values of both signs: differences, or a metric such as regret, which may be below 0. */
function isSigned(page, values) {
  return page.state.base >= 0 || values.some((cell) => cell.value < 0);
}

function headSpec(page, forExport) {
  const values = cells(page), {data} = page;
  const bound = Math.max(1e-12, ...values.map((cell) => Math.abs(cell.value)));
  const amounts = ['#f4f1e6', '#a9d6c5', '#4fa3b8', '#2a6496', '#1d2f63'];
  const differences = ['#0b4f8a', '#6fb0dc', '#f2f2ef', '#f0a661', '#a84300'];
  const signed = isSigned(page, values);
  const step = Math.max(1, Math.ceil(data.layers.length / 16));
  return {
    height: 110 + Math.min(480, Math.max(90, 24 * data.layers.length)),
    title: forExport ? {text: page.headTitle()} : undefined,
    data: [{name: 'cells', values}, {name: 'focus', values: []}],
    scales: [
      {name: 'x', type: 'band', domain: [...Array(data.heads).keys()], range: 'width', paddingInner: 0.04},
      {name: 'y', type: 'band', domain: data.layers, range: 'height', paddingInner: 0.06},
      {name: 'shade', type: 'linear', domain: signed ? [-bound, bound] : [0, bound], range: signed ? differences : amounts},
    ],
    axes: [{orient: 'bottom', scale: 'x', title: 'KV head', domain: false, ticks: false, labelOverlap: true},
      {orient: 'left', scale: 'y', title: 'layer', domain: false, ticks: false,
        values: data.layers.filter((_, i) => i % step === 0)}],
    legends: [{fill: 'shade', type: 'gradient', direction: 'horizontal', orient: 'bottom', gradientLength: 220,
      title: shown(page.headMetric().label), titleFontWeight: 'normal'}],
    marks: ['cells', 'focus'].map((name) => ({type: 'rect', from: {data: name}, encode: {enter: {
      x: {scale: 'x', field: 'head'}, width: {scale: 'x', band: 1}, y: {scale: 'y', field: 'layer'},
      height: {scale: 'y', band: 1}, ...(name === 'cells' ? {fill: {scale: 'shade', field: 'value'}}
        : {fill: {value: 'transparent'}, stroke: {value: pageColour('ink')}, strokeWidth: {value: 2}})}}})),
  };
}

const kNearCells = {
  points(view) {
    const x = view.scale('x'), y = view.scale('y');
    return view.data('cells').map((datum) => ({datum, px: x(datum.head) + x.bandwidth() / 2,
      py: y(datum.layer) + y.bandwidth() / 2}));
  },
};
