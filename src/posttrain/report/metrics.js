// Which curves there are, how they are grouped and coloured, and what of it a run has measured.

const CURVES = [
  [
    'Learning',
    [
      {
        title: 'Reward',
        hint: 'batch mean; the band is ± one standard deviation',
        lines: { 'reward/mean': 'sampled', 'eval/reward': 'held-out' },
        band: ['reward/mean', 'reward/std'],
      },
      {
        title: 'Accuracy',
        hint: 'share of responses judged right',
        format: 'percent',
        range: [0, 1],
        lines: { accuracy: 'sampled', 'eval/accuracy': 'held-out' },
      },
      {
        title: 'Spread within groups',
        hint: 'deviation of one task’s rewards; 0 teaches nothing',
        lines: { 'reward/group_std': 'mean of groups' },
      },
      {
        title: 'Groups',
        hint: 'trained on, or dropped by the selection',
        stack: { 'select/kept': 'kept', 'select/dropped': 'dropped' },
      },
      { title: 'Loss', hint: 'its value means little for policy gradients', lines: { loss: 'loss' } },
    ],
  ],
  [
    'Verifier',
    [
      {
        title: 'Verdicts',
        hint: 'what the verifier said, as shares',
        format: 'percent',
        range: [0, 1],
        stack: 'verdict/',
      },
      {
        title: 'Reward with length',
        hint: 'correlation within groups; above 0 the longer answer to a task earns more',
        range: [-1, 1],
        lines: { 'hacking/length_correlation': 'correlation' },
      },
      {
        title: 'Tampering and failures',
        hint: 'verdicts “forbidden”, and episodes that could not be judged',
        format: 'percent',
        lines: {
          'hacking/forbidden': 'forbidden',
          'hacking/error_rate': 'no score',
          'eval/errors': 'no score, held-out',
        },
      },
      {
        title: 'Agreement with the reward',
        hint: 'how often a verifier ranks two answers to a task as the reward does; 50% is chance',
        format: 'percent',
        range: [0, 1],
        lines: 'agreement/',
      },
      { title: 'Auditors', hint: 'mean scores that are recorded and never paid', lines: 'audit/' },
      { title: 'Parts of the reward', hint: 'mean scores, before their weights', lines: 'part/' },
    ],
  ],
  [
    'Samplers',
    [
      {
        title: 'Lag',
        hint: 'updates by which tokens are older than the weights trained on them',
        lines: { 'lag/mean': 'mean', 'lag/max': 'oldest' },
      },
      {
        title: 'Samplers at work',
        hint: 'share of their time in which they had something to do',
        format: 'percent',
        range: [0, 1],
        lines: { 'samplers/busy': 'busy' },
      },
      {
        title: 'Groups in line',
        hint: 'at the end of the update; many that wait: the learner is slower, many that play: the samplers are',
        stack: { 'samplers/waiting': 'wait to be trained on', 'samplers/playing': 'are being played' },
      },
      { title: 'Samplers restarted', hint: 'since the run began', lines: { 'samplers/restarts': 'restarts' } },
    ],
  ],
  [
    'Policy',
    [
      {
        title: 'KL',
        hint: 'nats per token',
        lines: { 'kl/ref': 'to reference', 'kl/old': 'to old policy', 'kl/mismatch': 'to sampler' },
      },
      { title: 'Entropy', hint: 'nats per token', lines: { entropy: 'entropy' } },
      {
        title: 'Response length',
        hint: 'tokens',
        lines: { 'length/mean': 'mean', 'length/max': 'longest', 'eval/length': 'held-out' },
      },
      {
        title: 'Cut by the limit',
        hint: 'share of responses that never ended',
        format: 'percent',
        lines: { 'length/clipped': 'cut' },
      },
      {
        title: 'Clip fraction',
        hint: 'tokens whose gradient the ratio clip removed',
        format: 'percent',
        lines: { 'clip/fraction': 'clipped' },
      },
      { title: 'Gradient norm', hint: 'before clipping', lines: { grad_norm: 'norm' } },
      { title: 'Learning rate', lines: { lr: 'rate' } },
      {
        title: 'Effective sample size',
        hint: '1 = sampled from the trained policy itself',
        range: [0, 1],
        lines: { ess: 'share' },
      },
    ],
  ],
  [
    'Machine',
    [
      {
        title: 'Time per update',
        hint: 'by phase',
        format: 'duration',
        stack: {
          'time/sample': 'sample',
          'time/feed': 'wait for samplers',
          'time/verify': 'verify',
          'time/score': 'score',
          'time/train': 'train',
          'time/publish': 'publish',
          'time/eval': 'evaluate',
          'time/checkpoint': 'checkpoint',
        },
        total: 'time/total',
      },
      {
        title: 'Speed',
        hint: 'tokens per second',
        lines: { 'speed/sample_tokens': 'sampling', 'speed/train_tokens': 'training' },
      },
    ],
  ],
];
const NOT_CURVES = ['step', 'version', 'seconds', 'tokens', 'reward/std', 'time/total'];
const PALETTE = ['var(--c1)', 'var(--c2)', 'var(--c3)', 'var(--c4)', 'var(--c5)', 'var(--c6)', 'var(--c7)'];
// In the order of the stack: what is right lies on the lower edge, tampering on the upper.
const VERDICTS = {
  right: 'var(--c1)',
  pass: 'var(--c1)',
  proved: 'var(--c1)',
  wrong: 'var(--c2)',
  no_answer: 'var(--grey)',
  incomplete: 'var(--grey)',
  timeout: 'var(--c4)',
  runtime_error: 'var(--c5)',
  error: 'var(--c5)',
  compile_error: 'var(--c6)',
  memory: 'var(--c3)',
  output_limit: 'var(--c7)',
  raised: 'var(--soft)',
  died: 'var(--soft)',
  not_a_number: 'var(--soft)',
  infra_error: 'var(--soft)',
  forbidden: 'var(--attack)',
};
const knownClass = (label) => (Object.hasOwn(VERDICTS, label.toLowerCase()) ? label.toLowerCase() : null);

// An unknown label has the colour that its letters choose, or the next one if that is taken in this run.
const verdictColors = new Map();
function verdictColor(label) {
  if (!verdictColors.has(label)) {
    const free = PALETTE.slice(2);
    const taken = new Set(verdictColors.values());
    const first = [...label].reduce((sum, c) => (sum * 31 + c.codePointAt(0)) % 9973, 7) % free.length;
    const turn = [...free.slice(first), ...free.slice(0, first)];
    const own = knownClass(label);
    verdictColors.set(label, own ? VERDICTS[own] : (turn.find((c) => !taken.has(c)) ?? turn[0]));
  }
  return verdictColors.get(label);
}

// The curves of a run as full columns: undefined where nothing was measured, null where it was no number.
function columnsOf(run) {
  return new Map(
    Object.entries(run.series).map(([name, { at, y }]) => {
      if (!at) return [name, y];
      const full = Array(run.updates.length).fill(undefined);
      at.forEach((i, k) => {
        full[i] = y[k];
      });
      return [name, full];
    }),
  );
}

function resolved(raw, columns, used) {
  const shapes = (names) =>
    Object.entries(names)
      .filter(([name]) => columns.has(name))
      .map(([name, label], k) => {
        used.add(name);
        const color = name.startsWith('verdict/') ? verdictColor(label) : PALETTE[k % PALETTE.length];
        return { name, label, values: columns.get(name), color };
      });
  const all = (names) => shapes(typeof names === 'string' ? labelled(names, columns) : names);
  const spec = { ...raw, lines: raw.lines && all(raw.lines), stack: raw.stack && all(raw.stack) };
  if (raw.band) spec.band = band(raw.band, columns);
  if (raw.total && columns.has(raw.total)) addRest(spec, columns.get(raw.total));
  return (spec.lines ?? spec.stack).length ? spec : null;
}

const ORDER = Object.keys(VERDICTS);
const rank = (label) => (knownClass(label) ? ORDER.indexOf(knownClass(label)) : ORDER.indexOf('no_answer') + 0.5);
const byClass = (a, b) => rank(a) - rank(b) || (a < b ? -1 : 1);

// The curves of a prefix by what follows it, verdicts in the order of their colours.
function labelled(prefix, columns) {
  const labels = [...columns.keys()].filter((n) => n.startsWith(prefix)).map((n) => n.slice(prefix.length));
  return Object.fromEntries(labels.sort(byClass).map((label) => [prefix + label, label]));
}

function band([mean, std], columns) {
  const [m, s] = [columns.get(mean), columns.get(std)];
  if (!m || !s) return undefined;
  const shifted = (sign) => m.map((v, i) => (v == null || s[i] == null ? undefined : v + sign * s[i]));
  return { low: shifted(-1), high: shifted(1), color: 'var(--c1)' };
}

function addRest(spec, total) {
  const values = total.map((t, i) =>
    Math.max(0, (t ?? 0) - spec.stack.reduce((sum, p) => sum + (p.values[i] ?? 0), 0)),
  );
  if (values.some((v, i) => v > 0.02 * (total[i] ?? 0)))
    spec.stack.push({ label: 'rest', values, color: 'var(--grey)' });
}

function others(columns, used) {
  const rest = [...columns.keys()].filter((name) => !used.has(name) && !NOT_CURVES.includes(name));
  return rest
    .filter((name) => columns.get(name).some((v) => v != null))
    .map((name) => ({
      title: name,
      lines: [{ name, label: 'value', values: columns.get(name), color: PALETTE[0] }],
    }));
}

// Of scores that say neither right nor wrong only a share above a bound is known, which is no accuracy.
const named = (spec, columns) =>
  spec.lines?.accuracy && columns.has('verdict/scored')
    ? { ...spec, title: 'High rewards', hint: 'share of rewards of at least eval.right' }
    : spec;

// The groups of charts that this run can fill, with what is not in the list in a group of its own.
function chartGroups(columns) {
  const used = new Set();
  const listed = CURVES.map(([name, specs]) => [
    name,
    specs.map((spec) => resolved(named(spec, columns), columns, used)).filter(Boolean),
  ]);
  return [...listed, ['Other', others(columns, used)]].filter(([, specs]) => specs.length);
}
