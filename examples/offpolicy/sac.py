"""Soft actor-critic (Haarnoja et al., 2018) with an automatic temperature, small enough to be read in one go.

It learns from batches as `TrajectoryReplayBuffer.sample` returns them. What a value bootstraps from is decided by
`terminations` alone: an episode that ran out of time (a truncation) has a future that was not seen, and its `next_obs`
is the observation before the reset; only a state that really ends an episode is worth nothing afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["SAC", "Actor", "Critics"]


class Actor(nn.Module):
    """A Gaussian squashed by tanh into the range of the actions."""

    low: Tensor
    high: Tensor

    def __init__(self, observation_size: int, low: Tensor, high: Tensor, hidden: int) -> None:
        super().__init__()
        self.register_buffer("low", low)
        self.register_buffer("high", high)
        self.layers = nn.Sequential(
            nn.Linear(observation_size, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 2 * len(low)),
        )

    def forward(self, observations: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw an action for each observation; with its log-probability, in units in which every range is [-1, 1]."""
        mean, log_std = self.layers(observations).chunk(2, dim=-1)
        log_std = log_std.clamp(-5.0, 2.0)
        noise = torch.randn(mean.shape, generator=generator)
        raw = mean + log_std.exp() * noise
        gaussian = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        squashing = 2 * (math.log(2) - raw - functional.softplus(-2 * raw))  # log(1 - tanh(raw)^2), but stable
        actions = self.low + (self.high - self.low) * (torch.tanh(raw) + 1) / 2
        return actions, (gaussian - squashing).sum(dim=-1)


class Critics(nn.Module):
    """Two action values, evaluated together: every layer is a batch of two matrices."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        sizes = [(inputs, hidden), (hidden, hidden), (hidden, 1)]
        self.weights = nn.ParameterList([torch.empty(2, *size).uniform_(-1, 1) / math.sqrt(size[0]) for size in sizes])
        self.biases = nn.ParameterList([torch.zeros(2, 1, size[1]) for size in sizes])

    def forward(self, observations: Tensor, actions: Tensor) -> Tensor:
        """The values `[2, n]` of n actions."""
        values = torch.cat([observations, actions], dim=-1).expand(2, -1, -1)
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            values = torch.baddbmm(bias, functional.relu(values) if layer else values, weight)
        return values.squeeze(-1)


class SAC:
    """The learner. Its noise comes from a generator of its own, which is part of its state."""

    def __init__(
        self,
        observation_size: int,
        low: Tensor,
        high: Tensor,
        *,
        hidden: int = 64,
        learning_rate: float = 1e-3,
        discount: float = 0.99,
        target_rate: float = 0.005,
        seed: int = 0,
    ) -> None:
        self.discount, self.target_rate = discount, target_rate
        self.target_entropy = -float(len(low))
        self.updates = 0
        self.generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.actor = Actor(observation_size, low, high, hidden)
            self.critics = Critics(observation_size + len(low), hidden)
            self.targets = Critics(observation_size + len(low), hidden).requires_grad_(False)
        self.targets.load_state_dict(self.critics.state_dict())
        self.log_temperature = torch.zeros((), requires_grad=True)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=learning_rate, fused=True)
        self.critic_optimizer = torch.optim.Adam(self.critics.parameters(), lr=learning_rate, fused=True)
        self.temperature_optimizer = torch.optim.Adam([self.log_temperature], lr=learning_rate, fused=True)

    def update(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """One gradient step of critics, actor and temperature; returns its figures."""
        observations, next_observations = batch["curr_obs"]["state"], batch["next_obs"]["state"]
        temperature = self.log_temperature.detach().exp()

        with torch.no_grad():
            next_actions, next_log_probs = self.actor(next_observations, self.generator)
            future = self.targets(next_observations, next_actions).amin(dim=0) - temperature * next_log_probs
            goes_on = 1.0 - batch["terminations"].float()
            goals = batch["rewards"] + self.discount * goes_on * future
        values = self.critics(observations, batch["actions"])
        critic_loss = (values - goals).square().mean(dim=1).sum()
        self.critic_optimizer.zero_grad()
        critic_loss.backward()
        self.critic_optimizer.step()

        actions, log_probs = self.actor(observations, self.generator)
        actor_loss = (temperature * log_probs - self.critics(observations, actions).amin(dim=0)).mean()
        self.actor_optimizer.zero_grad()
        actor_loss.backward(inputs=list(self.actor.parameters()))  # the critics are only looked through
        self.actor_optimizer.step()

        entropy = -log_probs.detach().mean()
        temperature_loss = self.log_temperature * (entropy - self.target_entropy)
        self.temperature_optimizer.zero_grad()
        temperature_loss.backward()
        self.temperature_optimizer.step()

        with torch.no_grad():
            for target, parameter in zip(self.targets.parameters(), self.critics.parameters(), strict=True):
                target.lerp_(parameter, self.target_rate)
        self.updates += 1
        return {"critic_loss": critic_loss.detach(), "entropy": entropy, "temperature": temperature}

    def actor_weights(self) -> dict[str, Tensor]:
        """A copy of the policy's weights, for who acts with them while learning goes on."""
        return {name: value.clone() for name, value in self.actor.state_dict().items()}

    def state_dict(self) -> dict[str, Any]:
        """All that the next update depends on, as `torch.load(weights_only=True)` reads it back."""
        parts = {name: getattr(self, name).state_dict() for name in self._PARTS}
        rest = {"log_temperature": self.log_temperature.detach(), "generator": self.generator.get_state()}
        return parts | rest | {"updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self._PARTS:
            getattr(self, name).load_state_dict(state[name])
        with torch.no_grad():
            self.log_temperature.copy_(state["log_temperature"])
        self.generator.set_state(state["generator"])
        self.updates = state["updates"]

    _PARTS = ("actor", "critics", "targets", "actor_optimizer", "critic_optimizer", "temperature_optimizer")
