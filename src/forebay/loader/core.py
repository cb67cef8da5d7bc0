"""`AsyncRolloutLoader`: one object that feeds a trainer, with all rules of a loader. `RolloutLoader` is its other form.

- A batch is a lease. It is acknowledged by `batch.ack()`, by `update_weights` and `save` for batches up to their step,
  or when the next batch is asked for; never earlier. Leaving the loop otherwise acknowledges nothing: open batches are
  given back by the next `batches()`, or when the loader closes.
- New weights are loaded while nothing generates. If that fails, producing stays paused until it is repeated.
- `mode` decides when is generated: in turns with training, or ahead of it. It changes nothing else.

The loader composes a buffer, a manager and the parts of its tasks; what they guarantee holds here, too.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Self, cast

from forebay.buffer.group_ends import OnGroupEnd
from forebay.buffer.internal import internals
from forebay.core.aio import in_thread, uncancelled
from forebay.core.ledger import LedgerLine
from forebay.core.validate import checked_integer, positive_seconds
from forebay.errors import BufferClosed, EndOfData, ForebayError, InvalidConfig, InvalidInput
from forebay.loader.functions import Hook, Load, Signals, Stop, Update, call_load, check_load, settled
from forebay.loader.held import Batches, Held
from forebay.loader.plane import Mode, Plane, checked_mode
from forebay.loader.progress import ProgressLine, ShowProgress, showing
from forebay.loader.saves import Saves
from forebay.loader.store import StorageLike, open_buffer
from forebay.loader.task import Task
from forebay.loader.tokens import TokenSize
from forebay.manager.base import Manager
from forebay.manager.changes import change_tasks, reopen_task, set_weights
from forebay.manager.disaggregated import LoadWeights
from forebay.manager.results import AsyncBatch
from forebay.manager.task import ManagedTask
from forebay.produce.evaluate import Evaluation

log = logging.getLogger(__name__)

_DEFAULT_LINE = ProgressLine()


class AsyncRolloutLoader:
    """Feeds a trainer with batches of rollouts, on the event loop of its caller.

        loader = AsyncRolloutLoader(Task("math", prompts, generate, reward=score, group_size=8), batch_groups=64)
        async with loader:
            async for batch in loader.batches(1, 1000):
                train(batch.packed(max_tokens=16_384))
                await loader.update_weights(push_to_engine)

    `forebay.LoaderOptions` says what each argument is.
    """

    def __init__(
        self,
        tasks: Task | Sequence[Task],
        *,
        batch_groups: int | None = None,
        batch_tokens: int | None = None,
        max_staleness: int = 0,
        max_token_staleness: int | None = None,
        mode: Mode | None = None,
        sync_weights_interval: int = 1,
        storage: StorageLike = "memory",
        max_groups: int | None = None,
        max_bytes: int | None = None,
        checkpoints: str | PathLike[str] | None = None,
        keep_checkpoints: int = 3,
        epochs: int | None = None,
        drop_last: bool = False,
        timeout_s: float = 3600.0,
        on_generate: Hook | None = None,
        on_train: Hook | None = None,
        on_group_end: OnGroupEnd | None = None,
        progress: ShowProgress | None = _DEFAULT_LINE,
        produce: bool = True,
        stop_on: Sequence[signal.Signals] = (),
        storage_retry_s: float = 60.0,
    ) -> None:
        given = [tasks] if isinstance(tasks, Task) else list(tasks)
        for task in given:
            if not isinstance(task, Task):
                raise InvalidConfig(f"{task!r:.80} is not a task; expected Task(name, prompts, generate, ...)")
        if (batch_groups is None) == (batch_tokens is None):
            raise InvalidConfig("give either batch_groups (groups of a step) or batch_tokens (tokens of a step)")
        hooks = on_generate is not None or on_train is not None
        self.mode = checked_mode(mode, max_staleness, hooks=hooks, produce=produce)
        if not produce and batch_tokens is not None:
            raise InvalidConfig("batch_tokens needs the producer in this process; give batch_groups with produce=False")
        self.timeout_s = positive_seconds("timeout_s", timeout_s)
        self.saves = Saves(checkpoints, keep_checkpoints)
        self.stop_on = tuple(stop_on)
        self.on_generate, self.on_train = on_generate, on_train
        self.buffer, self.closes_buffer = open_buffer(storage, self.mode, max_groups, max_bytes, on_group_end)
        self._build: Callable[[Task], ManagedTask] = partial(
            Task.managed,
            buffer=self.buffer,
            max_staleness=max_staleness,
            max_token_staleness=max_token_staleness,
            sync_weights_interval=sync_weights_interval,
            epochs=epochs,
        )
        self.tasks = {task.name: task for task in given}
        self.plane = Plane(
            self.mode,
            [self._build(task) for task in given],
            self.buffer,
            sync_weights_interval=sync_weights_interval,
            drop_last=drop_last,
            produces=produce,
            storage_retry_s=storage_retry_s,
        )
        self.size = TokenSize(batch_groups, batch_tokens)
        self.plane.refuse_deadlock(self.size.groups)
        self._show = progress
        self._batches: Batches | None = None  # the iterator that may be used
        self._held = Held()
        self._loaded: int | None = None  # the step of the weights that were loaded last
        self.update = Update()
        self._evaluating, self._stop = False, Stop()
        self._signals = Signals()
        self._closed = False

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} of {', '.join(self.tasks)}, {self.mode}, on {type(self.buffer.storage).__name__}>"
        )

    @property
    def manager(self) -> Manager:
        """The manager below."""
        return self.plane.manager

    @property
    def batch_groups(self) -> int | None:
        """Groups of a step; None with `batch_tokens`, which changes it."""
        return self.size.groups if self.size.tokens is None else None

    @classmethod
    async def connect(cls, store: str, **options: Any) -> AsyncRolloutLoader:
        """A trainer on what other processes produce (`forebay produce`): a PostgreSQL URL, or the name of a Ray buffer.

        Tasks, batch size, ages and limits are those of the producers, which are waited for. `rank`, `world_size`: of
        trainers in several processes; each gets its part, and rank 0 updates weights and saves. `lease_s`: how long
        this process keeps its groups without a heartbeat (as the producers). The rest are `LoaderOptions`.
        """
        from forebay.loader.connect import connect  # here: it imports this module

        return await connect(store, **options)

    # --- opening and closing --------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.open()
        self._signals.handle(self.stop_on, self.stop)
        return self

    async def open(self) -> None:
        """Open the storage; everything else does it, too."""
        await internals(self.buffer).session.ready()

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            await self.close()
        except Exception:
            if error is None:
                raise
            log.exception("close_failed: after another error, which is raised")
        finally:  # not earlier: a second signal must not kill a process that returns its groups
            self._signals.restore()

    async def close(self) -> None:
        """Give open batches back, stop producing, return groups in flight, and close agent loops that can be closed."""
        if self._closed:
            return
        self._closed, self._batches = True, None
        try:
            with suppress(ForebayError):  # the storage is away: the next run gets them all the same
                await self._held.give_back()
            await self.plane.close()
        finally:
            try:
                for loop in {id(task.agent_loop): task.agent_loop for task in self.tasks.values()}.values():
                    if callable(close := getattr(loop, "close", None)):
                        await settled(close())
            finally:
                if self.closes_buffer:
                    await self.buffer.close()

    def stop(self) -> None:
        """End the loop after the current batch; a wait for a batch ends at once."""
        self._stop.request()

    async def _until_usable(self) -> None:
        """Wait while weights are loaded; InvalidInput if they could not be."""
        self._check_open()
        await self.update.ended()
        self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise BufferClosed("this loader is closed; make a new one")

    # --- batches --------------------------------------------------------------------------------------

    @property
    def next_step(self) -> int:
        """The first step that was not acknowledged."""
        return self.manager.next_train_step

    @property
    def model_step(self) -> int:
        """The step of the weights that generate."""
        return self.plane.model_step

    def batches(
        self, start: int | None = None, end: int | None = None, *, ahead: int = 1, timeout_s: float | None = None
    ) -> Batches:
        """The batches of steps `start` (the next one) to `end` (without one: until the data ends).

        Asking for the next batch acknowledges the one before. `ahead=n`: up to n batches may be leased at a time, for
        loaders that prefetch; they are then acknowledged in order by `ack`, `update_weights` or `save`, and not by
        asking. Batches that are still open from an earlier call are given back.
        """
        if start is not None:
            checked_integer("start", start, least=1)
        if end is not None:
            checked_integer("end", end, least=0)
        checked_integer("ahead", ahead, least=1)
        self._batches = Batches(self, start, end, ahead, timeout_s)
        return self._batches

    async def next_step_of(self, batches: Batches) -> int | None:
        """Settle earlier batches; the step whose batch is next, or None at the end of an iteration."""
        await self._until_usable()
        if batches is not self._batches:
            raise InvalidInput("batches() was called again; this iterator has ended, use the new one")
        if not batches.begun:
            await self._held.give_back()
            if batches.step is None and (rank := self.plane.ranks.get("rank")):  # only rank 0 knows what it resumed
                batches.step = await self.manager.run.handed_out_step(rank, self.timeout_s)
            batches.begun, batches.step = True, batches.step or self.next_step
        await self._held.give_back_pending()
        if batches.ahead == 1:
            await self._held.acknowledge()
        step = None if self._stop.requested else batches.next_step(self.next_step)
        if step is not None:
            self._held.refuse_more_than(batches.ahead)
        return step

    async def next_batch(self, batches: Batches, step: int) -> AsyncBatch | None:
        """Lease the batch of a step; None if the data has ended, or the loader was stopped.

        `hand_out` gives it to the caller, as the last thing that happens; until then `take_back` undoes it.
        """
        timeout_s = self.timeout_s if batches.timeout_s is None else batches.timeout_s
        lease = partial(self.plane.lease, step=step, timeout_s=timeout_s)
        try:
            async with showing(self._show, self.manager, step):
                filling = self.size.fill(lease, self.plane)
                self._held.pending = await self._stop.unless(filling, AsyncBatch.nack)
        except EndOfData as end:
            log.info("data_ended step=%d: %s", step, end)
            return None
        except BaseException:
            await uncancelled(self.take_back())
            raise
        return self._held.pending

    def hand_out(self, batches: Batches) -> None:
        """The caller gets the batch that was leased."""
        self._held.hand_out(batches)

    async def take_back(self) -> None:
        """Give back the batch that was leased and not handed out. It can be asked for again."""
        await self._held.give_back_pending()

    async def call_hook(self, name: str) -> None:
        """Call `on_generate` or `on_train`."""
        if (hook := getattr(self, name)) is not None:
            await settled(hook())

    # --- weights --------------------------------------------------------------------------------------

    async def update_weights(
        self, load: Load, step: int | None = None, *, path: str | PathLike[str] | None = None
    ) -> None:
        """Acknowledge the batches up to `step` (the current one), and load its weights while nothing generates.

        `load(step)`, or `load()`: plain or async. An `EngineControl` with the `path` of the weights does it in its own
        safe order. If it raises, generating stays paused and nothing is lost: repeat the call. Agent loops that take
        weights while they run are not paused.
        """
        check_load(load, path)
        step = await self.begin_update(step)
        with self.update.running():
            if path is not None:
                await cast(Any, load).update_weights(path, model_step=step, manager=self.plane)
            else:
                await settled(call_load(load, step))
            await self.end_update(step)

    async def begin_update(self, step: int | None, by: object = None) -> int:
        """Acknowledge the batches up to a step, and pause: the first half of `update_weights`. `by`: its call."""
        self._check_open()
        self._refuse_on_other_ranks("update_weights")
        self._refuse_while_evaluating()
        step = checked_integer("step", self._default_step() if step is None else step, least=0)
        if step < self.model_step:
            raise InvalidInput(
                f"update_weights to step {step}, but the weights of step {self.model_step} were already used; give a "
                "later step, or resume from a checkpoint"
            )
        self._refuse_later(step, "update_weights")
        await self._held.acknowledge(step)
        await self.update.idle()  # one at a time
        self._refuse_while_evaluating()
        self.update.begin(step, by)
        with self.update.running():
            await self.plane.pause_produce()
        return step

    def _refuse_while_evaluating(self) -> None:
        if self._evaluating:
            raise InvalidInput("the weights cannot be updated during evaluate(); wait until it has ended")

    def _latest(self) -> int | None:
        """The last step that was acknowledged, or whose weights were loaded; None before the first."""
        latest = max(self.next_step - 1, self._loaded or 0)
        return None if latest == 0 and self._loaded is None else latest

    def _refuse_later(self, step: int, verb: str) -> None:
        if self._batches is not None or self._latest() is not None:
            self._held.refuse_after(self._latest() or 0, step, verb)

    def _default_step(self) -> int:
        return self._held.trained_step(self._latest()) if self.update.step is None else self.update.step

    async def end_update(self, step: int) -> None:
        """Generate again, with the weights of a step: the second half of `update_weights`."""
        await self.plane.continue_produce(step)
        self._loaded = step
        self.update.end()

    def _refuse_on_other_ranks(self, verb: str) -> None:
        if rank := self.plane.ranks.get("rank"):
            raise InvalidInput(f"{verb} is up to rank 0 of the trainer, and this is rank {rank}")

    async def produce(self, *, load_weights: LoadWeights | None = None) -> None:
        """Only produce, for a trainer in another process, until the loader is closed. See `forebay produce`."""
        self._check_open()
        if self.batch_groups is None:
            raise InvalidConfig("batch_tokens needs the producer in the process of the trainer; use batch_groups")
        await self.plane.produce(self.batch_groups, load_weights)

    # --- checkpoints ----------------------------------------------------------------------------------

    async def save(self, step: int, *, prompts_only: bool = False) -> Path:
        """The weights of this step are on disk: write the checkpoint `step_<n>` that belongs to them.

        Batches up to the step count as trained. `prompts_only`: without responses, which are generated again.
        """
        self._refuse_on_other_ranks("save")
        path = self.saves.path(checked_integer("step", step, least=0))
        if step < self.next_step - 1:
            raise InvalidInput(
                f"save({step}), but the batches up to step {self.next_step - 1} were acknowledged: resuming from it "
                f"would skip them; save the weights of step {self.next_step - 1}, or of a later one"
            )
        self._refuse_later(step, "save")
        await self._held.acknowledge(step)
        await self.manager.save(path, step, no_save_replay_buffer=prompts_only)
        await in_thread(lambda: self.saves.note(path, step))
        return path

    async def resume(self, load: Load | None = None, *, path: str | PathLike[str] | None = None) -> int | None:
        """Continue from the newest checkpoint (or `path`): its step, or None if there is none.

        `load(step)`: your weights into trainer and engine; nothing is generated before. Batches continue at the step
        after it.
        """
        step = await self.begin_resume(path)
        if step is not None:
            with self.update.running():
                if load is not None:
                    await settled(call_load(load, step))
                await self.end_update(step)
        return step

    async def begin_resume(self, path: str | PathLike[str] | None, by: object = None) -> int | None:
        """Rewind to a checkpoint: the first half of `resume`. The second is `end_update`."""
        self._check_open()
        self._refuse_on_other_ranks("resume")
        if self._batches is not None:
            raise InvalidInput("resume before the first batch is asked for")
        found = Path(path) if path is not None else await in_thread(self.saves.newest)
        if found is None:
            await self.manager.start_over()
            return None
        step = self.saves.step_of(found) if self.update.step is not None else None  # loading its weights failed
        step = await self.manager.resume(found) if step is None else step
        self.saves.last, self._loaded = (str(found), step), step
        self.update.begin(step, by)
        return step

    def state_dict(self) -> dict[str, Any]:
        """The path and the step of the last save, for a trainer's own checkpoints; never groups."""
        return self.saves.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have `resume` continue from the save that `state_dict` described."""
        self.saves.load_state_dict(state)

    # --- evaluation -----------------------------------------------------------------------------------

    async def evaluate(self, task: str | Task, *, max_in_flight: int | None = None) -> Evaluation:
        """Answer every record of a task (by name, or another one) once, with the weights that generate now.

        Nothing is drawn for training meanwhile, and failures are reported as failures. The groups exist only here.
        """
        await self.call_hook("on_generate")
        try:
            return await self.evaluated(task, max_in_flight)
        finally:
            await self.call_hook("on_train")

    async def evaluated(self, task: str | Task, max_in_flight: int | None) -> Evaluation:
        """As `evaluate`, without the hooks."""
        await self._until_usable()
        if self._evaluating:
            raise InvalidInput("evaluate() is already running; one at a time")
        chosen = self._task(task) if isinstance(task, str) else task
        self._evaluating = True
        try:
            async with self.manager.hold():
                return await chosen.evaluate(self.model_step, max_in_flight)
        finally:
            self._evaluating = False

    # --- tasks that change ----------------------------------------------------------------------------

    async def set_weight(self, name: str, weight: float) -> None:
        """Change a task's share of the steps that were not handed out yet."""
        await self._until_usable()
        await set_weights(self.manager, {self._task(name).name: weight})

    async def add_task(self, task: Task) -> None:
        """Plan the steps that were not handed out yet with one more task."""
        await self._until_usable()
        if task.name in self.tasks:
            raise InvalidConfig(f"there already is a task {task.name!r}; remove it first, or use another name")
        await change_tasks(self.manager, [*self.manager.tasks.values(), self._build(task)])
        self.tasks[task.name] = task

    async def remove_task(self, name: str, *, keep: bool = True) -> None:
        """Plan the steps that were not handed out yet without a task. Leased batches stay valid.

        Its groups stay in the buffer, for a task of this name added later; or, unless `keep`, are discarded.
        """
        await self._until_usable()
        self._task(name)
        await change_tasks(self.manager, [task for task in self.manager.tasks.values() if task.name != name])
        del self.tasks[name]
        if not keep:
            await self.buffer.discard({"task_name": name}, "task_removed")

    async def set_prompts(self, name: str, prompts: Any) -> None:
        """Draw from other prompts from now on. Before anything was drawn, they replace those of the task."""
        await self._until_usable()
        task = self._task(name).with_prompts(prompts)
        self.manager.tasks[name].sampler.set_prompts(prompts)
        self.tasks[name] = task
        await reopen_task(self.manager, name)

    def _task(self, name: str) -> Task:
        if name not in self.tasks:
            raise InvalidInput(f"there is no task {name!r}; expected one of {', '.join(self.tasks)}")
        return self.tasks[name]

    # --- reporting ------------------------------------------------------------------------------------

    async def ledger(self) -> dict[str, LedgerLine]:
        """The closed ledger of every task; see `ReplayBuffer.ledger`."""
        return await self.manager.ledger()

    async def stats(self) -> dict[str, float]:
        """Flat figures for any logger."""
        return await self.manager.stats()

    async def explain_wait(self) -> str:
        """What the loader waits for, for people."""
        return await self.manager.explain_wait()
