// Scales from numbers to pixels.

// About `n` round numbers within [low, high].
function ticks(low, high, n) {
  const rough = (high - low) / Math.max(1, n);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 2.5, 5, 10].find((m) => m * power >= rough * 0.999) ?? 10);
  const result = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) {
    result.push(+(k * step).toPrecision(12));
  }
  return result;
}

const wholeTicks = (low, high, n) => ticks(low, high, n).filter(Number.isInteger);

// Return the width of labels at the left of an axis, in pixels: digits are about 6.5 wide.
const gutter = (labels) => Math.max(46, 14 + 6.5 * Math.max(0, ...labels.map((label) => label.length)));

function linear([low, high], [from, to]) {
  const span = high - low || 1;
  return (x) => from + ((x - low) / span) * (to - from);
}

// Return the range of numbers, with zero if all lie on one side of it, and never of size 0.
function extent(values, zero = true) {
  let low = Infinity;
  let high = -Infinity;
  for (const v of values) {
    if (v < low) low = v;
    if (v > high) high = v;
  }
  if (low > high) return [0, 1];
  if (zero) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
  return low === high ? [low, low + 1] : [low, high];
}

// Return the SVG path of a column: null (not a number) breaks the line, undefined (not measured) does not.
function linePath(xs, ys, x, y) {
  let path = '';
  let open = false;
  const alone = [];
  let run = 0;
  const close = (i) => {
    if (run === 1) alone.push(i);
    run = 0;
  };
  let last = -1;
  ys.forEach((v, i) => {
    if (v === undefined) return;
    if (v === null) {
      close(last);
      open = false;
      return;
    }
    path += `${open ? 'L' : 'M'}${x(xs[i]).toFixed(1)} ${y(v).toFixed(1)}`;
    open = true;
    run += 1;
    last = i;
  });
  close(last);
  return { path, alone };
}

function bandPath(xs, lows, highs, x, y) {
  let path = '';
  let start = 0;
  while (start < xs.length) {
    let end = start;
    while (end < xs.length && lows[end] != null && highs[end] != null) end++;
    if (end > start) {
      const up = [];
      const down = [];
      for (let i = start; i < end; i++) {
        up.push(`${x(xs[i]).toFixed(1)} ${y(highs[i]).toFixed(1)}`);
        down.unshift(`${x(xs[i]).toFixed(1)} ${y(lows[i]).toFixed(1)}`);
      }
      path += `M${up.concat(down).join('L')}Z`;
    }
    start = end + 1;
  }
  return path;
}

// Return a filled step path between two columns; an entry reaches half the way to its neighbours.
function stepPath(xs, lows, highs, x, y, left, right) {
  const edges = xs.map((v, i) => (i === 0 ? left : (x(xs[i - 1]) + x(v)) / 2)).concat(right);
  const up = [];
  const down = [];
  xs.forEach((_, i) => {
    const [a, b] = [edges[i].toFixed(1), edges[i + 1].toFixed(1)];
    up.push(`${a} ${y(highs[i]).toFixed(1)}`, `${b} ${y(highs[i]).toFixed(1)}`);
    down.unshift(`${b} ${y(lows[i]).toFixed(1)}`, `${a} ${y(lows[i]).toFixed(1)}`);
  });
  return `M${up.concat(down).join('L')}Z`;
}
