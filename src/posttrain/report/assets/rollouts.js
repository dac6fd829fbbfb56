// The browser of rollouts: a step, its groups, and the responses of one group token by token.

function rollouts(section, run) {
  section.append(h('h2', {}, 'Rollouts'));
  if (!run.steps.length) {
    section.append(h('p', { class: 'empty' }, 'This run has recorded no rollouts.'));
    return { open: () => {}, follow: () => {} };
  }
  const browser = {
    run,
    cache: new Map(),
    list: h('div', { class: 'groups' }),
    detail: h('div', { class: 'detail' }),
    bar: h('div', { class: 'toolbar' }),
    filters: h('div', { class: 'toolbar' }),
    key: h('div', {}),
    state: {
      step: run.steps.findLast((s) => s.kind === 'train')?.id ?? run.steps.at(-1).id,
      group: null,
      sample: null,
      by: 'advantage',
      order: 'order',
      label: '',
      query: '',
    },
  };
  section.append(
    h(
      'div',
      { class: 'card browser' },
      browser.bar,
      browser.filters,
      browser.key,
      h('div', { class: 'columns' }, browser.list, browser.detail),
    ),
  );
  const follow = () => {
    if (!readAddress(browser)) return;
    render(browser);
    section.scrollIntoView({ behavior: 'instant' });
    const linked = browser.detail.querySelector('.linked');
    if (linked) browser.detail.scrollTop = linked.offsetTop - browser.detail.offsetTop - 12;
  };
  window.addEventListener('hashchange', follow);
  render(browser);
  return {
    follow,
    open: (update) => {
      change(browser, { step: nearest(browser, stepOf(browser).kind, update).id, group: null, sample: null });
      section.scrollIntoView({ behavior: 'smooth' });
    },
  };
}

const stepOf = (browser) => browser.run.steps.find((s) => s.id === browser.state.step);

function groupsOf(browser) {
  const { id } = stepOf(browser);
  if (!browser.cache.has(id)) browser.cache.set(id, data(id));
  return browser.cache.get(id);
}

// The address after # holds the complete state, so that a link opens the same view.
function readAddress(browser) {
  const parameters = new URLSearchParams(location.hash.slice(1));
  const step = parameters.get('step');
  if (!browser.run.steps.some((s) => s.id === step)) return false;
  const option = (name, table, otherwise) =>
    Object.hasOwn(table, parameters.get(name) ?? '') ? parameters.get(name) : otherwise;
  browser.state = {
    step,
    group: parameters.get('group'),
    sample: parameters.get('sample'),
    by: option('by', QUANTITIES, 'advantage'),
    order: option('order', ORDERS, 'order'),
    label: parameters.get('label') ?? '',
    query: parameters.get('query') ?? '',
  };
  return true;
}

function change(browser, part) {
  Object.assign(browser.state, part);
  const entries = Object.entries(browser.state).filter(([, value]) => value !== null && value !== '');
  history.replaceState(null, '', `#${new URLSearchParams(entries.map(([k, v]) => [k, String(v)]))}`);
  render(browser, 'query' in part);
}

function matching(browser, group) {
  const { label, query } = browser.state;
  const wanted = query.toLowerCase();
  const about = `${group.task}\n${group.prompt}\n${group.answer}`.toLowerCase();
  return group.rows.filter(
    (row) =>
      (!label || row.label === label) &&
      (!wanted ||
        about.includes(wanted) ||
        `${responseOf(row)}\n${row.reason}`.toLowerCase().includes(wanted)),
  );
}

function render(browser, typing = false) {
  $('tip').hidden = true;
  const groups = groupsOf(browser);
  const matches = groups
    .map((group, at) => ({ group, at, rows: matching(browser, group) }))
    .filter((f) => f.rows.length);
  const rank = ORDERS[browser.state.order][1];
  matches.sort((a, b) => rank(a.group) - rank(b.group) || a.at - b.at);
  const current = matches.find((f) => f.group.group === browser.state.group) ?? matches[0];
  const quantity = QUANTITIES[browser.state.by];
  const full = fullAt(groups, quantity);
  renderBar(browser);
  if (!typing) renderFilters(browser, groups);
  browser.key.replaceChildren(legend(quantity, full));
  const scrolled = browser.list.scrollTop;
  refill(browser.list, ...matches.map((f) => groupButton(browser, f, f === current)));
  browser.list.scrollTop = scrolled;
  browser.detail.replaceChildren(
    ...(current
      ? groupDetail(browser, current, quantity, full)
      : [h('p', { class: 'empty' }, 'No rollout of this step matches.')]),
  );
}

function renderBar(browser) {
  const step = stepOf(browser);
  const kinds = ['train', 'eval'].filter((kind) => browser.run.steps.some((s) => s.kind === kind));
  const same = browser.run.steps.filter((s) => s.kind === step.kind);
  const at = same.indexOf(step);
  const go = (i) => change(browser, { step: same[i].id, group: null, sample: null });
  const arrow = (label, sign, to) =>
    h('button', { type: 'button', 'aria-label': label, disabled: !same[to], onclick: () => go(to) }, sign);
  // The slider stays the same element: replacing it during a drag would end the drag.
  const { slider, kind, before, after, where } = (browser.parts ??= barParts(browser));
  Object.assign(slider, { min: 0, max: same.length - 1, oninput: () => go(Number(slider.value)) });
  slider.value = at;
  slider.setAttribute('aria-valuetext', `update ${step.update}`);
  const pick = (kind) =>
    change(browser, { step: nearest(browser, kind, step.update).id, group: null, sample: null, label: '' });
  if (kinds.length > 1)
    refill(
      kind,
      choice(
        'Kind',
        kinds.map((k) => [k, k === 'train' ? 'Training' : 'Evaluation']),
        step.kind,
        pick,
      ),
    );
  refill(before, arrow('Previous step', '‹', at - 1));
  refill(after, arrow('Next step', '›', at + 1));
  where.replaceChildren(
    `${step.kind === 'eval' ? 'evaluation at ' : ''}update ${step.update}`,
    h(
      'small',
      {},
      step.shown < step.total ? `${step.shown} of ${step.total} rollouts` : `${step.total} rollouts`,
    ),
  );
}

function barParts(browser) {
  const parts = {
    kind: h('span'),
    before: h('span'),
    after: h('span'),
    where: h('span', { class: 'where' }),
    slider: h('input', { type: 'range', 'aria-label': 'Step' }),
  };
  browser.bar.append(
    parts.kind,
    h('span', { class: 'stepper' }, parts.before, parts.slider, parts.after),
    parts.where,
  );
  return parts;
}

const nearest = (browser, kind, update) =>
  browser.run.steps
    .filter((s) => s.kind === kind)
    .reduce((a, b) => (Math.abs(b.update - update) < Math.abs(a.update - update) ? b : a));

function renderFilters(browser, groups) {
  const { state } = browser;
  const tally = new Map();
  for (const row of groups.flatMap((g) => g.rows)) tally.set(row.label, (tally.get(row.label) ?? 0) + 1);
  const chips = [...tally]
    .sort((a, b) => b[1] - a[1])
    .map(([label, n]) =>
      h(
        'button',
        {
          type: 'button',
          class: 'chip',
          'aria-pressed': String(label === state.label),
          onclick: () => change(browser, { label: label === state.label ? '' : label, sample: null }),
        },
        h('i', { style: { background: verdictColor(label) } }),
        visible(label),
        h('small', {}, String(n)),
      ),
    );
  const has = (quantity) =>
    groups.some((g) => g.rows.some((r) => r.pieces.some((_, t) => quantity.of(r, t) != null)));
  const quantities = Object.entries(QUANTITIES)
    .filter(([key, q]) => !q.optional || key === state.by || has(q))
    .map(([key, q]) => [key, q.name, has(q) ? undefined : `this step holds no ${q.name}`]);
  refill(
    browser.filters,
    choice('Colour by', quantities, state.by, (by) => change(browser, { by })),
    h('span', { class: 'chips', role: 'group', 'aria-label': 'Verdict' }, ...chips),
    h('input', {
      type: 'search',
      placeholder: 'Search text',
      'aria-label': 'Search text',
      value: state.query,
      oninput: (e) => change(browser, { query: e.target.value }),
    }),
    h(
      'select',
      { 'aria-label': 'Order of groups', onchange: (e) => change(browser, { order: e.target.value }) },
      ...Object.entries(ORDERS).map(([key, [name]]) =>
        h('option', { value: key, selected: key === state.order }, name),
      ),
    ),
  );
}
