// Where an update's time goes, as `posttrain profile` has found it: one row a part, set off as deep as it lies.

function profile(section, { columns, rows, remarks }) {
  const depth = (name) => name.search(/\S/) / 2;
  const row = ([name, ...cells]) =>
    h(
      'tr',
      {},
      h('th', { scope: 'row', style: { 'padding-left': `${16 * depth(name)}px` } }, visible(name.trim())),
      ...cells.map((text) => h('td', {}, visible(text))),
    );
  section.append(
    h('h2', {}, 'Where an update goes'),
    h(
      'div',
      { class: 'card wide parts' },
      h(
        'table',
        {},
        h('thead', {}, h('tr', {}, ...columns.map((name) => h('th', { scope: 'col' }, name)))),
        h('tbody', {}, ...rows.map(row)),
      ),
      h('ul', { class: 'muted' }, ...remarks.map((text) => h('li', {}, visible(text)))),
    ),
  );
}
