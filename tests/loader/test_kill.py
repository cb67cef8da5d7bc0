"""Exactly once through the loader, on real processes: killed at counted operations and events, and started again.

Then the weights, the log and the store agree: no group was trained twice, none was lost, and a batch that was being
trained on when the process died does not count as trained. The part on Ray is in `tests/ray`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay import ReplayBuffer, StalenessReplayPolicy
from forebay.storage.urls import build_storage
from tests.loader.child import LEASE_S, Account, Doom, accounts_of
from tests.loader.history import check_accounts, lines
from tests.loader.killed import EARLY, FEW, many, train_and_kill
from tests.storage import postgres_server

MODES = ("in_turns", "ahead")


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param != "postgresql":
        yield "memory" if request.param == "memory" else f"sqlite:///{tmp_path / 'store.db'}"
        return
    name = postgres_server.new_name()
    yield f"{postgres_server.dsn()}#{name}"
    postgres_server.drop(name)


def accounts_in(url: str) -> dict[str, Account]:
    """What a durable store says when no process uses it."""

    async def read() -> dict[str, Account]:
        lease_s = LEASE_S if url.startswith("postgres") else None
        async with ReplayBuffer(StalenessReplayPolicy(), build_storage(url), lease_s=lease_s) as buffer:
            return await accounts_of(buffer)

    return asyncio.run(read())


def end_leases(url: str, number: int) -> None:
    """The processes that used this store are dead: do not wait for the end of their leases, but now and then."""
    if url.startswith("postgres") and number % 8:
        schema = url.partition("#")[2]
        postgres_server.run(postgres_server.execute(f'UPDATE "{schema}".owners SET deadline = clock_timestamp()'))


def check_run(directory: Path, url: str, mode: str, dooms: list[Doom]) -> None:
    trained = train_and_kill(directory, url, mode, dooms, lambda number: end_leases(url, number))
    if url != "memory":
        check_accounts(accounts_in(url), trained)


@pytest.mark.parametrize("mode", MODES)
def test_a_process_that_is_killed_trains_every_group_exactly_once(tmp_path: Path, url: str, mode: str) -> None:
    check_run(tmp_path, url, mode, FEW)
    assert [words[1] for words in lines(tmp_path, "resumed")][:2] == ["0", "0"]


@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_was_killed_before_its_first_save_starts_over(tmp_path: Path, url: str, mode: str) -> None:
    check_run(tmp_path, url, mode, EARLY)
    resumed = [words[1:] for words in lines(tmp_path, "resumed")]
    assert resumed == [["0", "from", "nothing"]] * len(resumed), "there was a checkpoint"
    trained = [words[2:] for words in lines(tmp_path, "trained") if words[1] == "1"]
    assert len(trained) >= 2, "no life got to its first batch"


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [1])
def test_a_process_that_is_killed_twenty_times_trains_every_group_exactly_once(
    tmp_path: Path, url: str, mode: str, seed: int
) -> None:
    check_run(tmp_path, url, mode, many(20, seed))
