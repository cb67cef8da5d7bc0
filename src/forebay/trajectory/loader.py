"""A prefetching loader for `torch.utils.data`: batches are drawn in a thread while the trainer computes.

An iterator waits until there is enough to draw from (on the buffer's own event, not by polling), keeps `prefetch`
batches ready, and ends when it is closed or dropped. Whatever fails in its thread is raised to who asks for the next
batch. Batches that were prefetched are older than the newest data by as many steps as there are of them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

from torch.utils.data import IterableDataset, get_worker_info

from forebay.core.validate import checked_integer
from forebay.errors import InvalidConfig

__all__ = ["TrajectoryDataset"]


class Source(Protocol):
    """What batches are drawn from: a buffer, or a mix of buffers."""

    def sample(self, num_chunks: int) -> dict[str, Any]: ...
    def wait_ready(self, min_transitions: int = 1, timeout_s: float | None = None) -> None: ...


class TrajectoryDataset(IterableDataset[dict[str, Any]]):
    """Endless batches of a buffer or a mix: `DataLoader(TrajectoryDataset(buffer, 256), batch_size=None)`."""

    def __init__(
        self,
        source: Source,
        batch_size: int,
        *,
        min_transitions: int = 1,
        prefetch: int = 2,
        timeout_s: float | None = None,
    ) -> None:
        """`min_transitions` are waited for before the first batch, for at most `timeout_s`."""
        self.source, self.timeout_s = source, timeout_s
        self.batch_size = checked_integer("batch_size", batch_size, least=1)
        self.min_transitions = checked_integer("min_transitions", min_transitions, least=1)
        self.prefetch = checked_integer("prefetch", prefetch, least=1)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if get_worker_info() is not None:
            raise InvalidConfig(
                "a buffer lives in one process; use DataLoader(..., num_workers=0): it prefetches itself"
            )
        return _Prefetcher(self.source, self.batch_size, self.min_transitions, self.prefetch, self.timeout_s)


class _Prefetcher(Iterator[dict[str, Any]]):
    """One iteration, with its thread; `close` ends it."""

    def __init__(
        self, source: Source, batch_size: int, min_transitions: int, prefetch: int, timeout_s: float | None
    ) -> None:
        self._shared = shared = _Shared(prefetch)
        self._thread = threading.Thread(
            target=_draw,
            args=(source, batch_size, min_transitions, timeout_s, shared),
            name="forebay-prefetch",
            daemon=True,
        )
        self._thread.start()

    def __next__(self) -> dict[str, Any]:
        return self._shared.next()

    def close(self) -> None:
        """End the thread. It may still wait for data; then it ends when there is some, or with the process."""
        self._shared.close()

    def __del__(self) -> None:
        self.close()


class _Shared:
    """What the thread and the consumer share; the thread does not hold the iterator, so that it can be dropped."""

    def __init__(self, prefetch: int) -> None:
        self._changed = threading.Condition()
        self._ready: deque[dict[str, Any]] = deque()
        self._prefetch = prefetch
        self._failed: BaseException | None = None
        self.closed = False

    def wait_for_room(self) -> bool:
        """Before a batch is drawn: what is drawn should be as new as can be. False if nobody wants one."""
        with self._changed:
            while len(self._ready) >= self._prefetch and not self.closed:
                self._changed.wait()
            return not self.closed

    def put(self, batch: dict[str, Any]) -> None:
        with self._changed:
            if not self.closed:
                self._ready.append(batch)
                self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._failed = error
            self._changed.notify_all()

    def next(self) -> dict[str, Any]:
        with self._changed:
            while not self._ready and self._failed is None and not self.closed:
                self._changed.wait()
            if self._ready and not self.closed:
                batch = self._ready.popleft()
                self._changed.notify_all()
                return batch
            if self._failed is not None:
                raise self._failed
            raise StopIteration

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._ready.clear()
            self._changed.notify_all()


def _draw(source: Source, batch_size: int, min_transitions: int, timeout_s: float | None, shared: _Shared) -> None:
    try:
        source.wait_ready(min_transitions, timeout_s)
        while shared.wait_for_room():
            shared.put(source.sample(batch_size))
    except BaseException as error:
        shared.fail(error)
