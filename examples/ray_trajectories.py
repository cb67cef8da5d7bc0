"""Trajectories on Ray: one local replay buffer a rank, and trajectories that are sent to it.

Batches of off-policy learning are drawn many times a second, from far more data than is added meanwhile. So the data
goes to the rank that learns from it, once, and every draw is local: each learner actor has a `TrajectoryReplayBuffer`
of its own, and the environment runners of its rank send it what they collect. Ranks only exchange what they learn.

    python examples/ray_trajectories.py --ranks 2 --runners 2 --rounds 20
    python examples/ray_trajectories.py --out runs/trajectories               # a checkpoint of each rank at the end
    python examples/ray_trajectories.py --out runs/trajectories --resume      # go on; another --ranks is fine

The task: a point is to be brought to the origin by pushes. A policy is a matrix; it is fitted to the pushes that did
better than others from where they were (reward-weighted regression). It takes some seconds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from forebay.errors import ForebayError
from forebay.trajectory import Trajectory, TrajectoryReplayBuffer
from tiny_grpo.cluster import ray_cluster

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]

STEPS, ENVS = 20, 8  # of a trajectory
WINDOW = 40  # trajectories that a rank draws from
BATCH, NOISE = 512, 0.3


class Runner:
    """Steps its environments with the newest weights, and sends what they did to the learner of its rank."""

    def __init__(self, learner: Any, seed: int) -> None:
        self.learner = learner
        self.random = np.random.default_rng(seed)

    async def collect(self, weights: Array, version: int) -> float:
        """One trajectory, sent; its mean return."""
        states = np.empty((STEPS + 1, ENVS, 2), np.float32)
        actions = np.empty((STEPS, ENVS, 2), np.float32)
        states[0] = self.random.uniform(-1, 1, (ENVS, 2))
        for step in range(STEPS):
            actions[step] = states[step] @ weights + self.random.normal(0, NOISE, (ENVS, 2))
            states[step + 1] = states[step] + 0.5 * np.clip(actions[step], -1, 1)
        rewards = -np.square(states[1:]).sum(axis=-1)
        ends = np.zeros((STEPS, ENVS), bool)
        ends[-1] = True
        trajectory = Trajectory(
            curr_obs={"state": states[:-1]},
            next_obs={"state": states[1:]},
            actions=actions,
            rewards=rewards,
            truncations=ends,
            dones=ends,
            versions=np.full((STEPS, ENVS), version, np.int64),
        )
        # Waiting for it is what keeps a runner from flooding its learner.
        await self.learner.add.remote(trajectory)
        return float(rewards.sum(axis=0).mean())


class Learner:
    """One rank: its own buffer, its own draws."""

    def __init__(self, rank: int, seed: int) -> None:
        self.buffer = TrajectoryReplayBuffer(seed=seed + rank, sample_window_size=WINDOW, rank=rank, arrays="numpy")

    def add(self, trajectory: Trajectory) -> None:
        """Copied into the buffer when this returns: what Ray has of it can go."""
        self.buffer.add_trajectories([trajectory])

    def normal_equations(self) -> tuple[Array, Array]:
        """What this rank's batch says about the best weights: to be summed over all ranks, as gradients are."""
        batch = self.buffer.sample(BATCH)
        states, actions, rewards = batch["curr_obs"]["state"], batch["actions"], batch["rewards"]
        gains = rewards + np.square(states).sum(axis=-1)  # how much closer this push brought it
        shares = np.exp(gains / (gains.std() + 1e-6))[:, None]
        return states.T @ (shares * states), states.T @ (shares * actions)

    def held(self) -> int:
        return len(self.buffer)

    def save(self, path: Path, extra: dict[str, Any]) -> None:
        self.buffer.save_checkpoint(path, extra=extra)  # writes path/rank_<rank>, complete or not at all

    def load(self, path: Path, rank: int, ranks: int) -> dict[str, Any]:
        """As many ranks as wrote it: each gets its own back; another number: all trajectories are dealt out anew."""
        extra = self.buffer.load_checkpoint(path, is_distributed=True, local_rank=rank, world_size=ranks)
        assert extra is not None
        return extra


def run(options: argparse.Namespace) -> None:
    import ray  # see ray_cluster

    learners: list[Any] = [ray.remote(Learner).remote(rank, options.seed) for rank in range(options.ranks)]
    weights, done = np.zeros((2, 2), np.float32), 0
    if options.resume:
        loads = [learner.load.remote(options.out, rank, options.ranks) for rank, learner in enumerate(learners)]
        extra = ray.get(loads)[0]
        weights, done = np.array(extra["weights"], np.float32), extra["rounds"]
    runners: list[Any] = [
        ray.remote(Runner).remote(learner, options.seed + 1_000 * (done + 1) + number * options.ranks + rank)
        for rank, learner in enumerate(learners)
        for number in range(options.runners)
    ]
    for number in range(done + 1, done + options.rounds + 1):
        shared = ray.put(weights)  # once, for all runners
        returns = ray.get([runner.collect.remote(shared, number) for runner in runners])
        parts = ray.get([learner.normal_equations.remote() for learner in learners])
        squares, products = (sum(part) for part in zip(*parts, strict=True))
        weights = np.linalg.solve(squares + 1e-3 * np.eye(2, dtype=np.float32), products).astype(np.float32)
        held = ray.get([learner.held.remote() for learner in learners])
        print(
            f"round {number:>3}   mean return {np.mean(returns):>7.2f}   trajectories of each rank: "
            f"{', '.join(map(str, held))}",
            flush=True,
        )
    if options.out is not None:
        extra = {"weights": weights.tolist(), "rounds": done + options.rounds}
        ray.get([learner.save.remote(options.out, extra) for learner in learners])
        print(f"saved: {options.out}; go on with --resume")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="learners (default: %(default)s)")
    parser.add_argument("--runners", type=int, default=2, help="of environments, for each rank (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="of collecting and learning (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--address", help="of a cluster to join (default: RAY_ADDRESS, else a Ray of its own)")
    parser.add_argument("--out", type=Path, help="a directory for the checkpoint; in a cluster one that all nodes see")
    parser.add_argument("--resume", action="store_true", help="go on with the checkpoint in --out")
    options = parser.parse_args(arguments)
    for name in ("ranks", "runners", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; expected at least 1")
    if options.resume and (options.out is None or not (options.out / "rank_0").is_dir()):
        parser.error(f"--resume, but there is no checkpoint in --out {options.out}")
    if options.out is not None:
        options.out = options.out.resolve()  # actors work in other directories
    return options


def main() -> None:
    options = parse()
    try:
        with ray_cluster(options.address):
            run(options)
    except (ForebayError, ConnectionError) as problem:
        sys.exit(str(problem))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
