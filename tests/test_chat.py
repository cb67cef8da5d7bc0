"""`chat_tokenize`: token ids from the chat template of a real tokenizer, and every form that tokenizers return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from forebay import InvalidConfig, InvalidInput, InvalidRecord, ReplayBuffer, RolloutState, Sampler, chat_tokenize
from forebay.prompts.sampler import SamplerWithReplayBuffer

WORDS = ("[UNK]", "<tools>", "search", "<user>", "<assistant>", "hello", "world", "<quiet>")
TEMPLATE = (
    "{% for tool in tools or [] %}<tools> {{ tool['name'] }} {% endfor %}"
    "{% for turn in messages %}"
    "{% if turn['role'] == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
    "<{{ turn['role'] }}> {{ turn['content'] }} "
    "{% endfor %}"
    "{% if quiet %}<quiet> {% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
HELLO = {"prompt": "hello world"}
IDS = [3, 5, 6, 4]


@pytest.fixture(scope="module")
def make() -> Callable[[], Any]:
    """Makes a tokenizer of transformers, with one token for each word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return lambda: PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")


@pytest.fixture
def tokenizer(make: Callable[[], Any]) -> Any:
    made = make()
    made.chat_template = TEMPLATE
    return made


def prompt(**fields: Any) -> RolloutState:
    return RolloutState(message=[{"role": "user", "content": "hello world"}], **fields)


async def drawn(tokenize: Any, record: Any = HELLO, **options: Any) -> RolloutState:
    sampler = SamplerWithReplayBuffer([record], ReplayBuffer(), tokenize=tokenize, **options)
    ((state,),) = await sampler.draw(1, "math")
    return state


async def test_prompts_get_the_ids_of_the_chat_template(tokenizer: Any) -> None:
    state = await drawn(chat_tokenize(tokenizer))
    assert (state.prompt_ids, state.tokens) == (IDS, IDS)
    state = await drawn(chat_tokenize(tokenizer), HELLO | {"tools": [{"name": "search"}]})
    assert state.prompt_ids == [1, 2, *IDS]


@pytest.mark.parametrize("tensors", [None, "np", "pt"])
@pytest.mark.parametrize("as_dict", [None, True, False])
def test_every_form_of_transformers_is_accepted(tokenizer: Any, tensors: str | None, as_dict: bool | None) -> None:
    options = {} if as_dict is None else {"return_dict": as_dict}
    ids = chat_tokenize(tokenizer, return_tensors=tensors, **options)(prompt())
    assert ids == IDS
    assert {type(token) for token in ids} == {int}


def test_arguments_of_the_template_are_passed_on(make: Callable[[], Any], tokenizer: Any) -> None:
    assert chat_tokenize(tokenizer, quiet=True)(prompt()) == [3, 5, 6, 7, 4]
    assert chat_tokenize(tokenizer, add_generation_prompt=False)(prompt()) == [3, 5, 6]
    assert chat_tokenize(make(), chat_template=TEMPLATE)(prompt()) == IDS


class Returning:
    """A tokenizer that returns one value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def apply_chat_template(self, messages: Any, **options: Any) -> Any:
        assert options == {"tools": None, "tokenize": True, "add_generation_prompt": True}
        return self.value


@pytest.mark.parametrize(
    "value",
    [
        [1, 2],
        (1, 2),
        [[1, 2]],
        np.array([1, 2]),
        np.array([[1, 2]]),
        [np.array([1, 2])],
        [np.int64(1), np.int64(2)],
        {"input_ids": [1, 2], "attention_mask": [1, 1]},
        {"input_ids": [[1, 2]]},
        {"input_ids": np.array([[1, 2]], dtype=np.int32)},
    ],
)
def test_every_usual_form_is_a_list_of_integers(value: Any) -> None:
    ids = chat_tokenize(Returning(value))(prompt())
    assert ids == [1, 2]
    assert {type(token) for token in ids} == {int}


def test_one_token_is_a_list_of_one() -> None:
    for value in ([1], [[1]], np.array([1]), [np.int64(1)], np.array([[1]])):
        assert chat_tokenize(Returning(value))(prompt()) == [1]


@pytest.mark.parametrize("value", ["text", None, 5, [[1], [2]], [0.5], ["a"], {"ids": [1]}, np.array([[1], [2]])])
def test_a_result_that_is_not_the_ids_of_one_prompt_is_refused(value: Any) -> None:
    with pytest.raises(
        InvalidInput, match=r"apply_chat_template returned (.|\n)*; expected the token ids of one prompt"
    ):
        chat_tokenize(Returning(value))(prompt())


async def test_a_record_that_the_template_refuses_is_a_bad_record(tokenizer: Any) -> None:
    system = {"messages": [{"role": "system", "content": "hello"}]}
    tokenize = chat_tokenize(tokenizer)
    with pytest.raises(InvalidRecord, match=r"record 0 .* the chat template refuses it: TemplateError: no system"):
        await drawn(tokenize, system)
    sampler = SamplerWithReplayBuffer([system, HELLO], ReplayBuffer(), tokenize=tokenize, skip_bad_records=True)
    ((state,),) = await sampler.draw(1, "math")
    assert state.prompt_ids == IDS


def test_a_tokenizer_without_a_chat_template_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(InvalidConfig, match=r"has no chat template; set tokenizer\.chat_template"):
        chat_tokenize(make())


@pytest.mark.parametrize("wrong", [None, "gpt2", len, Returning])
def test_an_object_that_is_not_a_tokenizer_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidInput, match="is not a tokenizer; expected an object with apply_chat_template"):
        chat_tokenize(wrong)


@pytest.mark.parametrize("name", ["tools", "tokenize", "conversation"])
def test_arguments_that_the_record_gives_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match=f"chat_tokenize got {name}"):
        chat_tokenize(Returning([1]), **{name: True})


@pytest.mark.parametrize("wrong", ["gpt2", 5, Returning([1])])
def test_tokenize_is_a_function_and_not_a_tokenizer(wrong: Any) -> None:
    with pytest.raises(InvalidConfig, match=r"expected a function that gets a RolloutState .*chat_tokenize\(tokenizer"):
        Sampler([HELLO], tokenize=wrong)


async def test_a_function_of_messages_is_told_that_it_gets_a_state() -> None:
    with pytest.raises(InvalidRecord, match=r"tokenize failed: TypeError: .*tokenize gets the RolloutState of a"):
        await drawn(lambda messages: [len(messages[0])])
