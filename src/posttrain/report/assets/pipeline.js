// The page of a pipeline, from top to bottom.

function headings(run) {
  $('top').append(
    h('p', { class: 'eyebrow' }, `posttrain  ·  PIPELINE  ·  ${visible(run.name)}`),
    h('h1', { dir: 'auto' }, visible(run.title)),
    h(
      'div',
      { class: 'tiles' },
      ...run.headline.map(([name, value, remark]) =>
        h(
          'div',
          { class: 'tile' },
          h('p', {}, name),
          h('p', { class: 'value' }, value),
          remark && h('p', { class: 'remark' }, visible(remark)),
        ),
      ),
    ),
    ...run.notes.map((text) => h('p', { class: 'note' }, visible(text))),
  );
}

function table(columns, rows) {
  return h(
    'div',
    { class: 'wide' },
    h(
      'table',
      {},
      h('thead', {}, h('tr', {}, ...columns.map((name) => h('th', { scope: 'col' }, name)))),
      h(
        'tbody',
        {},
        ...rows.map(([name, ...cells]) =>
          h('tr', {}, h('th', { scope: 'row' }, ...[name].flat()), ...cells.map((c) => h('td', {}, c))),
        ),
      ),
    ),
  );
}

const signed = (x) => `${x < 0 ? '−' : '+'}${figure(Math.abs(x))}`;

function stage(one, number) {
  const facts =
    one.kind === 'recipe'
      ? [
          one.title && visible(one.title),
          one.updates !== undefined && `${one.updates} of ${one.of} updates`,
          one.tokens != null && `${figure(one.tokens)} tokens trained`,
          one.seconds != null && duration(one.seconds),
        ]
      : (one.files ?? []).slice(0, 8).map(([name, size]) => `${visible(name)} (${figure(size)} bytes)`);
  return h(
    'article',
    { class: 'card stage', id: `stage-${number}` },
    h(
      'header',
      {},
      h('h4', {}, `${number}  ${visible(one.name)}`),
      h('small', {}, visible(one.says)),
      one.takes.length ? h('small', {}, `takes ${one.takes.map(visible).join(', ')}`) : null,
      h('span', { class: `state ${one.state === 'running' ? '' : one.state}` }, h('i', {}), one.state),
    ),
    h('p', { class: 'facts-line' }, facts.filter(Boolean).join('  ·  ')),
    one.stopped ? h('p', { class: 'note failure' }, visible(one.stopped)) : null,
    one.changed?.length
      ? table(
          ['measured', 'first', 'last', 'change'],
          one.changed.map((m) => [
            visible(m.name),
            figure(m.first),
            figure(m.last),
            m.updates > 1 ? signed(m.last - m.first) : '–',
          ]),
        )
      : null,
    one.report
      ? h('p', { class: 'facts-line' }, h('a', { href: encodeURI(one.report) }, 'The report of this stage'))
      : null,
  );
}

const within = (m) => (m ? figure(m.mean) + (m.error === null ? '' : ` ± ${figure(m.error)}`) : '–');

function policies(section, compare) {
  if (!compare) return;
  section.append(h('h2', {}, 'Policies'));
  const decoding = compare.temperature ? `temperature ${figure(compare.temperature)}` : 'greedy';
  const points = compare.policies
    .map((p, i) => ({ ...p, color: colour(i) }))
    .filter((p) => p.score && p.kl)
    .map((p) => ({
      name: p.name,
      color: p.color,
      x: p.kl.mean,
      xError: p.kl.error,
      y: p.score.mean,
      yError: p.score.error,
    }));
  const standings = table(
    ['policy', 'score', 'KL, nats', 'length', 'cut off', 'not judged'],
    compare.policies.map((p, i) => [
      [h('i', { class: 'key', style: { background: colour(i) } }), visible(p.name)],
      within(p.score),
      within(p.kl),
      within(p.length),
      percent(p.cut),
      `${p.failed} of ${p.failed + p.judged}`,
    ]),
  );
  section.append(
    h(
      'div',
      { class: 'pair' },
      points.length > 1 &&
        h(
          'figure',
          { class: 'card' },
          h(
            'figcaption',
            {},
            h('h4', {}, 'Score against KL'),
            h('p', {}, `up is better by ${visible(compare.judge)}, left is closer to ${visible(compare.first)}`),
          ),
          plane(points, { x: `KL(π ‖ ${visible(compare.first)}), nats an answer`, y: 'mean score' }),
        ),
      h(
        'div',
        { class: 'card' },
        h('h4', {}, 'Means'),
        h(
          'p',
          { class: 'muted' },
          `${compare.prompts} prompts × ${compare.samples}, ${decoding}, at most ${compare.max_new_tokens} tokens; ± one standard error over prompts`,
        ),
        standings,
      ),
    ),
    ...compare.notes.map((text) => h('p', { class: 'note' }, visible(text))),
  );
}

function bar(win) {
  const at = (x) => `${(100 * x).toFixed(1)}%`;
  return h(
    'span',
    { class: 'bar', role: 'img', 'aria-label': `${percent(win.low)} to ${percent(win.high)}` },
    h('i', { style: { left: at(win.low), width: at(win.high - win.low) } }),
    h('b', { style: { left: at(win.rate) } }),
  );
}

function wins(section, compare) {
  if (!compare) return;
  const names = compare.policies.map((p) => p.name);
  const next = (win) => names.indexOf(win.of) - names.indexOf(win.over) === 1;
  const first = (win) => win.over === names[0];
  const row = (win) => [
    `${visible(win.of)} over ${visible(win.over)}`,
    ...(win.rate === null
      ? ['–', '–', '–']
      : [percent(win.rate), `${percent(win.low)} – ${percent(win.high)}`, bar(win)]),
    `${win.won} / ${win.tied} / ${win.lost}`,
  ];
  const columns = ['', 'win rate', '95 % interval', '', 'won / tied / lost'];
  const card = (title, chosen) =>
    chosen.length > 0 && h('div', { class: 'card' }, h('h4', {}, title), table(columns, chosen.map(row)));
  section.append(
    h('h2', {}, 'Win rates'),
    h(
      'div',
      { class: 'pair' },
      card('Each over the one before', compare.wins.filter(next)),
      card(`Each over ${visible(names[0])}`, compare.wins.filter((w) => first(w) && !next(w))),
    ),
    h('p', { class: 'note' }, 'The higher score of two answers to one prompt wins; a tie is half a win. Wilson intervals.'),
  );
}

function examples(section, compare) {
  if (!compare?.examples.length) return;
  section.append(
    h('h2', {}, 'Side by side'),
    ...compare.examples.map((one) =>
      h(
        'article',
        { class: 'card example' },
        h('div', { class: 'asked', translate: 'no' }, visible(one.prompt)),
        h(
          'div',
          { class: 'said' },
          ...one.answers.map((a, i) =>
            h(
              'div',
              {},
              h('small', {}, a.score === null ? visible(a.label) : `score ${figure(a.score)}`),
              h('h4', {}, h('i', { class: 'key', style: { background: colour(i) } }), visible(a.policy)),
              h('p', { translate: 'no' }, visible(a.text) || h('span', { class: 'muted' }, 'says nothing')),
            ),
          ),
        ),
      ),
    ),
  );
}

function begin() {
  const run = data('pipeline');
  headings(run);
  const links = [
    ['policies', 'Policies'],
    ['wins', 'Win rates'],
    ['stages', 'Stages'],
    ['examples', 'Side by side'],
  ];
  policies($('policies'), run.compare);
  wins($('wins'), run.compare);
  $('stages').append(
    h('h2', {}, 'Stages'),
    h('div', { class: 'pair' }, ...run.stages.map((one, i) => stage(one, i + 1))),
  );
  examples($('examples'), run.compare);
  const present = links.filter(([id]) => $(id).childElementCount);
  $('nav').append(...present.map(([id, name]) => h('a', { href: `#${id}` }, name)));
  $('foot').append('Made by posttrain from the directory of the pipeline alone. This file needs no network.');
  document.documentElement.dataset.ready = 'true';
}

begin();
