"""A run of real processes on a real PostgreSQL server: producers and the trainer are killed, the server is stopped."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from forebay import ReplayBuffer, StalenessReplayPolicy
from forebay.storage.postgres import PostgresStorage
from tests.shared_run import SharedRun
from tests.storage.postgres_server import Server


@pytest.mark.parametrize(
    ("steps", "kills"), [pytest.param(9, 2, id="some"), pytest.param(60, 8, id="many", marks=pytest.mark.slow)]
)
def test_g01_g03_g06_a_run_survives_kills_and_a_stopped_server(tmp_path: Path, steps: int, kills: int) -> None:
    server = Server()
    stops = [steps // 3, 2 * steps // 3]

    def stop_now_and_then(step: int) -> None:
        if stops and step >= stops[0]:
            stops.pop(0)
            server.stop("fast")
            server.start()

    async def ledger() -> dict[str, int]:
        buffer = ReplayBuffer(StalenessReplayPolicy(), PostgresStorage(server.dsn), max_groups=128, lease_s=3)
        async with buffer:
            return (await buffer.ledger())["sums"]

    run = SharedRun(server.dsn, tmp_path, seed=steps, steps=steps)
    try:
        run.train(kills=kills, meanwhile=stop_now_and_then)
        run.check(asyncio.run(ledger()))
        assert not stops
        assert run.killed["producer"] >= kills
    finally:
        server.stop()
