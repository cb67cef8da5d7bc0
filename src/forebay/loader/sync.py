"""`RolloutLoader`: the loader for synchronous trainers: an `AsyncRolloutLoader` on an event loop in its own thread.

Functions of the user that load weights, and the hooks, are called in the thread of the caller (async ones run on the
loader's loop). Ctrl-C in a wait cancels it; a batch that was leased at that very moment is given back.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

from forebay.blocking import Lease
from forebay.blocking.thread import LoopThread, Undo
from forebay.core.ledger import LedgerLine
from forebay.core.rollout import RolloutState
from forebay.errors import BufferClosed, InvalidConfig, InvalidInput
from forebay.loader.batch import Batch
from forebay.loader.connect import connect
from forebay.loader.core import AsyncRolloutLoader
from forebay.loader.functions import Hook, Load, call_load, check_load, settled
from forebay.loader.held import Batches
from forebay.loader.options import LoaderOptions
from forebay.loader.ranks import Broadcast, Ranks, decode_groups, encode_groups
from forebay.loader.task import Task
from forebay.manager.results import AsyncBatch, BatchContent
from forebay.produce.evaluate import Evaluation

log = logging.getLogger(__name__)

T = TypeVar("T")


class RolloutLoader:
    """Feeds a trainer with batches of rollouts. `forebay.LoaderOptions` has its arguments.

        loader = RolloutLoader(Task("math", prompts, generate, reward=score, group_size=8), batch_groups=64)
        with loader:
            for batch in loader.batches(1, 1000):
                train(batch.packed(max_tokens=16_384))
                loader.update_weights(push_to_engine)

    `broadcast=TorchBroadcast()`: for trainers of several ranks. All of them make the loader with the same arguments and
    call its verbs in the same order; rank 0 owns it, and each rank gets its part of every batch, balanced by tokens.
    """

    def __init__(
        self, tasks: Task | Sequence[Task], *, broadcast: Broadcast | None = None, **options: Unpack[LoaderOptions]
    ) -> None:
        if unknown := options.keys() - LoaderOptions.__optional_keys__:
            raise TypeError(f"RolloutLoader takes no {', '.join(sorted(unknown))}; see LoaderOptions")
        ranks = Ranks(broadcast)
        groups = options.get("batch_groups")
        if groups is not None and groups < ranks.world_size:
            raise InvalidConfig(
                f"batch_groups is {groups}, but there are {ranks.world_size} ranks: some would get no group; raise it"
            )
        self._adopt(AsyncRolloutLoader(tasks, **options), ranks, None)
        self.native.size.at_least(ranks.world_size)

    def _adopt(self, native: AsyncRolloutLoader, ranks: Ranks, thread: LoopThread | None) -> None:
        self.native = native
        native.closes_buffer = True  # also one that was given: it lives on the loop of this loader
        self._ranks = ranks
        self._thread = thread
        self._closed = self._ended = False  # closed: closing has begun
        self._handlers: dict[signal.Signals, Any] = {}

    @classmethod
    def connect(cls, store: str, **options: Any) -> Self:
        """A trainer on the run of other processes; see `AsyncRolloutLoader.connect`."""
        thread = LoopThread("loader")
        try:
            native = thread.call(lambda: connect(store, **options), undo=AsyncRolloutLoader.close)
        except BaseException:
            thread.stop(wait=False)
            raise
        loader = cls.__new__(cls)
        thread.cleanup = native.close
        loader._adopt(native, Ranks(None), thread)
        return loader

    def __repr__(self) -> str:
        return f"<RolloutLoader of tasks {', '.join(self.native.tasks)}, {self.native.mode}>"

    # --- opening and closing --------------------------------------------------------------------------

    def _call(self, begin: Callable[[], Coroutine[Any, Any, T]], undo: Undo[T] | None = None) -> T:
        if self._closed:
            raise BufferClosed("this loader is closed; make a new one")
        if self._thread is None:
            self._thread = LoopThread("loader", self.native.close)
        return self._thread.call(begin, undo)

    def __enter__(self) -> Self:
        if self._ranks.rank == 0:
            self._call(self.native.open)
        if self.native.stop_on and threading.current_thread() is threading.main_thread():
            for number in self.native.stop_on:
                self._handlers[number] = signal.signal(number, self._on_signal)
        return self

    def _on_signal(self, number: int, frame: object) -> None:
        if self._ended:  # another thread closed the loader; only this one may restore handlers
            self._restore_handlers()
            signal.raise_signal(number)
        else:
            self.stop()

    def _restore_handlers(self) -> None:
        while self._handlers:
            number, handler = self._handlers.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: it was not set from Python

    def stop(self) -> None:
        """End the loop after the current batch; a wait for a batch ends at once. From any thread."""
        self._ranks.stopping = True
        if self._thread is not None and not self._closed:
            with suppress(RuntimeError):  # closed just now
                self._thread.loop.call_soon_threadsafe(self.native.stop)

    def close(self) -> None:
        """Give open batches back, stop producing, and return groups in flight. Closing twice is allowed."""
        if self._thread is not None:
            self._thread.refuse_itself()
        self._closed = True
        try:
            if self._thread is not None:
                self._thread.stop()
        finally:
            self._ended = True
            if threading.current_thread() is threading.main_thread():
                self._restore_handlers()  # not earlier: a second SIGTERM must not kill a process that is closing

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._ranks.leave(error)
        try:
            self.close()
        except Exception:
            if error is None:
                raise
            log.exception("close_failed: after another error, which is raised")

    # --- batches --------------------------------------------------------------------------------------

    @property
    def next_step(self) -> int:
        """The first step that was not acknowledged. On rank 0 only."""
        self._refuse_on_other_ranks()
        return self.native.next_step

    @property
    def model_step(self) -> int:
        """The step of the weights that generate. On rank 0 only."""
        self._refuse_on_other_ranks()
        return self.native.model_step

    def batches(
        self, start: int | None = None, end: int | None = None, *, ahead: int = 1, timeout_s: float | None = None
    ) -> Iterator[Batch]:
        """See `AsyncRolloutLoader.batches`."""
        return _SyncBatches(self, self.native.batches(start, end, ahead=ahead, timeout_s=timeout_s))

    def next_batch(self, batches: Batches) -> Batch | None:
        """The next batch of an iteration; None at its end."""
        native = self.native
        step = self._ranks.run("batches", lambda: self._call(lambda: self._next_step(batches)))
        if step is None:
            return None
        self._hook(native.on_generate)
        if self._ranks.world_size > 1:
            batch = self._divided(batches, step)
        else:
            leased = self._lease(batches, step)
            batch = None if leased is None else self._batch(leased, None)
        if batch is None:
            return None
        try:
            self._hook(native.on_train)
        except BaseException:
            if self._ranks.rank == 0:
                self._call(native.take_back)
            raise
        native.hand_out(batches)
        return batch

    async def _next_step(self, batches: Batches) -> int | None:
        if self._ranks.stopping:
            self.native.stop()
        return await self.native.next_step_of(batches)

    def _lease(self, batches: Batches, step: int) -> AsyncBatch | None:
        return self._call(lambda: self.native.next_batch(batches, step), undo=lambda _: self.native.take_back())

    def _hook(self, hook: Hook | None) -> None:
        if hook is not None:
            self._settled(hook())

    def _batch(self, leased: AsyncBatch, groups: list[list[RolloutState]] | None) -> Batch:
        assert self._thread is not None
        content = {name: getattr(leased, name) for name in BatchContent.__struct_fields__}
        batch = Batch(**content, ranks=self._ranks, lease=Lease(leased.lease, self._thread))
        if groups is not None:
            batch.groups_by_task, batch.whole = _by_task(groups), False
        return batch

    def _divided(self, batches: Batches, step: int) -> Batch | None:
        """The part of this rank of the batch of a step."""
        leased: AsyncBatch | None = None

        def lease() -> list[Any]:
            nonlocal leased
            leased = self._lease(batches, step)
            if leased is not None and len(leased.groups) < self._ranks.world_size:
                log.warning("last_groups_left step=%d groups=%d: fewer than ranks", step, len(leased.groups))
                self._call(self.native.take_back)
                leased = None
            if leased is None:
                return [None] * self._ranks.world_size
            shards = [leased.shard(rank, self._ranks.world_size) for rank in range(self._ranks.world_size)]
            return [encode_groups(shard) for shard in shards]

        part = self._ranks.each("batches", lease)
        if part is None:
            return None
        groups = decode_groups(part)
        if leased is not None:
            return self._batch(leased, groups)
        return Batch(
            step=step,
            groups_by_task=_by_task(groups),
            task_batch_sizes={},
            task_results={},
            wait_s=0.0,
            whole=False,
            ranks=self._ranks,
            lease=None,
        )

    # --- weights and checkpoints ----------------------------------------------------------------------

    def update_weights(self, load: Load, step: int | None = None, *, path: str | PathLike[str] | None = None) -> None:
        """See `AsyncRolloutLoader.update_weights`. With several ranks, `load` is called on every one."""
        check_load(load, path)
        if path is not None:
            update = partial(self.native.update_weights, load, step, path=path)
            self._ranks.run("update_weights", lambda: self._call(update))
            return
        with self._failing_update() as by:
            begin = partial(self.native.begin_update, step, by)
            self._load(load, self._ranks.run("update_weights", lambda: self._call(begin)))

    def _load(self, load: Load | None, step: int) -> None:
        """Load the weights of a step on every rank, and generate again."""
        failed: BaseException | None = None
        try:
            if load is not None:
                self._settled(call_load(load, step))
        except BaseException as error:
            failed = error
        self._ranks.agree("load", failed)
        self._ranks.run("load", lambda: self._call(lambda: self.native.end_update(step)))

    @contextmanager
    def _failing_update(self) -> Iterator[object]:
        """An error or an interrupt in this block, at any moment, ends the update that it has begun as failed."""
        by = object()
        try:
            yield by
        except BaseException:
            if self._thread is not None:
                with suppress(RuntimeError):  # closed
                    self._thread.loop.call_soon_threadsafe(self.native.update.failed_by, by)
            raise

    def _settled(self, returned: Any) -> None:
        if isinstance(returned, Coroutine):
            self._call(lambda: settled(returned))

    def save(self, step: int, *, prompts_only: bool = False) -> Path:
        """See `AsyncRolloutLoader.save`."""
        save = partial(self.native.save, step, prompts_only=prompts_only)
        return Path(self._ranks.run("save", lambda: str(self._call(save))))

    def resume(self, load: Load | None = None, *, path: str | PathLike[str] | None = None) -> int | None:
        """See `AsyncRolloutLoader.resume`. With several ranks, `load` is called on every one."""
        with self._failing_update() as by:
            step = self._ranks.run("resume", lambda: self._call(lambda: self.native.begin_resume(path, by)))
            if step is not None:
                self._load(load, step)
        return step

    def state_dict(self) -> dict[str, Any]:
        """See `AsyncRolloutLoader.state_dict`."""
        return self.native.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `AsyncRolloutLoader.load_state_dict`."""
        self.native.load_state_dict(state)

    # --- the rest, on rank 0 --------------------------------------------------------------------------

    def evaluate(self, task: str | Task, *, max_in_flight: int | None = None) -> Evaluation:
        """See `AsyncRolloutLoader.evaluate`. Every rank gets the result."""
        evaluated: Evaluation | None = None

        def on_rank_0() -> list[Any]:
            nonlocal evaluated
            evaluated = self._call(partial(self.native.evaluated, task, max_in_flight))
            if self._ranks.world_size == 1:
                return []
            return [evaluated.model_step, evaluated.seconds, encode_groups(evaluated.groups)]

        self._hook(self.native.on_generate)
        try:
            sent = self._ranks.run("evaluate", on_rank_0)
        finally:
            self._hook(self.native.on_train)
        if evaluated is not None:
            return evaluated
        model_step, seconds, groups = sent
        decoded = decode_groups(groups)
        return Evaluation(model_step=model_step, seconds=seconds, groups=decoded)

    def set_weight(self, name: str, weight: float) -> None:
        """See `AsyncRolloutLoader.set_weight`."""
        self._ranks.run("set_weight", lambda: self._call(lambda: self.native.set_weight(name, weight)))

    def add_task(self, task: Task) -> None:
        """See `AsyncRolloutLoader.add_task`."""
        self._ranks.run("add_task", lambda: self._call(lambda: self.native.add_task(task)))

    def remove_task(self, name: str, *, keep: bool = True) -> None:
        """See `AsyncRolloutLoader.remove_task`."""
        self._ranks.run("remove_task", lambda: self._call(lambda: self.native.remove_task(name, keep=keep)))

    def set_prompts(self, name: str, prompts: Any) -> None:
        """See `AsyncRolloutLoader.set_prompts`."""
        self._ranks.run("set_prompts", lambda: self._call(lambda: self.native.set_prompts(name, prompts)))

    def ledger(self) -> dict[str, LedgerLine]:
        """See `AsyncRolloutLoader.ledger`. Not a collective: on rank 0 only."""
        return self._here(self.native.ledger)

    def stats(self) -> dict[str, float]:
        """See `AsyncRolloutLoader.stats`. Not a collective: on rank 0 only."""
        return self._here(self.native.stats)

    def explain_wait(self) -> str:
        """See `AsyncRolloutLoader.explain_wait`. Not a collective: on rank 0 only."""
        return self._here(self.native.explain_wait)

    def _here(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        self._refuse_on_other_ranks()
        return self._call(begin)

    def _refuse_on_other_ranks(self) -> None:
        if self._ranks.rank:
            raise InvalidInput(f"rank 0 owns the loader, and this is rank {self._ranks.rank}; ask there")


class _SyncBatches(Iterator[Batch]):
    """The iterator of `batches`. It does nothing when it is dropped."""

    def __init__(self, loader: RolloutLoader, native: Batches) -> None:
        self._loader, self._native = loader, native

    def __next__(self) -> Batch:
        batch = self._loader.next_batch(self._native)
        if batch is None:
            raise StopIteration
        return batch


def _by_task(groups: list[list[RolloutState]]) -> dict[str, list[list[RolloutState]]]:
    found: dict[str, list[list[RolloutState]]] = {}
    for group in groups:
        found.setdefault(group[0].task_name or "", []).append(group)
    return found
