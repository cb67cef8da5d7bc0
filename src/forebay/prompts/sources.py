"""Where prompts are read from: records by number, in a fixed order, from any position.

There are two kinds of source: map-style data sets (`map_style`) and iterable loaders (`loader`). `open_source` decides
which one a data set is. Each source has a fingerprint, so that a position is not applied to another data set. No data
set is iterated, indexed or opened before the first record is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from forebay.core.fingerprint import Fingerprint, type_name
from forebay.core.validate import whole_number
from forebay.errors import InvalidDataset
from forebay.prompts.jsonl import JSONLDataset
from forebay.prompts.loader import LoaderSource
from forebay.prompts.map_style import MapSource

__all__ = ["Source", "open_source"]


class Source(Protocol):
    """The records that a sampler draws from, by number from 0 on, in a fixed order."""

    inline: bool
    """Whether reading is fast enough for the event loop; otherwise a thread reads."""

    def read(self, cursor: int) -> tuple[int, Any]:
        """The index of the cursor-th record, for error messages, and the record."""

    def state(self) -> bytes | None:
        """The state to continue from after the last record read; None if the cursor is enough."""

    def restore(self, cursor: int, state: bytes | None) -> None:
        """Continue at the cursor, where `state` was the state; does nothing if the source is already there."""

    def fingerprint(self, *, again: bool = False) -> Fingerprint:
        """The fingerprint of the data set, as far as it is known; the first call may read records.

        `again`: read them a second time, and leave out those that differ each time.
        """

    def __len__(self) -> int: ...


def open_source(dataset: Any, *, seed: int, shuffle: bool) -> Source:
    """The source for a data set of any supported type; InvalidDataset lists the supported types."""
    whole_number("seed", seed)
    if isinstance(dataset, (str, Path)):
        dataset = JSONLDataset(dataset)
    if isinstance(dataset, Mapping):
        raise InvalidDataset("the data set is a mapping; expected a sequence of records (pass one of its splits)")
    # Every data set of torch has a __getitem__; that of an IterableDataset only raises.
    iterable = any(kind.__name__ == "IterableDataset" for kind in type(dataset).__mro__)
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not iterable:
        return MapSource(dataset, seed, shuffle)
    if hasattr(dataset, "__next__"):
        raise InvalidDataset(
            f"the data set {type_name(dataset)} is an iterator, which can be read only once; expected a list, a data "
            "set with __len__ and __getitem__, a loader that can be iterated again, or the path of a JSONL file"
        )
    if hasattr(dataset, "__iter__"):
        return LoaderSource(dataset)
    raise InvalidDataset(
        f"{type_name(dataset)} is not a data set; expected a list, a data set with __len__ and __getitem__, a loader, "
        "or the path of a JSONL file"
    )
