"""What `forebay trajectories info` prints: the figures of `forebay.trajectory.summary` as people read them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import click

from forebay.cli import one_line, size_text

__all__ = ["show_info", "show_table"]

_NUMBERS_A_LINE = 8


def show_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    lines = [list(head), *([one_line(cell) for cell in row] for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    for line in lines:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def show_info(described: dict[str, Any]) -> None:
    ranks = f", {described['ranks']} ranks" if described["ranks"] > 1 else ""
    facts = {"directory": described["path"], "kind": described["kind"] + ranks}
    created = [one["created_at"] for one in described["directories"] if one.get("created_at")]
    if created:
        facts["created"] = _between([min(created), max(created)])
    facts["on disk"] = size_text(described["bytes_on_disk"])
    for name, value in facts.items():
        click.echo(f"{name:<14}{one_line(value)}")
    for part, figures in described["parts"].items():
        if len(described["parts"]) > 1:
            click.echo(f"\npart {one_line(part)}")
        _show_part(figures)
    if described.get("missing"):
        click.echo(f"\n{described['missing']:,} trajectories are in the index and have no file")


def _show_part(figures: dict[str, Any]) -> None:
    ids = figures["ids"]
    facts = {"trajectories": f"{figures['trajectories']:,}" + (f", ids {ids[0]} to {ids[1]}" if ids else "")}
    if ids:
        steps, envs = (_span(figures[name]) for name in ("lengths", "envs"))
        facts["each"] = f"{steps} steps of {envs} environments"
        facts["transitions"] = f"{figures['transitions']:,} to draw, of {figures['steps']:,} steps"
        names = ("reward_sum", "reward_per_trajectory", "reward_per_transition")
        total, per_trajectory, per_transition = (
            "?" if figures[name] is None else f"{figures[name]:g}" for name in names
        )
        facts["rewards"] = f"{total} in all, {per_trajectory} a trajectory, {per_transition} a transition"
    if "bytes" in figures:
        facts["size"] = f"{size_text(figures['bytes'])} in {figures['segments']:,} segments"
    if figures.get("added_at"):
        facts["added"] = _between(figures["added_at"])
    if figures.get("left_out_damaged"):
        facts["damaged"] = f"{figures['left_out_damaged']:,} trajectories are left out; see verify"
    if figures.get("differs"):
        facts["differs"] = figures["differs"]
    for name, value in facts.items():
        click.echo(f"{name:<14}{one_line(value)}")
    if figures["fields"]:
        click.echo()
        show_table(
            ["field", "dtype", "shape"], [[one["name"], one["dtype"], str(one["shape"])] for one in figures["fields"]]
        )
    for name, moments in figures["statistics"].items():
        unusable = f", {moments['not_finite']:,} values not finite" if moments["not_finite"] else ""
        click.echo(f"\n{one_line(name)} over {moments['count']:,} transitions{unusable}")
        for what in ("mean", "std"):
            numbers = ["-" if value is None else f"{value:.4g}" for value in moments[what]]
            for start in range(0, len(numbers), _NUMBERS_A_LINE):
                label = what if not start else ""
                click.echo(f"  {label:<5}" + "".join(f"{one:>12}" for one in numbers[start : start + _NUMBERS_A_LINE]))


def _span(values: Sequence[int]) -> str:
    least, most = values
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _between(seconds: Sequence[float]) -> str:
    first, last = (_date(one) for one in seconds)
    return first if first == last else f"{first} to {last}"


def _date(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(sep=" ", timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return "at an impossible time"
