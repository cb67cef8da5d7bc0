"""`forebay trajectories`: look into directories of trajectories, check, merge, split and convert them.

Commands that write refuse an existing target, touch a source only once the result is complete and verified, and change
nothing with `--dry-run`. Exit code 3 means damaged data. What is done is in `forebay.trajectory`; this shows it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import click
import msgspec

from forebay.cli import DAMAGED, one_line, progress_bar, show_json, size_text
from forebay.cli.doctor import show_findings
from forebay.cli.trajectory_info import show_info, show_table
from forebay.doctor import Level
from forebay.errors import InvalidInput
from forebay.trajectory import TrajectoryReplayBuffer
from forebay.trajectory.checkpoint import MAIN
from forebay.trajectory.checkup import verify as verify_directory
from forebay.trajectory.exchange import export_directory, import_directory
from forebay.trajectory.lookup import find_trajectory
from forebay.trajectory.page import trajectory_page
from forebay.trajectory.summary import info as describe
from forebay.trajectory.tools import merge as merge_directories
from forebay.trajectory.tools import split as split_directory

__all__ = ["trajectories"]

_SAMPLE_S, _LEAST_DRAWS, _MOST_DRAWS = 0.5, 5, 1000

_Command = TypeVar("_Command", bound=Callable[..., Any])

_path = click.argument("path", type=click.Path(path_type=Path))
_as_json = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
_dry_run = click.option("--dry-run", is_flag=True, help="Say what would be done, and change nothing.")
_part = click.option("--part", default=MAIN, show_default=True, help="Which buffer of a checkpoint that has several.")


def _source_path(text: str, *, multiple: bool = False) -> Callable[[_Command], _Command]:
    return click.option(
        "--source-path", type=click.Path(path_type=Path), required=True, multiple=multiple, help=text, metavar="DIR"
    )


def _save_path(text: str) -> Callable[[_Command], _Command]:
    return click.option("--save-path", type=click.Path(path_type=Path), required=True, help=text, metavar="DIR")


class _Warnings(logging.Handler):
    """What the library logs, as lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(f"forebay: {one_line(record.getMessage())}", err=True)


@click.group()
@click.pass_context
def trajectories(ctx: click.Context) -> None:
    """Look into directories of trajectories; check, merge, split and convert them.

    A directory is a checkpoint, a store (auto_save_path), or one with rank_<n> in it; where it is said also one that
    RLinf's replay buffer wrote.
    """
    logger, handler = logging.getLogger("forebay.trajectory"), _Warnings(logging.WARNING)
    logger.addHandler(handler)
    ctx.call_on_close(lambda: logger.removeHandler(handler))


# --- looking ------------------------------------------------------------------------------------------


@trajectories.command()
@_path
@_as_json
def info(path: Path, as_json: bool) -> None:
    """Say what is in PATH: counts, fields, rewards, and mean and deviation of states and actions.

    Also of a directory of RLinf's. Of the rows only states and actions are read, not images.
    """
    with progress_bar("reading") as progress:
        described = describe(path, progress)
    if as_json:
        show_json(described)
    else:
        show_info(described)


@trajectories.command()
@_path
@click.option("--num-chunks", type=click.IntRange(min=1), default=1024, show_default=True, help="Rows of a batch.")
@click.option("--cache-size", type=click.IntRange(min=0), default=10, show_default=True, help="Trajectories to cache.")
@click.option("--enable-cache", is_flag=True, help="Bring the newest trajectories into memory first.")
@click.option("--sample-window-size", type=click.IntRange(min=0), default=0, help="Only the newest so many (0: all).")
@click.option("--seed", type=click.IntRange(min=0), default=1234, show_default=True, help="Of the draws.")
@_as_json
def sample(
    path: Path, num_chunks: int, cache_size: int, enable_cache: bool, sample_window_size: int, seed: int, as_json: bool
) -> None:
    """Draw batches from PATH, as a training would: keys, shapes, dtypes, and rows per second.

    Rows are not checked against their checksums; `verify` does that.
    """
    with TrajectoryReplayBuffer(
        seed=seed, enable_cache=enable_cache, cache_size=cache_size, sample_window_size=sample_window_size
    ) as buffer:
        buffer.load_checkpoint(path, verify=False)
        times: list[float] = []
        while len(times) < _LEAST_DRAWS or (sum(times) < _SAMPLE_S and len(times) < _MOST_DRAWS):
            start = time.perf_counter()
            batch = buffer.sample(num_chunks)
            times.append(time.perf_counter() - start)
        typical = median(times[1:])
        found: dict[str, Any] = {
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
    if as_json:
        show_json(found)
        return
    rows = [[name, str(one["shape"]), one["dtype"]] for name, one in found["keys"].items()]
    show_table(["key", "shape", "dtype"], rows)
    click.echo(
        f"\n{num_chunks:,} rows out of {found['transitions']:,} of {found['trajectories']:,} trajectories: "
        f"{found['rows_per_second']:,.0f} rows/s (median of {len(times) - 1} draws: {found['median_ms']:.2f} ms, the "
        f"first: {found['first_ms']:.2f} ms)"
    )


def _leaves(batch: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, list[int], str]]:
    for name, value in batch.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            yield f"{prefix}{name}", [len(value)], "str"
        else:
            yield f"{prefix}{name}", list(value.shape), str(value.dtype).removeprefix("torch.")


@trajectories.command()
@_path
@click.option("--trajectory", "trajectory_id", type=click.IntRange(min=0), required=True, help="The id of the one.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The HTML file to write.", metavar="FILE")
@click.option("--rank", type=click.IntRange(min=0), default=None, help="Which rank_<n>, if several have that id.")
@_part
def show(path: Path, trajectory_id: int, out: Path, rank: int | None, part: str) -> None:
    """Make a page of one trajectory of PATH: its images, curves and numbers, to open in a browser.

    Also of a directory of RLinf's. The page is one file and needs no network.
    """
    if out.exists():
        raise InvalidInput(f"{out} exists already; name a new file")
    trajectory, facts = find_trajectory(path, trajectory_id, rank=rank, part=part)
    page = trajectory_page(trajectory, title=f"Trajectory {trajectory_id}", facts=facts)
    with out.open("x", encoding="utf-8") as opened:
        opened.write(page)
    click.echo(f"{one_line(out)}: {size_text(len(page.encode()))}")


@trajectories.command()
@_path
@_as_json
@click.pass_context
def verify(ctx: click.Context, path: Path, as_json: bool) -> None:
    """Read all of PATH and check it: every checksum, every rank; also a directory of RLinf's.

    A store may be in use meanwhile. Exit code 3 if something is damaged.
    """
    with progress_bar("verifying") as progress:
        findings = verify_directory(path, progress)
    whole = all(finding.level is not Level.ERROR for finding in findings)
    if as_json:
        show_json({"path": str(path), "whole": whole, "findings": msgspec.to_builtins(findings)})
    else:
        show_findings(findings)
        click.echo(f"{one_line(path)}: {'whole' if whole else 'damaged'}")
    if not whole:
        ctx.exit(DAMAGED)


# --- making -------------------------------------------------------------------------------------------


def _fills(_: click.Context, __: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    fills = {}
    for value in values:
        name, equals, fill = value.partition("=")
        if not name or not equals:
            raise click.BadParameter(f"{value!r} is not FIELD=VALUE")
        fills[name] = fill
    return fills


@trajectories.command()
@_source_path("A directory, or one with rank_<n> in it; may be given several times.", multiple=True)
@_save_path("Where the merged checkpoint goes; must not exist.")
@click.option("--copy", is_flag=True, help="Keep the sources; without it they are removed once the result is verified.")
@click.option("--fill", multiple=True, callback=_fills, metavar="FIELD=VALUE", help="For a field that some lack.")
@click.option("--drop", multiple=True, metavar="FIELD", help="Leave a field out.")
@click.option("--skip-damaged", is_flag=True, help="Leave out trajectories that are damaged; needs --copy.")
@_dry_run
@_as_json
def merge(
    source_path: tuple[Path, ...],
    save_path: Path,
    copy: bool,
    fill: dict[str, str],
    drop: tuple[str, ...],
    skip_damaged: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Bring directories, or all ranks of one, together as one checkpoint.

    Ranks in numeric order, interleaved by the ids that trajectories had, numbered anew from 0. Fields that differ are
    refused by name, unless --fill or --drop says what to do with them.
    """
    if skip_damaged and not copy:
        raise click.UsageError("--skip-damaged needs --copy: what is damaged might still be saved from the sources")
    with progress_bar("merging") as progress:
        done = merge_directories(
            list(source_path),
            save_path,
            copy=copy,
            fill=fill,
            drop=drop,
            skip_damaged=skip_damaged,
            dry_run=dry_run,
            progress=progress,
        )
    if as_json:
        show_json(msgspec.to_builtins(done))
        return
    _say(done.done, "merge", "merged", f"{_amount(done)} of {len(done.sources)} directories into {done.target}")
    for part, count in done.parts.items():
        if part != MAIN:
            click.echo(f"part {one_line(part)}: {count:,} trajectories")
    if done.rewritten:
        _say(done.done, "rewrite", "rewrote", f"{done.rewritten:,} trajectories, because their fields change")
    if done.left_out:
        _say(done.done, "leave out", "left out", f"{done.left_out:,} damaged trajectories")
    for directory in done.removed:
        _say(done.done, "remove", "removed", directory)


@trajectories.command()
@_source_path("A checkpoint or a store.")
@_save_path("Where the first trajectories go; must not exist.")
@click.option("--split-count", type=click.IntRange(min=1), required=True, help="How many, from the oldest on.")
@click.option("--copy", is_flag=True, help="Keep the source whole; without it, it keeps the other trajectories.")
@_part
@_dry_run
@_as_json
def split(
    source_path: Path, save_path: Path, split_count: int, copy: bool, part: str, dry_run: bool, as_json: bool
) -> None:
    """Make a checkpoint of the first trajectories; both sides are complete and can be loaded.

    Trajectories keep their ids. If it is interrupted, the first ones may be on both sides, never on none.
    """
    with progress_bar("splitting") as progress:
        done = split_directory(
            source_path, save_path, split_count, copy=copy, part=part, dry_run=dry_run, progress=progress
        )
    if as_json:
        show_json(msgspec.to_builtins(done))
        return
    _say(done.done, "split", "split", f"{_amount(done)} off into {done.target}")
    click.echo(
        f"{done.remaining:,} trajectories {'stay' if done.done else 'would stay'} in {one_line(done.sources[0])}"
    )


@trajectories.command("import")
@_path
@_save_path("Where the checkpoint goes; must not exist.")
@_dry_run
@_as_json
def import_command(path: Path, save_path: Path, dry_run: bool, as_json: bool) -> None:
    """Make a checkpoint of PATH, a directory of RLinf's replay buffer, which stays as it is. Needs torch.

    PATH may have rank_<n> in it; ranks are joined as in a merge. One trajectory is in memory at a time. Pickles (.pkl)
    are refused: to read one can run code.
    """
    with progress_bar("importing") as progress:
        done = import_directory(path, save_path, dry_run=dry_run, progress=progress)
    if as_json:
        show_json(msgspec.to_builtins(done))
        return
    size = size_text(done.source_bytes)
    _say(done.done, "import", "imported", f"{done.trajectories:,} trajectories ({size}) into {done.target}")
    if done.missing:
        click.echo(f"{done.missing:,} more are named in the index and have no file")
    for what, names in (
        ("not in the index", done.unlisted),
        ("not read", done.skipped),
        ("not taken over", done.ignored),
    ):
        if names:
            more = f" and {len(names) - 10} more" if len(names) > 10 else ""
            click.echo(f"{what}: {one_line(', '.join(names[:10]))}{more}")


def _ids(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int, int | None]:
    if value is None:
        return 0, None
    first, colon, end = value.partition(":")
    if not colon or not all(number.isdecimal() and len(number) < 19 for number in (first, end) if number):
        raise click.BadParameter(f"{value!r} is not FIRST:END, such as 0:100")
    return int(first or 0), int(end) if end else None


@trajectories.command()
@_path
@_save_path("Where the directory for RLinf goes; must not exist.")
@click.option(
    "--trajectories", "ids", callback=_ids, metavar="FIRST:END", help="Only those with such ids, END not included."
)
@_part
@_dry_run
@_as_json
def export(path: Path, save_path: Path, ids: tuple[int, int | None], part: str, dry_run: bool, as_json: bool) -> None:
    """Make a directory that RLinf's replay buffer loads out of PATH, which stays as it is. Needs torch.

    Ranks are joined as in a merge. What RLinf does not see of the data is said.
    """
    with progress_bar("exporting") as progress:
        done = export_directory(
            path, save_path, first_id=ids[0], end_id=ids[1], part=part, dry_run=dry_run, progress=progress
        )
    if as_json:
        show_json(msgspec.to_builtins(done))
        return
    count = f"{done.trajectories:,} trajectories with {done.transitions:,} transitions"
    _say(done.done, "export", "exported", f"{count} to {done.target}")
    for what, names in (("RLinf does not see", done.left_out), ("stored as larger integers", done.widened)):
        if names:
            click.echo(f"{what}: {one_line(', '.join(names))}")


# --- showing ------------------------------------------------------------------------------------------


def _say(done: bool, would: str, did: str, what: str) -> None:
    click.echo(f"{did if done else f'would {would}'} {one_line(what)}")


def _amount(done: Any) -> str:
    return f"{done.trajectories:,} trajectories ({done.transitions:,} transitions, {size_text(done.bytes)})"
