// Elements, and text with invisible characters made visible.

// h('p', {class: 'note'}, 'text', child): children that are strings become text nodes, never markup.
function h(tag, attributes = {}, ...children) {
  return withContent(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return withContent(document.createElementNS('http://www.w3.org/2000/svg', tag), attributes, children);
}

function withContent(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === false || value === null) continue;
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    // Through the object model: the page's content policy forbids style attributes.
    else if (name === 'style') for (const [k, v] of Object.entries(value)) node.style.setProperty(k, v);
    else node.setAttribute(name, value === true ? '' : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const $ = (id) => document.getElementById(id);
const data = (id) => JSON.parse($(id).textContent);

// Characters that are invisible, or reorder the text around them, are shown by their code.
const UNSEEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|\p{Cs}/gu;

function visible(text) {
  const named = (c) => `⟨U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, '0')}⟩`;
  return text.replace(UNSEEN, named);
}

function figure(x) {
  if (x === null) return 'not a number';
  const size = Math.abs(x);
  if (size === 0) return '0';
  if (size >= 1e12 || size < 1e-3)
    return minus(
      x
        .toExponential(2)
        .replace(/\.?0+e/, 'e')
        .replace('e+', 'e'),
    );
  if (size >= 1e9) return minus(`${+(x / 1e9).toPrecision(3)}G`);
  if (size >= 1e6) return minus(`${+(x / 1e6).toPrecision(3)}M`);
  if (size >= 1e4) return minus(`${+(x / 1e3).toPrecision(3)}k`);
  return minus(String(+x.toPrecision(size >= 1000 ? 4 : 3)));
}

const minus = (text) => text.replaceAll('-', '−');
const percent = (x) => (x === null ? 'not a number' : `${minus(String(+(x * 100).toPrecision(3)))}%`);

function duration(seconds) {
  if (seconds === null) return 'not a number';
  if (seconds < 60) return `${+seconds.toPrecision(2)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

const FORMATS = { figure, percent, duration };

// Return a row of buttons, one of which is pressed.
function choice(label, options, current, choose) {
  const buttons = options.map(([value, name, disabled]) =>
    h(
      'button',
      {
        type: 'button',
        'aria-pressed': String(value === current),
        disabled,
        title: disabled || undefined,
        onclick: () => choose(value),
      },
      name,
    ),
  );
  return h('div', { class: 'choice', role: 'group', 'aria-label': label }, ...buttons);
}

// Replace the children of a container and focus the control that had the focus.
function refill(container, ...children) {
  const active = container.contains(document.activeElement) ? document.activeElement : null;
  const nameOf = (node) => node.getAttribute('aria-label') ?? node.textContent;
  const activeName = active && nameOf(active);
  container.replaceChildren(...children.filter(Boolean));
  if (active)
    [...container.querySelectorAll('button, select, input')]
      .find((b) => nameOf(b) === activeName)
      ?.focus({ preventScroll: true });
}
