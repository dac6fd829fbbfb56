// Compare runs on one page: a colour and a dash for each series of runs.

const DASHES = ['', '8 4', '2 3', '11 3 2 3', '5 2', '1 4', '14 5'];
const hue = (k) => `var(--s${(k % 7) + 1})`;
// From the eighth series on colours repeat, each with another dash.
const dash = (k) => DASHES[(k + Math.floor(k / 7)) % 7];

function swatch(k) {
  const line = svg('line', { x1: 1, x2: 33, y1: 6, y2: 6, 'stroke-dasharray': dash(k), style: { stroke: hue(k) } });
  return svg('svg', { class: 'sample', viewBox: '0 0 34 12', 'aria-hidden': 'true' }, line);
}

// Return the exponentially weighted mean of measured values, weights divided by their sum so far.
function smoothed(values, weight) {
  let sum = 0;
  let weights = 0;
  return values.map((v) => {
    if (v == null) return v;
    sum = weight * sum + (1 - weight) * v;
    weights = weight * weights + (1 - weight);
    return sum / weights;
  });
}

// Return titles, names and formats of the curves of any series, one metric per chart.
function metricCharts(all) {
  const columns = new Map(all.flatMap((one) => [...one.columns]));
  const used = new Set();
  const groups = CURVES.map(([group, specs]) => [
    group,
    specs.flatMap((raw) => {
      const spec = named({ ...raw }, columns);
      const names = spec.lines ?? spec.stack;
      const listed = Object.entries(typeof names === 'string' ? labelled(names, columns) : names);
      const there = listed.filter(([name]) => columns.has(name) && !used.has(name));
      for (const [name] of there) used.add(name);
      return there.map(([name, label]) => ({
        name,
        title: there.length > 1 || raw.stack ? `${spec.title}: ${label}` : spec.title,
        hint: spec.hint && !raw.stack && !raw.band ? spec.hint : undefined,
        format: spec.format,
        range: spec.range,
      }));
    }),
  ]);
  const rest = [...columns.keys()].filter((name) => !used.has(name) && !NOT_CURVES.includes(name) && !OF_SAMPLER.test(name));
  return [...groups, ['Other', rest.map((name) => ({ name, title: name }))]].filter(([, specs]) => specs.length);
}

// Return the values of a metric that is constant in every series; null if it is not.
function unmoved(spec, all) {
  const measured = all.flatMap((one) => {
    const column = (one.columns.get(spec.name) ?? []).filter((v) => v !== undefined);
    return column.length ? [{ one, column }] : [];
  });
  if (!measured.every(({ column, one }) => column.every((v) => v !== null && v === column[0]) && !spreads(one, spec.name)))
    return null;
  const show = FORMATS[spec.format ?? 'figure'];
  if (!measured.some(({ column }) => column.length > 1)) return null;
  const values = measured.map(({ column }) => show(column[0]));
  if (new Set(values).size === 1) return `${spec.title} ${values[0]}`;
  return `${spec.title}: ${measured.map(({ one }, k) => `${one.label} ${values[k]}`).join(', ')}`;
}

const spreads = (one, name) => one.low.get(name)?.some((v, i) => v !== one.high.get(name)[i]);

function overlaid(spec, page) {
  const plot = svg('svg', { class: 'plot', role: 'img', tabindex: '0', 'aria-label': description(spec, page) });
  const legend = h('ul', { class: 'legend' });
  const node = h(
    'figure',
    { class: 'card chart' },
    caption(spec, [spec.name]),
    legend,
    plot,
  );
  const self = { node, spec, plot, legend, lines: [], scales: null };
  self.draw = () => drawOverlaid(self, page);
  self.show = () => showOverlaid(self, page);
  plot.addEventListener('pointermove', (event) => {
    const { from, to, left, right } = self.scales;
    const at = event.clientX - plot.getBoundingClientRect().left;
    page.point(from + ((at - left) / (right - left)) * (to - from));
  });
  plot.addEventListener('pointerleave', () => page.point(null));
  plot.addEventListener('keydown', (event) => {
    const { from, to } = self.scales;
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === 'Escape') page.point(null);
    if (!step) return;
    event.preventDefault();
    page.point(Math.min(to, Math.max(from, (page.at ?? to) + (step * (to - from)) / 50)));
  });
  return self;
}

function description(spec, page) {
  const show = FORMATS[spec.format ?? 'figure'];
  const parts = page.all.flatMap((one) => {
    const column = (one.columns.get(spec.name) ?? []).filter((v) => v != null);
    return column.length ? [`${one.label} from ${show(column[0])} to ${show(column.at(-1))}`] : [];
  });
  return `${spec.title}: ${parts.join(', ')}`;
}

// Return the measured values of each visible series, with their places on the horizontal axis.
function linesOf(spec, page) {
  return page.all.flatMap((one, k) => {
    const column = one.columns.get(spec.name);
    if (!column || page.hidden.has(k)) return [];
    const along = page.axis === 'update' ? one.updates : one.columns.get(page.axis);
    const at = column.map((_, i) => i).filter((i) => column[i] !== undefined && along?.[i] != null);
    if (!at.length) return [];
    const pick = (values) => values && at.map((i) => values[i]);
    const raw = pick(column);
    return [
      {
        k,
        one,
        xs: pick(along),
        raw,
        values: page.weight ? smoothed(raw, page.weight) : raw,
        low: pick(one.low.get(spec.name)),
        high: pick(one.high.get(spec.name)),
      },
    ];
  });
}

function drawOverlaid(self, page) {
  const { spec, plot } = self;
  const width = Math.max(200, plot.clientWidth || plot.parentNode.clientWidth - 32);
  self.lines = linesOf(spec, page);
  const values = self.lines.flatMap((l) => [...l.raw, ...(l.low ?? []), ...(l.high ?? [])].filter((v) => v != null));
  const [least, most] = spec.range ?? extent(values);
  const room = spec.range ? 0 : (most - least) * 0.06;
  const rangeY = [least < 0 ? least - room : least, most > 0 ? most + room : most];
  const [from, to] = extent(
    self.lines.flatMap((l) => l.xs),
    false,
  );
  const [left, right, floor] = [gutter(labelsOf(spec, rangeY)), width - PAD.right, HEIGHT - PAD.bottom];
  const x = linear([from, to], [left, right]);
  const y = linear(rangeY, [floor, PAD.top]);
  self.scales = { x, y, from, to, left, right };
  const marks = svg('g');
  for (const { k, xs, low, high } of self.lines) {
    if (!low) continue;
    marks.append(svg('path', { d: bandPath(xs, low, high, x, y), class: 'band', style: { fill: hue(k) } }));
  }
  for (const { k, xs, raw } of page.weight ? self.lines : []) {
    marks.append(svg('path', { d: linePath(xs, raw, x, y).path, class: 'stroke raw', style: { stroke: hue(k) } }));
  }
  for (const { k, xs, values } of self.lines) {
    const { path, alone } = linePath(xs, values, x, y);
    const shape = { d: path, class: 'stroke', 'stroke-dasharray': dash(k), style: { stroke: hue(k) } };
    marks.append(svg('path', shape));
    for (const i of alone)
      marks.append(svg('circle', { cx: x(xs[i]), cy: y(values[i]), r: 3, class: 'dot', style: { fill: hue(k) } }));
  }
  self.cursor = svg('g', { class: 'cursor' });
  const scale = { axis: page.axis, ticks: page.ticks, showX: page.showX };
  plot.setAttribute('viewBox', `0 0 ${width} ${HEIGHT}`);
  plot.replaceChildren(axes(spec, rangeY, [from, to], x, y, [left, right, floor], scale), marks, self.cursor);
}

// Show the values at the cursor, or the last values.
function showOverlaid(self, page) {
  const { spec, scales, lines } = self;
  const show = FORMATS[spec.format ?? 'figure'];
  const near = ({ xs }) => {
    if (page.at === null) return xs.length - 1;
    return xs.reduce((best, v, i) => (Math.abs(v - page.at) < Math.abs(xs[best] - page.at) ? i : best), 0);
  };
  const nearest = lines.map((line) => ({ line, i: near(line) }));
  self.legend.replaceChildren(
    ...nearest.map(({ line, i }) => {
      const spread = line.low && `${show(line.low[i])} … ${show(line.high[i])}`;
      const about = `${line.one.label}, ${page.showX(line.xs[i])}${spread ? `: ${spread}` : ''}`;
      const value = show(line.values[i]);
      return h('li', { title: about }, swatch(line.k), h('span', {}, visible(line.one.label)), h('b', {}, value));
    }),
  );
  if (page.at === null) return self.cursor.replaceChildren();
  const [at, floor] = [scales.x(page.at), HEIGHT - PAD.bottom];
  return self.cursor.replaceChildren(
    svg('line', { x1: at, x2: at, y1: PAD.top, y2: floor }),
    ...nearest
      .filter(({ line, i }) => line.values[i] != null)
      .map(({ line, i }) => {
        const dot = { cx: scales.x(line.xs[i]), cy: scales.y(line.values[i]), r: 4, class: 'dot' };
        return svg('circle', { ...dot, style: { fill: hue(line.k) } });
      }),
  );
}

function controls(bar, page) {
  const where = h('span', { class: 'where', 'aria-live': 'polite' });
  const output = h('output', {}, page.weight ? String(page.weight) : 'off');
  const scale = { type: 'range', min: 0, max: 0.98, step: 0.02, value: page.weight };
  const slider = h('input', { ...scale, 'aria-label': 'Smoothing' });
  slider.addEventListener('input', () => {
    page.weight = Number(slider.value);
    output.textContent = page.weight ? String(page.weight) : 'off';
    page.draw();
  });
  const names = { update: 'update', tokens: 'tokens', seconds: 'time' };
  const there = (axis) => axis === 'update' || page.all.every((one) => one.columns.get(axis)?.some((v) => v != null));
  const axis = h('span', { class: 'axis' });
  const choose = (chosen) => {
    page.axis = chosen;
    page.at = null;
    const options = Object.keys(names).filter(there);
    refill(
      axis,
      h('span', { class: 'label' }, 'Horizontal'),
      choice(
        'Horizontal axis',
        options.map((each) => [each, names[each]]),
        chosen,
        choose,
      ),
    );
    page.draw();
  };
  bar.append(where, h('label', { class: 'smooth' }, 'Smoothing', slider, output), axis);
  page.changed = () => {
    const position = page.at !== null && page.axis === 'update' ? String(Math.round(page.at)) : page.at;
    const unit = { update: 'update', tokens: 'tokens trained', seconds: 'since the start' }[page.axis];
    if (position === null) where.textContent = 'the last values';
    else where.textContent = page.axis === 'update' ? `update ${position}` : `${page.showX(position)} ${unit}`;
  };
  choose(page.axis);
}

function overlayCurves(section, page) {
  const bar = h('div', { class: 'cursorbar' });
  section.append(h('h2', {}, 'Curves'), bar);
  for (const [name, specs] of metricCharts(page.all)) {
    const folded = specs.map((spec) => unmoved(spec, page.all));
    const overlays = specs.filter((_, k) => !folded[k]).map((spec) => overlaid(spec, page));
    page.charts.push(...overlays);
    section.append(h('h3', {}, name));
    if (GROUP_SAYS[name]) section.append(h('p', { class: 'muted about' }, GROUP_SAYS[name].split(' The rollouts')[0]));
    if (overlays.length) section.append(h('div', { class: 'charts' }, ...overlays.map((c) => c.node)));
    const still = folded.filter(Boolean);
    if (still.length)
      section.append(h('p', { class: 'muted constant' }, `Constant: ${visible(still.join('  ·  '))}`));
  }
  controls(bar, page);
  let width = section.clientWidth;
  new ResizeObserver(() => {
    if (width === section.clientWidth) return;
    width = section.clientWidth;
    page.draw();
  }).observe(section);
}

// chosen: what the reader chose on the page before this one.
function pageOf(all, chosen = { hidden: new Set(), axis: 'update', weight: 0 }) {
  const { hidden, axis, weight } = chosen;
  const page = { all, charts: [], hidden, axis, weight, at: null, changed: () => {} };
  page.showX = (v) => (page.axis === 'seconds' ? duration(v) : figure(v));
  page.ticks = (low, high, n) => {
    if (page.axis !== 'seconds') return ticks(low, high, n);
    const unit = high - low > 7200 ? 3600 : high - low > 120 ? 60 : 1;
    return ticks(low / unit, high / unit, n).map((v) => v * unit);
  };
  page.refresh = () => {
    for (const c of page.charts) c.show();
    page.changed();
  };
  page.point = (at) => {
    page.at = at;
    page.refresh();
  };
  page.draw = () => {
    for (const c of page.charts) c.draw();
    page.refresh();
  };
  return page;
}

function heading({ notes, title }, page) {
  const count = page.all.reduce((sum, one) => sum + one.runs.length, 0);
  const buttons = page.all.map((one, k) => {
    const several = one.runs.length > 1;
    const what = several ? `n = ${one.runs.length}, mean and least to greatest: ${one.runs.join(', ')}` : 'one run';
    const button = h(
      'button',
      { type: 'button', 'aria-pressed': String(!page.hidden.has(k)), title: 'Show or hide' },
      swatch(k),
      h('span', {}, h('b', {}, visible(one.label)), h('small', {}, visible(what))),
    );
    button.addEventListener('click', () => {
      if (!page.hidden.delete(k)) page.hidden.add(k);
      button.setAttribute('aria-pressed', String(!page.hidden.has(k)));
      page.draw();
    });
    return button;
  });
  $('top').append(
    h('p', { class: 'eyebrow' }, `posttrain  ·  ${count} runs`),
    h('h1', { dir: 'auto' }, visible(title)),
    h('div', { class: 'series', role: 'group', 'aria-label': 'Series' }, ...buttons),
    ...(notes.length ? [h('ul', { class: 'note' }, ...notes.map((text) => h('li', {}, visible(text))))] : []),
  );
}

function wide(labels, rows) {
  const head = h('tr', {}, h('th', {}), ...labels.map((label, k) => h('th', { scope: 'col' }, swatch(k), ` ${visible(label)}`)));
  return h('div', { class: 'card wide', tabindex: '0' }, h('table', {}, h('thead', {}, head), h('tbody', {}, ...rows)));
}

function tables({ differences, results }, page) {
  const labels = page.all.map((one) => one.label);
  const differing = differences.map(([key, ...values]) =>
    h('tr', {}, h('th', { scope: 'row' }, h('code', {}, visible(key))), ...values.map((v) => h('td', {}, h('code', {}, visible(v))))),
  );
  const alike = 'These runs differ in nothing but the seed.';
  $('recipes').append(
    h('h2', {}, 'What differs'),
    differing.length ? wide(labels, differing) : h('p', { class: 'empty' }, alike),
  );
  const rows = results.map(({ name, cells }) =>
    h(
      'tr',
      {},
      h('th', { scope: 'row' }, name),
      ...cells.map(({ value, remark, difference }) =>
        h('td', {}, h('b', {}, value), difference && h('i', {}, difference), remark && h('small', {}, remark)),
      ),
    ),
  );
  const against = labels.length > 1 ? `Differences are to ${labels[0]}. ` : '';
  const about = `${against}Of several runs it is the mean, and from least to greatest; of curves of every update that of the last five at most.`;
  $('results').append(
    h('h2', {}, 'What they came to'),
    rows.length ? wide(labels, rows) : h('p', { class: 'empty' }, 'Nothing was measured yet.'),
    h('p', { class: 'muted constant' }, visible(about)),
  );
}

// Draw the page, and return it.
function drawPage(found, before) {
  for (const id of ['top', 'nav', 'sweep', 'recipes', 'results', 'curves']) $(id).replaceChildren();
  WORDS = found.words;
  const all = found.series.map((one) => ({
    ...one,
    columns: columnsOf(one),
    low: columnsOf({ ...one, series: one.low }),
    high: columnsOf({ ...one, series: one.high }),
  }));
  const page = pageOf(all, before);
  heading(found, page);
  if (found.sweep) sweepTable($('sweep'), found.sweep);
  const links = [
    ...(found.sweep ? [['sweep', 'Comparison']] : []),
    ['recipes', 'What differs'],
    ['results', 'Results'],
    ['curves', 'Curves'],
  ];
  $('nav').append(...links.map(([id, name]) => h('a', { href: `#${id}` }, name)));
  tables(found, page);
  overlayCurves($('curves'), page);
  return page;
}

const POLL_MS = 3000;

// While runs are running: ask for their curves, and draw the page again when they have grown.
function keepUp(page) {
  let shown = null;
  const line = h('p', { class: 'live', role: 'status' });
  const light = h('i', { 'aria-hidden': 'true' });
  const told = h('span', {}, 'Live');
  line.append(light, told);
  const tell = (state, text) => {
    light.className = state;
    told.textContent = text;
  };
  $('nav').before(line);
  const ask = async () => {
    const answer = await fetch(`curves${location.search}`);
    if (!answer.ok) throw new Error(await answer.text());
    const news = await answer.text();
    if (shown !== null && news !== shown && page.at === null) {
      const top = scrollY;
      page = drawPage(JSON.parse(news), page);
      scrollTo(0, top);
    }
    if (page.at === null) shown = news;
    tell('on', 'Live');
  };
  poll(ask, tell, POLL_MS);
}

function start() {
  const found = data('overlay');
  const page = drawPage(found);
  if (found.live) keepUp(page);
  $('foot').append('Made by posttrain from the run directories alone. This file needs no network.');
  document.documentElement.dataset.ready = 'true';
}

start();
