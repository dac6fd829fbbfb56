// One search as a tree that opens state by state. What it found stands as a spine, from the first state to
// the end; whatever else was tried opens below the state in which it was said. Goals that are proved apart
// open below the state that has them, each as a spine of its own.

function treeOf(tree) {
  const states = new Map(tree.states.map((state) => [state.number, state]));
  const turns = new Map();
  tree.asked.forEach((number, at) => turns.set(number, [...(turns.get(number) ?? []), at + 1]));
  // A state is drawn once, where it was first reached: the way that was found comes first.
  const owner = new Map();
  const on = new Set(tree.states.flatMap((state) => state.moves.filter((move) => move.found).map((move) => move.to)));
  if (tree.states.some((state) => state.moves.some((move) => move.found))) on.add(0);
  const own = (number, by) => states.has(number) && !owner.has(number) && number !== 0 && owner.set(number, by);
  for (const found of [true, false])
    for (const state of tree.states) {
      for (const move of state.moves)
        if (Boolean(move.found) === found) own(move.to, { from: state.number, move });
      if (on.has(state.number) === found)
        (state.parts ?? []).forEach((number, part) => own(number, { from: state.number, part }));
    }
  const drawing = { states, turns, owner, nodes: new Map(), builders: new Map() };
  const root = h('div', { class: 'tree' });
  spine(drawing, root, states.get(0));
  return root;
}

// A state, and those behind it on the way that was found.
function spine(drawing, block, state) {
  while (state) {
    const next = state.moves.find((move) => move.found);
    block.append(stateBlock(drawing, state, next));
    state = next && drawing.owner.get(next.to)?.move === next ? drawing.states.get(next.to) : null;
  }
}

function stateBlock(drawing, state, next) {
  const turns = drawing.turns.get(state.number) ?? [];
  const facts = [
    `depth ${state.depth}`,
    turns.length === 1 && `spoke at turn ${turns[0]}`,
    turns.length > 1 && `spoke ${turns.length} times, first at turn ${turns[0]}`,
    state.visits && `${state.visits} visit${state.visits === 1 ? '' : 's'}`,
    state.value && `value ${figure(state.value)}`,
    state.parts && `${state.parts.length} goals, each proved apart`,
  ];
  const block = h(
    'section',
    { class: state.done ? 'state done' : 'state', tabindex: '-1' },
    h('p', { class: 'about' }, h('b', {}, state.done ? 'the end' : `state ${state.number}`), facts.filter(Boolean).join(' · ')),
    state.shown && goalOf(state.shown, drawing.states.get(drawing.owner.get(state.number)?.from)?.shown ?? ''),
    state.parts ? partsOf(drawing, state) : movesOf(drawing, state, next),
  );
  drawing.nodes.set(state.number, block);
  return block;
}

// The goals of a state that are proved apart; those that are proved stand open.
function partsOf(drawing, state) {
  const line = (number, part) => {
    const name = h('b', {}, `goal ${part + 1}`);
    const goal = drawing.states.get(number);
    if (!goal) return h('div', { class: 'move' }, name, h('span', { class: 'muted' }, `state ${number}, which is not kept`));
    const { from, part: at } = drawing.owner.get(number) ?? {};
    if (from !== state.number || at !== part)
      return h('div', { class: 'move' }, name, h('button', { type: 'button', onclick: () => reveal(drawing, number) }, `state ${number} again`));
    const build = (below) => spine(drawing, below, goal);
    return opening(drawing, number, [name], build, goal.moves.some((move) => move.found));
  };
  return h('ul', { class: 'moves' }, ...state.parts.map((number, part) => h('li', {}, line(number, part))));
}

// What opens on a state, and is made when it does.
function opening(drawing, number, line, build, open = false) {
  const state = drawing.states.get(number);
  const details = h('details', { class: 'move' }, h('summary', {}, ...line, h('span', { class: 'leads' }, hint(state))));
  const made = () => {
    if (!drawing.nodes.has(number)) build(details);
  };
  drawing.builders.set(number, () => {
    made();
    details.open = true;
  });
  details.addEventListener('toggle', made);
  if (open) drawing.builders.get(number)();
  return details;
}

const FOLDED = 4;

// What a state shows; of its lines those that the state before shows too are folded, if they are many.
function goalOf(shown, before) {
  const known = new Set(before.split('\n'));
  const parts = [];
  for (const line of visible(shown.trim()).split('\n')) {
    const last = parts.at(-1);
    if (last?.same === known.has(line)) last.lines.push(line);
    else parts.push({ same: known.has(line), lines: [line] });
  }
  const text = ({ lines }) => h('span', {}, lines.join('\n'));
  const part = (each) =>
    each.same && each.lines.length >= FOLDED
      ? h('details', {}, h('summary', {}, `${each.lines.length} lines as before`), text(each))
      : text(each);
  return h('div', { class: 'goal', dir: 'auto', translate: 'no' }, ...parts.map(part));
}

// What was said in a state: what led on, then what was refused, each the likeliest first.
function movesOf(drawing, state, next) {
  const likely = [...state.moves].sort((a, b) => (b.found ?? 0) - (a.found ?? 0) || (b.logp ?? -99) - (a.logp ?? -99));
  const refused = likely.filter((move) => move.refused !== undefined);
  const open = likely.filter((move) => move.refused === undefined);
  if (!likely.length) return state.done ? null : h('p', { class: 'muted' }, 'nothing was said here');
  return h(
    'ul',
    { class: 'moves' },
    ...open.map((move) => h('li', {}, moveLine(drawing, state, move, next))),
    refused.length > 0 &&
      h(
        'li',
        {},
        h(
          'details',
          { class: 'refusals', open: !open.length },
          h('summary', {}, `${refused.length} refused: `, classesOf(refused)),
          h('ul', { class: 'moves' }, ...refused.map((move) => h('li', {}, moveLine(drawing, state, move)))),
        ),
      ),
  );
}

function classesOf(refused) {
  const tally = new Map();
  for (const { refused: label } of refused) tally.set(label, (tally.get(label) ?? 0) + 1);
  return visible([...tally].map(([label, n]) => (tally.size > 1 || n > 1 ? `${label} ${n}` : label)).join(', '));
}

function moveLine(drawing, state, move, next) {
  const facts = [
    move.logp != null && `log π ${figure(move.logp)}`,
    move.said > 1 && `said ${move.said} times`,
    move.visits && `${move.visits} visit${move.visits === 1 ? '' : 's'}`,
    move.value != null && move.visits && `value ${figure(move.value)}`,
  ];
  const line = [
    h('code', { dir: 'auto', translate: 'no' }, visible(move.text.trim()) || '(nothing)'),
    h('span', { class: 'facts' }, facts.filter(Boolean).join(' · ')),
  ];
  if (move.refused !== undefined)
    return h('div', { class: 'move refused' }, ...line, h('b', {}, visible(move.refused)), h('span', { class: 'reason', dir: 'auto' }, visible(move.reason)));
  if (move.to === undefined) return h('div', { class: 'move' }, ...line, h('span', { class: 'muted' }, 'not followed'));
  if (!drawing.states.has(move.to))
    return h('div', { class: 'move' }, ...line, h('span', { class: 'muted' }, `to state ${move.to}, which is not kept`));
  const owned = drawing.owner.get(move.to)?.move === move;
  if (move === next && owned) return h('div', { class: 'move found' }, ...line, h('span', { class: 'leads' }, '↓'));
  if (!owned) {
    const go = () => reveal(drawing, move.to);
    return h('div', { class: move === next ? 'move found' : 'move' }, ...line, h('button', { type: 'button', onclick: go }, `state ${move.to} again`));
  }
  return opening(drawing, move.to, line, (below) => below.append(stateBlock(drawing, drawing.states.get(move.to))));
}

const hint = (state) =>
  state.done
    ? 'the end'
    : `state ${state.number}, ${state.parts ? `${state.parts.length} goals` : state.moves.length ? `${state.moves.length} tried` : 'not asked'}`;

// Opens all that a state lies in, and shows it.
function reveal(drawing, number) {
  const way = [];
  for (let at = number; at !== undefined; at = drawing.owner.get(at)?.from) way.unshift(at);
  for (const at of way) drawing.builders.get(at)?.();
  const block = drawing.nodes.get(number);
  block?.scrollIntoView({ behavior: 'smooth', block: 'center' });
  block?.focus({ preventScroll: true });
}
