"""Many ranks, one loader: real processes with torch.distributed over gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forebay import InvalidConfig, RankFailed, RolloutLoader, TorchBroadcast, WaitTimeout, WeightsTooOld
from forebay.loader.ranks import Ranks, _decode, _describe, _encode
from tests.loader.plane import Engine, task


def ranks(world_size: int, program: str, directory: Path) -> list[dict[str, Any]]:
    """What every rank of a program saw."""
    (directory / "meet").unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.loader.rank_child"]
    children = [
        subprocess.Popen([*command, str(rank), str(world_size), program, str(directory)], stdout=subprocess.PIPE)
        for rank in range(world_size)
    ]
    printed = [child.communicate()[0] for child in children]
    assert [child.returncode for child in children] == [0] * world_size
    return [json.loads(line) for line in printed]


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_gets_its_part_of_the_same_step_and_rank_0_acknowledges(tmp_path: Path, world_size: int) -> None:
    lives = [ranks(world_size, "train", tmp_path) for _ in range(2 if world_size == 2 else 1)]
    for number, life in enumerate(lives):
        first = 1 + 3 * number  # step 3 was saved
        for step in range(first, first + 4):
            parts = [found["seen"][str(step)] for found in life]
            groups = sorted(group for part in parts for group in part)
            assert groups == [*range(7 * (step - 1), 7 * step)]
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
        for tokens in zip(*[found["tokens"] for found in life], strict=True):
            assert max(tokens) - min(tokens) <= 20
        steps = [*range(first, first + 4)]
        assert all(found["loaded"] == ([first - 1] if number else []) + steps for found in life)
        assert [found["evaluated"] for found in life] == [100] * world_size
        assert [found["generated"] > 0 for found in life] == [True] + [False] * (world_size - 1), "rank 0 owns it"
        line = life[0]["ledger"]["math"]
        assert (line["trained"], line["leased"]) == (7 * (first + 3), 0)


def test_an_error_of_one_rank_reaches_all(tmp_path: Path) -> None:
    zero, one = (found["errors"] for found in ranks(2, "errors", tmp_path))
    assert one[0] == "OSError: no route"
    assert zero[0] == "RankFailed: rank 1 failed: OSError: no route"
    assert zero[1:] == one[1:] == ["too old for 4", "given back", "again 4"]


def test_ranks_that_part_are_told_who_did_what(tmp_path: Path) -> None:
    zero, one = (found["errors"] for found in ranks(2, "apart", tmp_path))
    assert zero[0] == one[0]
    assert zero[0].startswith("RankFailed: rank 0 called save, rank 1 called update_weights; all ranks make the same")
    assert (zero[1], one[1]) == ("RankFailed: rank 1 failed: ValueError: bad loss", "ValueError: bad loss")
    assert zero[2].startswith("RankFailed: rank 0 called update_weights, rank 1 called close")


def test_a_batch_that_is_smaller_than_the_number_of_ranks_is_refused() -> None:
    class Three:
        rank, world_size = 0, 3

        def scatter(self, parts: Any) -> bytes:
            raise AssertionError

        def gather(self, part: bytes) -> list[bytes] | None:
            raise AssertionError

    with pytest.raises(InvalidConfig, match="batch_groups is 2, but there are 3 ranks"):
        RolloutLoader(task(Engine()), batch_groups=2, broadcast=Three())


@pytest.mark.parametrize("error", [WeightsTooOld(4, 2, "why"), WaitTimeout("a batch", 3.0, "nothing came")])
def test_an_error_of_rank_0_keeps_its_type_text_and_attributes(error: Exception) -> None:
    message = _decode(_encode(_describe(error)))
    with pytest.raises(type(error)) as raised:
        Ranks(None)._result(message)
    assert str(raised.value) == str(error)
    assert raised.value.__dict__ == error.__dict__


def test_an_error_that_is_not_ours_is_a_failure_of_rank_0() -> None:
    with pytest.raises(RankFailed, match="rank 0 failed: KeyError: 3"):
        Ranks(None)._result(_decode(_encode(_describe(KeyError(3)))))


def test_torch_has_to_be_initialised() -> None:
    with pytest.raises(InvalidConfig, match=r"torch\.distributed is not initialised"):
        TorchBroadcast()
