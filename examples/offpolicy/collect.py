"""The collector: a thread that steps environments with the newest weights and adds what they did to the buffer.

A window is a `Trajectory` of some steps of all environments. Where an episode ends inside of it, the next one begins;
`next_obs` of the last step is then the observation that ended the episode, and not the one after the reset. `versions`
says which weights acted.

Collector and learner meet once a window, in `exchange`: the learner hands over weights, and the window that was made
while it learned goes into the buffer. So both work at the same time, neither runs away from the other, and neither
what is in the buffer at an update nor the weights that acted depend on which thread was faster: the same seed gives the
same run. Whatever fails in the thread is raised where the learner waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeAlias

import gymnasium
import numpy as np
import torch
from torch import Tensor

from forebay.trajectory import Trajectory, TrajectoryReplayBuffer
from offpolicy.sac import Actor

__all__ = ["Collector", "CollectorFailed", "Environment"]

Array: TypeAlias = np.ndarray[Any, Any]
Environment: TypeAlias = gymnasium.Env[Array, Array]


class CollectorFailed(RuntimeError):
    """The thread that collects has failed; the cause says how."""


class Collector:
    """Steps environments in a thread, which lives between entering and leaving it.

    It adds windows of its own accord until `warm_up` transitions are there, and then one at each `exchange`. `actor` is
    its own, with the weights of `version`. `env_steps` and `returns` are those of a run that is resumed; its
    environments begin new episodes, because few can be put back into a state.
    """

    def __init__(
        self,
        buffer: TrajectoryReplayBuffer,
        environments: Sequence[Environment],
        actor: Actor,
        *,
        window_steps: int,
        warm_up: int,
        seed: int,
        version: int = 0,
        env_steps: int = 0,
        returns: Sequence[float] = (),
    ) -> None:
        self.buffer, self.environments, self.window_steps = buffer, environments, window_steps
        self.window = window_steps * len(environments)
        self.env_steps = env_steps
        """Transitions in the buffer, over the whole run; those that left its window count."""
        self.returns = list(returns)
        """Of all episodes that ended in them, in their order."""
        self._actor, self._version, self._weights = actor, version, actor.state_dict()
        self._allowed = max(env_steps, -(-warm_up // self.window) * self.window)
        self._seeds = np.random.SeedSequence([seed, env_steps]).generate_state(len(environments) + 1).tolist()
        self._failure: BaseException | None = None
        self._stopping = False
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._run, args=(version,), name="collector")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        self._thread.join()

    def exchange(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Hand over weights, and wait until the window that was made meanwhile is in the buffer."""
        with self._condition:
            self._weights, self._version = dict(weights), version
            self._allowed += self.window
            self._condition.notify_all()
            self._condition.wait_for(lambda: self.env_steps >= self._allowed or self._failure is not None)
        self.check()

    def check(self) -> None:
        """Raise what has failed in the thread, if anything has."""
        if self._failure is not None:
            raise CollectorFailed(
                f"collecting failed after {self.env_steps} transitions: {self._failure!r}"
            ) from self._failure

    # --- in the thread --------------------------------------------------------------------------------

    def _run(self, version: int) -> None:
        try:
            self._collect(version)
        except BaseException as error:  # the thread has nobody to raise it to
            with self._condition:
                self._failure = error
                self._condition.notify_all()

    def _collect(self, version: int) -> None:
        torch.set_num_threads(1)  # what the main thread has set does not count here
        *seeds, noise_seed = self._seeds
        generator = torch.Generator().manual_seed(noise_seed)
        resets = zip(self.environments, seeds, strict=True)
        observations = np.stack([environment.reset(seed=seed)[0] for environment, seed in resets])
        returns = np.zeros(len(self.environments))
        while True:
            trajectory, finished = self._window(observations, returns, version, generator)
            with self._condition:
                self._condition.wait_for(lambda: self.env_steps < self._allowed or self._stopping)
                if self._stopping:
                    return
                # Taken before the window is added: from then on the learner may hand over the next ones at any time.
                weights, version = self._weights, self._version
            self.buffer.add_trajectories([trajectory])
            with self._condition:
                self.env_steps += self.window
                self.returns += finished
                self._condition.notify_all()
            self._actor.load_state_dict(weights)

    def _window(
        self, observations: Array, returns: Array, version: int, generator: torch.Generator
    ) -> tuple[Trajectory, list[float]]:
        """The next window, and the returns of the episodes that ended in it; both arrays are left as it ended."""
        size = (self.window_steps, len(self.environments))
        current = np.empty((*size, *observations.shape[1:]), np.float32)
        following, actions = np.empty_like(current), np.empty((*size, len(self._actor.low)), np.float32)
        rewards = np.empty(size, np.float32)
        terminations, truncations = np.empty(size, bool), np.empty(size, bool)
        finished: list[float] = []
        for step in range(self.window_steps):
            current[step] = observations
            with torch.no_grad():
                actions[step] = self._actor(torch.from_numpy(current[step]), generator)[0].numpy()
            for index, environment in enumerate(self.environments):
                observation, reward, terminated, truncated, _ = environment.step(actions[step, index])
                following[step, index], rewards[step, index] = observation, reward
                terminations[step, index], truncations[step, index] = terminated, truncated
                returns[index] += float(reward)
                if terminated or truncated:
                    finished.append(float(returns[index]))
                    returns[index] = 0.0
                    observation, _ = environment.reset()
                observations[index] = observation
        trajectory = Trajectory(
            model_weights_id=str(version),
            max_episode_length=self._max_episode_length(),
            curr_obs={"state": current},
            next_obs={"state": following},
            actions=actions,
            rewards=rewards,
            terminations=terminations,
            truncations=truncations,
            dones=terminations | truncations,
            versions=np.full(size, version, np.int64),
        )
        return trajectory, finished

    def _max_episode_length(self) -> int:
        spec = self.environments[0].spec
        return (spec.max_episode_steps or 0) if spec is not None else 0
