// The listed curves that a run has measured, and their colours.

const NOT_CURVES = ['step', 'version', 'seconds', 'tokens', 'reward/std', 'time/total'];
// Metrics that the timeline shows.
const OF_SAMPLER = /^samplers\/(\d+)\/(sample|judge|weights|wait)$/;
const PALETTE = ['var(--c1)', 'var(--c2)', 'var(--c3)', 'var(--c4)', 'var(--c5)', 'var(--c6)', 'var(--c7)'];
// In the order of the stack: right answers at the bottom, tampering at the top.
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

// An unknown label has a colour by a hash of its letters, or the next one that is free in this run.
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

// Return the curves of a run as full columns: undefined is not measured, null is not a number.
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
  if (raw.needs && !columns.has(raw.needs)) return null;
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

// Return the curves of a prefix with the rest of their names, verdicts in the order of their colours.
function labelled(prefix, columns) {
  const labels = [...columns.keys()].filter((n) => n.startsWith(prefix)).map((n) => n.slice(prefix.length));
  const byNumber = (a, b) => Number(a) - Number(b);
  const sorted = labels.sort(labels.every((label) => label > 0) ? byNumber : byClass);
  return Object.fromEntries(sorted.map((label) => [prefix + label, label]));
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
  const rest = [...columns.keys()].filter((name) => !used.has(name) && !NOT_CURVES.includes(name) && !OF_SAMPLER.test(name));
  return rest
    .filter((name) => columns.get(name).some((v) => v != null))
    .map((name) => ({
      title: name,
      lines: [{ name, label: 'value', values: columns.get(name), color: PALETTE[0] }],
    }));
}

// If verdicts are scores, neither right nor wrong, the accuracy is only the share of high rewards.
const named = (spec, columns) =>
  spec.lines?.accuracy && columns.has('verdict/scored')
    ? { ...spec, title: 'High rewards', hint: 'share of rewards of at least eval.right' }
    : spec;

// Return the groups of charts that this run can fill, with unlisted metrics in the group Other.
function chartGroups(columns) {
  const used = new Set();
  const listed = CURVES.map(([name, specs]) => [
    name,
    specs.map((spec) => resolved(named(spec, columns), columns, used)).filter(Boolean),
  ]);
  return [...listed, ['Other', others(columns, used)]].filter(([, specs]) => specs.length);
}
