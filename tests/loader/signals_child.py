"""The training process of `child.py`, which gets a signal at a counted moment, or leaves the body of its loop there.

A moment is a name and a number: the n-th time that the process gets there.
- waiting: the main thread waits for a batch, which is never completed (counted are the answers begun before).
- body, loading, closing: in the body of the loop, in `load` of `update_weights`, while the loader closes.
- save begins, save ends: in `save`, before and after the checkpoint is written.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from forebay import InvalidInput, RolloutState
from tests.loader.child import SAVE_EVERY, Log, Weights, begin, groups_of, make_loader, make_tasks, report

STEPS = 2 * SAVE_EVERY


class OutOfMemory(Exception):
    """Raised in the body of the loop."""


class Life:
    """One process. `how`: the signal that it gets at its moment, or the way in which it leaves the body."""

    def __init__(self, directory: Path, url: str, mode: str, moment: str, how: str, *options: str) -> None:
        self.log, self.weights = Log(directory, None), Weights(directory)
        self._moment, _, number = moment.partition(":")
        self._left, self._how = int(number or 0), how
        self._acted = self._waits = self._pauses = False
        # What processes before this one completed needs no answer: only steps without end reach every number of them.
        self._endless = self._moment == "waiting"
        self._saves_last = "save in finally" in options
        stop_on = (signal.SIGTERM,) if "stop_on" in options else ()
        loops = {task.name: task.agent_loop for task in make_tasks(self.weights)}

        async def answer(state: RolloutState) -> Any:
            self._left -= self._moment == "waiting"
            if self._moment == "waiting" and self._left <= 0:
                while not self._waits and not self._pauses:  # noqa: ASYNC110 - another thread sets them
                    await asyncio.sleep(0)
                if self._waits:
                    if not self._acted:
                        self._act()
                    await asyncio.Event().wait()
            return await loops[state.task_name or ""].generate(state, enable_partial_rollout=True)

        self.loader = make_loader(directory, url, mode, self.weights, generate=answer, stop_on=stop_on)
        native = self.loader.native
        self._around(native, "next_batch", partial(self._set, waits=True), partial(self._set, waits=False))
        self._around(native.plane, "pause_produce", partial(self._set, pauses=True), partial(self._set, pauses=False))
        self._around(native.manager, "save", lambda: self.reach("save begins"), lambda: self.reach("save ends"))
        self._around(native.plane, "close", lambda: self.reach("closing"), lambda: None)

    def _set(self, *, waits: bool = False, pauses: bool = False) -> None:
        self._waits, self._pauses = waits, pauses

    @staticmethod
    def _around(owner: Any, name: str, before: Callable[[], object], after: Callable[[], object]) -> None:
        original: Callable[..., Awaitable[Any]] = getattr(owner, name)

        async def wrapped(*args: Any, **kwargs: Any) -> Any:
            before()
            result = await original(*args, **kwargs)
            after()
            return result

        setattr(owner, name, wrapped)

    def reach(self, moment: str) -> str:
        """The process has got to a moment; how it leaves the body now."""
        if moment != self._moment:
            return ""
        self._left -= 1
        return self._act() if self._left == 0 else ""

    def _act(self) -> str:
        self._acted = True
        self.log.write("moment")
        if self._how.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, self._how))
            return ""
        return self._how

    def _push(self, step: int) -> None:
        self.reach("loading")
        self.weights.push(step)

    def train(self) -> None:
        loader, weights, log = self.loader, self.weights, self.log
        saved = start = begin(loader, weights, log)
        try:
            for batch in loader.batches(start + 1, None if self._endless else start + STEPS):
                log.write("training", batch.step)
                groups = groups_of(batch)
                match self.reach("body"):
                    case "break":
                        break
                    case "return":
                        return
                    case "exception":
                        raise OutOfMemory
                    case "exit":
                        sys.exit(3)
                weights.trained[batch.step] = groups
                log.write("trained", batch.step, *(f"{name}:{group_id}" for name, group_id in groups))
                loader.update_weights(self._push)
                if batch.step % SAVE_EVERY == 0:
                    log.write("saving", batch.step)
                    weights.save(batch.step)
                    loader.save(batch.step)
                    saved = batch.step
                    log.write("saved", saved)
        finally:
            if self._saves_last and saved:
                self._save_again(saved)

    def _save_again(self, saved: int) -> None:
        try:
            self.loader.save(saved)
        except InvalidInput as error:
            self.log.write("refused" if "would skip them" in str(error) else f"error: {error}", saved)
        else:
            self.log.write("saved_again", saved)


def main(directory: str, url: str, mode: str, moment: str = "", how: str = "", *options: str) -> None:
    """Train some steps, up to a moment."""
    logging.disable(logging.WARNING)  # simulated failures are no news
    life = Life(Path(directory), url, mode, moment, how, *options)
    life.log.write("started")
    with life.loader:
        life.train()
        if not moment:
            report(life.loader, Path(directory))
    life.log.write("ended")
