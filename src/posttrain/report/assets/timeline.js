// Use of time per update: a lane for the learner and one for each sampler.

const LANE = { height: 58, gap: 10, top: 4, bottom: 22 };
const KINDS = [
  ['sample', 'sampling', 'var(--c1)'],
  ['judge', 'judging', 'var(--c3)'],
  ['train', 'training', 'var(--c2)'],
  ['weights', 'sending weights', 'var(--c4)'],
  ['eval', 'evaluating', 'var(--c5)'],
  ['rest', 'saving, and the rest', 'var(--c7)'],
  ['wait', 'waiting', 'var(--rule)'],
];
const WAITS = {
  learner: 'waiting: for groups to train on, and for samplers that must load weights',
  sampler: 'waiting: for a slot, and so for the learner, or for weights that other samplers must load',
};

// Return the lanes of a run, {label, about, spent: {kind: seconds of each update}}; none without sampling.
function lanesOf(columns, count) {
  const at = (name) => (columns.get(name) ?? Array(count).fill(0)).map((v) => Math.max(0, v ?? 0));
  const numbers = [...columns.keys()].map((name) => OF_SAMPLER.exec(name)?.[1]).filter(Boolean);
  const samplers = [...new Set(numbers)].map(Number).sort((a, b) => a - b);
  if (!samplers.length) return [];
  const plus = (...columns) => columns[0].map((_, i) => columns.reduce((sum, column) => sum + column[i], 0));
  const learner = { train: at('time/train'), weights: at('time/publish'), eval: at('time/eval') };
  const sampling = at('time/sample');
  const measured = plus(sampling, at('time/feed'), learner.train, learner.weights, learner.eval);
  // Less than a thousandth is rounding of the numbers in the page.
  learner.rest = at('time/total').map((all, i) => (all - measured[i] > all / 1000 ? all - measured[i] : 0));
  if (!columns.has('samplers/busy')) {
    // In one thread they take turns: the learner waits exactly while the sampler works.
    const [drew, judged] = [at('samplers/0/sample'), at('samplers/0/judge')];
    const share = drew.map((s, i) => (s + judged[i] ? s / (s + judged[i]) : 1));
    const spent = { sample: sampling.map((s, i) => s * share[i]), judge: sampling.map((s, i) => s * (1 - share[i])) };
    return [{ label: 'the run', about: '', spent: { ...spent, ...learner } }];
  }
  const ofSampler = (n) => Object.fromEntries(['sample', 'judge', 'weights', 'wait'].map((k) => [k, at(`samplers/${n}/${k}`)]));
  return [
    { label: 'learner', about: WAITS.learner, spent: { ...learner, wait: plus(sampling, at('time/feed')) } },
    ...samplers.map((n) => ({ label: `sampler ${n}`, about: WAITS.sampler, spent: ofSampler(n) })),
  ];
}

// Return a card that shares the cursor of the charts; its table is the legend and shows values.
function timeline(columns, view) {
  const lanes = lanesOf(columns, view.updates.length);
  if (!lanes.length) return null;
  const kinds = KINDS.filter(([kind]) => lanes.some(({ spent }) => spent[kind]?.some((s) => s > 0)));
  const cells = lanes.map(() => kinds.map(() => h('td', {})));
  const head = kinds.map(([, label, color]) => h('th', {}, h('i', { style: { background: color } }), label));
  const rows = lanes.map(({ label, about }, n) => h('tr', {}, h('th', { title: about || undefined }, label), ...cells[n]));
  const table = h('table', { class: 'lanes' }, h('thead', {}, h('tr', {}, h('th', {}), ...head)), h('tbody', {}, ...rows));
  const totals = lanes.map(({ label, spent }) => `${label}: ${kinds.map(([k, name]) => `${name} ${duration(total(spent[k]))}`).join(', ')}`);
  const plot = svg('svg', { class: 'plot timeline', role: 'img', tabindex: '0', 'aria-label': `Seconds of all updates. ${totals.join('; ')}` });
  const hint = 'seconds of each update, all lanes in one scale; samplers report once a second';
  const node = h('figure', { class: 'card chart wide' }, h('figcaption', {}, h('h4', {}, 'Who did what'), h('p', {}, hint)), plot, h('div', { class: 'tall' }, table));
  const self = { node, spec: { lines: [] }, cursor: null, scales: null };
  self.draw = () => drawLanes(self, plot, lanes, kinds, view);
  self.show = (i) => {
    lanes.forEach(({ spent }, n) => kinds.forEach(([kind], k) => (cells[n][k].textContent = spent[kind] ? duration(spent[kind][i]) : '–')));
    if (self.scales) lanesCursor(self, lanes.length, i, view);
  };
  listen(plot, self, view);
  return self;
  function total(values) {
    return (values ?? []).reduce((a, b) => a + b, 0);
  }
}

const bottomOf = (n) => LANE.top + (n + 1) * LANE.height + n * LANE.gap;

function drawLanes(self, plot, lanes, kinds, view) {
  const width = Math.max(200, plot.clientWidth || plot.parentNode.clientWidth - 32);
  const height = bottomOf(lanes.length - 1) + LANE.bottom;
  const xs = view.xs();
  const sums = lanes.flatMap(({ spent }) => xs.map((_, i) => kinds.reduce((sum, [kind]) => sum + (spent[kind]?.[i] ?? 0), 0)));
  const most = Math.max(...sums, 1e-3);
  const left = gutter([...lanes.map(({ label }) => label), duration(most)]);
  const right = width - PAD.right;
  const half = (right - left) / xs.length / 2;
  const x = linear(extent(xs, false), xs.length > 1 ? [left + half, right - half] : [(left + right) / 2, right]);
  self.scales = { x, xs, height };
  const edges = [left, ...xs.slice(1).map((v, i) => (x(xs[i]) + x(v)) / 2), right];
  const marks = svg('g', { class: 'axes' });
  lanes.forEach(({ label, spent }, n) => {
    const floor = bottomOf(n);
    const y = linear([0, most], [floor, floor - LANE.height]);
    marks.append(
      svg('line', { x1: left, x2: right, y1: floor, y2: floor, class: 'base' }),
      svg('line', { x1: left, x2: right, y1: y(most), y2: y(most) }),
      svg('text', { x: left - 8, y: floor - LANE.height / 2 + 4, 'text-anchor': 'end' }, label),
    );
    if (!n) marks.append(svg('text', { x: left - 8, y: y(most) + 9, 'text-anchor': 'end' }, duration(most)));
    let below = xs.map(() => 0);
    for (const [kind, , color] of kinds) {
      if (!spent[kind]) continue;
      const above = below.map((low, i) => low + spent[kind][i]);
      marks.append(svg('path', { d: barsPath(edges, below, above, y), style: { fill: color } }));
      below = above;
    }
  });
  const room = Math.max(2, Math.floor((right - left) / 62));
  const [low, high] = extent(xs, false);
  const places = xs.length < 2 ? xs : view.axis === 'update' ? wholeTicks(low, high, room) : view.ticks(low, high, room);
  for (const tick of places)
    marks.append(svg('text', { x: Math.min(Math.max(x(tick), left + 4), right - 4), y: height - 6, 'text-anchor': 'middle' }, view.showX(tick)));
  self.cursor = svg('g', { class: 'cursor' });
  plot.setAttribute('viewBox', `0 0 ${width} ${height}`);
  plot.style.setProperty('height', `${height}px`);
  plot.replaceChildren(marks, self.cursor);
}

// Return a rectangle for each update with a value, with gaps between them if there is room.
function barsPath(edges, lows, highs, y) {
  let path = '';
  lows.forEach((low, i) => {
    if (highs[i] <= low) return;
    const gap = Math.min(1.5, (edges[i + 1] - edges[i]) * 0.12);
    const [a, b] = [(edges[i] + gap).toFixed(1), (edges[i + 1] - gap).toFixed(1)];
    path += `M${a} ${y(low).toFixed(1)}H${b}V${y(highs[i]).toFixed(1)}H${a}Z`;
  });
  return path;
}

function lanesCursor(self, count, i, view) {
  const at = self.scales.x(self.scales.xs[i]);
  const line = svg('line', { x1: at, x2: at, y1: LANE.top, y2: bottomOf(count - 1), class: view.isPinned() ? 'pinned' : '' });
  self.cursor.replaceChildren(...(view.isIdle() ? [] : [line]));
}
