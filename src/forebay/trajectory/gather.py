"""Rows become a batch: one gather a strip, into memory of the pool.

The plan of a batch depends on the layout alone and is made once. Packed strips are gathered whole and taken apart;
a strip of one field is gathered straight into its column. Text is looked up. What comes out is a nested dict of torch
tensors or of numpy arrays, contiguous, each column aligned to a page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from forebay.core.dtypes import BFLOAT16, bfloat16_dtype
from forebay.errors import DamagedData
from forebay.trajectory.data import STRING, Path
from forebay.trajectory.index import Rows
from forebay.trajectory.pool import BlockPool
from forebay.trajectory.region import PAGE_BYTES
from forebay.trajectory.schema import NEXT, VALID, Field, Layout, Strip
from forebay.trajectory.space import Space

__all__ = ["Batch", "Gatherer"]

_IDS = ("trajectory_id", "step", "env", "age")


class _Column:
    """A column of the batch, and which field of which strip it is."""

    def __init__(self, path: Path, field: Field, name: str) -> None:
        self.path, self.field, self.name = path, field, name
        self.raw = field.raw
        self.row_bytes = field.row_bytes


class _Part:
    """One gather: a strip of a table, and the columns that come out of it."""

    def __init__(self, table: str, number: int, strip: Strip, side: str | None) -> None:
        self.table, self.number, self.row_bytes, self.side = table, number, strip.row_bytes, side
        self.columns = [
            _Column(path if side is None else (side, *path), field, f"f{k}")
            for k, (path, field, _) in enumerate(strip.fields)
            if side is not None or path not in (NEXT, VALID)
        ]
        # Only of steps: an observation may be called like that.
        own = strip.fields if side is None else ()
        self.next_name = next((f"f{k}" for k, (path, _, _) in enumerate(own) if path == NEXT), None)
        self.record = strip.dtype()
        # A single field that fills its strip needs no taking apart.
        self.direct = (
            len(strip.fields) == 1
            and bool(self.columns)
            and self.columns[0].row_bytes == strip.row_bytes
            and self.columns[0].field.dtype != STRING
        )


class Batch:
    """Columns of `rows` rows in one block of memory, to be filled in one or several parts."""

    def __init__(self, rows: int, block: np.ndarray[Any, Any], columns: dict[Path, np.ndarray[Any, Any]]) -> None:
        self.rows, self.block, self.columns = rows, block, columns


class Gatherer:
    """Makes batches of one layout."""

    def __init__(self, layout: Layout, pool: BlockPool, torch: Any | None) -> None:
        self.layout, self._pool, self._torch = layout, pool, torch
        self._parts = [
            *(_Part("steps", k, strip, None) for k, strip in enumerate(layout.steps)),
            *(_Part("observations", k, strip, "curr_obs") for k, strip in enumerate(layout.observations)),
            *(_Part("observations", k, strip, "next_obs") for k, strip in enumerate(layout.observations)),
        ]
        self._columns = [column for part in self._parts for column in part.columns]
        self._scratch_bytes = max([part.row_bytes for part in self._parts if not part.direct], default=0)
        id_field = Field(("",), "I64")
        self._ids = [_Column((name,), id_field, name) for name in (*_IDS, "source")]

    def batch(self, rows: int, *, source: bool = False) -> Batch:
        """An empty batch; `source` adds that column."""
        columns = [*self._columns, *(self._ids if source else self._ids[:-1])]
        offsets, size = [], 0
        for column in columns:
            offsets.append(size)
            size += -(-rows * column.row_bytes // PAGE_BYTES) * PAGE_BYTES
        block = self._pool.lend(size)
        arrays = {
            column.path: np.ndarray((rows, *column.field.shape), column.raw, block, offset)
            for column, offset in zip(columns, offsets, strict=True)
        }
        return Batch(rows, block, arrays)

    def fill(self, batch: Batch, start: int, rows: Rows, space: Space) -> None:
        """Gather rows into a batch, from its row `start` on."""
        count = len(rows.row)
        whole = count == batch.rows
        part_of = slice(start, start + count)
        for name in _IDS:
            batch.columns[(name,)][part_of] = getattr(rows, name)
        following: np.ndarray[Any, Any] | None = None
        scratch = self._pool.lend(self._scratch_bytes * count) if self._scratch_bytes else None
        for part in self._parts:
            if part.side is None:
                where = rows.row
            elif part.side == "curr_obs":
                where = rows.observation
            else:
                assert following is not None
                where = following
            table = space.steps if part.table == "steps" else space.observations
            source = table.raw[part.number]
            if part.direct:
                target = batch.columns[part.columns[0].path]
                if not whole:
                    target = target[part_of]
                np.take(source, where, axis=0, out=_bytes(target, part.row_bytes), mode="clip")
                continue
            assert scratch is not None
            packed = np.ndarray((count, part.row_bytes), np.uint8, scratch)
            np.take(source, where, axis=0, out=packed, mode="clip")
            records = np.ndarray((count,), part.record, scratch)
            if part.next_name is not None:
                following = rows.first_observation + records[part.next_name]
                # Read from a file perhaps: it must not lead anywhere else.
                np.clip(following, rows.first_observation, rows.last_observation, out=following)
            for column in part.columns:
                target = batch.columns[column.path]
                values = records[column.name]
                if column.field.dtype == STRING:
                    values = values + rows.texts
                (target if whole else target[part_of])[...] = values

    def finish(self, batch: Batch, strings: Sequence[str], lead: tuple[int, ...]) -> dict[str, Any]:
        """The nested dict, with `lead` as the first dimensions."""
        result: dict[str, Any] = {}
        for path, field in self._all_fields():
            array = batch.columns.get(path)
            if array is None:
                continue
            place = result
            for name in path[:-1]:
                place = place.setdefault(name, {})
            place[path[-1]] = self._shown(field, array, strings, lead)
        return result

    def _all_fields(self) -> Iterator[tuple[Path, Field]]:
        for column in (*self._columns, *self._ids):
            yield column.path, column.field

    def _shown(self, field: Field, array: np.ndarray[Any, Any], strings: Sequence[str], lead: tuple[int, ...]) -> Any:
        if field.dtype == STRING:
            return _look_up(array, strings, lead)
        if len(lead) > 1:
            array = array.reshape(*lead, *field.shape)
        if self._torch is not None:
            tensor = self._torch.from_numpy(array)
            return tensor.view(self._torch.bfloat16) if field.dtype == BFLOAT16 else tensor
        return array.view(bfloat16_dtype()) if field.dtype == BFLOAT16 else array


def _bytes(array: np.ndarray[Any, Any], row_bytes: int) -> np.ndarray[Any, Any]:
    return array.reshape(-1).view(np.uint8).reshape(-1, row_bytes)


def _look_up(codes: np.ndarray[Any, Any], strings: Sequence[str], lead: tuple[int, ...]) -> list[Any]:
    if len(codes) and not 0 <= codes.min() <= codes.max() < len(strings):
        raise DamagedData(f"a text has the code {codes.max()}; there are {len(strings)} texts")
    found = [strings[code] for code in codes.tolist()]
    if len(lead) == 1:
        return found
    return [found[k : k + lead[1]] for k in range(0, len(found), lead[1])]
