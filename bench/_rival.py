"""The plain rival: what a framework writes for itself. A dict of records, scanned on every read.

It does the same job as the buffer under test: it stamps versions, computes status and staleness of a group,
evaluates the question on each record and sorts what matches. No leases, no ledger, no waiting.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

from forebay import RolloutState, Status, group_status, staleness
from forebay.core.rollout import reset_response


class _Item:
    def __init__(self, uid: int, task: str, group: list[RolloutState], status: Status, stale: int) -> None:
        self.uid, self.task, self.group, self.status, self.stale = uid, task, group, status, stale


class ScanningBuffer:
    """The obvious buffer."""

    def __init__(self, *, by_staleness: bool) -> None:
        self._items: dict[int, _Item] = {}
        self._uids = itertools.count(1)
        self._by_staleness = by_staleness
        self._step = 0

    async def put(self, items: Sequence[RolloutState], task_name: str, *, model_step: int) -> None:
        for state in items:
            known = sum(run for _, run in state.version_spans)
            missing = (0 if state.response_ids is None else len(state.response_ids)) - known
            if missing:
                state.version_spans = (*state.version_spans, (model_step, missing))
        uid = next(self._uids)
        self._items[uid] = _Item(uid, task_name, list(items), group_status(items), self._staleness(items))

    def _staleness(self, group: Sequence[RolloutState]) -> int:
        return max(
            staleness(min(step for step, _ in state.version_spans), self._step) if state.version_spans else 0
            for state in group
        )

    def _matching(self, query: Mapping[str, object]) -> list[_Item]:
        return [item for item in self._items.values() if all(getattr(item, k) == v for k, v in query.items())]

    async def get(self, n: int, task_name: str, status: Status) -> list[list[RolloutState]]:
        found = self._matching({"task": task_name, "status": status})
        found.sort(key=lambda item: (-item.stale, item.uid) if self._by_staleness else (0, item.uid))
        for item in found[:n]:
            del self._items[item.uid]
        return [item.group for item in found[:n]]

    async def take_batch(self, wants: Mapping[str, int]) -> dict[str, list[list[RolloutState]]]:
        return {task: await self.get(n, task, Status.COMPLETED) for task, n in wants.items()}

    async def count(self, task_name: str, status: Status) -> int:
        return len(self._matching({"task": task_name, "status": status}))

    async def is_ready(self, wants: Mapping[str, int]) -> bool:
        counts = [await self.count(task, Status.COMPLETED) >= n for task, n in wants.items()]
        return all(counts)

    async def count_statuses(self, tasks: Collection[str], statuses: Collection[Status]) -> dict[str, dict[str, int]]:
        return {task: {status: await self.count(task, status) for status in statuses} for task in tasks}

    async def refresh_staleness(
        self, *, task_stale_thresholds: Mapping[str, int], current_train_step: int
    ) -> dict[str, int]:
        self._step = current_train_step
        expired = dict.fromkeys(task_stale_thresholds, 0)
        for task, threshold in task_stale_thresholds.items():
            for status in (Status.COMPLETED, Status.ABORTED, Status.EXPIRED):
                for item in self._matching({"task": task, "status": status}):
                    item.stale = self._staleness(item.group)
                    if item.stale >= threshold:
                        item.group = [reset_response(state) for state in item.group]
                        for state in item.group:
                            state.status = Status.EXPIRED
                        item.status = group_status(item.group)
                        expired[task] += 1
        return expired
