"""`forebay checkpoint`: is it whole, and what is in it.

`verify` promises that a checkpoint which it calls whole can be resumed: every checksum holds, every record and group
decodes, and the ledgers close. `info` reads the manifest only, unless `--full` is asked for. Neither changes
anything, and neither trusts what it reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import msgspec

from forebay.checkpoint.format import Checkpoint, Manifest, open_checkpoint
from forebay.cli import DAMAGED, Progress, one_line, progress_bar, show_json, size_text
from forebay.codec.frame import decode_group
from forebay.codec.records import decode_account, decode_record
from forebay.core.ledger import Account, End, Place
from forebay.core.staleness import Limits
from forebay.errors import CheckpointError, DamagedData, InvalidInput

__all__ = ["Contents", "check_contents", "checkpoint"]

_REPORT_BYTES = 2**20
_COLUMNS = ("issued", "buffered", *(str(end) for end in End), "cursor")


class Contents(msgspec.Struct):
    """What the entries of a checkpoint add up to, per task."""

    groups: Counter[str]
    tokens: Counter[str]
    statuses: dict[str, Counter[str]]


def check_contents(checkpoint: Checkpoint, progress: Progress | None = None) -> Contents:
    """Read everything and check that it could be resumed; DamagedData says why not. One group in memory at a time."""
    manifest, total = checkpoint.manifest, checkpoint.total_bytes
    accounts = _accounts(manifest)
    _limits(manifest)
    contents = Contents(Counter(), Counter(), {task_name: Counter() for task_name in accounts})
    seen: set[tuple[str, int]] = set()
    last_uid = done = reported = 0
    for data, frame in checkpoint.entries():
        record = decode_record(data)
        where = f"group {record.group_id} of task {record.task_name!r} (uid {record.uid})"
        try:
            decode_group(frame)
        except DamagedData as error:
            raise DamagedData(f"{where}: {error}") from None
        if record.place is not Place.BUFFERED:
            raise DamagedData(f"{where} is saved as {record.place}; a checkpoint holds buffered groups only")
        if not last_uid < record.uid < manifest.next_uid or record.timestamp_id >= manifest.next_timestamp_id:
            raise DamagedData(f"{where} does not follow uid {last_uid} below {manifest.next_uid}")
        if (record.task_name, record.group_id) in seen:
            raise DamagedData(f"{where} stands twice in the checkpoint")
        if record.task_name not in accounts:
            raise DamagedData(f"{where} is of a task that has no account")
        seen.add((record.task_name, record.group_id))
        last_uid = record.uid
        contents.groups[record.task_name] += 1
        contents.tokens[record.task_name] += record.tokens
        contents.statuses[record.task_name][str(record.status)] += 1
        done += len(data) + len(frame)
        if progress is not None and done - reported >= _REPORT_BYTES:
            progress(done, total)
            reported = done
    for task_name, account in accounts.items():
        held = contents.groups[task_name] + sum(account.ended.values())
        if held != account.issued:
            raise DamagedData(
                f"the ledger of task {task_name!r} does not close: {account.issued} groups were issued, "
                f"{held} are accounted for"
            )
    if progress is not None:
        progress(total, total)
    return contents


def _accounts(manifest: Manifest) -> dict[str, Account]:
    return {task_name: decode_account(data) for task_name, data in manifest.accounts.items()}


def _limits(manifest: Manifest) -> dict[str, Limits]:
    try:
        return msgspec.convert(manifest.extra.get("limits", {}), dict[str, Limits])
    except (msgspec.ValidationError, InvalidInput) as error:
        raise DamagedData(f"the limits of the checkpoint cannot be read: {error}") from None


@contextmanager
def _of_groups(path: Path) -> Iterator[None]:
    """Trajectories have a command of their own, and who asks here is told so."""
    try:
        yield
    except (DamagedData, CheckpointError):
        from forebay.trajectory.checkup import is_trajectories

        if is_trajectories(path):
            raise InvalidInput(f"{path} holds trajectories, not groups; use `forebay trajectories`") from None
        raise


@click.group()
def checkpoint() -> None:
    """Verify checkpoints and look into them."""


@checkpoint.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.pass_context
def verify(ctx: click.Context, path: Path, as_json: bool) -> None:
    """Read the checkpoint at PATH and check all of it.

    Checksums, records, groups and ledgers: what is called whole can be resumed. Exit code 3 if it is damaged.
    """
    try:
        with _of_groups(path), open_checkpoint(path) as opened, progress_bar("verifying") as progress:
            manifest, total = opened.manifest, opened.total_bytes
            groups = check_contents(opened, progress).groups.total()
    except DamagedData as error:
        if as_json:
            show_json({"path": str(path), "whole": False, "error": str(error)})
        click.echo(f"forebay: {one_line(path)} is damaged: {one_line(error)}", err=True)
        ctx.exit(DAMAGED)
    if as_json:
        result = {"groups": groups, "bytes": total, "model_step": manifest.model_step}
        show_json({"path": str(path), "whole": True, **result})
        return
    step = "no model step" if manifest.model_step is None else f"model step {manifest.model_step}"
    click.echo(f"{one_line(path)}: {groups:,} groups, {size_text(total)}, {step}: whole")


@checkpoint.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--full", is_flag=True, help="Read and check the groups, too: adds tokens and statuses per task.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def info(path: Path, full: bool, as_json: bool) -> None:
    """Say what the checkpoint at PATH is of.

    Reads its manifest only, and checks that its files are there, so it is quick at any size; the buffered groups of a
    task are then what its ledger leaves over. With --full they are counted.
    """
    with _of_groups(path), open_checkpoint(path) as opened, progress_bar("reading") as progress:
        contents = check_contents(opened, progress) if full else None
        described = _described(path, opened, contents)
    if as_json:
        show_json(described)
    else:
        _show(described)


def _described(path: Path, opened: Checkpoint, contents: Contents | None) -> dict[str, Any]:
    manifest = opened.manifest
    tasks = {}
    for task_name, account in sorted(_accounts(manifest).items()):
        ended = {str(end): account.ended.get(end, 0) for end in End}
        buffered = account.issued - sum(ended.values())
        tasks[task_name] = {"issued": account.issued, "buffered": buffered, **ended, "cursor": account.cursor}
        if contents is not None:
            tasks[task_name]["tokens"] = contents.tokens[task_name]
    described = {
        "path": str(path),
        "created_at": manifest.created_at,
        "created": _date(manifest.created_at),
        "forebay_version": manifest.forebay_version,
        "model_step": manifest.model_step,
        "store_id": manifest.store_id,
        "bytes": opened.total_bytes,
        "groups": sum(file.entries for file in manifest.files),
        "tasks": tasks,
        "limits": {name: msgspec.structs.asdict(limits) for name, limits in sorted(_limits(manifest).items())},
    }
    if contents is not None:
        described["statuses"] = {name: dict(found) for name, found in sorted(contents.statuses.items())}
    return described


def _date(seconds: float) -> str | None:
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(sep=" ", timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return None


def _show(described: dict[str, Any]) -> None:
    facts = {
        "checkpoint": described["path"],
        "created": described["created"] or "at an impossible time",
        "Forebay": described["forebay_version"] or "unknown",
        "model step": "none" if described["model_step"] is None else described["model_step"],
        "store": described["store_id"] or "none (it was saved from memory)",
        "size": size_text(described["bytes"]),
        "groups": f"{described['groups']:,}",
    }
    for name, value in facts.items():
        click.echo(f"{name:<12}{one_line(value)}")
    columns = [*_COLUMNS, *(["tokens"] if "statuses" in described else [])]
    lines = [["task", *columns]]
    lines += [[one_line(task), *(f"{row[name]:,}" for name in columns)] for task, row in described["tasks"].items()]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    click.echo()
    for first, *rest in lines:
        numbers = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
        click.echo("  ".join((first.ljust(widths[0]), *numbers)))
    for task_name, statuses in described.get("statuses", {}).items():
        found = ", ".join(f"{groups:,} {status}" for status, groups in sorted(statuses.items()))
        click.echo(f"\nbuffered of {one_line(task_name)}: {found or 'nothing'}", nl=False)
    for task_name, limits in described["limits"].items():
        kept = ", ".join(f"{name} {'none' if value is None else value}" for name, value in limits.items())
        click.echo(f"\nlimits of {one_line(task_name)}: {kept}", nl=False)
    if described.get("statuses") or described["limits"]:
        click.echo()
