// A chart: a card with a title, a legend with values at the cursor, and an SVG drawn at its real size.

const PAD = { top: 8, right: 12, bottom: 22 };
const HEIGHT = 178;
// For each metric: unit, meaning, how it is computed, and its anchor on docs/metrics.md.
let WORDS = {};

// spec: {title, hint, format, range, lines, band, stack}, where lines and stack hold
// {label, color, values}, band {color, low, high}. view: the cursor that all charts share.
function chart(spec, view) {
  const shapes = [...(spec.lines ?? []), ...(spec.stack ?? [])];
  const readouts = shapes.map(() => h('b', {}));
  const legend = h(
    'ul',
    { class: 'legend' },
    ...shapes.map((shape, k) =>
      h(
        'li',
        {},
        h('i', { class: spec.stack ? 'block' : 'line', style: { background: shape.color } }),
        h('span', {}, visible(shape.label)),
        readouts[k],
      ),
    ),
  );
  const plot = svg('svg', { class: 'plot', role: 'img', tabindex: '0', 'aria-label': spoken(spec) });
  const node = h(
    'figure',
    { class: 'card chart' },
    caption(spec, shapes.map((shape) => shape.name)),
    legend,
    plot,
  );
  const self = { node, spec, cursor: null, scales: null };

  self.draw = () => draw(self, plot, shapes, view);
  self.show = (i) => {
    shapes.forEach((shape, k) => readouts[k].replaceChildren(...readout(shape.values, i, spec, view)));
    if (self.scales) placeCursor(self, shapes, i, view);
  };
  listen(plot, self, view);
  return self;
}

// Return the title of a chart, with an explanation of each of its metrics that can be opened.
function caption(spec, names) {
  const metrics = [...new Set(names)].filter((name) => Object.hasOwn(WORDS, name ?? ''));
  const places = [...new Set(metrics.map((name) => WORDS[name][3]))];
  const entries = places.flatMap((anchor) => {
    const alike = metrics.filter((name) => WORDS[name][3] === anchor);
    const [unit, means, how] = WORDS[alike[0]];
    return [
      h(
        'dt',
        { title: `docs/metrics.md#${anchor}` },
        h('code', {}, visible(alike.join(', '))),
        unit !== '–' && h('small', {}, ` ${unit}`),
      ),
      h('dd', {}, means, how && h('p', {}, how)),
    ];
  });
  const more = h('details', { class: 'words' }, h('summary', { 'aria-label': `About ${spec.title}` }, '?'), h('dl', {}, ...entries));
  return h(
    'figcaption',
    {},
    h('h4', {}, visible(spec.title)),
    spec.hint && h('p', {}, spec.hint),
    metrics.length > 0 && more,
  );
}

function spoken(spec) {
  const parts = (spec.lines ?? spec.stack).map((line) => {
    const values = line.values.filter((v) => v != null);
    const show = FORMATS[spec.format ?? 'figure'];
    return values.length ? `${line.label} from ${show(values[0])} to ${show(values.at(-1))}` : line.label;
  });
  return `${spec.title}: ${parts.join(', ')}`;
}

// Return the value at row i; for a line without one, the last value before it and its update.
function readout(values, i, spec, view) {
  let at = i;
  while (!spec.stack && at >= 0 && values[at] === undefined) at--;
  if (values[at] === undefined) return ['–'];
  const value = FORMATS[spec.format ?? 'figure'](values[at]);
  return at === i ? [value] : [value, h('small', {}, ` @${view.updates[at]}`)];
}

function domain(spec, stacked) {
  if (spec.range) return spec.range;
  const values = [
    ...(spec.lines ?? []).flatMap((line) => line.values.filter((v) => v != null)),
    ...(spec.band ? [...spec.band.low, ...spec.band.high].filter((v) => v != null) : []),
    ...(stacked.at(-1)?.high ?? []),
  ];
  const [low, high] = extent(values);
  const room = (high - low) * 0.06;
  return [low < 0 ? low - room : low, high > 0 ? high + room : high];
}

// Return the name and values of a chart in which nothing ever moved; null if something did.
function constant(spec) {
  const still = (spec.lines ?? spec.stack).map(({ label, values }) => {
    const measured = values.filter((v) => v !== undefined);
    return measured.length > 1 && measured.every((v) => v !== null && v === measured[0]) && [label, measured[0]];
  });
  if (!still.every(Boolean) || spec.band?.low.some((v, i) => v !== spec.band.high[i])) return null;
  const show = FORMATS[spec.format ?? 'figure'];
  if (still.length === 1) return `${spec.title} ${show(still[0][1])}`;
  return `${spec.title}: ${still.map(([label, value]) => `${label} ${show(value)}`).join(', ')}`;
}

function stackOf(spec) {
  let below = null;
  return (spec.stack ?? []).map((layer) => {
    const low = below ?? layer.values.map(() => 0);
    const high = layer.values.map((v, i) => low[i] + Math.max(0, v ?? 0));
    below = high;
    return { low, high, color: layer.color };
  });
}

function draw(self, plot, shapes, view) {
  const width = Math.max(200, plot.clientWidth || plot.parentNode.clientWidth - 32);
  const { spec } = self;
  const xs = view.xs();
  const stacked = stackOf(spec);
  const rangeY = domain(spec, stacked);
  const [left, right, floor] = [gutter(labelsOf(spec, rangeY)), width - PAD.right, HEIGHT - PAD.bottom];
  const x = linear(extent(xs, false), xs.length > 1 ? [left, right] : [(left + right) / 2, right]);
  const y = linear(rangeY, [floor, PAD.top]);
  self.scales = { x, y, xs, stacked };
  plot.setAttribute('viewBox', `0 0 ${width} ${HEIGHT}`);
  const marks = svg('g');
  for (const layer of stacked) {
    marks.append(
      svg('path', {
        d: stepPath(xs, layer.low, layer.high, x, y, left, right),
        class: 'area',
        style: { fill: layer.color },
      }),
    );
  }
  if (spec.band) {
    marks.append(
      svg('path', {
        d: bandPath(xs, spec.band.low, spec.band.high, x, y),
        class: 'band',
        style: { fill: spec.band.color },
      }),
    );
  }
  for (const line of spec.lines ?? []) drawLine(marks, line, xs, x, y);
  self.cursor = svg('g', { class: 'cursor' });
  plot.replaceChildren(axes(spec, rangeY, xs, x, y, [left, right, floor], view), marks, self.cursor);
}

function drawLine(marks, line, xs, x, y) {
  const { path, alone } = linePath(xs, line.values, x, y);
  marks.append(
    svg('path', {
      d: path,
      class: xs.length > 400 ? 'stroke dense' : 'stroke',
      style: { stroke: line.color },
    }),
  );
  const measured = line.values.map((v, i) => (v != null ? i : -1)).filter((i) => i >= 0);
  // A curve with few points is mostly straight lines between them: mark where it was measured.
  const sparse = measured.length <= xs.length / 2 && measured.length <= 60;
  for (const i of sparse ? measured : alone) {
    marks.append(
      svg('circle', {
        cx: x(xs[i]),
        cy: y(line.values[i]),
        r: sparse ? 3.5 : 2,
        class: 'dot',
        style: { fill: line.color },
      }),
    );
  }
}

const labelsOf = (spec, rangeY) => ticks(...rangeY, 4).map(FORMATS[spec.format ?? 'figure']);

function axes(spec, rangeY, xs, x, y, [left, right, floor], view) {
  const group = svg('g', { class: 'axes' });
  const show = FORMATS[spec.format ?? 'figure'];
  for (const tick of ticks(...rangeY, 4)) {
    const at = y(tick);
    group.append(
      svg('line', { x1: left, x2: right, y1: at, y2: at, class: tick === 0 ? 'base' : '' }),
      svg('text', { x: left - 8, y: at + 4, 'text-anchor': 'end' }, show(tick)),
    );
  }
  const [low, high] = extent(xs, false);
  const room = Math.max(2, Math.floor((right - left) / 62));
  const marks =
    xs.length < 2 ? xs : view.axis === 'update' ? wholeTicks(low, high, room) : view.ticks(low, high, room);
  for (const tick of marks) {
    const at = Math.min(Math.max(x(tick), left + 4), right - 4);
    group.append(svg('text', { x: at, y: floor + 16, 'text-anchor': 'middle' }, view.showX(tick)));
  }
  return group;
}

function placeCursor(self, shapes, i, view) {
  const { x, y, xs, stacked } = self.scales;
  const at = x(xs[i]);
  const parts = [
    svg('line', {
      x1: at,
      x2: at,
      y1: PAD.top,
      y2: HEIGHT - PAD.bottom,
      class: view.isPinned() ? 'pinned' : '',
    }),
  ];
  if (!stacked.length) {
    for (const shape of shapes) {
      const v = shape.values[i];
      if (v != null)
        parts.push(svg('circle', { cx: at, cy: y(v), r: 4, class: 'dot', style: { fill: shape.color } }));
    }
  }
  self.cursor.replaceChildren(...(view.isIdle() ? [] : parts));
}

function listen(plot, self, view) {
  const nearest = (event) => {
    const { x, xs } = self.scales;
    const at = event.clientX - plot.getBoundingClientRect().left;
    let best = 0;
    xs.forEach((v, i) => {
      if (Math.abs(x(v) - at) < Math.abs(x(xs[best]) - at)) best = i;
    });
    return best;
  };
  plot.addEventListener('pointermove', (event) => view.hover(nearest(event)));
  plot.addEventListener('pointerleave', () => view.hover(null));
  plot.addEventListener('click', (event) => view.pin(nearest(event)));
  plot.addEventListener('keydown', (event) => {
    const last = view.updates.length - 1;
    const to = { ArrowLeft: view.at() - 1, ArrowRight: view.at() + 1, Home: 0, End: last }[event.key];
    if (event.key === 'Escape') view.pin(null);
    if (to === undefined) return;
    event.preventDefault();
    view.pin(Math.min(last, Math.max(0, to)));
  });
}
