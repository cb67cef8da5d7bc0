"""`Task`: prompts, how they are answered and judged, and their share of a batch."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Self

from forebay.agent_loop.base import AgentLoop, Answer, FunctionAgentLoop
from forebay.buffer.buffer import ReplayBuffer
from forebay.core.rollout import RolloutState
from forebay.core.validate import checked_integer, checked_task
from forebay.errors import InvalidConfig, InvalidDataset
from forebay.manager.schedule import check_weights
from forebay.manager.task import ManagedTask
from forebay.produce.evaluate import Evaluation, evaluate
from forebay.produce.filters import Filter
from forebay.produce.judge import GroupReward, SampleReward
from forebay.produce.plan import Budgets, Timeouts
from forebay.produce.stats import NoProgress
from forebay.produce.strategy import AsyncProduceStrategy
from forebay.prompts.sampler import Sampler
from forebay.prompts.sources import Tokenize, ToRolloutState

Generate = AgentLoop | Callable[[RolloutState], Awaitable[Answer]]


@dataclass(frozen=True, eq=False)
class Task:
    """A named stream of prompts. `RolloutLoader` takes one, or several with weights.

    - `prompts`: a list, a Hugging Face or torch data set, the path of a JSONL file, a loader, or a `PromptSource`.
    - `generate`: an async function of one sample, which fills it in, or an `AgentLoop`.
    - `reward(state)` and `group_reward(group)`: plain or async functions; they return a number, or a dict with a score.
    - `group_size`: answers to one prompt. `weight`: the task's share of a batch. `filters`: keep a group or reject it.
    - `tokenize(state)`: the token ids of a prompt; see `chat_tokenize`. `to_rollout_state` maps other records.
    - `over_issue`: groups that run beyond those needed, as a share of the batch, so that slow answers do not hold up a
      step. `partial_rollout`: interrupted answers continue after their tokens. `tail_batch_trigger_size` and the rest:
      see `Sampler` and `AsyncProduceStrategy`.
    """

    name: str
    prompts: Any
    generate: Generate
    _: KW_ONLY
    reward: SampleReward | None = None
    group_reward: GroupReward | None = None
    group_size: int = 1
    weight: float = 1.0
    filters: Sequence[Filter] = ()
    max_tries: int = 3
    seed: int = 0
    shuffle: bool = True
    tokenize: Tokenize | None = None
    to_rollout_state: ToRolloutState | None = None
    skip_bad_records: bool = False
    offline: bool = False
    allow_changed_data: bool = False
    over_issue: float = 0.0
    partial_rollout: bool = False
    tail_batch_trigger_size: int = 0
    reward_concurrency: int = 64
    timeouts: Timeouts | None = None
    budgets: Budgets | None = None

    def __post_init__(self) -> None:
        checked_task(self.name)
        if self.weight != 0:
            check_weights({self.name: self.weight})
        checked_integer("group_size", self.group_size, least=1)
        if not isinstance(self.generate, AgentLoop):
            try:
                object.__setattr__(self, "generate", FunctionAgentLoop(self.generate))
            except InvalidConfig as error:
                raise InvalidConfig(
                    f"generate of task {self.name!r} is {self.generate!r:.80}; expected an async function of one "
                    "sample (`async def generate(state)`), or an AgentLoop"
                ) from error
        for name in ("reward", "group_reward", "tokenize", "to_rollout_state"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise InvalidConfig(f"{name} of task {self.name!r} is {value!r:.80}; expected a function")
        filters = (self.filters,) if callable(self.filters) else self.filters
        object.__setattr__(self, "filters", tuple(filters))
        if isinstance(self.prompts, (list, tuple)) and not self.prompts:
            raise InvalidDataset(f"the prompts of task {self.name!r} are empty; expected at least one")
        self.sampler()  # refuses prompts of an unknown type now, and reads none

    @property
    def agent_loop(self) -> AgentLoop:
        """What generates."""
        assert isinstance(self.generate, AgentLoop)
        return self.generate

    def with_prompts(self, prompts: Any) -> Self:
        """The same task with other prompts."""
        return replace(self, prompts=prompts)

    def sampler(self, epochs: int | None = None) -> Sampler:
        """Draws the prompts of this task."""
        return Sampler(
            self.prompts,
            group_size=self.group_size,
            seed=self.seed,
            shuffle=self.shuffle,
            epochs=epochs,
            to_rollout_state=self.to_rollout_state,
            tokenize=self.tokenize,
            skip_bad_records=self.skip_bad_records,
            offline=self.offline,
            allow_changed_data=self.allow_changed_data,
        )

    def managed(
        self,
        buffer: ReplayBuffer,
        *,
        max_staleness: int,
        max_token_staleness: int | None,
        sync_weights_interval: int,
        epochs: int | None,
    ) -> ManagedTask:
        """The task as a manager has it."""
        return ManagedTask(
            name=self.name,
            weight=self.weight,
            agent_loop=self.agent_loop,
            sampler=self.sampler(epochs),
            strategy=AsyncProduceStrategy(
                buffer,
                over_sample_threshold=self.over_issue,
                enable_partial_rollout=self.partial_rollout,
                max_staleness=max_staleness,
                max_token_staleness=max_token_staleness,
                sync_weights_interval=sync_weights_interval,
                tail_batch_trigger_size=self.tail_batch_trigger_size,
                max_tries=self.max_tries,
                reward_fn=self.reward,
                group_reward_fn=self.group_reward,
                reward_concurrency=self.reward_concurrency,
                is_valid_sample_fn=self.filters,
                timeouts=self.timeouts,
                budgets=self.budgets,
                progress=NoProgress(),
            ),
        )

    async def evaluate(self, model_step: int, max_in_flight: int | None) -> Evaluation:
        """Answer and judge every record once; see `forebay.evaluate`."""
        return await evaluate(
            self.agent_loop,
            self.sampler(),
            model_step=model_step,
            name=self.name,
            reward_fn=self.reward,
            group_reward_fn=self.group_reward,
            reward_concurrency=self.reward_concurrency,
            max_tries=self.max_tries,
            max_in_flight=max_in_flight,
            timeouts=self.timeouts,
        )
