"""What people and loggers read about a buffer: flat figures, and an explanation of what a wait is for.

Pure: given what the storage said, it returns text and numbers, and touches neither content nor state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from forebay.capacity import fits
from forebay.fingerprint import unverified_records
from forebay.group_ends import GroupEnds
from forebay.ledger import Account, LedgerLine, Place
from forebay.rollout import Status
from forebay.storage.base import Holding, Settings, Usage
from forebay.threads import Pool
from forebay.waiting import Wait

__all__ = ["capacity", "explanation", "figures", "full_pools"]

Counts = Mapping[str, Mapping[Status, int]]


def figures(
    ledger: Mapping[str, LedgerLine],
    tokens: Mapping[str, LedgerLine],
    counts: Counts,
    accounts: Mapping[str, Account],
    usage: Usage,
    settings: Settings,
    waiting: int,
    produced: Collection[str] | None,
    group_ends: GroupEnds | None,
) -> dict[str, int]:
    """A flat dict for any logger: `forebay/<task>/buffered/completed` and the like, in groups and tokens."""
    flat = {
        "forebay/groups": usage.groups,
        "forebay/groups_kept_aside": sum(_kept_aside(ledger, produced).values()),
        "forebay/bytes": usage.bytes,
        "forebay/reserved_bytes": usage.reserved,
        "forebay/waiting": waiting,
    }
    for name in ("max_groups", "max_bytes"):
        if (limit := getattr(settings, name)) is not None:
            flat[f"forebay/{name}"] = limit
    if group_ends is not None:
        flat |= {"forebay/on_group_end/told": group_ends.told, "forebay/on_group_end/failed": group_ends.failed}
    for task_name, line in ledger.items():
        prefix = f"forebay/{task_name}"
        flat |= {f"{prefix}/{name}": groups for name, groups in line.items()}
        flat |= {f"{prefix}/buffered/{status}": n for status, n in counts[task_name].items()}
        flat |= {f"{prefix}/tokens/{name}": n for name, n in tokens[task_name].items()}
        flat[f"{prefix}/unverified_records"] = unverified_records(accounts[task_name].source_state)
    return flat


def explanation(
    waits: Iterable[Wait],
    now: float,
    ledger: Mapping[str, LedgerLine],
    counts: Counts,
    holdings: Sequence[Holding],
    usage: Usage,
    settings: Settings,
    produced: Collection[str] | None,
) -> str:
    """What is waited for, and for every task concerned what there is and who holds the rest."""
    waits = list(waits)
    lines = [f"waited {now - wait.since:.1f} s so far for {wait.what}" for wait in waits]
    if not lines:
        lines.append("nothing is waiting")
    named = {task_name for wait in waits for task_name in wait.tasks}
    for task_name in sorted(named or ledger):
        lines.append(_task_line(task_name, ledger.get(task_name), counts.get(task_name, {})))
        lines += [_holding_line(holding) for holding in holdings if holding.task_name == task_name]
    if settings.max_groups is not None or settings.max_bytes is not None:
        full = not fits(usage, settings, 1, 1)
        lines.append(
            f"capacity: {capacity(usage, settings, ledger, produced)}"
            + ("; nothing new fits until groups leave" if full else "")
        )
    return "\n".join(lines)


def full_pools(pools: Iterable[Pool]) -> list[str]:
    """Pools whose threads are all busy, a line for each: calls that need one wait."""
    return [
        f"all {pool.max_threads} threads of the pool {pool.name!r} ({pool.use}) are busy, {pool.waiting} calls wait"
        for pool in pools
        if pool.running >= pool.max_threads
    ]


def capacity(
    usage: Usage, settings: Settings, ledger: Mapping[str, LedgerLine], produced: Collection[str] | None
) -> str:
    """What is used of each limit, and by tasks that nobody produces."""
    limits = []
    if settings.max_groups is not None:
        limits.append(f"{usage.groups} of {settings.max_groups} groups in use")
    if settings.max_bytes is not None:
        limits.append(f"{usage.bytes} of {settings.max_bytes} bytes in use and {usage.reserved} reserved")
    text = " and ".join(limits)
    for task_name, groups in _kept_aside(ledger, produced).items():
        text += (
            f", {groups} of them belong to {task_name!r}, which no task here produces "
            f"(discard({{'task_name': {task_name!r}}}, reason) frees those that are buffered)"
        )
    return text


def _kept_aside(ledger: Mapping[str, LedgerLine], produced: Collection[str] | None) -> dict[str, int]:
    """Groups that count against the capacity, of tasks that nobody produces."""
    held = {
        task_name: line["in_flight"] + line["buffered"] + line["leased"]
        for task_name, line in ledger.items()
        if produced is not None and task_name not in produced
    }
    return {task_name: groups for task_name, groups in held.items() if groups}


def _task_line(task_name: str, line: LedgerLine | None, counts: Mapping[Status, int]) -> str:
    if line is None or not line["issued"]:
        return f"task {task_name!r}: nothing was ever put or drawn under this name"
    statuses = ", ".join(f"{n} {status}" for status, n in counts.items() if n) or "nothing"
    text = (
        f"task {task_name!r}: buffered {statuses}; {line['in_flight']} in flight, {line['leased']} leased; of "
        f"{line['issued']} issued {line['trained']} trained, {line['filtered']} filtered, {line['failed']} failed, "
        f"{line['discarded']} discarded"
    )
    if not line["in_flight"] and not line["leased"] and not any(counts.values()):
        text += "; nobody is generating for it"
    return text


def _holding_line(holding: Holding) -> str:
    doing = "in flight" if holding.place is Place.IN_FLIGHT else "leased"
    return (
        f"  {doing}: {holding.groups} groups held by {holding.owner}, the oldest (group {holding.oldest_group_id}) "
        f"for {holding.oldest_age_s:.1f} s"
    )
