// The page from top to bottom.

function top(run) {
  const { label, before, after, change, note, tiles } = run.headline;
  const method = run.plan
    .flatMap(([title, rows]) => (title === 'Method' ? rows : []))
    .find(([key]) => key === 'name');
  $('top').append(
    h(
      'p',
      { class: 'eyebrow' },
      ['posttrain', method && visible(method[1]).toUpperCase(), visible(run.name)]
        .filter(Boolean)
        .join('  ·  '),
    ),
    h('h1', { dir: 'auto' }, visible(run.title)),
    h(
      'div',
      { class: 'tiles' },
      h(
        'div',
        { class: 'tile hero' },
        h('p', {}, label),
        h(
          'p',
          { class: 'value' },
          before && h('span', { class: 'before' }, before),
          before && h('span', { class: 'arrow' }, '→'),
          h('span', {}, after),
        ),
        h('p', { class: 'remark' }, change && h('b', {}, change), note),
      ),
      ...tiles.map(([name, value, remark]) =>
        h(
          'div',
          { class: 'tile' },
          h('p', {}, name),
          h('p', { class: 'value' }, value),
          remark && h('p', { class: 'remark' }, remark),
        ),
      ),
    ),
    ...(run.stopped
      ? [h('p', { class: 'note failure' }, h('b', {}, 'The run stopped: '), `${visible(run.stopped)}.`)]
      : []),
    ...(run.ended && !run.stopped
      ? [h('p', { class: 'note' }, h('b', {}, 'The run ended early: '), `${visible(run.ended)}.`)]
      : []),
    ...(run.notes.length
      ? [h('ul', { class: 'note' }, ...run.notes.map((text) => h('li', {}, visible(text))))]
      : []),
  );
}

function alarms(run, look) {
  const rules = h(
    'details',
    { class: 'rules' },
    h('summary', {}, `The ${run.rules.length} rules`),
    h('dl', {}, ...run.rules.flatMap(([name, says]) => [h('dt', {}, name), h('dd', {}, says)])),
  );
  const body = run.alarms.length
    ? h(
        'ul',
        { class: 'alarms' },
        ...run.alarms.map((alarm) =>
          h(
            'li',
            {},
            h('span', { class: 'sign', 'aria-hidden': 'true' }, '!'),
            h(
              'div',
              {},
              h('b', {}, alarm.name),
              h('p', {}, `${visible(alarm.text)}.`),
              h('p', { class: 'muted' }, `Rule: ${alarm.says}`),
            ),
            h('button', { type: 'button', onclick: () => look(alarm) }, `Update ${alarm.update}`),
          ),
        ),
      )
    : h(
        'p',
        { class: 'calm' },
        h('span', { class: 'sign', 'aria-hidden': 'true' }, '✓'),
        'None of the rules is broken.',
      );
  $('alarms').append(h('h2', {}, 'Alarms'), h('div', { class: 'card' }, body, rules));
}

function plan(run) {
  const sections = run.plan.filter(([, rows]) => rows.length);
  const cards = sections.map(([title, rows]) =>
    h(
      'div',
      { class: 'card' },
      h('h4', {}, visible(title)),
      h(
        'dl',
        { class: 'facts' },
        ...rows.flatMap(([key, value]) => [h('dt', {}, visible(key)), h('dd', {}, visible(value))]),
      ),
    ),
  );
  $('plan').append(
    h('h2', {}, 'Method and plan'),
    cards.length
      ? h('div', { class: 'plans' }, ...cards)
      : h('p', { class: 'empty' }, 'This run directory holds no plan.'),
  );
}

function sources(run) {
  const parts = [
    ['Configuration', 'config.toml', run.config],
    ['Code', 'code.txt', run.code],
  ].filter(([, , text]) => text);
  $('files').append(
    h('h2', {}, 'Configuration and code'),
    ...parts.map(([title, file, text]) =>
      h(
        'details',
        { class: 'card source' },
        h('summary', {}, title, h('small', {}, file)),
        h('pre', { translate: 'no' }, visible(text)),
      ),
    ),
  );
  if (!parts.length)
    $('files').append(h('p', { class: 'empty' }, 'Neither config.toml nor code.txt is there.'));
}

// Return a function that draws headline, alarms and curves, at first and again after news.
function measures(run, browser) {
  let view = null;
  return () => {
    const open = new Set([...document.querySelectorAll('#curves .words[open]')].map(titleOf));
    const before = view;
    before?.close();
    for (const id of ['top', 'alarms', 'curves']) $(id).replaceChildren();
    top(run);
    view = curves($('curves'), run, run.steps.length ? (update) => browser.open(update) : null);
    if (before && view) {
      Object.assign(view, { axis: before.axis, pinned: before.pinned });
      view.draw();
    }
    for (const words of document.querySelectorAll('#curves .words')) words.open = open.has(titleOf(words));
    alarms(run, (alarm) => (view ? view.look(alarm) : browser.open(alarm.update)));
    const count = document.querySelector('nav .count');
    count.textContent = String(run.alarms.length);
    count.hidden = !run.alarms.length;
  };
}

const titleOf = (words) => words.closest('figure').querySelector('h4').textContent;

function start() {
  const run = data('run');
  WORDS = run.words;
  // A run that learns from data samples nothing and has no rewards.
  const samples = run.steps.length > 0 || 'reward/mean' in run.series;
  // The directory of `posttrain search` has only searches.
  const trained = run.updates.length > 0 || !run.searches.length;
  const links = [
    trained && ['alarms', 'Alarms'],
    trained && ['curves', 'Curves'],
    run.searches.length && ['searches', 'Searches'],
    samples && ['rollouts', 'Rollouts'],
    ['plan', 'Plan'],
    ['files', 'Configuration'],
  ].filter(Boolean);
  $('nav').append(
    ...links.map(([id, name]) =>
      h('a', { href: `#${id}` }, name, id === 'alarms' && h('small', { class: 'count', hidden: true })),
    ),
  );
  const browser = rollouts($('rollouts'), run);
  if (!samples) for (const node of document.querySelectorAll('#rollouts, .skip')) node.remove();
  const draw = measures(run, browser);
  if (trained) draw();
  else {
    top(run);
    for (const node of document.querySelectorAll('#alarms, #curves')) node.remove();
  }
  if (run.searches.length) searches($('searches'), run);
  else $('searches').remove();
  plan(run);
  sources(run);
  if (run.live !== undefined) keepUp({ run, draw });
  else $('foot').append('Made by posttrain from the run directory alone. This file needs no network.');
  browser.follow();
  document.documentElement.dataset.ready = 'true';
}

start();
