// Chat with one served model, or with two next to each other; colour tokens by probability; rate answers.

const { models, logs } = data('chat');
const FULL_AT = 5; // nats: a token of probability 0.7 % has the deepest colour
const ALTERNATIVES = 5;
const turns = []; // {prompt, answers}; an answer: {model, text, tokens, box ...}; both sides continue after `picked`

const field = (label, control, kind = '') => h('label', { class: kind }, label, control);
const number = (label, id, attributes) => field(label, h('input', { type: 'number', id, ...attributes }));
const button = (label, onclick, more = {}) => h('button', { type: 'button', onclick, ...more }, label);
const chosenModels = () => ['first', 'second'].map((id) => $(id)?.value).filter(Boolean);

function sampling() {
  const settings = {};
  for (const name of ['temperature', 'top_p', 'top_k', 'max_tokens', 'seed']) {
    if ($(name).value !== '') settings[name] = Number($(name).value);
  }
  const text = $('template_args').value.trim();
  if (text) settings.chat_template_kwargs = JSON.parse(text);
  return settings;
}

// Return the messages before an answer of this side: the branch of each earlier turn is its picked answer.
function conversation(upTo, side) {
  const system = $('system').value.trim();
  const messages = system ? [{ role: 'system', content: system }] : [];
  for (const turn of turns.slice(0, upTo)) {
    const { text } = turn.answers[turn.picked ?? side] ?? turn.answers[0];
    messages.push({ role: 'user', content: turn.asked }, { role: 'assistant', content: text });
  }
  return [...messages, { role: 'user', content: turns[upTo].asked }];
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split('\n\n');
    rest = lines.pop();
    for (const line of lines) if (line.startsWith('data: {')) yield JSON.parse(line.slice(6));
  }
}

async function draw(answer, messages, settings) {
  answer.stop = new AbortController();
  Object.assign(answer, { messages, text: '', tokens: [], fault: '', ended: '', running: true });
  show(answer);
  const body = { model: answer.model, messages, stream: true, logprobs: true, ...settings };
  const post = (more) =>
    fetch('v1/chat/completions', {
      method: 'POST',
      headers: { 'Content-Type': 'application/json' },
      body: JSON.stringify({ ...body, ...more }),
      signal: answer.stop.signal,
    });
  try {
    let response = await post({ top_logprobs: ALTERNATIVES });
    // Only the native engine returns alternatives.
    if (response.status === 400 && (await response.clone().text()).includes('top_logprobs')) response = await post({});
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const [{ delta, logprobs, finish_reason: ended }] = event.choices;
      answer.text += delta.content ?? '';
      if (logprobs) answer.tokens = logprobs.content;
      if (ended) answer.ended = ended;
      show(answer);
    }
  } catch (error) {
    if (error.name === 'AbortError') answer.ended = 'stopped';
    else answer.fault = error.message;
  }
  answer.running = false;
  show(answer);
}

function show(answer) {
  const { box, text, tokens, fault, running, ended } = answer;
  const coloured = tokens.length && $('colours').checked;
  const said = coloured ? tokenBox(tokens) : h('div', { class: 'said', dir: 'auto' }, visible(text) || (running ? '…' : ''));
  box.querySelector('.text').replaceChildren(said, fault ? h('p', { class: 'fault', role: 'alert' }, visible(fault)) : '');
  const ends = { length: 'cut by the limit', stopped: 'stopped' };
  const counted = tokens.length ? `${tokens.length} token${tokens.length === 1 ? '' : 's'}` : '';
  box.querySelector('small').textContent = [ends[ended], counted].filter(Boolean).join(' · ');
  box.setAttribute('aria-busy', String(running));
  const idle = !turns.some((turn) => turn.answers.some((each) => each.running));
  $('stop').disabled = idle;
  $('send').disabled = !idle;
  for (const turn of turns) enable(turn, idle);
  document.documentElement.dataset.answers = turns.map((turn) => turn.answers.filter((a) => a.ended).length).join(' ');
}

// Rate only whole answers, once; draw again only the last turn, on which nothing was built yet.
function enable(turn, idle) {
  const done = (answer) => answer.ended && !answer.fault && answer.text.trim() !== '';
  for (const answer of turn.answers) {
    for (const node of answer.box.querySelectorAll('.rate')) node.disabled = !done(answer) || answer.running || answer.rated !== undefined;
    const again = answer.box.querySelector('.again');
    again.disabled = !idle || turn !== turns.at(-1);
  }
  if (!turn.verdicts) return;
  const [one, other] = turn.answers;
  const comparable = done(one) && done(other) && one.text.trim() !== other.text.trim() && !one.running && !other.running;
  const same = JSON.stringify(one.messages) === JSON.stringify(other.messages);
  for (const node of turn.verdicts.querySelectorAll('button')) node.disabled = !comparable || !same || turn.kept;
  const differ =
    'The conversations before these answers differ, so the answers cannot be compared. ' +
    'Pick the better answer of each turn before asking the next, or begin a new conversation.';
  turn.verdicts.querySelector('.muted').textContent = same ? '' : differ;
}

function tokenBox(tokens) {
  const box = h('div', { class: 'tokens', dir: 'auto', translate: 'no' });
  tokens.forEach(({ token, logprob }, t) => {
    const colour = tint(logprob, QUANTITIES.surprise, FULL_AT);
    // One stop of the tab key for all tokens of an answer; arrows move within.
    box.append(h('span', { class: 'tok', tabindex: t ? '-1' : '0', 'data-t': t, style: colour ? { background: colour } : {} }, glyphs(token)));
  });
  const tell = (event) => {
    const node = event.target.closest('.tok');
    if (node) explain(node, tokens);
    else $('tip').hidden = true;
  };
  for (const name of ['pointerover', 'click', 'focusin']) box.addEventListener(name, tell);
  for (const name of ['pointerleave', 'focusout']) box.addEventListener(name, () => ($('tip').hidden = true));
  box.addEventListener('keydown', (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const next = step && box.children[Number(event.target.dataset.t) + step];
    if (!next) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
  return box;
}

function explain(node, tokens) {
  const t = Number(node.dataset.t);
  const { token, logprob, top_logprobs: top } = tokens[t];
  const quoted = (text) => h('code', {}, visible(JSON.stringify(text)));
  const line = (text, logp) => [h('dt', {}, quoted(text)), h('dd', {}, percent(Math.exp(logp)))];
  const tip = $('tip');
  tip.replaceChildren(
    h('p', {}, quoted(token), h('span', {}, ` token ${t + 1} of ${tokens.length}, ${percent(Math.exp(logprob))}`)),
    top.length ? h('dl', {}, ...top.flatMap((each) => line(each.token, each.logprob))) : '',
  );
  tip.hidden = false;
  node.setAttribute('aria-describedby', 'tip');
  placeTip(tip, node.getClientRects()[0] ?? node.getBoundingClientRect());
}

async function keep(record) {
  const response = await fetch('feedback', {
    method: 'POST',
    headers: { 'Content-Type': 'application/json' },
    body: JSON.stringify(record),
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
}

async function rate(answer, label) {
  answer.rated = label;
  try {
    await keep({ prompt: answer.messages, completion: answer.text, label, model: answer.model });
  } catch (error) {
    delete answer.rated;
    $('problem').textContent = error.message;
    return show(answer);
  }
  answer.box.querySelector(label ? '.up' : '.down').setAttribute('aria-pressed', 'true');
  show(answer);
}

// From here on the conversation of both sides continues after the better answer.
async function prefer(turn, side) {
  const [chosen, rejected] = [turn.answers[side], turn.answers[1 - side]];
  turn.kept = true;
  try {
    await keep({
      prompt: chosen.messages,
      chosen: chosen.text,
      rejected: rejected.text,
      chosen_model: chosen.model,
      rejected_model: rejected.model,
    });
  } catch (error) {
    turn.kept = false;
    $('problem').textContent = error.message;
    return show(chosen);
  }
  turn.picked = side;
  chosen.box.classList.add('better');
  turn.verdicts.querySelectorAll('button')[side].setAttribute('aria-pressed', 'true');
  show(chosen);
}

function answerBox(answer, turn) {
  const mark = (label, name, text) => button(text, () => rate(answer, label), { class: `rate ${name}`, title: label ? 'Good answer' : 'Bad answer', 'aria-pressed': 'false' });
  return h(
    'article',
    { class: 'card', 'aria-label': `Answer of ${answer.model}` },
    h('h4', {}, visible(answer.model)),
    h('div', { class: 'text', 'aria-live': 'polite' }),
    h(
      'div',
      { class: 'actions' },
      ...(logs ? [mark(true, 'up', 'Good'), mark(false, 'down', 'Bad')] : []),
      button('Regenerate', () => again(turn, answer), { class: 'again' }),
      h('small', {}),
    ),
  );
}

function again(turn, answer) {
  delete answer.rated;
  for (const node of answer.box.querySelectorAll('.rate')) node.setAttribute('aria-pressed', 'false');
  if (turn.verdicts) {
    for (const node of turn.verdicts.querySelectorAll('button')) node.setAttribute('aria-pressed', 'false');
    for (const each of turn.answers) each.box.classList.remove('better');
    turn.kept = false;
    delete turn.picked;
  }
  const { seed, ...settings } = sampling();
  // The same seed would draw the same answer.
  return draw(answer, answer.messages, seed === undefined ? settings : { ...settings, seed: seed + (answer.tries = (answer.tries ?? 0) + 1) });
}

function ask(text) {
  const settings = sampling();
  const turn = { asked: text, answers: chosenModels().map((model) => ({ model })) };
  turns.push(turn);
  const at = turns.length - 1;
  for (const answer of turn.answers) answer.box = answerBox(answer, turn);
  const two = turn.answers.length > 1;
  if (two && logs) {
    const names = ['← Left is better', 'Right is better →'];
    const buttons = names.map((name, side) => button(name, () => prefer(turn, side), { 'aria-pressed': 'false' }));
    turn.verdicts = h('div', { class: 'verdicts', role: 'group', 'aria-label': 'Which answer is better' }, ...buttons, h('span', { class: 'muted' }));
  }
  $('talk').append(
    h('p', { class: 'asked said', dir: 'auto' }, visible(text)),
    h('div', { class: 'answers' }, ...turn.answers.map((answer) => answer.box)),
    turn.verdicts ?? '',
  );
  // With equal settings two models see the same question; one model twice draws twice.
  const alike = two && turn.answers[0].model === turn.answers[1].model && settings.seed !== undefined;
  const drawn = turn.answers.map((answer, side) => draw(answer, conversation(at, side), alike ? { ...settings, seed: settings.seed + side } : settings));
  turn.answers[0].box.scrollIntoView({ block: 'nearest' });
  return Promise.all(drawn);
}

function controls() {
  const select = (id, first) => h('select', { id, 'aria-label': id === 'first' ? 'Model' : 'Second model' }, ...first, ...models.map((name) => h('option', { value: name }, visible(name))));
  const [first, second] = [select('first', []), select('second', [h('option', { value: '' }, 'none')])];
  second.value = models[1] ?? '';
  const colours = h('input', { type: 'checkbox', id: 'colours', checked: true });
  colours.addEventListener('change', () => turns.forEach((turn) => turn.answers.forEach(show)));
  $('top').append(
    h('p', { class: 'eyebrow' }, 'posttrain serve'),
    h('h1', { dir: 'auto' }, 'Chat'),
    h('div', { class: 'sides' }, h('label', {}, 'Model', first), h('label', {}, 'next to', second), h('label', {}, colours, ' colour tokens by probability: the deeper, the less likely'), button('New conversation', clear)),
  );
  $('settings').append(
    h(
      'details',
      {},
      h('summary', {}, 'System prompt and sampling'),
      h(
        'div',
        { class: 'settings' },
        field('System prompt', h('textarea', { id: 'system', rows: 2 }), 'system'),
        number('Temperature', 'temperature', { min: 0, step: 0.1, value: 1 }),
        number('Top p', 'top_p', { min: 0, max: 1, step: 0.05, placeholder: '1' }),
        number('Top k', 'top_k', { min: 0, step: 1, placeholder: 'all' }),
        number('Most tokens', 'max_tokens', { min: 1, step: 1, value: 512 }),
        number('Seed', 'seed', { step: 1, placeholder: 'varies' }),
        field('Template arguments (JSON)', h('input', { id: 'template_args', type: 'search', placeholder: '{"enable_thinking": false}' })),
      ),
    ),
  );
  const question = h('textarea', { id: 'question', rows: 2, 'aria-label': 'Message', placeholder: 'Message; Enter sends it, Shift+Enter breaks the line, Escape stops the answers' });
  $('ask').append(
    question,
    h('div', { class: 'actions' }, h('button', { id: 'send' }, 'Send'), button('Stop', stop, { id: 'stop', disabled: true })),
    h('p', { class: 'muted', id: 'problem', role: 'alert' }, logs ? '' : 'Start posttrain serve with --log FILE.jsonl to rate answers.'),
  );
  $('ask').addEventListener('submit', (event) => {
    event.preventDefault();
    const text = question.value.trim();
    if (!text || $('send').disabled) return;
    try {
      sampling();
    } catch {
      $('problem').textContent = 'The template arguments are not JSON.';
      return;
    }
    $('problem').textContent = '';
    question.value = '';
    ask(text);
  });
  question.addEventListener('keydown', (event) => {
    if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $('ask').requestSubmit();
  });
  document.addEventListener('keydown', (event) => {
    if (event.key === 'Escape') stop();
  });
  question.focus();
}

function stop() {
  for (const turn of turns) for (const answer of turn.answers) if (answer.running) answer.stop.abort();
}

function clear() {
  stop();
  turns.length = 0;
  $('talk').replaceChildren();
  $('question').focus();
}

controls();
document.documentElement.dataset.ready = 'true';
