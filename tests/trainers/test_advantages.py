"""The advantages of `forebay.collate` equal those that TRL's GRPOTrainer computes from the same rewards.

A real trainer, with a tiny random model and without network, generates completions, calls the reward function and
returns the batch that it would train on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay import RolloutState
from forebay.collate import advantages
from tests.engines.tiny_model import make_versions

pytestmark = pytest.mark.filterwarnings("default")  # TRL and Transformers warn of what they do themselves

GROUPS, MEMBERS = 3, 4
SCORES = st.sampled_from([0.0, 1.0, 0.25, -3.5]) | st.floats(-10, 10, width=32)
REWARDS = st.lists(st.lists(SCORES, min_size=MEMBERS, max_size=MEMBERS), min_size=GROUPS, max_size=GROUPS)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    directory: Path = tmp_path_factory.mktemp("model")
    [version] = make_versions(directory, 0)

    def given_score(score: list[float], **_: Any) -> list[float]:
        return score

    made = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(version),
        reward_funcs=given_score,
        args=GRPOConfig(
            output_dir=str(directory / "out"),
            per_device_train_batch_size=GROUPS * MEMBERS,
            num_generations=MEMBERS,
            max_completion_length=2,
            report_to="none",
            use_cpu=True,
            bf16=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["a"] * GROUPS, "score": [0.0] * GROUPS}),
        processing_class=AutoTokenizer.from_pretrained(version),
    )
    made.model.train()
    return made


def by_trl(trainer: Any, rewards: list[list[float]], scale_rewards: str) -> np.ndarray[Any, Any]:
    trainer.scale_rewards = scale_rewards
    rows = [{"prompt": f"{n}+{n}=", "score": score} for n, scores in enumerate(rewards) for score in scores]
    result: np.ndarray[Any, Any] = trainer._generate_and_score_completions(rows)["advantages"].numpy()
    return result


def by_forebay(rewards: list[list[float]], kind: Any) -> np.ndarray[Any, Any]:
    groups = [
        [RolloutState(message=[], rollout_id=n, reward={"score": score}) for n, score in enumerate(scores)]
        for scores in rewards
    ]
    return advantages(groups, kind).values


def test_trl_gets_the_rewards_that_the_test_gives(trainer: Any) -> None:
    found = by_trl(trainer, [[0.0, 0.0, 0.0, 4.0]] * GROUPS, "none")
    assert found.tolist() == [-1.0, -1.0, -1.0, 3.0] * GROUPS


@pytest.mark.parametrize(("scale_rewards", "kind"), [("group", "grpo"), ("none", "dr_grpo")])
@given(rewards=REWARDS)
@settings(max_examples=60, deadline=None)
def test_advantages_equal_those_of_trl(trainer: Any, scale_rewards: str, kind: str, rewards: list[list[float]]) -> None:
    # TRL computes in float32: its mean is off by the rounding of the largest reward, which "group" divides by a spread
    # of at least 1e-4. Rewards are compared at that precision.
    largest = max(abs(score) for scores in rewards for score in scores)
    rounding = 8 * np.finfo(np.float32).eps * max(largest, 1.0)
    spreads = np.repeat([np.std(scores, ddof=1) for scores in rewards], MEMBERS)
    tolerance = rounding / (spreads + 1e-4) if kind == "grpo" else np.full(GROUPS * MEMBERS, rounding)
    ours, theirs = by_forebay(rewards, kind), by_trl(trainer, rewards, scale_rewards)
    # A spread that is itself rounded changes all advantages of its group by that share.
    share = rounding / (spreads + 1e-4) if kind == "grpo" else 0.0
    assert (np.abs(ours - theirs) <= tolerance + share * np.abs(ours)).all(), (ours, theirs)


@pytest.mark.parametrize("seed", range(20))
def test_advantages_of_ordinary_rewards_equal_those_of_trl_to_six_digits(trainer: Any, seed: int) -> None:
    rewards = np.random.default_rng(seed).random((GROUPS, MEMBERS)).astype(np.float32).astype(float).tolist()
    np.testing.assert_allclose(by_forebay(rewards, "grpo"), by_trl(trainer, rewards, "group"), rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(by_forebay(rewards, "dr_grpo"), by_trl(trainer, rewards, "none"), rtol=2e-6, atol=2e-6)
