"""GRPO: what the groups of a batch say about how to change the policy. Plain torch, and all there is of it.

The members of a group answered the same prompt; how much better than its siblings a member did is the advantage of all
of its tokens. Each token's part in the loss is weighted by how much more likely it is now than it was for the weights
that sampled it (the stored log-probabilities), and clipped; tokens that `response_mask` masks out take no part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forebay import RolloutState
from tiny_grpo.model import Policy

__all__ = ["Batch", "advantages", "collate", "token_logprobs", "train_step"]


@dataclass(frozen=True)
class Batch:
    """Samples as one rectangle: all but `tokens` have a column for every token but the first, which nobody chose."""

    tokens: Tensor
    logprobs: Tensor  # of the weights that sampled them
    mask: Tensor  # 1 where a token was sampled and may be trained on
    advantages: Tensor  # one a sample


def advantages(rewards: Sequence[float]) -> list[float]:
    """How much better than its siblings each member of a group did, in standard deviations.

    >>> advantages([1.0, 0.0]), advantages([0.5, 0.5])
    ([1.0, -1.0], [0.0, 0.0])
    """
    scores = np.array(rewards)
    spread = scores.std()
    if spread < 1e-6:
        return [0.0] * len(scores)
    return ((scores - scores.mean()) / spread).tolist()  # type: ignore[no-any-return]


def collate(groups: Sequence[Sequence[RolloutState]]) -> Batch:
    """The samples of all groups, in the order of their ids: which came first must not matter."""
    samples: list[RolloutState] = []
    values: list[float] = []
    for group in sorted(groups, key=lambda group: (group[0].task_name or "", group[0].group_id or 0)):
        members = sorted(group, key=lambda state: state.rollout_id or 0)
        samples += members
        values += advantages([(state.reward or {})["score"] for state in members])
    columns = [(np.asarray(state.prompt_ids), np.asarray(state.response_ids)) for state in samples]
    shape = (len(samples), max(len(prompt) + len(response) for prompt, response in columns))
    tokens, logprobs, mask = np.zeros(shape, np.int64), np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for row, (state, (prompt, response)) in enumerate(zip(samples, columns, strict=True)):
        generated = np.s_[row, len(prompt) : len(prompt) + len(response)]
        tokens[row, : len(prompt)] = prompt
        tokens[generated] = response
        logprobs[generated] = np.asarray(state.logprobs)
        mask[generated] = 1 if state.response_mask is None else np.asarray(state.response_mask)
    return Batch(
        tokens=torch.from_numpy(tokens),
        logprobs=torch.from_numpy(logprobs[:, 1:]),
        mask=torch.from_numpy(mask[:, 1:]),
        advantages=torch.tensor(values, dtype=torch.float32),
    )


def token_logprobs(policy: Policy, tokens: Tensor, temperature: float) -> Tensor:
    """The log-probability of every token but the first, as the engine samples it."""
    logprobs = torch.log_softmax(policy(tokens[:, :-1]) / temperature, dim=-1)
    return logprobs.gather(-1, tokens[:, 1:, None]).squeeze(-1)


def train_step(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Sequence[RolloutState]],
    *,
    temperature: float = 1.0,
    clip: float = 0.2,
    max_gradient_norm: float = 1.0,
) -> dict[str, float]:
    """One step of the optimiser on a batch of groups; its figures."""
    batch = collate(groups)
    trained_tokens = batch.mask.sum()
    telling = batch.advantages != 0  # a group whose members did equally well adds nothing but time
    mask, advantage = batch.mask[telling], batch.advantages[telling, None]

    ratio = torch.exp(token_logprobs(policy, batch.tokens[telling], temperature) - batch.logprobs[telling])
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    loss = -(gain * mask).sum() / trained_tokens
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    gradient_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), max_gradient_norm)
    if telling.any():
        optimizer.step()

    clipped = ((ratio.detach() - 1).abs() > clip) * mask
    return {
        "loss": loss.item(),
        "gradient_norm": gradient_norm.item(),
        "clipped": clipped.sum().item() / max(1.0, mask.sum().item()),  # share of tokens beyond the clip, either way
        "surprise": -(batch.logprobs * batch.mask).sum().item() / trained_tokens.item(),  # estimates the entropy
        "telling": telling.float().mean().item(),  # share of samples that there was something to learn from
    }
