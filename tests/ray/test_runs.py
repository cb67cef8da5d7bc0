"""A run of real processes on a buffer in a Ray cluster of three nodes: producers and the trainer are killed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from forebay import ReplayBufferConfig
from forebay.ray import RayReplayBuffer
from tests.ray.conftest import LocalCluster
from tests.shared_run import SharedRun


@pytest.mark.parametrize(
    ("steps", "kills"), [pytest.param(5, 1, id="some"), pytest.param(60, 8, id="many", marks=pytest.mark.slow)]
)
def test_g01_g03_g06_a_run_on_ray_survives_kills(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, kills: int
) -> None:
    name = f"run-{steps}"
    config = ReplayBufferConfig(
        policy="staleness", storage=f"sqlite:///{tmp_path / 'store.db'}", max_groups=128, lease_s=3
    )
    buffer = RayReplayBuffer.create(name, config, actor_options={"num_cpus": 0})
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)

    async def ledger() -> dict[str, int]:
        async with buffer:
            return (await buffer.ledger())["sums"]

    run = SharedRun(f"ray:{name}", tmp_path, seed=steps, steps=steps)
    try:
        run.train(kills=kills)
        run.check(asyncio.run(ledger()))
        assert run.killed["producer"] >= kills
    finally:
        RayReplayBuffer.destroy(name)
