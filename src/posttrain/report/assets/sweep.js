// The comparison of a sweep: each combination with its seeds, its mean and its difference to the best.

// Draw the value of each seed as a dot, and the mean with its 95 % interval, on the scale of all rows.
function seedPlot(row, range) {
  const x = linear(range, [6, 214]);
  const marks = Object.values(row.values).map((v) => svg('circle', { cx: x(v), cy: 12, r: 3.5, class: 'seed' }));
  if (row.low !== null) {
    const [from, to] = [row.low, row.high].map((v) => Math.min(214, Math.max(6, x(v))));
    marks.unshift(svg('line', { x1: from, x2: to, y1: 12, y2: 12, class: 'interval' }));
  }
  marks.push(svg('line', { x1: x(row.mean), x2: x(row.mean), y1: 4, y2: 20, class: 'mean' }));
  const style = row.series === null ? {} : { '--hue': hue(row.series) };
  return svg('svg', { class: 'seeds', viewBox: '0 0 220 24', 'aria-hidden': 'true', style }, ...marks);
}

function sweepTable(section, sweep) {
  const show = FORMATS[sweep.format ? 'percent' : 'figure'];
  const points = (v) => {
    const size = sweep.format ? `${figure(Math.abs(v) * 100)} points` : figure(Math.abs(v));
    return v ? `${v < 0 ? '−' : '+'}${size}` : 'the same';
  };
  const number = (v) => (v === null ? '–' : figure(v));
  const measured = sweep.combinations.flatMap((row) => Object.values(row.values));
  const [low, high] = extent(measured, false);
  const room = (high - low) * 0.25;
  const verdict = (row) => {
    if (row.name === sweep.best) return 'the best mean';
    if (row.tied) return 'tied';
    if (!row.n) return 'no finished run';
    if (row.against?.real == null) return 'too few seeds';
    return row.against.real ? 'real' : 'not shown';
  };
  const rows = sweep.combinations.map((row) => {
    const name = [row.series !== null && swatch(row.series), ` ${visible(row.label)}`];
    const { against } = row;
    const difference = against && against.difference !== null;
    const cells = [
      String(row.n),
      row.n > 0 && seedPlot(row, [low - room, high + room]),
      row.mean === null ? '–' : h('b', {}, show(row.mean)),
      row.low === null ? '–' : `${show(row.low)} … ${show(row.high)}`,
      difference ? points(against.difference) : '–',
      difference && against.low !== null ? `${points(against.low)} … ${points(against.high)}` : '–',
      against ? number(against.p_holm) : '–',
      verdict(row),
    ];
    return h('tr', {}, h('th', { scope: 'row' }, ...name), ...cells.map((cell) => h('td', {}, cell)));
  });
  const columns = ['', 'seeds', '', 'mean', '95 %', 'to the best', '95 %', 'p (Holm)', 'difference'];
  const head = h('tr', {}, ...columns.map((name) => h('th', { scope: 'col' }, name)));
  const failed = sweep.runs.filter((run) => run.state === 'failed');
  const about = `A dot is a seed, the bar the 95 % interval of the mean by Student's t. Differences are paired by seed; their two-sided p is corrected by Holm for all combinations that are tested against the best.`;
  section.append(
    h('h2', {}, `${visible(sweep.metric)}: ${sweep.measured}`),
    h('div', { class: 'card wide', tabindex: '0' }, h('table', {}, h('thead', {}, head), h('tbody', {}, ...rows))),
    h('p', { class: 'note' }, visible(sweep.says.join(' '))),
    ...(failed.length
      ? [h('ul', { class: 'note' }, ...failed.map((run) => h('li', {}, visible(`${run.name} failed: ${run.cause}`))))]
      : []),
    h('p', { class: 'muted constant' }, about),
  );
}
