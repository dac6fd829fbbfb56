// One question at a time: show it, take a label by key or button, send it, show the next.

const { mode, rater, out } = document.body.dataset;
const ASKS = { pairs: 'Which answer is better?', rank: 'Order the answers, best first', steps: 'Is each step right?' };
const SCROLL = 90;
let question = null;
let sending = false;
let since = 0;
let places = []; // rank: indices of the answers, best first
let marks = []; // steps: 1, 0 or null
let cursor = 0;

const KEYS = {
  pairs: [
    ['1', 'First', () => send(0)],
    ['2', 'Second', () => send(1)],
    ['0', 'Tie', () => send('tie')],
    ['b', 'Both bad', () => send('bad')],
  ],
  rank: [
    ['⏎', 'Confirm', confirm],
    ['⌫', 'Take one back', () => place(null)],
    ['0', 'All equal', () => send('tie')],
    ['b', 'All bad', () => send('bad')],
  ],
  steps: [
    ['1', 'Good', () => mark(1)],
    ['0', 'Bad', () => mark(0)],
    ['2', 'No judgement', () => mark(null)],
    ['⏎', 'Confirm', confirm],
  ],
};
const HELP = {
  pairs: [['1 or ←', 'the first answer is better'], ['2 or →', 'the second is better'], ['0', 'a tie'], ['b', 'both are bad'], ['↑ ↓', 'scroll both answers']],
  rank: [['1 … 9', 'that answer is the next best'], ['⌫', 'take the last place back'], ['Enter', 'confirm the order'], ['0', 'all are equal'], ['b', 'all are bad'], ['↑ ↓', 'scroll the answers']],
  steps: [['1', 'the step is good'], ['0', 'the step is bad'], ['2', 'no judgement'], ['↑ ↓', 'another step'], ['Enter', 'confirm; steps without a mark stay unjudged']],
};
const EVERYWHERE = [['u', 'undo the last label, also of an earlier session'], ['Shift ↑ ↓', 'scroll the prompt'], ['? or Esc', 'show and hide this']];

async function ask(path, body) {
  sending = true;
  try {
    const options = body && { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(body) };
    const response = await fetch(path, options);
    if (!response.ok) throw new Error(await response.text());
    const state = await response.json();
    fail('');
    show(state);
  } catch (error) {
    fail(error instanceof TypeError ? 'Not saved: the command has ended. Start it again and reload; earlier labels are on disk.' : error.message);
  } finally {
    sending = false;
  }
}

function fail(message) {
  $('failure')?.remove();
  if (message) $('main').before(h('p', { id: 'failure', class: 'note failure', role: 'alert' }, message));
}

const send = (label) => ask('/label', { question: question.key, label, seconds: (performance.now() - since) / 1000 });

function show(state) {
  const fresh = state.question?.key !== question?.key;
  question = state.question;
  $('progress').textContent = `${state.done} of ${state.total} · ${rater}`;
  $('bar').max = Math.max(1, state.total);
  $('bar').value = state.done;
  $('ask').textContent = question ? ASKS[mode] : 'All labelled';
  if (fresh || !question) [places, marks, cursor, since] = [[], question ? question.steps.map(() => null) : [], 0, performance.now()];
  draw();
  document.body.dataset.question = question ? question.key : '';
  document.body.dataset.done = state.done;
}

const turns = (list) =>
  list.flatMap((turn) => [
    list.length > 1 ? h('p', { class: 'role' }, turn.role) : null,
    h('div', { class: 'said', dir: 'auto' }, visible(turn.text)),
  ]).filter(Boolean);

function draw() {
  const buttons = question ? KEYS[mode].map(([key, name, act]) => button(key, name, act)) : [];
  $('keys').replaceChildren(...buttons, button('u', 'Undo', undo, 'last'), button('?', 'Keys', help));
  if (!question) {
    $('main').replaceChildren(
      h('div', { class: 'end' }, h('h2', {}, 'Thank you.'), h('p', { class: 'muted' }, `The labels are in ${out}. This page can be closed.`)),
    );
    return;
  }
  const prompt = h('section', { class: 'question', 'aria-label': 'Prompt', tabindex: 0 }, ...turns(question.prompt));
  if (mode === 'steps') {
    $('main').replaceChildren(prompt, h('section', { class: 'card solution', 'aria-label': 'Steps' }, ...question.steps.map(step)));
    drawMarks();
    return;
  }
  const many = question.answers.length > 2 ? 'sides many' : 'sides';
  $('main').replaceChildren(prompt, h('section', { class: many }, ...question.answers.map(side)));
  drawPlaces();
}

function side(answer, number) {
  return h(
    'article',
    { class: 'card side', 'aria-label': `Answer ${number + 1}` },
    h('h2', {}, h('span', {}, h('kbd', {}, String(number + 1)), `Answer ${number + 1}`), h('b', {})),
    h('div', { class: 'scroll', tabindex: 0 }, ...turns(answer)),
  );
}

function step(text, number) {
  const choose = () => {
    cursor = number;
    drawMarks();
  };
  return h('div', { class: 'step', onclick: choose }, h('b', {}), h('div', { class: 'said', dir: 'auto' }, visible(text)));
}

function drawPlaces() {
  document.querySelectorAll('.side').forEach((node, number) => {
    const at = places.indexOf(number);
    node.classList.toggle('placed', at >= 0);
    node.querySelector('b').textContent = at < 0 ? '' : `place ${at + 1}`;
  });
}

function drawMarks() {
  document.querySelectorAll('.step').forEach((node, number) => {
    const value = marks[number];
    node.classList.toggle('good', value === 1);
    node.classList.toggle('bad', value === 0);
    node.querySelector('b').textContent = value === 1 ? 'good' : value === 0 ? 'bad' : `step ${number + 1}`;
    node.toggleAttribute('aria-current', number === cursor);
    if (number === cursor) node.scrollIntoView({ block: 'nearest' });
  });
}

function place(number) {
  if (number === null) places.pop();
  else if (number < question.answers.length && !places.includes(number)) places.push(number);
  if (places.length === question.answers.length - 1 && number !== null) places.push(question.answers.findIndex((_, i) => !places.includes(i)));
  drawPlaces();
}

function mark(value) {
  marks[cursor] = value;
  cursor = Math.min(cursor + 1, marks.length - 1);
  drawMarks();
}

function confirm() {
  if (mode === 'rank') {
    if (places.length === question.answers.length) send(question.answers.map((_, i) => places.indexOf(i) + 1));
    else fail('Give every answer a place first, by its digit.');
  } else if (marks.some((value) => value !== null)) send(marks);
  else fail('Mark a step first: 1 good, 0 bad.');
}

const undo = () => ask('/undo', {});

function help() {
  const dialog = $('help');
  if (dialog.open) return dialog.close();
  const rows = [...HELP[mode], ...EVERYWHERE].flatMap(([keys, what]) => [h('dt', {}, h('kbd', {}, keys)), h('dd', {}, what)]);
  dialog.replaceChildren(h('h2', {}, 'Keys'), h('dl', {}, ...rows));
  return dialog.showModal();
}

function button(key, name, act, kind = '') {
  const once = () => {
    if (!sending) act();
  };
  return h('button', { type: 'button', class: kind, onclick: once }, h('kbd', {}, key), name);
}

function scroll(selector, by) {
  document.querySelectorAll(selector).forEach((node) => node.scrollBy({ top: by }));
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const { key } = event;
  if (key === '?') {
    event.preventDefault();
    help();
    return;
  }
  if ($('help').open || sending) return;
  const up = key === 'ArrowUp';
  if (up || key === 'ArrowDown') {
    event.preventDefault();
    if (event.shiftKey) scroll('.question', up ? -SCROLL : SCROLL);
    else if (mode === 'steps' && question) {
      cursor = Math.min(Math.max(cursor + (up ? -1 : 1), 0), marks.length - 1);
      drawMarks();
    } else scroll(question?.answers.length > 2 ? '.sides' : '.side .scroll', up ? -SCROLL : SCROLL);
    return;
  }
  if (event.repeat) return;
  if (key === 'u') undo();
  else if (question) label(event);
}

function label(event) {
  const { key } = event;
  if (key === 'Enter') {
    if (mode === 'pairs' || event.target.closest('button')) return;
    event.preventDefault();
    confirm();
    return;
  }
  if (mode === 'rank' && key === 'Backspace') return void place(null);
  if (mode === 'rank' && key >= '1' && key <= '9') return void place(Number(key) - 1);
  const name = { ArrowLeft: '1', ArrowRight: '2' }[key] ?? key;
  if (mode !== 'pairs' && name !== key) return;
  KEYS[mode].find(([known]) => known === name)?.[2]();
}

document.addEventListener('keydown', onKey);
ask('/state');
