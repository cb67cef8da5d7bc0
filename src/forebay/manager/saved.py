"""The part of a checkpoint that belongs to a manager: its plan, the state of agent loops, and the counters of tasks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from forebay.errors import DamagedData
from forebay.manager.schedule import ProduceProgress
from forebay.manager.task import ManagedTask
from forebay.produce.stats import Figures

if TYPE_CHECKING:
    from forebay.checkpoint.format import Manifest


class SavedFigures(msgspec.Struct):
    """Counters of a task: until the checkpoint, until the last batch before it, and the last verdicts of filters."""

    now: dict[str, float] = {}
    seen: dict[str, float] = {}
    verdicts: list[bool] = []


class Saved(msgspec.Struct):
    """The state of a manager in a checkpoint."""

    progress: Any = None
    agent_loops: dict[str, Any] = {}
    figures: dict[str, SavedFigures] = {}


def read_saved(manifest: Manifest, path: str | os.PathLike[str], weights: Mapping[str, float]) -> tuple[int, Saved]:
    """The model step of a checkpoint, and the state of its manager; DamagedData if they cannot be read."""
    if manifest.model_step is None:
        raise DamagedData(
            f"the checkpoint at {path} does not say which weights it goes with; it was saved by a buffer without a "
            "model_step, and a manager cannot continue from it"
        )
    scratch = ProduceProgress(weights)
    if "manager" not in manifest.extra:  # a buffer alone was saved
        return manifest.model_step, Saved(scratch.state(manifest.model_step))
    try:
        saved = msgspec.convert(manifest.extra["manager"], Saved)
    except msgspec.ValidationError as error:
        raise DamagedData(f"the state of the manager in the checkpoint at {path} is damaged: {error}") from None
    scratch.load_state(saved.progress)
    return manifest.model_step, saved


def manifest_of(path: str | os.PathLike[str]) -> Manifest:
    """The manifest of a checkpoint."""
    from forebay.checkpoint.format import open_checkpoint  # imported here, as the buffer does

    with open_checkpoint(path) as checkpoint:
        return checkpoint.manifest


def state_of(progress: dict[str, Any], tasks: Mapping[str, ManagedTask], seen: Mapping[str, Figures]) -> dict[str, Any]:
    """A plan, agent loops and counters as plain data. `seen`: the counters that batches have reported."""
    loops, figures = {}, {}
    for name, task in tasks.items():
        if callable(state_dict := getattr(task.agent_loop, "state_dict", None)):
            loops[name] = state_dict()
        now = task.strategy.figures(name)
        figures[name] = SavedFigures(now.counters(), seen.get(name, Figures()).counters(), [*now.verdicts])
    saved: dict[str, Any] = msgspec.to_builtins(Saved(progress, {}, figures))
    return saved | {"agent_loops": loops}


def restore(saved: Saved, tasks: Mapping[str, ManagedTask]) -> dict[str, Figures]:
    """Continue with saved agent loops and counters, also those that no batch has reported; returns those that were."""
    seen = {}
    for name, task in tasks.items():
        load = getattr(task.agent_loop, "load_state_dict", None)
        if name in saved.agent_loops and callable(load):
            load(saved.agent_loops[name])
        if name in saved.figures:
            figures = task.strategy.figures(name)
            figures.load(saved.figures[name].now)
            figures.verdicts.extend(saved.figures[name].verdicts)
            seen[name] = Figures()
            seen[name].load(saved.figures[name].seen)
    return seen
