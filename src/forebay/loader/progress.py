"""What a wait for a batch looks like from outside: one live line per step on a terminal, a log line otherwise.

`progress=` of a loader is a function that gets a `StepProgress` every half second while a batch is waited for, and once
when it is there. The default draws with click's progress bar.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeAlias

import msgspec

from forebay.core.rollout import Status
from forebay.errors import ForebayError
from forebay.manager.base import Manager

log = logging.getLogger(__name__)

_INTERVAL_S = 0.5
_LOG_INTERVAL_S = 10.0


class StepProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a wait for the batch of a train step."""

    step: int
    groups: int  # that are there
    wanted: int
    in_flight: int
    missing: Mapping[str, int]  # groups by task, of tasks that are waited for
    tokens_per_s: float  # generated in this process since the last time
    waited_s: float
    done: bool = False  # the batch was handed out, or the wait has ended otherwise

    def describe(self) -> str:
        """The state in a line, without the counts of groups.

        >>> StepProgress(step=3, groups=5, wanted=8, in_flight=4, missing={"math": 3}, tokens_per_s=1234.5,
        ...              waited_s=2.0).describe()
        '4 in flight, waits for math (3), 1,234 tokens/s'
        """
        waits = ", ".join(f"{name} ({groups})" for name, groups in self.missing.items())
        waiting = f", waits for {waits}" if waits else ""
        return f"{self.in_flight} in flight{waiting}, {self.tokens_per_s:,.0f} tokens/s"


ShowProgress: TypeAlias = Callable[[StepProgress], None]


class ProgressLine:
    """The default: a bar on standard error if that is a terminal; otherwise a log line every ten seconds."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._step: int | None = None
        self._logged_s = 0.0

    def __call__(self, state: StepProgress) -> None:
        if not _is_terminal():
            if not state.done and state.waited_s - self._logged_s >= _LOG_INTERVAL_S:
                self._logged_s = state.waited_s
                log.info(
                    "waiting_for_batch step=%d groups=%d/%d %s",
                    state.step,
                    state.groups,
                    state.wanted,
                    state.describe(),
                )
            self._logged_s = 0.0 if state.done else self._logged_s
            return
        if self._bar is None or self._step != state.step:
            import click  # here: `import forebay` does not need it

            self._end()
            self._step = state.step
            self._bar = click.progressbar(
                length=max(1, state.wanted), label=f"step {state.step}", show_eta=False, show_percent=False,
                show_pos=True, width=24, file=sys.stderr, item_show_func=lambda shown: shown,
            )  # fmt: skip
        self._bar.update(state.groups - self._bar.pos, state.describe())
        self._bar.render_progress()
        if state.done:
            self._end()

    def _end(self) -> None:
        if self._bar is not None:
            self._bar.render_finish()
            self._bar = None


def _is_terminal() -> bool:
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:  # closed
        return False


@asynccontextmanager
async def showing(show: ShowProgress | None, manager: Manager, step: int) -> AsyncIterator[None]:
    """Report the wait in this block. A report that raises is logged, and is the last one of the block."""
    if show is None:
        yield
        return
    last: list[StepProgress] = []
    watching = asyncio.create_task(_watch(show, manager, step, last), name=f"progress of step {step}")
    ended = False
    try:
        yield
        ended = True
    finally:
        watching.cancel()
        await asyncio.wait((watching,))
        if last:
            there = {"groups": last[0].wanted, "missing": {}} if ended else {}
            with suppress(Exception):  # it was logged
                show(msgspec.structs.replace(last[0], done=True, **there))


async def _watch(show: ShowProgress, manager: Manager, step: int, last: list[StepProgress]) -> None:
    """Show the state of a wait twice a second, and keep the last one that was shown."""
    clock = asyncio.get_running_loop().time
    began = clock()
    seen, seen_at = _tokens(manager), began
    try:
        while True:
            await asyncio.sleep(_INTERVAL_S)
            try:
                state = await _state(manager, step)
            except ForebayError:
                continue  # the wait itself says what is wrong
            now, tokens = clock(), _tokens(manager)
            rate = (tokens - seen) / (now - seen_at) if now > seen_at else 0.0
            seen, seen_at = tokens, now
            last[:] = [msgspec.structs.replace(state, tokens_per_s=rate, waited_s=now - began)]
            show(last[0])
    except Exception:
        last.clear()
        log.exception("progress_failed: the progress of step %d is no longer shown", step)


def _tokens(manager: Manager) -> int:
    return sum(task.strategy.figures(name).tokens for name, task in manager.tasks.items())


async def _state(manager: Manager, step: int) -> StepProgress:
    summary = await manager.run.read()
    planned = manager.progress.planned.get(step)
    sizes = {} if planned is None else planned.sizes
    there = {name: min(wanted, summary.task(name).fresh.get(Status.COMPLETED, 0)) for name, wanted in sizes.items()}
    return StepProgress(
        step=step,
        groups=sum(there.values()),
        wanted=sum(sizes.values()),
        in_flight=sum(summary.task(name).in_flight for name in manager.tasks),
        missing={name: wanted - there[name] for name, wanted in sizes.items() if wanted > there[name]},
        tokens_per_s=0.0,
        waited_s=0.0,
    )
