"""What `pack` and `pad` share beside their token columns: advantages that are given, columns by sample, and tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from forebay.collate.estimators import Kind, estimated, first_not_finite
from forebay.collate.sequences import Samples, name_of
from forebay.errors import InvalidInput

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")


@dataclass(frozen=True, eq=False, slots=True)
class Values:
    """Advantages by sample, and the rewards if they had to be read for them."""

    values: NDArray[Any]
    rewards: NDArray[Any] | None


def advantages_of(samples: Samples, given: Kind | Sequence[float] | NDArray[Any] | None) -> Values | None:
    """The advantages of the samples: computed, or as they are given."""
    if given is None:
        return None
    if isinstance(given, str) or callable(given):
        found = estimated(samples, given)
        return Values(found.values, found.rewards)
    try:
        values = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError):
        raise InvalidInput(f"advantages is {given!r:.80}; expected a kind, or one number for each sample") from None
    if values.shape != (len(samples.states),):
        raise InvalidInput(
            f"advantages has shape {values.shape}, but there are {len(samples.states)} samples; expected one number "
            "for each"
        )
    if (at := first_not_finite(values)) is not None:
        raise InvalidInput(f"advantages[{at}] of {name_of(samples.states[at])} is {values[at]}; expected a finite one")
    return Values(values, None)


def by_sample(values: list[T | None]) -> tuple[T | None, ...] | None:
    """The values of samples; None if no sample has one."""
    return None if all(value is None for value in values) else tuple(values)


def tensors(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields with torch tensors instead of arrays; they share memory."""
    import torch

    return {name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in fields.items()}
