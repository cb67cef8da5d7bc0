"""The first program of a user, as `RolloutLoader`'s documentation has it: sync and async, both modes, every storage."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import RolloutState
from tests.storage.postgres_server import dsn

MODES = pytest.mark.parametrize("max_staleness", [0, 1], ids=["in_turns", "ahead"])

PROGRAM = """
loader = forebay.RolloutLoader(
    forebay.Task("math", prompts, generate, reward=score, group_size=8),
    batch_groups=64,
    max_staleness=1,
    storage="sqlite:///run.db",
    checkpoints="checkpoints",
)
with loader:
    start = loader.resume(load=load_weights) or 0
    for batch in loader.batches(start + 1, 1000):
        train(batch.packed(max_tokens=16_384))
        loader.update_weights(push_to_engine)
        if batch.step % 50 == 0:
            save_weights(batch.step)
            loader.save(batch.step)
"""
"""The lines of the design page, without their comments."""


class Trainer:
    """Weights on disk, an engine in this process, and what was trained on by step."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.engine = 0
        self.step = 0
        self.trained: dict[int, list[int]] = {}

    async def generate(self, state: RolloutState) -> None:
        await asyncio.sleep(0)
        number = (state.rollout_id or 0) % 7
        state.prompt_ids = [1, 2]
        state.response, state.response_ids = "answer", [self.engine] * (1 + number)
        state.logprobs = [-0.1] * (1 + number)

    def score(self, state: RolloutState) -> float:
        return float((state.rollout_id or 0) % 3)

    def train(self, micro_batches: Any) -> None:
        self.step += 1
        self.trained[self.step] = sorted({int(index) for each in micro_batches for index in each.group_index})
        for each in micro_batches:
            assert each.input_ids.shape == each.loss_mask.shape == each.logprobs.shape == each.advantages.shape
            assert type(each.input_ids).__module__ == "torch"
            trained = each.versions[each.loss_mask]
            assert (each.input_ids[each.loss_mask] == trained).all(), "the version of a token is that of its weights"

    def push(self, step: int) -> None:
        self.engine = step

    def save(self, step: int) -> None:
        (self.directory / f"weights_{step}.json").write_text(json.dumps(step))

    def load(self, step: int) -> None:
        self.step = self.engine = json.loads((self.directory / f"weights_{step}.json").read_text())


def names_of(trainer: Trainer) -> dict[str, Any]:
    return {
        "forebay": forebay,
        "prompts": [{"prompt": f"question {number}"} for number in range(100)],
        "generate": trainer.generate,
        "score": trainer.score,
        "train": trainer.train,
        "push_to_engine": trainer.push,
        "save_weights": trainer.save,
        "load_weights": trainer.load,
    }


def shortened(program: str, storage: str, max_staleness: int, last: int) -> str:
    """The program with fewer and smaller steps, and the storage that is tried."""
    for old, new in {
        "batch_groups=64": "batch_groups=4",
        "group_size=8": "group_size=2",
        "1000)": f"{last})",
        "% 50": "% 2",
        "max_staleness=1": f"max_staleness={max_staleness}",
        '"sqlite:///run.db"': storage,
        "max_tokens=16_384": "max_tokens=24",
    }.items():
        assert old in program
        program = program.replace(old, new)
    return program


def as_async(program: str) -> str:
    """The same program for the other form: another class, and `await` before the verbs."""
    program = program.replace("forebay.RolloutLoader", "forebay.AsyncRolloutLoader").replace(
        "with loader", "async with loader"
    )
    program = program.replace("for batch in", "async for batch in")
    for verb in ("resume", "update_weights", "save"):
        program = program.replace(f"loader.{verb}(", f"await loader.{verb}(")
    return "async def main():\n" + "".join(f"    {line}\n" for line in program.splitlines()) + "asyncio.run(main())\n"


def run(
    program: str, directory: Path, monkeypatch: pytest.MonkeyPatch, storage: str, max_staleness: int, **names: Any
) -> None:
    """The program twice, the second time from its checkpoint: the steps continue, and the data does."""
    monkeypatch.chdir(directory)
    first = Trainer(directory)
    scope = names_of(first) | names | {"asyncio": asyncio}
    exec(compile(shortened(program, storage, max_staleness, 5), "program", "exec"), scope)
    assert sorted(first.trained) == [1, 2, 3, 4, 5]
    second = Trainer(directory)
    scope = names_of(second) | names | {"asyncio": asyncio}
    exec(compile(shortened(program, storage, max_staleness, 8), "program", "exec"), scope)
    assert sorted(second.trained) == [5, 6, 7, 8]
    assert second.engine == 8
    assert all(len(groups) == 4 for groups in (first.trained | second.trained).values())


@MODES
@pytest.mark.parametrize("form", ["sync", "async"])
@pytest.mark.parametrize("storage", ['"memory"', '"sqlite:///run.db"'], ids=["memory", "sqlite"])
def test_the_first_program_runs_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str, form: str, max_staleness: int
) -> None:
    run(PROGRAM if form == "sync" else as_async(PROGRAM), tmp_path, monkeypatch, storage, max_staleness)


@MODES
@pytest.mark.parametrize("form", ["sync", "async"])
def test_the_first_program_runs_on_postgresql(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, max_staleness: int
) -> None:
    storage = f'"{dsn()}#program_{form}_{max_staleness}"'
    run(PROGRAM if form == "sync" else as_async(PROGRAM), tmp_path, monkeypatch, storage, max_staleness)
