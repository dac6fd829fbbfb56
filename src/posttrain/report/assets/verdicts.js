// Cards next to the curves of the verifier: a table of its classes, and reward by length.

function classTable(classes) {
  const sorted = [...classes].sort((a, b) => byClass(a.label, b.label));
  const row = (cell, values) => h('tr', {}, ...values.map((v) => (v instanceof Node ? v : h(cell, {}, v))));
  const name = (label) =>
    h(
      'th',
      { scope: 'row' },
      h('span', { class: 'verdict' }, h('i', { style: { background: verdictColor(label) } }), visible(label)),
    );
  return h(
    'figure',
    { class: 'card chart' },
    h(
      'figcaption',
      {},
      h('h4', {}, 'Verdicts by class'),
      h('p', {}, 'shares in the first and last updates, and where a class was largest'),
    ),
    h(
      'div',
      { class: 'tall' },
      h(
        'table',
        {},
        h('thead', {}, row('th', ['class', 'first', 'last', 'most'])),
        h(
          'tbody',
          {},
          ...sorted.map(({ label, early, late, most, at }) =>
            row('td', [
              name(label),
              percent(early),
              h('td', {}, h('b', {}, percent(late))),
              h('td', {}, percent(most), h('small', {}, ` @${at}`)),
            ]),
          ),
        ),
      ),
    ),
  );
}

// Dots of [mean tokens, mean reward, answers], the earlier line paler; drawn again with the curves.
function lengthChart(lines) {
  const colors = lines.length > 1 ? ['var(--grey)', 'var(--c1)'] : ['var(--c1)'];
  const updates = (line) => (line.from === line.to ? `update ${line.from}` : `updates ${line.from}–${line.to}`);
  const description = (line) =>
    `${updates(line)}: ${line.dots.map(([x, y]) => `${figure(y)} at ${figure(x)} tokens`).join(', ')}`;
  const plot = svg('svg', { class: 'still', role: 'img', 'aria-label': lines.map(description).join('; ') });
  const node = h(
    'figure',
    { class: 'card chart' },
    h(
      'figcaption',
      {},
      h('h4', {}, 'Reward by length'),
      h('p', {}, 'mean reward of short and long answers, in tokens; the larger the dot, the more answers'),
    ),
    h(
      'ul',
      { class: 'legend' },
      ...lines.map((line, k) =>
        h('li', {}, h('i', { class: 'line', style: { background: colors[k] } }), updates(line)),
      ),
    ),
    plot,
  );
  const draw = () => {
    const width = Math.max(200, plot.clientWidth || node.clientWidth - 32);
    const dots = lines.flatMap((line) => line.dots);
    const [rangeX, rangeY] = [0, 1].map((k) => extent(dots.map((dot) => dot[k]), k === 1));
    const [left, right, floor] = [gutter(labelsOf({}, rangeY)), width - PAD.right, HEIGHT - PAD.bottom];
    const most = Math.max(...dots.map((dot) => dot[2]));
    const x = linear(rangeX, [left + 8, right - 8]);
    const y = linear(rangeY, [floor - 4, PAD.top + 6]);
    const marks = svg('g');
    lines.forEach(({ dots }, k) => {
      const { path } = linePath(
        dots.map((dot) => dot[0]),
        dots.map((dot) => dot[1]),
        x,
        y,
      );
      marks.append(svg('path', { d: path, class: 'stroke', style: { stroke: colors[k] } }));
      for (const [length, reward, count] of dots) {
        const dot = { cx: x(length), cy: y(reward), r: 2 + 3 * Math.sqrt(count / most), class: 'dot' };
        const says = `${figure(reward)} at ${figure(length)} tokens, ${count} answers`;
        marks.append(svg('circle', { ...dot, style: { fill: colors[k] } }, svg('title', {}, says)));
      }
    });
    const scale = { axis: 'tokens', ticks, showX: figure };
    plot.setAttribute('viewBox', `0 0 ${width} ${HEIGHT}`);
    plot.replaceChildren(axes({}, rangeY, rangeX, x, y, [left, right, floor], scale), marks);
  };
  return { node, draw, show: () => {}, spec: { lines: [] } };
}
