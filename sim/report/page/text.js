// Numbers and names as text, in the same digits and words as the terminal (sim/report/text.cpp).

/** A number with `decimals` digits after the point. An exact half goes to the even digit, as in C++. */
function fixed(value, decimals) {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? 'nan' : value < 0 ? '-inf' : 'inf';
  if (Math.abs(value) >= 1e21) return BigInt(value) + (decimals > 0 ? '.' + '0'.repeat(decimals) : '');
  const text = value.toFixed(decimals), exact = value.toFixed(Math.min(100, decimals + 30));
  if (exact.slice(-30) !== '5' + '0'.repeat(29)) return text;
  const below = exact.slice(0, -30).replace(/\.$/, '');
  return '02468'.includes(below.at(-1)) ? below : text;
}

/** `text` without the sign of a zero: -0.00 becomes 0.00. */
function unsigned(text) {
  return text.replace(/^-([0.]+)$/, '$1');
}

/** The decimals that show `digits` significant digits. */
function decimalsOf(value, digits) {
  return value === 0 ? 0 : Math.min(8, Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(value)))));
}

/** About three significant digits, no exponent: 0.0123, 1.23, 1,230. */
function numberText(value) {
  const [whole, ...decimals] = fixed(value, decimalsOf(value, 3)).split('.');
  return [whole.replace(/\B(?=(\d{3})+$)/g, ','), ...decimals].join('.');
}

/** A mean with its standard error: 0.123 ± 0.004. A share has an interval instead: 0.900 (0.683 to 0.988). */
function averageText({mean, error, low, high}) {
  if (Number.isFinite(low) && Math.abs(low + high - 2 * mean) > 1e-6)  // the interval of a share is asymmetric
    return `${fixed(mean, 3)} (${fixed(low, 3)} to ${fixed(high, 3)})`;
  if (!Number.isFinite(error) || error === 0) return numberText(mean);
  const size = Math.abs(mean), minDecimals = size >= 100 ? 0 : size >= 10 ? 1 : 3;
  const decimals = Math.min(6, Math.max(minDecimals, decimalsOf(error, 3) - 2));
  return `${unsigned(fixed(mean, decimals))} ± ${fixed(error, decimals)}`;
}

/**
 * A difference and its 95% interval, rounded to two significant digits of half the interval's width:
 * 0.0046 (0.0012 to 0.0080).
 */
function differenceText(mean, low, high) {
  const known = Number.isFinite(low), size = known && high > low ? (high - low) / 2 : Math.abs(mean);
  const text = (value) => unsigned(fixed(value, decimalsOf(size, 2)));
  return known ? `${text(mean)} (${text(low)} to ${text(high)})` : text(mean);
}

/**
 * How much higher a value is than the best one, as [mean, low, high], from how much worse it is, which the page's data
 * give. The two have opposite signs if higher values are better.
 */
function minusBest([mean, low, high], higherIsBetter) {
  const negative = (value) => (value === null ? null : -value || 0);  // not -0
  return higherIsBetter ? [negative(mean), negative(high), negative(low)] : [mean, low, high];
}

/** Says whether a difference from the choice is significant. */
function significance({low, high}) {
  return low === null ? 'no interval known' : low > 0 || high < 0 ? 'significant' : 'not significant';
}

/**
 * How the runner-up compares with the choice. The runner-up may have a slightly better mean. Then the choice was
 * preferred because it needs less memory.
 */
function runnerUpText({choice, mean, better, reason, runner_up: second, difference}) {
  const wins = difference.mean < 0, known = difference.low !== null, gap = Math.abs(difference.mean);
  const ends = wins ? [-difference.high, -difference.low] : [difference.low, difference.high];
  const interval = known ? ` (95% CI ${differenceText(gap, ...ends).replace(/^\S+ \(/, '')}` : '';
  const percent = better === 'lower' && mean > 0 ? `, which is ${fixed((100 * gap) / mean, 0)}% of ${named(choice)}'s` : '';
  const how = `${known ? `${significance(difference)}ly ` : ''}${wins ? 'better' : 'worse'}`;
  const forMemory = reason === 'less memory' ? `, and ${named(choice)} needs less memory` : '';
  return `${named(second)}, the runner-up, is ${how}: by ${differenceText(gap)}${interval}${percent}${forMemory}.` +
    (known ? '' : ' No confidence interval is known.');
}

/** A text with a capital letter first. */
function sentence(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** 12.3 KiB. */
function bytesText(bytes) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  while (bytes >= 1024 && units.length > 1) bytes /= 1024, units.shift();
  return `${numberText(bytes)} ${units[0]}`;
}

/** Whether numbers, zeros aside, are of such different sizes that a linear axis would hide most of them. */
function spansDecades(values) {
  const positive = values.filter((v) => v > 0);
  return positive.length > 0 && Math.min(...values) >= 0 && Math.max(...positive) > 10 * Math.min(...positive);
}

/** Text as the page shows it: shortened, and without control characters and marks that change the direction of text. */
function shown(text, maxLetters = 40) {
  const plain = String(text).replace(/[\u0000-\u001f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, '\ufffd');
  const letters = [...plain.slice(0, 4 * maxLetters)];
  return letters.length > maxLetters ? letters.slice(0, maxLetters - 1).join('') + '…' : plain;
}

/** A name in a table or a sentence. */
function named(text) {
  return shown(text, 200);
}

/** a, b and c. */
function joinNames(names) {
  return names.length < 2 ? names.join('') : `${names.slice(0, -1).join(', ')} and ${names.at(-1)}`;
}

/** 1 text, 3 texts. */
function counted(count, one, many = one + 's') {
  return `${count} ${count === 1 ? one : many}`;
}
