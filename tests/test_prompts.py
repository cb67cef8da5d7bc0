"""Records and prompts: what becomes of a record, what is refused, and who owns the lists."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay import RolloutState, SampleParams, Status
from forebay.errors import InvalidRecord
from forebay.prompts.sources import ToRolloutState, build_prompt, independent

TURN = {"role": "user", "content": "hello"}


def built(
    record: Any, to_rollout_state: ToRolloutState | None = None, tokenize: Callable[[RolloutState], Any] | None = None
) -> RolloutState:
    return build_prompt(record, 7, to_rollout_state, tokenize)


def raising(error: Exception) -> Callable[[Any], Any]:
    def function(_: Any) -> Any:
        raise error

    return function


# --- what a record becomes ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["message", "messages", "prompt"])
def test_the_messages_may_have_any_of_three_names(name: str) -> None:
    assert built({name: [TURN]}).message == [TURN]
    assert built({name: "hello"}).message == [TURN]


def test_fields_are_taken_by_name_and_the_rest_is_kept_for_rewards() -> None:
    state = built(
        {
            "prompt": "hello",
            "prompt_ids": [1, 2],
            "data_source": "gsm8k",
            "reward_model": {"ground_truth": "4"},
            "tools": [{"name": "search"}],
            "sample_params": {"temperature": 0.5, "stop": ["\n"]},
            "answer": "4",
            "extra_fields": {"level": 3},
        }
    )
    assert (state.prompt_ids, state.tokens, state.data_source) == ([1, 2], [1, 2], "gsm8k")
    assert (state.reward_model, state.tools) == ({"ground_truth": "4"}, [{"name": "search"}])
    assert state.sample_params == SampleParams(temperature=0.5, stop=("\n",))
    assert state.extra_fields == {"answer": "4", "level": 3}


def test_a_column_that_is_empty_for_this_record_is_no_message() -> None:
    assert built({"message": None, "prompt": "hello"}).message == [TURN]


def test_a_ready_sample_is_taken_without_its_old_identity() -> None:
    old = RolloutState(
        message=[TURN], task_name="old", group_id=4, rollout_id=9, attempt=2, num_tries=3, status=Status.FAILED
    )
    state = built(old)
    assert (state.task_name, state.group_id, state.rollout_id, state.attempt) == (None,) * 4
    assert (state.num_tries, state.status) == (0, Status.INIT)
    assert old.status is Status.FAILED


def test_a_record_of_another_shape_is_mapped() -> None:
    assert built(("hello", 4), lambda record: {"prompt": record[0], "answer": record[1]}).extra_fields == {"answer": 4}
    assert built("hello", lambda record: RolloutState(message=[{"role": "user", "content": record}])).message == [TURN]


class Tensor:
    """Has a tolist, as tensors of any library have."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def tolist(self) -> Any:
        return self._values


@pytest.mark.parametrize("ids", [[1, 2, 3], (1, 2, 3), range(1, 4), Tensor([1, 2, 3]), np.array([1, 2, 3], np.int32)])
def test_tokens_come_in_any_usual_form(ids: Any) -> None:
    state = built({"prompt": "hello"}, tokenize=lambda state: ids)
    assert state.prompt_ids is not None
    assert state.tokens is not None
    assert list(state.prompt_ids) == list(state.tokens) == [1, 2, 3]
    assert isinstance(state.prompt_ids, np.ndarray if isinstance(ids, np.ndarray) else list)


def test_tokens_that_are_there_are_not_made_again() -> None:
    assert built({"prompt": "hello", "prompt_ids": [5]}, tokenize=raising(RuntimeError())).prompt_ids == [5]


def test_without_tokens_there_are_none() -> None:
    state = built({"prompt": "hello"})
    assert (state.prompt_ids, state.tokens) == (None, None)


# --- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"question": "?", "answer": "!"}, r"has no message; .* \(question, answer\)"),
        ({}, "has no message"),
        ("hello", "it is a str; expected a dict or a RolloutState"),
        (None, "it is a NoneType"),
        ([TURN], "it is a list"),
        ({"message": []}, r"its message is \[\]"),
        ({"message": {"role": "user"}}, "expected a non-empty list of messages"),
        ({"message": 5}, "its message is 5"),
        ({"message": ["hello"]}, "a str among its turns"),
        ({"message": [TURN, None]}, "a NoneType among its turns"),
        ({"message": [{"role": ["user"], "content": ["hello"]}]}, "must not collate"),
        ({"prompt": "a", "prompt_ids": [1.0, 2.0]}, "hold float; expected integers"),
        ({"prompt": "a", "prompt_ids": [True]}, "hold bool"),
        ({"prompt": "a", "prompt_ids": ["1"]}, "hold str"),
        ({"prompt": "a", "prompt_ids": [[1, 2]]}, "hold list"),
        ({"prompt": "a", "prompt_ids": "12"}, "hold str"),
        ({"prompt": "a", "prompt_ids": 12}, "cannot be mapped: TypeError"),
        ({"prompt": "a", "prompt_ids": []}, "are empty"),
        ({"prompt": "a", "prompt_ids": np.array([0.5])}, "hold float64"),
        ({"prompt": "a", "prompt_ids": np.array([], int)}, "are empty"),
        ({"prompt": "a", "prompt_ids": np.array([[1, 2]])}, r"numpy array of shape \(1, 2\)"),
        ({"prompt": "a", "tools": "[]"}, "its tools is a str; expected list or None"),
        ({"prompt": "a", "tools": ["search"]}, "its tools have a str among them"),
        ({"prompt": "a", "reward_model": "judge"}, "its reward_model is a str; expected dict or None"),
        ({"prompt": "a", "mm_info": [1]}, "its mm_info is a list; expected dict or None"),
        ({"prompt": "a", "session_id": 1.5}, "its session_id is a float; expected int or str or None"),
        ({"prompt": "a", "sample_params": {"temperature": "hot"}}, "its sample_params cannot be read"),
        ({"prompt": "a", "sample_params": {"n": 4}}, "give the sampler group_size=4"),
        ({"prompt": "a", "sample_params": {"stops": ["x"]}}, "its sample_params have stops; expected some of"),
        ({"prompt": "a", "extra_fields": [1]}, "cannot be mapped: TypeError"),
        (RolloutState(message=[]), r"its message is \[\]"),
        (RolloutState(message=[TURN], response_ids=[1], logprobs=[0.1, 0.2]), "logprobs .* has 2 items"),
    ],
)
def test_a_record_that_makes_no_prompt_is_refused_with_its_index(record: Any, said: str) -> None:
    with pytest.raises(InvalidRecord, match=said) as refused:
        built(record)
    assert refused.value.index == 7
    assert str(refused.value).startswith("record 7 of the data set ")


@pytest.mark.parametrize(
    ("mapping", "said"),
    [
        (raising(KeyError("question")), "cannot be mapped: KeyError: 'question'"),
        (raising(StopIteration()), "cannot be mapped: StopIteration"),
        (lambda record: None, "it is a NoneType"),
        (lambda record: [record], "it is a list"),
    ],
)
def test_a_mapping_that_fails_names_the_record(mapping: ToRolloutState, said: str) -> None:
    with pytest.raises(InvalidRecord, match=said) as refused:
        built({"prompt": "a"}, mapping)
    assert refused.value.index == 7


@pytest.mark.parametrize(
    ("tokenize", "said"),
    [
        (
            raising(RuntimeError("no vocabulary")),
            "tokenize failed: RuntimeError: no vocabulary .*tokenize gets the RolloutState",
        ),
        (lambda state: None, "tokenize returned None"),
        (lambda state: [], "are empty"),
        (lambda state: Tensor([[1, 2]]), "hold list"),
        (lambda state: Tensor([0.5]), "hold float"),
        (lambda state: {"input_ids": [1]}, "hold str"),
    ],
)
def test_a_tokenizer_that_fails_names_the_record(tokenize: Callable[[RolloutState], Any], said: str) -> None:
    with pytest.raises(InvalidRecord, match=said) as refused:
        built({"prompt": "a"}, tokenize=tokenize)
    assert refused.value.index == 7


def test_a_record_nested_too_deep_to_be_copied_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidRecord, match="RecursionError"):
        built({"prompt": "a", "deep": deep})
    while deep:  # or freeing it would recurse, too
        deep = deep.pop()


# --- who owns the lists -------------------------------------------------------------------------------


def test_a_prompt_shares_nothing_that_can_change_with_its_record() -> None:
    pixels = np.zeros(3)
    ids = np.array([1, 2])
    record = {"messages": [OrderedDict(TURN)], "prompt_ids": ids, "tools": [{"name": "f"}], "image": pixels, "a": [[1]]}
    state = built(record)
    record["messages"][0]["content"] = "changed"  # type: ignore[index]
    record["tools"][0]["name"] = "changed"  # type: ignore[index]
    record["a"][0].append(2)  # type: ignore[index]
    assert state.message == [TURN]
    assert type(state.message[0]) is dict
    assert state.tools == [{"name": "f"}]
    assert state.extra_fields["a"] == [[1]]
    assert not state.extra_fields["image"].flags.writeable
    assert pixels.flags.writeable  # the data set's own array stays as it was
    assert ids.flags.writeable


_values = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=10,
)


def containers(value: Any) -> list[int]:
    if isinstance(value, dict):
        return [id(value), *(found for item in value.values() for found in containers(item))]
    if isinstance(value, (list, tuple)):
        inner = [found for item in value for found in containers(item)]
        return [id(value), *inner] if isinstance(value, list) else inner
    return []


@given(st.dictionaries(st.text(max_size=3), _values, max_size=4))
@settings(max_examples=100, deadline=None)
def test_an_independent_sample_is_equal_and_shares_no_list_and_no_dict(extra: dict[str, Any]) -> None:
    state = RolloutState(
        message=[{"role": "user", "content": extra}],
        prompt_ids=[1, 2],
        data_source=extra,
        reward_model={"m": extra},
        mm_info={"m": extra},
        tools=[{"m": extra}],
        tool_choice=extra,
        tokens=[1, 2, 3],
        response_ids=[3],
        logprobs=[-0.5],
        response_mask=[1],
        tool_calls=[{"m": extra}],
        routed_experts=[[1]],
        input_ids=[1],
        labels=[1],
        reward={"score": 1.0, "parts": [extra]},
        extra_fields=extra,
    )
    own = independent(state.__copy__())
    assert own == state
    fields = [name for name in RolloutState.__struct_fields__ if name != "version_spans"]
    before = {found for name in fields for found in containers(getattr(state, name))}
    after = {found for name in fields for found in containers(getattr(own, name))}
    assert not before & after


def test_arrays_stay_shared_and_read_only() -> None:
    state = RolloutState(message=[TURN], prompt_ids=np.array([1]), extra_fields={"image": np.zeros(2)})
    own, other = independent(state.__copy__()), independent(state.__copy__())
    for one, two in ((own.prompt_ids, other.prompt_ids), (own.extra_fields["image"], other.extra_fields["image"])):
        assert np.shares_memory(one, two)
        with pytest.raises(ValueError, match="read-only"):
            one[0] = 5  # type: ignore[index]
