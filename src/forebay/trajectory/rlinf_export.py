"""Writing a directory that RLinf's TrajectoryReplayBuffer loads; `rlinf` says what is in one.

Promised: the target appears complete and synced, or not at all, and RLinf draws from it the rows that were stored. What
it would not read, or would read wrongly, is said in the result, or refused by name. Needs torch, inside the functions
only.
"""

from __future__ import annotations

import io
import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from forebay.checkpoint.files import FileOps
from forebay.checkpoint.publish import doing
from forebay.core.dtypes import BFLOAT16
from forebay.errors import InvalidInput, InvalidTrajectory
from forebay.trajectory.data import STRING, Aligned, Leaf, Trajectory, aligned, dotted
from forebay.trajectory.data import Path as LeafPath
from forebay.trajectory.staging import staged, sync_directory

__all__ = ["INDEX", "METADATA", "NESTED", "RlinfExport", "export_rlinf", "import_torch"]

METADATA, INDEX = "metadata.json", "trajectory_index.json"
NESTED = ("forward_inputs", "curr_obs", "next_obs")

_FLAGS = ("terminations", "truncations", "dones")
_WEIGHTS_ID = re.compile(r"[A-Za-z0-9-]{1,64}", re.ASCII)
# RLinf cannot sample these: torch has no index_put for them.
_WIDER = {"U16": np.int32, "U32": np.int64, "U64": np.int64}


class RlinfExport(msgspec.Struct, frozen=True):
    """What `export_rlinf` wrote. `left_out`: fields that RLinf does not see; `widened`: stored as larger integers."""

    trajectories: int
    transitions: int
    bytes: int
    left_out: frozenset[str]
    widened: frozenset[str]


def export_rlinf(
    path: str | PathLike[str],
    trajectories: Iterable[tuple[int, Trajectory]],
    *,
    seed: int,
    files: FileOps | None = None,
    progress: Callable[[int], object] | None = None,
) -> RlinfExport:
    """Write trajectories, with their ids, as a directory that RLinf loads; the target must not exist.

    Rows are lined up, because RLinf mixes steps where a field has extra rows; with several epochs the flags get their
    leading rows (False), by which epochs are told apart. RLinf knows neither text, nor dicts in dicts, nor `valid`:
    they are in the files for other readers, and named in `left_out`. A dict that has nothing else is not written at
    all, since RLinf would refuse the file. 16 to 64 bit unsigned integers are widened to signed ones, because RLinf
    cannot sample them. Ids of weights that make no file name become UUIDs; of the seed 32 bits are kept. All
    trajectories must have the same fields: RLinf would return rows of another trajectory for those that one lacks.
    `progress` is called with the number of trajectories written.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise InvalidInput(f"seed is {seed!r}; expected a whole number")
    import_torch()
    files = files or FileOps()
    with staged(path, files) as directory:
        writer = _Writer(directory, files)
        for done, (trajectory_id, trajectory) in enumerate(trajectories, 1):
            writer.add(trajectory_id, trajectory)
            if progress is not None:
                progress(done)
        writer.finish(seed)
        sync_directory("sync", directory, files)
    return writer.result()


class _Writer:
    def __init__(self, directory: Path, files: FileOps) -> None:
        self._directory = directory
        self._files = files
        self._index: dict[int, dict[str, object]] = {}
        self._schema: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._left_out: set[str] = set()
        self._widened: set[str] = set()
        self._transitions = self._bytes = 0

    def add(self, trajectory_id: int, trajectory: Trajectory) -> None:
        number = trajectory_id if isinstance(trajectory_id, int) else -1
        if isinstance(trajectory_id, bool) or not 0 <= number < 2**63:
            raise InvalidInput(f"a trajectory has the id {trajectory_id!r}; expected a whole number from 0")
        if number in self._index:
            raise InvalidInput(f"two trajectories have the id {number}; RLinf keeps one file for each")
        whole = aligned(trajectory)
        weights_id = _weights_id(whole)
        fields = self._fields(number, whole)
        fields |= {"max_episode_length": whole.max_episode_length, "model_weights_id": weights_id}
        buffer = io.BytesIO()
        import_torch().save(fields, buffer)
        self._write(f"trajectory_{number}_{weights_id}.pt", buffer.getbuffer())
        measured = whole.leaves.get(("prev_logprobs",))  # as RLinf does
        if measured is None or measured.dtype == STRING:
            measured = whole.leaves[("rewards",)]
        self._index[number] = {
            "num_samples": whole.steps * whole.envs,
            "trajectory_id": number,
            "max_episode_length": whole.max_episode_length,
            "shape": [whole.steps, whole.envs, *measured.shape],
            "model_weights_id": weights_id,
        }
        self._transitions += whole.steps * whole.envs

    def finish(self, seed: int) -> None:
        index = {"trajectory_index": {str(number): entry for number, entry in self._index.items()}}
        self._write(INDEX, msgspec.json.encode(index | {"trajectory_id_list": list(self._index)}))
        metadata = {
            "trajectory_format": "pt",
            "size": len(self._index),
            "total_samples": self._transitions,
            "trajectory_counter": max(self._index, default=-1) + 1,
            "seed": seed % 2**32,
        }
        self._write(METADATA, msgspec.json.encode(metadata))

    def result(self) -> RlinfExport:
        return RlinfExport(
            len(self._index), self._transitions, self._bytes, frozenset(self._left_out), frozenset(self._widened)
        )

    def _fields(self, number: int, whole: Aligned) -> dict[str, Any]:
        """The dict that goes into the file."""
        seen = {path: leaf for path, leaf in whole.leaves.items() if _is_seen(path, leaf)}
        self._check_schema(number, seen)
        fields: dict[str, Any] = {}
        for path, leaf in whole.leaves.items():
            if path not in seen:
                self._left_out.add(dotted(path))
                if path[0] in NESTED and not any(other[0] == path[0] for other in seen):
                    continue
            place = fields
            for name in path[:-1]:
                place = place.setdefault(name, {})
            place[path[-1]] = self._stored(path, leaf, path in seen)
        return fields

    def _stored(self, path: LeafPath, leaf: Leaf, seen: bool) -> Any:
        values = leaf.values
        if values.shape[0] > 1 and path[0] in _FLAGS and leaf.dtype != STRING:
            values = np.concatenate([np.zeros_like(values[:, :1]), values], axis=1)
        values = values.reshape(values.shape[0] * values.shape[1], *values.shape[2:])
        if leaf.dtype == STRING:
            return values.tolist()
        if seen and leaf.dtype in _WIDER:
            if leaf.dtype == "U64" and values.size and values.max() >= 2**63:
                raise InvalidTrajectory(
                    f"{dotted(path)} has the value {values.max()}; RLinf knows integers below 2**63"
                )
            self._widened.add(dotted(path))
            values = values.astype(_WIDER[leaf.dtype])
        torch = import_torch()
        # Writable, because torch warns otherwise. Only the bytes of this array are saved, even if it is a view.
        tensor = torch.from_numpy(np.require(values, requirements=("C", "W", "A")))
        return tensor.view(torch.bfloat16) if leaf.dtype == BFLOAT16 else tensor

    def _check_schema(self, number: int, seen: Mapping[LeafPath, Leaf]) -> None:
        found = {dotted(path): (leaf.dtype, leaf.shape) for path, leaf in seen.items()}
        if not self._index:
            self._schema = found
        for name in sorted(found.keys() | self._schema.keys()):
            if found.get(name) != self._schema.get(name):
                here, before = _described(name, found), _described(name, self._schema)
                raise InvalidTrajectory(
                    f"trajectory {number} has {here}, those before it have {before}; RLinf needs the same in all"
                )

    def _write(self, name: str, data: bytes | memoryview) -> None:
        path = self._directory / name
        with doing("create", path):
            descriptor = self._files.create(path)
        try:
            with doing("write", path):
                self._files.write(descriptor, [data])
                self._files.sync(descriptor)
        finally:
            with suppress(OSError):
                self._files.close(descriptor)
        self._bytes += len(data)


def _is_seen(path: LeafPath, leaf: Leaf) -> bool:
    """Whether RLinf reads it: tensors, one level deep, of the fields that it has."""
    return leaf.dtype != STRING and len(path) <= 2 and path[0] != "valid"


def _described(name: str, schema: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    if name not in schema:
        return f"no {name}"
    dtype, shape = schema[name]
    return f"{name} of {dtype} {list(shape)}"


def _weights_id(whole: Aligned) -> str:
    """The id as it can stand in a file name; without one, that which RLinf derives from the versions."""
    if _WEIGHTS_ID.fullmatch(whole.model_weights_id):
        return whole.model_weights_id
    text = whole.model_weights_id
    if not text:
        versions = whole.leaves.get(("versions",))
        known = bytes(4) if versions is None or versions.dtype == STRING else versions.values.tobytes()
        text = known.hex()
    return str(uuid.uuid5(uuid.NAMESPACE_DNS, text))


def import_torch() -> Any:
    """The package torch; InvalidInput if it is not installed."""
    try:
        import torch
    except ImportError:
        raise InvalidInput(
            "directories of RLinf hold files of torch, which is not installed: pip install 'forebay[torch]'"
        ) from None
    return torch
