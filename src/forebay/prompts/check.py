"""Whether a sampler of a user's own class can be used by a strategy."""

from __future__ import annotations

from typing import Any

from forebay.errors import InvalidConfig
from forebay.prompts.sampler import Sampler, SamplerWithReplayBuffer


def check_sampler(sampler: Any) -> None:
    """InvalidConfig for a class with its own `sample`, which strategies do not call: they draw many groups at once."""
    for kind, used, advice in (
        (Sampler, Sampler.with_buffer, "with_buffer"),
        (SamplerWithReplayBuffer, SamplerWithReplayBuffer.draw, "draw and draw_again"),
    ):
        own = type(sampler)
        if isinstance(sampler, kind) and own.sample is not kind.sample and getattr(own, used.__name__) is used:
            raise InvalidConfig(
                f"{own.__qualname__} has its own sample(), which strategies do not call: they draw many groups at "
                f"once; override {advice} instead, or give the order by the data set: an object with __len__ and "
                "__getitem__ (shuffle=False), or a loader with state_dict"
            )
