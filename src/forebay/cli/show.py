"""How the commands print: JSON, or facts, tables and findings without control characters; and progress bars."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import click
import msgspec

from forebay.core.report import Finding, Level, Progress

T = TypeVar("T")
_JSON = "forebay.json"
_COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.ERROR: "red"}


def _remember_json(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    ctx.meta[_JSON] = value


path_argument = click.argument("path", type=click.Path(path_type=Path))
json_option = click.option(
    "--json", is_flag=True, expose_value=False, callback=_remember_json, help="Print the result as JSON."
)


def one_line(value: object) -> str:
    """A string for a terminal: one line, without control characters.

    >>> one_line("a\\nb \\x1b[2J")
    'a b \\\\x1b[2J'
    """
    joined = " ".join(str(value).splitlines())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in joined)


def result(value: T, for_people: Callable[[T], object]) -> None:
    """Print the result of a command: as JSON if `--json` was given, otherwise with `for_people`."""
    if click.get_current_context().meta.get(_JSON):
        click.echo(json.dumps(msgspec.to_builtins(value), indent=2))
    else:
        for_people(value)


def facts(values: Mapping[str, object]) -> None:
    """Print a line for each fact: its name and its value."""
    for name, value in values.items():
        click.echo(f"{name:<14}{one_line(value)}")


def table(head: Sequence[str], rows: Sequence[Sequence[str | int]]) -> None:
    """Print rows under a head; columns of integers are aligned to the right."""
    right = [bool(rows) and isinstance(cell, int) for cell in (rows[0] if rows else head)]
    lines = [list(head), *([f"{cell:,}" if isinstance(cell, int) else one_line(cell) for cell in row] for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    for line in lines:
        cells = (f"{cell:{'>' if r else '<'}{width}}" for cell, width, r in zip(line, widths, right, strict=True))
        click.echo("  ".join(cells).rstrip())


def findings(found: Sequence[Finding]) -> None:
    """Print a line for each finding, and one for its advice."""
    width = max(len(finding.name) for finding in found)
    for finding in found:
        level = click.style(f"{finding.level.value:<8}", fg=_COLOURS[finding.level])
        click.echo(f"{level} {finding.name:<{width}}  {one_line(finding.message)}")
        if finding.advice is not None:
            click.echo(f"{'':<8} {'':<{width}}  -> {one_line(finding.advice)}")


@contextmanager
def progress_bar(label: str) -> Iterator[Progress]:
    """A progress bar on stderr; invisible if stderr is not a terminal."""
    with click.progressbar(length=1, label=label, file=sys.stderr, hidden=not sys.stderr.isatty()) as bar:

        def update(done: int, total: int) -> None:
            bar.length = total
            bar.update(done - bar.pos)

        yield update
