// Reads the page's data, which is JSON. Long rows of numbers are base64 of little-endian float64. Numbers by layer and
// head are float32, or only the upper three bytes of float32 if the page would otherwise be too large.
function bytesOf(text) {
  return Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
}

function numbersOf(packed) {
  if (!packed) return null;
  const bytes = bytesOf(packed.base64), width = packed.bytes;
  if (width === 8) return new Float64Array(bytes.buffer);
  const count = bytes.length / width, wide = new Uint8Array(4 * count);
  for (let i = 0; i < count; ++i)
    for (let b = 0; b < width; ++b) wide[4 * i + 4 - width + b] = bytes[width * i + b];
  return new Float32Array(wide.buffer);
}

/** MetricTable looks up a value by sequence group, metric, series, budget, layer and head. */
class MetricTable {
  constructor(data) {
    this.data = data;
    this.unpacked = new Map();
  }

  numbers(group, metric, level, what) {
    const key = [group, metric, level, what].join(' ');
    if (!this.unpacked.has(key)) {
      const table = this.data.values[group][metric]?.[level];
      this.unpacked.set(key, numbersOf(table?.[what]));
    }
    return this.unpacked.get(key);
  }

  has(group, metric, level) {
    return Boolean(this.data.values[group][metric]?.[level]);
  }

  /** {value, error, count}; null where there is none. Layer and head are -1 for "all". */
  at(group, metric, series, budget, layer = -1, head = -1) {
    const {budgets, layers, heads} = this.data;
    const level = head >= 0 ? 'head' : layer >= 0 ? 'layer' : 'all';
    const places = level === 'head' ? layers.length * heads : level === 'layer' ? layers.length : 1;
    const place = level === 'head' ? layer * heads + head : level === 'layer' ? layer : 0;
    const index = (series * budgets.length + budget) * places + place;
    const value = this.numbers(group, metric, level, 'value')?.[index];
    if (value === undefined || Number.isNaN(value)) return null;
    const count = this.data.values[group][metric][level].count;
    return {
      value,
      error: this.numbers(group, metric, level, 'error')?.[index] ?? NaN,
      count: Array.isArray(count) ? count[index] : count,
    };
  }

  /** One value for each sequence of the group; null where there is none. */
  spread(group, metric, series, budget) {
    const table = this.data.values[group][metric]?.sequences;
    if (!table) return null;
    const all = this.numbers(group, metric, 'sequences', 'value');
    const first = (series * this.data.budgets.length + budget) * table.places;
    const values = [...all.slice(first, first + table.places)].filter((v) => !Number.isNaN(v));
    return values.length > 1 ? values : null;
  }
}
