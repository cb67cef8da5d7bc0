"""The report of a run: one self-contained HTML page with curves as inline SVG, and some groups as text.

Pure: records in, text out. No script, no font, no image is fetched; the page opens from a disk without a network. The
same function draws the curve that the README shows.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Curve", "SampledGroup", "StepRecord", "chart", "report", "reward_chart"]


@dataclass(frozen=True)
class SampledGroup:
    """One group to look at: a prompt, its right answer, and what was said with which reward."""

    task: str
    step: int
    prompt: str
    answer: str
    responses: Sequence[tuple[str, float]]


@dataclass(frozen=True)
class StepRecord:
    """What one train step was like."""

    step: int
    reward: Mapping[str, float]  # mean raw reward by task
    staleness: float
    length: Mapping[str, float]  # mean response tokens by task
    tokens_per_s: float
    seconds: float
    in_flight: int
    loss: float = math.nan
    groups: Sequence[SampledGroup] = field(default=())


@dataclass(frozen=True)
class Curve:
    """A line of a chart."""

    name: str
    points: Sequence[tuple[float, float]]


COLOURS = ("#2563c9", "#c2570c", "#12825b", "#8a3fb0")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 240, 52, 96, 34, 30


def smoothed(points: Sequence[tuple[float, float]], window: int) -> list[tuple[float, float]]:
    """The mean of the last `window` values at every point."""
    values = [value for _, value in points]
    return [
        (x, sum(values[max(0, i - window + 1) : i + 1]) / len(values[max(0, i - window + 1) : i + 1]))
        for i, (x, _) in enumerate(points)
    ]


def chart(title: str, unit: str, curves: Sequence[Curve], *, top: float | None = None, window: int = 10) -> str:
    """A line chart as SVG: every value as a faint dot, the mean of the last steps as a line, named at its end."""
    drawn = [
        Curve(curve.name, [(x, y) for x, y in curve.points if math.isfinite(y)]) for curve in curves if curve.points
    ]
    xs = [x for curve in drawn for x, _ in curve.points] or [0.0, 1.0]
    ys = [y for curve in drawn for _, y in curve.points] or [0.0, 1.0]
    low_x, high_x = min(xs), max(max(xs), min(xs) + 1)
    high_y = top if top is not None else _nice(max(ys))

    def place(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + (x - low_x) / (high_x - low_x) * (_WIDTH - _LEFT - _RIGHT)
        return across, _HEIGHT - _BOTTOM - min(max(y / high_y, 0.0), 1.0) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(title)}" '
        'xmlns="http://www.w3.org/2000/svg" font-family="system-ui, sans-serif" font-size="12">',
        f'<text x="{_LEFT}" y="18" font-size="14" font-weight="600" fill="currentColor">{html.escape(title)}</text>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        _, y = place(low_x, share * high_y)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" '
            f'stroke-opacity="{0.35 if share == 0 else 0.12}"/>'
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="currentColor" fill-opacity="0.7">'
            f"{_number(share * high_y)}</text>"
        )
    for share in (0.0, 0.5, 1.0):
        x, _ = place(low_x + share * (high_x - low_x), 0)
        step = round(low_x + share * (high_x - low_x))
        label = f"step {step}" if share == 0 else f"{step}"
        parts.append(
            f'<text x="{x:.1f}" y="{_HEIGHT - 8}" text-anchor="middle" fill="currentColor" fill-opacity="0.7">'
            f"{label}</text>"
        )
    ends: list[tuple[float, str, str]] = []
    for curve, colour in zip(drawn, COLOURS, strict=False):
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.3" fill="{colour}" fill-opacity="0.25"/>'
            for x, y in (place(*point) for point in curve.points)
        ]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in smoothed(curve.points, window)))
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2" stroke-linejoin="round"/>'
        )
        last_x, last_y = smoothed(curve.points, window)[-1]
        ends.append((place(last_x, last_y)[1], colour, f"{curve.name} {_number(last_y)}{unit}"))
    below = -math.inf
    for y, colour, text in sorted(ends):  # names at the ends of their lines, moved apart where they would meet
        below = max(y + 4, below + 14)
        parts.append(
            f'<text x="{_WIDTH - _RIGHT + 8}" y="{below:.1f}" fill="{colour}">{html.escape(text.strip())}</text>'
        )
    return "\n".join([*parts, "</svg>"])


def _nice(value: float) -> float:
    if not value > 0 or not math.isfinite(value):
        return 1.0
    scale = 10.0 ** math.floor(math.log10(value))
    return next(step * scale for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if step * scale >= value)


def _number(value: float) -> str:
    if abs(value) >= 1_000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if value == round(value) and abs(value) >= 2 else f"{value:.2f}".rstrip("0").rstrip(".")


def reward_chart(records: Sequence[StepRecord], *, standalone: bool = False) -> str:
    """The curve that matters; `standalone`: with a ground of its own, for a file that is shown anywhere."""
    drawn = chart("Mean reward by task", "", _by_task(records, "reward"), top=1.0)
    if standalone:
        opening, rest = drawn.split("\n", 1)
        ground = f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="8" fill="#f6f8fa"/>'
        drawn = opening.replace("<svg ", '<svg color="#1c2430" ') + "\n" + ground + "\n" + rest
    return drawn


def _by_task(records: Sequence[StepRecord], name: str) -> list[Curve]:
    tasks = list(dict.fromkeys(task for record in records for task in getattr(record, name)))
    return [
        Curve(task, [(record.step, getattr(record, name)[task]) for record in records if task in getattr(record, name)])
        for task in tasks
    ]


def report(
    title: str,
    records: Sequence[StepRecord],
    ledger: Mapping[str, Mapping[str, int]],
    reasons: Mapping[str, Mapping[str, int]],
    facts: Mapping[str, str],
    *,
    notes: Sequence[str] = (),
) -> str:
    """The page."""
    throughput = [Curve("tokens/s", [(record.step, record.tokens_per_s) for record in records])]
    age = [Curve("staleness", [(record.step, record.staleness) for record in records])]
    charts = [
        reward_chart(records),
        chart("Staleness of what was trained on (steps)", "", age),
        chart("Response length by task (tokens)", "", _by_task(records, "length")),
        chart("Throughput of the engine (tokens per second)", "", throughput),
    ]
    shown = [group for record in records for group in record.groups]
    sections = [
        f"<h1>{html.escape(title)}</h1>",
        "<dl>" + "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in facts.items()) + "</dl>",
        *(f"<p class=note>{html.escape(note)}</p>" for note in notes),
        '<div class="charts">' + "\n".join(charts) + "</div>",
        "<h2>The ledger, in groups</h2>",
        _ledger_table(ledger, reasons),
        "<h2>Some groups, as they were trained on</h2>",
        *map(_group, shown),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(sections)
        + "\n</body></html>\n"
    )


def _ledger_table(ledger: Mapping[str, Mapping[str, int]], reasons: Mapping[str, Mapping[str, int]]) -> str:
    names = list(next(iter(ledger.values()), {}))
    head = "".join(f"<th>{html.escape(name.replace('_', ' '))}</th>" for name in names)
    rows = []
    for task, line in ledger.items():
        closed = line["issued"] == sum(groups for name, groups in line.items() if name != "issued")
        cells = "".join(f"<td>{line[name]:,}</td>" for name in names)
        rows.append(f"<tr><th>{html.escape(task)}</th>{cells}<td>{'closed' if closed else 'OPEN'}</td></tr>")
    why = [
        f"<li>{html.escape(task)}: {groups:,} left as “{html.escape(reason)}”</li>"
        for task, counts in reasons.items()
        for reason, groups in counts.items()
    ]
    return (
        f'<div class="wide"><table><tr><th></th>{head}<th></th></tr>{"".join(rows)}</table></div>'
        f"<p>For every task, issued is the sum of all the others.</p><ul>{''.join(why)}</ul>"
    )


def _group(group: SampledGroup) -> str:
    answers = "".join(
        f"<li><code>{html.escape(text) or '&nbsp;'}</code>"
        f'<span class="bar"><i style="width:{100 * score:.0f}%"></i></span><b>{score:.2f}</b></li>'
        for text, score in group.responses
    )
    return (
        f"<section><h3>{html.escape(group.task)}, step {group.step}: <code>{html.escape(group.prompt)}</code></h3>"
        f"<p>right: <code>{html.escape(group.answer)}</code></p><ol>{answers}</ol></section>"
    )


_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1c2430; --soft: #f3f5f8; --line: #d8dee6; --bar: #2563c9 }
@media (prefers-color-scheme: dark) {
  :root { --ground: #14181f; --ink: #e3e8ef; --soft: #1d232c; --line: #323b47; --bar: #6ea0ec } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground);
  max-width: 1360px; margin: 2rem auto; padding: 0 1.2rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem } h3 { font-size: 1rem; margin: 0 }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: 0 }
dt { opacity: .7 } dd { margin: 0 }
.note { border-left: 3px solid var(--line); padding-left: .8rem }
.charts { display: grid; gap: 1rem; margin-top: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)) }
.chart { width: 100%; height: auto; background: var(--soft); border-radius: 8px }
.wide { overflow-x: auto } table { border-collapse: collapse } th, td { padding: .25rem .7rem; text-align: right }
tr + tr { border-top: 1px solid var(--line) } th:first-child { text-align: left }
section { background: var(--soft); border-radius: 8px; padding: .8rem 1rem; margin: .8rem 0 }
section p { margin: .2rem 0 .4rem } ol { margin: 0; padding: 0; list-style: none;
  display: grid; grid-template-columns: repeat(auto-fill, minmax(240px, 1fr)); gap: .2rem 1.4rem }
li { display: flex; align-items: center; gap: .6rem } li code { flex: 1; overflow-wrap: anywhere }
ul li { display: list-item }
.bar { width: 4rem; height: .5rem; background: var(--line); border-radius: 4px; overflow: hidden }
.bar i { display: block; height: 100%; background: var(--bar) }
code { font-family: ui-monospace, monospace }
"""
