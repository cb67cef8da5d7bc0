"""The table `accounts`: the cursor, the clocks, the limits and the plan of each task.

The floors that follow from clock and limits (`Account.floors`) are stored with them, so that claims compare with them
in SQL. The counts of a task are in `counters`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from forebay.core.ledger import Account, Clock
from forebay.core.staleness import Limits
from forebay.storage.postgres.columns import from_text, to_text
from forebay.storage.postgres.step import Step

_FIELDS = (
    "cursor",
    "source_state",
    "train_step",
    "model_step",
    "limits",
    "epoch",
    "saved_step",
    "plan",
    "plan_revision",
)
ACCOUNT = ", ".join(f"a.{name}" for name in _FIELDS)
"""The columns that `read_account` reads, where `accounts` is called a."""

_COLUMNS = (*_FIELDS, "floor_oldest", "floor_token")
_WRITE = f"""
INSERT INTO accounts (task_name, {", ".join(_COLUMNS)})
VALUES ($1, {", ".join(f"${number}" for number, _ in enumerate(_COLUMNS, 2))})
ON CONFLICT (task_name) DO UPDATE SET {", ".join(f"{name} = excluded.{name}" for name in _COLUMNS)}"""

_decode_limits = msgspec.json.Decoder(Limits).decode


def read_account(row: Any) -> Account:
    """The account of a row that has the columns of ACCOUNT, without counts; all null if the task has none."""
    return Account(
        cursor=row["cursor"] or 0,
        source_state=row["source_state"],
        train_step=row["train_step"],
        model_step=row["model_step"],
        limits=_decode_limits(row["limits"] or "{}"),
        epoch=row["epoch"] or 0,
        saved_step=row["saved_step"],
        plan=row["plan"],
        plan_revision=row["plan_revision"] or 0,
    )


async def ensure(connection: Any, tasks: Collection[str]) -> None:
    """Make the accounts of tasks that have none, so that they can be locked."""
    await connection.execute(
        "INSERT INTO accounts (task_name) SELECT unnest($1::text[]) ON CONFLICT DO NOTHING",
        sorted(to_text(task_name) for task_name in tasks),
    )


async def read(connection: Any, tasks: Collection[str] | None, *, lock: bool = False) -> dict[str, Account]:
    """The accounts of tasks (None: of all), without counts. `lock`: they stay as they are until the commit."""
    rows = await connection.fetch(
        f"SELECT a.task_name, {ACCOUNT} FROM accounts a WHERE $1::text[] IS NULL OR a.task_name = ANY($1) "
        f"ORDER BY a.task_name {'FOR UPDATE' if lock else ''}",
        None if tasks is None else [to_text(task_name) for task_name in tasks],
    )
    return {from_text(row["task_name"]): read_account(row) for row in rows}


async def write(connection: Any, accounts: Mapping[str, Account]) -> None:
    """Write cursors, clocks, limits and plans."""
    await connection.executemany(
        _WRITE,
        [
            (
                to_text(task_name),
                account.cursor,
                account.source_state,
                account.train_step,
                account.model_step,
                msgspec.json.encode(account.limits).decode(),
                account.epoch,
                account.saved_step,
                account.plan,
                account.plan_revision,
                account.floors.oldest,
                account.floors.token,
            )
            for task_name, account in accounts.items()
        ],
    )


async def advance(step: Step, clocks: Mapping[str, Clock]) -> None:
    """Move clocks and replace limits; wakes the tasks that this changes."""
    if not clocks:
        return
    await ensure(step.connection, clocks)
    accounts = await read(step.connection, clocks, lock=True)
    changed = {name: account for name, account in accounts.items() if account.advance(clocks[name])}
    await write(step.connection, changed)
    step.tasks |= changed.keys()
