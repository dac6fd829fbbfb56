// While a run is running: poll for new lines, and draw headline, alarms and curves again.

const POLL_MS = 1000;

// Append lines to the curves; false if they do not follow the last one, as after a resume.
function extend(run, lines) {
  const columns = columnsOf(run);
  for (const line of lines) {
    const last = run.updates.at(-1) ?? -1;
    if (!Number.isInteger(line.update) || line.update < last) return false;
    if (line.update > last) run.updates.push(line.update);
    for (const [name, value] of Object.entries(line)) {
      if (name === 'update' || (value !== null && typeof value !== 'number')) continue;
      if (!columns.has(name)) columns.set(name, []);
      columns.get(name)[run.updates.length - 1] = value;
    }
  }
  const full = (y) => Array.from({ length: run.updates.length }, (_, i) => y[i]);
  run.series = Object.fromEntries([...columns].map(([name, y]) => [name, { y: full(y) }]));
  return true;
}

// page: {run, draw}. Keeps what the reader pinned, opened and selected.
function keepUp(page) {
  const { run } = page;
  let offset = run.live;
  let lastNews = null;
  const light = h('i', { 'aria-hidden': 'true' });
  const line = h('span', { role: 'status' });
  const reload = h('button', { type: 'button', hidden: true, onclick: () => location.reload() }, 'Load new rollouts');
  $('nav').before(h('p', { class: 'live' }, light, line, reload));
  const tell = (state, text) => {
    light.className = state;
    line.textContent = text;
  };
  const ask = async () => {
    const answer = await fetch(`news?from=${offset}`);
    if (!answer.ok) throw new Error(await answer.text());
    const news = await answer.json();
    if (news.again || !extend(run, news.lines)) return location.reload();
    offset = news.next;
    const ended = news.stopped !== run.stopped;
    run.stopped = news.stopped;
    if (news.lines.length) {
      const { headline, alarms, classes, words } = news;
      Object.assign(run, { headline, alarms, classes });
      WORDS = words;
      if (news.rollouts > run.files) reload.hidden = false;
      lastNews = Date.now();
    }
    if (news.lines.length || ended) page.draw();
    const at = run.updates.length ? `update ${run.updates.at(-1)}` : 'no update yet';
    const since = lastNews === null ? '' : ` · last line ${duration(Math.round((Date.now() - lastNews) / 1000))} ago`;
    if (news.running) tell('on', `Live · ${at}${since}`);
    else tell('', `The run is not running · ${at}`);
    document.documentElement.dataset.updates = run.updates.at(-1) ?? '';
  };
  poll(ask, tell, POLL_MS);
}
