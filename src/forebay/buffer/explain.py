"""Figures of a buffer for loggers, and explanations of waits for people.

Pure: computes strings and numbers from a summary of the storage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from forebay.buffer.group_ends import GroupEnds
from forebay.core.aio import Pool
from forebay.core.capacity import Settings, fits
from forebay.core.fingerprint import unverified_records
from forebay.core.ledger import Place
from forebay.core.rollout import Status
from forebay.storage.base import Summary, TaskSummary
from forebay.storage.values import Holding


class Wait(NamedTuple):
    """One wait in progress."""

    what: str
    tasks: Collection[str]
    since: float


def figures(
    summary: Summary, settings: Settings, waiting: int, produced: Collection[str] | None, group_ends: GroupEnds | None
) -> dict[str, int]:
    """A flat dict for any logger: `forebay/<task>/buffered/completed` and the like, in groups and tokens."""
    flat = {
        "forebay/groups": summary.usage.groups,
        "forebay/groups_kept_aside": sum(_kept_aside(summary, produced).values()),
        "forebay/bytes": summary.usage.bytes,
        "forebay/reserved_bytes": summary.usage.reserved,
        "forebay/waiting": waiting,
    }
    for name in ("max_groups", "max_bytes"):
        if (limit := getattr(settings, name)) is not None:
            flat[f"forebay/{name}"] = limit
    if group_ends is not None:
        flat |= {"forebay/on_group_end/told": group_ends.told, "forebay/on_group_end/failed": group_ends.failed}
    for task_name, task in summary.tasks.items():
        prefix = f"forebay/{task_name}"
        flat |= {f"{prefix}/{name}": groups for name, groups in task.line().items()}
        flat |= {f"{prefix}/buffered/{status}": task.statuses.get(status, 0) for status in Status}
        flat |= {f"{prefix}/tokens/{name}": n for name, n in task.line(tokens=True).items()}
        flat |= {f"{prefix}/completed": task.account.completed, f"{prefix}/failed_attempts": task.account.failures}
        flat[f"{prefix}/unverified_records"] = unverified_records(task.account.source_state)
    return flat


def explanation(
    waits: Sequence[Wait], now: float, summary: Summary, settings: Settings, produced: Collection[str] | None
) -> str:
    """The waits, and for every task concerned the groups that it has and the owners of those that are not buffered."""
    lines = [f"waited {now - wait.since:.1f} s so far for {wait.what}" for wait in waits]
    if not lines:
        lines.append("nothing is waiting")
    named = {task_name for wait in waits for task_name in wait.tasks}
    for task_name in sorted(named or summary.tasks):
        lines.append(_task_line(task_name, summary.task(task_name)))
        lines += [_holding_line(holding) for holding in summary.holdings if holding.task_name == task_name]
    if settings.max_groups is not None or settings.max_bytes is not None:
        full = not fits(summary.usage, settings, 1, 1)
        lines.append(
            f"capacity: {capacity(summary, settings, produced)}"
            + ("; nothing new fits until groups leave" if full else "")
        )
    return "\n".join(lines)


def full_pools(pools: Iterable[Pool]) -> list[str]:
    """Pools whose threads are all busy, a line for each: calls that need a thread wait."""
    return [
        f"all {pool.max_threads} threads of the pool {pool.name!r} ({pool.use}) are busy, {pool.waiting} calls wait"
        for pool in pools
        if pool.running >= pool.max_threads
    ]


def capacity(summary: Summary, settings: Settings, produced: Collection[str] | None) -> str:
    """How much of each limit is used, and how much of it by tasks that no manager produces."""
    usage, limits = summary.usage, []
    if settings.max_groups is not None:
        limits.append(f"{usage.groups} of {settings.max_groups} groups in use")
    if settings.max_bytes is not None:
        limits.append(f"{usage.bytes} of {settings.max_bytes} bytes in use and {usage.reserved} reserved")
    text = " and ".join(limits)
    for task_name, groups in _kept_aside(summary, produced).items():
        text += (
            f", {groups} of them belong to {task_name!r}, which no task here produces "
            f"(discard({{'task_name': {task_name!r}}}, reason) frees those that are buffered)"
        )
    return text


def _kept_aside(summary: Summary, produced: Collection[str] | None) -> Mapping[str, int]:
    """Groups that count against the capacity, of tasks that no manager produces."""
    held = {}
    for task_name, line in summary.ledger().items():
        groups = line["in_flight"] + line["buffered"] + line["leased"]
        if groups and produced is not None and task_name not in produced:
            held[task_name] = groups
    return held


def _task_line(task_name: str, task: TaskSummary) -> str:
    line = task.line()
    if not line["issued"]:
        return f"task {task_name!r}: nothing was ever put or drawn under this name"
    statuses = ", ".join(f"{n} {status}" for status in Status if (n := task.statuses.get(status, 0))) or "nothing"
    text = (
        f"task {task_name!r}: buffered {statuses}; {line['in_flight']} in flight, {line['leased']} leased; of "
        f"{line['issued']} issued {line['trained']} trained, {line['filtered']} filtered, {line['failed']} failed, "
        f"{line['discarded']} discarded"
    )
    if not line["in_flight"] and not line["leased"] and not line["buffered"]:
        text += "; no producer is generating for it"
    return text


def _holding_line(holding: Holding) -> str:
    doing = "in flight" if holding.place is Place.IN_FLIGHT else "leased"
    return (
        f"  {doing}: {holding.groups} groups held by {holding.owner}, the oldest (group {holding.oldest_group_id}) "
        f"for {holding.oldest_age_s:.1f} s"
    )
