"""A whole data plane in front of live servers, as a training script would build it, and every sample it stored."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from msgspec.structs import replace

from forebay import (
    AsyncProduceStrategy,
    AsyncReplayBufferConfig,
    DisaggregatedAgentLoopManager,
    ManagedTask,
    NoProgress,
    OpenAIAgentLoop,
    RolloutState,
    SampleParams,
    Sampler,
)
from forebay.engines import EngineControl, EngineControls
from tests.engines.servers import MODEL_NAME, Server
from tests.engines.streams import StreamCounter
from tests.engines.tiny_model import VOCABULARY
from tests.support import closed_ledger

__all__ = ["GROUPS", "LIMIT_S", "Plane", "fresh_samples", "open_loop", "open_plane"]

LIMIT_S = 900.0  # against hanging; no test comes near it
GROUPS = 2  # of a batch
_TASK = "math"


def fresh_samples(members: int, first_rollout: int = 0) -> list[RolloutState]:
    """A group of prompts, all different, that nothing was generated for."""
    numbers = range(first_rollout, first_rollout + members)
    return [
        RolloutState(
            message=[], task_name=_TASK, group_id=0, rollout_id=number, prompt_ids=list(f"What is {number}?".encode())
        )
        for number in numbers
    ]


@asynccontextmanager
async def open_loop(
    servers: Server | Sequence[Server], params: SampleParams, control: EngineControl | EngineControls | None = None
) -> AsyncIterator[tuple[OpenAIAgentLoop, StreamCounter]]:
    """An agent loop that never stops at the end-of-text token, and the counter of what is streamed to it."""
    counter = StreamCounter()
    several = [servers] if isinstance(servers, Server) else servers
    async with counter.client() as client:
        loop = OpenAIAgentLoop(
            [f"{server.url}/v1" for server in several],
            MODEL_NAME,
            sample_params=replace(params, ignore_eos=True),
            vocabulary=VOCABULARY,
            engine=control,
            client=client,
        )
        async with loop:
            yield loop, counter


class Plane:
    """A manager with its producer, and every sample that was trained on."""

    def __init__(self, manager: DisaggregatedAgentLoopManager, loop: OpenAIAgentLoop, streamed: StreamCounter) -> None:
        self.manager, self.loop, self.streamed = manager, loop, streamed
        self.trained: list[RolloutState] = []

    def produce(self) -> asyncio.Task[None]:
        """Start the producer."""
        return asyncio.create_task(self.manager.produce_loop(GROUPS))

    async def train(self, train_step: int) -> None:
        """Take the batch of a step, and count it as trained."""
        async with self.manager.get_batch(GROUPS, train_step, timeout_s=LIMIT_S) as batch:
            self.trained += [state for group in batch.groups for state in group]

    async def interrupt(self, model_step: int) -> None:
        """Have the tokens that were generated so far stored with their versions, and continue with the same weights."""
        await self.streamed.more(300)
        await self.manager.pause_produce()
        await self.manager.continue_produce(model_step)
        await self.streamed.more(300)

    async def failed(self) -> int:
        """Groups that failed for good."""
        return (await self.manager.ledger())[_TASK]["failed"]

    async def tokens(self) -> int:
        """Tokens that were ever generated, wherever they are now."""
        return (await self.manager.replay_buffer.storage.summary()).ledger(tokens=True)[_TASK]["issued"]

    async def samples(self) -> list[RolloutState]:
        """All samples with tokens: those trained on, and those in the buffer. The ledger must be closed."""
        await closed_ledger(self.manager.replay_buffer, _TASK)
        records = await self.manager.replay_buffer.query({"task_name": _TASK})
        groups = [await self.manager.replay_buffer.read(record.uid) for record in records]
        buffered = [state for group in groups for state in group or ()]
        answered = [state for state in buffered if state.response_ids is not None and len(state.response_ids)]
        return [*self.trained, *answered]


@asynccontextmanager
async def open_plane(
    servers: Server | Sequence[Server],
    *,
    members: int,
    max_tokens: int,
    control: EngineControl | EngineControls | None = None,
) -> AsyncIterator[Plane]:
    """Partial rollout, over-issue, batches that may be two weight updates old; the producer is not started."""
    params = SampleParams(max_tokens=max_tokens, temperature=1.0)
    async with open_loop(servers, params, control) as (loop, counter):
        buffer = AsyncReplayBufferConfig(max_groups=256).build()
        strategy = AsyncProduceStrategy(
            buffer,
            over_sample_threshold=1.0,
            max_staleness=2,
            enable_partial_rollout=True,
            reward_fn=lambda state: 0.0,
            progress=NoProgress(),
        )
        sampler = Sampler(
            [{"prompt": f"What is {n} plus 4?"} for n in range(50)],
            group_size=members,
            tokenize=lambda state: list(state.message[0]["content"].encode()),
        )
        task = ManagedTask(name=_TASK, sampler=sampler, agent_loop=loop, strategy=strategy)
        async with asyncio.timeout(LIMIT_S), DisaggregatedAgentLoopManager([task], buffer) as manager:
            yield Plane(manager, loop, counter)
        await buffer.close()
