"""`forebay trajectories`: inspect, check, merge, split and convert directories of trajectories.

Commands that write refuse an existing target, change a source only after the result is complete and verified, and
change nothing with `--dry-run`. Exit code 3 means damaged data. `forebay.trajectory` does the work.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import click

from forebay.cli import DAMAGED, show
from forebay.core.report import Level, date_text, first_of, size_text
from forebay.errors import InvalidInput
from forebay.trajectory import TrajectoryReplayBuffer
from forebay.trajectory.checkpoint import MAIN
from forebay.trajectory.checkup import verify as verify_directory
from forebay.trajectory.exchange import Exported, Imported, export_directory, import_directory
from forebay.trajectory.lookup import find_trajectory
from forebay.trajectory.outcome import Outcome
from forebay.trajectory.page import trajectory_page
from forebay.trajectory.summary import info as describe
from forebay.trajectory.tools import merge as merge_directories
from forebay.trajectory.tools import split as split_directory

_SAMPLE_S, _LEAST_DRAWS, _MOST_DRAWS = 0.5, 5, 1000
_NUMBERS_A_LINE = 8

_Command = TypeVar("_Command", bound=Callable[..., Any])

_dry_run = click.option("--dry-run", is_flag=True, help="Show what would be done, and change nothing.")
_part = click.option("--part", default=MAIN, show_default=True, help="Which buffer, if a checkpoint has several.")


def _directory(name: str, meaning: str, *, multiple: bool = False) -> Callable[[_Command], _Command]:
    kind = click.Path(path_type=Path)
    return click.option(name, type=kind, required=True, multiple=multiple, help=meaning, metavar="DIR")


class _Warnings(logging.Handler):
    """Prints the warnings of the library as lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(f"forebay: {show.one_line(record.getMessage())}", err=True)


@click.group()
@click.pass_context
def trajectories(ctx: click.Context) -> None:
    """Inspect, check, merge, split and convert trajectories.

    All commands work on directories. A directory is a checkpoint, a store (auto_save_path), or a directory that
    contains rank_<n>. Some commands also read a directory that RLinf's replay buffer wrote; their help says so.
    """
    logger, handler = logging.getLogger("forebay.trajectory"), _Warnings(logging.WARNING)
    logger.addHandler(handler)
    ctx.call_on_close(lambda: logger.removeHandler(handler))


# --- inspect ------------------------------------------------------------------------------------------


@trajectories.command()
@show.path_argument
@show.json_option
def info(path: Path) -> None:
    """Show what PATH contains.

    Prints counts, fields, rewards, and mean and deviation of states and actions; images are not read. Also reads
    RLinf's directories.
    """
    with show.progress_bar("reading") as progress:
        described = describe(path, progress)
    show.result(described, _print_info)


def _print_info(described: dict[str, Any]) -> None:
    ranks = f", {described['ranks']} ranks" if described["ranks"] > 1 else ""
    facts = {"directory": described["path"], "kind": described["kind"] + ranks}
    created = [one["created_at"] for one in described["directories"] if one.get("created_at")]
    if created:
        facts["created"] = _between([min(created), max(created)])
    facts["on disk"] = size_text(described["bytes_on_disk"])
    show.facts(facts)
    for part, figures in described["parts"].items():
        if len(described["parts"]) > 1:
            click.echo(f"\npart {show.one_line(part)}")
        show.facts(dict(_part_facts(figures)))
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
        show.table(["field", "dtype", "shape"], rows)
    for name, moments in figures["statistics"].items():
        unusable = f", {moments['not_finite']:,} values are not finite" if moments["not_finite"] else ""
        click.echo(f"\n{show.one_line(name)} over {moments['count']:,} transitions{unusable}")
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


@trajectories.command()
@show.path_argument
@click.option("--num-chunks", type=click.IntRange(min=1), default=1024, show_default=True, help="Rows of a batch.")
@click.option("--cache-size", type=click.IntRange(min=0), default=10, show_default=True, help="Trajectories to cache.")
@click.option("--enable-cache", is_flag=True, help="First load the newest trajectories into memory.")
@click.option("--sample-window-size", type=click.IntRange(min=0), default=0, help="Newest trajectories (0: all).")
@click.option("--seed", type=click.IntRange(min=0), default=1234, show_default=True, help="Seed of the draws.")
@show.json_option
def sample(path: Path, num_chunks: int, **options: Any) -> None:
    """Draw batches from PATH and measure the speed.

    Draws as a training does, and prints keys, shapes, dtypes and rows per second. Also reads RLinf's directories.
    Checksums are not checked; `verify` does that.
    """
    with TrajectoryReplayBuffer(**options) as buffer:
        buffer.load_checkpoint(path, verify=False)
        times: list[float] = []
        while len(times) < _LEAST_DRAWS or (sum(times) < _SAMPLE_S and len(times) < _MOST_DRAWS):
            start = time.perf_counter()
            batch = buffer.sample(num_chunks)
            times.append(time.perf_counter() - start)
        typical = median(times[1:])
        found = {
            "path": str(path),
            "trajectories": len(buffer),
            "transitions": buffer.num_transitions,
            "num_chunks": num_chunks,
            "keys": {name: {"shape": shape, "dtype": dtype} for name, shape, dtype in _leaves(batch)},
            "draws": len(times),
            "first_ms": times[0] * 1000,
            "median_ms": typical * 1000,
            "rows_per_second": num_chunks / typical,
        }
    show.result(found, _print_sample)


def _print_sample(found: dict[str, Any]) -> None:
    rows = [[name, str(one["shape"]), one["dtype"]] for name, one in found["keys"].items()]
    show.table(["key", "shape", "dtype"], rows)
    click.echo(
        f"\n{found['num_chunks']:,} rows out of {found['transitions']:,} of {found['trajectories']:,} trajectories: "
        f"{found['rows_per_second']:,.0f} rows/s (median of {found['draws'] - 1} draws: {found['median_ms']:.2f} ms, "
        f"first draw: {found['first_ms']:.2f} ms)"
    )


def _leaves(batch: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, list[int], str]]:
    for name, value in batch.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            yield f"{prefix}{name}", [len(value)], "str"
        else:
            yield f"{prefix}{name}", list(value.shape), str(value.dtype).removeprefix("torch.")


@trajectories.command("show")
@show.path_argument
@click.option("--trajectory", "trajectory_id", type=click.IntRange(min=0), required=True, help="Its id.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The HTML file to write.", metavar="FILE")
@click.option("--rank", type=click.IntRange(min=0), default=None, help="Which rank_<n>, if several have that id.")
@_part
def show_page(path: Path, trajectory_id: int, out: Path, rank: int | None, part: str) -> None:
    """Write an HTML page about one trajectory of PATH.

    The page shows images, curves and numbers; it is one file and needs no network. Also reads RLinf's directories.
    """
    if out.exists():
        raise InvalidInput(f"{out} already exists; name a new file")
    trajectory, facts = find_trajectory(path, trajectory_id, rank=rank, part=part)
    page = trajectory_page(trajectory, title=f"Trajectory {trajectory_id}", facts=facts)
    with out.open("x", encoding="utf-8") as opened:
        opened.write(page)
    click.echo(f"{show.one_line(out)}: {size_text(len(page.encode()))}")


@trajectories.command()
@show.path_argument
@show.json_option
@click.pass_context
def verify(ctx: click.Context, path: Path) -> None:
    """Read all of PATH and check every checksum.

    Checks every rank. Also reads RLinf's directories. A store may be in use at the same time. Exit code 3 if something
    is damaged.
    """
    with show.progress_bar("verifying") as progress:
        findings = verify_directory(path, progress)
    whole = all(finding.level is not Level.ERROR for finding in findings)

    def for_people(_: object) -> None:
        show.findings(findings)
        click.echo(f"{show.one_line(path)}: {'whole' if whole else 'damaged'}")

    show.result({"path": str(path), "whole": whole, "findings": findings}, for_people)
    if not whole:
        ctx.exit(DAMAGED)


# --- write --------------------------------------------------------------------------------------------


def _fills(_: click.Context, __: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    fills = {}
    for value in values:
        name, equals, fill = value.partition("=")
        if not name or not equals:
            raise click.BadParameter(f"{value!r} is not FIELD=VALUE")
        fills[name] = fill
    return fills


@trajectories.command()
@_directory("--source-path", "A directory, or one that contains rank_<n>; may be given several times.", multiple=True)
@_directory("--save-path", "Where to write the merged checkpoint; must not exist.")
@click.option("--copy", is_flag=True, help="Keep the sources; otherwise they are removed after the result is verified.")
@click.option("--fill", multiple=True, callback=_fills, metavar="FIELD=VALUE", help="Value of a field that some lack.")
@click.option("--drop", multiple=True, metavar="FIELD", help="Leave out a field.")
@click.option("--skip-damaged", is_flag=True, help="Leave out damaged trajectories; needs --copy.")
@_dry_run
@show.json_option
def merge(source_path: tuple[Path, ...], save_path: Path, **options: Any) -> None:
    """Merge directories into one checkpoint.

    Also merges all ranks of one directory. Trajectories are interleaved by their ids, for each id in the order of the
    ranks, and numbered again from 0. Fields that differ are refused by name, unless --fill or --drop resolves the
    difference.
    """
    if options["skip_damaged"] and not options["copy"]:
        raise click.UsageError("--skip-damaged needs --copy: damaged data might still be saved from the sources")
    with show.progress_bar("merging") as progress:
        done = merge_directories(list(source_path), save_path, **options, progress=progress)
    show.result(done, _print_merge)


def _print_merge(done: Outcome) -> None:
    _say(done, "merge", "merged", f"{_amount(done)} of {len(done.sources)} directories into {done.target}")
    for part, count in done.parts.items():
        if part != MAIN:
            click.echo(f"part {show.one_line(part)}: {count:,} trajectories")
    if done.rewritten:
        _say(done, "rewrite", "rewrote", f"{done.rewritten:,} trajectories, because their fields change")
    if done.left_out:
        _say(done, "leave out", "left out", f"{done.left_out:,} damaged trajectories")
    for directory in done.removed:
        _say(done, "remove", "removed", directory)


@trajectories.command()
@_directory("--source-path", "A checkpoint or a store.")
@_directory("--save-path", "Where to write the first trajectories; must not exist.")
@click.option("--split-count", type=click.IntRange(min=1), required=True, help="How many, beginning with the oldest.")
@click.option("--copy", is_flag=True, help="Keep the source; otherwise it keeps only the other trajectories.")
@_part
@_dry_run
@show.json_option
def split(source_path: Path, save_path: Path, split_count: int, **options: Any) -> None:
    """Move the first trajectories into a new checkpoint.

    Both sides are complete and can be loaded, and trajectories keep their ids. After an interruption the first ones may
    be on both sides, but never on neither.
    """
    with show.progress_bar("splitting") as progress:
        done = split_directory(source_path, save_path, split_count, **options, progress=progress)
    show.result(done, _print_split)


def _print_split(done: Outcome) -> None:
    _say(done, "split", "split", f"{_amount(done)} off into {done.target}")
    stay = "stay" if done.done else "would stay"
    click.echo(f"{done.remaining:,} trajectories {stay} in {show.one_line(done.sources[0])}")


@trajectories.command("import")
@show.path_argument
@_directory("--save-path", "Where to write the checkpoint; must not exist.")
@_dry_run
@show.json_option
def import_command(path: Path, save_path: Path, dry_run: bool) -> None:
    """Import a directory of RLinf's replay buffer.

    Writes a checkpoint and leaves PATH unchanged. Needs torch. PATH may contain rank_<n>; ranks are joined as in a
    merge. Reads one trajectory into memory at a time. Pickles (.pkl) are refused, because reading one can run code.
    """
    with show.progress_bar("importing") as progress:
        done = import_directory(path, save_path, dry_run=dry_run, progress=progress)
    show.result(done, _print_import)


def _print_import(done: Imported) -> None:
    amount = f"{done.trajectories:,} trajectories ({size_text(done.source_bytes)})"
    _say(done, "import", "imported", f"{amount} into {done.target}")
    if done.missing:
        click.echo(f"{done.missing:,} more are listed in the index but have no file")
    _print_names({"not in the index": done.unlisted, "not read": done.skipped, "not imported": done.ignored})


def _ids(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int, int | None]:
    if value is None:
        return 0, None
    first, colon, end = value.partition(":")
    if not colon or not all(number.isdecimal() and len(number) < 19 for number in (first, end) if number):
        raise click.BadParameter(f"{value!r} is not FIRST:END, such as 0:100")
    return int(first or 0), int(end) if end else None


@trajectories.command()
@show.path_argument
@_directory("--save-path", "Where to write the directory for RLinf; must not exist.")
@click.option("--trajectories", "ids", callback=_ids, metavar="FIRST:END", help="Only these ids, without END.")
@_part
@_dry_run
@show.json_option
def export(path: Path, save_path: Path, ids: tuple[int, int | None], **options: Any) -> None:
    """Export trajectories for RLinf's replay buffer.

    Writes a directory that RLinf can load and leaves PATH unchanged. Needs torch. Ranks are joined as in a merge.
    Fields that RLinf does not see are printed.
    """
    with show.progress_bar("exporting") as progress:
        done = export_directory(path, save_path, first_id=ids[0], end_id=ids[1], **options, progress=progress)
    show.result(done, _print_export)


def _print_export(done: Exported) -> None:
    amount = f"{done.trajectories:,} trajectories with {done.transitions:,} transitions"
    _say(done, "export", "exported", f"{amount} to {done.target}")
    _print_names({"RLinf does not see": done.left_out, "stored as larger integers": done.widened})


def _say(done: Outcome | Imported | Exported, would: str, did: str, what: str) -> None:
    click.echo(f"{did if done.done else f'would {would}'} {show.one_line(what)}")


def _amount(done: Outcome) -> str:
    return f"{done.trajectories:,} trajectories ({done.transitions:,} transitions, {size_text(done.bytes)})"


def _print_names(lists: dict[str, list[str]]) -> None:
    for what, names in lists.items():
        if names:
            click.echo(f"{what}: {show.one_line(first_of(names))}")
