"""Iterable loaders: one producer, which continues where the loader's own state says.

A loader (torchdata's StatefulDataLoader, a Hugging Face IterableDataset, any object with `__iter__`) has its own
position. If it has `state_dict` and `load_state_dict`, its state is stored after every record. Otherwise records are
counted, and after a restart the loader is read again up to there. That is slow, and exact only if the loader gives the
same records each time. The state is stored as one plain value (see `codec.values`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from msgspec.structs import replace

from forebay.core.fingerprint import SAMPLED_RECORDS, Fingerprint, digest, own_digest, type_name
from forebay.errors import DamagedData, InvalidDataset, UnreadableData, UnsupportedPayload

log = logging.getLogger(__name__)


class LoaderSource:
    """The records of an iterable loader, epoch after epoch.

    The last record can be read again, so that a draw that was cancelled or found no capacity skips none.
    """

    inline = False
    sequential = True

    def __init__(self, loader: Any, epochs: int | None = None) -> None:
        self._loader = loader
        self._epochs = epochs
        self._stateful = callable(getattr(loader, "state_dict", None)) and callable(
            getattr(loader, "load_state_dict", None)
        )
        self._iterator: Iterator[Any] | None = None
        self._epoch = 0
        self._delivered = 0  # in this epoch
        self._epoch_is_new = False  # the loader may first give an empty epoch, see `_load`
        self._cursor = 0
        self._state: bytes | None = None  # at the cursor
        self._last: tuple[Any, bytes | None] | None = None  # the record before the cursor, and the state before it
        self._lost = False  # an error left the loader at an unknown position
        self._used = False
        self._state_keys: tuple[str, ...] | None = None
        self._fixed: Fingerprint | None = None
        self._first: dict[int, tuple[str | None, str | None]] = {}  # digests of the first records that were read

    def __len__(self) -> int:
        try:
            return len(self._loader)
        except TypeError:
            raise InvalidDataset(f"the loader {type_name(self._loader)} does not know its length") from None

    def end(self) -> int | None:
        """None: only reading finds the end of an epoch."""
        return None

    def read(self, cursor: int) -> tuple[int, Any] | None:
        if self._last is not None and cursor == self._cursor - 1 and not self._lost:
            return cursor, self._last[0]
        if cursor != self._cursor or self._lost:
            raise InvalidDataset(
                f"the loader {type_name(self._loader)} is at record {self._cursor}, but record {cursor} was asked for: "
                "an iterable loader has one producer per task; use a map-style data set for several"
            )
        with self._moving(f"failed at record {cursor}"):
            record = self._next()
            if record is _END:
                return None
            delivered = self._delivered + 1
            state = self._pack(delivered)
        self._note(cursor, record)
        self._last = (record, self._state)
        self._state, self._delivered = state, delivered
        self._cursor += 1
        self._used = True
        return cursor, record

    def _next(self) -> Any:
        for _ in range(2):
            if self._iterator is None:
                if self._epochs is not None and self._epoch >= self._epochs and self._cursor:
                    return _END
                self._iterator = self._iterate()
            try:
                record = next(self._iterator)
            except StopIteration:
                self._epoch += not self._epoch_is_new
                self._epoch_is_new = False
                self._delivered = 0
                self._iterator = None
                continue
            self._epoch_is_new = False
            return _single(record)
        raise InvalidDataset(f"the loader {type_name(self._loader)} gave no record in a whole epoch; it is empty")

    def _iterate(self) -> Iterator[Any]:
        set_epoch = getattr(self._loader, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(self._epoch)
        return iter(self._loader)

    def _pack(self, delivered: int) -> bytes:
        content: dict[str, Any] = {"epoch": self._epoch, "delivered": delivered, "cursor": self._cursor + 1}
        if self._stateful:
            content["loader"] = state = self._loader.state_dict()
            self._state_keys = tuple(sorted(map(str, state))) if isinstance(state, Mapping) else ()
        try:
            return pack_loader_state(content)
        except UnsupportedPayload as error:
            name = type_name(self._loader)
            raise InvalidDataset(f"the state of the loader {name} is not plain data: {error}") from error

    def state(self) -> bytes | None:
        return self._state

    def restore(self, cursor: int, state: bytes | None) -> None:
        if not self._lost:
            if (cursor, state) == (self._cursor, self._state):
                return
            if self._last is not None and (cursor, state) == (self._cursor - 1, self._last[1]):
                return
        if state is not None:
            content = unpack_loader_state(state)
            if not isinstance(content, dict) or not all(
                type(content.get(name)) is int for name in ("epoch", "delivered", "cursor")
            ):
                raise DamagedData("the state of an iterable loader has no epoch and position; Forebay did not write it")
        elif cursor:
            raise InvalidDataset(
                f"{cursor} groups were drawn, but there is no loader state: they came from a map-style data set, "
                "and an iterable loader cannot continue from there; give the task another name"
            )
        elif self._stateful and self._used:
            raise InvalidDataset(
                f"the loader {type_name(self._loader)} is at record {self._cursor}, and cannot return to its start "
                "for another task or buffer; give each of them its own sampler and loader"
            )
        else:
            content = {"epoch": 0, "delivered": 0, "cursor": 0}
        if content["cursor"] != cursor:
            raise InvalidDataset(
                f"{cursor} groups were drawn, but the loader state is that of record {content['cursor']}: the rest "
                "came from a map-style data set, and an iterable loader cannot continue there; give the task another "
                "name"
            )
        with self._moving(f"cannot continue at record {cursor}"):
            self._load(content)
        self._cursor, self._state, self._last = cursor, state, None

    @contextmanager
    def _moving(self, failed: str) -> Iterator[None]:
        """An error in this block leaves the loader at an unknown position, and is raised as InvalidDataset."""
        self._lost = True
        try:
            yield
        except InvalidDataset:
            raise
        except Exception as error:
            name = type_name(self._loader)
            raise InvalidDataset(f"the loader {name} {failed}: {type(error).__name__}: {error}") from error
        self._lost = False

    def _load(self, content: dict[str, Any]) -> None:
        self._iterator, self._epoch_is_new = None, False
        self._epoch, self._delivered = content["epoch"], content["delivered"]
        if self._stateful and "loader" in content:
            self._used = True
            self._loader.load_state_dict(content["loader"])
            if self._delivered and self._delivered == self._length():
                # The epoch was over: some loaders continue with an empty epoch, others with the next one.
                self._epoch += 1
                self._delivered, self._epoch_is_new = 0, True
            return
        if not content["cursor"]:
            return
        log.warning("loader_skips_ahead records=%d epoch=%d", self._delivered, self._epoch)
        if not self._used and not callable(getattr(self._loader, "set_epoch", None)):
            # The state of a random generator depends on all earlier epochs.
            for epoch in range(self._epoch):
                for cursor, record in enumerate(self._loader):
                    if not epoch:
                        self._note(cursor, _single(record))
        self._used = True
        self._iterator = self._iterate()
        for skipped in range(self._delivered):
            record = next(self._iterator, self)
            if record is self:
                raise InvalidDataset(
                    f"the loader {type_name(self._loader)} ended after {skipped} records of epoch {self._epoch}, but "
                    f"{self._delivered} were drawn before: it is another loader"
                )
            if not self._epoch:
                self._note(skipped, _single(record))

    def _note(self, cursor: int, record: Any) -> None:
        if cursor < SAMPLED_RECORDS:
            self._first[cursor] = digest(record)

    def fingerprint(self, *, again: bool = False) -> Fingerprint:
        if self._fixed is None:
            self._fixed = Fingerprint(
                kind="iterable",
                length=self._length(),
                loader=type(self._loader).__qualname__,
                own=own_digest(self._loader),
            )
        if self._fixed.own is not None:
            return self._fixed
        first = [self._first.get(cursor, (None, None)) for cursor in range(max(self._first, default=-1) + 1)]
        return replace(
            self._fixed,
            state_keys=self._state_keys,
            records=tuple(hashed for hashed, _ in first),
            unverified=tuple(f"record {cursor}: {skipped}" for cursor, (_, skipped) in enumerate(first) if skipped),
        )

    def _length(self) -> int | None:
        try:
            return len(self._loader)
        except (TypeError, NotImplementedError):
            return None


_END = object()
"""Stands for the record after the last epoch."""


def _single(record: Any) -> Any:
    """The record of a batch of one: from a loader with batch_size=1 and no collation."""
    return record[0] if isinstance(record, list) and len(record) == 1 else record


# --- the state of a loader ------------------------------------------------------------------------------


_MARK = "forebay:"


def pack_loader_state(state: Any) -> bytes:
    """A loader's state as bytes; UnsupportedPayload if it is not plain data."""
    from forebay.codec.values import encode_value  # imported here: samplers of map-style data sets do not need it

    return encode_value(_plain(state))


def unpack_loader_state(data: bytes) -> Any:
    """The state that `pack_loader_state` packed; DamagedData if it is something else."""
    from forebay.codec.values import decode_value

    if data.startswith(b"FBG1"):
        raise UnreadableData(
            "the state of an iterable loader was written by an earlier Forebay; finish the run with that version, or "
            "give the task another name to start the loader again"
        )
    return _restored(decode_value(data))


def _plain(value: Any) -> Any:
    """The value as plain data.

    Loaders of torch keep the state of their random generator as a tensor, numpy's generators have integers of 128 bits,
    and some loaders have dicts with integers as keys.
    """
    if isinstance(value, dict):
        if all(type(key) is str and not key.startswith(_MARK) for key in value):
            return {key: _plain(item) for key, item in value.items()}
        return {f"{_MARK}items": [[_plain(key), _plain(item)] for key, item in value.items()]}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple([_plain(item) for item in value])
    if type(value) is int and not -(2**63) <= value < 2**63:
        return {f"{_MARK}int": hex(value)}
    if isinstance(value, np.generic):
        return _plain(value.item())
    if type(value).__module__ == "torch" and hasattr(value, "detach"):
        return {f"{_MARK}tensor": value.detach().cpu().numpy()}
    return value


def _restored(value: Any) -> Any:
    if isinstance(value, dict):
        if f"{_MARK}items" in value:
            return {_restored(key): _restored(item) for key, item in value[f"{_MARK}items"]}
        if f"{_MARK}int" in value:
            return int(value[f"{_MARK}int"], 16)
        if f"{_MARK}tensor" in value:
            import torch  # type: ignore[import-not-found,unused-ignore]

            return torch.from_numpy(value[f"{_MARK}tensor"].copy())
        return {key: _restored(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_restored(item) for item in value])
    return value.copy() if isinstance(value, np.ndarray) else value
