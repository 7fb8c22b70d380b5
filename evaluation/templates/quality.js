// Draws the comparison of several runs on the same facts (quality.h), with what page.js has.
const kAlongTheWay = [['all', 'Efficacy of all facts so far', '%'], ['first', 'Efficacy of the first 100 facts', '%'],
                      ['paraphrase', 'Paraphrases of a sample', '%'], ['neighborhood', 'Neighbours of the sample', '%'],
                      ['free.edit_begins', 'Free text begins with the answer', '%'],
                      ['free.paraphrase_begins', 'The same after paraphrases', '%'], ['health.lambada', 'LAMBADA', '%'],
                      ['health.wikitext2_perplexity', "Perplexity of the health data's text", 'perplexity'],
                      ['seconds', 'Targets and insertion', 'seconds'], ['peak_bytes.host', 'Peak memory of the host', 'GiB']];
const figureValue = (row, key, part = 'figures') => number(at(row, part, key, 'value'));
const rangeOf = figure => list(at(figure, 'range') ?? at(figure, 'ci95'));
function inUnit(value, unit) {
  if (unit === 'B') return bytes(value);
  return fixed(value, unit === '' ? 0 : unit === '%' ? 1 : unit === 'nat' ? 4 : 2);
}
function figureCell(row, column, part, best) {
  const figure = at(row, part, column.key), value = number(at(figure, 'value')), range = rangeOf(figure);
  const ends = range.map(end => fixed(end, column.unit === '%' ? at(figure, 'range') ? 1 : 0 : column.unit === 'nat' ? 4 : 2));
  return el('td', {'data-metric': `${text(row.name)}|${column.key}`, 'data-value': value},
            el(value !== null && value === best ? 'b' : 'span', null, value === null ? '–' : inUnit(value, column.unit)),
            at(figure, 'differs') === true ? el('abbr', {title: 'more than chance beside ' + text(data.compared_with)}, '*') : null,
            ends.length === 2 && column.unit !== 'B' ? el('div', {class: 'soft small'}, ends.join(' – ')) : null);
}
// Of the runs, not of the unedited model.
function bestOf(rows, column, part) {
  const values = rows.filter(row => row.kind === 'editor').map(row => figureValue(row, column.key, part)).filter(value => value !== null);
  return column.key === 'edits' || most(values) === least(values) ? null : column.higher ? most(values) : least(values);
}
function qualityTable(columns, part, numbers, collapse) {
  const rows = list(data.rows).filter(row => !collapse || row.kind === 'editor' || entries(at(row, part)).length);
  const best = columns.map(column => bestOf(rows, column, part));
  const collapsed = row => {
    const edits = number(at(row, 'collapse', 'edits')), last = list(row.lifelong).at(-1);
    return el('td', {class: edits === null ? null : 'reason', title: text(at(row, 'collapse', 'why')) || null},
              edits === null ? last ? 'not by ' + text(last.edits) : '–' : text(edits));
  };
  const cells = row => entries(at(row, part)).length
      ? [columns.map((column, i) => figureCell(row, column, part, row.kind === 'editor' ? best[i] : null)), collapse ? collapsed(row) : null]
      : el('td', {class: row.state === 'failed' ? 'text reason' : 'text soft', colspan: columns.length + (collapse ? 1 : 0)}, text(row.state));
  return scroll(collapse ? 'figures at the last measurement' : 'figures at the end', 'card ', el('table', {class: 'wide'},
      el('thead', null, el('tr', null, heading('run'), columns.map(column => el('th', {scope: 'col'},
          el('abbr', {title: column.definition}, text(column.head)))), collapse ? heading('collapses at') : null)),
      el('tbody', null, rows.map(row => el('tr', {class: row.kind === 'editor' ? null : 'soft'},
          el('td', null, numbers.has(row) ? el('span', {class: 'soft'}, numbers.get(row) + ' ') : null, text(row.name)), cells(row))))));
}
// Free text upwards, damage to the right: what should not have changed and has.
function damageChart(numbers) {
  const damage = 'free.neighborhood_ten_tokens_kept', spoken = 'free.paraphrase_begins', edited = 'free.edit_begins';
  const said = list(data.rows).some(row => figureValue(row, spoken) !== null) ? spoken : edited;
  // The unedited model has changed nothing.
  const lost = row => row.kind === 'unedited' ? 0 : figureValue(row, damage) === null ? null : 100 - figureValue(row, damage);
  const rows = list(data.rows).filter(row => row.kind !== 'mean' && lost(row) !== null && figureValue(row, said) !== null);
  if (!rows.some(row => row.kind === 'editor')) return null;
  const place = row => `${lost(row)} ${figureValue(row, said)}`;
  const series = rows.map((row, i) => {
    const together = rows.filter(other => place(other) === place(row)), kept = rangeOf(at(row, 'figures', damage));
    return {name: `${numbers.get(row)} ${text(row.name)}`, mark: together[0] === row ? together.map(other => numbers.get(other)).join(', ') : '',
            colour: row.kind === 'editor' ? i % 7 : 7, x: [lost(row)], y: [figureValue(row, said)], points: true, cloud: true,
            xRange: kept.map(end => 100 - end).reverse(), yRange: rangeOf(at(row, 'figures', said))};
  });
  return figure('Free text against damage', 'Each point a run, with 95 % intervals; higher and further left is better.',
      lineChart({series, xLabel: "neighbours whose ten tokens changed, %", xLow: 0, xHigh: 100,
                 yLabel: said === spoken ? 'paraphrases, %' : 'edited prompts, %', low: 0, high: 100,
                 description: 'Free text against damage'}));
}
function sequenceCharts() {
  const runs = list(data.rows).filter(row => list(row.lifelong).length);
  return kAlongTheWay.map(([key, title, unit]) => {
    const path = key.split('.'), scale = unit === 'GiB' ? 2 ** -30 : 1;
    const series = runs.map((row, i) => ({name: text(row.name), ...alongEdits(list(row.lifelong), path, scale), colour: i % 8}))
        .filter(one => one.x.length);
    return series.length ? figure(title, '', lineChart({series, xLabel: 'edits so far', yLabel: unit, description: title,
                                                        low: 0, ...(unit === '%' && key !== 'health.lambada' ? {high: 100} : {})})) : null;
  });
}
// Every measurement of one run.
function measurements(row, columns) {
  const cell = (entry, column) => {
    const value = number(at(entry, ...column.key.split('.')));
    return el('td', null, value === null ? '–' : inUnit(column.key === 'seconds' ? value / Math.max(1, entry.edits) : value, column.unit));
  };
  return el('details', null, el('summary', null, text(row.name)), scroll('measurements of ' + text(row.name), '', el('table', null,
      el('thead', null, el('tr', null, columns.map(column => heading(text(column.head))))),
      el('tbody', null, list(row.lifelong).map(entry => el('tr', null, columns.map(column => cell(entry, column))))))));
}
function qualityPage() {
  document.getElementById('main').className = 'broad';
  const rows = list(data.rows), columns = list(data.columns), sequence = list(data.lifelong_columns);
  const numbers = new Map(rows.filter(row => row.kind !== 'mean').map((row, i) => [row, i + 1]));
  const runs = rows.filter(row => row.kind === 'editor'), charts = sequence.length ? sequenceCharts() : [];
  const notes = rows.map(row => [row, [row.state === 'failed' ? 'failed: ' + text(row.note) : text(row.note),
                                       number(at(row, 'collapse', 'edits')) === null ? '' : `collapses at ${row.collapse.edits} edits: ${text(row.collapse.why)}`]
                                          .filter(part => part).join('; ')]).filter(([, note]) => note);
  const model = text(at(data, 'model', 'path')).split('/').filter(part => part).pop() ?? '';
  const commands = runs.filter(row => list(row.command).length);
  return [
    el('header', null, el('h1', null, 'Editors compared'),
       el('p', null, el('b', null, plural(runs.length, 'run')), ' on the same ', el('b', null, plural(text(data.facts, '?'), 'fact')), ' in ',
          el('b', null, model), `, protocol ${text(data.protocol)}, ${text(data.dtype)}.`)),
    columns.length ? section('At the end', el('div', {class: 'charts'}, damageChart(numbers)),
        el('p', {class: 'soft small'}, 'Figures with 95 % intervals; of means over seeds the lowest and the highest. Bold: the best run. ' +
            (text(data.compared_with) ? `*: the difference to ${text(data.compared_with)}, fact by fact, is more than chance.` : '')),
        qualityTable(columns, 'figures', numbers, false)) : null,
    sequence.length ? section('On the way', el('p', {class: 'soft'}, 'A sequence has collapsed at the first measurement at which less than 80 % of the ' +
        'first facts hold, or LAMBADA is below four fifths of the unedited model\u2019s (without that, of the first measurement\u2019s).'),
        el('div', {class: 'charts'}, charts), el('h3', {class: 'gap'}, 'At the last measurement'), qualityTable(sequence, 'last', numbers, true),
        rows.filter(row => list(row.lifelong).length).map(row => measurements(row, sequence))) : null,
    notes.length ? section('Remarks', notes.map(([row, note]) => el('p', null, el('b', null, text(row.name)), ': ',
        el('span', {class: row.state === 'failed' ? 'reason' : null}, note)))) : null,
    section('Definitions', el('dl', null, [...columns, ...sequence].map(column => [el('dt', null, text(column.head)), el('dd', null, text(column.definition))]))),
    commands.length ? section('To do it again', commands.map(row => el('details', null, el('summary', null, text(row.name)),
        el('pre', null, list(row.command).map(word => text(word)).join(' '))))) : null,
  ];
}
