"""The prompt as issued: a reset returns to it, however an agent loop changed a sample (G13)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay import ReplayBuffer, RolloutState, SampleParams, Sampler, Status, group_bytes
from forebay.codec.frame import decode_group, encode_group
from forebay.config import AsyncReplayBufferConfig
from forebay.core.payload import apply_difference, difference, remember_prompt, settle_changes
from forebay.core.rollout import ISSUED_FIELDS, reset_response
from forebay.errors import DamagedData
from tests.test_codec import frame_of, packed, same

TASK = "math"
RECORDS = [{"prompt": f"question {n}", "answer": str(n), "level": {"steps": [n]}} for n in range(8)]

leaves = st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False, width=16) | st.text(max_size=3)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3)
)
turns = st.lists(st.dictionaries(st.sampled_from(["role", "content", "name"]), values, max_size=3), max_size=4)
prompts = st.builds(
    RolloutState,
    message=turns,
    prompt_ids=st.none() | st.lists(st.integers(0, 99), min_size=1, max_size=4),
    data_source=values,
    reward_model=st.none() | st.dictionaries(st.text(max_size=2), values, max_size=3),
    mm_info=st.none() | st.dictionaries(st.text(max_size=2), values, max_size=3),
    tools=st.none() | turns,
    tool_choice=values,
    session_id=st.none() | st.integers(0, 9) | st.text(max_size=3),
    sample_params=st.none() | st.builds(SampleParams, max_tokens=st.integers(1, 9)),
    extra_fields=st.dictionaries(st.text(max_size=2), values, max_size=4),
)


def issued_fields(state: RolloutState) -> dict[str, Any]:
    return {name: getattr(state, name) for name in ISSUED_FIELDS}


def changed_by_a_loop(before: RolloutState, after: RolloutState) -> RolloutState:
    """A sample that was issued as `before`, and left by a loop with the fields of `after`."""
    state = copy.copy(before)
    remember_prompt([state])
    for name, value in issued_fields(after).items():
        setattr(state, name, copy.deepcopy(value))
    return state


@settings(deadline=None, max_examples=60)
@given(prompts, prompts)
def test_g13_a_reset_returns_to_the_prompt_as_issued(before: RolloutState, after: RolloutState) -> None:
    expected = copy.deepcopy(issued_fields(before))
    state = changed_by_a_loop(before, after)
    state.response_ids, state.loop_state, state.status = [1, 2], {"turn": 3}, Status.ABORTED
    settle_changes(state)
    assert same(issued_fields(state), issued_fields(after))  # the change itself is kept while the response is
    fresh = reset_response(state)
    assert same(issued_fields(fresh), expected)
    assert (fresh.response_ids, fresh.loop_state, fresh.issued) == (None, None, None)
    assert fresh.tokens == fresh.prompt_ids


@settings(deadline=None, max_examples=60)
@given(prompts, prompts)
def test_differences_come_out_as_they_went_in(before: RolloutState, after: RolloutState) -> None:
    state = changed_by_a_loop(before, after)
    settle_changes(state)
    if state.issued is None:
        assert same(issued_fields(before), issued_fields(after))
        return
    written = msgspec.msgpack.decode(msgspec.msgpack.encode(difference(state, state.issued)))
    again = RolloutState(message=[])
    apply_difference(again, state.issued, written)
    assert same(issued_fields(again), issued_fields(after))


@settings(deadline=None, max_examples=60)
@given(prompts, prompts, st.integers(1, 3))
def test_changed_groups_survive_their_frame_with_the_same_size(
    before: RolloutState, after: RolloutState, members: int
) -> None:
    group = [copy.copy(before) for _ in range(members)]
    remember_prompt(group)
    for state in group[1:]:
        for name, value in issued_fields(after).items():
            setattr(state, name, copy.deepcopy(value))
    for index, state in enumerate(group):
        state.rollout_id, state.response_ids, state.status = index, [index], Status.COMPLETED
        settle_changes(state)
    back = decode_group(encode_group(group))
    assert len(back) == members
    for state, read in zip(group, back, strict=True):
        assert same(issued_fields(read), issued_fields(state))
        assert same(issued_fields(reset_response(read)), issued_fields(before))
    assert group_bytes(back) == group_bytes(group)


def test_a_member_that_changed_nothing_carries_nothing() -> None:
    state = RolloutState(message=[{"role": "user"}], mm_info={"image": np.zeros(3)}, extra_fields={"a": [1]})
    message = state.message
    remember_prompt([state])
    state.message, state.extra_fields = copy.deepcopy(state.message), copy.deepcopy(state.extra_fields)
    settle_changes(state)
    assert state.issued is None
    assert state.message is message


def test_an_equal_value_of_another_type_counts_as_changed() -> None:
    state = RolloutState(message=[], extra_fields={"flag": 1})
    remember_prompt([state])
    state.extra_fields = {"flag": True}
    settle_changes(state)
    assert state.issued is not None
    assert reset_response(state).extra_fields["flag"] is not True


def test_only_the_difference_is_stored() -> None:
    """Eight dialogues over one long prompt cost one long prompt."""
    long = RolloutState(
        message=[{"role": "user", "content": "x" * 10_000}], prompt_ids=[1], extra_fields={"a": "y" * 999}
    )
    group = [copy.copy(long) for _ in range(8)]
    remember_prompt(group)
    for index, state in enumerate(group):
        state.rollout_id = index
        state.message = [*copy.deepcopy(state.message), {"role": "assistant", "content": "z" * 10}]
        state.extra_fields = {**state.extra_fields, "turns": 2}
        state.response_ids, state.status = [1, 2], Status.COMPLETED
        settle_changes(state)
    assert 11_000 < group_bytes(group) < 12_000
    assert len(encode_group(group)) < 14_000
    bare = [reset_response(state) for state in group]
    assert group_bytes(bare[:1]) < group_bytes(group[:1])


ONE: list[Any] = [{"message": []}]
TWO: list[Any] = [{"message": []}, {"message": []}]
HOSTILE: dict[str, Any] = {
    "issued outside": [[0], ONE, None, [[5, {}]]],
    "issued is a member": [[0], ONE, None, [[0, {}]]],
    "more changes than samples": [[0], ONE, None, [None, None]],
    "no changes": [[0], ONE, None, []],
    "changes are no list": [[0], ONE, None, 5],
    "unknown field": [[0, 1], TWO, None, [[1, {"status": [0, "completed"]}]]],
    "keeps more than there is": [[0, 1], TWO, None, [[1, {"message": [1, 3, []]}]]],
    "keeps less than nothing": [[0, 1], TWO, None, [[1, {"message": [1, -1, []]}]]],
    "extends what is no list": [[0, 1], TWO, None, [[1, {"tools": [1, 0, []]}]]],
    "edits what is no dict": [[0, 1], TWO, None, [[1, {"message": [2, [], {}]}]]],
    "unknown change": [[0, 1], TWO, None, [[1, {"message": [7]}]]],
    "message of numbers": [[0, 1], TWO, None, [[1, {"message": [0, [5]]}]]],
    "message is a text": [[0, 1], TWO, None, [[1, {"message": [0, "x"]}]]],
    "params of another shape": [[0, 1], TWO, None, [[1, {"sample_params": [0, {"top_k": "x"}]}]]],
    "a sample inside": [[0], [{"message": [], "issued": {"message": []}}], None, [None]],
}


@pytest.mark.parametrize("what", HOSTILE)
def test_g09_hostile_changes_are_refused(what: str) -> None:
    with pytest.raises(DamagedData):
        decode_group(frame_of(msgspec.msgpack.encode(HOSTILE[what]), version=3))


def test_a_sample_inside_a_sample_is_refused_in_every_version() -> None:
    head = [[0], [{"message": [], "issued": {"message": []}}]]
    for version, parts in ((1, head), (2, [*head, None]), (3, [*head, None, [None]])):
        with pytest.raises(DamagedData, match="inside"):
            decode_group(frame_of(msgspec.msgpack.encode(parts), version=version))


def test_g09_every_altered_byte_of_a_frame_with_changes_is_read_or_refused() -> None:
    state = changed_by_a_loop(
        RolloutState(message=[{"a": "b"}], extra_fields={"k": [1]}), RolloutState(message=[{"a": 1}])
    )
    state.response_ids, state.status = [1], Status.COMPLETED
    frame = encode_group([state])
    head_bytes = int.from_bytes(frame[8:12], "little")
    head, body = bytearray(frame[24 : 24 + head_bytes]), frame[24 + head_bytes :]
    for position in range(head_bytes):
        for value in (0x00, 0x81, 0x93, 0xC0, 0xFF):
            altered = bytearray(head)
            altered[position] = value
            try:
                decode_group(packed(bytes(altered), body, 3))
            except DamagedData:
                continue


# --- through the buffer ---------------------------------------------------------------------------------


def left_by_a_loop(group: list[RolloutState]) -> list[RolloutState]:
    for state in group:
        state.message.append({"role": "assistant", "content": "call"})
        state.message[0]["content"] = "rewritten"
        state.extra_fields["turns"] = 2
        state.extra_fields["level"]["steps"].append(9)
        del state.extra_fields["answer"]
        state.prompt_ids, state.tools, state.session_id = [9, 9], [{"name": "search"}], "mine"
        state.loop_state = {"cursor": 3}
        state.response_ids, state.status = [1, 2, 3], Status.COMPLETED
    return group


@pytest.fixture(params=["memory", "pandas", "sqlite"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/store.db" if request.param == "sqlite" else str(request.param)


async def issued_and_answered(buffer: ReplayBuffer) -> tuple[list[dict[str, Any]], Sampler]:
    """Two groups that a loop answered and changed; the fields of their members as they were issued."""
    sampler = Sampler(RECORDS, group_size=2, shuffle=False)
    bound = sampler.with_buffer(buffer)
    groups = [await bound.sample(TASK) for _ in range(2)]
    fields = [copy.deepcopy(issued_fields(state)) for group in groups for state in group]
    for group in groups:
        await buffer.put(left_by_a_loop(group), TASK, model_step=0, current_train_step=1)
    return fields, sampler


async def drawn_again(buffer: ReplayBuffer, sampler: Sampler) -> list[RolloutState]:
    bound = sampler.with_buffer(buffer)
    return [state for _ in range(2) for state in await bound.sample(TASK)]


async def test_g13_what_a_trainer_gets_is_what_the_loop_left(storage: str) -> None:
    buffer = AsyncReplayBufferConfig(storage=storage).build()
    await issued_and_answered(buffer)
    async with buffer.lease_batch({TASK: 2}, train_step=1, timeout_s=5) as lease:
        for group in lease.groups:
            for state in group:
                assert [turn["content"] for turn in state.message] == ["rewritten", "call"]
                assert state.extra_fields.keys() == {"level", "turns"}
                assert state.loop_state == {"cursor": 3}
                assert (state.session_id, state.prompt_ids) == ("mine", [9, 9])
                state.extra_fields["mine"] = 1  # and is the trainer's own
        assert all("mine" in state.extra_fields for group in lease.groups for state in group)
    await buffer.close()


async def test_g13_expiry_returns_to_the_prompt_as_issued(storage: str) -> None:
    buffer = AsyncReplayBufferConfig(storage=storage).build()
    await buffer.set_limits(TASK, stale_threshold=1)
    fields, sampler = await issued_and_answered(buffer)
    assert await buffer.refresh_staleness(task_stale_thresholds={TASK: 1}, current_train_step=5) == {TASK: 2}
    again = await drawn_again(buffer, sampler)
    assert [issued_fields(state) for state in again] == fields
    assert all(state.loop_state is None and state.response_ids is None for state in again)
    await buffer.close()


async def test_g13_what_is_too_old_on_arrival_returns_to_the_prompt_as_issued(storage: str) -> None:
    buffer = AsyncReplayBufferConfig(storage=storage).build()
    await buffer.set_limits(TASK, stale_threshold=1)
    bound = Sampler(RECORDS, group_size=2, shuffle=False).with_buffer(buffer)
    group = await bound.sample(TASK)
    fields = [copy.deepcopy(issued_fields(state)) for state in group]
    await buffer.put(left_by_a_loop(group), TASK, model_step=0, current_train_step=9)
    again = await bound.sample(TASK)
    assert [issued_fields(state) for state in again] == fields
    await buffer.close()


@pytest.mark.parametrize("prompts_only", [True, False])
async def test_g13_a_checkpoint_keeps_the_prompt_as_issued(storage: str, prompts_only: bool, tmp_path: Path) -> None:
    buffer = AsyncReplayBufferConfig(storage=storage).build()
    fields, sampler = await issued_and_answered(buffer)
    await buffer.save(tmp_path / "checkpoint", model_step=0, no_save_replay_buffer=prompts_only)
    await buffer.close()
    resumed = AsyncReplayBufferConfig().build()
    await resumed.resume(tmp_path / "checkpoint")
    if not prompts_only:
        assert await resumed.count(TASK, Status.COMPLETED) == 2
        await resumed.refresh_staleness(task_stale_thresholds={TASK: 1}, current_train_step=5)
    again = await drawn_again(resumed, sampler)
    assert [issued_fields(state) for state in again] == fields
    assert all(state.loop_state is None and state.response_ids is None for state in again)
    await resumed.close()


async def test_a_partial_rollout_keeps_what_the_loop_left(storage: str) -> None:
    buffer = AsyncReplayBufferConfig(storage=storage).build()
    bound = Sampler(RECORDS, shuffle=False).with_buffer(buffer)
    group = left_by_a_loop(await bound.sample(TASK))
    group[0].status = Status.ABORTED
    await buffer.put(group, TASK, model_step=0)
    (state,) = await bound.sample(TASK)
    assert [turn["content"] for turn in state.message] == ["rewritten", "call"]
    assert (state.loop_state, state.session_id) == ({"cursor": 3}, "mine")
    assert reset_response(state).message == [{"role": "user", "content": "question 0"}]
    await buffer.close()
