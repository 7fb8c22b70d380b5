// Draws the document that is embedded in page.html: a run's report, a causal trace, a direction or a comparison of runs.
'use strict';
const data = JSON.parse(document.getElementById('data').textContent);

// ---- Reading: the files may come from other programs, so nothing is taken for granted.
const isObject = value => value !== null && typeof value === 'object' && !Array.isArray(value);
const at = (value, ...path) => path.reduce((inner, key) => isObject(inner) && Object.hasOwn(inner, key) ? inner[key] : null, value);
const list = value => Array.isArray(value) ? value : [];
const entries = value => isObject(value) ? Object.entries(value) : [];
const number = value => typeof value === 'number' && isFinite(value) ? value : null;
const numbers = value => list(value).map(number);
const text = (value, fallback = '') =>
  typeof value === 'string' ? value : typeof value === 'number' || typeof value === 'boolean' ? String(value) : fallback;
const most = values => values.reduce((high, value) => Math.max(high, value ?? -Infinity), -Infinity);
const least = values => values.reduce((low, value) => Math.min(low, value ?? Infinity), Infinity);

// ---- Numbers for people.
const fixed = (value, digits = 1) => number(value) === null ? '–' : value.toFixed(digits).replace(/^-(?=[0.]+$)/, '');
const grouped = value => Math.round(value).toString().replace(/\B(?=(\d{3})+$)/g, ',');
function significant(value) {
  if (number(value) === null) return '–';
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) return value.toExponential(1);
  return size >= 1000 ? grouped(value) : String(Number(value.toPrecision(3)));
}
const probability = value =>
  number(value) === null ? '–' : value < 0.001 ? '< 0.001' : value.toFixed(value < 0.1 ? 3 : 2);
function duration(seconds) {
  if (number(seconds) === null || seconds < 0) return '–';
  if (seconds < 60) return seconds.toFixed(seconds < 10 ? 2 : 1) + ' s';
  const whole = Math.round(seconds), two = n => String(n).padStart(2, '0');
  return whole < 3600 ? Math.floor(whole / 60) + ' min ' + two(whole % 60) + ' s'
                      : Math.floor(whole / 3600) + ' h ' + two(Math.floor(whole / 60) % 60) + ' min';
}
function bytes(count) {
  if (number(count) === null || count < 0) return '–';
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let unit = 0;
  while (count >= 1024 && unit + 1 < units.length) count /= 1024, ++unit;
  return count.toFixed(count < 10 && unit > 0 ? 1 : 0) + ' ' + units[unit];
}
const plural = (count, noun) => count + ' ' + noun + (count === 1 ? '' : 's');

// ---- Elements: texts become text nodes; `null` children are left out.
function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {}))
    if (value !== null && value !== undefined) node.setAttribute(name, value);
  node.append(...children.flat(Infinity).filter(child => child !== null && child !== undefined && child !== ''));
  return node;
}
const el = (name, attributes, ...children) => fill(document.createElement(name), attributes, children);
const svg = (name, attributes, ...children) =>
  fill(document.createElementNS('http://www.w3.org/2000/svg', name), attributes, children);
const bdi = words => el('bdi', null, words);  // its own direction of writing
const written = words => '…' + (words.trim() ? words : ' (the text ends here)');
const section = (title, ...inside) => el('section', null, el('h2', null, title), inside);
const tile = (name, value, note) =>
  el('div', {class: 'tile'}, el('span', {class: 'soft small'}, name), el('b', null, value), el('span', {class: 'soft small'}, note));
const figure = (title, note, ...inside) =>
  el('figure', {class: 'card'}, el('h3', null, title), inside, note ? el('p', {class: 'soft small'}, note) : null);
const colour = index => 'var(--c' + index % 8 + ')';
function painted(node, style) {
  Object.assign(node.style, style);
  return node;
}
const keyed = (index, name, style = '') =>
  el('span', null, painted(el('i', {class: 'key ' + style}), {background: colour(index)}), name);
const legend = parts => parts.length ? el('div', {class: 'legend'}, parts) : null;
// Wide tables move below it, also by the keyboard.
const scroll = (name, style, ...inside) => el('div', {class: style + 'scroll', tabindex: 0, role: 'region', 'aria-label': name}, inside);
const heading = (name, style) => el('th', {scope: 'col', class: style}, name);

// ---- Charts.
const phone = matchMedia('(max-width:470px)');
let kWidth = 480;  // less on a phone, so that words keep their size
const kHeight = 280, kLeft = 58, kRight = 12, kTop = 12, kBottom = 46;
const px = value => value.toFixed(1);
const label = (x, y, words, anchor, more) => svg('text', {x: px(x), y: px(y), 'text-anchor': anchor, ...more}, words);
const sideways = (y, words) =>
  svg('text', {'text-anchor': 'middle', class: 'name', transform: `translate(13 ${px(y)}) rotate(-90)`}, words);
const picture = (width, height, description, ...inside) =>
  svg('svg', {viewBox: `0 0 ${px(width)} ${px(height)}`, role: 'img', 'aria-label': description}, inside);

function ticks(low, high, count) {
  const raw = (high - low) / Math.max(count, 1), power = 10 ** Math.floor(Math.log10(raw)), share = raw / power;
  const step = power * (share < 1.5 ? 1 : share < 3.5 ? 2 : share < 7.5 ? 5 : 10), out = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; ++k) out.push(k * step);
  return out;
}
function axisTicks(axis, count = 5) {
  if (!axis.log) return ticks(axis.low, axis.high, count);
  const first = Math.ceil(Math.log10(axis.low) - 1e-9), last = Math.floor(Math.log10(axis.high) + 1e-9), out = [];
  for (let power = first; power <= last; power += Math.max(1, Math.floor((last - first) / 5) + 1)) out.push(10 ** power);
  return out.length >= 2 ? out : [axis.low, axis.high];
}
// From values to pixels; an empty or single-valued range is opened.
function axis(values, log, from, to, floor, ceiling) {
  const usable = values.filter(value => value !== null && !(log && value <= 0));
  let low = floor ?? least(usable), high = ceiling ?? most(usable);
  if (low > high) [low, high] = log ? [1, 10] : [0, 1];
  if (low === high) [low, high] = log ? [low / 2, high * 2] : low === floor ? [low, low + 1] : [low - 0.5, high + 0.5];
  const scale = value => log ? Math.log10(value) : value;
  return {low, high, log, from, to, place: value => from + (scale(value) - scale(low)) / (scale(high) - scale(low)) * (to - from)};
}
// `taken`: left end, right end and base of each mark that is drawn already.
function drawSeries(series, x, y, taken) {
  let path = '', down = false;
  const marks = [];
  series.y.forEach((value, i) => {
    const across = series.x[i];
    if (value === null || across === null || across === undefined || (y.log && value <= 0)) {
      down = false;
      return;
    }
    const spot = [px(x.place(across)), px(y.place(Math.min(Math.max(value, y.low), y.high)))];
    path += (down ? 'L' : 'M') + spot.join(' ');
    down = true;
    if (series.points)
      marks.push(painted(svg('circle', {cx: spot[0], cy: spot[1], r: 3},
                             svg('title', null, `${series.name}: ${significant(value)} at ${significant(across)}`)),
                         {fill: colour(series.colour)}));
    if (series.mark) {
      const far = x.place(across) > kWidth - 60, edge = x.place(across) + (far ? -6 : 6), wide = 8 * series.mark.length;
      const left = far ? edge - wide : edge, right = left + wide;
      const clear = base => taken.every(other => other.right < left || right < other.left || Math.abs(other.base - base) >= 14);
      const bases = [-6, 16, -20, 30, -34, 44, -48, 58].map(move => Number(spot[1]) + move);
      const base = bases.find(base => base > kTop && base < y.from && clear(base)) ?? bases[0];
      taken.push({left, right, base});
      marks.push(label(edge, base, series.mark, far ? 'end' : 'start', {class: 'name'}));
    }
    const [left, right] = list(series.xRange).map(end => px(x.place(end))), [low, high] = list(series.yRange).map(end => px(y.place(end)));
    const reach = ends => marks.push(painted(svg('line', ends), {stroke: colour(series.colour), opacity: 0.45}));
    if (right) reach({x1: left, x2: right, y1: spot[1], y2: spot[1]});
    if (high) reach({x1: spot[0], x2: spot[0], y1: low, y2: high});
  });
  if (path === '') return null;
  if (series.cloud) return marks;
  return [painted(svg('path', {class: 'line' + (series.faint ? ' faint' : ''), d: path}), {stroke: colour(series.colour)}), marks];
}
// chart: {series: [{name, x, y, colour, faint, points, cloud, mark, xRange, yRange}], xLabel, xLow, xHigh, yLabel, log, low, high, description}
function lineChart(chart) {
  const ups = chart.series.flatMap(series => series.y);
  const x = axis(chart.series.flatMap(series => series.x), false, kLeft, kWidth - kRight, chart.xLow, chart.xHigh);
  let low = chart.low;
  const lowest = least(ups.filter(value => value !== null)), highest = chart.high ?? most(ups);
  if (low === undefined && !chart.log && lowest > 0 && lowest < 0.5 * highest) low = 0;
  const y = axis(ups, chart.log, kHeight - kBottom, kTop, low, chart.high), frame = [], taken = [];
  for (const tick of axisTicks(y))
    frame.push(svg('line', {class: 'grid', x1: x.from, x2: x.to, y1: px(y.place(tick)), y2: px(y.place(tick))}),
               label(x.from - 6, y.place(tick) + 4, tick >= 1e4 && tick < 1e9 ? significant(tick / 1000) + 'k' : significant(tick), 'end'));
  const whole = chart.series.every(series => series.x.every(value => Number.isInteger(value ?? 0)));
  for (const tick of axisTicks(x, Math.min(5, Math.floor((x.to - x.from) / 70))).filter(tick => !whole || Number.isInteger(tick)))
    frame.push(svg('line', {class: 'grid', x1: px(x.place(tick)), x2: px(x.place(tick)), y1: y.from, y2: y.from + 4}),
               x.place(tick) > kWidth - 24 ? label(kWidth - 2, y.from + 18, significant(tick), 'end')
                                         : label(x.place(tick), y.from + 18, significant(tick), 'middle'));
  frame.push(svg('line', {class: 'axis', x1: x.from, x2: x.to, y1: y.from, y2: y.from}),
             label(Math.min((x.from + x.to) / 2, kWidth - 3.7 * text(chart.xLabel).length), y.from + 38, chart.xLabel, 'middle', {class: 'name'}),
             sideways((y.from + y.to) / 2, chart.yLabel));
  return [picture(kWidth, kHeight, chart.description, frame, chart.series.map(series => drawSeries(series, x, y, taken))),
          legend(chart.series.filter(series => series.name)
                     .map(series => keyed(series.colour, series.name, series.faint ? 'faint' : '')))];
}
// map: {values: [row][column], rows, columns, low, high, left, tall, fill, unit, xLabel, description}; equal neighbours are one cell.
function heatMap(map) {
  const columns = most(map.values.map(row => row.length)), rows = map.values.length;
  const cell = (kWidth - map.left - kRight) / Math.max(columns, 1), tall = map.tall ?? Math.min(Math.max(200 / rows, 3), 24);
  const bottom = kTop + tall * rows, every = Math.ceil(11 / tall), parts = [];
  const shade = value => Math.min(Math.max((value - map.low) / Math.max(map.high - map.low, 1e-12), 0), 1);
  map.values.forEach((row, r) => {
    const y = kTop + tall * r, name = map.rows[r] ?? '';
    if (name && r % every === 0)
      parts.push(label(map.left - 5, y + tall / 2 + 4, name.length > 24 ? name.slice(0, 23) + '…' : name, 'end'));
    for (let c = 0, end; c < row.length; c = end) {
      for (end = c + 1; end < row.length && row[end] === row[c];) ++end;
      if (row[c] !== null)
        parts.push(painted(svg('rect', {x: px(map.left + cell * c), y: px(y), width: px(cell * (end - c)), height: px(tall),
                                        'fill-opacity': (0.04 + 0.96 * shade(row[c])).toFixed(2)}),
                           {fill: map.fill}));
    }
  });
  parts.push(svg('rect', {class: 'frame', x: map.left, y: kTop, width: px(kWidth - map.left - kRight), height: px(bottom - kTop)}));
  for (let c = 0; c < columns; c += Math.max(1, Math.ceil(columns / (kWidth < 480 ? 4 : 10))))
    parts.push(label(map.left + cell * (c + 0.5), bottom + 16, text(map.columns[c], String(c)), 'middle'));
  parts.push(label((map.left + kWidth - kRight) / 2, bottom + 36, map.xLabel, 'middle', {class: 'name'}));
  const ramp = painted(el('i', {class: 'ramp'}), {background: `linear-gradient(90deg,transparent,${map.fill})`});
  return [picture(kWidth, bottom + 46, map.description, parts),
          legend([el('span', null, significant(map.low) + ' ', ramp, ' ' + significant(map.high) + ' ' + (map.unit ?? ''))])];
}
const piece = (share, index, title) =>
  painted(el('i', {title}), {width: (100 * Math.min(Math.max(share, 0), 1)).toFixed(2) + '%', background: colour(index)});
const bar = (name, track, ...value) =>
  el('div', {class: 'bar'}, el('span', null, name), el('span', {class: 'track'}, track), el('span', {class: 'value'}, value));

// ---- The heat maps of causal tracing.
const kKinds = ['state', 'mlp', 'attention'];
const restoring = (kind, trace) => kind === 'state'
    ? 'restoring single states' : `restoring ${kind === 'mlp' ? 'MLP' : 'attention'} outputs of ` +
      plural(Math.min(number(at(trace, 'window')) ?? 10, number(at(trace, 'layers')) ?? Infinity), 'layer');
function averageMap(trace, kind) {
  const values = list(at(trace, 'effect', kind)).map(numbers);
  if (!values.length) return null;
  const title = 'Average indirect effect, ' + restoring(kind, trace);
  return [el('p', {class: 'small'}, title),
          heatMap({values, rows: list(trace.rows).map(name => text(name)), columns: [], low: 0, high: Math.max(0, most(values.flat())), left: 152,
                   tall: 20, fill: `var(--${kind})`, xLabel: 'layer', unit: 'effect', description: title})];
}
function traceMap(trace, kind) {
  const values = list(at(trace, 'restored', kind)).map(numbers), low = number(trace.corrupted) ?? 0;
  if (!values.length) return null;
  const title = `p(${text(trace.answer)}), ` + restoring(kind, data);
  const [begin, end] = list(trace.subject_tokens);
  const rows = list(trace.tokens).map((token, i) => text(token) + (i >= begin && i < end ? '*' : ''));
  return figure(kind, '', el('p', {class: 'small'}, title),
                heatMap({values, rows, columns: [], low, high: Math.max(low, most(values.flat())), left: 152, tall: 20, fill: `var(--${kind})`,
                         xLabel: 'layer', unit: 'p', description: title}));
}
function tracePage() {
  const traces = list(data.traces);
  return [
    el('header', null, el('h1', null, `Where ${text(data.model)} keeps its facts`),
       el('p', null, 'The subject of each prompt is noised until the model loses the answer. Then one part of the clean run is put ' +
                         'back, and the answer comes back as far as that part carries it.'),
       el('div', {class: 'tiles'},
          tile('facts traced', text(data.facts), `${text(data.skipped)} more are not known to the model`),
          tile('p(answer), clean', fixed(data.clean, 3), 'mean over facts'),
          tile('p(answer), noised', fixed(data.corrupted, 3), `noise ${significant(data.noise)}, up to ${text(data.samples)} draws`))),
    data.suggested ? section('Layers to edit', el('div', {class: 'card'}, el('h3', null, data.suggested.layers.join(', ')),
                                                  data.suggested.why.map(line => el('p', null, line)))) : null,
    section('Average indirect effect', el('p', {class: 'soft'}, 'Probability of the answer that comes back: the stronger the colour, the more of it.'),
            el('div', {class: 'charts'}, kKinds.map(kind => {
              const map = averageMap(data, kind);
              return map && figure(kind, '', map);
            }))),
    traces.length ? section('Fact by fact',
        el('p', {class: 'soft'}, "Tokens downwards, the subject's with a star; layers to the right."),
        traces.map((trace, i) => el('details', i === 0 ? {open: ''} : null,
            el('summary', null, bdi(text(trace.prompt)), ' → ', bdi(text(trace.answer)),
                                    ` (${fixed(trace.clean, 3)} clean, ${fixed(trace.corrupted, 3)} noised)`),
            el('div', {class: 'charts'}, kKinds.map(kind => traceMap(trace, kind)))))) : null,
    data.more > 0 ? el('p', {class: 'soft small'}, data.more + ' more in trace.json.') : null,
  ];
}

// ---- The parts of a run's report.
const results = data.results ?? {}, extras = data.extras ?? {};
const summaryOf = (family, when) => at(results, 'metrics', family.name, when);
const readable = field => field.name.length > 3 ? field.name : `${field.key.replaceAll('_', ' ')} (${field.name})`;
const modelName = () => text(at(results, 'model', 'path'), 'a model').split('/').filter(part => part).pop() ?? '';

function verdict() {
  const cases = data.cases, facts = number(results.facts) ?? cases.all, written = number(at(results, 'edits', 'applied')) ?? facts;
  const single = results.protocol === 'single';
  const out = [el('b', null, (written === facts ? '' : written + ' of ') + plural(facts, 'fact')), ' written with ',
               el('b', null, text(results.editor, 'an editor')), ' into ', el('b', null, modelName()),
               single ? ', each alone and taken back. ' : '. '];
  if (cases.all > 0) {
    const [low, high] = list(cases.ci95), worked = 100 * (cases.all - cases.failed) / cases.all;
    const digits = cases.failed > 0 && cases.failed < cases.all && /^(0|100)$/.test(fixed(worked, 0)) ? 2 : 0, share = fixed(worked, digits);
    out.push(...(cases.failed === 0
        ? [single ? 'The model said all of them' : 'The model now says all of them']
        : [el('span', {class: 'reason'}, `${cases.failed} of ${cases.all} did not work out`), ', see below']));
    out.push(` (${share} % worked out; 95 % interval ${fixed(low, digits)}–${fixed(high, digits)}). `);
  }
  for (const family of data.families)
    for (const field of family.fields.filter(field => field.main)) {
      const before = number(at(summaryOf(family, 'pre'), field.key)), after = number(at(summaryOf(family, 'post'), field.key));
      if (before !== null && after !== null)
        out.push(`The ${family.name} ${field.key} went from ${fixed(before)} to ${fixed(after)}. `);
    }
  const total = number(at(results, 'seconds', 'total'));
  if (total !== null) out.push(`It took ${duration(total)}.`);
  return out;
}
function trainingVerdict() {
  const training = data.training;
  return [el('b', null, `${training ? training.steps : 0} steps`), ` on ${text(at(results, 'rows', 'used'))} rows into `,
          el('b', null, modelName()), '.',
          training ? ` Loss: first step ${fixed(training.first, 3)}, last step ${fixed(training.last, 3)}.` : ''];
}
// The first figures of the first family that has some; the tables have the rest.
function tiles() {
  for (const family of data.families) {
    const post = summaryOf(family, 'post'), pre = summaryOf(family, 'pre'), shown = post ?? pre;
    const fields = family.fields.filter(field => number(at(shown, field.key)) !== null).slice(0, 4);
    if (!fields.length) continue;
    return el('div', {class: 'tiles'}, fields.map(field => {
      const before = post ? number(at(pre, field.key)) : null, digits = field.digits;
      return el('div', {class: 'tile'}, el('abbr', {class: 'soft small', title: field.definition}, readable(field)),
                el('b', null, fixed(at(shown, field.key), digits)),
                el('span', {class: 'soft small'}, before === null ? field.unit : 'before ' + fixed(before, digits)));
    }));
  }
  return null;
}

function card(one) {
  const meter = (name, p, index) => number(p) === null ? null : el('div', {class: 'prob'}, el('span', null, name),
      el('span', {class: 'meter'}, piece(p, index)), el('span', null, 'p ' + probability(p)));
  const said = when => one[when] === undefined ? null : el('div', {class: 'said'}, el('span', {class: 'tag'}, when),
      el('span', null, el('span', {class: when}, written(one[when]))));
  return el('div', {class: one.reason ? 'card failed' : 'card'},
            el('p', null, el('b', null, bdi(one.prompt)), el('span', {class: 'soft'}, ' → ', bdi(one.target))),
            one.reason ? el('p', {class: 'reason'}, one.reason) : null, said('before'), said('after'),
            meter('before', one.p_before, 7), meter('after', one.p_after, 0),
            (one.more ?? []).map(more => el('div', {class: 'more'},
                el('p', {class: 'small'}, el('span', {class: 'soft'}, more.label + ': '), bdi(more.prompt)),
                el('p', {class: 'small'}, el('span', {class: 'soft'}, bdi(written(more.before))), ' → ', bdi(written(more.after))))));
}
function wordsSection() {
  const cards = data.cards.shown, first = 12;
  if (!cards.length) return null;
  return section('In words',
      el('p', {class: 'soft'}, 'What the model writes after each prompt, and p, the probability of the whole new answer. Edits that did ' +
                                   'not work out come first.'),
      el('div', {class: 'cards'}, cards.slice(0, first).map(card)),
      cards.length > first ? el('details', null, el('summary', null, `Show ${cards.length - first} more`),
                                el('div', {class: 'cards'}, cards.slice(first).map(card))) : null,
      data.cards.more > 0 ? el('p', {class: 'soft small'}, data.cards.more + ' more in cases.jsonl and report.json.') : null);
}

// The declared figures, then those under the facts' own keys.
function metricRows(family) {
  const pre = summaryOf(family, 'pre'), post = summaryOf(family, 'post');
  const rows = family.fields.map(field => ({...field, pre, post}));
  for (const group of family.keyed) {
    const own = at(post, group), other = at(pre, group);
    for (const [key, value] of entries(isObject(own) && Object.keys(own).length ? own : other))
      if (number(value) !== null)
        rows.push({key, name: `${group}: ${key.replace(/_acc$/, '').replaceAll('_', ' ')}`, unit: '%', digits: 1, higher: true, pre: other,
                   post: own, definition: `The ${group} key of this name in the facts file.`});
  }
  return rows.filter(row => at(row.pre, row.key) !== null || at(row.post, row.key) !== null);
}
function metricRow(family, row) {
  const before = number(at(row.pre, row.key)), after = number(at(row.post, row.key)), digits = row.digits;
  const told = at(summaryOf(family, 'retrieval'), row.key);
  const cell = (value, when) => el('td', {'data-metric': `${family.name}.${row.key}.${when}`, 'data-value': value}, fixed(value, digits));
  const difference = before !== null && after !== null ? after - before : null;
  const changed = difference !== null && Math.abs(difference) >= 0.5 * 10 ** -digits, better = difference > 0 === row.higher;
  const table = at(row.post, row.key) === null ? row.pre : row.post, range = at(table, 'ci95', row.key) ?? at(table, row.key + '_ci95');
  const interval = Array.isArray(range) && range.length === 2 ? `${fixed(range[0], digits)} … ${fixed(range[1], digits)}` : '–';
  const count = number(at(table, 'counts', row.key)) ?? number(at(table, 'n'));
  return el('tr', null,
            el('th', {scope: 'row'}, el('abbr', {title: row.definition}, row.name), ' ',
               el('span', {class: 'soft small hide-narrow'}, row.key)),
            cell(before, 'pre'), cell(after, 'post'), summaryOf(family, 'retrieval') ? cell(number(told), 'retrieval') : null,
            el('td', {class: changed ? better ? 'up' : 'down' : null},
               difference === null ? '–' : (difference > 0 ? '+' : '') + fixed(difference, digits) + (changed ? better ? ' ✓' : ' ✗' : '')),
            el('td', {class: 'soft hide-narrow'}, interval), el('td', {class: 'soft hide-narrow'}, row.unit),
            el('td', {class: 'soft'}, fixed(count, 0)));
}
function metricsSection() {
  const families = data.families.map(family => ({family, rows: metricRows(family)})).filter(one => one.rows.length);
  return families.length ? section('Measured', families.map(({family, rows}) => el('div', {class: 'card family'},
      el('h3', null, family.name), el('p', {class: 'soft small'}, family.protocol),
      scroll('figures of ' + family.name, '', el('table', null,
          el('thead', null, el('tr', null, ['metric', 'before', 'after', ...(summaryOf(family, 'retrieval') ? ['told'] : []), 'change']
                                   .map(name => heading(name)),
                               heading('95 % interval', 'hide-narrow'), heading('unit', 'hide-narrow'), heading('n'))),
          el('tbody', null, rows.map(row => metricRow(family, row))))),
      el('details', {class: 'small'}, el('summary', null, 'Definitions'),
         el('dl', null, rows.map(row => [el('dt', null, row.name), el('dd', null, row.definition)])))))) : null;
}

const steps = count => Array.from({length: count}, (_, i) => i + 1);
// At each step; curves that have stopped keep their last value.
function medianCurve(curves) {
  return steps(most(curves.map(curve => curve.length))).map((_, step) => {
    const values = curves.map(curve => curve[Math.min(step, curve.length - 1)]).filter(value => value !== null);
    values.sort((a, b) => a - b);
    const half = values.length / 2;
    return values.length ? (values[Math.ceil(half) - 1] + values[Math.floor(half)]) / 2 : null;
  });
}
function curvesFigure(key, title, yLabel, log, index) {
  const {all, shown} = data.curves[key], curves = shown.map(numbers);
  if (!curves.length) return null;
  const step = Math.ceil(curves.length / 150), series = [];
  for (let i = 0; i < curves.length; i += step)
    series.push({name: i === 0 && curves.length > 1 ? 'one fact' : '', x: steps(curves[i].length), y: curves[i], colour: index,
                 faint: curves.length > 1});
  if (curves.length > 1) {
    const median = medianCurve(curves);
    series.push({name: 'median', x: steps(median.length), y: median, colour: index});
  }
  return figure(title, step > 1 || curves.length < all ? `${series.length - 1} of ${all} facts` : '',
                lineChart({series, xLabel: 'step', yLabel, log, ...(log ? {} : {low: 0, high: 1}),
                           description: `${title} of ${all} facts by optimisation step`}));
}
function trainingFigure() {
  const y = numbers(extras.training_loss);
  return y.length ? figure('Training loss', '', lineChart({series: [{name: '', x: steps(y.length), y, colour: 0}], xLabel: 'step',
      yLabel: 'loss (nat per token)', description: 'Training loss by optimiser step'})) : null;
}
function layersFigures() {
  const layers = list(extras.layers), norm = layer => number(at(layer, 'update_norm')) ?? 0;
  if (!layers.length) return null;
  const highest = Math.max(0, ...layers.map(norm)), shown = layer => 'layer ' + text(at(layer, 'layer'), '?');
  // Where a layer has several edited matrices, which one: "gate" of "model.layers.11.mlp.gate_proj.weight".
  const part = layer => text(at(layer, 'weight')).split('.').filter(word => word !== 'weight').pop()?.replace(/_proj$/, '') ?? '';
  const name = layer => layers.filter(one => shown(one) === shown(layer)).length > 1 ? `${shown(layer)} ${part(layer)}` : shown(layer);
  const bars = layers.map(layer => {
    const relative = number(at(layer, 'relative')), kept = number(at(layer, 'survived'));
    return [bar(name(layer),
                highest > 0 ? piece(norm(layer) / highest, 0, `${text(at(layer, 'weight'))}: ${significant(norm(layer))}`) : null,
                significant(norm(layer)), relative === null ? null : el('span', {class: 'soft'}, ` (${fixed(100 * relative, 2)} %)`)),
            kept !== null && kept < 0.999 ? el('p', {class: 'soft small'},
                `${name(layer)}: ${fixed(100 * kept)} % of the update survived the cast to the weights' type.`) : null];
  });
  const series = layers.map(layer => ({name: name(layer), y: numbers(at(layer, 'spectrum'))})).filter(one => one.y.length)
      .map((one, i) => ({...one, x: steps(one.y.length), colour: i % 8, points: one.y.length < 2}));
  return [figure('Size of the update',
                 "Frobenius norm of what was added to each edited matrix, and its share of the matrix's own norm.", bars),
          series.length ? figure('Spectrum of the update', '', lineChart({series, xLabel: 'singular value', yLabel: 'size', log: true,
              description: 'Singular values of the updates by layer'})) : null];
}
const kEfficacy = 'Efficacy leaves out facts without an old answer; where no fact has one, it is the share of new answers that are ' +
    'predicted token for token.';
// What rows hold at a path, against their number of edits.
function alongEdits(rows, path, scale = 1) {
  const own = rows.filter(row => number(at(row, ...path)) !== null);
  return {x: own.map(row => number(at(row, 'edits'))), y: own.map(row => scale * at(row, ...path)), points: true};
}
function byEditsFigure() {
  const rows = list(extras.efficacy_by_edits);
  if (rows.length < 2) return null;
  const series = data.labels.map(([key, name]) => ({name, ...alongEdits(rows, [key])}))
      .filter(one => one.x.length).map((one, i) => ({...one, colour: i % 8}));
  return series.length ? figure('Against the number of edits', kEfficacy, lineChart({series, xLabel: 'edits so far', yLabel: '%', low: 0,
      high: 100, description: 'Metrics by number of edits'})) : null;
}
// The lifelong protocol: what earlier edits still hold, and the model's health beside them.
function lifelongFigures() {
  const rows = list(results.lifelong);
  if (rows.length < 2) return null;
  const curve = ([name, ...path], i) => ({name, ...alongEdits(rows, path), colour: i % 8});
  const chart = (title, note, paths, yLabel, limits) => {
    const series = paths.map(curve).filter(one => one.x.length);
    return series.length ? figure(title, note, lineChart({series, xLabel: 'edits so far', yLabel, ...limits, description: title})) : null;
  };
  const few = most(rows.map(row => number(at(row, 'edits')))) <= 100;  // the first and the last are all
  return [chart('What earlier edits still hold',
                (few ? 'Efficacy of all facts so far' : 'Efficacy of the first and of the last 100 facts and of all') +
                    '; the others of a sample of all so far. ' + kEfficacy,
                [...(few ? [] : [['first', 'first'], ['last', 'last']]), ['all', 'all'], ['paraphrase', 'paraphrase'], ['neighbourhood', 'neighborhood'],
                 ['says', 'free', 'edit_begins'], ['says paraphrased', 'free', 'paraphrase_begins']], '%', {low: 0, high: 100}),
          chart('LAMBADA on the way', '', [['LAMBADA', 'health', 'lambada']], '%', {low: 0}),
          chart('Perplexity on the way', '', [["the health data's text", 'health', 'wikitext2_perplexity']], 'perplexity', {low: 0}),
          chart('Seconds on the way', '', [['targets and insertion', 'seconds']], 'seconds', {low: 0})];
}
function retentionFigure() {
  const {values, rows, columns} = data.retention;
  return values.length ? figure('Retention',
      "Probability of each fact's new answer after so many edits: what was written first should keep its colour further down.",
      heatMap({values: values.map(numbers), rows, columns, low: 0, high: 1, left: 120, fill: colour(2),
               xLabel: 'fact, in the order of editing',
               description: "Probability of each fact's new target after each number of edits"})) : null;
}
function secondsFigure() {
  const order = ['load', 'statistics', 'targets', 'insert', 'evaluate'];
  const phases = entries(results.seconds).filter(([key, value]) => key !== 'total' && number(value) !== null);
  const rank = ([key]) => order.includes(key) ? order.indexOf(key) : order.length;
  const highest = most(phases.map(([, value]) => value)), total = number(at(results, 'seconds', 'total'));
  if (!(highest > 0)) return null;
  return figure('Time by phase', '',
                phases.sort((a, b) => rank(a) - rank(b)).map(([key, value]) => bar(key, piece(value / highest, 1, key), duration(value))),
                total === null ? null : el('p', {class: 'soft small'}, 'total ' + duration(total)));
}
function memoryFigure() {
  const sizes = entries(entries(extras.memory).length ? extras.memory : results.peak_bytes).map(([name, device]) => {
    const weights = number(at(device, 'weights')) ?? 0;
    return {name, weights, peak: number(device) ?? Math.max(weights, number(at(device, 'peak')) ?? 0)};
  });
  const highest = most(sizes.map(one => one.peak)), held = sizes.filter(one => one.weights > 0);
  if (!(highest > 0)) return null;
  const bars = sizes.map(({name, weights, peak}) => bar(name,
      [weights > 0 ? piece(weights / highest, 0, 'weights: ' + bytes(weights)) : null,
       peak > weights ? piece((peak - weights) / highest, 7, 'peak: ' + bytes(peak)) : null], bytes(peak)));
  return figure('Peak memory by device', '', bars,
                legend([held.length ? keyed(0, 'weights') : [],
                        held.some(one => one.peak > one.weights) ? keyed(7, 'work, caches and the program') : []].flat()));
}
function plotsSection() {
  const plots = [trainingFigure(), curvesFigure('loss', 'Loss while looking for the targets', 'loss', true, 0),
                 curvesFigure('probability', 'Probability of the new answer', 'probability', false, 2), layersFigures(),
                 byEditsFigure(), lifelongFigures(), retentionFigure(), secondsFigure(), memoryFigure(),
                 kKinds.map(kind => {
                   const map = averageMap(extras.trace, kind);
                   return map && figure('Causal tracing: ' + kind, '', map);
                 })].flat(2).filter(plot => plot);
  return plots.length ? section('How it went', el('div', {class: 'charts'}, plots)) : null;
}

function devicesSection() {
  const byLayer = layers => layers.map(([key, device]) => [String(parseInt(key, 10)), text(device)]).sort((a, b) => a[0] - b[0]);
  let places = [];
  if (isObject(extras.placement)) {
    const placement = extras.placement;
    places = [['embedding', text(placement.embedding)], ...byLayer(entries(placement.layers)), ['head', text(placement.head)]];
  } else {
    const map = entries(results.device_map), isLayer = ([key]) => /(^|\.)\d+$/.test(key);
    places = [...map.filter(one => !isLayer(one)).map(([key, device]) => [key, text(device)]),
              ...byLayer(map.filter(isLayer).map(([key, device]) => [/\d+$/.exec(key)[0], device]))];
  }
  places = places.filter(([, device]) => device);
  if (!places.length) return null;
  const devices = [...new Set(places.map(([, device]) => device))];
  const edited = new Set(list(at(extras, 'placement', 'edited_layers')).map(layer => text(layer)));
  return section('Where it ran', el('div', {class: 'card'},
      el('div', {class: 'map'}, places.map(([part, device]) =>
          painted(el('span', {class: edited.has(part) ? 'edited' : null, title: `${part} on ${device}`}, part),
                  {background: `color-mix(in srgb,${colour(devices.indexOf(device))} 28%,var(--card))`}))),
      legend([...devices.map((device, i) => keyed(i, device)), ...(edited.size ? [el('span', null, 'framed: edited layers')] : [])])));
}

function casesSection() {
  const {all, rows, columns} = data.cases;
  if (!all) return null;
  const body = rows.map(row => el('tr', null, el('td', null, row.id), el('td', {class: 'text'}, row.prompt),
      el('td', {class: 'text'}, row.target), el('td', {class: row.failed ? 'text reason' : 'text'}, row.state),
      el('td', null, text(row.steps, '–')), el('td', null, significant(row.loss)), el('td', null, probability(row.before)),
      el('td', null, probability(row.after)), row.values.map(value => el('td', null, fixed(value, 0)))));
  return section('Every edit', el('details', null, el('summary', null, plural(all, 'edit')),
      scroll('table of every edit', '', el('table', null,
          el('thead', null, el('tr', null, heading('case'), ['prompt', 'new answer', 'state'].map(name => heading(name, 'text')),
                               ['steps', 'loss', 'p before', 'p after', ...columns.map(name => name + ' %')].map(name => heading(name)))),
          el('tbody', null, body))),
      rows.length < all ? el('p', {class: 'soft small'}, `${all - rows.length} more in cases.jsonl.`) : null));
}

function againSection() {
  const model = at(results, 'model'), parameters = number(at(model, 'parameters'));
  const rows = [['emend', text(results.emend)], ['model', text(at(model, 'path'))], ['family', text(at(model, 'family'))],
                ['fingerprint', text(at(model, 'fingerprint'))], ['parameters', parameters === null ? '' : grouped(parameters)],
                ...['editor', 'engine', 'dtype'].map(key => [key, text(results[key])]), ['seed', text(extras.seed)], ['started', text(extras.started)],
                ['folder', text(extras.directory)],
                ...['versions', 'machine'].flatMap(group => entries(extras[group]).map(
                    ([key, value]) => [key, typeof value === 'string' ? value : JSON.stringify(value)])),
                ['weights changed', list(results.weights_changed).map(name => text(name)).join(', ')]];
  const hparams = results.hparams, command = text(extras.command);
  return section('To do it again', command ? el('pre', null, command) : null,
      el('dl', null, rows.filter(([, value]) => value).map(([name, value]) => [el('dt', null, name), el('dd', null, value)])),
      entries(hparams).length ? el('details', null, el('summary', null, 'Hyper-parameters'),
                                   el('pre', null, JSON.stringify(hparams, null, 2))) : null,
      list(extras.notes).map(note => el('p', {class: 'soft'}, text(note))));
}

function reportPage() {
  const training = data.page === 'training';
  return [el('header', null, el('h1', null, training ? 'What this training did' : 'What this edit did'),
             el('p', null, training ? trainingVerdict() : verdict()), training ? null : tiles()),
          wordsSection(), metricsSection(), plotsSection(), devicesSection(), casesSection(), againSection()];
}

// ---- Directions of behaviour.
const kUnits = {rate: 'in 100 words', sentiment: 'in 100 words', any: '% of texts', loops: '% of texts', entropy: 'bits', length: 'words a text',
  next: '% probability', judge: '% probability'};
function directionPage() {
  const layers = list(at(data, 'fit', 'layers')), effect = data.effect ?? {}, x = layers.map(one => number(one.layer));
  const line = (key, name, index) => ({name, x, y: layers.map(one => number(one[key])), colour: index, points: true});
  const chart = (title, note, yLabel, series, more) => figure(title, note, lineChart({series, xLabel: 'layer', yLabel,
      description: title + ' by layer', ...more}));
  const health = entries(at(effect, 'health', 'before')).filter(([, value]) => number(value) !== null);
  const change = list(data.change), search = data.search ?? {}, trials = list(search.trials).filter(one => number(one.score) !== null);
  const tried = list(search.front).map(index => list(search.trials)[index]), strengths = list(search.strengths);
  const places = (all, more) => ({x: all.map(one => number(one.kl)), y: all.map(one => number(one.score)), points: true, ...more});
  return [
    el('header', null, el('h1', null, text(data.title)),
       el('p', null, el('b', null, text(data.model)), layers.length ? ', method ' + text(at(data, 'fit', 'method')) +
           `; both sets are farthest apart, in standard deviations, in layer ${text(at(data, 'fit', 'best_layer'))}.` : ''),
       effect.of ? el('p', {class: 'soft'}, `Figures below: the effect of ${text(effect.of)}.`) : null,
       el('div', {class: 'tiles'},
          entries(effect.scores).map(([name, one]) => tile(name, significant(number(one.after)),
              `before ${significant(number(one.before))} ` + (kUnits[one.kind] ?? ''))),
          number(effect.neutral_kl) === null ? null : tile('divergence', significant(effect.neutral_kl), 'nat a token on neutral texts'),
          number(effect.neutral_tokens_kept) === null ? null : tile('tokens kept', fixed(effect.neutral_tokens_kept) + ' %', 'of neutral continuations'),
          health.map(([name, value]) => tile(name.replaceAll('_', ' '), significant(number(at(effect, 'health', 'after', name))),
              'before ' + significant(value))))),
    layers.length ? section('Layer by layer', el('p', {class: 'soft'}, 'Separation and distance are those of prompts that the direction was not fitted on (cross-validation).'),
        el('div', {class: 'charts'},
           chart('Separation', '', '%', [line('accuracy', 'right side of the middle', 0), line('auc', 'pairs in the right order', 1)],
                 {low: 0, high: 100}),
           chart('Distance', 'Of the two means, along the direction, in standard deviations.', 'deviations', [line('effect', '', 2)]),
           chart('Size', 'Length of the direction, relative to the states that it is added to.', 'share', [line('size', '', 3)], {low: 0}))) : null,
    trials.length ? section('What was tried', el('p', {class: 'soft'}, `${list(search.trials).length} trials; those that are not shown lost ` +
        `too much, had answers that went round or broke off, or were known to be no better than another before they were measured. Taken: trial ${text(search.chosen)}. Before: ${significant(number(search.before))}.`),
        el('div', {class: 'charts'},
           figure('Score and loss', 'On the prompts of the search; lower left is better unless the score is to rise.',
                  lineChart({series: [places(trials, {name: 'trials', colour: 1, cloud: true}), places(tried, {name: 'none is better in both', colour: 0})],
                             xLabel: 'divergence on neutral texts, nat a token', yLabel: text(search.scorer), description: 'Pareto front'})),
           figure('Strength', 'Of the change that was taken.',
                  lineChart({series: [{x: strengths.map(one => number(one.layer)), y: strengths.map(one => number(one.strength)), points: true, colour: 2}],
                             xLabel: 'layer', yLabel: 'strength', description: 'strength by layer'})))) : null,
    list(effect.texts).length ? section('In words', el('div', {class: 'cards'}, effect.texts.map(one => el('div', {class: 'card'},
        el('p', null, el('b', null, text(one.prompt))),
        ['before', 'after'].map(when => el('div', {class: 'said'}, el('span', {class: 'tag'}, when), el('span', null, text(one[when])))))))) : null,
    change.length ? section('Weights', scroll('table of the weights', 'card ', el('table', null,
        el('thead', null, el('tr', null, ['weight', '‖ΔW‖/‖W‖', text(data.left, 'left')].map(name => heading(name)))),
        el('tbody', null, change.map(one => el('tr', null, el('td', null, text(one.weight)),
            el('td', null, significant(number(one.relative_norm))), el('td', null, significant(number(one.left))))))))) : null,
    text(data.command) ? section('To do it again', el('pre', null, text(data.command))) : null,
  ];
}

// page.html calls it, behind all scripts.
function draw() {
  const pages = {trace: tracePage, direction: directionPage, quality: qualityPage};
  document.title = 'emend: ' + (data.page === 'direction' ? text(data.title) : data.page === 'trace' ? 'causal tracing'
      : data.page === 'quality' ? 'editors compared' : text(results.editor, 'edits'));
  kWidth = phone.matches ? 300 : 480;
  const main = document.getElementById('main');
  main.replaceChildren();
  fill(main, null, (pages[data.page] ?? reportPage)());
}
phone.onchange = () => {
  if (matchMedia('print').matches) return;
  const open = [...document.querySelectorAll('details')].map(one => one.open);
  draw();
  document.querySelectorAll('details').forEach((one, i) => one.open = open[i]);
};
// On paper everything is shown.
let closed = [];
addEventListener('beforeprint', () => {
  closed = [...document.querySelectorAll('details:not([open])')];
  closed.forEach(one => one.open = true);
});
addEventListener('afterprint', () => closed.forEach(one => one.open = false));
