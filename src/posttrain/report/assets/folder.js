// A folder of runs: a list that follows them, from which runs are opened and compared.

const POLL_MS = 2000;
const picked = new Set();

const folder = data('folder');
let runs = folder.runs;
let filter = '';

const linkOf = (name) => `runs/${name.split('/').map(encodeURIComponent).join('/')}/`;

function size(bytes) {
  const units = ['B', 'kB', 'MB', 'GB', 'TB'];
  const k = bytes ? Math.min(units.length - 1, Math.floor(Math.log10(bytes) / 3)) : 0;
  return `${+(bytes / 1000 ** k).toPrecision(3)} ${units[k]}`;
}

function bestOf(run) {
  if (run.best === null) return '–';
  const value = run.metric.endsWith('accuracy') ? percent(run.best) : figure(run.best);
  return h('span', {}, h('b', {}, value), h('small', {}, `${visible(run.metric)}, update ${run.at}`));
}

function row(run) {
  const { name, kind, state } = run;
  const box = h('input', {
    type: 'checkbox',
    'aria-label': `Compare ${visible(name)}`,
    onchange: () => {
      if (!picked.delete(name)) picked.add(name);
      tell();
    },
  });
  box.checked = picked.has(name);
  const text = visible(name === '.' ? run.path : name);
  const title = h('a', { href: linkOf(name) }, text);
  const done = run.of && h('progress', { max: run.of, value: run.done, 'aria-label': `${run.done} of ${run.of}` });
  return h(
    'tr',
    {},
    h('td', { class: 'pick' }, kind === 'run' && box),
    h('th', { scope: 'row' }, title, run.note && h('small', {}, visible(run.note))),
    h('td', {}, h('span', { class: `stage ${state}` }, h('i', { 'aria-hidden': 'true' }), state)),
    h('td', { class: 'number' }, run.of ? `${run.done} of ${run.of}` : '', done),
    h('td', {}, bestOf(run)),
    h('td', {}, visible(run.method), h('small', {}, visible(run.model))),
    h('td', { class: 'number' }, run.changed ? `${duration(Math.max(0, Math.round(Date.now() / 1000 - run.changed)))} ago` : ''),
    h('td', { class: 'number' }, size(run.size)),
  );
}

const body = h('tbody');
const compare = h('button', { type: 'button', class: 'primary' });
const light = h('i', { 'aria-hidden': 'true' });
const line = h('span', { role: 'status' });

// Running runs first, then the one that changed last.
const inOrder = (one, other) =>
  (other.state === 'running') - (one.state === 'running') || other.changed - one.changed || (one.name < other.name ? -1 : 1);

function draw() {
  const shown = runs.filter((run) => `${run.name} ${run.method} ${run.model} ${run.state}`.toLowerCase().includes(filter));
  const rows = shown.sort(inOrder).map(row);
  const none = runs.length ? 'No run has this in its name, method, model or state.' : 'There are no runs in this folder yet.';
  refill(body, ...(rows.length ? rows : [h('tr', {}, h('td', { colspan: 8, class: 'empty' }, none))]));
  tell();
}

function tell() {
  const chosen = runs.filter((run) => picked.has(run.name));
  compare.disabled = chosen.length < 2;
  compare.textContent = chosen.length < 2 ? 'Compare (pick two or more)' : `Compare ${chosen.length} runs`;
  compare.onclick = () => {
    const query = chosen.map((run) => `run=${encodeURIComponent(run.name)}`).join('&');
    location.assign(`compare?${query}`);
  };
}

function heading() {
  const search = h('input', { type: 'search', placeholder: 'Filter by name, method, model, state', 'aria-label': 'Filter runs' });
  search.addEventListener('input', () => {
    filter = search.value.trim().toLowerCase();
    draw();
  });
  const names = ['', 'Run', 'State', 'Updates', 'Best evaluation', 'Method and model', 'Changed', 'Size'];
  const head = h('thead', {}, h('tr', {}, ...names.map((name) => h('th', { scope: 'col' }, name))));
  $('top').append(h('p', { class: 'eyebrow' }, 'posttrain'), h('h1', { dir: 'auto' }, visible(folder.folder)));
  $('runs').append(
    h('div', { class: 'above' }, search, compare, h('p', { class: 'live' }, light, line)),
    h('div', { class: 'card runs', tabindex: '0' }, h('table', {}, head, body)),
  );
}

const count = (state) => runs.filter((run) => run.state === state).length;

async function ask() {
  const answer = await fetch('list');
  if (!answer.ok) throw new Error(await answer.text());
  runs = await answer.json();
  draw();
  show('on', `${runs.length} runs, ${count('running')} running`);
  document.documentElement.dataset.running = count('running');
}

function show(state, text) {
  light.className = state;
  line.textContent = text;
}

heading();
draw();
poll(ask, show, POLL_MS);
document.documentElement.dataset.ready = 'true';
