"""The checkpoints of a loader: a directory with `step_<n>` for each save, the last ones kept."""

from __future__ import annotations

import logging
import re
import shutil
from os import PathLike
from pathlib import Path
from typing import Any

from forebay.buffer.buffer import checkpoint_exists
from forebay.core.validate import checked_integer
from forebay.errors import InvalidInput

log = logging.getLogger(__name__)

_NAME = re.compile(r"step_([0-9]{1,18})")
_DELETED, _ABANDONED = ".deleted", ".abandoned"


class Saves:
    """The checkpoints in a directory. None: the loader was given no directory."""

    def __init__(self, directory: str | PathLike[str] | None, keep: int) -> None:
        self.directory = None if directory is None else Path(directory)
        self.keep = checked_integer("keep_checkpoints", keep, least=1)
        self.last: tuple[str, int] | None = None  # the path and the step that were saved, or resumed
        self._chosen: Path | None = None
        self._afresh = False  # `load_state_dict` said that nothing was saved

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is written."""
        return self._directory("save") / f"step_{step}"

    def newest(self) -> Path | None:
        """The complete checkpoint of the latest step, or what `load_state_dict` chose; None without a directory."""
        if self.directory is None or self._afresh:
            return self._chosen
        return self._chosen or next((path for _, path in self._found("resume") if checkpoint_exists(path)), None)

    def step_of(self, path: Path) -> int | None:
        """The step of the checkpoint that was last saved or resumed, if it is this one."""
        return self.last[1] if self.last is not None and self.last[0] == str(path) else None

    def note(self, path: Path, step: int) -> None:
        """A checkpoint was written: delete earlier ones, except for the last ones, and set later ones aside.

        Later ones belong to a run that was given up: it was resumed from an earlier step.
        """
        self.last = str(path), step
        found = self._found("save")
        earlier = [path for number, path in found if number < step]
        kept = [path for path in earlier if checkpoint_exists(path)][: self.keep - 1]
        self._sweep(_DELETED)
        for each in earlier:
            # A process that dies while it deletes leaves no half of a checkpoint; the next save deletes the rest.
            if each not in kept:
                each.rename(each.with_name(f"{each.name}{_DELETED}"))
        self._sweep(_DELETED)
        if later := [path for number, path in found if number > step]:
            self._sweep(_ABANDONED)
            for each in later:
                log.warning("checkpoint_set_aside path=%s: the run was resumed from an earlier step", each)
                each.rename(each.with_name(f"{each.name}{_ABANDONED}"))

    def _sweep(self, suffix: str) -> None:
        for path in self._directory("save").glob(f"step_*{suffix}"):
            shutil.rmtree(path)
            log.info("checkpoint_deleted path=%s", path)

    def state_dict(self) -> dict[str, Any]:
        """The path and the step of the last save."""
        path, step = (None, None) if self.last is None else self.last
        return {"path": path, "step": step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Choose the checkpoint that `state_dict` described."""
        path = state.get("path", 0) if isinstance(state, dict) else 0
        if not isinstance(path, str | None):
            raise InvalidInput(f"{state!r:.80} names no checkpoint; expected state_dict() of a loader")
        self._chosen, self._afresh = None if path is None else Path(path), path is None

    def _found(self, verb: str) -> list[tuple[int, Path]]:
        """The directories of steps, the latest first."""
        directory = self._directory(verb)
        if not directory.is_dir():
            return []
        found = [(int(match[1]), path) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))]
        return sorted(found, reverse=True)

    def _directory(self, verb: str) -> Path:
        if self.directory is None:
            raise InvalidInput(f"{verb}() needs a directory for checkpoints; give the loader checkpoints=DIRECTORY")
        return self.directory
