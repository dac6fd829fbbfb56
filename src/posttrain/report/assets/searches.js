// The section of searches: solved by budget and difficulty, the use of moves and time, and the trees.

const mean = (values) => values.reduce((a, b) => a + b, 0) / (values.length || 1);
const total = (rows, key) => rows.reduce((sum, row) => sum + row[key], 0);
const roughly = (share) => (share < 0.01 ? 'under 1%' : `${Math.round(share * 100)}%`);

function setName(set) {
  if (set.kind === 'strategy') return set.name || set.id;
  return set.kind === 'eval' ? `evaluation at update ${set.update}` : `update ${set.update}`;
}

// Return all strategies; for a run, its first and last evaluation, or update.
function compared(sets) {
  for (const kind of ['strategy', 'eval', 'train']) {
    const members = sets.filter((set) => set.kind === kind);
    if (kind === 'strategy' && members.length) return members;
    if (members.length) return members.length > 1 ? [members[0], members.at(-1)] : members;
  }
  return [];
}

function searches(section, run) {
  const sets = run.searches;
  const selection = compared(sets);
  const lines = selection.map((set, k) => ({ set, label: setName(set), color: PALETTE[k % PALETTE.length] }));
  const charts = [budgetChart(lines), ...fieldsOf(selection).map((field) => fieldChart(lines, field))];
  section.append(
    h('h2', {}, 'Searches'),
    h('div', { class: 'charts' }, ...charts.map((c) => c.node), moveBars(lines), timeBars(lines), spentTable(lines)),
    treeBrowser(sets, selection[0].kind === 'strategy' ? selection[0] : selection.at(-1)),
  );
  let width = 0;
  new ResizeObserver(() => {
    if (width === section.clientWidth) return;
    width = section.clientWidth;
    for (const c of charts) c.draw();
  }).observe(section);
  for (const c of charts) c.draw();
}

// ------------------------------------------------------------------ curves

// lines: [{label, color, points: [[x, y, remark]]}]; steps: a value holds until the next point.
function plot(title, hint, lines, { steps, dots, showX, axis }) {
  const descriptions = lines.map((l) => `${l.label}: ${l.points.map(([x, y]) => `${percent(y)} at ${figure(x)}`).join(', ')}`);
  const canvas = svg('svg', { class: 'still', role: 'img', 'aria-label': `${title}. ${descriptions.join('; ')}` });
  const legend = lines.map((l) =>
    h('li', {}, h('i', { class: 'line', style: { background: l.color } }), h('span', {}, visible(l.label)), h('b', {}, l.read)),
  );
  const node = card(title, hint, h('ul', { class: 'legend' }, ...legend), canvas);
  const draw = () => {
    const width = Math.max(200, canvas.clientWidth || node.clientWidth - 32);
    const rangeX = extent(lines.flatMap((l) => l.points.map((p) => p[0])), Boolean(steps));
    const most = Math.max(0, ...lines.flatMap((l) => l.points.map((p) => p[1])));
    const rangeY = [0, most > 0.5 ? 1 : most ? Math.min(1, most * 1.15) : 0.1];
    const [left, right, floor] = [gutter(labelsOf({ format: 'percent' }, rangeY)), width - PAD.right, HEIGHT - PAD.bottom];
    const x = linear(rangeX, steps ? [left, right] : [left + 10, right - 10]);
    const y = linear(rangeY, [floor, PAD.top + 4]);
    const marks = svg('g');
    for (const { points, color } of lines) {
      const d = points
        .map(([px, py], i) => `${i ? (steps ? `H${x(px).toFixed(1)}V` : `L${x(px).toFixed(1)} `) : `M${x(px).toFixed(1)} `}${y(py).toFixed(1)}`)
        .join('');
      marks.append(svg('path', { d, class: 'stroke', style: { stroke: color } }));
      for (const [px, py, remark] of dots ? points : [])
        marks.append(
          svg('circle', { cx: x(px), cy: y(py), r: 4, class: 'dot', style: { fill: color } }, svg('title', {}, remark)),
        );
    }
    const scale = { axis, ticks: dots ? wholeTicks : ticks, showX };
    canvas.setAttribute('viewBox', `0 0 ${width} ${HEIGHT}`);
    canvas.replaceChildren(axes({ format: 'percent' }, rangeY, rangeX, x, y, [left, right, floor], scale), marks);
  };
  return { node, draw };
}

const card = (title, hint, ...children) =>
  h('figure', { class: 'card chart' }, h('figcaption', {}, h('h4', {}, title), hint && h('p', {}, hint)), ...children);

function budgetChart(lines) {
  const most = Math.max(...lines.map(({ set }) => set.budget || Math.max(...set.rows.map((row) => row.moves))));
  const curves = lines.map(({ set, label, color }) => {
    const spent = set.rows.filter((row) => row.solved).map((row) => row.moves).sort((a, b) => a - b);
    const points = [[0, 0], ...spent.map((m, i) => [m, (i + 1) / set.rows.length])];
    points.push([set.budget || most, spent.length / set.rows.length]);
    return { label, color, points, read: `${spent.length} of ${set.rows.length}` };
  });
  const hint = 'share of tasks that a search solves within this number of moves';
  return plot('Solved against budget', hint, curves, { steps: true, showX: figure, axis: 'moves' });
}

// Return numeric fields of tasks that may mean difficulty: 2 to 24 values, common names first, at most two.
function fieldsOf(sets) {
  const values = new Map();
  for (const row of sets.flatMap((set) => set.rows))
    for (const [name, value] of Object.entries(row.fields)) values.set(name, (values.get(name) ?? new Set()).add(value));
  const fits = [...values].filter(([, distinct]) => distinct.size > 1 && distinct.size <= 24).map(([name]) => name);
  const first = (name) => ['depth', 'difficulty', 'level', 'length'].indexOf(name) + 1 || 9;
  const rows = sets.flatMap((set) => set.rows);
  const same = (a, b) => rows.every((row) => row.fields[a] === row.fields[b]);
  fits.sort((a, b) => first(a) - first(b));
  return fits.filter((name, at) => !fits.slice(0, at).some((other) => same(name, other))).slice(0, 2);
}

function fieldChart(lines, field) {
  const curves = lines.map(({ set, label, color }) => {
    const groups = new Map();
    for (const row of set.rows)
      if (field in row.fields) groups.set(row.fields[field], [...(groups.get(row.fields[field]) ?? []), row.solved]);
    const points = [...groups]
      .sort((a, b) => a[0] - b[0])
      .map(([value, solved]) => [
        value,
        mean(solved.map(Number)),
        `${label}, ${field} ${figure(value)}: ${solved.filter(Boolean).length} of ${solved.length}`,
      ]);
    return { label, color, points, read: '' };
  });
  const hint = `share of tasks solved, of each ${visible(field)}`;
  return plot(`Solved by ${visible(field)}`, hint, curves, { dots: true, showX: figure, axis: 'update' });
}

// ------------------------------------------------------------------ moves and time

// Return a card with a bar for each line, of parts [label, share, colour] that sum to 1.
function bars(title, hint, lines, partsOf) {
  const rows = lines.map(({ set, label }) => [label, partsOf(set).filter(([, share]) => share > 0)]);
  const kinds = new Map(rows.flatMap(([, parts]) => parts.map(([name, , color]) => [name, color])));
  const segment = ([name, share, color]) =>
    h('i', { title: `${visible(name)} ${percent(share)}`, style: { background: color, 'flex-grow': String(share) } });
  return card(
    title,
    hint,
    h(
      'ul',
      { class: 'legend' },
      ...[...kinds].map(([name, color]) => h('li', {}, h('i', { class: 'block', style: { background: color } }), h('span', {}, visible(name)))),
    ),
    ...rows.map(([label, parts]) =>
      h(
        'div',
        { class: 'spent' },
        h('p', {}, visible(label), h('small', {}, visible(parts.filter(([, share]) => share >= 0.005).map(([name, share]) => `${name} ${roughly(share)}`).join(' · ')))),
        h('div', { class: 'bar' }, ...parts.map(segment)),
      ),
    ),
  );
}

const REFUSED = ['var(--c2)', 'var(--c4)', 'var(--c5)', 'var(--c6)', 'var(--c7)', 'var(--attack)'];

function moveBars(lines) {
  const tally = new Map();
  for (const row of lines.flatMap(({ set }) => set.rows))
    for (const [label, n] of Object.entries(row.refused)) tally.set(label, (tally.get(label) ?? 0) + n);
  const labels = [...tally].sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1)).map(([label]) => label);
  const colors = new Map(labels.map((label, k) => [label, REFUSED[k % REFUSED.length]]));
  const parts = (set) => {
    const count = total(set.rows, 'moves') || 1;
    const refused = [...colors].map(([label, color]) => [
      `refused: ${label}`,
      set.rows.reduce((sum, row) => sum + (row.refused[label] ?? 0), 0) / count,
      color,
    ]);
    const merged = total(set.rows, 'merged') / count;
    // Moves cut off by their length are refused before they are followed.
    const applied = refused.reduce((sum, [name, share]) => sum + (name === 'refused: cut' ? 0 : share), 0);
    const fresh = total(set.rows, 'followed') / count - applied - merged;
    const rest = 1 - fresh - merged - refused.reduce((sum, [, share]) => sum + share, 0);
    return [
      ['a new state', fresh, 'var(--c1)'],
      ['merged', merged, 'var(--c3)'],
      ...refused,
      ['repeated, or not followed', rest > 1e-9 ? rest : 0, 'var(--grey)'],
    ];
  };
  return bars('Where moves led', 'share of all moves drawn; merged: to a known state; refused moves by class', lines, parts);
}

function timeBars(lines) {
  const parts = (set) => {
    const [model, prover] = [total(set.rows, 'model_s'), total(set.rows, 'prover_s')];
    const seconds = model + prover || 1;
    return [
      ['in the model', model / seconds, 'var(--c5)'],
      ['in the prover', prover / seconds, 'var(--c4)'],
    ];
  };
  return bars('Time', 'drawing moves, and following them', lines, parts);
}

function spentTable(lines) {
  const row = ({ set, label }) => {
    const n = set.rows.length;
    const cells = [
      `${set.rows.filter((each) => each.solved).length} of ${n}`,
      figure(total(set.rows, 'moves') / n),
      figure(total(set.rows, 'merged') / n),
      figure(total(set.rows, 'refusals') / n),
      duration((total(set.rows, 'model_s') + total(set.rows, 'prover_s')) / n),
    ];
    return h('tr', {}, h('th', { scope: 'row' }, visible(label)), ...cells.map((cell) => h('td', {}, cell)));
  };
  const heads = ['', 'solved', 'moves', 'merged', 'refused', 'time'];
  return card(
    'A search, on average',
    'moves drawn, moves to known states, and refused moves',
    h(
      'div',
      { class: 'tall' },
      h('table', {}, h('thead', {}, h('tr', {}, ...heads.map((head) => h('th', {}, head)))), h('tbody', {}, ...lines.map(row))),
    ),
  );
}

// ------------------------------------------------------------------ trees

function treeBrowser(sets, first) {
  const state = { set: first, row: null, only: 'all' };
  const [bar, list, detail] = [h('div', { class: 'toolbar' }), h('div', { class: 'groups' }), h('div', { class: 'detail' })];
  const cache = new Map();
  const trees = () => {
    if (!cache.has(state.set.id)) cache.set(state.set.id, data(state.set.id));
    return cache.get(state.set.id);
  };
  const change = (part) => {
    Object.assign(state, part);
    render();
  };
  const entry = (n, current) => {
    const row = state.set.rows[n];
    const color = row.solved ? 'var(--good)' : 'var(--grey)';
    return h(
      'button',
      { type: 'button', class: 'group', 'aria-current': current ? 'true' : undefined, onclick: () => change({ row: n }) },
      h('span', { class: 'task', dir: 'auto' }, visible(row.task)),
      h('span', { class: 'mean' }, `${row.moves}`),
      h('span', { class: 'dots' }, h('i', { style: { background: color } }), h('small', {}, visible(told(row)))),
    );
  };
  const told = (row) =>
    [row.solved ? 'solved' : row.label, ...Object.entries(row.fields).slice(0, 2).map(([name, v]) => `${name} ${figure(v)}`)].join(' · ');
  const render = () => {
    const held = Object.keys(trees()).map(Number);
    const kept = held.filter((n) => state.only === 'all' || state.set.rows[n].solved === (state.only === 'solved'));
    const row = kept.includes(state.row) ? state.row : (kept.find((n) => state.set.rows[n].solved) ?? kept[0]);
    const pick = (event) => change({ set: sets.find((set) => set.id === event.target.value), row: null });
    refill(
      bar,
      h(
        'select',
        { 'aria-label': 'Searches', onchange: pick },
        ...sets.map((set) => h('option', { value: set.id, selected: set === state.set }, visible(setName(set)))),
      ),
      choice('Which', [['all', 'All'], ['solved', 'Solved'], ['open', 'Not solved']], state.only, (only) => change({ only })),
      h('span', { class: 'where' }, h('small', {}, `${held.length} of ${state.set.rows.length} trees recorded`)),
    );
    refill(list, ...kept.map((n) => entry(n, n === row)));
    detail.replaceChildren(...(row === undefined ? [h('p', { class: 'empty' }, 'No tree is recorded here.')] : searchDetail(state.set.rows[row], trees()[row], state.set)));
  };
  render();
  return h('div', { class: 'card browser searches' }, bar, h('div', { class: 'columns' }, list, detail));
}

function searchDetail(row, tree, set) {
  const facts = [
    `${row.moves}${set.budget ? ` of ${set.budget}` : ''} moves`,
    `${tree.states.length} states`,
    row.merged && `${row.merged} merged`,
    row.refusals && `${row.refusals} refused`,
    row.model_s + row.prover_s > 0 && `${duration(row.model_s)} in the model, ${duration(row.prover_s)} in the prover`,
  ];
  return [
    h(
      'div',
      { class: 'about' },
      h('h4', { dir: 'auto' }, visible(row.task)),
      h('span', { class: 'verdict' }, h('i', { style: { background: verdictColor(row.label) } }), visible(row.label)),
      h('p', { class: 'muted' }, facts.filter(Boolean).join(' · ')),
    ),
    row.solved && tree.answer && h('pre', { class: 'answer', dir: 'auto', translate: 'no' }, visible(tree.answer.trim())),
    treeOf(tree),
  ].filter(Boolean);
}
