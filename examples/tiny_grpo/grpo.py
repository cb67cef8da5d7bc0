"""GRPO: how the tensors of a batch change the policy. Plain torch.

Forebay makes the tensors, and the advantage of each sample: how much better it did than the others of its group. Each
token's part in the loss is weighted by how much more likely it is now than it was for the weights that sampled it (the
stored log-probabilities), and clipped; tokens that the mask excludes take no part.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.collate import Padded
from tiny_grpo.model import Policy

__all__ = ["token_logprobs", "train_step"]


def token_logprobs(policy: Policy, tokens: Tensor, temperature: float) -> Tensor:
    """The log-probability of every token but the first, as the engine samples it."""
    logprobs = torch.log_softmax(policy(tokens[:, :-1]) / temperature, dim=-1)
    return logprobs.gather(-1, tokens[:, 1:, None]).squeeze(-1)


def train_step(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    batch: Padded[Tensor],
    *,
    temperature: float = 1.0,
    clip: float = 0.2,
    max_gradient_norm: float = 1.0,
) -> dict[str, float]:
    """One optimiser step on `batch.padded(pad_id=..., shifted=True)`; its figures."""
    assert batch.logprobs is not None
    assert batch.advantages is not None
    # Shifted: entry i belongs to the token that position i predicts. The last position predicts none.
    sampled, advantages, mask = batch.logprobs[:, :-1], batch.advantages[:, :-1], batch.loss_mask[:, :-1]
    tokens = mask.sum()
    useful = (mask & (advantages != 0)).any(dim=1)  # groups whose members did equally well have no gradient
    advantage, trained = advantages[useful], mask[useful]

    ratio = torch.exp(token_logprobs(policy, batch.input_ids[useful], temperature) - sampled[useful])
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    loss = -(gain * trained).sum() / tokens
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    gradient_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), max_gradient_norm)
    if useful.any():
        optimizer.step()

    clipped = ((ratio.detach() - 1).abs() > clip) & trained
    return {
        "loss": loss.item(),
        "gradient_norm": gradient_norm.item(),
        "clipped": clipped.sum().item() / max(1.0, trained.sum().item()),  # share of tokens beyond the clip, either way
        "surprise": -(sampled * mask).sum().item() / tokens.item(),  # estimates the entropy
        "useful": useful.float().mean().item(),  # share of samples that have a gradient
    }
