"""How `forebay trajectories` prints the results of `forebay.trajectory` for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import click

from forebay.cli.show import one_line, show_facts, show_table
from forebay.core.report import date_text, size_text
from forebay.trajectory.checkpoint import MAIN
from forebay.trajectory.exchange import Exported, Imported
from forebay.trajectory.outcome import Outcome

__all__ = ["print_export", "print_import", "print_info", "print_merge", "print_sample", "print_split"]

_NUMBERS_A_LINE = 8
_MOST_NAMED = 10


# --- inspect ------------------------------------------------------------------------------------------


def print_info(described: dict[str, Any]) -> None:
    ranks = f", {described['ranks']} ranks" if described["ranks"] > 1 else ""
    facts = {"directory": described["path"], "kind": described["kind"] + ranks}
    created = [one["created_at"] for one in described["directories"] if one.get("created_at")]
    if created:
        facts["created"] = _between([min(created), max(created)])
    facts["on disk"] = size_text(described["bytes_on_disk"])
    show_facts(facts)
    for part, figures in described["parts"].items():
        if len(described["parts"]) > 1:
            click.echo(f"\npart {one_line(part)}")
        show_facts(dict(_part_facts(figures)))
        _print_fields(figures)
    if described.get("missing"):
        click.echo(f"\n{described['missing']:,} trajectories are listed in the index but have no file")


def _part_facts(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    ids = figures["ids"]
    yield "trajectories", f"{figures['trajectories']:,}" + (f", ids {ids[0]} to {ids[1]}" if ids else "")
    if ids:
        steps, envs = (_span(figures[name]) for name in ("lengths", "envs"))
        yield "each", f"{steps} steps of {envs} environments"
        yield "transitions", f"{figures['transitions']:,} to draw, of {figures['steps']:,} steps"
        names = ("reward_sum", "reward_per_trajectory", "reward_per_transition")
        rewards = ("?" if figures[name] is None else f"{figures[name]:g}" for name in names)
        yield "rewards", "{} in total, {} per trajectory, {} per transition".format(*rewards)
    if "bytes" in figures:
        yield "size", f"{size_text(figures['bytes'])} in {figures['segments']:,} segments"
    if figures.get("added_at"):
        yield "added", _between(figures["added_at"])
    if figures.get("left_out_damaged"):
        yield "damaged", f"{figures['left_out_damaged']:,} trajectories are left out; see verify"
    if figures.get("differs"):
        yield "differs", figures["differs"]


def _print_fields(figures: dict[str, Any]) -> None:
    if figures["fields"]:
        rows = [[one["name"], one["dtype"], str(one["shape"])] for one in figures["fields"]]
        click.echo()
        show_table(["field", "dtype", "shape"], rows)
    for name, moments in figures["statistics"].items():
        unusable = f", {moments['not_finite']:,} values are not finite" if moments["not_finite"] else ""
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
    first, last = map(date_text, seconds)
    return first if first == last else f"{first} to {last}"


def print_sample(found: dict[str, Any]) -> None:
    rows = [[name, str(one["shape"]), one["dtype"]] for name, one in found["keys"].items()]
    show_table(["key", "shape", "dtype"], rows)
    click.echo(
        f"\n{found['num_chunks']:,} rows out of {found['transitions']:,} of {found['trajectories']:,} trajectories: "
        f"{found['rows_per_second']:,.0f} rows/s (median of {found['draws'] - 1} draws: {found['median_ms']:.2f} ms, "
        f"first draw: {found['first_ms']:.2f} ms)"
    )


# --- write --------------------------------------------------------------------------------------------


def print_merge(done: Outcome) -> None:
    _say(done, "merge", "merged", f"{_amount(done)} of {len(done.sources)} directories into {done.target}")
    for part, count in done.parts.items():
        if part != MAIN:
            click.echo(f"part {one_line(part)}: {count:,} trajectories")
    if done.rewritten:
        _say(done, "rewrite", "rewrote", f"{done.rewritten:,} trajectories, because their fields change")
    if done.left_out:
        _say(done, "leave out", "left out", f"{done.left_out:,} damaged trajectories")
    for directory in done.removed:
        _say(done, "remove", "removed", directory)


def print_split(done: Outcome) -> None:
    _say(done, "split", "split", f"{_amount(done)} off into {done.target}")
    stay = "stay" if done.done else "would stay"
    click.echo(f"{done.remaining:,} trajectories {stay} in {one_line(done.sources[0])}")


def print_import(done: Imported) -> None:
    amount = f"{done.trajectories:,} trajectories ({size_text(done.source_bytes)})"
    _say(done, "import", "imported", f"{amount} into {done.target}")
    if done.missing:
        click.echo(f"{done.missing:,} more are listed in the index but have no file")
    _print_names({"not in the index": done.unlisted, "not read": done.skipped, "not imported": done.ignored})


def print_export(done: Exported) -> None:
    amount = f"{done.trajectories:,} trajectories with {done.transitions:,} transitions"
    _say(done, "export", "exported", f"{amount} to {done.target}")
    _print_names({"RLinf does not see": done.left_out, "stored as larger integers": done.widened})


def _say(done: Outcome | Imported | Exported, would: str, did: str, what: str) -> None:
    click.echo(f"{did if done.done else f'would {would}'} {one_line(what)}")


def _amount(done: Outcome) -> str:
    return f"{done.trajectories:,} trajectories ({done.transitions:,} transitions, {size_text(done.bytes)})"


def _print_names(lists: dict[str, list[str]]) -> None:
    for what, names in lists.items():
        if names:
            more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
            click.echo(f"{what}: {one_line(', '.join(names[:_MOST_NAMED]))}{more}")
