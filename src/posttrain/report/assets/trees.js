// A search as a tree that opens state by state. The solution is drawn as a spine, from the first state to
// the end; other moves open below the state in which they were drawn. Goals that are proved separately
// open below their state, each as another spine.

function treeOf(tree) {
  const states = new Map(tree.states.map((state) => [state.number, state]));
  const turns = new Map();
  tree.asked.forEach((number, at) => turns.set(number, [...(turns.get(number) ?? []), at + 1]));
  // A state is drawn once, where it was first reached: the solution comes first.
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

// Draw a state, and the states after it on the solution.
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
    turns.length === 1 && `expanded at turn ${turns[0]}`,
    turns.length > 1 && `expanded ${turns.length} times, first at turn ${turns[0]}`,
    state.visits && `${state.visits} visit${state.visits === 1 ? '' : 's'}`,
    state.value && `value ${figure(state.value)}`,
    state.parts && `${state.parts.length} goals, each proved separately`,
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

// Return the goals of a state that are proved separately, opened if they are proved.
function partsOf(drawing, state) {
  const line = (number, part) => {
    const name = h('b', {}, `goal ${part + 1}`);
    const goal = drawing.states.get(number);
    if (!goal) return h('div', { class: 'move' }, name, h('span', { class: 'muted' }, `state ${number}, which is not recorded`));
    const { from, part: at } = drawing.owner.get(number) ?? {};
    if (from !== state.number || at !== part)
      return h('div', { class: 'move' }, name, h('button', { type: 'button', onclick: () => reveal(drawing, number) }, `state ${number} again`));
    const build = (below) => spine(drawing, below, goal);
    return opening(drawing, number, [name], build, goal.moves.some((move) => move.found));
  };
  return h('ul', { class: 'moves' }, ...state.parts.map((number, part) => h('li', {}, line(number, part))));
}

// Return an element that opens on a state, whose content is built when it is opened.
function opening(drawing, number, line, build, open = false) {
  const state = drawing.states.get(number);
  const details = h('details', { class: 'move' }, h('summary', {}, ...line, h('span', { class: 'leads' }, hint(state))));
  const ensureBuilt = () => {
    if (!drawing.nodes.has(number)) build(details);
  };
  drawing.builders.set(number, () => {
    ensureBuilt();
    details.open = true;
  });
  details.addEventListener('toggle', ensureBuilt);
  if (open) drawing.builders.get(number)();
  return details;
}

const FOLDED = 4;

// Return the text of a state; long runs of lines that the state before has too are folded.
function goalOf(state, before) {
  const previous = new Set(before.split('\n'));
  const parts = [];
  for (const line of visible(state.trim()).split('\n')) {
    const last = parts.at(-1);
    if (last?.same === previous.has(line)) last.lines.push(line);
    else parts.push({ same: previous.has(line), lines: [line] });
  }
  const text = ({ lines }) => h('span', {}, lines.join('\n'));
  const part = (each) =>
    each.same && each.lines.length >= FOLDED
      ? h('details', {}, h('summary', {}, `${each.lines.length} lines as before`), text(each))
      : text(each);
  return h('div', { class: 'goal', dir: 'auto', translate: 'no' }, ...parts.map(part));
}

// Return the moves of a state: followed ones, then refused ones, each by falling likelihood.
function movesOf(drawing, state, next) {
  const likely = [...state.moves].sort((a, b) => (b.found ?? 0) - (a.found ?? 0) || (b.logp ?? -99) - (a.logp ?? -99));
  const refused = likely.filter((move) => move.refused !== undefined);
  const open = likely.filter((move) => move.refused === undefined);
  if (!likely.length) return state.done ? null : h('p', { class: 'muted' }, 'no moves were drawn here');
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
    move.said > 1 && `drawn ${move.said} times`,
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
    return h('div', { class: 'move' }, ...line, h('span', { class: 'muted' }, `to state ${move.to}, which is not recorded`));
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
    : `state ${state.number}, ${state.parts ? `${state.parts.length} goals` : state.moves.length ? `${state.moves.length} tried` : 'not expanded'}`;

// Open all elements around a state, and scroll to it.
function reveal(drawing, number) {
  const way = [];
  for (let at = number; at !== undefined; at = drawing.owner.get(at)?.from) way.unshift(at);
  for (const at of way) drawing.builders.get(at)?.();
  const block = drawing.nodes.get(number);
  block?.scrollIntoView({ behavior: 'smooth', block: 'center' });
  block?.focus({ preventScroll: true });
}
