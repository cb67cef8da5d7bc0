"""File operations that fail at a chosen moment: for tests of what is left behind then."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

from forebay.checkpoint.files import FileOps

__all__ = ["Failing"]


class Failing(FileOps):
    """Fails at the n-th operation, or from it on."""

    def __init__(self, at: int | None, code: int = errno.EIO, *, for_good: bool = False) -> None:
        self.calls: list[str] = []
        self.open_descriptors: set[int] = set()
        self._at, self._code, self._for_good = at, code, for_good

    def _count(self, name: str) -> None:
        self.calls.append(name)
        if self._at is not None and (len(self.calls) > self._at if self._for_good else len(self.calls) == self._at + 1):
            raise OSError(self._code, os.strerror(self._code))


def _counted(name: str) -> Callable[..., Any]:
    def call(self: Failing, *arguments: Any) -> Any:
        if name == "close":  # a close that fails has closed
            self.open_descriptors.discard(arguments[0])
            os.close(arguments[0])
            return self._count(name)
        if name == "write" and len(self.calls) == self._at:
            os.write(arguments[0], arguments[1][0][:3])  # a full disk takes a part
        self._count(name)
        result = getattr(FileOps, name)(self, *arguments)
        if name in ("open", "create", "append", "open_directory"):
            self.open_descriptors.add(result[0] if name == "open" else result)
        return result

    return call


for _name in [name for name in vars(FileOps) if not name.startswith("_")]:
    setattr(Failing, _name, _counted(_name))
