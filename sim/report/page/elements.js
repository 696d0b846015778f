// Small helpers for the page's own elements. Text only ever goes in as text.
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

/** A labelled <select>; `choices` are [value, text]. It is left out where there is no choice. */
function chooser(name, label, choices, current, change) {
  const select = element('select', {name, onchange: () => change(select.value)},
    ...choices.map(([value, text]) => element('option', {value: String(value)}, shown(text, 60))));
  select.value = String(current);
  const holder = element('label', {class: 'choice'}, element('span', {}, label), select);
  if (choices.length < 2) holder.hidden = true;
  return holder;
}

function button(text, click, properties = {}) {
  return element('button', {type: 'button', onclick: click, ...properties}, text);
}

/** Offers `blob` as a file. */
function save(blob, name) {
  const link = element('a', {href: URL.createObjectURL(blob), download: name});
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function csvField(text) {
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/** A colour of the page by its name, as it is in the present theme. */
function pageColour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim();
}

function fileName(text) {
  return text.toLowerCase().replace(/[^a-z0-9]+/g, '-').replace(/^-|-$/g, '').slice(0, 60) || 'figure';
}
