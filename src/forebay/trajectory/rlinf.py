"""Reading directories of RLinf's TrajectoryReplayBuffer; with `export_rlinf` beside it, the way there and back.

    metadata.json           {"trajectory_format", "size", "total_samples", "trajectory_counter", "seed"}
    trajectory_index.json   {"trajectory_index": {"<id>": {"model_weights_id", ...}}, "trajectory_id_list": [<id>, ...]}
    trajectory_<id>_<model_weights_id>.pt   what torch.save makes of a dict of tensors and of dicts of them

Promised: nothing that is read is executed, or followed out of the directory (a name in the index never becomes a path:
the files are those of the listing), and nothing is allocated because a length said so. What cannot be taken over is
refused by name, or listed (`missing`, `unlisted`, `skipped`, `ignored`); nothing is lost in silence.

Needs torch, inside the functions only. Not here: what a trajectory means (`data`), and Forebay's own files.
"""

from __future__ import annotations

import errno
import io
import re
import stat
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from forebay.checkpoint.files import FileOps
from forebay.checkpoint.publish import MANIFEST, UNREADABLE, doing, open_plain
from forebay.errors import DamagedData, InvalidInput
from forebay.trajectory.data import Path as LeafPath
from forebay.trajectory.data import Trajectory, dotted
from forebay.trajectory.rlinf_export import INDEX, METADATA, NESTED, RlinfExport, export_rlinf, import_torch

__all__ = ["RlinfDirectory", "RlinfExport", "export_rlinf", "find_rlinf", "open_rlinf"]

MAX_JSON_BYTES = 256 * 2**20
MAX_FILE_BYTES = 2**36
MAX_PICKLE_BYTES = 64 * 2**20  # of what is not in tensors

_INDEX_TWIN = "trajector_index.json"  # so spelt by RLinf's tools, which write both
_OURS = (MANIFEST, "catalogue.db")
# The id of the weights may be empty; in RLinf's documentation the number of a model update follows it.
_FILE = re.compile(r"trajectory_(0|[1-9][0-9]{0,18})_([ -.0-~]{0,200})\.pt", re.ASCII)
_LIKE_A_FILE = re.compile(r"trajectory_.*\.(pt|pkl)", re.DOTALL)
_ID = re.compile(r"0|[1-9][0-9]{0,18}", re.ASCII)
_WITH_UPDATE_COUNT = re.compile(r"(.+)_[0-9]{1,19}", re.ASCII)

_WITH_EXTRA_ROWS = ("actions", "intervene_flags", "prev_logprobs", "prev_values", "versions", "forward_inputs")
_MAX_DEPTH, _MAX_NODES, _MAX_NAME, _MAX_ENTRIES = 8, 4096, 200, 4096
_MAX_SHARING = 8  # bytes of tensors for each byte of the file

Id: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class _Metadata(msgspec.Struct):
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None


class _Entry(msgspec.Struct):
    model_weights_id: str = ""


class _Index(msgspec.Struct):
    trajectory_index: dict[str, _Entry] = {}
    trajectory_id_list: list[Id] = []


def find_rlinf(path: str | PathLike[str]) -> bool:
    """Whether this is a directory of RLinf's buffer, judged by names alone."""
    directory = Path(path)
    if not directory.is_dir():
        return False
    with doing("list", directory):
        names = set(FileOps().list_directory(directory))
    if names.intersection(_OURS):
        return False
    return bool(names.intersection((METADATA, INDEX, _INDEX_TWIN))) or any(map(_LIKE_A_FILE.fullmatch, names))


def open_rlinf(path: str | PathLike[str], *, files: FileOps | None = None) -> RlinfDirectory:
    """The directory of an RLinf buffer; its trajectories are read when they are asked for.

    InvalidInput if there is none, or if it holds pickles; DamagedData if its index makes no sense.
    """
    directory, files = Path(path), files or FileOps()
    if not directory.is_dir():
        raise InvalidInput(f"there is no directory {directory}; expected one that RLinf's replay buffer wrote")
    if not find_rlinf(directory):
        raise InvalidInput(
            f"{directory} is not a directory of RLinf's replay buffer: it has no {INDEX} and no .pt files"
        )
    return RlinfDirectory(directory, files)


class RlinfDirectory:
    """An RLinf directory: iterate over it for (id, trajectory), one in memory at a time, in the order of its index.

    Files that the index does not name come last, by id. Of two files with one id (RLinf gives ids out again) the one
    that the index names is taken; DamagedData if it does not say.
    """

    path: Path
    seed: int | None
    """What RLinf draws with; None if it does not say."""
    names: dict[int, str]
    """The file of each trajectory, in order."""
    bytes: int
    missing: tuple[int, ...]
    """Ids in the index without a file: RLinf's index keeps what left its window, its checkpoints do not."""
    unlisted: tuple[str, ...]
    """Files that are read, but that the index does not name; all of them if there is no index."""
    skipped: tuple[str, ...]
    """What is called like a trajectory and is not read: links, directories, other names, other files of an id."""
    ignored: set[str]
    """Fields that were read and cannot be taken over, as far as trajectories were read: unknown ones, plain numbers."""

    def __init__(self, path: Path, files: FileOps) -> None:
        """Use `open_rlinf`."""
        self.path = path
        self._files = files
        self.ignored = set()
        with doing("list", path):
            listing = sorted(files.list_directory(path))
        metadata = self._read_json(METADATA, _Metadata) if METADATA in listing else None
        self.seed = metadata.seed if metadata else None
        index_name = INDEX if INDEX in listing else _INDEX_TWIN
        index = self._read_json(index_name, _Index) if index_name in listing else _Index()
        named = self._weights_by_id(index, index_name)
        found, self.skipped, self._sizes = self._scan(listing)
        chosen = {number: self._choose(number, names, named.get(number)) for number, names in found.items()}
        self.skipped += tuple(name for number in sorted(found) for name in found[number] if name != chosen[number])
        listed = dict.fromkeys((*index.trajectory_id_list, *sorted(named)))
        self.names = {number: chosen[number] for number in (*listed, *sorted(chosen)) if number in chosen}
        self.missing = tuple(number for number in listed if number not in chosen)
        self.unlisted = tuple(
            name for number, name in self.names.items() if not _is_named(_weights_in(name), named.get(number))
        )
        self.bytes = sum(self._sizes[name] for name in self.names.values())

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[tuple[int, Trajectory]]:
        for number in self.names:
            yield number, self.read(number)

    def read(self, trajectory_id: int) -> Trajectory:
        """One trajectory, as torch tensors; DamagedData names the file if it is not what RLinf writes."""
        if trajectory_id not in self.names:
            raise InvalidInput(f"{self.path} has no trajectory {trajectory_id}; it has {len(self.names)}")
        name = self.names[trajectory_id]
        path = self.path / name
        value, size = self._load(path)
        try:
            fields = _Fields(value, size)
        except _Wrong as error:
            raise DamagedData(f"{path} is not a trajectory of RLinf: {error}") from None
        self.ignored |= fields.ignored
        fields.known.setdefault("model_weights_id", _weights_in(name))
        return Trajectory(**fields.known)

    def _load(self, path: Path) -> tuple[object, int]:
        """What torch finds in a file, and the size of the file. Plain data only: no code of the file runs."""
        torch = import_torch()
        try:
            descriptor, size = open_plain(path, self._files)
        except FileNotFoundError:
            raise DamagedData(f"{path} was removed while its directory was read; open it again") from None
        try:
            with doing("read", path), open(descriptor, "rb", closefd=False) as opened:
                _check_archive(path, opened, size)
                opened.seek(0)
                # Not mapped: a file that is cut short while it is read would end the process.
                try:
                    return torch.load(opened, weights_only=True, map_location="cpu", mmap=False), size
                except Exception as error:  # whatever the bytes made torch do
                    if _is_of_the_disk(error):
                        raise
                    raise DamagedData(
                        f"{path} is damaged, or holds more than plain tensors ({type(error).__name__}); nothing in it "
                        "was executed"
                    ) from error
        finally:
            with suppress(OSError):
                self._files.close(descriptor)

    def _read_json(self, name: str, kind: type[Any]) -> Any:
        path = self.path / name
        with doing("open", path):
            descriptor, size = open_plain(path, self._files)
        try:
            if size > MAX_JSON_BYTES:
                raise DamagedData(f"{path} has {size} bytes; expected at most {MAX_JSON_BYTES}")
            with doing("read", path):
                data = self._files.read(descriptor, size, 0)
        finally:
            with suppress(OSError):
                self._files.close(descriptor)
        try:
            return msgspec.json.decode(data, type=kind)
        except UNREADABLE as error:
            raise DamagedData(
                f"{path} is not what RLinf writes: {error}. If it was cut off in a crash, move it away: the "
                "trajectories are then read in the order of their ids"
            ) from None

    def _weights_by_id(self, index: _Index, name: str) -> dict[int, str]:
        path = self.path / name
        if len(set(index.trajectory_id_list)) != len(index.trajectory_id_list):
            raise DamagedData(f"{path} names an id twice in trajectory_id_list")
        for key in index.trajectory_index:
            if not _ID.fullmatch(key) or int(key) >= 2**63:
                raise DamagedData(f"{path} has the trajectory id {key[:100]!r}; expected a whole number from 0")
        return {int(key): entry.model_weights_id for key, entry in index.trajectory_index.items()}

    def _scan(self, listing: list[str]) -> tuple[dict[int, list[str]], tuple[str, ...], dict[str, int]]:
        """The plain files of each id, the names of what is not one, the sizes."""
        found: dict[int, list[str]] = {}
        skipped, sizes = [], {}
        for name in filter(_LIKE_A_FILE.fullmatch, listing):
            if name.endswith(".pkl"):
                raise InvalidInput(
                    f"{self.path / name} is a pickle, and reading one runs whatever code is in it; if you trust it, "
                    "load the directory with RLinf, set trajectory_format = 'pt' on the buffer, save it, and read that"
                )
            match = _FILE.fullmatch(name)
            size = _plain_size(self.path / name) if match and int(match[1]) < 2**63 else None
            if match is None or size is None:
                skipped.append(name)
                continue
            found.setdefault(int(match[1]), []).append(name)
            sizes[name] = size
        return found, tuple(skipped), sizes

    def _choose(self, number: int, names: list[str], weights_id: str | None) -> str:
        if len(names) == 1:
            return names[0]
        fitting = [name for name in names if _is_named(_weights_in(name), weights_id)]
        exact = [name for name in fitting if _weights_in(name) == weights_id]
        if len(exact or fitting) != 1:
            raise DamagedData(
                f"{self.path} has {len(names)} files of trajectory {number}, and its index does not say which one: "
                f"{', '.join(names)}; move all but one away"
            )
        return (exact or fitting)[0]


class _Wrong(Exception):
    """What was loaded is not a trajectory; the message completes a sentence."""


class _Fields:
    """What a file holds, sorted into what a trajectory has and what it has not."""

    def __init__(self, value: object, size: int) -> None:
        """`size`: that of the file, from which all must have come."""
        self.known: dict[str, Any] = {}
        self.ignored: set[str] = set()
        self._torch = import_torch()
        self._nodes = 0
        self._bytes_left = _MAX_SHARING * size
        self._texts_left = 2 * MAX_PICKLE_BYTES
        if not isinstance(value, dict):
            raise _Wrong(f"it holds a {type(value).__name__}; expected a dict")
        rewards = value.get("rewards")
        self._steps_and_envs = tuple(rewards.shape[:2]) if isinstance(rewards, self._torch.Tensor) else ()
        for name, item in value.items():
            self._check_key("it", name)
            if name not in Trajectory.__dataclass_fields__:
                self.ignored.add(name)
            elif item is not None and (taken := self._field(name, item)) is not None:
                self.known[name] = taken

    def _field(self, name: str, item: object) -> object:
        if name == "max_episode_length":
            if type(item) is not int or not 0 <= item < 2**63:
                raise _Wrong(f"{name} is {_shown(item)}; expected a whole number from 0")
            return item
        if name == "model_weights_id":
            if type(item) is not str or len(item) > _MAX_NAME:
                raise _Wrong(f"{name} is {_shown(item)}; expected text of at most {_MAX_NAME} letters")
            return item
        if (name in NESTED) is not isinstance(item, dict):
            raise _Wrong(f"{name} is {_shown(item)}; expected a {'dict' if name in NESTED else 'tensor'}")
        return self._value((name,), item)

    def _value(self, path: LeafPath, item: object) -> object:
        """A tensor, text, or a dict of them; None if it is nothing that a step has (RLinf drops such, too)."""
        if isinstance(item, dict):
            if len(path) > _MAX_DEPTH:
                raise _Wrong(f"{dotted(path)} is nested deeper than {_MAX_DEPTH} levels")
            result = {}
            for key, inner in item.items():
                self._check_key(dotted(path), key)
                if inner is not None and (taken := self._value((*path, key), inner)) is not None:
                    result[key] = taken
            return result
        if isinstance(item, self._torch.Tensor):
            tensor = self._unflattened(path, self._tensor(path, item))
            if tensor.dim() >= 2:
                return tensor
        elif isinstance(item, (list, tuple)):
            return self._text(path, item)
        elif len(path) == 1 or not isinstance(item, (bool, int, float, str)):
            raise _Wrong(f"{dotted(path)} is {_shown(item)}; expected a tensor")
        self.ignored.add(dotted(path))
        return None

    def _tensor(self, path: LeafPath, tensor: Any) -> Any:
        if tensor.layout is not self._torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise _Wrong(f"{dotted(path)} is a tensor that is sparse, quantised or without data; expected a plain one")
        # Tensors may be views of the same bytes, and one may claim any shape over a few of them (strides of 0).
        self._bytes_left -= tensor.numel() * tensor.element_size()
        if self._bytes_left < 0:
            raise _Wrong(f"{dotted(path)} has shape {list(tensor.shape)}, which is more than the file holds")
        return tensor.detach()

    def _text(self, path: LeafPath, item: list[object] | tuple[object, ...]) -> object:
        rows = [row if isinstance(row, (list, tuple)) else [row] for row in item]
        # One list may stand in many places, and is walked in each.
        self._texts_left -= len(rows) + sum(map(len, rows))
        if self._texts_left < 0:
            raise _Wrong(f"{dotted(path)} is more text than the file holds")
        if not all(isinstance(text, str) for row in rows for text in row):
            raise _Wrong(f"{dotted(path)} is a list of other things than text")
        return [list(row) if isinstance(row, (list, tuple)) else row for row in item]

    def _unflattened(self, path: LeafPath, tensor: Any) -> Any:
        """`[(T + E) * B, ...]` as `[T + E, B, ...]`: RLinf's checkpoints flatten what has extra rows."""
        if path[0] not in _WITH_EXTRA_ROWS or len(self._steps_and_envs) < 2 or tensor.dim() < 1:
            return tensor
        steps, envs = self._steps_and_envs
        rows = tensor.shape[0]
        if tensor.shape[:2] == (steps, envs) or not steps or not envs or rows % envs:
            return tensor
        if tensor.dim() >= 2 and tensor.shape[1] == envs and rows > steps and steps % (rows - steps) == 0:
            return tensor
        extra = rows // envs - steps
        if extra <= 0 or steps % extra:
            return tensor
        return tensor.reshape(rows // envs, envs, *tensor.shape[1:])

    def _check_key(self, where: str, key: object) -> None:
        self._nodes += 1
        if self._nodes > _MAX_NODES:  # one dict may stand in many places, and is walked in each
            raise _Wrong(f"it holds more than {_MAX_NODES} values")
        if type(key) is not str or not key or len(key) > _MAX_NAME:
            raise _Wrong(f"{where} has the key {_shown(key)}; expected text of 1 to {_MAX_NAME} letters")


def _shown(item: object) -> str:
    """A value in an error message; of what could be large only its kind."""
    return repr(item)[:100] if isinstance(item, (int, str)) else f"a {type(item).__name__}"


def _check_archive(path: Path, opened: io.BufferedReader, size: int) -> None:
    """Refuse what would make torch allocate more than the file has: torch.save compresses nothing."""
    if size > MAX_FILE_BYTES:
        raise DamagedData(f"{path} has {size} bytes; expected at most {MAX_FILE_BYTES}")
    try:
        with zipfile.ZipFile(opened) as archive:
            entries = archive.infolist()
    except Exception as error:  # zipfile lets out what struct, int and codecs raise
        if _is_of_the_disk(error):
            raise
        raise DamagedData(f"{path} is not a file that torch.save wrote, or is cut off ({error})") from None
    if (
        len(entries) > _MAX_ENTRIES
        or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
        or any(entry.file_size > MAX_PICKLE_BYTES for entry in entries if entry.filename.endswith(".pkl"))
        or sum(entry.file_size for entry in entries) > size
    ):
        raise DamagedData(f"{path} claims to hold more than a file of {size} bytes can; torch.save did not write it")


def _is_of_the_disk(error: Exception) -> bool:
    """Whether the operating system failed, and not a number in the file that led to an impossible position."""
    return isinstance(error, OSError) and error.errno not in (None, errno.EINVAL)


def _plain_size(path: Path) -> int | None:
    """None if it is not a plain file."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _weights_in(name: str) -> str:
    match = _FILE.fullmatch(name)
    return match[2] if match else ""


def _is_named(weights: str, weights_id: str | None) -> bool:
    """Whether a file with this text in its name is the one of these weights.

    >>> _is_named("7c9e", "7c9e"), _is_named("7c9e_12", "7c9e"), _is_named("7c9e", "ffff"), _is_named("7c9e", None)
    (True, True, False, False)
    """
    if weights_id is None or weights == weights_id:
        return weights_id is not None
    match = _WITH_UPDATE_COUNT.fullmatch(weights)
    return match is not None and match[1] == weights_id
