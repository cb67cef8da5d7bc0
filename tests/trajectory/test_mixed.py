"""Mixing buffers: exact sizes, shares that are right in every batch as far as they can be and over time exactly."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import InvalidConfig, InvalidInput, WaitTimeout
from forebay.trajectory import MixedReplay, TrajectoryReplayBuffer
from tests.trajectory.tagged import Made, assert_rows, flat, make, nested, plain


def filled(*made: Made, **options: Any) -> TrajectoryReplayBuffer:
    buffer = TrajectoryReplayBuffer(**options)
    buffer.add_trajectories([one.given for one in made])
    return buffer


def tiny(**options: Any) -> TrajectoryReplayBuffer:
    buffer = TrajectoryReplayBuffer(**options)
    buffer.add_trajectories([{"rewards": np.ones((4, 1))}])
    return buffer


def counts(batch: dict[str, Any], sources: int) -> list[int]:
    found: list[int] = np.bincount(plain(batch["source"]), minlength=sources).tolist()
    return found


def test_a_batch_is_grouped_by_source_and_every_row_is_of_it() -> None:
    """Texts of both: each buffer has its own codes."""
    online, demo = [make(k) for k in range(3)], [make(k, ends=[(1, 0)]) for k in range(5, 7)]
    with filled(*online) as one, filled(*demo, seed=2) as other:
        mix = MixedReplay({one: 0.5, other: 0.5})
        batch = mix.sample(40)
        source = plain(batch["source"])
        assert source.tolist() == [0] * 20 + [1] * 20
        assert batch["source"].dtype is torch.int64
        for k, made in ((0, online), (1, demo)):
            part: dict[str, Any] = {}
            for name, leaf in flat(batch).items():
                part[name] = (
                    [leaf[i] for i in np.flatnonzero(source == k)] if isinstance(leaf, list) else leaf[source == k]
                )
            assert_rows(nested(part), dict(enumerate(made)), newest=len(made) - 1, also=["source"])


def test_shuffling_mixes_whole_rows() -> None:
    online, demo = [make(k) for k in range(2)], [make(k + 10) for k in range(2)]
    with filled(*online) as one, filled(*demo) as other:
        mix = MixedReplay({one: 1, other: 3}, seed=4)
        batch = mix.sample(80, shuffle=True)
        assert counts(batch, 2) == [20, 60]
        source = plain(batch["source"])
        assert source.tolist() != sorted(source.tolist())
        # What tells trajectories of the two buffers apart is the source.
        words = [word.split("/")[0] for word in batch["curr_obs"]["word"]]
        ids = plain(batch["trajectory_id"]).tolist()
        assert words == [str(number + 10 * k) for number, k in zip(ids, source.tolist(), strict=True)]
        known = {
            number + 100 * k: made for k, all_made in enumerate((online, demo)) for number, made in enumerate(all_made)
        }
        batch["trajectory_id"] = batch["trajectory_id"] + 100 * batch["source"]
        assert_rows(batch, known, also=["source"])
        assert all(leaf.is_contiguous() for leaf in flat(batch).values() if isinstance(leaf, torch.Tensor))


@settings(max_examples=60, deadline=None)
@given(
    shares=st.lists(st.sampled_from([0.5, 0.25, 1, 2, 3, 0.1, 1 / 3, 0.7, 10]), min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=25),
)
def test_shares_are_exact_over_time(shares: list[float], sizes: list[int]) -> None:
    """Never a whole row too many, nor more than the rule's bound too few; odd sizes lose nothing."""
    buffers = [tiny(seed=k) for k in range(len(shares))]
    mix = MixedReplay(dict(zip(buffers, shares, strict=True)))
    exact = [Fraction(str(share)) for share in shares]
    total = [0] * len(shares)
    behind = sum(1 / k for k in range(2, len(shares) + 1))
    for size in sizes:
        batch = mix.sample(size)
        assert len(batch["rewards"]) == size
        total = [a + b for a, b in zip(total, counts(batch, len(shares)), strict=True)]
        for have, share in zip(total, exact, strict=True):
            ahead = have - float(share / sum(exact)) * sum(total)
            assert -behind - 1e-9 <= ahead < 1
    for buffer in buffers:
        buffer.close()


def test_sizes_that_divide_are_exact_in_every_batch() -> None:
    with tiny() as one, tiny() as two, tiny() as three:
        mix = MixedReplay({one: 0.5, two: 0.3, three: 0.2})
        for _ in range(5):
            assert counts(mix.sample(10), 3) == [5, 3, 2]
        assert counts(mix.sample(1000), 3) == [500, 300, 200]
        assert mix.sample(33)["rewards"].shape == (33,)  # the reference gives 32, or fewer


def test_a_share_of_nothing_may_be_of_an_empty_buffer() -> None:
    with tiny() as one, TrajectoryReplayBuffer() as empty:
        mix = MixedReplay({one: 1.0, empty: 0.0})
        mix.wait_ready(1, timeout_s=0)
        assert counts(mix.sample(7), 2) == [7, 0]


def test_a_buffer_that_is_empty_is_named_and_nothing_is_drawn() -> None:
    with tiny(seed=3) as one, TrajectoryReplayBuffer() as empty, tiny(seed=3) as twin, tiny(seed=9) as cleared:
        cleared.clear()
        for buffer in (empty, cleared):
            mix = MixedReplay({one: 0.5, buffer: 0.5})
            before = mix.state_dict()
            with pytest.raises(InvalidInput, match="source 1 is to give 4 transitions and is empty"):
                mix.sample(8)
            assert mix.state_dict() == before
        assert one.sample(20)["step"].tolist() == twin.sample(20)["step"].tolist()


def test_buffers_with_other_fields_are_refused_with_the_difference() -> None:
    with filled(make(0, text=False)) as one, filled(make(0)) as two, TrajectoryReplayBuffer() as three:
        named = dict(make(0, text=False).given)
        named["actions"] = named["actions"].astype(np.float64)
        three.add_trajectories([named])
        with pytest.raises(
            InvalidInput, match=r"source 1 has other fields than the first one: .*STRING.* instead of missing"
        ):
            MixedReplay({one: 1, two: 1}).sample(4)
        with pytest.raises(InvalidInput, match=r"actions is F64 \[T, B, 3\] instead of F32 \[T, B, 3\]"):
            MixedReplay({one: 1, three: 1}).sample(4)


def test_an_empty_buffer_that_gets_other_fields_later_is_found_out_then() -> None:
    with tiny() as one, TrajectoryReplayBuffer() as two:
        mix = MixedReplay({one: 1, two: 1})
        two.add_trajectories([{"rewards": np.ones((2, 2), np.float32)}])
        with pytest.raises(InvalidInput, match="rewards is F32"):
            mix.sample(2)


@pytest.mark.parametrize("shares", [[-1.0], [0.0], [0.0, 0.0], [math.nan], [math.inf], [True], ["1"], [None]], ids=repr)
def test_shares_are_numbers_from_zero(shares: list[Any]) -> None:
    buffers = [tiny() for _ in shares]
    with pytest.raises(InvalidConfig, match="share"):
        MixedReplay(dict(zip(buffers, shares, strict=True)))


def test_what_is_mixed_are_buffers() -> None:
    with pytest.raises(InvalidConfig, match="buffer"):
        MixedReplay({})
    with pytest.raises(InvalidConfig, match="buffer"):
        MixedReplay({"online": 1.0})  # type: ignore[dict-item]
    with tiny(arrays="numpy") as one, tiny(arrays="torch") as two:
        # Which kind came out used to depend on which of them had to give the first row.
        with pytest.raises(InvalidConfig, match="numpy and torch"):
            MixedReplay({one: 1, two: 1})
        for seed in (-1, 2**64, 1.5):
            with pytest.raises(InvalidInput, match="seed"):
                MixedReplay({one: 1}, seed=seed)  # type: ignore[arg-type]
        assert len(MixedReplay({one: 1}, seed=2**64 - 1).sample(3, shuffle=True)["step"]) == 3
        for wrong in (0, -1, 1.5, "3"):
            with pytest.raises(InvalidInput, match="num_chunks"):
                MixedReplay({one: 1}).sample(wrong)  # type: ignore[arg-type]


def test_what_comes_next_can_be_saved() -> None:
    """Who gets the row that could not be divided, and how rows are shuffled; as plain data."""

    def pair() -> tuple[TrajectoryReplayBuffer, TrajectoryReplayBuffer, MixedReplay]:
        one, two = tiny(seed=1), tiny(seed=2)
        return one, two, MixedReplay({one: 0.5, two: 0.2}, seed=5)

    one, two, mix = pair()
    for _ in range(3):
        mix.sample(3, shuffle=True)
    state = json.loads(json.dumps(mix.state_dict()))
    states = [buffer._generator.bit_generator.state for buffer in (one, two)]
    expected = [mix.sample(5, shuffle=True) for _ in range(6)]
    one, two, mix = pair()
    for buffer, saved in zip((one, two), states, strict=True):
        buffer._generator.bit_generator.state = saved
    mix.load_state_dict(state)
    for batch in expected:
        found = mix.sample(5, shuffle=True)
        assert found["source"].tolist() == batch["source"].tolist()
        assert found["step"].tolist() == batch["step"].tolist()


@pytest.mark.parametrize(
    "state",
    [{}, {"credits": {}}, {"credits": 5, "random": {}}, {"credits": {"0": "1/0"}, "random": {}}, None, 3],
    ids=repr,
)
def test_a_state_that_is_none_is_refused(state: Any) -> None:
    with tiny() as one:
        mix = MixedReplay({one: 1})
        before = mix.state_dict()
        with pytest.raises(InvalidInput, match="no state of a mix"):
            mix.load_state_dict(state)
        assert mix.state_dict() == before


def test_the_wait_for_all_has_one_time_limit() -> None:
    """It used to be one for each of them."""
    buffers = [TrajectoryReplayBuffer() for _ in range(3)]
    mix = MixedReplay(dict.fromkeys(buffers, 1.0))
    now, limits = 100.0, []

    def wait(min_transitions: int, timeout_s: float) -> None:
        nonlocal now
        now += 4
        limits.append(timeout_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forebay.trajectory.mixed.time.monotonic", lambda: now)
        for buffer in buffers:
            patch.setattr(buffer, "wait_ready", wait)
        mix.wait_ready(5, timeout_s=6)
    assert limits == [6, 2, 0]
    with pytest.raises(WaitTimeout, match="0 trajectories"):
        mix.wait_ready(5, timeout_s=0)
    for buffer in buffers[:2]:
        buffer.add_trajectories([{"rewards": np.ones((4, 2))}])
    with pytest.raises(WaitTimeout):
        mix.wait_ready(5, timeout_s=0)
    buffers[2].add_trajectories([{"rewards": np.ones((4, 2))}])
    mix.wait_ready(5, timeout_s=0)
