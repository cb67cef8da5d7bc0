"""Token ids of prompts from the chat template of a tokenizer, for the `tokenize=` argument of a sampler.

Works with the tokenizers of transformers, and with any object that has their `apply_chat_template`. transformers is not
a dependency: nothing of it is imported. Its versions return the ids in different forms; all of them are accepted.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from forebay.core.fingerprint import type_name
from forebay.errors import InvalidConfig, InvalidInput

if TYPE_CHECKING:
    from forebay.core.rollout import RolloutState
    from forebay.prompts.sources import Tokenize

_SET_HERE = ("conversation", "tools", "tokenize")


def chat_tokenize(tokenizer: Any, **template: Any) -> Tokenize:
    """A function for `tokenize=`: applies the tokenizer's chat template to the messages and tools of a prompt.

    The template is followed by the generation prompt. `template`: more arguments of `apply_chat_template`, such as
    `enable_thinking=False`. A record that the template refuses is a bad record (`InvalidRecord`).
    """
    apply = getattr(tokenizer, "apply_chat_template", None)
    if not callable(apply) or isinstance(tokenizer, type):
        raise InvalidInput(f"{type_name(tokenizer)} is not a tokenizer; expected an object with apply_chat_template")
    if named := [name for name in _SET_HERE if name in template]:
        raise InvalidInput(
            f"chat_tokenize got {', '.join(named)}; the messages and tools are those of the record, and are tokenized"
        )
    if template.get("chat_template") is None and not getattr(tokenizer, "chat_template", True):
        raise InvalidConfig(
            f"the tokenizer {type_name(tokenizer)} has no chat template; set tokenizer.chat_template, give "
            "chat_tokenize chat_template=, or write a function for tokenize="
        )
    arguments = {"add_generation_prompt": True, **template}

    def tokenize(state: RolloutState) -> list[int]:
        try:
            result = apply(state.message, tools=state.tools, tokenize=True, **arguments)
        except Exception as error:  # templates raise errors of jinja2 and of their own functions
            raise InvalidInput(f"the chat template refuses it: {type(error).__name__}: {error}") from error
        return _flat_ids(result)

    return tokenize


def _flat_ids(result: Any) -> list[int]:
    """The token ids of one prompt, from any form that a tokenizer returns."""
    ids = result["input_ids"] if isinstance(result, Mapping) and "input_ids" in result else result
    ids = _unpacked(ids)
    if isinstance(ids, (list, tuple)) and len(ids) == 1 and isinstance(only := _unpacked(ids[0]), (list, tuple)):
        ids = only  # a batch of one
    try:
        if isinstance(ids, (list, tuple)):
            return [operator.index(token) for token in ids]
    except TypeError:
        pass
    raise InvalidInput(f"apply_chat_template returned {result!r:.80}; expected the token ids of one prompt")


def _unpacked(value: Any) -> Any:
    """An array or a tensor as lists; any other value as it is."""
    return value.tolist() if hasattr(value, "tolist") else value
