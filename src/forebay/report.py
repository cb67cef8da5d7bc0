"""What people and loggers read about a buffer: flat figures, and an explanation of what a wait is for.

Pure: given what the storage said, it returns text and numbers, and touches neither content nor state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from forebay.ledger import LedgerLine, Place
from forebay.rollout import Status
from forebay.storage.base import Holding, Usage
from forebay.waiting import Wait

__all__ = ["explanation", "figures"]

Counts = Mapping[str, Mapping[Status, int]]


def figures(
    ledger: Mapping[str, LedgerLine], tokens: Mapping[str, LedgerLine], counts: Counts, usage: Usage, waiting: int
) -> dict[str, int]:
    """A flat dict for any logger: `forebay/<task>/buffered/completed` and the like, in groups and tokens."""
    flat = {"forebay/groups": usage.groups, "forebay/bytes": usage.bytes, "forebay/waiting": waiting}
    for task_name, line in ledger.items():
        prefix = f"forebay/{task_name}"
        flat |= {f"{prefix}/{name}": groups for name, groups in line.items()}
        flat |= {f"{prefix}/buffered/{status}": n for status, n in counts[task_name].items()}
        flat |= {f"{prefix}/tokens/{name}": n for name, n in tokens[task_name].items()}
    return flat


def explanation(
    waits: Iterable[Wait],
    now: float,
    ledger: Mapping[str, LedgerLine],
    counts: Counts,
    holdings: Sequence[Holding],
    usage: Usage,
    max_groups: int | None,
    max_bytes: int | None,
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
    full = (max_groups is not None and usage.groups >= max_groups) or (
        max_bytes is not None and usage.bytes >= max_bytes
    )
    if max_groups is not None or max_bytes is not None:
        limits = [
            f"{used} of {limit} {unit}"
            for used, limit, unit in ((usage.groups, max_groups, "groups"), (usage.bytes, max_bytes, "bytes"))
            if limit is not None
        ]
        lines.append(
            f"capacity: {' and '.join(limits)} in use" + ("; nothing new fits until groups leave" if full else "")
        )
    return "\n".join(lines)


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
    doing = "generating" if holding.place is Place.IN_FLIGHT else "leased"
    return (
        f"  {doing}: {holding.groups} groups held by {holding.owner}, the oldest (group {holding.oldest_group_id}) "
        f"for {holding.oldest_age_s:.1f} s"
    )
