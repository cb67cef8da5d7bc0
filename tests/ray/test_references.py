"""Ray's references in samples: kept in memory and dropped once, resolved by stores, a reason to fail when lost."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from forebay import MemoryStorage, ReplayBuffer, RolloutState, Status, UnsupportedPayload
from forebay.buffer.internal import internals
from forebay.core.references import references_of, resolve_group
from forebay.errors import ReferenceLost
from forebay.ray.references import lost, resolve
from forebay.storage.sqlite import SQLiteStorage
from forebay.testing import make_group
from tests.processes import HANG_S, finished
from tests.ray.children import eventually
from tests.ray.conftest import LocalCluster
from tests.support import closed_ledger, turns

pytestmark = pytest.mark.usefixtures("cluster")

LARGE = 300_000  # travels as a separate object, not within a call
OWNER_DIED = "$[0].mm_info.image: a Ray object is lost: its owner died"


class _Producer:
    """Owns what it puts, and keeps no reference to it unless told."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def image(self, fill: int = 0, *, keep: bool = False) -> list[Any]:
        reference = ray.put(np.full(LARGE, fill, np.uint8))
        if keep:
            self._kept.append(reference)
        return [reference]

    def knows(self, name: str) -> bool:
        return name in references_here()

    def forgot(self, name: str) -> bool:
        return name not in references_here()

    def running(self, signal: Any) -> list[Any]:
        self._kept.append(until.remote(signal))
        return self._kept[-1:]

    def value(self) -> np.ndarray[Any, Any]:
        return np.zeros(LARGE, np.uint8)


class _Signal:
    """Lets tasks continue."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    async def send(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        await self._event.wait()


_remote: Any = ray.remote(num_cpus=0)
Producer, Signal = _remote(_Producer), _remote(_Signal)


@ray.remote(num_cpus=0, max_retries=0)
def until(signal: Any) -> np.ndarray[Any, Any]:
    ray.get(signal.wait.remote())
    return np.full(LARGE, 7, np.uint8)


@ray.remote(num_cpus=0, max_retries=0)
def failing() -> None:
    raise ValueError("no such image")


def references_here() -> dict[str, dict[str, int]]:
    """What this process refers to, or owns, by the name of the object."""
    worker: Any = ray._private.worker.global_worker
    return {name.decode(): counts for name, counts in worker.core_worker.get_all_reference_counts().items()}


def picture_group(image: Any, *, samples: int = 3, **options: Any) -> list[RolloutState]:
    """Members that share an image, in one dict."""
    group = make_group(samples, **options)
    info = {"image": image}
    for state in group:
        state.mm_info = info
    return group


def image_of(group: list[RolloutState]) -> Any:
    assert group[0].mm_info is not None
    assert len({id(state.mm_info["image"]) for state in group if state.mm_info is not None}) == 1
    return group[0].mm_info["image"]


async def soon(condition: Callable[[], Any]) -> None:
    """Until it holds: Ray hears of some things a moment later."""
    async with asyncio.timeout(HANG_S):
        while True:
            holds = condition()
            if holds if isinstance(holds, bool) else await holds:
                return
            await asyncio.sleep(0.02)


def at(node_id: str) -> Any:
    """Where an actor is placed."""
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


def here() -> str:
    return ray.get_runtime_context().get_node_id()


def elsewhere() -> str:
    """A node that stays, and is not the one of this process."""
    list_nodes: Callable[[], list[dict[str, Any]]] = ray.nodes
    nodes = [str(node["NodeID"]) for node in list_nodes() if node["Alive"] and "doomed" not in node["Resources"]]
    return min(node_id for node_id in nodes if node_id != here())


@contextmanager
def producer(node_id: str | None = None) -> Iterator[Any]:
    actor = Producer.options(scheduling_strategy=at(node_id or elsewhere())).remote()
    try:
        yield actor
    finally:
        ray.kill(actor)


async def kill(actor: Any) -> None:
    """End an actor, and wait until that is known here."""
    ray.kill(actor)
    with suppress(ray.exceptions.RayActorError):
        while True:
            await actor.forgot.remote("")
    # Nothing can be asked for it without fetching the object: that the owner of its objects is dead is told later.
    await asyncio.sleep(2)


# --- dropped once -------------------------------------------------------------------------------------


async def _acknowledged(buffer: ReplayBuffer) -> None:
    async with buffer.lease_batch({"math": 1}, train_step=1):
        pass


async def _given_back_then_acknowledged(buffer: ReplayBuffer) -> None:
    lease = await buffer.lease_batch({"math": 1}, train_step=1)
    name = image_of(lease.groups[0]).hex()
    await lease.nack()
    del lease
    assert name in references_here()
    await _acknowledged(buffer)


async def _rejected(buffer: ReplayBuffer) -> None:
    lease = await buffer.lease_batch({"math": 1}, train_step=1)
    await lease.reject(lease.groups, "of no use")
    await lease.ack()


async def _discarded(buffer: ReplayBuffer) -> None:
    assert await buffer.discard({"task_name": "math"}, "of no use") == 1


async def _taken(buffer: ReplayBuffer) -> None:
    assert len(await buffer.get(1, "math", Status.COMPLETED)) == 1


async def _expired(buffer: ReplayBuffer) -> None:
    limits = {"math": 1}
    await buffer.refresh_staleness(
        task_stale_thresholds=limits, current_train_step=9, expired_groups_retryable_by_task={"math": False}
    )


async def _failed(buffer: ReplayBuffer) -> None:
    (record,) = await buffer.query({})
    assert await buffer.storage.fail({record.uid: "lost"}) == {"math": 1}


async def _saved_then_acknowledged(buffer: ReplayBuffer) -> None:
    await buffer.save(Path(buffer.owner), model_step=0)
    await _acknowledged(buffer)


LEAVING = [_acknowledged, _given_back_then_acknowledged, _rejected, _discarded, _taken, _expired, _failed]


@pytest.mark.parametrize("leave", [*LEAVING, _saved_then_acknowledged], ids=lambda leave: leave.__name__.strip("_"))
async def test_a_reference_is_held_until_its_group_leaves_and_then_dropped(
    leave: Callable[[ReplayBuffer], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    buffer = ReplayBuffer()
    image = ray.put(np.zeros(LARGE, np.uint8))
    name = image.hex()
    await buffer.put(picture_group(image), "math", model_step=0)
    del image
    assert references_here()[name]["local"] >= 1
    await leave(buffer)
    await soon(lambda: name not in references_here())
    await closed_ledger(buffer)
    await buffer.close()


async def test_the_owner_learns_that_nobody_refers_to_its_object_any_more() -> None:
    with producer() as actor:
        (image,) = await actor.image.remote()
        name = image.hex()
        buffer = ReplayBuffer()
        await buffer.put_many([picture_group(image), picture_group(image)], "math")
        del image
        await _acknowledged(buffer)
        assert await actor.knows.remote(name)  # the other group refers to it, too
        await _acknowledged(buffer)
        await soon(lambda: actor.forgot.remote(name))


async def test_groups_kept_after_training_keep_their_references() -> None:
    buffer = ReplayBuffer(keep_trained=1)
    names = []
    for _ in range(2):
        image = ray.put(np.zeros(LARGE, np.uint8))
        names.append(image.hex())
        await buffer.put(picture_group(image), "math")
        del image
    await _acknowledged(buffer)
    assert names[0] in references_here()
    await _acknowledged(buffer)
    await soon(lambda: names[0] not in references_here())
    assert names[1] in references_here()


def test_no_module_of_the_package_frees_objects() -> None:
    package = Path(__file__).parents[2] / "src" / "forebay" / "ray"
    called = {
        ast.unparse(node.func).rpartition(".")[2]
        for file in package.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
    }
    assert "get_object_locations" in called
    assert not called & {"free", "free_objects"}


# --- values -------------------------------------------------------------------------------------------


async def test_durable_storages_store_the_value_and_hand_out_one_reference_for_all_members(tmp_path: Path) -> None:
    with producer() as actor:
        (image,) = await actor.image.remote(5)
        async with ReplayBuffer(storage=SQLiteStorage(tmp_path / "store.db")) as buffer:
            await buffer.put(picture_group(image, samples=8), "math")
            name = image.hex()
            del image
            await soon(lambda: name not in references_here())
            await kill(actor)
            async with buffer.lease_batch({"math": 1}, train_step=1) as lease:
                handed_out = image_of(lease.groups[0])
                assert isinstance(handed_out, ray.ObjectRef)
                value = await handed_out
                assert (value.nbytes, value[0]) == (LARGE, 5)
    assert (tmp_path / "store.db").stat().st_size < 2 * LARGE


@pytest.mark.parametrize("durable", [False, True], ids=["into memory", "into a store"])
async def test_a_checkpoint_holds_values_and_resuming_puts_each_back_once(durable: bool, tmp_path: Path) -> None:
    first = ReplayBuffer()
    for fill in (1, 2):
        await first.put(picture_group(ray.put(np.full(LARGE, fill, np.uint8)), samples=8), "math")
    await first.save(tmp_path / "checkpoint", model_step=0)
    await first.close()
    await _emptied(first)
    before = len(references_here())
    storage = SQLiteStorage(tmp_path / "store.db") if durable else MemoryStorage()
    async with ReplayBuffer(storage=storage) as second:
        await second.resume(tmp_path / "checkpoint")
        assert len(references_here()) == before + (0 if durable else 2)
        lease = await second.lease_batch({"math": 2}, train_step=1)
        assert len(references_here()) == before + 2
        values = [await image_of(group) for group in lease.groups]
        assert [(value.nbytes, value[0]) for value in values] == [(LARGE, 1), (LARGE, 2)]


async def _emptied(buffer: ReplayBuffer) -> None:
    """Drop what a buffer has, so that its references do not confuse the count."""
    again = ReplayBuffer(storage=buffer.storage)
    names = {image_of(group).hex() for group in await again.get(9, "math", Status.COMPLETED)}
    await again.close()
    await soon(lambda: not names & references_here().keys())


READING = """
import asyncio, sys
from forebay import ReplayBuffer

async def main(path):
    buffer = ReplayBuffer()
    await buffer.resume(path)
    group = (await buffer.get(1, "math", "completed"))[0]
    print(type(group[0].mm_info["image"]).__name__, group[0].mm_info["image"].nbytes, "ray" in sys.modules)

asyncio.run(main(sys.argv[1]))
"""


async def test_a_process_without_ray_reads_a_checkpoint_with_plain_values(tmp_path: Path) -> None:
    async with ReplayBuffer() as buffer:
        await buffer.put(picture_group(ray.put(np.zeros(LARGE, np.uint8))), "math")
        await buffer.save(tmp_path / "checkpoint", model_step=0)
    reading = await asyncio.to_thread(finished, "-c", READING, tmp_path / "checkpoint")
    assert reading.stdout == f"ndarray {LARGE} False\n", reading.stderr


async def test_a_value_that_is_still_being_made_is_waited_for(tmp_path: Path) -> None:
    signal = Signal.remote()
    async with ReplayBuffer(storage=SQLiteStorage(tmp_path / "store.db")) as buffer:
        putting = asyncio.ensure_future(buffer.put(picture_group(until.remote(signal)), "math"))
        cancelled = asyncio.ensure_future(buffer.put(picture_group(until.remote(signal)), "math"))
        await turns(20)
        assert (await buffer.explain_wait()).count("the values of references") == 2
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert not putting.done()
        await signal.send.remote()
        await putting
        (group,) = await buffer.get(1, "math", Status.COMPLETED)
        assert (await image_of(group))[0] == 7
        assert await closed_ledger(buffer) == {"issued": 1, "trained": 1}


async def test_a_value_that_is_not_plain_data_is_refused_with_its_path(tmp_path: Path) -> None:
    async with ReplayBuffer(storage=SQLiteStorage(tmp_path / "store.db")) as buffer:
        for value in ({1, 2}, [ray.put(1)]):
            with pytest.raises(UnsupportedPayload, match=r"\$\[0\]\.mm_info\.image \(its value\)"):
                await buffer.put(picture_group(ray.put(value)), "math")
        assert await closed_ledger(buffer) == {}


# --- lost ---------------------------------------------------------------------------------------------


async def test_a_group_whose_reference_lost_its_owner_fails_with_that_reason(tmp_path: Path) -> None:
    async with ReplayBuffer(storage=SQLiteStorage(tmp_path / "store.db")) as buffer:
        (drawn,) = (await internals(buffer).issue([make_group(status=Status.INIT)], "math", cursor=0)).groups
        with producer() as actor:
            (image,) = await actor.image.remote(keep=True)
            await kill(actor)
        for state in drawn:
            state.status, state.response_ids, state.mm_info = Status.COMPLETED, [1], {"image": image}
        await buffer.put_many([drawn, picture_group(ray.put(1), group_id=5)], "math")
        assert await closed_ledger(buffer) == {"issued": 2, "buffered": 1, "failed": 1}
        assert await buffer.reasons() == {"math": {OWNER_DIED: 1}}


async def test_saving_fails_the_groups_in_memory_whose_references_are_lost(tmp_path: Path) -> None:
    buffer = ReplayBuffer()
    with producer() as actor:
        (image,) = await actor.image.remote(keep=True)
        await buffer.put_many([picture_group(image), picture_group(ray.put(1))], "math")
        await kill(actor)
    await buffer.save(tmp_path / "checkpoint", model_step=0)
    resumed = ReplayBuffer()
    await resumed.resume(tmp_path / "checkpoint")
    for each in (buffer, resumed):
        assert await closed_ledger(each) == {"issued": 2, "buffered": 1, "failed": 1}
        assert await each.reasons() == {"math": {OWNER_DIED: 1}}


async def test_an_object_whose_task_failed_is_lost_for_its_reason() -> None:
    group = tuple(picture_group(failing.remote()))
    with pytest.raises(ReferenceLost, match=r"the task that makes it failed \(ValueError: no such image\)"):
        await resolve_group(group)
    with producer() as actor:
        ray.kill(actor)
        with pytest.raises(ReferenceLost, match="the actor that makes it died"):
            await resolve(actor.value.remote())


async def test_references_whose_owner_died_are_lost_wherever_the_object_is(
    cluster: LocalCluster, doomed_node: Any
) -> None:
    signal = Signal.options(scheduling_strategy=at(here())).remote()
    with producer() as living, producer() as dying, producer(here()) as near, producer(doomed_node.node_id) as doomed:
        (there,) = await living.image.remote(keep=True)
        (gone,) = await dying.image.remote(keep=True)
        (never,) = await dying.running.remote(signal)
        (copied,) = await near.image.remote(keep=True)
        (away,) = await doomed.image.remote(keep=True)
        running = until.options(scheduling_strategy=at(here())).remote(signal)
        everything = [there, gone, never, copied, away, running, ray.put(np.zeros(LARGE)), ray.put(1), failing.remote()]
        assert await lost(everything) == {}
        assert await lost([]) == {}
        await kill(dying)
        reason = "a Ray object is lost: its owner died"

        async def finds(*expected: ray.ObjectRef[Any]) -> bool:
            found = await lost([*everything, gone])
            assert set(found) <= set(expected)  # never more, and in the end all: Ray hears of a death when it does
            return found == dict.fromkeys(expected, reason)

        await eventually(lambda: finds(gone, never))
        await kill(near)  # the store of this node has its object still
        await eventually(lambda: finds(gone, never, copied))
        cluster.kill_node(doomed_node)
        cluster.wait_until_missed(doomed_node)
        assert await lost([there, away]) == {away: reason}
        assert (await there).nbytes == LARGE
        await signal.send.remote()
        assert (await running)[0] == 7


async def test_the_objects_of_many_owners_can_be_checked_at_once() -> None:
    """Ray's own call for that ended the process, sooner or later, if objects of several owners were in it."""
    with producer() as one, producer() as other, producer(here()) as dying:
        owned = [await actor.image.remote(keep=True) for actor in (one, other, dying, one, other)]
        references = [reference for found in owned for reference in found]
        await kill(dying)
        for _ in range(30):
            assert await lost([references[0], ray.put(1), *references[1:2], *references[3:]]) == {}
        assert list(await lost(references)) == references[2:3]


async def test_references_in_groups_are_found(tmp_path: Path) -> None:
    image = ray.put(1)
    group = picture_group(image)
    group[2].extra_fields = {"frames": [image, ray.put(2)]}
    assert list(references_of(group).values()) == ["$[0].mm_info.image", "$[2].extra_fields.frames[1]"]
