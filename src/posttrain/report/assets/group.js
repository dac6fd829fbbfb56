// A group, the responses to one task: an entry of the list, and its details.

const ORDERS = {
  order: ['as sampled', () => 0],
  lowest: ['lowest reward first', (g) => meanScore(g) ?? -Infinity],
  highest: ['highest reward first', (g) => -(meanScore(g) ?? Infinity)],
  varied: ['most varied first', (g) => -spread(g)],
};

const scoresOf = (group) => group.rows.map((r) => r.score).filter((s) => s !== null);
function meanScore(group) {
  const scores = scoresOf(group);
  return scores.length ? scores.reduce((a, b) => a + b, 0) / scores.length : null;
}
function spread(group) {
  const mean = meanScore(group);
  return scoresOf(group).reduce((sum, s) => sum + (s - mean) ** 2, 0) / (group.rows.length || 1);
}
const responseOf = (row) => row.pieces.join('');

function groupButton(browser, { group, rows }, current) {
  const mean = meanScore(group);
  return h(
    'button',
    {
      type: 'button',
      class: 'group',
      'aria-current': current ? 'true' : undefined,
      onclick: () => change(browser, { group: group.group, sample: null }),
    },
    h('span', { class: 'task', dir: 'auto' }, visible(group.task) || `group ${visible(group.group)}`),
    h('span', { class: 'mean', title: 'mean score' }, mean === null ? '–' : figure(mean)),
    h(
      'span',
      { class: 'dots' },
      ...group.rows.map((row) =>
        h('i', {
          class: rows.includes(row) ? '' : 'dim',
          title: visible(row.label),
          style: { background: verdictColor(row.label) },
        }),
      ),
    ),
  );
}

function groupDetail(browser, { group, rows }, quantity, full) {
  const hidden = group.rows.length - rows.length;
  const about = h(
    'div',
    { class: 'about' },
    h('h4', { dir: 'auto' }, visible(group.task) || `group ${visible(group.group)}`),
    group.answer !== '' && h('p', {}, 'expected ', h('code', { dir: 'auto' }, visible(group.answer))),
    h('p', { class: 'muted' }, `group ${visible(group.group)}`),
  );
  const prompt = h(
    'details',
    { class: 'prompt', open: group.prompt.length < 1500 },
    h('summary', {}, 'Prompt'),
    h('div', { class: 'text', dir: 'auto', translate: 'no' }, visible(group.prompt)),
  );
  return [
    about,
    prompt,
    ...rows.map((row) => response(browser, group, row, quantity, full)),
    ...(hidden ? [h('p', { class: 'muted' }, `${hidden} more of this group do not match the filter.`)] : []),
  ];
}

function response(browser, group, row, quantity, full) {
  const linked = browser.state.sample === String(row.sample) && browser.state.group === group.group;
  const length = row.tokens ?? row.pieces.length;
  const facts = [
    `${length} token${length === 1 ? '' : 's'}`,
    row.turns > 1 && `${row.turns} turns`,
    row.stop && (row.stop === 'length' ? 'cut by the limit' : `ended by ${visible(row.stop)}`),
  ];
  const parts = Object.entries(row.parts ?? {}).map(([name, v]) =>
    h('span', {}, `${visible(name)} `, h('b', {}, v === null ? '–' : figure(v))),
  );
  return h(
    'article',
    { class: linked ? 'response linked' : 'response' },
    h(
      'header',
      {},
      h(
        'button',
        {
          type: 'button',
          class: 'ordinal',
          title: 'Link to this response',
          onclick: () => change(browser, { group: group.group, sample: String(row.sample) }),
        },
        `#${row.sample}`,
      ),
      h(
        'span',
        { class: 'verdict' },
        h('i', { style: { background: verdictColor(row.label) } }),
        visible(row.label),
      ),
      h('b', { class: 'score' }, row.score === null ? 'no score' : figure(row.score)),
      h('span', { class: 'reason', dir: 'auto' }, visible(row.reason)),
      h('span', { class: 'facts' }, facts.filter(Boolean).join(' · ')),
    ),
    tokenText(row, quantity, full),
    parts.length > 1 && h('footer', {}, ...parts),
  );
}
