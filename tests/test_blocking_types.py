"""The blocking methods keep the types of the native ones: `mypy` checks this file, and the calls also run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import assert_type

from forebay import AsyncReplayBufferConfig, ReplayBuffer, RolloutState, Status, blocking
from forebay.core.ledger import LedgerLine, Record
from forebay.testing import make_group

TASK = "math"
Groups = list[list[RolloutState]]


def test_the_buffer_keeps_parameter_and_result_types() -> None:
    with blocking.ReplayBuffer(AsyncReplayBufferConfig()) as buffer:
        assert_type(buffer, blocking.ReplayBuffer)
        assert_type(buffer.native, ReplayBuffer)
        assert_type(buffer.put(make_group(), TASK, model_step=0, timeout_s=None), int | None)
        assert_type(buffer.put_many([make_group()], TASK), list[int])
        assert_type(buffer.get(1, TASK, Status.COMPLETED), Groups)
        assert_type(buffer.take_batch({TASK: 0}), tuple[dict[str, Groups], dict[str, int]])
        assert_type(buffer.query({}, limit=None), list[Record])
        assert_type(buffer.ledger(tokens=True), dict[str, LedgerLine])
        assert_type(buffer.count_statuses([TASK], [Status.COMPLETED]), dict[str, dict[Status, int]])
        assert_type(len(buffer), int)
        with buffer.lease_batch({TASK: 1}, train_step=1) as lease:
            assert_type(lease, blocking.Lease)
            assert_type(lease.groups, Groups)
            reject: Callable[[Sequence[Sequence[RolloutState]], str], None] = lease.reject
            reject(lease.groups, "no gradient")
        wait: Callable[[Mapping[str, int]], None] = buffer.wait_ready
        wait({})


def refused_by_mypy(buffer: blocking.ReplayBuffer) -> None:
    """Never called. Each comment is an error of mypy itself if the line is accepted."""
    buffer.put(make_group(), TASK, model_step="0")  # type: ignore[arg-type]
    buffer.put(make_group(), task=TASK)  # type: ignore[call-arg]
    buffer.put(make_group())  # type: ignore[call-arg]
    buffer.set_limits(TASK, 1)  # type: ignore[call-arg]
    buffer.lease_batch({TASK: 1})  # type: ignore[call-arg]
    buffer.lease_batch({TASK: 1}, train_step=1).reject([], 1)  # type: ignore[arg-type]
