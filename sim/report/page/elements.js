// Small helpers that make elements of the page. They insert text only as text, never as HTML.
function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith('on')) made.addEventListener(name.slice(2), value);
    else if (name in made && typeof value !== 'string') made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** A labelled <select>; `choices` are [value, text]. Hidden if there is only one choice. */
function chooser(name, label, choices, current, change) {
  const select = element('select', {name, onchange: () => change(select.value)},
    ...choices.map(([value, text]) => element('option', {value: String(value)}, shown(text, 60))));
  select.value = String(current);
  const holder = element('label', {class: 'choice'}, element('span', {}, label), select);
  if (choices.length < 2) holder.hidden = true;
  return holder;
}

/** Lets long names such as h2o:sinks=4:recent=50% break after a colon, and not within a word. */
function breakNames(root) {
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT), texts = [];
  while (walker.nextNode()) if (/:\w+=/.test(walker.currentNode.data)) texts.push(walker.currentNode);
  for (const text of texts)
    text.replaceWith(...text.data.split(/(?<=:)(?=\w+=)/).flatMap((part, i) => (i ? [element('wbr'), part] : [part])));
}

function button(text, click, properties = {}) {
  return element('button', {type: 'button', onclick: click, ...properties}, text);
}

/** Downloads `blob` as a file. */
function save(blob, name) {
  const link = element('a', {href: URL.createObjectURL(blob), download: name});
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function csvField(text) {
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

const kOutlines = {circle: 'M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0', square: 'M-3.6-3.6h7.2v7.2h-7.2z',
  cross: 'M-4-1.4h2.6v-2.6h2.8v2.6h2.6v2.8h-2.6v2.6h-2.8v-2.6h-2.6z', diamond: 'M0-4.8l4 4.8l-4 4.8l-4-4.8z',
  'triangle-up': 'M0-4.4l4.4 7.6h-8.8z', 'triangle-down': 'M0 4.4l4.4-7.6h-8.8z',
  'triangle-left': 'M-4.4 0l7.6-4.4v8.8z', 'triangle-right': 'M4.4 0l-7.6-4.4v8.8z'};

/** A sample of a line, or of its points, with the colour, dash and marker that it has in figures. */
function swatch(one, joined = true) {
  const make = (tag, attributes, ...children) => {
    const made = document.createElementNS('http://www.w3.org/2000/svg', tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  };
  const stroke = `var(--${one.colour})`;
  const line = make('path', {d: joined ? 'M-16 0H16' : '', 'stroke-dasharray': one.dash.join(' ') || 'none', stroke, 'stroke-width': 1.8});
  const marker = make('path', {d: kOutlines[one.shape] ?? '', stroke, 'stroke-width': 1.4, fill: one.filled ? stroke : 'var(--page)'});
  return make('svg', {class: 'swatch', viewBox: '-17 -6 34 12', width: 34, height: 12, 'aria-hidden': 'true'}, line, marker);
}

/** A colour of the page by its name, in the current theme. */
function pageColour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim();
}

function fileName(text) {
  return text.toLowerCase().replace(/[^a-z0-9]+/g, '-').replace(/^-|-$/g, '').slice(0, 60) || 'figure';
}
