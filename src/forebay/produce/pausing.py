"""One task of a strategy, and how a pause or the end stops it.

A pause is a barrier: afterwards no group of the task is in flight, and its engines have stopped our requests. Groups
that do not end in time are cancelled. Starting groups is up to the strategy.
"""

from __future__ import annotations

import asyncio
import logging

from forebay.agent_loop.base import AgentLoop
from forebay.core.aio import RESOLUTION_S, see_through
from forebay.errors import EngineError
from forebay.produce.inflight import Works
from forebay.produce.plan import Timeouts
from forebay.produce.stats import STAGES, Stage
from forebay.prompts.sampler import Sampler, SamplerWithReplayBuffer

log = logging.getLogger(__name__)


class ProducedTask:
    """The state of one task in a strategy."""

    def __init__(self, works: Works, timeouts: Timeouts) -> None:
        self.works = works
        self.timeouts = timeouts
        self.drawing: asyncio.Future[int] | None = None
        self.drawing_since: float | None = None
        self.producing = False
        self.pausing: set[asyncio.Future[None]] = set()
        self.paused: dict[AgentLoop, None] = {}  # a dict, because a set has no order
        self.used: dict[AgentLoop, None] = {}  # since the last pause: their engines may still run requests of ours
        self.told: dict[AgentLoop, int] = {}  # the weights that were last reported to a loop
        self.recalled = False  # whether groups left from an earlier run were searched for
        self.discarded: int | None = None  # groups of the ledger when this strategy first read it
        self.sampler: tuple[Sampler | SamplerWithReplayBuffer, SamplerWithReplayBuffer] | None = None

    async def resume(self, agent_loop: AgentLoop) -> None:
        """Resume every loop that this task paused, and the loop that it is about to use, even if another paused it."""
        if agent_loop.paused:
            self.paused[agent_loop] = None
        for paused in list(self.paused):
            await paused.resume()
            self.paused.pop(paused, None)

    async def pause(self) -> None:
        """Ask the agent loops to stop, wait for groups in flight, cancel the rest, and wait for idle engines."""
        pausing = asyncio.current_task()
        assert pausing is not None
        self.pausing.add(pausing)
        try:
            await self._bring_in()
        finally:
            self.pausing.discard(pausing)

    async def _bring_in(self) -> None:
        loop, timeouts = asyncio.get_running_loop(), self.timeouts
        works, began = self.works, loop.time()
        works.begin_pause()
        await self._end_drawing(timeouts.pause_timeout_s)
        agent_loops = works.agent_loops
        self.paused.update(dict.fromkeys(agent_loops))
        requests: list[asyncio.Task[None]] = []
        try:
            while len(works):
                # Suspects did not end by themselves before: they get one request, and delay no pause.
                limit = "pause_timeout_s" if works.relied_on else "pause_interval_s"
                grace_s = min(getattr(timeouts, limit), timeouts.pause_timeout_s)
                left_s = grace_s - (loop.time() - began)
                if left_s <= RESOLUTION_S:
                    log.warning("pause_timed_out task=%s groups=%d: cancelled", works.task_name, len(works))
                    works.pause.overdue = f"{limit}={grace_s:g}"
                    break
                requests = [request for request in requests if not request.done()]
                requests += [asyncio.create_task(self._request(agent_loop)) for agent_loop in agent_loops]
                await works.wait(min(timeouts.pause_interval_s, left_s))
            await works.stop()
        finally:
            works.pause.overdue = None
            for request in requests:
                request.cancel()
            if requests:  # one that ignores the cancel is left behind
                await asyncio.wait(requests, timeout=timeouts.cancel_timeout_s)
        await self._until_idle()
        works.figures.pauses += 1
        works.figures.pause_s += loop.time() - began

    async def _request(self, agent_loop: AgentLoop) -> None:
        try:
            async with asyncio.timeout(self.timeouts.pause_request_timeout_s):
                await agent_loop.pause()
        except Exception as error:
            log.warning("pause_request_failed loop=%s", type(agent_loop).__name__, exc_info=error)

    async def _until_idle(self) -> None:
        for agent_loop in list(self.used):
            try:
                async with asyncio.timeout(self.timeouts.idle_timeout_s):
                    await agent_loop.idle()
            except TimeoutError:
                raise EngineError(
                    f"the engine of {agent_loop!r:.200} still runs requests {self.timeouts.idle_timeout_s:g} s after a "
                    "pause (idle_timeout_s): it is not safe to give it new weights; see what else uses it"
                ) from None
            self.used.pop(agent_loop, None)

    async def stop(self) -> None:
        """Cancel everything; all groups are back in the buffer when this returns."""
        cancelled = await self._end_drawing(self.timeouts.cancel_timeout_s)
        await self.works.stop()
        if cancelled is not None:
            raise cancelled

    async def _end_drawing(self, timeout_s: float) -> asyncio.CancelledError | None:
        """Wait for a draw; one that the data set delays is cancelled. Returns a cancel of the caller."""
        drawing = self.drawing
        if drawing is None:
            return None
        try:
            await asyncio.wait((drawing,), timeout=timeout_s)
        except asyncio.CancelledError as stopped:
            await see_through(drawing)
            return stopped
        if not drawing.done():
            log.warning(
                "draw_timed_out task=%s seconds=%g: the data set does not answer", self.works.task_name, timeout_s
            )
            drawing.cancel()
        return await see_through(drawing)

    def explain(self) -> list[str]:
        """The number of groups in flight at each stage, the oldest of each, and outages of agent loops."""
        now, works = asyncio.get_running_loop().time(), self.works
        lines = [] if self.drawing_since is None else [f"  drawing: for {now - self.drawing_since:.1f} s"]
        by_stage: dict[str, list[Stage]] = {}
        for stage in works.stages:
            by_stage.setdefault(stage.name, []).append(stage)
        for name, stages in by_stage.items():
            oldest = stages[0]
            note = f"; {oldest.note}" if oldest.note else ""
            lines.append(
                f"  {name}: {len(stages)} groups, the oldest (group {oldest.group_id}, attempt {oldest.attempt}) for "
                f"{now - oldest.since:.1f} s{note}"
            )
        loops = dict.fromkeys((*works.agent_loops, *self.told))  # a paused task has no running loops
        return lines + [f"  {waits}" for loop in loops if (waits := loop.explain_wait()) is not None]

    def stats(self) -> dict[str, float]:
        """Flat figures for any logger, as `forebay/<task>/produce/...`."""
        works, prefix = self.works, f"forebay/{self.works.task_name}/produce"
        flat, stages = works.figures.flat(works.task_name, works.in_flight), works.stages
        flat |= {f"{prefix}/{name}": sum(stage.name == name for stage in stages) for name in STAGES}
        oldest = [works.age_s(stage) for stage in stages if stage.name == "generating"]
        flat[f"{prefix}/oldest_generation_s"] = max(oldest, default=0.0)
        if self.sampler is not None:
            flat[f"{prefix}/dropped_responses"] += self.sampler[1].dropped_responses
        return flat
