"""What the trajectory buffer is measured against: the same rows, gathered and copied plainly, and other libraries.

`Rows` holds the rows of all trajectories once, contiguously; trajectories are views of it, and everybody is filled from
it. TorchRL, cpprb and RLinf are no dependencies: `install` puts the pinned versions into a directory of their own below
bench/results, without what they depend on and the checkout has already. Each gets its fastest plain setting: uniform
draws with replacement, no transforms, nothing fetched ahead.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import _rlinf

__all__ = ["IMAGE", "STATE", "Rival", "Rows", "copy", "disk_rivals", "install", "memory_rivals"]

STATE, ACTION = 64, 7
IMAGE = (64, 64, 3)

PINNED = (
    "torchrl==0.14.1",
    "tensordict==0.14.3",
    "cpprb==11.0.0",
    # What TorchRL and tensordict import.
    "cloudpickle==3.1.2",
    "hoptorch==0.1.4",
    "orjson==3.13.0",
    "pyvers==0.2.3",
)
# Type checkers do not look into a directory of this name.
DIRECTORY = Path(__file__).parent / "results" / "rivals" / "site-packages"
TIMEOUT_S = 300


class Rows:
    """The rows of trajectories that are equally long, each column contiguous: `[trajectories * steps, ...]`."""

    def __init__(self, trajectories: int, steps: int, *, image: bool) -> None:
        self.trajectories, self.steps = trajectories, steps
        total = trajectories * steps
        random = np.random.Generator(np.random.SFC64(0))
        shapes = {"states": (STATE,), "image": IMAGE} if image else {"states": (STATE,)}
        self.columns: dict[tuple[str, ...], torch.Tensor] = {}
        for name, shape in shapes.items():
            kind = torch.uint8 if name == "image" else torch.float32
            now, following = torch.empty(total, *shape, dtype=kind), torch.empty(total, *shape, dtype=kind)
            for k in range(trajectories):
                seen = _observations(random, steps + 1, shape, kind)
                now[k * steps : (k + 1) * steps] = seen[:-1]
                following[k * steps : (k + 1) * steps] = seen[1:]
            self.columns[("curr_obs", name)], self.columns[("next_obs", name)] = now, following
        self.columns[("actions",)] = torch.from_numpy(random.random((total, ACTION), dtype=np.float32))
        self.columns[("rewards",)] = torch.from_numpy(random.random((total, 1), dtype=np.float32))
        self.columns[("dones",)] = (torch.arange(total) % steps == steps - 1).reshape(total, 1)
        self.row_bytes = sum(column.nbytes // total for column in self.columns.values())

    def trajectory(self, number: int) -> dict[str, Any]:
        """One trajectory `[T, 1, ...]`, as views."""
        start = number * self.steps
        found: dict[str, Any] = {"curr_obs": {}, "next_obs": {}}
        for path, column in self.columns.items():
            part = column[start : start + self.steps].unsqueeze(1)
            if len(path) == 1:
                found[path[0]] = part
            else:
                found[path[0]][path[1]] = part
        return found

    def gather(self, trajectories: int, count: int) -> Callable[[], Any]:
        """The reference: draw, and `index_select` into warm memory, column after column."""
        total = trajectories * self.steps
        columns = [column[:total] for column in self.columns.values()]
        out = [torch.zeros(count, *column.shape[1:], dtype=column.dtype) for column in columns]
        generator = torch.Generator().manual_seed(1)

        def run() -> None:
            index = torch.randint(0, total, (count,), generator=generator)
            for column, target in zip(columns, out, strict=True):
                torch.index_select(column, 0, index, out=target)

        return run

    def slots(self, count: int) -> list[list[torch.Tensor]]:
        """Warm memory for so many trajectories."""
        return [[torch.zeros_like(part) for part in self.parts(0)] for _ in range(count)]

    def parts(self, number: int) -> list[torch.Tensor]:
        """The tensors of a trajectory."""
        part = slice(number * self.steps, (number + 1) * self.steps)
        return [column[part].unsqueeze(1) for column in self.columns.values()]


def copy(source: list[torch.Tensor], slot: list[torch.Tensor]) -> None:
    """The reference of an add: the same tensors into warm memory."""
    for one, target in zip(source, slot, strict=True):
        target.copy_(one)


def _observations(random: np.random.Generator, rows: int, shape: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
    if kind is torch.float32:
        return torch.from_numpy(random.random((rows, *shape), dtype=np.float32))
    words = random.integers(0, 2**63, rows * int(np.prod(shape)) // 8, dtype=np.int64)
    return torch.from_numpy(words.view(np.uint8).reshape(rows, *shape))


# --- the rivals ---------------------------------------------------------------------------------------


class Rival(NamedTuple):
    """Somebody else's buffer with the same rows."""

    name: str
    sample: Callable[[int], Any]
    limit: float | None
    """Our time is to be at most so much of theirs; None: nothing was asked for."""
    slow: bool = False
    """A sample takes seconds."""
    close: Callable[[], None] = lambda: None


def install() -> str:
    """Fetch the pinned rivals; "" or what went wrong."""
    options = ["--no-deps", "--only-binary=:all:", "--upgrade", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", *options, "--target", str(DIRECTORY), *PINNED]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the rivals cannot be installed: {error}"
    _, reason = _rlinf.find_wheel()
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["pip said nothing"]
        return f"the rivals cannot be installed: {said[-1]}"
    return reason


def memory_rivals(rows: Rows, trajectories: int) -> tuple[list[Rival], list[str]]:
    """Those that keep rows in memory, and why others are missing."""
    makers = {"TorchRL": _torchrl_memory, "cpprb": _cpprb, "RLinf": _rlinf_memory}
    return _made({name: partial(maker, rows, trajectories) for name, maker in makers.items()})


def disk_rivals(rows: Rows, trajectories: int, directory: Path, *, slow: bool) -> tuple[list[Rival], list[str]]:
    """Those that keep rows in files; RLinf's takes seconds a sample, so only if `slow`."""
    makers = {"TorchRL": partial(_torchrl_disk, rows, trajectories, directory / "torchrl")}
    if slow:
        makers["RLinf"] = partial(_rlinf_disk, rows, trajectories, directory / "rlinf")
    return _made(makers)


def _made(makers: Mapping[str, Callable[[], Rival]]) -> tuple[list[Rival], list[str]]:
    if str(DIRECTORY) not in sys.path:
        sys.path.append(str(DIRECTORY))  # last: what the checkout has is used as it is
    found, missing = [], []
    for name, maker in makers.items():
        try:
            found.append(maker())
        except ImportError as error:
            missing.append(f"{name}: not measured ({error}); run with --install-rivals")
    return found, missing


def _named(package: str, what: str) -> str:
    return f"{package} {importlib.metadata.version(package)} {what}".strip()


def _torchrl(rows: Rows, trajectories: int, make_storage: Callable[[Any, int], Any]) -> Any:
    data = importlib.import_module("torchrl.data")
    logging.getLogger("torchrl").setLevel(logging.WARNING)
    total = trajectories * rows.steps
    whole = importlib.import_module("tensordict").TensorDict({}, batch_size=[total])
    for path, column in rows.columns.items():
        whole[path] = column[:total]
    # The plain buffer: TensorDictReplayBuffer adds an index to every batch, which costs more.
    buffer = data.ReplayBuffer(storage=make_storage(data, total), collate_fn=lambda batch: batch)
    buffer.extend(whole)
    return buffer


def _torchrl_memory(rows: Rows, trajectories: int) -> Rival:
    buffer = _torchrl(rows, trajectories, lambda data, total: data.LazyTensorStorage(total))
    return Rival(_named("torchrl", "LazyTensorStorage"), buffer.sample, 0.5)


def _torchrl_disk(rows: Rows, trajectories: int, directory: Path) -> Rival:
    buffer = _torchrl(rows, trajectories, lambda data, total: data.LazyMemmapStorage(total, scratch_dir=str(directory)))
    return Rival(_named("torchrl", "LazyMemmapStorage"), buffer.sample, 0.5)


def _cpprb(rows: Rows, trajectories: int) -> Rival:
    # Without next_of, which would share observations: it halves the memory and takes 2.6 times as long.
    package = importlib.import_module("cpprb")
    fields = {
        "_".join(path): {"shape": tuple(column.shape[1:]), "dtype": column.numpy().dtype}
        for path, column in rows.columns.items()
    }
    buffer = package.ReplayBuffer(trajectories * rows.steps, fields)
    for number in range(trajectories):
        part = slice(number * rows.steps, (number + 1) * rows.steps)
        buffer.add(**{"_".join(path): column[part].numpy() for path, column in rows.columns.items()})
    return Rival(_named("cpprb", ""), buffer.sample, 1.2)


def _rlinf_classes() -> _rlinf.Rlinf:
    if not (_rlinf.CACHE / _rlinf.WHEEL).is_file():
        raise ImportError("its wheel is not there")
    found, reason = _rlinf.load_rlinf()
    if found is None:
        raise ImportError(reason)
    return found


def _rlinf_filled(found: _rlinf.Rlinf, rows: Rows, trajectories: int, **options: Any) -> Any:
    state = np.random.get_state()  # theirs seeds it
    buffer = found.TrajectoryReplayBuffer(sample_window_size=trajectories, **options)
    np.random.set_state(state)
    for number in range(trajectories):
        buffer.add_trajectories([found.Trajectory(**rows.trajectory(number))])
    return buffer


def _rlinf_memory(rows: Rows, trajectories: int) -> Rival:
    buffer = _rlinf_filled(_rlinf_classes(), rows, trajectories, cache_size=trajectories)
    return Rival(f"rlinf {_rlinf.VERSION}, cached", buffer.sample, None, close=buffer.close)


def _rlinf_disk(rows: Rows, trajectories: int, directory: Path) -> Rival:
    # Its configuration for data that is larger than memory: files, and a tenth of them cached.
    options = {"auto_save": True, "auto_save_path": str(directory), "cache_size": trajectories // 10}
    buffer = _rlinf_filled(_rlinf_classes(), rows, trajectories, **options)
    buffer.close()  # waits until the files are there
    return Rival(f"rlinf {_rlinf.VERSION}, files", buffer.sample, None, slow=True)
