"""The watermarks of tasks: the train step that each was last judged for, and the floors that follow from it.

The floors are stored beside the step, so that claims compare with them in SQL.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from msgspec.structs import replace

from forebay.core.ledger import Watermark
from forebay.core.staleness import Limits
from forebay.storage.postgres.connections import Step
from forebay.storage.postgres.rows import from_text, to_text

__all__ = ["advance", "of_row", "read", "write"]

_READ = "SELECT task_name, train_step, stale_threshold, token_stale_threshold, retryable FROM accounts"

_WRITE = """
INSERT INTO accounts (task_name, train_step, stale_threshold, token_stale_threshold, retryable, floor_oldest,
    floor_token)
VALUES ($1, $2, $3, $4, $5, $6, $7)
ON CONFLICT (task_name) DO UPDATE SET train_step = $2, stale_threshold = $3, token_stale_threshold = $4,
    retryable = $5, floor_oldest = $6, floor_token = $7"""


def of_row(row: Any) -> Watermark | None:
    """The watermark of a row of `accounts`."""
    if row["train_step"] is None:
        return None
    return Watermark(row["train_step"], Limits(row["stale_threshold"], row["token_stale_threshold"], row["retryable"]))


async def read(connection: Any, tasks: Collection[str] | None, *, lock: bool = False) -> dict[str, Watermark | None]:
    """The watermarks of tasks that have an account; None: of all."""
    end = " FOR UPDATE" if lock else ""
    if tasks is None:
        rows = await connection.fetch(f"{_READ} ORDER BY task_name{end}")
    else:
        names = [to_text(task_name) for task_name in tasks]
        rows = await connection.fetch(f"{_READ} WHERE task_name = ANY($1) ORDER BY task_name{end}", names)
    return {from_text(row["task_name"]): of_row(row) for row in rows}


async def write(connection: Any, task_name: str, watermark: Watermark) -> None:
    limits, floors = watermark.limits, watermark.floors
    await connection.execute(
        _WRITE,
        to_text(task_name),
        watermark.train_step,
        limits.stale_threshold,
        limits.token_stale_threshold,
        limits.retryable,
        floors.oldest,
        floors.token,
    )


def news(known: Mapping[str, Watermark | None], given: Mapping[str, Watermark]) -> dict[str, Watermark]:
    """What of the given watermarks changes something. A train step does not go back."""
    changed: dict[str, Watermark] = {}
    for task_name in sorted(given):
        before, watermark = known.get(task_name), given[task_name]
        if before is not None and before.train_step > watermark.train_step:
            watermark = replace(watermark, train_step=before.train_step)
        if watermark != before:
            changed[task_name] = watermark
    return changed


async def advance(step: Step, given: Mapping[str, Watermark]) -> None:
    """Set watermarks, and wake those who wait for what has changed."""
    for task_name in sorted(given):  # so that there is something to lock
        await step.connection.execute(
            "INSERT INTO accounts (task_name) VALUES ($1) ON CONFLICT DO NOTHING", to_text(task_name)
        )
    known = await read(step.connection, given, lock=True)
    for task_name, watermark in news(known, given).items():
        await write(step.connection, task_name, watermark)
        step.wake(task_name)
