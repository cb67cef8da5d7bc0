"""A seed on a live engine: the members of a group differ, and on vLLM (SGLang ignores it) a run repeats."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from forebay import RolloutState, SampleParams
from tests.engines.plane import LIMIT_S, open_loop
from tests.engines.servers import Server

_MEMBERS = 4
_SEEDED = SampleParams(max_tokens=64, temperature=1.0, seed=7)


def _group() -> list[RolloutState]:
    """Members with one prompt, as a sampler makes them."""
    prompt = list(b"What is 3 plus 4?")
    return [
        RolloutState(message=[], task_name="math", group_id=0, rollout_id=number, prompt_ids=prompt)
        for number in range(_MEMBERS)
    ]


async def _answers(server: Server) -> list[tuple[int, ...]]:
    async with asyncio.timeout(LIMIT_S), open_loop(server, _SEEDED) as (loop, _):
        group = await loop.generate_group(_group())
    return [tuple(np.asarray(state.response_ids).tolist()) for state in group]


async def test_members_of_a_group_get_different_answers_with_one_seed(server: Server) -> None:
    answers = await _answers(server)
    assert [len(answer) for answer in answers] == [64] * _MEMBERS
    assert len(set(answers)) == _MEMBERS


@pytest.mark.engine("vllm")
async def test_the_same_seed_and_rollout_ids_give_the_same_answers(server: Server) -> None:
    assert await _answers(server) == await _answers(server)
