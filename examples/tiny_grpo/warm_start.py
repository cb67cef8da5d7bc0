"""A short supervised warm start: the form of the answers, and a first idea of what is asked for. No more than that.

Rewards can only favour what a policy sometimes does. So it is shown right answers for some seconds, and is told to stay
unsure (label smoothing): sampling, it gets about a third of the characters right, and tries everything else now and
then, too. Whatever is better than that, it has to find out from rewards. The prompts shown are drawn apart from those
of the training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its customary name

from tiny_grpo.model import Policy
from tiny_grpo.tasks import END, encode, task_records

__all__ = ["warm_start"]

_SHOWN = 24  # answers of each task in a step
_LABEL_SMOOTHING = 0.4
_LEARNING_RATE = 2e-3


def warm_start(policy: Policy, task_names: Sequence[str], *, steps: int, seed: int) -> None:
    """Make the policy imitate right answers for so many steps."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=_LEARNING_RATE)
    shown = {name: task_records(name, _SHOWN * steps, seed + 1_000_000) for name in task_names}
    for step in range(steps):
        these = slice(step * _SHOWN, (step + 1) * _SHOWN)
        tokens, mask = _collate([record for records in shown.values() for record in records[these]])
        logits = policy(tokens[:, :-1]).flatten(0, 1)
        losses = F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="none", label_smoothing=_LABEL_SMOOTHING)
        loss = (losses * mask[:, 1:].flatten()).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()


def _collate(records: Sequence[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts with their answers, and a mask of the answers."""
    rows = [(record["prompt_ids"], np.append(encode(record["answer"]), END)) for record in records]
    shape = (len(rows), max(len(prompt) + len(answer) for prompt, answer in rows))
    tokens, mask = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
    for row, (prompt, answer) in enumerate(rows):
        tokens[row, : len(prompt) + len(answer)] = np.append(prompt, answer)
        mask[row, len(prompt) : len(prompt) + len(answer)] = 1
    return torch.from_numpy(tokens), torch.from_numpy(mask)
