"""The whole loop: a thread collects transitions, the learner draws them from the buffer and hands weights back.

    cd examples && python -m offpolicy.run --seed 0 --steps 12000 --out runs/offpolicy

`run` prints nothing: whoever calls it hears of its progress by a callback.
"""

from __future__ import annotations

import argparse
import copy
import math
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import gymnasium
import torch

from forebay import WaitTimeout
from forebay.trajectory import TrajectoryReplayBuffer
from offpolicy.checkpoint import Checkpoints
from offpolicy.collect import Collector, CollectorFailed, Environment
from offpolicy.sac import SAC

__all__ = ["Outcome", "Record", "Settings", "build_learner", "run"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run is made of; the defaults take about a minute on two cores."""

    steps: int = 12_000  # of all environments together, over all resumes
    seed: int = 0
    out: Path | None = None  # where checkpoints go; None: nowhere
    resume: bool = False  # go on where the checkpoint in `out` was written
    auto_save: bool = False  # also keep every trajectory of the run on disk, in `out`
    save_every: int = 3_000  # environment steps
    report_every: int = 1_000  # environment steps
    environments: int = 4
    window_steps: int = 50  # of each environment: one trajectory
    sample_window_size: int = 40  # trajectories that can be drawn; 0: all
    warm_up: int = 1_000  # transitions before the first update
    updates_per_transition: float = 1.0
    batch_size: int = 256
    hidden: int = 64
    learning_rate: float = 1e-3
    discount: float = 0.98

    def __post_init__(self) -> None:
        if self.out is None and (self.resume or self.auto_save):
            raise ValueError("resume and auto_save need a directory; give one as out")
        held = self.sample_window_size * self.window_steps * self.environments
        if held and held < self.warm_up:
            raise ValueError(f"warm_up waits for {self.warm_up} transitions; the window of the buffer holds {held}")


@dataclass(frozen=True, kw_only=True)
class Record:
    """The figures of a stretch of a run."""

    env_steps: int
    updates: int
    mean_return: float  # of the episodes that ended since the record before; nan: none did
    stats: Mapping[str, Any]  # of the buffer
    age: float  # mean over the last batch: trajectories that were added since
    lag: float  # mean over the last batch: weight updates since it was acted
    training: dict[str, float]  # the learner's own figures, of the last batch


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    env_steps: int
    learner: SAC = field(repr=False)
    returns: list[float] = field(repr=False)  # of every episode since the very beginning


def run(
    settings: Settings,
    *,
    make_environment: Callable[[], Environment] = lambda: gymnasium.make("Pendulum-v1"),
    on_record: Callable[[Record], None] | None = None,
    stop: threading.Event | None = None,
) -> Outcome:
    """Learn up to `settings.steps`; a resumed run goes on from its checkpoint.

    When `stop` is set, the run ends after the window under way, with a checkpoint; if collecting fails, it leaves one
    and raises. Learner and collector take one torch thread each.
    """
    torch.set_num_threads(1)
    stop = stop or threading.Event()
    checkpoints = None if settings.out is None else Checkpoints(settings.out)
    begun = checkpoints is not None and checkpoints.latest() is not None
    if begun and not settings.resume:
        raise FileExistsError(f"{settings.out} holds a run already; resume it, or give another directory")

    with ExitStack() as stack:
        environments = [stack.enter_context(make_environment()) for _ in range(settings.environments)]
        learner = build_learner(settings, environments[0])
        buffer = stack.enter_context(build_buffer(settings))
        progress: dict[str, Any] = {"env_steps": 0, "returns": []}
        if checkpoints is not None and begun:
            progress = checkpoints.load(learner, buffer)
        else:
            buffer.clear()  # of what a run that was killed before its first checkpoint has left with auto_save
        collector = Collector(
            buffer,
            environments,
            copy.deepcopy(learner.actor),
            window_steps=settings.window_steps,
            warm_up=settings.warm_up,
            seed=settings.seed,
            version=learner.updates,
            **progress,
        )

        def save() -> None:
            # Between two exchanges, or after the collector ended: it adds nothing then.
            if checkpoints is not None:
                checkpoints.save(learner, buffer, {"env_steps": collector.env_steps, "returns": collector.returns})

        try:
            with collector:
                wait_for_warm_up(settings, buffer, collector, stop)
                reported, saved, told = collector.env_steps, collector.env_steps, len(collector.returns)
                batch: dict[str, Any] = {}
                figures: dict[str, torch.Tensor] = {}
                while collector.env_steps < settings.steps and not stop.is_set():
                    collector.exchange(learner.actor_weights(), learner.updates)
                    due = int((collector.env_steps - settings.warm_up) * settings.updates_per_transition)
                    while learner.updates < due:
                        batch = buffer.sample(settings.batch_size)
                        figures = learner.update(batch)
                    if on_record is not None and batch and collector.env_steps >= reported + settings.report_every:
                        on_record(describe(learner, buffer, collector, told, batch, figures))
                        reported, told = collector.env_steps, len(collector.returns)
                    if collector.env_steps >= saved + settings.save_every:
                        save()
                        saved = collector.env_steps
        except CollectorFailed:
            save()
            raise
        save()
    return Outcome(env_steps=collector.env_steps, learner=learner, returns=collector.returns)


def build_buffer(settings: Settings) -> TrajectoryReplayBuffer:
    """Where transitions are between the collector and the learner: the newest `sample_window_size` trajectories.

    With `auto_save` those that leave the window stay on disk, and a crash loses only what was just being written.
    """
    return TrajectoryReplayBuffer(
        seed=settings.seed,
        sample_window_size=settings.sample_window_size,
        auto_save=settings.auto_save,
        auto_save_path="" if settings.out is None else settings.out / "trajectories",
    )


def build_learner(settings: Settings, environment: Environment) -> SAC:
    """A learner for what this environment shows and takes."""
    actions, observations = environment.action_space, environment.observation_space
    if not isinstance(actions, gymnasium.spaces.Box) or not isinstance(observations, gymnasium.spaces.Box):
        raise ValueError(f"observations are {observations} and actions {actions}; expected a Box of each")
    return SAC(
        observations.shape[0],
        torch.from_numpy(actions.low),
        torch.from_numpy(actions.high),
        hidden=settings.hidden,
        learning_rate=settings.learning_rate,
        discount=settings.discount,
        seed=settings.seed,
    )


def wait_for_warm_up(
    settings: Settings, buffer: TrajectoryReplayBuffer, collector: Collector, stop: threading.Event
) -> None:
    """Wait until there is enough to learn from, or until collecting has failed or is to stop."""
    while not stop.is_set():
        try:
            buffer.wait_ready(settings.warm_up, timeout_s=1.0)
        except WaitTimeout:
            collector.check()
        else:
            return


def describe(
    learner: SAC,
    buffer: TrajectoryReplayBuffer,
    collector: Collector,
    told: int,
    batch: Mapping[str, Any],
    figures: Mapping[str, torch.Tensor],
) -> Record:
    """The record of what happened since `told` episodes had ended."""
    return Record(
        env_steps=collector.env_steps,
        updates=learner.updates,
        mean_return=_mean(collector.returns[told:]),
        stats=buffer.get_stats(),
        age=float(batch["age"].double().mean()),
        lag=learner.updates - float(batch["versions"].double().mean()),
        training={name: float(figure) for name, figure in figures.items()},
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


# --- the command line ---------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description="Soft actor-critic on Pendulum, through Forebay's replay buffer.")
    parser.add_argument("--steps", type=int, default=Settings.steps, help="of all environments together")
    parser.add_argument("--seed", type=int, default=Settings.seed)
    parser.add_argument("--out", type=Path, help="a directory for checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out, if there is one")
    parser.add_argument("--auto-save", action="store_true", help="keep every trajectory in --out/trajectories")
    parser.add_argument("--save-every", type=int, default=Settings.save_every, help="environment steps")
    parser.add_argument("--report-every", type=int, default=Settings.report_every, help="environment steps")
    try:
        settings = Settings(**vars(parser.parse_args()))
    except ValueError as error:
        parser.error(str(error))

    stop = threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        stop.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C means it

    signal.signal(signal.SIGINT, interrupt)
    began = time.monotonic()
    outcome = run(settings, on_record=_print_record, stop=stop)
    first, last = outcome.returns[:10], outcome.returns[-20:]
    print(f"\nmean return: first {len(first)} episodes {_mean(first):.0f}, last {len(last)} episodes {_mean(last):.0f}")
    print(
        f"{outcome.env_steps} environment steps, {outcome.learner.updates} updates, "
        f"{time.monotonic() - began:.0f} s, {time.process_time():.0f} s of CPU time"
    )


def _print_record(record: Record) -> None:
    print(
        f"env steps {record.env_steps:>6}  updates {record.updates:>6}  return {record.mean_return:>6.0f}  "
        f"buffer {record.stats['transitions']:>6} in {record.stats['trajectories']:>3} trajectories  "
        f"sampled: age {record.age:>4.1f} trajectories, lag {record.lag:>5.0f} updates  "
        f"temperature {record.training['temperature']:.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
