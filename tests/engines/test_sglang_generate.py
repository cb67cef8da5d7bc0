"""`SGLangGenerateLoop` with a live SGLang: weights change while requests run, and every version span is true."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from forebay import (
    AsyncProduceStrategy,
    AsyncReplayBufferConfig,
    DisaggregatedAgentLoopManager,
    ManagedTask,
    NoProgress,
    RolloutState,
    SampleParams,
    Sampler,
    SGLangGenerateLoop,
    Status,
)
from forebay.engines import SGLangControl
from tests.engines.conftest import UPDATES
from tests.engines.plane import GROUPS, LIMIT_S, fresh_samples
from tests.engines.reference import Reference
from tests.engines.servers import Server
from tests.engines.tiny_model import VOCABULARY
from tests.support import closed_ledger

log = logging.getLogger(__name__)
pytestmark = pytest.mark.engine("sglang")

_PARAMS = SampleParams(max_tokens=300, temperature=1.0, ignore_eos=True)
_MEMBERS = 4


def _loop(server: Server, control: SGLangControl | None = None, *, stream: bool = True) -> SGLangGenerateLoop:
    return SGLangGenerateLoop(server.url, sample_params=_PARAMS, vocabulary=VOCABULARY, engine=control, stream=stream)


@pytest.mark.parametrize("stream", [True, False])
async def test_answers_have_the_logprobs_of_the_model(server: Server, reference: Reference, stream: bool) -> None:
    async with asyncio.timeout(LIMIT_S), _loop(server, stream=stream) as loop:
        group = await loop.generate_group(fresh_samples(_MEMBERS))
    assert {state.status for state in group} == {Status.COMPLETED}
    assert {state.version_spans for state in group} == {((0, 300),)}
    assert all(state.response for state in group)
    findings = reference.check(group)
    assert not findings.wrong


async def test_an_interrupted_answer_continues_as_if_it_had_not_been_interrupted(
    server: Server, reference: Reference
) -> None:
    greedy = replace(_PARAMS, temperature=0.0)
    whole, parts = fresh_samples(1), fresh_samples(1)
    for state in (*whole, *parts):
        state.sample_params = greedy
    async with asyncio.timeout(LIMIT_S), _loop(server) as loop:
        await loop.generate_group(whole)
        interruptions = 0
        while parts[0].status is not Status.COMPLETED:
            generating = asyncio.create_task(loop.generate_group(parts, enable_partial_rollout=True))
            await asyncio.sleep(0.3)
            await loop.pause()
            parts = await generating
            interruptions += parts[0].status is Status.ABORTED
            await loop.resume()
    assert interruptions > 0
    assert np.array_equal(np.asarray(parts[0].response_ids), np.asarray(whole[0].response_ids))
    assert parts[0].version_spans == ((0, 300),)


async def test_every_version_span_is_true_although_weights_change_while_requests_run(
    server: Server, versions: list[Path], reference: Reference
) -> None:
    control = SGLangControl(server.url, while_running=True)
    trained: list[RolloutState] = []
    async with asyncio.timeout(LIMIT_S), _loop(server, control) as loop:
        buffer = AsyncReplayBufferConfig(max_groups=256).build()
        strategy = AsyncProduceStrategy(buffer, over_sample_threshold=1.0, max_staleness=3, progress=NoProgress())
        sampler = Sampler(
            [{"prompt": f"What is {n} plus 4?"} for n in range(50)],
            group_size=_MEMBERS,
            tokenize=lambda state: list(state.message[0]["content"].encode()),
        )
        task = ManagedTask(name="math", sampler=sampler, agent_loop=loop, strategy=strategy)
        async with DisaggregatedAgentLoopManager([task], buffer) as manager:
            producing = asyncio.create_task(manager.produce_loop(GROUPS))
            for step in range(1, UPDATES + 1):
                async with manager.get_batch(GROUPS, step, timeout_s=LIMIT_S) as batch:
                    trained += [state for group in batch.groups for state in group]
                while not any(loop.in_flight.values()):  # noqa: ASYNC110 - an update of an idle server shows nothing
                    await asyncio.sleep(0.01)
                update = await control.update_weights(versions[step], model_step=step, manager=manager)
                assert update.checked > 0
            await manager.shutdown()
            await producing
        assert (await closed_ledger(buffer, "math")).get("failed", 0) == 0
        await buffer.close()
    findings = reference.check(trained)
    log.info("findings %s", findings)
    assert not findings.wrong
    assert not findings.ambiguous
    assert len(trained) == UPDATES * GROUPS * _MEMBERS
    assert all(state.num_tries <= 1 for state in trained)
    assert findings.of_several_versions() > 0, f"samples by number of spans: {findings.by_spans}"
