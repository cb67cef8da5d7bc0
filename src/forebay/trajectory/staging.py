"""A new directory that appears complete or not at all: it is made beside its place, and renamed there.

What is made lies in `.<name>-<16 hex digits>.tmp` beside the target until it is done; whatever fails or is interrupted
removes it, and what a killed process left behind is removed by the next one that makes the same target. An existing
target is refused, even an empty directory. Not here: what is put into the directory.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path

from forebay.checkpoint.files import FileOps
from forebay.checkpoint.publish import doing
from forebay.errors import InvalidInput

__all__ = ["check_new", "staged", "sync_directory"]

_INNER = "new"


def check_new(target: str | PathLike[str]) -> Path:
    """The absolute path of a target; InvalidInput if there is something already."""
    path = Path(target).absolute()
    if path.exists() or path.is_symlink():
        raise InvalidInput(f"{path} exists already; name a new directory")
    return path


@contextmanager
def staged(target: str | PathLike[str], files: FileOps) -> Iterator[Path]:
    """An empty directory, which at the end of the block becomes the target."""
    path = check_new(target)
    made = _make_parents(path, files)
    outer = path.parent / f".{path.name[:200]}-{secrets.token_hex(8)}.tmp"
    try:
        _sweep(path, files)
        with doing("create", outer):
            files.make_directory(outer)
        with _locked(outer, files):
            with doing("create", outer / _INNER):
                files.make_directory(outer / _INNER)
            yield outer / _INNER
            check_new(path)  # a rename would replace an empty directory
            with doing("rename to", path):
                files.replace(outer / _INNER, path)
    except BaseException:
        _remove(outer, files)
        for parent in made:
            with suppress(OSError):
                parent.rmdir()
        raise
    _remove(outer, files)
    sync_directory("sync (the new directory is in place, but may not survive a power loss)", path.parent, files)


def sync_directory(what: str, path: Path, files: FileOps) -> None:
    with doing(what, path):
        descriptor = files.open_directory(path)
        try:
            files.sync(descriptor)
        finally:
            files.close(descriptor)


@contextmanager
def _locked(path: Path, files: FileOps) -> Iterator[None]:
    """So that another process does not take it for a leftover."""
    with doing("lock", path):
        descriptor = files.open_directory(path)
    try:
        with doing("lock", path):
            files.lock(descriptor)
        yield
    finally:
        with suppress(OSError):
            files.close(descriptor)


def _make_parents(target: Path, files: FileOps) -> list[Path]:
    """Those that were missing, the innermost first."""
    with doing("create", target):
        try:
            return files.make_directories(target.parent)
        except NotADirectoryError as error:
            raise InvalidInput(f"{error.filename} is a file; {target} cannot be in it") from None


def _sweep(target: Path, files: FileOps) -> None:
    """Remove what killed processes left of the same target."""
    ours = re.compile(rf"\.{re.escape(target.name[:200])}-[0-9a-f]{{16}}\.tmp")
    with suppress(OSError):
        for name in filter(ours.fullmatch, files.list_directory(target.parent)):
            descriptor = files.open_directory(target.parent / name)
            try:
                files.lock(descriptor)
            except BlockingIOError:
                continue
            finally:
                files.close(descriptor)
            _remove(target.parent / name, files)


def _remove(outer: Path, files: FileOps) -> None:
    for directory in (outer / _INNER, outer):
        with suppress(OSError):
            for name in files.list_directory(directory):
                with suppress(OSError):
                    files.remove(directory / name)
        with suppress(OSError):
            directory.rmdir()
