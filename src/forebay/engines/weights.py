"""The tensors of weights on disk and in a server, and the comparison of the two.

A server may report success after a partial update: vLLM on a CPU repacks linear weights and then reloads only the
others, vLLM and SGLang keep the old values of tensors that are missing in the files, and SGLang accepts a tensor of the
wrong shape. So the tensors are compared before they are loaded; afterwards the tensors that changed in the server are
compared with those that changed on disk.

Only safetensors files are read, as headers and digests: nothing is deserialized.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, TypeAlias

import msgspec

from forebay.errors import EngineError, InvalidInput

Checksums: TypeAlias = Mapping[str, Mapping[str, str]]
"""The checksums that a server reports for its tensors, by rank and name."""

_MAX_HEADER_BYTES = 100 * 2**20
_INDEX = "model.safetensors.index.json"
_CHUNK_BYTES = 4 * 2**20

_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj",
          "up_proj": "gate_up_proj"}  # fmt: skip
"""Layers that vLLM and SGLang fuse into one."""

_EMPTY = hashlib.sha256().hexdigest()
"""The checksum that vLLM reports for a tensor whose memory it freed: such a tensor can never be loaded again."""


class Tensor(msgspec.Struct, frozen=True):
    """One tensor in a file."""

    dtype: str
    shape: tuple[int, ...]
    digest: bytes


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def read_weights(directory: Path) -> dict[str, Tensor]:
    """The tensors in the safetensors files of a directory, by name. Reads the files: about a second per gigabyte."""
    if not directory.is_dir():
        raise InvalidInput(f"there is no directory of weights at {directory}; expected safetensors files")
    tensors: dict[str, Tensor] = {}
    for path in _files(directory):
        try:
            with path.open("rb") as file:
                found = _read_file(file, path.stat().st_size)
        except (OSError, msgspec.MsgspecError, ValueError, OverflowError) as error:
            raise InvalidInput(f"the weights in {path} cannot be read: {error}") from error
        twice = tensors.keys() & found.keys()
        if twice:
            raise InvalidInput(f"tensor {min(twice)!r} appears in two files of {directory}; expected it once")
        tensors |= found
    return tensors


def _files(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if index.is_file():
        try:
            names = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
        except (OSError, msgspec.MsgspecError) as error:
            raise InvalidInput(f"{index} cannot be read: {error}") from error
        for name in names:
            if Path(name).name != name:
                raise InvalidInput(f"{index} names the file {name!r:.80}; expected files in its own directory")
        files = [directory / name for name in names]
    else:
        files = list(directory.glob("*.safetensors"))
    if not files:
        raise InvalidInput(f"there are no safetensors files in {directory}")
    return sorted(files)


def _read_file(file: BinaryIO, size: int) -> dict[str, Tensor]:
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    header = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
    header.pop("__metadata__", None)
    tensors = {}
    for name, raw in header.items():
        entry = msgspec.json.decode(raw, type=_Entry)
        start, end = entry.data_offsets
        if not 0 <= start <= end <= size - 8 - length:
            raise ValueError(f"tensor {name!r} is at bytes {start} to {end}, outside the file")
        file.seek(8 + length + start)
        tensors[name] = Tensor(entry.dtype, entry.shape, _digest(file, end - start))
    return tensors


def _digest(file: BinaryIO, length: int) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    while length:
        data = file.read(min(length, _CHUNK_BYTES))
        if not data:
            raise ValueError("it ends in the middle of a tensor")
        digest.update(data)
        length -= len(data)
    return digest.digest()


def server_name(name: str) -> str:
    """The name that a server uses for a tensor of a file.

    >>> server_name("model.layers.0.self_attn.q_proj.weight")
    'model.layers.0.self_attn.qkv_proj.weight'
    """
    return ".".join(_FUSED.get(part, part) for part in name.split("."))


def check_same_tensors(new: Mapping[str, Tensor], old: Mapping[str, Tensor], path: Path) -> None:
    """InvalidInput unless two sets of weights have the same tensors: a server would not report the difference."""
    missing, unknown = old.keys() - new.keys(), new.keys() - old.keys()
    others = {name for name in new.keys() & old.keys() if _form(new[name]) != _form(old[name])}
    for names, problem in ((missing, "are missing"), (unknown, "are new"), (others, "have a different shape or type")):
        if names:
            raise InvalidInput(
                f"the weights at {path} do not match those that the server was loaded with ({len(old)} tensors): "
                f"{len(names)} tensors {problem} (the first: {min(names)!r}). The server was not touched"
            )


def _form(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    return tensor.dtype, tensor.shape


def check_update(
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    server_before: Checksums,
    server_after: Checksums,
    url: str,
) -> tuple[int, int]:
    """The number of tensors that were checked in the server, and of tensors in the files that could not be checked.

    EngineError unless exactly the tensors that changed on disk changed in the server, on every rank.
    """
    check_reloadable(server_after, url)
    on_disk = {server_name(name) for name in after if name not in before or after[name] != before[name]}
    known = {server_name(name) for name in after}
    names = {name for tensors in server_after.values() for name in tensors}
    changed: set[str] = set()
    for rank, tensors in server_after.items():
        earlier = server_before.get(rank, {})
        here = {name for name, digest in tensors.items() if digest != earlier.get(name)}
        if on_disk & tensors.keys() and not on_disk & here:
            raise _partial(url, f"its rank {rank!r} took none of the {len(on_disk)} tensors that changed on disk")
        changed |= here
    left, odd = on_disk & names - changed, changed & known - on_disk
    if left:
        raise _partial(url, f"{len(left)} of {len(on_disk)} tensors did not change there (the first: {min(left)!r})")
    if odd:
        raise _partial(url, f"{len(odd)} tensors changed that did not change on disk (the first: {min(odd)!r})")
    for name in known & names:
        if len(_digests(server_before, name)) == 1 < len(_digests(server_after, name)):
            raise _partial(url, f"its ranks had the same {name!r} before and have different ones now")
    if on_disk and not known & names:
        raise EngineError(
            f"{url} names its tensors differently from the files (its first: {min(names, default=None)!r}), so nothing "
            "could be compared; create the control with verify=False if you trust the server"
        )
    return len(known & names), len(known - names)


def _digests(checksums: Checksums, name: str) -> set[str]:
    return {tensors[name] for tensors in checksums.values() if name in tensors}


def _partial(url: str, problem: str) -> EngineError:
    return EngineError(f"{url} took only part of the weights: {problem}; it must not generate before a complete update")


def check_reloadable(checksums: Checksums, url: str) -> None:
    """EngineError if a server has tensors that cannot be replaced."""
    digests = [(name, digest) for tensors in checksums.values() for name, digest in tensors.items()]
    gone = [name for name, digest in digests if digest == _EMPTY]
    if gone:
        raise EngineError(
            f"{url} cannot load new weights completely: it repacked {len(gone)} of {len(digests)} tensors and freed "
            f"their memory (the first: {min(gone)!r}). vLLM on a CPU needs a worker extension that keeps them unpacked "
            "(docs/guide/engines.md)"
        )
