"""What is to be learned: three tasks with answers that can be checked, as text and as tokens.

    add      204+413=    617          numbers of one to three digits, none of them over 4: nothing is carried
    sort     s:40312=    01234        two to eight digits, in order
    double   d:cab=      ccaabb       one to five letters, each of them twice

Short prompts come again and again; of the long ones there are many more than a run draws, so what is learned is a rule.

A task is a list of records as Forebay's samplers take them: the prompt as text and as tokens, and the answer, which
lands in `extra_fields` where the reward finds it. Rewards are from 0 to 1 and count characters, so that there is
something to learn from long before an answer is right.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from itertools import zip_longest
from typing import Any

import numpy as np

from forebay import RolloutState

__all__ = [
    "CONTEXT",
    "END",
    "MAX_ANSWER_TOKENS",
    "TASKS",
    "VOCABULARY",
    "decode",
    "encode",
    "reward",
    "score",
    "task_records",
]

ALPHABET = "\n0123456789abcdefghij+=:s"
VOCABULARY = len(ALPHABET)
END = 0  # the token that ends an answer; also what pads a batch, behind a mask
MAX_ANSWER_TOKENS = 11
CONTEXT = 24

_TOKEN = {character: token for token, character in enumerate(ALPHABET)}


def encode(text: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The tokens of a text.

    >>> encode("1+2=").tolist()
    [2, 21, 3, 22]
    """
    return np.array([_TOKEN[character] for character in text], dtype=np.int64)


def decode(tokens: Iterable[int]) -> str:
    """The text of tokens, up to the one that ends it.

    >>> decode([2, 3, 0])
    '12'
    """
    return "".join(ALPHABET[token] for token in tokens).partition("\n")[0]


def _add(chance: random.Random) -> tuple[str, str]:
    digits = chance.randint(1, 3)
    one, other = chance.choices("01234", k=digits), chance.choices("01234", k=digits)
    total = [str(int(upper) + int(lower)) for upper, lower in zip(one, other, strict=True)]
    return f"{''.join(one)}+{''.join(other)}=", "".join(total)


def _sort(chance: random.Random) -> tuple[str, str]:
    digits = chance.choices("0123456789", k=chance.randint(2, 8))
    return f"s:{''.join(digits)}=", "".join(sorted(digits))


def _double(chance: random.Random) -> tuple[str, str]:
    letters = chance.choices("abcdefghij", k=chance.randint(1, 5))
    return f"d:{''.join(letters)}=", "".join(letter * 2 for letter in letters)


TASKS: dict[str, Callable[[random.Random], tuple[str, str]]] = {"add": _add, "sort": _sort, "double": _double}


def task_records(task_name: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Records of a task, for a Forebay sampler; the same ones for the same seed."""
    chance = random.Random(f"{task_name} {seed}")
    pairs = [TASKS[task_name](chance) for _ in range(count)]
    return [{"prompt": prompt, "prompt_ids": encode(prompt), "answer": answer} for prompt, answer in pairs]


def score(response: str, answer: str) -> float:
    """The share of characters that are right, of the longer of both texts.

    >>> score("22", "22"), score("23", "22"), score("220", "22"), score("", "22")
    (1.0, 0.5, 0.6666666666666666, 0.0)
    """
    right: list[bool] = [given == wanted for given, wanted in zip_longest(response, answer)]
    return sum(right) / len(right)


def reward(state: RolloutState) -> float:
    """The reward of a sample, as a strategy's `reward_fn`."""
    answer: str = state.extra_fields["answer"]
    return score(state.response or "", answer)
