"""What `forebay.collate` costs: 1,024 samples of 2,048 tokens, beside what nobody can do without.

From arrays, the yardstick is one `np.concatenate` for each token column of the result, of pieces that already have the
right type and length. From Python lists, it is one `np.fromiter` for each list of each sample. The usual loop over
samples (tensors, then torch's `pad_sequence` for each column) and TRL's own padding and advantages do a part of the
same work: no versions, no positions, no micro-batches. CPU time of one thread, medians of alternating rounds.

Half of the time from arrays is the first touch of new memory. Free memory is therefore returned to the system before
each call (glibc): otherwise a call is fast or slow depending on what the call before it left behind. With memory that
the allocator keeps, both are faster, and the ratio of `pack` from arrays is about 2.05.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from _harness import Verdict, arguments, duration, table
from forebay import RolloutState
from forebay.collate import pack, pad

GROUPS, MEMBERS = 128, 8
PROMPT, RESPONSE = 512, 1_536
MAX_TOKENS = 16_384


def make_groups(*, lists: bool) -> list[list[RolloutState]]:
    random = np.random.default_rng(7)
    groups = []
    for group_id in range(GROUPS):
        prompt = random.integers(0, 100_000, PROMPT)
        group = []
        for rollout_id in range(MEMBERS):
            columns: dict[str, Any] = {
                "prompt_ids": prompt,
                "response_ids": random.integers(0, 100_000, RESPONSE),
                "logprobs": -random.random(RESPONSE).astype(np.float32),
                "response_mask": (random.random(RESPONSE) < 0.9).astype(np.int64),
            }
            if lists:
                columns = {name: column.tolist() for name, column in columns.items()}
            group.append(
                RolloutState(
                    message=[],
                    task_name="math",
                    group_id=group_id,
                    rollout_id=rollout_id,
                    version_spans=((5, 1_000), (6, RESPONSE - 1_000)),
                    reward={"score": float(random.random())},
                    **columns,
                )
            )
        groups.append(group)
    return groups


def return_free_memory() -> None:
    """Every call begins with the same allocator: no free memory. Other C libraries than glibc are left as they are."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def medians_us(works: dict[str, Callable[[], Any]], repeat: int) -> dict[str, float]:
    """Median CPU time of each call; rounds alternate, so that a slow spell of the machine meets all of them."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(repeat + 1):
        for name, work in works.items():
            gc.collect()
            return_free_memory()
            start = time.thread_time_ns()
            result = work()
            if turn:  # the first round warms up
                times[name].append((time.thread_time_ns() - start) / 1_000)
            del result
    return {name: statistics.median(taken) for name, taken in times.items()}


def concatenated(groups: list[list[RolloutState]]) -> Callable[[], Any]:
    """One `np.concatenate` for each of the six token columns that `pack` returns."""
    tokens = PROMPT + RESPONSE
    states = [state for group in groups for state in group]
    columns: list[list[np.ndarray[Any, Any]]] = [
        [np.concatenate([np.asarray(state.prompt_ids), np.asarray(state.response_ids)]) for state in states],
        [np.arange(tokens) for _ in states],
        [np.ones(tokens, dtype=np.bool_) for _ in states],
        [np.zeros(tokens, dtype=np.float32) for _ in states],
        [np.zeros(tokens, dtype=np.float32) for _ in states],
        [np.zeros(tokens, dtype=np.int64) for _ in states],
    ]
    return lambda: [np.concatenate(column) for column in columns]


def from_iterators(groups: list[list[RolloutState]]) -> list[Any]:
    """One `np.fromiter` for each list of each sample."""
    dtypes = {"prompt_ids": np.int64, "response_ids": np.int64, "logprobs": np.float32, "response_mask": np.bool_}
    return [
        np.fromiter(getattr(state, name), dtype, len(getattr(state, name)))
        for group in groups
        for state in group
        for name, dtype in dtypes.items()
    ]


def usual_loop(groups: list[list[RolloutState]]) -> list[Any]:
    """Three columns by a loop over samples and `pad_sequence`, and GRPO advantages."""
    ids, masks, logprobs, scores = [], [], [], []
    for group in groups:
        for state in group:
            prompt, response = torch.as_tensor(state.prompt_ids), torch.as_tensor(state.response_ids)
            ids.append(torch.cat([prompt, response]))
            masks.append(torch.cat([torch.zeros(len(prompt), dtype=torch.long), torch.as_tensor(state.response_mask)]))
            logprobs.append(torch.cat([torch.zeros(len(prompt)), torch.as_tensor(state.logprobs)]))
            scores.append((state.reward or {})["score"])
    rewards = torch.tensor(scores).view(GROUPS, MEMBERS)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    padded = [torch.nn.utils.rnn.pad_sequence(column, batch_first=True) for column in (ids, masks, logprobs)]
    return [*padded, advantages]


def trl_padding() -> Callable[[list[list[RolloutState]]], Any] | None:
    """The part of TRL's GRPOTrainer that turns token lists into padded tensors; None if TRL is not installed."""
    try:
        from trl.trainer.utils import pad as trl_pad
    except ImportError:
        return None

    def padded(groups: list[list[RolloutState]]) -> list[Any]:
        states = [state for group in groups for state in group]
        prompts = [torch.tensor(state.prompt_ids) for state in states]
        responses = [torch.tensor(state.response_ids) for state in states]
        logprobs = [torch.tensor(state.logprobs) for state in states]
        masks = [torch.tensor(state.response_mask) for state in states]
        prompt_ids = trl_pad(prompts, padding_value=0, padding_side="left")
        prompt_mask = trl_pad([torch.ones_like(ids) for ids in prompts], padding_value=0, padding_side="left")
        response_ids = trl_pad(responses, padding_value=0, padding_side="right")
        response_mask = trl_pad([torch.ones_like(ids) for ids in responses], padding_value=0, padding_side="right")
        sampled = trl_pad(logprobs, padding_value=0.0, padding_side="right")
        tools = trl_pad(masks, padding_value=1, padding_side="right")
        joined = torch.cat([prompt_ids, response_ids], dim=1), torch.cat([prompt_mask, response_mask], dim=1)
        rewards = torch.tensor([(state.reward or {})["score"] for state in states]).view(GROUPS, MEMBERS)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        return [*joined, response_mask * tools, sampled, advantages]

    return padded


def main() -> None:
    options = arguments(__doc__)
    verdict = Verdict("collate", options)
    torch.set_num_threads(1)  # the CPU time of one thread is all of it
    repeat = 7 if options.quick else 25
    trl = trl_padding()

    for kind in ("arrays", "lists"):
        groups = make_groups(lists=kind == "lists")
        yardstick = "np.concatenate per column" if kind == "arrays" else "np.fromiter per column"
        works: dict[str, Callable[[], Any]] = {
            yardstick: concatenated(groups) if kind == "arrays" else partial(from_iterators, groups),
            "pack": partial(pack, groups, max_tokens=MAX_TOKENS),
            "pad": partial(pad, groups, pad_id=0),
            "loop with pad_sequence (3 columns)": partial(usual_loop, groups),
        }
        if trl is not None:
            works["TRL's padding (4 columns)"] = partial(trl, groups)
        taken = medians_us(works, repeat)
        base = taken[yardstick]
        rows = [[name, duration(us), f"{us / base:.2f}"] for name, us in taken.items()]
        table([f"{GROUPS * MEMBERS:,} samples of {PROMPT + RESPONSE:,} tokens from {kind}", "CPU", "ratio"], rows)
        limit = 2.0 if kind == "arrays" else 1.2
        verdict.at_most(f"pack from {kind} / {yardstick}", taken["pack"] / base, limit, "times")
    if trl is None:
        print("TRL not installed: `make test-trainers` builds .venv-trainers, which has it\n")
    verdict.finish()


if __name__ == "__main__":
    main()
