"""`tests/loader/test_kill.py` on a buffer in a Ray cluster: the trainer is killed, the host of the buffer stays."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from forebay import ReplayBufferConfig
from forebay.ray import RayReplayBuffer
from tests.loader.child import LEASE_S, Account, Doom, accounts_of
from tests.loader.history import check_accounts, lines
from tests.loader.killed import FEW, many, train_and_kill
from tests.ray.conftest import LocalCluster


@pytest.mark.parametrize(
    ("mode", "dooms"),
    [
        pytest.param("ahead", FEW, id="some"),
        pytest.param("in_turns", many(20, seed=2), id="many-in_turns", marks=pytest.mark.slow),
        pytest.param("ahead", many(20, seed=2), id="many-ahead", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_is_killed_trains_every_group_exactly_once(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, dooms: list[Doom]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    name = f"loader-{mode}-{len(dooms)}"
    config = ReplayBufferConfig(policy="staleness", storage=f"sqlite:///{tmp_path / 'store.db'}", lease_s=LEASE_S)
    buffer = RayReplayBuffer.create(name, config, actor_options={"num_cpus": 0})

    async def accounts() -> dict[str, Account]:
        async with buffer:
            return await accounts_of(buffer)

    try:
        trained = train_and_kill(tmp_path, f"ray:{name}", mode, dooms)
        check_accounts(asyncio.run(accounts()), trained)
        assert len(lines(tmp_path, "resumed")) > len(dooms) // 2
    finally:
        RayReplayBuffer.destroy(name)
