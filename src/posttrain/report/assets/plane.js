// The plane of mean score against KL: a point for each policy, with both standard errors.

const COLOURS = ['--c1', '--c2', '--c3', '--c4', '--c5', '--c6', '--c7'];
const colour = (i) => `var(${COLOURS[i % COLOURS.length]})`;

// points: [{name, x, xError, y, yError, color}]; labels: names of the axes.
function plane(points, labels) {
  const node = svg('svg', {
    class: 'plane',
    role: 'img',
    'aria-label': points.map((p) => `${p.name}: ${labels.y} ${figure(p.y)}, ${labels.x} ${figure(p.x)}`).join('; '),
  });
  const draw = () => {
    const [width, height] = [Math.max(260, node.clientWidth || 600), 340];
    const reach = (key, error) => points.flatMap((p) => [p[key] - p[error], p[key] + p[error]]);
    const rangeX = roomy(extent(reach('x', 'xError')));
    const rangeY = roomy(extent(reach('y', 'yError'), false));
    const [right, top, floor] = [width - 24, 26, height - 44];
    const left = gutter(ticks(...rangeY, 5).map(figure));
    const x = linear(rangeX, [left, right]);
    const y = linear(rangeY, [floor, top]);
    node.setAttribute('viewBox', `0 0 ${width} ${height}`);
    node.replaceChildren(
      grid(rangeX, rangeY, x, y, [left, right, top, floor]),
      ...points.map((p) => mark(p, x, y, right)),
      svg('text', { x: (left + right) / 2, y: height - 8, 'text-anchor': 'middle', class: 'what' }, labels.x),
      svg('text', { x: 4, y: 13, class: 'what' }, labels.y),
    );
  };
  draw();
  new ResizeObserver(draw).observe(node);
  return node;
}

function roomy([low, high]) {
  const room = (high - low) * 0.12;
  return [low === 0 ? 0 : low - room, high + room];
}

function grid(rangeX, rangeY, x, y, [left, right, top, floor]) {
  const group = svg('g', { class: 'axes' });
  for (const tick of ticks(...rangeY, 5)) {
    group.append(
      svg('line', { x1: left, x2: right, y1: y(tick), y2: y(tick), class: tick === 0 ? 'base' : '' }),
      svg('text', { x: left - 8, y: y(tick) + 4, 'text-anchor': 'end' }, figure(tick)),
    );
  }
  for (const tick of ticks(...rangeX, Math.max(2, Math.floor((right - left) / 90)))) {
    group.append(
      svg('line', { x1: x(tick), x2: x(tick), y1: top, y2: floor }),
      svg('text', { x: x(tick), y: floor + 16, 'text-anchor': 'middle' }, figure(tick)),
    );
  }
  return group;
}

function mark(p, x, y, right) {
  const [cx, cy] = [x(p.x), y(p.y)];
  const late = cx > right - 80;
  const bar = (x1, x2, y1, y2) => svg('line', { x1, x2, y1, y2, class: 'error', style: { stroke: p.color } });
  return svg(
    'g',
    {},
    bar(x(p.x - p.xError), x(p.x + p.xError), cy, cy),
    bar(cx, cx, y(p.y - p.yError), y(p.y + p.yError)),
    svg('circle', { cx, cy, r: 6, class: 'point', style: { fill: p.color } }),
    svg(
      'text',
      { x: cx + (late ? -11 : 11), y: cy - 9, 'text-anchor': late ? 'end' : 'start', class: 'name' },
      visible(p.name),
    ),
  );
}
