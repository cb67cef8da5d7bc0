"""The base of both managers: tasks, planned steps, producing for all tasks, checkpoints of everything, statistics.

The plan of steps and the two clocks (the train step that comes next, the step of the weights that generate) belong to
the run (`manager.run`), which all managers of the same tasks on one store share; groups, counts and positions belong to
the buffer. The two managers differ in their loop only.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

from msgspec.structs import replace

from forebay.buffer.buffer import ReplayBuffer
from forebay.buffer.internal import internals
from forebay.buffer.lease import Lease
from forebay.core.aio import in_thread, see_through, uncancelled
from forebay.core.ledger import Clock, LedgerLine
from forebay.core.rollout import DRAWABLE, Status
from forebay.core.validate import checked_integer
from forebay.errors import BufferClosed, EndOfData, InvalidInput, ProduceError, StorageError, StoreAhead
from forebay.manager.agreement import Agreed
from forebay.manager.patience import Patience
from forebay.manager.results import AsyncBatch, describe_task
from forebay.manager.run import Run
from forebay.manager.saved import manifest_of, read_saved, restore, state_of
from forebay.manager.schedule import Consumed, ProduceProgress
from forebay.manager.task import ManagedTask, check_tasks, spare_groups, terms_of
from forebay.produce.inflight import Steps
from forebay.produce.plan import Demand, too_many_rejections
from forebay.produce.stats import Figures, quantile
from forebay.storage.base import TaskSummary

if TYPE_CHECKING:
    pass


log = logging.getLogger(__name__)


class Manager:
    """Tasks around one buffer. Not made directly."""

    _pauses_on_resume: ClassVar[bool] = False

    def __init__(
        self,
        tasks: Sequence[ManagedTask] | ManagedTask,
        replay_buffer: ReplayBuffer,
        *,
        sync_weights_interval: int = 1,
        drop_last: bool = False,
        storage_retry_s: float = 60.0,
    ) -> None:
        self.sync_weights_interval = checked_integer("sync_weights_interval", sync_weights_interval, least=1)
        self.drop_last = drop_last
        self.replay_buffer = replay_buffer
        self._patiently = Patience(replay_buffer, storage_retry_s, self._check_open)
        self._internals = internals(replay_buffer)
        self.tasks = check_tasks(tasks, replay_buffer, sync_weights_interval)
        self.run = Run(self._internals, terms_of(self.tasks, sync_weights_interval))
        self.steps = Steps(1, 0)
        self._joined: set[str] = set()
        self._asked = 0  # the last train step that was asked for
        self._met_store = False
        self._closed = False
        self._leases: list[Lease] = []  # leases that were open when the last batch was handed out
        self._consumed: Consumed | None = None  # by the last acknowledgement
        self._seen: dict[str, Figures] = {}
        self.adopt(self.tasks, self.run)

    def adopt(self, tasks: dict[str, ManagedTask], run: Run) -> None:
        """Have these tasks and this run from now on."""
        self.tasks, self.run, self.progress = tasks, run, run.progress
        run.on_change = self._follow
        self._internals.produces(self, tasks)
        outages = {id(task.agent_loop): task.agent_loop.outage for task in self.tasks.values() if task.weight > 0}
        for outage in outages.values():  # producing stops only if all engines are unreachable
            outage.peers = [other for other in outages.values() if other is not outage]
        self._internals.nudge()

    @property
    def leased_steps(self) -> set[int]:
        """The steps whose batch is handed out."""
        return {lease.train_step for lease in self._leases if lease.open}

    @property
    def model_step(self) -> int:
        """The step of the weights that generate."""
        return self.steps.model_step

    @property
    def next_train_step(self) -> int:
        """The first step that was not acknowledged."""
        return self.progress.next_consumer_step

    # --- the run --------------------------------------------------------------------------------------

    async def _join(self, batch_size: int | None, **roles: bool) -> None:
        """Take part in the run, once for each role."""
        new = {role for role in roles if role not in self._joined}
        if new or (batch_size is not None and batch_size != self.run.agreed.terms.batch_size):
            terms = replace(self.run.terms, batch_size=batch_size)
            await self._patiently(lambda: self.run.join(terms, leased=self.leased_steps, **roles))
            self._joined |= new

    def _follow(self) -> None:
        """The plan has changed, here or in another process. That of a run before is of no concern."""
        if self.run.member is None and not self._closed:
            return
        self.progress, self.steps.model_step = self.run.progress, self.run.agreed.model_step
        self._set_clock()

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Draw nothing meanwhile. Groups in flight continue."""
        yield

    # --- producing ------------------------------------------------------------------------------------

    async def _produce(
        self, sizes: Mapping[str, int], target: Callable[[str, LedgerLine], int | None] | None = None
    ) -> bool:
        """Have all tasks produce up to their targets, at the same time; whether all targets were reached.

        `target(name, ledger of the task)` is called when the ledger was read: groups of a batch that is acknowledged
        meanwhile are then counted as trained and no longer as owed. Without `target`, each task produces one complete
        batch. An exception of one task stops the others, brings their groups back, and is then raised.
        """
        spare = spare_groups(self.tasks, sizes, self.replay_buffer.max_groups)
        targets: dict[str, int | None] = {name: None for name in self.tasks if sizes[name]}
        if target is not None:
            ledger = await self.replay_buffer.ledger()
            owed = {name: target(name, ledger.get(name, {})) for name in self.tasks}
            targets = {name: groups for name, groups in owed.items() if groups is not None}
        if not targets:
            return True
        running = [
            asyncio.create_task(self._produce_task(name, sizes[name], groups, spare), name=f"produce {name}")
            for name, groups in targets.items()
        ]
        try:
            await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in running:
                task.cancel()
            cancelled = await see_through(asyncio.gather(*running, return_exceptions=True))
            if cancelled is not None:
                raise cancelled
        for task in running:
            if not task.cancelled() and (error := task.exception()) is not None:
                await self._clean_up()
                raise error
        return all(task.result() for task in running)

    async def _produce_task(self, name: str, batch_size: int, target: int | None, spare: int | None) -> bool:
        task = self.tasks[name]
        demand = Demand(
            task.agent_loop, task.sampler, batch_size, name, self.steps, target, self._is_stopped, spare, self.run
        )
        production = await task.strategy.produce(demand)
        if production.exhausted:
            await self._skip(name, production.rejections)
        if production.ended:
            left = production.left
            await self.run.change(lambda agreed, progress: progress.end_task(name, left, leased=self.leased_steps))
            log.info("task_ended task=%s left=%d: its data set has no more prompts", name, left)
            self._internals.nudge()
        if production.complete and production.available < production.target:
            raise ProduceError(
                f"should_continue_fn of task {name!r} stopped at {production.available} of {production.target} groups, "
                "but a manager hands out whole batches, and would wait forever; let it continue up to the target"
            )
        return production.complete

    async def _skip(self, name: str, rejections: int) -> None:
        """Filters reject all groups of a task: plan steps without it, until the next weight update."""
        left = [other for other, weight in self.progress.active_weights.items() if weight > 0 and other != name]
        if not left:
            raise too_many_rejections(name, rejections, self.tasks[name].strategy.last_error(name), skip=True)
        await self.run.change(lambda agreed, progress: progress.skip_task(name, leased=self.leased_steps))
        log.warning("task_skipped task=%s: filters reject all of its groups; tried again with newer weights", name)
        self._internals.nudge()

    async def _set_clocks(self, train_step: int | None = None) -> None:
        """Set the limits of all tasks, and their clock if it is given; expire groups that are too old by them."""
        await self._internals.advance(
            {
                name: Clock(train_step=train_step, model_step=self.model_step, limits=task.strategy.limits)
                for name, task in self.tasks.items()
            }
        )
        summary = await self._internals.summary(self.tasks)
        await self._internals.expiry.expire(name for name in self.tasks if summary.task(name).due)

    def _is_stopped(self) -> bool:
        return self._closed

    async def _pause_strategies(self, names: Collection[str]) -> float:
        """Bring in all groups in flight of these tasks; the seconds that this took."""
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*[self.tasks[name].strategy.pause(name) for name in names])
        return asyncio.get_running_loop().time() - began

    async def _close_strategies(self) -> None:
        """Return all groups in flight to the buffer; a cancel is raised afterwards."""
        strategies = {id(task.strategy): task.strategy for task in self.tasks.values()}.values()
        closing = await uncancelled(asyncio.gather(*[each.close() for each in strategies], return_exceptions=True))
        for problem in closing:
            if isinstance(problem, BaseException):
                raise problem

    async def _clean_up(self) -> None:
        """Return all groups in flight to the buffer after an error; that error is the one to raise."""
        try:
            await self._close_strategies()
        except Exception:
            log.exception("clean_up_failed: after another error, which is raised")

    def _check_open(self) -> None:
        if self._closed:
            raise BufferClosed("this manager was shut down; make a new one")

    # --- batches --------------------------------------------------------------------------------------

    async def _result(self, step: int, sizes: dict[str, int], lease: Lease, wait_s: float) -> AsyncBatch:
        self._leases = [held for held in (*self._leases, lease) if held.open]
        times: list[float] = []
        try:
            count = partial(self.replay_buffer.count_statuses, list(self.tasks), (*DRAWABLE, Status.COMPLETED))
            counts = await self._patiently(count)
        except BaseException as error:
            await lease.settle_on_exit(error)
            raise
        results, groups = {}, lease.groups_by_task
        for found in groups.values():  # which group was answered first must not change what the trainer computes
            found.sort(key=lambda group: group[0].group_id or 0)
        for name, task in self.tasks.items():
            figures = task.strategy.figures(name)
            new = figures.since(self._seen.get(name, Figures()))
            results[name] = describe_task(sizes.get(name, 0), new, counts[name], groups.get(name, ()), step)
            times += new.times_s
            self._seen[name] = figures.copy()
        lease.on_ack = lambda began: self._on_ack(step, began)
        lease.patiently = self._patiently
        return AsyncBatch(
            step=step,
            groups_by_task=groups,
            task_batch_sizes=dict(sizes),
            task_results=results,
            wait_s=wait_s,
            group_gen_p50_s=quantile(times, 0.5),
            group_gen_p99_s=quantile(times, 0.99),
            lease=lease,
        )

    async def _refuse_at_end(self, step: int) -> None:
        """EndOfData if every data set has ended, and nothing is left of any: newer weights would change nothing."""
        summary = await self._internals.summary(self.tasks)
        for name, task in self.tasks.items():
            found = summary.task(name)
            if task.weight > 0 and (
                found.unfinished or found.produced > found.line()["trained"] or not await task.exhausted(found.account)
            ):
                return
        self._refuse_empty(step, {}, 1)

    def _refuse_empty(self, step: int, sizes: Mapping[str, int], batch_size: int) -> None:
        """EndOfData if the data sets have no group left for a step, or, with `drop_last`, not enough for a batch."""
        groups = sum(sizes.values())
        if not groups or (groups < batch_size and self.drop_last):
            names = ", ".join(map(repr, self.tasks))
            raise EndOfData(f"train step {step} has {groups} of {batch_size} groups: the data of {names} has ended")

    async def _settle_owed(self) -> None:
        """Settle batches that could not be settled because the storage was unavailable: otherwise they stay leased."""
        for lease in self._leases:
            await self._patiently(lease.settle_owed)

    async def _on_ack(self, train_step: int, began: bool) -> None:
        # Awaited before the storage has it: owing too little for a moment is harmless, owing a batch twice is not.
        if began:
            earlier = min((lease.train_step for lease in self._leases if lease.open), default=train_step)
            if earlier < train_step:
                raise InvalidInput(
                    f"train step {train_step} is acknowledged, but the batch of step {earlier} is still leased; "
                    "acknowledge it first, or give it back"
                )
            self._consumed = await self._patiently(
                lambda: self.run.change(lambda agreed, progress: progress.consume(train_step))
            )
        elif self._consumed is not None and self._consumed.train_step == train_step:
            consumed, self._consumed = self._consumed, None
            with suppress(StorageError, BufferClosed):  # the batch is settled when the storage is back
                await self.run.change(lambda agreed, progress: progress.undo_consume(consumed))
        self._internals.nudge()
        log.info("step_acknowledged train_step=%d ok=%s", train_step, began)

    def _set_clock(self) -> None:
        """Results are judged for the step that was asked for last, or for the next one."""
        self.steps.train_step = max(self._asked, self.progress.next_consumer_step)

    async def _store_step(self) -> int:
        """The latest train step that this manager's tasks were asked for, in this run or an earlier one."""
        summary = await self._internals.summary(self.tasks)
        return max((summary.task(name).account.train_step or 0 for name in self.tasks), default=0)

    async def _refuse_store_ahead(self, train_step: int, model_step: int) -> None:
        """At the first step of a run: StoreAhead if the store was trained further."""
        if self._met_store:
            return
        step = await self._store_step()
        if step > train_step:
            raise StoreAhead(
                f"train step {train_step} with weights of step {model_step} was asked for, but this store has handed "
                f"out batches up to train step {step}; nothing was changed. Resume from a checkpoint, which sets the "
                f"store back to its weights (a loader: resume()); or continue from here: update_weights(load, {step}), "
                f"then train step {step + 1}; or begin with a new store"
            )
        await self._set_clocks()
        self._met_store = True

    # --- checkpoints ----------------------------------------------------------------------------------

    async def save(self, path: str | os.PathLike[str], model_step: int, *, no_save_replay_buffer: bool = False) -> None:
        """Write a checkpoint of everything that belongs to the weights of `model_step`, at any moment.

        It has groups (or, with `no_save_replay_buffer`, their prompts), also those in flight or leased, positions,
        limits, the plan of steps, credits, the ledger, and the state of agent loops that have one. An earlier
        checkpoint at this path is kept until the new one is complete.
        """
        self._refuse_to_skip(checked_integer("model_step", model_step, least=0))
        save = partial(self._internals.save, path, model_step=model_step, prompts_only=no_save_replay_buffer)
        save = partial(save, tasks=await self._patiently(self.run.own_tasks))
        await self._patiently(lambda: save(extra=lambda: {"manager": self._saved_state(model_step)}))

    def _refuse_to_skip(self, model_step: int) -> None:
        acknowledged = self.progress.next_consumer_step - 1
        if model_step < acknowledged:
            raise InvalidInput(
                f"a checkpoint for the weights of step {model_step}, but the batches up to step {acknowledged} were "
                "acknowledged: resuming from it would skip them; save the weights of the last acknowledged step"
            )

    def _saved_state(self, model_step: int) -> dict[str, Any]:
        self._refuse_to_skip(model_step)  # training continues while the files are prepared
        return state_of(self.progress.state(model_step), self.tasks, self._seen)

    async def resume(self, path: str | os.PathLike[str]) -> int:
        """Continue from a checkpoint; returns the model step of the weights that belong to it.

        Nothing is generated before the weights are loaded. Tasks may have been added; the groups of removed tasks stay
        in the buffer, unused. ChangedDataset if a task has another data set than when it was saved (see `Sampler`).
        """
        from forebay.codec.records import decode_account  # imported here, as the buffer does

        self._check_open()
        before = await in_thread(lambda: manifest_of(path))  # checked before anything is changed
        read_saved(before, path, self.progress.weights)
        for name, task in self.tasks.items():
            if name in before.accounts:
                account = decode_account(before.accounts[name])
                await task.sampler.compare_data(name, account.cursor, account.source_state)
        if await self.run.others():
            await self._join(None, trains=True)
            await self.run.remove_others()  # they work for the weights that are lost
        own = await self.run.own_tasks()
        manifest = await self._internals.resume(path, own)
        await self._join(None, trains=True)
        model_step, saved = read_saved(manifest, path, self.progress.weights)
        await self._internals.expiry.reset_newer(model_step, own)
        gone: set[str] = set()

        def restart(agreed: Agreed, progress: ProduceProgress) -> None:
            gone.update(progress.load_state(saved.progress))
            if not manifest.replay_buffer_saved:
                progress.forget_planned()
            agreed.model_step, agreed.begun, agreed.paused = model_step, True, self._pauses_on_resume

        self._asked = 0
        self._leases.clear()
        await self.run.begin_epoch(restart)
        self._seen |= restore(saved, self.tasks)
        gone |= {name for name in manifest.accounts if name not in self.tasks and (own is None or name in own)}
        if gone:
            log.warning(
                "tasks_kept_aside tasks=%s: this manager has no such tasks; their groups stay in the buffer until "
                "discard({'task_name': ...}, reason)",
                sorted(gone),
            )
        log.info("manager_resumed path=%s model_step=%d next_step=%d", path, model_step, self.steps.train_step)
        return model_step

    async def start_over(self) -> None:
        """Begin with the weights of step 0, without a checkpoint. See `Internals.start_over`.

        If the trainer before died without a save, living producers work for its weights, which are lost, and begin
        again, too. If it died just now, its lease is waited for.
        """
        over = bool(await self._patiently(self.run.others)) and await self._patiently(self._store_step) > 0
        if over:
            await self._join(None, trains=True)
            await self._patiently(self.run.remove_others)
        await self._patiently(self._start_over)
        if over:
            await self._patiently(lambda: self.run.begin_epoch(self._begin_at_0))

    async def _start_over(self) -> None:
        await self._internals.start_over(await self.run.own_tasks())

    def _begin_at_0(self, agreed: Agreed, progress: ProduceProgress) -> None:
        progress.load(ProduceProgress(progress.weights).dump())
        agreed.model_step, agreed.begun, agreed.paused = 0, True, False

    # --- reporting ------------------------------------------------------------------------------------

    async def ledger(self) -> dict[str, LedgerLine]:
        """The closed ledger of every task; see `ReplayBuffer.ledger`."""
        return await self._patiently(self.replay_buffer.ledger)

    async def stats(self) -> dict[str, float]:
        """Flat figures for any logger: the buffer's, the strategies', and how far producer and consumer are."""
        flat: dict[str, float] = dict(await self._patiently(self.replay_buffer.stats))
        for task in self.tasks.values():
            flat |= task.strategy.stats()
        await self._patiently(self.run.read)
        progress = self.run.progress
        flat["forebay/manager/next_train_step"] = progress.next_consumer_step
        flat["forebay/manager/future_step"] = progress.producer_future_step
        flat["forebay/manager/model_step"] = self.run.agreed.model_step
        flat["forebay/manager/producers"] = len(self.run.agreed.producers(self.run.owners))
        for name, target in progress.target.items():
            flat[f"forebay/{name}/consumed"], flat[f"forebay/{name}/target"] = progress.consumed[name], target
        return flat

    async def explain_wait(self) -> str:
        """What this manager waits for, by task: missing groups, groups in flight, the oldest of them and its age."""
        try:
            return f"{await self.replay_buffer.explain_wait()}\n{await self._explain_tasks()}"
        except StorageError as error:
            stages = [line for name, task in self.tasks.items() for line in task.strategy.explain(name)]
            return "\n".join([f"the storage does not answer: {error}", self._describe(), *stages])

    async def _explain_tasks(self) -> str:
        summary = await self._internals.summary(self.tasks)
        lines = [self._describe()]
        for name, task in self.tasks.items():
            owed = self.progress.owed(name, self.progress.target_upto)
            missing = self._missing(name, summary.task(name))
            lines.append(
                f"task {name!r}: {missing} groups missing of {owed} owed up to step {self.progress.target_upto}; "
                f"{task.strategy.in_flight(name)} in flight here"
            )
            lines += task.strategy.explain(name)
        return "\n".join(lines)

    def _missing(self, name: str, summary: TaskSummary) -> int:
        """Groups of a task that the planned steps still need."""
        owed = self.progress.owed(name, self.progress.target_upto)
        return max(0, summary.line()["trained"] + owed - summary.produced)

    def _describe(self) -> str:
        step, model_step = self.run.progress.next_consumer_step, self.run.agreed.model_step
        return f"manager: next train step {step}, generating with the weights of step {model_step}"

    # --- the end --------------------------------------------------------------------------------------

    async def shutdown(self) -> None:
        """Stop producing; all groups in flight are back in the buffer when this returns. The buffer stays open."""
        self._closed = True
        self._internals.produces(self, ())
        self._internals.nudge()
        try:
            await self._close_strategies()
            if self._joined:
                await self.run.leave()
        finally:
            with suppress(StorageError, BufferClosed):  # the next run then gets these batches again
                for lease in self._leases:
                    await lease.settle_owed()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            await self.shutdown()
        except Exception:
            if error is None:
                raise
            log.exception("shutdown_failed: after another error, which is raised")
