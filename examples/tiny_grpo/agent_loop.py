"""Forebay's contract around the engine: one sample in, the same sample out with its tokens. Replace the engine here."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from forebay import AgentLoop, RolloutState, SampleParams, Status, finish_status
from tiny_grpo.engine import Engine
from tiny_grpo.model import Policy, PolicyConfig
from tiny_grpo.tasks import CONTEXT, END, MAX_ANSWER_TOKENS, VOCABULARY, decode

__all__ = ["TinyAgentLoop", "make_agent_loop"]


class TinyAgentLoop(AgentLoop):
    """Answers prompts with a tiny engine; continues interrupted answers if partial rollout is on."""

    def __init__(self, engine: Engine, params: SampleParams, *, seed: int = 0) -> None:
        self.engine = engine
        self.params = params
        self.seed = seed

    async def generate(self, state: RolloutState, *, enable_partial_rollout: bool) -> RolloutState:
        """Answer one sample."""
        if self.paused:
            state.status = Status.ABORTED
            return state
        if not enable_partial_rollout or state.response_ids is None:
            state.response_ids, state.logprobs, state.version_spans = np.zeros(0, np.int64), np.zeros(0, np.float32), ()
        begun = len(state.response_ids)
        # The random numbers of a sample are its own: who shares its batch, and when it came, does not matter.
        sample = (self.seed, zlib.crc32((state.task_name or "").encode()), state.rollout_id or 0, begun)
        completion = await asyncio.wrap_future(
            self.engine.submit(
                np.concatenate([state.prompt_ids, state.response_ids]),
                max_tokens=(self.params.max_tokens or MAX_ANSWER_TOKENS) - begun,
                temperature=self.params.temperature or 1.0,
                seed=sample,
            )
        )
        state.response_ids = np.concatenate([state.response_ids, completion.tokens])
        state.logprobs = np.concatenate([state.logprobs, completion.logprobs])
        state.response_model_steps = state.response_model_steps + completion.model_steps
        state.response = decode(state.response_ids)
        state.finish_reason = completion.finish_reason
        state.status = finish_status(completion.finish_reason)
        return state

    async def pause(self) -> None:
        """End running generations; they return with the tokens that they have."""
        await super().pause()
        self.engine.abort()

    async def load_weights(self, weights: Mapping[str, Tensor], model_step: int) -> None:
        """Generate with these weights from the next token on, and stamp tokens with their step."""
        await asyncio.wrap_future(self.engine.load_weights(weights, model_step))

    async def close(self) -> None:
        """End the engine."""
        await asyncio.to_thread(self.engine.close)


def make_agent_loop(temperature: float, seed: int) -> TinyAgentLoop:
    """A new engine in this process, on one core; its weights are not loaded yet."""
    torch.set_num_threads(1)
    engine = Engine(Policy(PolicyConfig(vocabulary=VOCABULARY, context=CONTEXT)), end_token=END)
    params = SampleParams(max_tokens=MAX_ANSWER_TOKENS, temperature=temperature)
    return TinyAgentLoop(engine, params, seed=seed)
