"""Batches from several buffers: online experience and demonstrations, in given shares.

A batch has exactly the size that was asked for. Shares are kept by the rule that shares the seats of a batch among
tasks (`forebay.manager.schedule`): what a batch could not divide is made up for by the next ones. Rows are grouped by
source and gathered straight into their place; `source` says which buffer a row is from, by its position in the dict.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from forebay.core.validate import checked_integer
from forebay.errors import DamagedData, InvalidConfig, InvalidInput
from forebay.manager.schedule import Credits, allocate, load_credits, save_credits
from forebay.trajectory.buffer import TrajectoryReplayBuffer
from forebay.trajectory.data import dotted
from forebay.trajectory.restore import Shard, keyed_random, random_state, restored_random
from forebay.trajectory.schema import Schema

__all__ = ["MixedReplay"]

_MIXING = 2**32  # where a buffer has its rank in the key of its random sequence


class MixedReplay:
    """Draws from several buffers with the same fields: `MixedReplay({online: 0.5, demo: 0.5}).sample(256)`."""

    def __init__(self, shares: Mapping[TrajectoryReplayBuffer, float], *, seed: int = 0) -> None:
        """`seed` is only used by `shuffle`."""
        self.buffers = tuple(shares)
        if not all(isinstance(buffer, TrajectoryReplayBuffer) for buffer in self.buffers):
            raise InvalidConfig("shares have other keys than buffers; expected {buffer: share, ...}")
        for k, share in enumerate(shares.values()):
            if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share < math.inf:
                raise InvalidConfig(f"the share of source {k} is {share!r}; expected a number from 0")
        if not any(shares.values()):
            raise InvalidConfig("no buffer has a share above 0; expected {buffer: share, ...}")
        if len({buffer.arrays for buffer in self.buffers}) > 1:
            raise InvalidConfig(
                f"the buffers give {' and '.join(buffer.arrays for buffer in self.buffers)}; build all of them with "
                "the same `arrays`"
            )
        if checked_integer("seed", seed, least=0) >= 2**64:
            raise InvalidConfig(f"seed is {seed}; expected at most {2**64 - 1}")
        self._shares = {str(k): share for k, share in enumerate(shares.values())}
        exact = {name: Fraction(str(share)) for name, share in self._shares.items()}
        gains = {name: share / sum(exact.values()) for name, share in exact.items()}
        self._round = math.lcm(*[gain.denominator for gain in gains.values()])
        self._per_round = {name: int(gain * self._round) for name, gain in gains.items()}
        self._credits: Credits = {}
        self._random = keyed_random(seed, _MIXING)
        self._lock = threading.Lock()  # what a batch could not divide is the business of the next one

    def sample(self, num_chunks: int, *, shuffle: bool = False) -> dict[str, Any]:
        """Exactly `num_chunks` steps in the given shares, grouped by source (`shuffle` mixes them), as one dict.

        InvalidInput if a buffer that has to give some is empty, or if the buffers have different fields.
        """
        count = checked_integer("num_chunks", num_chunks, least=1)
        with self._lock:
            return self._sample(count, shuffle)

    def _sample(self, count: int, shuffle: bool) -> dict[str, Any]:
        # A whole number of rounds gives every source its exact share; the rule divides what is left.
        rounds, rest = divmod(count, self._round)
        sizes, credits = allocate(rest, self._shares, self._credits)
        sizes = {name: size + rounds * self._per_round[name] for name, size in sizes.items()}
        parts = [(k, buffer, sizes[str(k)]) for k, buffer in enumerate(self.buffers) if sizes[str(k)]]
        self._check_fields(parts)
        gatherer = parts[0][1].gatherer()
        batch = gatherer.batch(count, source=True)
        start = 0
        texts: list[str] = []
        for k, buffer, size in parts:
            batch.columns[("source",)][start : start + size] = k
            buffer.fill_batch(gatherer, batch, start, size, first_text=len(texts))
            texts += buffer.texts()
            start += size
        self._credits = credits
        if shuffle:
            order = self._random.permutation(count)
            mixed = gatherer.batch(count, source=True)
            for path, column in batch.columns.items():
                np.take(column, order, axis=0, out=mixed.columns[path], mode="clip")
            batch = mixed
        return gatherer.finish(batch, texts, (count,))

    def wait_ready(self, min_transitions: int = 1, timeout_s: float | None = None) -> None:
        """Wait until every buffer with a share has so many transitions; all together for at most `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for k, buffer in enumerate(self.buffers):
            if self._shares[str(k)]:
                buffer.wait_ready(min_transitions, None if deadline is None else max(deadline - time.monotonic(), 0))

    def state_dict(self) -> dict[str, Any]:
        """What the next batches depend on, besides the buffers."""
        with self._lock:
            return {"credits": save_credits(self._credits), "random": random_state(self._random)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another one stood; InvalidInput if that is not what `state_dict` gave."""
        try:
            credits = load_credits(dict(state["credits"]))
            random = restored_random(dict(state["random"]), 0, Shard(0, 1), 0)
        except (KeyError, TypeError, ValueError, ArithmeticError, DamagedData) as error:
            raise InvalidInput(f"this is no state of a mix: {type(error).__name__}: {error}") from None
        with self._lock:
            self._credits, self._random = credits, random

    def _check_fields(self, parts: list[tuple[int, TrajectoryReplayBuffer, int]]) -> None:
        first: Schema | None = None
        for k, buffer, size in parts:
            schema = buffer.schema
            if schema is None or not buffer.num_transitions:
                raise InvalidInput(f"source {k} is to give {size} transitions and is empty; wait_ready() waits for it")
            first = first or schema
            if schema != first:
                raise InvalidInput(f"source {k} has other fields than the first one: {_difference(first, schema)}")


def _difference(one: Schema, other: Schema) -> str:
    mine = {(table, field.path): str(field) for table in ("steps", "observations") for field in getattr(one, table)}
    theirs = {(table, field.path): str(field) for table in ("steps", "observations") for field in getattr(other, table)}
    for table, path in (*mine, *theirs):
        if mine.get((table, path)) != theirs.get((table, path)):
            there, here = theirs.get((table, path), "missing"), mine.get((table, path), "missing")
            return f"{dotted(path)} is {there} instead of {here}"
    return "the order of their fields"
