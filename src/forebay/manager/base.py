"""What both managers are: tasks, progress, one production for all tasks, checkpoints of the whole plane, figures.

A manager owns the two clocks (which step is trained next, which weights generate) and the plan of steps; groups,
counts and positions are the buffer's. Colocated and disaggregated differ in their loop only.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from forebay.buffer import ReplayBuffer
from forebay.checks import whole_number
from forebay.errors import BufferClosed, DamagedData, InvalidInput
from forebay.lease import Lease
from forebay.ledger import LedgerLine
from forebay.manager.progress import ProduceProgress
from forebay.manager.results import ProduceBatchResult, ProduceStatus, describe_task
from forebay.manager.task import Task, check_tasks
from forebay.produce.figures import Figures
from forebay.produce.work import Steps
from forebay.rollout import Status
from forebay.threads import see_through

__all__ = ["Manager"]

log = logging.getLogger(__name__)


class Manager:
    """Tasks around one buffer. Not made directly."""

    def __init__(
        self, tasks: Sequence[Task] | Task, replay_buffer: ReplayBuffer, *, sync_weights_interval: int = 1
    ) -> None:
        whole_number("sync_weights_interval", sync_weights_interval, least=1)
        self.replay_buffer = replay_buffer
        self.sync_weights_interval = sync_weights_interval
        self.tasks = check_tasks([tasks] if isinstance(tasks, Task) else tasks, replay_buffer, sync_weights_interval)
        self.progress = ProduceProgress({name: task.weight for name, task in self.tasks.items()})
        self.steps = Steps(1, 0)
        self._closed = False
        self._seen: dict[str, Figures] = {}
        self._batch_began: float | None = None

    @property
    def model_step(self) -> int:
        """The step of the weights that generate."""
        return self.steps.model_step

    @property
    def next_train_step(self) -> int:
        """The first step that was not acknowledged."""
        return self.progress.next_consumer_step

    # --- producing ------------------------------------------------------------------------------------

    async def _produce(self, sizes: Mapping[str, int], owed: Mapping[str, int]) -> bool:
        """Have every task that owes groups produce them, all together; whether all of it is there.

        One task's exception stops the others and brings their groups back, and then surfaces.
        """
        ledger = await self.replay_buffer.ledger()
        running: list[asyncio.Task[bool]] = []
        for name, groups in owed.items():
            if groups > 0:
                target = ledger.get(name, {}).get("trained", 0) + groups
                work = self._produce_task(name, sizes[name], target)
                running.append(asyncio.create_task(work, name=f"produce {name}"))
        if not running:
            return True
        try:
            await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            stopping = [task for task in running if not task.done()]
            for task in stopping:
                task.cancel()
            if stopping:
                cancelled = await see_through(asyncio.gather(*stopping, return_exceptions=True))
                if cancelled is not None:
                    raise cancelled
        failed = [task.exception() for task in running if not task.cancelled() and task.exception() is not None]
        if failed:
            assert failed[0] is not None
            await self._close_strategies()
            raise failed[0]
        return all(task.result() for task in running)

    async def _produce_task(self, name: str, batch_size: int, target: int) -> bool:
        task = self.tasks[name]
        production = await task.strategy.produce(
            task.agent_loop, task.sampler, batch_size, name, steps=self.steps, target=target, stopped=self._is_stopped
        )
        return production.complete

    def _is_stopped(self) -> bool:
        return self._closed

    async def _pause_strategies(self) -> float:
        """Bring in what is under way, of all tasks; seconds."""
        began = asyncio.get_running_loop().time()
        strategies = {id(task.strategy): task.strategy for task in self.tasks.values()}.values()
        await asyncio.gather(*[strategy.pause() for strategy in strategies])
        return asyncio.get_running_loop().time() - began

    async def _close_strategies(self) -> None:
        for task in self.tasks.values():
            await task.strategy.close()

    def _check_open(self) -> None:
        if self._closed:
            raise BufferClosed("this manager was shut down; make a new one")

    # --- batches --------------------------------------------------------------------------------------

    async def _result(
        self, train_step: int, status: ProduceStatus, sizes: dict[str, int], lease: Lease | None, produce_s: float
    ) -> ProduceBatchResult:
        counts = await self.replay_buffer.count_statuses(
            list(self.tasks), (Status.INIT, Status.COMPLETED, Status.ABORTED, Status.EXPIRED)
        )
        results = {}
        for name, task in self.tasks.items():
            figures = task.strategy.figures(name)
            results[name] = describe_task(sizes.get(name, 0), self._seen.get(name, Figures()), figures, counts[name])
            if lease is not None:
                self._seen[name] = figures.copy()
        groups = {} if lease is None else lease.groups_by_task
        if lease is not None:
            lease.on_ack = lambda began: self._on_ack(train_step, began)
        return ProduceBatchResult(
            train_step=train_step,
            status=status,
            groups_by_task=groups,
            task_batch_sizes=dict(sizes),
            task_results=results,
            produce_time_s=produce_s,
            lease=lease,
        )

    def _on_ack(self, train_step: int, began: bool) -> None:
        # Before the store has it: owing too little for a moment is harmless, owing a batch twice is not.
        if began:
            self.progress.consume(train_step)
        else:
            self.progress.undo_consume(train_step)
        self.steps.train_step = max(self.steps.train_step, self.progress.next_consumer_step)
        log.info("step_acknowledged train_step=%d ok=%s", train_step, began)

    # --- checkpoints ----------------------------------------------------------------------------------

    async def save(self, path: str | os.PathLike[str], model_step: int, *, no_save_replay_buffer: bool = False) -> None:
        """Write a checkpoint of the whole plane that goes with the weights of `model_step`, at any moment.

        In it: groups (or, with `no_save_replay_buffer`, their prompts), what is in flight, leases, positions, limits,
        the plan of steps, credits, the ledger, and the state of agent loops that have one. The one that was there
        stays until it is complete.
        """
        self._check_open()
        whole_number("model_step", model_step, least=0)
        acknowledged = self.progress.next_consumer_step - 1
        if model_step < acknowledged:
            raise InvalidInput(
                f"a checkpoint for the weights of step {model_step}, but the batches up to step {acknowledged} were "
                "acknowledged: resuming from it would skip them; save the weights of the last acknowledged step"
            )
        await self.replay_buffer.save_with(
            path,
            model_step=model_step,
            prompts_only=no_save_replay_buffer,
            extra=lambda: {"manager": self._saved_state(model_step)},
        )

    def _saved_state(self, model_step: int) -> dict[str, Any]:
        loops = {}
        for name, task in self.tasks.items():
            state_dict = getattr(task.agent_loop, "state_dict", None)
            if callable(state_dict):
                loops[name] = state_dict()
        return {"progress": self.progress.state(model_step), "agent_loops": loops}

    async def resume(self, path: str | os.PathLike[str]) -> int:
        """Take up a checkpoint; returns the model step whose weights belong to it.

        Nothing is generated before the weights are there. Tasks may have been added; the groups of removed ones are
        kept aside in the buffer.
        """
        self._check_open()
        manifest = await self.replay_buffer.resume_with(path)
        if manifest.model_step is None:
            raise DamagedData(
                f"the checkpoint at {path} does not say which weights it goes with; it was saved by a buffer without a "
                "model_step, and a manager cannot go on from it"
            )
        model_step = manifest.model_step
        content = manifest.extra.get("manager")
        gone: set[str] = set()
        if isinstance(content, dict):
            gone = self.progress.load_state(content.get("progress"))
            for name, state in (content.get("agent_loops") or {}).items():
                load = getattr(self.tasks[name].agent_loop, "load_state_dict", None) if name in self.tasks else None
                if callable(load):
                    load(state)
        else:
            self.progress.next_consumer_step = self.progress.producer_future_step = model_step + 1
        if not manifest.replay_buffer_saved:
            self.progress.forget_planned()
        gone |= set(manifest.accounts) - self.tasks.keys()
        if gone:
            log.warning("tasks_kept_aside tasks=%s: not among this manager's; their groups stay", sorted(gone))
        self.steps.train_step, self.steps.model_step = self.progress.next_consumer_step, model_step
        log.info("manager_resumed path=%s model_step=%d next_step=%d", path, model_step, self.steps.train_step)
        return model_step

    # --- looking --------------------------------------------------------------------------------------

    async def ledger(self) -> dict[str, LedgerLine]:
        """The closed ledger of every task; see `ReplayBuffer.ledger`."""
        return await self.replay_buffer.ledger()

    async def stats(self) -> dict[str, float]:
        """Flat figures for any logger: the buffer's, the strategies', and how far producer and consumer are."""
        flat: dict[str, float] = dict(await self.replay_buffer.stats())
        for task in self.tasks.values():
            flat |= task.strategy.stats()
        flat |= {
            "forebay/manager/next_train_step": self.progress.next_consumer_step,
            "forebay/manager/future_step": self.progress.producer_future_step,
            "forebay/manager/model_step": self.model_step,
        }
        for name in self.tasks:
            flat[f"forebay/{name}/consumed"] = self.progress.consumed[name]
            flat[f"forebay/{name}/target"] = self.progress.target[name]
        return flat

    async def explain_wait(self) -> str:
        """What is being waited for, by task: what is missing, what is in flight, the oldest of it and its age."""
        lines = [await self.replay_buffer.explain_wait(), self._describe()]
        for name, task in self.tasks.items():
            owed = self.progress.owed(name, self.progress.target_upto)
            available = await self.replay_buffer.produced(name)
            trained = (await self.replay_buffer.ledger()).get(name, {}).get("trained", 0)
            missing = max(0, trained + owed - available)
            lines.append(
                f"task {name!r}: {missing} groups missing of {owed} owed up to step {self.progress.target_upto}; "
                f"{task.strategy.in_flight(name)} being generated here"
            )
        return "\n".join(lines)

    def _describe(self) -> str:
        return (
            f"manager: next train step {self.progress.next_consumer_step}, generating with the weights of step "
            f"{self.model_step}"
        )

    # --- the end --------------------------------------------------------------------------------------

    async def shutdown(self) -> None:
        """Stop producing; what is in flight is back in the buffer when this returns. The buffer stays open."""
        self._closed = True
        self.replay_buffer.nudge()
        await self._close_strategies()

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.shutdown()
