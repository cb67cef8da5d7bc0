"""Agent loops that tests run in actors, which import them from here. Each sample says what the loop does with it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forebay import AgentLoop, RolloutState, Status

__all__ = ["AheadOfTraining", "Crashing", "Raising", "Scripted", "WithoutEngine", "group_of", "make_raising"]


def group_of(members: int = 2, do: str = "answer", *, group_id: int = 7, **fields: Any) -> list[RolloutState]:
    """A group whose members are answered in this way: see `Scripted`."""
    identity: dict[str, Any] = {"task_name": "math", "group_id": group_id, "attempt": 2, "num_tries": 1}
    return [
        RolloutState(
            message=[{"role": "user", "content": "?"}],
            rollout_id=10 * group_id + index,
            extra_fields={"do": do},
            **(identity | fields),
        )
        for index in range(members)
    ]


class Unspeakable(Exception):
    """Can be neither pickled nor unpickled."""

    def __init__(self, one: int, *, two: int) -> None:
        super().__init__("unspeakable")
        self.lock = asyncio.Lock()
        self.frame = sys._getframe()


class Scripted(AgentLoop):
    """Does with each sample what the sample says, and records its calls."""

    def __init__(self) -> None:
        self.weights = 0
        self.loaded: list[Any] = []
        self.samples = 0
        self._begun = asyncio.Condition()
        self._released = asyncio.Event()

    async def generate(
        self, state: RolloutState, *, enable_partial_rollout: bool
    ) -> RolloutState | Sequence[RolloutState]:
        self.samples += 1
        async with self._begun:
            self._begun.notify_all()
        do = state.extra_fields.get("do", "answer")
        if do == "raise":
            raise ValueError("no such tool")
        if do == "unspeakable":
            raise Unspeakable(1, two=2)
        if do == "exit":
            sys.exit(3)
        if do == "die":
            os._exit(1)
        if do == "die_at_first" and _count(state.extra_fields["marks"]) <= state.extra_fields["deaths"]:
            os._exit(1)
        if do in ("hang", "wait"):
            self._write(state, 2)
            wait = asyncio.ensure_future(self._released.wait())
            pause = asyncio.ensure_future(self.until_paused())
            try:
                await asyncio.wait((wait, pause), return_when=asyncio.FIRST_COMPLETED)
            finally:
                wait.cancel()
                pause.cancel()
            if not self._released.is_set():
                state.status = Status.ABORTED
                return state
        self._write(state, 3)
        state.status, state.finish_reason = Status.COMPLETED, "stop"
        if do == "unsendable":
            state.extra_fields["object"] = object()
        if do == "unequal":
            state.logprobs = [0.0]
        if do == "segments":
            other = state.__copy__()
            other.segment = 1
            return [state, other]
        if do == "change":
            state.message[0]["content"] += "!"
        return state

    def _write(self, state: RolloutState, tokens: int) -> None:
        """Append n tokens; each token is the number of the weights that generated it."""
        before = [] if state.response_ids is None else list(state.response_ids)
        state.response_ids = np.array(before + [self.weights] * tokens, dtype=np.int32)
        state.response = "word " * len(state.response_ids)

    # --- called through `call_all` --------------------------------------------------------------------

    async def begun(self, samples: int) -> int:
        """Wait until n samples have begun here."""
        async with self._begun:
            await self._begun.wait_for(lambda: self.samples >= samples)
        return self.samples

    async def reset(self) -> None:
        self.__init__()  # type: ignore[misc]
        await self.resume()

    def release(self) -> None:
        """Answer the waiting samples."""
        self._released.set()

    def pid(self) -> int:
        return os.getpid()

    def node(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())

    async def load(self, weights: Any, *, scale: int = 1) -> int:
        """Load new weights, and record them."""
        await asyncio.sleep(0)
        self.weights = int(np.sum(weights)) * scale
        self.loaded.append(self.weights)
        return self.weights

    def history(self) -> list[Any]:
        return self.loaded

    async def never(self) -> None:
        await asyncio.Event().wait()

    def unspeakable(self) -> None:
        raise Unspeakable(1, two=2)

    def unpicklable(self) -> object:
        return sys._getframe()

    def is_paused(self) -> bool:
        return self.paused


class Raising(Scripted):
    """Raises from `generate_group`, or cancels itself, after the first member is answered."""

    async def generate_group(
        self, group: list[RolloutState], *, enable_partial_rollout: bool = False
    ) -> list[RolloutState]:
        do = group[0].extra_fields["do"]
        self._write(group[0], 3)
        group[0].status = Status.COMPLETED
        if do == "cancelled":
            raise asyncio.CancelledError
        if do == "nothing":
            return None  # type: ignore[return-value]
        if do == "foreign":
            return [*group[:1], *group_of(1, group_id=8)]
        raise RuntimeError("the engine is down")


class WithoutEngine(Scripted):
    """Its engine is away, and it is given up at once; some tokens came before."""

    down_timeout_s = 0.05

    async def generate(
        self, state: RolloutState, *, enable_partial_rollout: bool
    ) -> RolloutState | Sequence[RolloutState]:
        if state.response_ids is None:
            self._write(state, 2)
        raise ConnectionRefusedError("connection refused")


def _count(directory: str) -> int:
    """How often this was called with the directory, by any process."""
    number = len(list(Path(directory).iterdir())) + 1
    (Path(directory) / str(number)).touch(exist_ok=False)
    return number


class AheadOfTraining(Scripted):
    takes_weights_while_running = True


class Crashing(Scripted):
    """Ends its process while it is created."""

    def __init__(self) -> None:
        os._exit(1)


def make_raising() -> AgentLoop:
    raise LookupError("no engine here")
