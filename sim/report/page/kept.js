// Shows which tokens were kept: the text up to a query, shaded by whether a token is kept and by its attention, for
// two policies side by side.
class KeptText {
  constructor(view, holder, series) {
    this.view = view;
    this.series = series;
    this.caption = element('p', {class: 'quiet', 'aria-live': 'polite'});
    this.box = element('div', {class: 'text', tabindex: '0', role: 'group', 'aria-label': 'text'});
    this.spans = view.kept.tokens.map((token, i) => element('span', {title: `token ${i}`}, tokenText(token)));
    this.box.append(...this.spans);
    const names = () => view.head().series.map((one, s) => [s, one.label]);
    holder.append(element('div', {}, chooser(series ? 'right' : 'left', 'policy', names(), series, (value) => {
      this.series = Number(value);
      this.draw();
    }), this.caption, this.box));
  }

  /** The ranges of queries in which each token was live: [position] -> [[first, last], …]. */
  lives() {
    const flat = this.view.head().series[this.series].lives, lives = new Map();
    for (let i = 0; i < flat.length; i += 3) {
      if (!lives.has(flat[i])) lives.set(flat[i], []);
      lives.get(flat[i]).push([flat[i + 1], flat[i + 2]]);
    }
    return lives;
  }

  draw() {
    const {queries} = this.view.kept, at = this.view.at, query = queries[at], before = queries[at - 1];
    const lives = this.lives(), attention = this.view.attention();
    const live = (position, when) => (lives.get(position) ?? []).some(([a, b]) => a <= when && when <= b);
    let kept = 0, left = 0, held = 0, paid = 0;
    this.spans.forEach((span, position) => {
      const is = position <= query && live(position, query), share = (attention.get(position) ?? 0) ** 2;
      const evicted = before !== undefined && position <= before && !is && live(position, before);
      span.hidden = position > query;
      kept += is;
      left += evicted;
      paid += share;
      if (is) held += share;
      span.className = position > query ? '' : (is ? 'kept' : 'gone') + (evicted ? ' left' : '') +
        (!is && share > 0 ? ' missed' : '') + (position === query ? ' query' : '');
      span.style.setProperty('--a', String(Math.round(90 * (attention.get(position) ?? 0))));
    });
    const share = paid > 0 ? ` with ${Math.round((100 * held) / paid)}% of the shown attention` : '';
    this.caption.textContent = `keeps ${kept} of ${query + 1} tokens${share}; ${left} evicted since the previous step`;
    this.box.scrollTop = this.box.scrollHeight;
  }
}

function tokenText(token) {
  return shown(token.replaceAll('\n', '\u21b5'), 60).replaceAll('\u21b5', '\u21b5\n');
}

class KeptView {
  constructor(kept, section) {
    this.kept = kept;
    this.place = 0;
    this.at = Math.floor(kept.queries.length / 2);
    const count = this.head().series.length;
    const heads = kept.heads.map((head, i) => [i, `layer ${head.layer}, KV head ${head.head}`]);
    const controls = element('div', {class: 'controls'}, chooser('place', 'head', heads, 0, (value) => {
      this.place = Number(value);
      this.draw();
    }));
    const where = element('p', {class: 'quiet'}, `Kept tokens are always shown at budget ${shown(kept.budget)}, whatever budget ` +
      `is chosen above. Sequence ${shown(kept.trace)}` +
      (heads.length > 1 ? '.' : `, ${heads[0][1]}.`) +
      (kept.has_text ? '' : ' Numbers are token ids; make the page with --model DIR to show the text.'));
    this.slider = element('input', {type: 'range', name: 'query', min: '0', max: String(kept.queries.length - 1),
      'aria-label': 'query', oninput: () => this.go(Number(this.slider.value))});
    this.step = element('output', {class: 'readout'});
    const play = button('play', () => this.play(play));
    const pair = element('div', {class: 'pair'});
    section.append(controls, where, element('div', {class: 'slider'}, play, this.slider, this.step), pair);
    this.texts = [new KeptText(this, pair, 0)];
    if (count > 1) this.texts.push(new KeptText(this, pair, 1));
    this.draw();
  }

  head() {
    return this.kept.heads[this.place];
  }

  /** [position] -> square root of the probability, at the current query. */
  attention() {
    const flat = this.head().attention[this.at] ?? [], levels = new Map();
    for (let i = 0; i < flat.length; i += 2) levels.set(flat[i], flat[i + 1] / 255);
    return levels;
  }

  go(at) {
    this.at = Math.min(Math.max(at, 0), this.kept.queries.length - 1);
    this.draw();
  }

  draw() {
    this.slider.value = String(this.at);
    const query = this.kept.queries[this.at];
    this.step.value = `query ${query}, “${tokenText(this.kept.tokens[query] ?? '').trim()}”`;
    this.texts.forEach((text) => text.draw());
  }

  play(control) {
    if (this.timer) {
      clearInterval(this.timer);
      this.timer = null;
    } else {
      if (this.at + 1 === this.kept.queries.length) this.at = 0;
      this.timer = setInterval(() => {
        this.go(this.at + 1);
        if (this.at + 1 === this.kept.queries.length) this.play(control);
      }, 120);
    }
    control.textContent = this.timer ? 'pause' : 'play';
  }
}

function keptView(page, section) {
  if (page.data.kept.tokens.length) page.keptView = new KeptView(page.data.kept, section);
}
