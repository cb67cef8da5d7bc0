"""`forebay checkpoint`: verify a checkpoint of groups, and show what it contains. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import msgspec

from forebay.checkpoint.format import Checkpoint, Contents, check_contents, open_checkpoint, saved_accounts
from forebay.cli import show
from forebay.core.ledger import End
from forebay.core.report import date_text, size_text
from forebay.core.staleness import NO_LIMITS
from forebay.errors import DamagedData, ForebayError, InvalidInput


@contextmanager
def _opened(path: Path) -> Iterator[Checkpoint]:
    """The checkpoint at a path; an error that names the right command if it holds trajectories."""
    try:
        with open_checkpoint(path) as opened:
            yield opened
    except ForebayError:
        from forebay.trajectory.checkup import is_trajectories

        if is_trajectories(path):
            raise InvalidInput(f"{path} holds trajectories, not groups; use `forebay trajectories`") from None
        raise


@click.group()
def checkpoint() -> None:
    """Verify checkpoints of groups, and show what they contain."""


@checkpoint.command()
@show.path_argument
@show.json_option
def verify(path: Path) -> None:
    """Read all of the checkpoint at PATH and check it.

    Checks checksums, records, groups and ledgers. A checkpoint without a fault can be resumed. Exit code 3 if it is
    damaged.
    """
    result: dict[str, Any] = {"path": str(path), "whole": True}
    try:
        with _opened(path) as opened, show.progress_bar("verifying") as progress:
            groups = check_contents(opened, progress).groups.total()
            result |= {"groups": groups, "bytes": opened.file.bytes, "model_step": opened.manifest.model_step}
    except DamagedData as error:
        show.result({**result, "whole": False, "error": str(error)}, lambda _: None)
        raise DamagedData(f"{path} is damaged: {error}") from None
    show.result(result, _print_verified)


def _print_verified(result: dict[str, Any]) -> None:
    step = "no model step" if result["model_step"] is None else f"model step {result['model_step']}"
    size = size_text(result["bytes"])
    click.echo(f"{show.one_line(result['path'])}: {result['groups']:,} groups, {size}, {step}: whole")


@checkpoint.command()
@show.path_argument
@click.option("--full", is_flag=True, help="Also read and check the groups; adds tokens and statuses per task.")
@show.json_option
def info(path: Path, full: bool) -> None:
    """Show what the checkpoint at PATH contains.

    Reads only the manifest and checks that its files exist, so it is quick at any size. The number of buffered groups
    then follows from the ledger; with --full the groups are read and counted.
    """
    with _opened(path) as opened, show.progress_bar("reading") as progress:
        contents = check_contents(opened, progress) if full else None
        result = _described(path, opened, contents)
    show.result(result, _print)


def _described(path: Path, opened: Checkpoint, contents: Contents | None) -> dict[str, Any]:
    manifest = opened.manifest
    tasks, limits = {}, {}
    for task_name, account in sorted(saved_accounts(manifest).items()):
        if account.limits != NO_LIMITS:
            limits[task_name] = msgspec.structs.asdict(account.limits)
        ended = {str(end): account.ended.get(end, 0) for end in End}
        buffered = account.issued - sum(ended.values())
        tasks[task_name] = {"issued": account.issued, "buffered": buffered, **ended, "cursor": account.cursor}
        if contents is not None:
            tasks[task_name]["tokens"] = contents.tokens[task_name]
    result = {
        "path": str(path),
        "created_at": manifest.created_at,
        "created": date_text(manifest.created_at),
        "forebay_version": manifest.forebay_version,
        "model_step": manifest.model_step,
        "store_id": manifest.store_id,
        "bytes": opened.file.bytes,
        "groups": opened.file.entries,
        "tasks": tasks,
        "limits": limits,
    }
    if contents is not None:
        result["statuses"] = {name: dict(found) for name, found in sorted(contents.statuses.items())}
    return result


def _print(result: dict[str, Any]) -> None:
    show.facts(
        {
            "checkpoint": result["path"],
            "created": result["created"],
            "Forebay": result["forebay_version"] or "unknown",
            "model step": "none" if result["model_step"] is None else result["model_step"],
            "store": result["store_id"] or "none (it was saved from memory)",
            "size": size_text(result["bytes"]),
            "groups": f"{result['groups']:,}",
        }
    )
    columns: dict[str, int] = next(iter(result["tasks"].values()), {})
    click.echo()
    show.table(["task", *columns], [[task_name, *row.values()] for task_name, row in result["tasks"].items()])
    lines = []
    for task_name, statuses in result.get("statuses", {}).items():
        found = ", ".join(f"{groups:,} {status}" for status, groups in sorted(statuses.items()))
        lines.append(f"buffered of {show.one_line(task_name)}: {found or 'nothing'}")
    for task_name, limits in result["limits"].items():
        values = ", ".join(f"{name} {'none' if value is None else value}" for name, value in limits.items())
        lines.append(f"limits of {show.one_line(task_name)}: {values}")
    if lines:
        click.echo("\n" + "\n".join(lines))
