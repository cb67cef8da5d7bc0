"""The off-policy example: its collector adds what happened, its pace is kept, a resumed run goes on with its rows."""

from __future__ import annotations

import copy
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from forebay.trajectory import Trajectory, TrajectoryReplayBuffer
from tests.processes import HANG_S, started

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from offpolicy.checkpoint import Checkpoints  # noqa: E402
from offpolicy.collect import Collector, CollectorFailed, Environment  # noqa: E402
from offpolicy.run import Record, Settings, build_buffer, build_learner, run  # noqa: E402
from offpolicy.sac import SAC  # noqa: E402

WINDOW = 50  # transitions of a trajectory
SHORT = Settings(
    steps=400,
    report_every=100,
    environments=2,
    window_steps=25,
    warm_up=100,
    updates_per_transition=0.2,
    sample_window_size=4,
    batch_size=16,
    hidden=8,
)


class Clock(gymnasium.Env[np.ndarray[Any, Any], np.ndarray[Any, Any]]):
    """Shows how many episodes and how many steps there were; the reward is 1, whatever is done."""

    def __init__(self, terminate_at: int = 10**9, fail_at: int = 10**9) -> None:
        self.observation_space = gymnasium.spaces.Box(0.0, 1e9, (2,))
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,))
        self.terminate_at, self.fail_at = terminate_at, fail_at
        self.episode, self.step_number, self.steps, self.closed = -1, 0, 0, False

    def _observation(self) -> np.ndarray[Any, Any]:
        return np.array([self.episode, self.step_number], np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray[Any, Any], dict[str, Any]]:
        self.episode, self.step_number = self.episode + 1, 0
        return self._observation(), {}

    def step(self, action: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], float, bool, bool, dict[str, Any]]:
        self.step_number, self.steps = self.step_number + 1, self.steps + 1
        if self.steps > self.fail_at:
            raise OSError("the simulator is gone")
        return self._observation(), 1.0, self.step_number >= self.terminate_at, False, {}

    def close(self) -> None:
        self.closed = True


def truncated(steps: int) -> Environment:
    return gymnasium.wrappers.TimeLimit(Clock(), steps)


@contextmanager
def collecting(
    make: Callable[[], Environment], *, window_steps: int = 10, warm_up: int = 20
) -> Iterator[tuple[TrajectoryReplayBuffer, Collector, SAC]]:
    environments = [make(), make()]
    learner = build_learner(SHORT, environments[0])
    with TrajectoryReplayBuffer(arrays="torch") as buffer:
        actor = copy.deepcopy(learner.actor)
        with Collector(buffer, environments, actor, window_steps=window_steps, warm_up=warm_up, seed=0) as collector:
            buffer.wait_ready(warm_up, timeout_s=HANG_S)
            yield buffer, collector, learner


def weights_of(learner: SAC) -> dict[str, torch.Tensor]:
    return {
        f"{part}.{name}": value
        for part in ("actor", "critics", "targets")
        for name, value in getattr(learner, part).state_dict().items()
    }


def versions_of(window: Trajectory) -> list[int]:
    assert window.versions is not None
    return sorted(set(window.versions.reshape(-1).tolist()))


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, dict):
            assert_same(value, other[name])
        else:
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[name])), name


# --- what is collected --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "flag"),
    [(lambda: truncated(7), "truncations"), (lambda: Clock(terminate_at=7), "terminations")],
    ids=["truncated", "terminated"],
)
def test_next_obs_at_the_end_of_an_episode_is_what_ended_it_and_not_the_reset(
    make: Callable[[], Environment], flag: str
) -> None:
    with collecting(make) as (buffer, collector, learner):
        ids = [0]
        for version in range(1, 4):
            collector.exchange(learner.actor_weights(), version)
            ids.append(version)
        windows = [buffer.trajectory(number) for number in ids]
        returns = list(collector.returns)
    other = {"truncations": "terminations", "terminations": "truncations"}[flag]
    current = np.concatenate([window.curr_obs["state"] for window in windows])
    following = np.concatenate([window.next_obs["state"] for window in windows])
    ended = np.concatenate([getattr(window, flag) for window in windows])
    steps = np.arange(len(current))
    for env in range(2):
        assert current[:, env].tolist() == [[step // 7, step % 7] for step in steps]
        assert following[:, env].tolist() == [[step // 7, step % 7 + 1] for step in steps]
        assert ended[:, env].tolist() == [step % 7 == 6 for step in steps]
    for window in windows:
        assert not np.any(getattr(window, other))
        assert window.dones is not None
        assert window.dones.tolist() == getattr(window, flag).tolist()
    assert returns == [7.0] * (2 * (len(steps) // 7))


def test_versions_say_which_weights_acted() -> None:
    with collecting(lambda: truncated(7)) as (buffer, collector, learner):
        for version in (10, 20, 30):
            collector.exchange(learner.actor_weights(), version)
        windows = [buffer.trajectory(number) for number in range(4)]
        assert collector.env_steps == 80
    # While the learner made the weights of version 10, the window after the warm-up was made with those before them.
    assert [versions_of(window) for window in windows] == [[0], [0], [10], [20]]
    assert [window.model_weights_id for window in windows] == ["0", "0", "10", "20"]


def test_a_truncated_step_bootstraps_and_a_terminated_one_does_not() -> None:
    generator = torch.Generator().manual_seed(0)
    batch: dict[str, Any] = {
        "curr_obs": {"state": torch.randn(8, 2, generator=generator)},
        "next_obs": {"state": torch.randn(8, 2, generator=generator)},
        "actions": torch.rand(8, 1, generator=generator),
        "rewards": torch.randn(8, generator=generator),
        "terminations": torch.zeros(8, dtype=torch.bool),
        "truncations": torch.zeros(8, dtype=torch.bool),
        "dones": torch.zeros(8, dtype=torch.bool),
    }
    ended = torch.ones(8, dtype=torch.bool)
    losses = []
    for changed in ({}, {"truncations": ended, "dones": ended}, {"terminations": ended, "dones": ended}):
        learner = build_learner(SHORT, Clock())
        losses.append(float(learner.update(batch | changed)["critic_loss"]))
    values = build_learner(SHORT, Clock()).critics(batch["curr_obs"]["state"], batch["actions"])
    assert losses[0] == losses[1]
    assert losses[2] == pytest.approx((values - batch["rewards"]).square().mean(dim=1).sum().item())
    assert losses[2] != losses[0]


# --- the loop -----------------------------------------------------------------------------------------


def test_a_run_keeps_its_pace_and_its_window() -> None:
    records: list[Record] = []
    outcome = run(SHORT, on_record=records.append)
    assert (outcome.env_steps, outcome.learner.updates) == (400, 60)
    assert [record.env_steps for record in records] == [200, 300, 400]
    assert [record.updates for record in records] == [20, 40, 60]
    assert records[-1].stats["trajectories"] == SHORT.sample_window_size
    assert records[-1].stats["transitions"] == SHORT.sample_window_size * WINDOW
    assert all(0 <= record.age < SHORT.sample_window_size for record in records)
    assert all(record.lag > 0 for record in records)
    assert "collector" not in {thread.name for thread in threading.enumerate()}


def test_a_pace_without_updates_has_nothing_to_report() -> None:
    records: list[Record] = []
    outcome = run(replace(SHORT, updates_per_transition=0.0), on_record=records.append)
    assert (outcome.env_steps, outcome.learner.updates, records) == (400, 0, [])


def test_the_same_seed_gives_the_same_run() -> None:
    first, second = run(SHORT), run(SHORT)
    assert_same(weights_of(first.learner), weights_of(second.learner))
    assert first.returns == second.returns
    other = run(replace(SHORT, seed=1))
    assert other.returns != first.returns


@pytest.mark.parametrize("fail_at", [0, 30, 120], ids=["at once", "in the warm-up", "later"])
def test_what_fails_in_an_environment_reaches_the_caller(tmp_path: Path, fail_at: int) -> None:
    made: list[Clock] = []

    def make() -> Environment:
        made.append(Clock(fail_at=fail_at))
        return made[-1]

    with pytest.raises(CollectorFailed, match="the simulator is gone") as raised:
        run(replace(SHORT, out=tmp_path), make_environment=make)
    assert isinstance(raised.value.__cause__, OSError)
    assert all(environment.closed for environment in made)
    assert "collector" not in {thread.name for thread in threading.enumerate()}
    outcome = run(replace(SHORT, out=tmp_path, resume=True), make_environment=Clock)  # with what was there
    assert (outcome.env_steps, outcome.learner.updates) == (400, 60)


def test_a_stop_leaves_a_checkpoint(tmp_path: Path) -> None:
    stop = threading.Event()
    outcome = run(replace(SHORT, out=tmp_path), on_record=lambda record: stop.set(), stop=stop)
    assert outcome.env_steps == 200
    resumed = run(replace(SHORT, out=tmp_path, resume=True))
    assert (resumed.env_steps, resumed.learner.updates) == (400, 60)
    assert resumed.returns[: len(outcome.returns)] == outcome.returns


# --- checkpoints --------------------------------------------------------------------------------------


def test_a_resumed_run_has_the_same_rows_and_its_draws_go_on(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    with collecting(lambda: truncated(7), warm_up=100) as (buffer, collector, learner):
        for _ in range(3):
            collector.exchange(learner.actor_weights(), learner.updates)
            learner.update(buffer.sample(16))
        checkpoints.save(learner, buffer, {"env_steps": collector.env_steps, "returns": collector.returns})
        ids = range(8)
        rows = [vars(buffer.trajectory(number)) for number in ids]
        batches = [buffer.sample(16) for _ in range(5)]
        for batch in batches:
            learner.update(batch)
        returns = list(collector.returns)

    resumed = build_learner(replace(SHORT, seed=99), Clock())
    with TrajectoryReplayBuffer(seed=99) as buffer:
        assert checkpoints.load(resumed, buffer) == {"env_steps": 160, "returns": returns}
        assert buffer.num_transitions == 160
        for number in ids:
            loaded = vars(buffer.trajectory(number))
            assert loaded.keys() == rows[number].keys()
            assert_same(
                {name: value for name, value in loaded.items() if isinstance(value, (np.ndarray, dict))},
                {name: value for name, value in rows[number].items() if isinstance(value, (np.ndarray, dict))},
            )
        for batch in batches:
            drawn = buffer.sample(16)
            assert_same(drawn, batch)
            resumed.update(drawn)
    assert_same(weights_of(resumed), weights_of(learner))


def test_a_run_that_was_resumed_keeps_what_it_had(tmp_path: Path) -> None:
    settings = replace(SHORT, sample_window_size=0, out=tmp_path)
    run(replace(settings, steps=200))
    with build_buffer(settings) as before, build_buffer(settings) as after:
        before.load_checkpoint(_buffer_in(tmp_path))
        outcome = run(replace(settings, resume=True))  # the older checkpoint goes, what was loaded from it stays
        after.load_checkpoint(_buffer_in(tmp_path))
        assert (before.num_transitions, after.num_transitions) == (200, 400)
        for number in range(4):
            assert_same(before.trajectory(number).curr_obs, after.trajectory(number).curr_obs)
        versions = [versions_of(after.trajectory(number)) for number in range(8)]
    assert versions == [[0], [0], [0], [0], [20], [20], [30], [40]]
    assert outcome.learner.updates == 60
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000000400"]


def _buffer_in(directory: Path) -> Path:
    latest = Checkpoints(directory).latest()
    assert latest is not None
    return latest / "buffer"


def test_a_run_can_be_resumed_and_saved_again_and_again(tmp_path: Path) -> None:
    settings = replace(SHORT, save_every=50, out=tmp_path, resume=True)
    for steps in (150, 300, 450):
        outcome = run(replace(settings, steps=steps))
        assert outcome.env_steps == steps
        # The files that the buffer was loaded from are gone after the first save; it goes on with them.
        assert [path.name for path in tmp_path.iterdir()] == [f"checkpoint-{steps:09d}"]
    with build_buffer(SHORT) as buffer:
        buffer.load_checkpoint(_buffer_in(tmp_path))
        assert buffer.trajectory(8).rewards is not None
        assert len(buffer) == SHORT.sample_window_size


def test_with_auto_save_every_trajectory_of_the_run_stays_on_disk(tmp_path: Path) -> None:
    settings = replace(SHORT, out=tmp_path, auto_save=True, resume=True)
    run(replace(settings, steps=250))
    run(settings)
    directory = tmp_path / "trajectories"
    with TrajectoryReplayBuffer(sample_window_size=0, auto_save_path=directory, read_only=True) as kept:
        assert len(kept) * WINDOW == kept.num_transitions == 400
    with TrajectoryReplayBuffer() as buffer:
        buffer.load_checkpoint(_buffer_in(tmp_path))
        drawn = buffer.sample(256)["trajectory_id"]
    assert set(drawn.tolist()) <= set(range(8))


def test_an_unfinished_checkpoint_is_as_good_as_none(tmp_path: Path) -> None:
    run(replace(SHORT, steps=200, out=tmp_path))
    (tmp_path / "checkpoint-000000300.unfinished").mkdir()
    outcome = run(replace(SHORT, steps=300, out=tmp_path, resume=True))
    assert outcome.env_steps == 300
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000000300"]


def test_a_run_is_not_begun_over_another_one(tmp_path: Path) -> None:
    run(replace(SHORT, steps=150, out=tmp_path))
    with pytest.raises(FileExistsError, match="holds a run already"):
        run(replace(SHORT, out=tmp_path))


def test_settings_under_which_a_wait_would_never_end_are_refused() -> None:
    with pytest.raises(ValueError, match="the window of the buffer holds 200"):
        replace(SHORT, warm_up=201)
    with pytest.raises(ValueError, match="give one as out"):
        Settings(resume=True)


def test_ctrl_c_leaves_a_checkpoint_that_can_be_resumed(tmp_path: Path) -> None:
    command = ["-m", "offpolicy.run", "--steps", "1000000", "--out", tmp_path / "run", "--report-every", "200"]
    with started(*command, cwd=ROOT / "examples") as child:
        assert child.stdout is not None
        assert "env steps   1200" in child.stdout.readline()
        child.send_signal(signal.SIGINT)
        output, errors = child.communicate()
    assert (child.returncode, errors) == (0, "")
    assert "mean return" in output
    assert Checkpoints(tmp_path / "run").latest() is not None
