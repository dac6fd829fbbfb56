// A response: its tokens coloured by a quantity, and all numbers of a token that is selected.

const QUANTITIES = {
  advantage: {
    name: 'advantage',
    signed: true,
    says: 'how much this token is to become more (blue) or less (red) likely',
    of: (row, t) => entry(row, 'advantage', t),
  },
  log_ratio: {
    name: 'log-ratio',
    signed: true,
    says: 'logp − logp_policy: the training model against the sampler',
    of: logRatio,
  },
  entropy: {
    name: 'entropy',
    signed: false,
    says: 'nats of the distribution that the token was drawn from',
    of: (row, t) => entry(row, 'entropy', t),
  },
  reward: {
    name: 'reward',
    signed: true,
    says: 'arriving with this token',
    of: (row, t) => entry(row, 'reward', t),
    everywhere: true,
  },
  value: {
    name: 'value',
    signed: true,
    says: 'V: the return that the critic expected before this token',
    of: (row, t) => entry(row, 'value', t),
    optional: true,
  },
  surprise: {
    name: 'log-probability',
    signed: false,
    negative: true,
    says: 'the less likely the token was, the deeper its colour',
    of: (row, t) => entry(row, 'logp', t) ?? entry(row, 'logp_policy', t) ?? entry(row, 'logp_gen', t),
  },
};

// A packed column is a list, one number for all, or the name of the column that it repeats.
function entry(row, name, t) {
  let column = row[name];
  if (typeof column === 'string') column = row[column];
  return Array.isArray(column) ? column[t] : column;
}

function logRatio(row, t) {
  const [trained, sampler] = [entry(row, 'logp', t), entry(row, 'logp_policy', t)];
  return trained == null || sampler == null ? undefined : trained - sampler;
}

const counts = (row, t, quantity) => quantity.everywhere || entry(row, 'sampled', t);

// Return the size of the strongest colour in a step: the 99th percentile, so one token does not pale the rest.
function fullAt(groups, quantity) {
  const sizes = [];
  for (const group of groups) {
    for (const row of group.rows) {
      row.pieces.forEach((_, t) => {
        const v = counts(row, t, quantity) ? quantity.of(row, t) : undefined;
        if (v != null) sizes.push(Math.abs(v));
      });
    }
  }
  if (!sizes.length) return null;
  sizes.sort((a, b) => a - b);
  return sizes[Math.floor(0.99 * (sizes.length - 1))] || sizes.at(-1);
}

function tint(value, quantity, full) {
  if (value == null || !full || value === 0) return '';
  const strength = Math.min(1, Math.abs(value) / full);
  const hue = quantity.signed ? (value > 0 ? '--more' : '--less') : '--much';
  return `rgb(var(${hue}) / ${(0.06 + 0.66 * strength).toFixed(3)})`;
}

function legend(quantity, full) {
  if (full === null) return h('p', { class: 'scale' }, `This step holds no ${quantity.name}.`);
  const ends = quantity.signed
    ? [-full, -full / 2, 0, full / 2, full]
    : [0, 0.25, 0.5, 0.75, 1].map((k) => (quantity.negative ? -k : k) * full);
  const swatches = ends.map((v) =>
    h('span', {}, h('i', { style: { background: tint(v, quantity, full) } }), figure(v)),
  );
  return h(
    'p',
    { class: 'scale' },
    h('b', {}, quantity.name),
    h('span', { class: 'swatches' }, ...swatches),
    h('span', { class: 'says' }, full ? quantity.says : `${quantity.says}; all zero in this step`),
  );
}

// A newline is drawn as a sign and a break; an empty token as a dot, so that the pointer can reach it.
function glyphs(piece) {
  return visible(piece).replaceAll('\n', '↵\n').replaceAll('\t', '⇥\t') || '·';
}

function tokenText(row, quantity, full) {
  const box = h('div', { class: 'tokens', dir: 'auto', translate: 'no' });
  row.pieces.forEach((piece, t) => {
    const own = entry(row, 'sampled', t);
    const colour = counts(row, t, quantity) ? tint(quantity.of(row, t), quantity, full) : '';
    const token = h('span', { class: own ? 'tok' : 'tok env' }, glyphs(piece));
    if (colour) token.style.background = colour;
    token.dataset.t = t;
    box.append(token);
  });
  if (row.tokens)
    box.append(h('em', {}, ` … ${row.tokens - row.pieces.length} more tokens are not in this page`));
  if (!row.pieces.length) box.append(h('em', {}, 'no tokens'));
  box.addEventListener('pointerover', (event) => tipFor(event, row));
  box.addEventListener('click', (event) => tipFor(event, row));
  box.addEventListener('pointerleave', () => {
    $('tip').hidden = true;
  });
  return box;
}

function tipFor(event, row) {
  const tip = $('tip');
  const token = event.target.closest('.tok');
  if (!token) {
    tip.hidden = true;
    return;
  }
  const t = Number(token.dataset.t);
  const line = (name, value) => (value == null ? [] : [h('dt', {}, name), h('dd', {}, value)]);
  const number = (name) => {
    const v = entry(row, name, t);
    return v == null ? null : exact(v);
  };
  const own = entry(row, 'sampled', t);
  const p = QUANTITIES.surprise.of(row, t);
  const ratio = logRatio(row, t);
  tip.replaceChildren(
    h(
      'p',
      {},
      h('code', {}, visible(JSON.stringify(row.pieces[t]))),
      h('span', {}, ` token ${t + 1} of ${row.pieces.length}`),
    ),
    ...(own ? [] : [h('p', { class: 'muted' }, 'from the environment: not trained')]),
    h(
      'dl',
      {},
      ...(own
        ? [
            ...line('advantage', number('advantage')),
            ...line('probability', p == null ? null : percent(Math.exp(p))),
            ...line('logp (training)', number('logp')),
            ...line('logp_policy (sampler)', number('logp_policy')),
            ...line('logp_gen (drawn from)', number('logp_gen')),
            ...line('logp_ref', number('logp_ref')),
            ...line('log-ratio', ratio == null ? null : exact(ratio)),
            ...line('entropy', number('entropy')),
            ...line('value (critic)', number('value')),
          ]
        : []),
      ...line('reward', number('reward')),
      ...line(
        'weights',
        own && entry(row, 'version', t) != null ? `version ${entry(row, 'version', t)}` : null,
      ),
    ),
  );
  tip.hidden = false;
  placeTip(tip, token.getClientRects()[0] ?? token.getBoundingClientRect());
}

const exact = (v) => minus(String(+v.toFixed(5)));

function placeTip(tip, box) {
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.min(Math.max(8, box.left), document.documentElement.clientWidth - width - 8);
  const above = box.top - height - 8;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 8 ? above : box.bottom + 8}px`;
}
