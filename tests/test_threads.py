"""Blocking work of Forebay: never behind the user's threads, always cancellable."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from forebay import AsyncReplayBufferConfig, Sampler
from forebay.core import aio
from forebay.core.aio import Pool, in_thread
from forebay.testing.samples import make_group


@contextmanager
def hanging() -> Iterator[threading.Event]:
    """An event that threads wait for; it is set at the end, so that nothing outlives the test."""
    released = threading.Event()
    try:
        yield released
    finally:
        released.set()


async def fill_default_executor(released: threading.Event) -> list[asyncio.Future[bool]]:
    """More calls that hang than asyncio's default executor has threads, which is at most 32."""
    loop = asyncio.get_running_loop()
    return [loop.run_in_executor(None, released.wait) for _ in range(40)]


@pytest.mark.parametrize("storage", ["memory", "sqlite"])
async def test_g10_save_and_draws_do_not_wait_for_threads_of_the_user(tmp_path: Path, storage: str) -> None:
    url = "memory" if storage == "memory" else f"sqlite:///{tmp_path / 'run.db'}"
    buffer = AsyncReplayBufferConfig(storage=url).build()
    sampler = Sampler([{"prompt": "q"}], tokenize=lambda text: [1]).with_buffer(buffer)
    with hanging() as released:
        hung = await fill_default_executor(released)
        await sampler.sample("math")
        await buffer.save(tmp_path / "checkpoint", model_step=0)
        await buffer.close()
        assert not any(call.done() for call in hung)
    await asyncio.gather(*hung)


async def test_g11_a_save_on_a_disk_that_hangs_can_be_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forebay.checkpoint.format import CheckpointWriter

    monkeypatch.setattr(aio, "CANCEL_GRACE_S", 0.05)
    buffer = AsyncReplayBufferConfig().build()
    await buffer.put(make_group(), "math")
    with hanging() as released:
        begun = asyncio.Event()
        loop, publish = asyncio.get_running_loop(), CheckpointWriter.publish

        def hang(writer: CheckpointWriter, manifest: object) -> object:
            loop.call_soon_threadsafe(begun.set)
            released.wait()
            return publish(writer, manifest)  # type: ignore[arg-type]

        monkeypatch.setattr(CheckpointWriter, "publish", hang)
        saving = asyncio.create_task(buffer.save(tmp_path / "checkpoint", model_step=0))
        await begun.wait()
        saving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await saving
        monkeypatch.setattr(CheckpointWriter, "publish", publish)
        await buffer.save(tmp_path / "another", model_step=0)
    await buffer.close()


async def test_a_cancelled_call_ends_with_its_work_and_undoes_it() -> None:
    undone: list[int] = []
    begun, released = threading.Event(), threading.Event()

    def work() -> int:
        begun.set()
        released.wait()
        return 7

    call = asyncio.create_task(in_thread(work, undo=undone.append))
    await asyncio.to_thread(begun.wait)
    call.cancel()
    await asyncio.sleep(0)
    assert not call.done()
    released.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.sleep(0)
    assert undone == [7]


async def test_a_call_that_is_left_behind_is_undone_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio, "CANCEL_GRACE_S", 0.01)
    undone = asyncio.Event()
    with hanging() as released:
        begun = threading.Event()

        def work() -> bool:
            begun.set()
            return released.wait()

        call = asyncio.create_task(in_thread(work, undo=lambda _: undone.set()))
        await asyncio.to_thread(begun.wait)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not undone.is_set()
    await undone.wait()


def test_a_pool_runs_as_many_calls_at_once_as_it_has_threads() -> None:
    pool = Pool("test", 3)
    meeting = threading.Barrier(3)
    calls = [pool.submit(meeting.wait, 60) for _ in range(3)]
    assert sorted(call.result(60) for call in calls) == [0, 1, 2]
    with hanging() as released:
        held = [pool.submit(released.wait) for _ in range(3)]
        waiting = pool.submit(lambda: 1)
        assert waiting.cancel()
    assert all(call.result(60) for call in held)
    assert pool.submit(lambda: 2).result(60) == 2
