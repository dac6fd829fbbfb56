// The section of curves, and the cursor of all its charts.

function sharedCursor(run, columns) {
  const axes = { update: run.updates, seconds: columns.get('seconds'), tokens: columns.get('tokens') };
  const usable = (name) => axes[name]?.every((v, i, all) => v != null && (i === 0 || v >= all[i - 1]));
  const view = {
    updates: run.updates,
    axis: 'update',
    hovered: null,
    pinned: null,
    charts: [],
    changed: () => {},
  };
  view.axes = ['update', 'seconds', 'tokens'].filter(usable);
  view.xs = () => axes[view.axis];
  view.at = () => view.hovered ?? view.pinned ?? run.updates.length - 1;
  view.isPinned = () => view.hovered === null && view.pinned !== null;
  view.isIdle = () => view.hovered === null && view.pinned === null;
  view.showX = (v) => (view.axis === 'seconds' ? duration(v) : figure(v));
  view.ticks = (low, high, n) => {
    if (view.axis !== 'seconds') return ticks(low, high, n);
    const unit = high - low > 7200 ? 3600 : high - low > 120 ? 60 : 1;
    return ticks(low / unit, high / unit, n).map((v) => v * unit);
  };
  view.refresh = () => {
    for (const c of view.charts) c.show(view.at());
    view.changed(view.at());
  };
  view.hover = (i) => {
    if (view.hovered !== i) {
      view.hovered = i;
      view.refresh();
    }
  };
  view.pin = (i) => {
    view.pinned = i;
    view.hovered = null;
    view.refresh();
  };
  view.draw = () => {
    for (const c of view.charts) c.draw();
    view.refresh();
  };
  return view;
}

// Fill the section of curves; `open(update)` shows the rollouts of an update, null if there are none.
function curves(section, run, open) {
  section.append(h('h2', {}, 'Curves'));
  if (!run.updates.length) {
    section.append(h('p', { class: 'empty' }, 'No update has been finished yet.'));
    return null;
  }
  const columns = columnsOf(run);
  const view = sharedCursor(run, columns);
  const bar = h('div', { class: 'cursorbar' });
  section.append(bar);
  const lanes = timeline(columns, view);
  if (lanes) {
    view.charts.push(lanes);
    section.append(h('h3', {}, 'Timeline'), lanes.node);
  }
  for (const [name, specs] of chartGroups(columns)) {
    const alarmed = (spec) => run.alarms.some((alarm) => draws({ spec }, alarm.metric));
    const still = (spec) => !alarmed(spec) && constant(spec);
    const charts = specs.filter((spec) => !still(spec)).map((spec) => chart(spec, view));
    for (const c of charts) c.node.classList.toggle('alarmed', alarmed(c.spec));
    const cards = charts.map((c) => c.node);
    if (name === 'Verifier') {
      if (run.classes.length) cards.splice(1, 0, classTable(run.classes));
      if (run.lengths.length) {
        charts.push(lengthChart(run.lengths));
        const beside = charts.findIndex((c) => draws(c, 'hacking/length_correlation'));
        cards.splice(beside < 0 ? cards.length : cards.indexOf(charts[beside].node) + 1, 0, charts.at(-1).node);
      }
    }
    view.charts.push(...charts);
    const folded = specs.map(still).filter(Boolean);
    section.append(h('h3', {}, name));
    if (GROUP_SAYS[name]) section.append(h('p', { class: 'muted about' }, GROUP_SAYS[name]));
    section.append(h('div', { class: 'charts' }, ...cards));
    if (folded.length) section.append(h('p', { class: 'muted constant' }, `Constant: ${visible(folded.join('  ·  '))}`));
  }
  view.changed = (i) => cursorBar(bar, view, columns, i, open);
  view.look = (alarm) => {
    const far = (i) => Math.abs(run.updates[i] - alarm.update);
    view.pin(run.updates.reduce((best, _, i) => (far(i) < far(best) ? i : best), 0));
    const seen = view.charts.find((c) => draws(c, alarm.metric))?.node ?? section;
    seen.scrollIntoView({ behavior: 'smooth', block: 'center' });
  };
  let width = 0;
  const observer = new ResizeObserver(() => {
    if (width !== section.clientWidth) {
      width = section.clientWidth;
      view.draw();
    }
  });
  observer.observe(section);
  view.close = () => observer.disconnect();
  view.draw();
  return view;
}

// Return whether a chart draws a metric; verdict/* stands for any of its kind.
function draws({ spec }, metric) {
  const fits = (name) => name === metric || (metric.endsWith('*') && name?.startsWith(metric.slice(0, -1)));
  return (spec.lines ?? spec.stack).some((line) => fits(line.name));
}

function cursorBar(bar, view, columns, i, open) {
  const seconds = columns.get('seconds')?.[i];
  const tokens = columns.get('tokens')?.[i];
  const where = [
    `update ${view.updates[i]}`,
    seconds != null && duration(seconds),
    tokens != null && `${figure(tokens)} tokens`,
  ];
  const pickAxis = (axis) => {
    view.axis = axis;
    view.draw();
  };
  const names = { update: 'update', seconds: 'time', tokens: 'tokens' };
  refill(
    bar,
    h('span', { class: 'where', 'aria-live': 'polite' }, where.filter(Boolean).join('  ·  ')),
    h(
      'span',
      { class: 'actions' },
      view.pinned !== null && h('button', { type: 'button', onclick: () => view.pin(null) }, 'Unpin'),
      open &&
        h(
          'button',
          { type: 'button', onclick: () => open(view.updates[view.at()]) },
          'Rollouts of this update ↓',
        ),
    ),
    h(
      'span',
      { class: 'axis' },
      h('span', { class: 'label' }, 'Horizontal'),
      choice(
        'Horizontal axis',
        view.axes.map((a) => [a, names[a]]),
        view.axis,
        pickAxis,
      ),
    ),
  );
}
