"""What plain data is: the values that Forebay stores, and when two of them are the same.

Plain data is strings, numbers of at most 64 bits, bools, None and bytes, and lists, tuples, dicts with strings as keys,
and numpy arrays of them. Sizes, references, fingerprints and the codec all use the limits of this module. Nothing here
checks a value: `sizes` and `codec` do.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["LEAVES", "MAX_DEPTH", "MAX_DIMENSIONS", "NUMBERS", "same_value"]

MAX_DEPTH = 64
"""How deep lists, tuples and dicts may be nested."""
MAX_DIMENSIONS = 8
"""How many dimensions an array may have."""

NUMBERS = frozenset((int, float, bool))
LEAVES = NUMBERS | {str, bytes, type(None)}
"""The exact types that hold no other value."""


def same_value(one: Any, other: Any) -> bool:
    """Whether two values are the same plain data, type for type; arrays that show the same memory are the same.

    >>> same_value([1, {"a": 2.0}], [1, {"a": 2.0}]), same_value(1, 1.0), same_value(0.0, -0.0)
    (True, False, False)
    """
    if one is other:
        return True
    kind = type(one)
    if kind is not type(other):
        return False
    if kind is dict:
        return list(one) == list(other) and all(same_value(item, other[key]) for key, item in one.items())
    if kind is list or kind is tuple:
        return len(one) == len(other) and all(map(same_value, one, other))
    if kind is np.ndarray:
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        same_memory = one.__array_interface__["data"] == other.__array_interface__["data"]
        return bool(same_memory and one.strides == other.strides) or one.tobytes() == other.tobytes()
    try:
        return bool(one == other) and (kind is not float or repr(one) == repr(other))
    except Exception:  # a value of a foreign class that cannot be compared; the codec decides whether it can be stored
        return False
