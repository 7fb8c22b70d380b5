"""What notebooks show of traces, facts, runs, and the difference between two models."""
import math
from html import escape

from ._emend import FactSet, Run, Trace
from ._errors import ArgumentError


def _cell(value, lowest, largest, title):
    style = "padding:0;min-width:1.1em;height:1.1em"
    if value is None:
        return f'<td title="{escape(title)}: hidden" style="{style}"></td>'
    share = 0 if largest <= lowest else min(1.0, max(0.0, (value - lowest) / (largest - lowest)))
    return f'<td title="{escape(title)}: {value:.3g}" style="{style};background:rgba(33,102,172,{share:.3f})"></td>'


def _grid(rows, names, columns, from_zero=True):
    """A heat map; the colour is each value's place between the lowest (or 0) and the largest. None is hidden."""
    finite = [value for row in rows for value in row if value is not None and math.isfinite(value)]
    lowest, largest = 0 if from_zero else min(finite, default=0), max(finite, default=0)
    head = "".join(f'<th style="font-weight:normal;writing-mode:vertical-rl">{escape(name)}</th>' for name in columns)
    body = "".join(f'<tr><th style="font-weight:normal;text-align:right">{escape(name)}</th>' +
                   "".join(_cell(value, lowest, largest, f"{name} | {column}") for value, column in zip(row, columns)) + "</tr>"
                   for name, row in zip(names, rows))
    return f'<table style="border-collapse:collapse;font-size:80%"><tr><th></th>{head}</tr>{body}</table>'


def _table(head, rows):
    line = lambda cells, tag: "<tr>" + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"
    return "<table>" + line(head, "th") + "".join(line(row, "td") for row in rows) + "</table>"


def _trace(trace):
    """Of every row: attention averaged over its heads, and the length of every other captured vector."""
    several = trace.tokens if trace.tokens and isinstance(trace.tokens[0], list) else [trace.tokens]
    parts = []
    for row, tokens in enumerate(several):
        lengths = []
        for site in trace.sites:
            value = trace[site][row].detach().float().cpu()
            if site.endswith(("attn_scores", "attn_pattern")):
                mean = value[:, :len(tokens), :len(tokens)].mean(0).tolist()
                shown = [[None if score == -math.inf else score for score in scores] for scores in mean]
                parts.append(f"<div>{escape(site)}, mean of {len(value)} heads</div>" +
                             _grid(shown, tokens, tokens, from_zero=site.endswith("attn_pattern")))
            else:
                lengths.append((site, value[:len(tokens)].flatten(1).norm(dim=-1).tolist()))
        if lengths:
            parts.append("<div>norms</div>" + _grid([norms for _, norms in lengths], [site for site, _ in lengths], tokens))
        parts.append("" if trace.sites else f"<div>{escape(' | '.join(tokens))}</div>")
    return "".join(parts)


def _facts(facts):
    shown = _table(["prompt", "subject", "new answer"], [(f.full_prompt, f.subject, f.target_new) for f in facts.facts[:50]])
    return shown if len(facts) <= 50 else f"{shown}<div>and {len(facts) - 50} more</div>"


def _run(run):
    folder = f"<div>{escape(run.folder)}/report.html</div>" if run.folder else ""
    return f"<pre>{escape(run.summary)}</pre>{folder}"


class Diff:
    """How two models differ: .weights is [(name, change's norm, share of the weight's norm)]; .others those that cannot be
    compared, [(name, shape before, shape after)], None where a model has no such weight."""

    def __init__(self, before, after):
        for name, model in (("before", before), ("after", after)):
            if not hasattr(model, "parameters"):
                got, expected = f"{name} is {type(model).__name__}", "a model that emend.load gave"
                raise ArgumentError(f"diff: {got}; expected {expected}", "invalid argument", "diff", got, expected)
        ours, theirs = before.parameters(), after.parameters()
        self.weights, self.others = [], []
        for name in {**ours, **theirs}:
            shapes = [list(each[name].shape) if name in each else None for each in (ours, theirs)]
            if shapes[0] != shapes[1]:
                self.others.append((name, *shapes))
                continue
            old = ours[name]
            change = (theirs[name].detach().to(device="cpu", copy=True).double() - old.detach().cpu().double()).norm().item()
            if change:
                self.weights.append((name, change, change / max(old.detach().cpu().double().norm().item(), 1e-30)))

    def _rows(self):
        return [*((name, f"{change:.4g}", f"{share:.2%}") for name, change, share in self.weights),
                *((name, "of another shape" if before and after else "in one model alone", f"{before or 'none'}, {after or 'none'}")
                  for name, before, after in self.others)]

    def __repr__(self):
        return "\n".join(f"{name}: {change} ({share})" for name, change, share in self._rows()) or "no difference"

    def _repr_html_(self):
        rows = self._rows()
        return _table(["weight", "change", "of its norm"], rows) if rows else "no difference"


def diff(before, after):
    """The weights in which two loaded models differ, and by how much; those of other shapes or names are listed."""
    return Diff(before, after)


Trace._repr_html_, FactSet._repr_html_, Run._repr_html_ = _trace, _facts, _run
