// Scales and axes of figures of points. A scale never clamps, and all ticks are inside its domain, so each tick is
// drawn at its value. A logarithmic scale has a floor. Values that are not positive are drawn there.

const kTickRoom = {x: 64, y: 34};  // minimum distance between two ticks, in pixels
const kEdge = 0.035;               // share of the axis that is left free at each end

/** The number itself, as ticks show it: 0.0005, 1.5, 1,024. */
function tickText(value) {
  return Number(value.toPrecision(6)).toLocaleString('en-US', {maximumFractionDigits: 12});
}

/** Multiples of 1, 2 or 5 times a power of ten, at most `maxTicks` of them. */
function linearTicks(low, high, maxTicks) {
  const rough = Math.max((high - low) / Math.max(1, maxTicks), Number.MIN_VALUE), power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5].find((s) => s * power >= rough) ?? 10);
  const ticks = [];
  for (let i = Math.ceil(low / step); i * step <= high && ticks.length <= maxTicks + 1; ++i) ticks.push(i * step);
  return ticks;
}

/** Powers of `base`, or multiples of them; linear ticks if all values are within one power. */
function logTicks(low, high, base, maxTicks) {
  const first = Math.floor(Math.log(low) / Math.log(base)), last = Math.ceil(Math.log(high) / Math.log(base));
  const within = (steps, every) => {
    const ticks = [];
    for (let power = Math.ceil(first / every) * every; power <= last; power += every)
      ticks.push(...steps.map((s) => s * base ** power).filter((tick) => tick >= low && tick <= high));
    return ticks;
  };
  const powers = within([1], 1), choices = powers.length > 3 ? [powers] : [];
  choices.push(...(base === 2 ? [within([1, 1.5], 1)] : [within([1, 2, 5], 1), within([1, 3], 1)]));
  for (const every of [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128]) choices.push(within([1], every));
  const fit = choices.find((ticks) => ticks.length >= 2 && ticks.length <= maxTicks);
  return fit ?? linearTicks(low, high, maxTicks);
}

/** The domain from low to high, with some space at both ends. */
function padRange(low, high, log) {
  if (log) {
    const room = low < high ? (high / low) ** kEdge : 1.25;
    return [low / room, high * room];
  }
  const room = low < high ? kEdge * (high - low) : Math.abs(low) / 4 || 1;
  return [low - room, high + room];
}

/**
 * A scale with its ticks. `axis` is {title, log, base?, ticks?, names?, domain?}. `values` are the numbers to show;
 * NaN and null are left out. `size` is the approximate length of the axis in pixels.
 */
function scaleOf(name, range, axis, values, size) {
  if (axis.names?.length)
    return {type: 'names', at: (v) => v, spec: {name, type: 'point', domain: axis.names.map((_, i) => i),
      range: [0, {signal: 'height'}], padding: 0.5}};
  const maxTicks = Math.max(2, Math.floor(size / kTickRoom[name])), known = values.filter(Number.isFinite);
  const positive = known.filter((v) => v > 0), log = axis.log && positive.length > 0;
  const all = log ? positive : [...known, ...(axis.domain ?? [])];
  let [low, high] = all.length ? padRange(Math.min(...all), Math.max(...all), log) : [0, 1];
  let at = (v) => v, zero = null;
  if (log) {
    // Values of 0 are drawn below the smallest positive one, at a tick that says 0.
    if (axis.zeros) low /= Math.max(1.3, (high / low) ** 0.12);
    const floor = low;
    at = (v) => (v === null || v === undefined ? v : Math.max(v, floor));
    zero = axis.zeros ? floor : null;
  }
  const smallest = zero === null ? low : Math.min(...positive);
  const own = axis.ticks?.filter((tick) => tick >= low && tick <= high) ?? [];
  const ticks = own.length ? own : log ? logTicks(smallest, high, axis.base ?? 10, maxTicks) : linearTicks(low, high, maxTicks);
  return {type: log ? 'log' : 'linear', at, ticks: zero === null ? ticks : [zero, ...ticks], zero,
    spec: {name, type: log ? 'log' : 'linear', ...(log ? {base: axis.base ?? 10} : {}), domain: [low, high], range, zero: false,
      nice: false, clamp: false}};
}

function axisOf(orient, scale, axis) {
  const made = {orient, scale: scale.spec.name, title: shown(axis.title, 60), grid: orient === 'left',
    domain: orient === 'bottom'};
  const texts = scale.type === 'names' ? axis.names.map((n) => shown(n, 60))
    : scale.ticks.map((tick) => (tick === scale.zero ? '0' : tickText(tick)));
  const values = scale.type === 'names' ? axis.names.map((_, i) => i) : scale.ticks;
  return {...made, values, ...(scale.type === 'names' ? {labelOverlap: false, labelLimit: innerWidth < 600 ? 150 : 320}
    : {labelOverlap: 'greedy', labelSeparation: 8}),
    encode: {labels: {update: {text: {signal: `${JSON.stringify(texts)}[indexof(${JSON.stringify(values)}, datum.value)]`}}}}};
}
