"""The loader on a buffer in a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay import AsyncRolloutLoader
from tests.loader.plane import Engine, ids, task
from tests.loader.test_connect import producing
from tests.loader.test_program import MODES, PROGRAM, as_async, run


@pytest.fixture
def buffer_name(cluster: Any, new_name: Callable[[], str]) -> Iterator[str]:
    from forebay.ray import RayReplayBuffer

    name = new_name()
    yield name
    RayReplayBuffer.destroy(name)


@MODES
@pytest.mark.parametrize("form", ["sync", "async"])
def test_the_first_program_runs_on_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffer_name: str, form: str, max_staleness: int
) -> None:
    from forebay import ReplayBufferConfig
    from forebay.ray import RayReplayBuffer

    def opened() -> Any:
        try:
            return RayReplayBuffer.connect(buffer_name)
        except Exception:
            return RayReplayBuffer.create(buffer_name, ReplayBufferConfig(storage=f"sqlite:///{tmp_path}/run.db"))

    run(
        PROGRAM if form == "sync" else as_async(PROGRAM),
        tmp_path,
        monkeypatch,
        "opened()",
        max_staleness,
        opened=opened,
    )


async def test_a_trainer_connects_to_the_run_of_other_processes_by_name(buffer_name: str) -> None:
    from forebay import ReplayBufferConfig
    from forebay.ray import RayReplayBuffer

    buffer = RayReplayBuffer.create(buffer_name, ReplayBufferConfig())
    loader = AsyncRolloutLoader(task(Engine(0)), batch_groups=4, max_staleness=1, storage=buffer)
    async with loader, producing(loader):
        seen: list[int] = []
        trainer = await AsyncRolloutLoader.connect(buffer_name, timeout_s=60)
        async with trainer:
            async for batch in trainer.batches(1, 3):
                seen += ids(batch)
                await trainer.update_weights(lambda: None)
    await buffer.close()
    assert sorted(seen) == [*range(12)]
