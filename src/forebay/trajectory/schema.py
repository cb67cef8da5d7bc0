"""Which fields the trajectories of a buffer have, and where each lies in a row. Pure.

The first trajectory fixes the schema; `fitted` checks every later one against it, and fills in what was declared
optional. Fields live in two tables: a row of *steps* is one (t, b) cell, a row of *observations* is what `curr_obs` of
a step, or `next_obs` of the step before it, is. An observation leaf is in the second table if both have it alike.

A table is a few *strips*, each an array of rows of a fixed number of bytes, which on disk is a file: fields of up to
512 bytes are packed into the first one, because every file costs a sync; a larger one has a strip of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np

from forebay.core.dtypes import BFLOAT16, DTYPES, dtype_name, raw_dtype
from forebay.errors import DamagedData, InvalidConfig, InvalidTrajectory
from forebay.trajectory.data import STRING, Aligned, Leaf, Path, Trajectory, dotted

__all__ = [
    "NEXT",
    "VALID",
    "Field",
    "Layout",
    "Schema",
    "Strip",
    "check_names",
    "check_optional",
    "fitted",
    "read_schema",
    "schema_from",
    "schema_of",
]

NEXT: Path = ("#next",)
"""Of a step: which observation row of its trajectory is its `next_obs`."""

VALID: Path = ("#valid",)
"""Of a step: whether it may be drawn."""

_NESTED = ("forward_inputs", "curr_obs", "next_obs")
_OPTIONAL = {item.name for item in dataclasses.fields(Trajectory)}
_OPTIONAL -= {"max_episode_length", "model_weights_id", "rewards", "valid"}
_PACKED_BYTES = 512
_MAX_FIELDS, _MAX_ROW_BYTES, _MAX_DIMENSIONS, _MAX_DEPTH = 1024, 2**30, 16, 16
_ALIGNMENT = 8


class Field(msgspec.Struct, frozen=True):
    """A leaf of every trajectory: where it is, its dtype (as safetensors has it, or STRING), and the shape of a row."""

    path: Path
    dtype: str
    shape: tuple[int, ...] = ()

    @property
    def raw(self) -> np.dtype[Any]:
        """What its elements are kept in."""
        return np.dtype("<i4") if self.dtype == STRING else raw_dtype(self.dtype)

    @property
    def row_bytes(self) -> int:
        return prod(self.shape) * self.raw.itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {['T', 'B', *self.shape]}".replace("'", "")


class Schema(msgspec.Struct, frozen=True):
    """The fields of steps, and those that `curr_obs` and `next_obs` share."""

    steps: tuple[Field, ...]
    observations: tuple[Field, ...] = ()

    def __post_init__(self) -> None:
        fields = (*self.steps, *self.observations)
        if len(fields) > _MAX_FIELDS:
            raise ValueError(f"{len(fields)} fields; expected at most {_MAX_FIELDS}")
        for field in fields:
            if field.dtype != STRING and field.dtype not in DTYPES:
                raise ValueError(
                    f"{dotted(field.path)} is of dtype {field.dtype[:100]!r}; expected {', '.join(DTYPES)}"
                )
            if not 0 < len(field.path) <= _MAX_DEPTH:
                raise ValueError(f"a field has a path of {len(field.path)} names; expected 1 to {_MAX_DEPTH}")
            if len(field.shape) > _MAX_DIMENSIONS or any(size < 0 for size in field.shape):
                raise ValueError(f"{dotted(field.path)} has shape {list(field.shape)}")
            # Also beside a 0, numpy wants sizes that could be.
            if prod(max(size, 1) for size in field.shape) * field.raw.itemsize > _MAX_ROW_BYTES:
                raise ValueError(f"{dotted(field.path)} has rows of {field.row_bytes} bytes; at most {_MAX_ROW_BYTES}")
        for table in (self.steps, self.observations):
            paths = {field.path for field in table}
            if len(paths) != len(table) or any(path[:end] in paths for path in paths for end in range(1, len(path))):
                raise ValueError("a field stands twice, or is inside another one")


class Strip(NamedTuple):
    """Rows of `row_bytes`, in which each field has its offset."""

    row_bytes: int
    fields: tuple[tuple[Path, Field, int], ...]

    def dtype(self) -> np.dtype[Any]:
        """A row as a structured dtype; the k-th field is named `f<k>`."""
        return np.dtype(
            {
                "names": [f"f{k}" for k in range(len(self.fields))],
                "formats": [(field.raw, field.shape) for _, field, _ in self.fields],
                "offsets": [offset for _, _, offset in self.fields],
                "itemsize": self.row_bytes,
            }
        )


class Layout:
    """Where everything is: the strips of both tables, a function of the schema alone."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        own = [(VALID, Field(VALID, "BOOL"))]
        if schema.observations:
            own.append((NEXT, Field(NEXT, "I32")))
        self.steps = _strips([*own, *((field.path, field) for field in schema.steps)])
        self.observations = _strips([(field.path, field) for field in schema.observations])

    @cached_property
    def step_bytes(self) -> int:
        return sum(strip.row_bytes for strip in self.steps)

    @cached_property
    def observation_bytes(self) -> int:
        return sum(strip.row_bytes for strip in self.observations)

    def files(self) -> list[dict[str, Any]]:
        """For readers without Forebay: what is in the k-th file of a segment."""
        return [
            {
                "table": table,
                "row_bytes": strip.row_bytes,
                "fields": [
                    {"path": list(path), "dtype": field.dtype, "shape": list(field.shape), "offset": offset}
                    for path, field, offset in strip.fields
                ],
            }
            for table, strips in (("steps", self.steps), ("observations", self.observations))
            for strip in strips
        ]


def _strips(fields: Iterable[tuple[Path, Field]]) -> tuple[Strip, ...]:
    """Small fields packed by falling size of their elements, so that all are aligned; large ones on their own."""
    fields = list(fields)
    packed = sorted((pair for pair in fields if pair[1].row_bytes <= _PACKED_BYTES), key=lambda p: -p[1].raw.itemsize)
    strips = []
    if packed:
        placed, offset = [], 0
        for path, field in packed:
            placed.append((path, field, offset))
            offset += field.row_bytes
        # One field alone stays as it is: it can be gathered without being taken apart.
        row_bytes = offset if len(packed) == 1 and offset else max(-(-offset // _ALIGNMENT), 1) * _ALIGNMENT
        strips.append(Strip(row_bytes, tuple(placed)))
    strips += [Strip(field.row_bytes, ((path, field, 0),)) for path, field in fields if field.row_bytes > _PACKED_BYTES]
    return tuple(strips)


def read_schema(data: bytes) -> Schema:
    """A schema from JSON that is not trusted."""
    try:
        return msgspec.json.decode(data, type=Schema)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise DamagedData(f"the schema of the trajectories cannot be read: {error}") from None


def check_names(schema: Schema) -> None:
    """DamagedData unless its fields are those of a trajectory: a batch has other columns, too."""
    paths = [field.path for field in schema.steps]
    paths += [(side, *field.path) for field in schema.observations for side in ("curr_obs", "next_obs")]
    known = set(paths)
    for path in paths:
        if path[0] not in _OPTIONAL | {"rewards"} or (len(path) > 1) != (path[0] in _NESTED):
            raise DamagedData(f"the schema of the trajectories has {dotted(path)[:200]!r}; that is no field of one")
    if len(known) < len(paths) or any(path[:end] in known for path in paths for end in range(1, len(path))):
        raise DamagedData("the schema of the trajectories has a field twice, or inside another one")


# --- fixing a schema, and keeping to it ---------------------------------------------------------------


def schema_of(found: Aligned, optional: Mapping[str, Any]) -> Schema:
    """The schema that a first trajectory fixes."""
    leaves = {path: Field(path, leaf.dtype, leaf.shape) for path, leaf in found.leaves.items() if path != ("valid",)}
    for name, fill in optional.items():
        path = tuple(name.split("."))
        # A number does not say what an array of it would look like; then the field comes with the first trajectory.
        if path not in leaves and isinstance(fill, (np.ndarray, np.generic, str)):
            leaves[path] = Field(path, _fill_dtype(name, fill), np.shape(fill))
    return schema_from(leaves)


def schema_from(fields: Mapping[Path, Field]) -> Schema:
    """The schema of these leaves, in whatever order they come: ranks that have the same ones lay out the same rows."""
    leaves = {path: fields[path] for path in sorted(fields)}
    shared = [
        Field(path[1:], field.dtype, field.shape)
        for path, field in leaves.items()
        if path[0] == "curr_obs" and _same(leaves.get(("next_obs", *path[1:])), field)
    ]
    gone = {(side, *field.path) for field in shared for side in ("curr_obs", "next_obs")}
    try:
        return Schema(tuple(field for path, field in leaves.items() if path not in gone), tuple(shared))
    except ValueError as error:
        raise InvalidTrajectory(f"a trajectory cannot be stored: {error}") from None


def fitted(found: Aligned, schema: Schema, optional: Mapping[str, Any]) -> dict[Path, Leaf]:
    """The leaves of a trajectory as the schema wants them; InvalidTrajectory names what differs."""
    expected = {field.path: field for field in schema.steps}
    for field in schema.observations:
        for side in ("curr_obs", "next_obs"):
            expected[(side, *field.path)] = field
    for path, leaf in found.leaves.items():
        if path == ("valid",):
            continue
        wanted = expected.get(path)
        if wanted is None:
            advice = ""
            if dotted(path) in optional:
                advice = (
                    ". It was declared optional, but the first trajectory had none, so its dtype and shape are not "
                    "known: declare it with a numpy array of one row as its fill"
                )
            raise InvalidTrajectory(
                f"{dotted(path)} is new; the trajectories here have {', '.join(map(dotted, expected))}{advice}"
            )
        if (leaf.dtype, leaf.shape) != (wanted.dtype, wanted.shape):
            raise InvalidTrajectory(
                f"{dotted(path)} is {Field(path, leaf.dtype, leaf.shape)}; the trajectories here have {wanted}"
            )
    leaves = dict(found.leaves)
    for path, field in expected.items():
        if path in leaves:
            continue
        fill = optional.get(dotted(path))
        if fill is None:
            raise InvalidTrajectory(
                f"{dotted(path)} is missing; the trajectories here have it as {field}. Declare it optional with a fill "
                "if it may be"
            )
        leaves[path] = _filled(path, field, fill, found)
    return leaves


def check_optional(optional: Mapping[str, Any]) -> None:
    for name, fill in optional.items():
        first, *more = name.split(".") if isinstance(name, str) else ("",)
        if first not in _OPTIONAL or bool(more) != (first in _NESTED) or not all(more):
            raise InvalidConfig(
                f"optional names {name!r}; expected a field that may be missing, such as 'prev_logprobs' or "
                "'curr_obs.task'"
            )
        if not isinstance(fill, (bool, int, float, str, np.generic, np.ndarray)):
            raise InvalidConfig(
                f"the fill of {name!r} is a {type(fill).__name__}; expected a number, text or a numpy array"
            )
        dtype = _fill_dtype(name, fill)
        if dtype == STRING and first not in _NESTED:
            raise InvalidConfig(f"the fill of {name!r} is text; only forward_inputs and observations have text")


def _same(one: Field | None, other: Field) -> bool:
    return one is not None and (one.dtype, one.shape) == (other.dtype, other.shape)


def _fill_dtype(name: str, fill: Any) -> str:
    if isinstance(fill, str):
        return STRING
    dtype = np.asarray(fill).dtype
    found = dtype_name(dtype)
    if found is None:
        raise InvalidConfig(f"the fill of {name!r} is of dtype {dtype}; expected one of {', '.join(DTYPES)}")
    return found


def _filled(path: Path, field: Field, fill: Any, found: Aligned) -> Leaf:
    row = np.array(fill, object) if field.dtype == STRING else _converted(path, field, fill)
    if (field.dtype == STRING) != isinstance(fill, str):
        raise InvalidTrajectory(f"the fill of {dotted(path)} is {fill!r:.100}; the trajectories here have {field}")
    try:
        row = np.broadcast_to(row, field.shape)
    except ValueError:
        raise InvalidTrajectory(
            f"the fill of {dotted(path)} has shape {list(np.shape(fill))}; the trajectories here have {field}"
        ) from None
    return Leaf(
        field.dtype, field.shape, np.broadcast_to(row, (found.epochs, found.epoch_steps, found.envs, *field.shape))
    )


def _converted(path: Path, field: Field, fill: Any) -> np.ndarray[Any, Any]:
    """A fill in the dtype of its field; InvalidTrajectory if that would be another number."""
    given = np.asarray(0 if isinstance(fill, str) else fill)
    with np.errstate(all="ignore"):
        if field.dtype == BFLOAT16:
            row = _bfloat16_bits(given.astype(np.float32))
            kept = np.isfinite(given.astype(np.float64)) <= (row & 0x7F80 != 0x7F80)
        else:
            row = given.astype(field.raw)
            kept = row == given if field.raw.kind in "biu" else np.isfinite(given) <= np.isfinite(row)
    if not np.all(kept):
        raise InvalidTrajectory(f"the fill of {dotted(path)} is {fill!r:.100}, which {field} cannot hold")
    return row


def _bfloat16_bits(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The upper half of float32, rounded to the nearest (to even where two are as near), as torch does.

    >>> [hex(bits) for bits in _bfloat16_bits(np.array([1.0, 0.1, np.inf], np.float32))]
    ['0x3f80', '0x3dcd', '0x7f80']
    """
    bits = np.ascontiguousarray(values).reshape(values.shape).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)
