"""The logprobs that samples must have: those of a Hugging Face forward pass with the weights that their spans name.

`Reference.check` compares every version span of every sample. It also checks itself: with the weights of any other step
the logprobs of a span would be clearly different, so a span under the wrong version cannot pass unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from forebay import RolloutState

__all__ = ["TOLERANCE", "Findings", "Reference"]

TOLERANCE = 1e-4  # engines and Hugging Face differ by some 1e-6 in float32
_CLEAR = 1e-2
_ENOUGH_TOKENS = 4  # one token can have nearly the same logprob under two versions


@dataclass
class Findings:
    """What a check of samples found."""

    samples: int = 0
    spans: int = 0
    wrong: list[str] = field(default_factory=list)  # spans whose logprobs are not those of the weights they name
    ambiguous: list[str] = field(default_factory=list)  # long enough spans that other weights explain as well
    worst: float = 0.0
    by_spans: dict[int, int] = field(default_factory=dict)  # samples by their number of spans
    steps: set[int] = field(default_factory=set)

    def of_several_versions(self) -> int:
        """Samples that more than one version generated."""
        return sum(samples for spans, samples in self.by_spans.items() if spans > 1)


class Reference:
    """Every version of the tiny model, for computing logprobs."""

    def __init__(self, versions: Sequence[Path]) -> None:
        torch.set_num_threads(1)
        self._models: list[Any] = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in versions]
        for model in self._models:
            model.eval()

    def logprobs(self, model_step: int, state: RolloutState) -> NDArray[np.float32]:
        """One logprob for each token of the response, at temperature 1."""
        assert state.prompt_ids is not None
        assert state.response_ids is not None
        prompt, response = np.asarray(state.prompt_ids), np.asarray(state.response_ids)
        tokens = torch.from_numpy(np.concatenate((prompt, response)).astype(np.int64))
        with torch.inference_mode():
            logits = self._models[model_step](tokens[None]).logits[0, len(prompt) - 1 : -1]
        chosen = torch.log_softmax(logits.float(), dim=-1).gather(1, tokens[len(prompt) :, None])
        found: NDArray[np.float32] = chosen[:, 0].numpy()
        return found

    def check(self, samples: Iterable[RolloutState]) -> Findings:
        """Compare the logprobs of every version span with those of the weights that it names."""
        findings = Findings()
        for state in samples:
            self._check_sample(state, findings)
        return findings

    def _check_sample(self, state: RolloutState, findings: Findings) -> None:
        assert state.response_ids is not None
        assert state.logprobs is not None
        name = f"rollout {state.rollout_id} of group {state.group_id}"
        assert sum(tokens for _, tokens in state.version_spans) == len(state.response_ids) == len(state.logprobs), name
        findings.samples += 1
        spans = len(state.version_spans)
        findings.by_spans[spans] = findings.by_spans.get(spans, 0) + 1
        columns: dict[int, NDArray[np.float32]] = {}

        def difference(step: int, begin: int, end: int) -> float:
            if step not in columns:
                columns[step] = self.logprobs(step, state)
            return float(np.abs(columns[step] - np.asarray(state.logprobs))[begin:end].max())

        begin = 0
        for step, tokens in state.version_spans:
            end = begin + tokens
            what = f"{name}, tokens {begin} to {end}, version {step}"
            error = difference(step, begin, end)
            findings.spans += 1
            findings.steps.add(step)
            findings.worst = max(findings.worst, error)
            if not error <= TOLERANCE:  # NaN is wrong, too
                explained = [other for other in range(len(self._models)) if difference(other, begin, end) <= TOLERANCE]
                findings.wrong.append(f"{what}: off by {error:.2g}; the weights that explain it: {explained or 'none'}")
            for other in range(len(self._models) if tokens >= _ENOUGH_TOKENS else 0):
                if other != step and difference(other, begin, end) < _CLEAR:
                    findings.ambiguous.append(f"{what}: like version {other}")
            begin = end
