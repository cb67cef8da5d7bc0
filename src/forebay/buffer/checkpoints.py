"""Saving a storage into a checkpoint directory, and resuming from one (G4, G8).

What is saved is relative to the weights of `model_step`: a lease for a step that these weights already contain is
saved as trained; later ones, and what is in flight, are saved as groups that have to be handed out again. Saving
streams from a snapshot of one moment while everything goes on: memory does not grow with the buffer, files are
written in a thread, and the event loop is left free.

A checkpoint holds the values of references, never references: each value once for a group, however many members share
it. Resuming into a storage that keeps references puts each back once, owned by the process that resumes; groups that
shared a value have one each afterwards. A group whose value is lost ends as failed, there and in the checkpoint.

A checkpoint is read without being trusted: checksums are verified before anything changes, and what a record says of
its group is computed again from the group.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, nullcontext
from os import PathLike
from typing import Any, TypeVar

from msgspec.structs import asdict, replace

from forebay.checkpoint.files import FileOps
from forebay.checkpoint.format import Checkpoint, CheckpointWriter, Manifest, open_checkpoint
from forebay.codec.frame import decode_account, decode_group, decode_record, encode_account, encode_group, encode_record
from forebay.core.aio import grace, in_thread, start_thread
from forebay.core.ledger import Account, End, Place
from forebay.core.query import parse
from forebay.core.record import Record, Row, describe
from forebay.core.references import as_values, resolve_group
from forebay.core.rollout import Group, RolloutState, Status, group_status, reset_response
from forebay.errors import CheckpointTooOld, DamagedData, InvalidInput, ReferenceLost
from forebay.storage.base import Storage
from forebay.storage.rules import is_used

__all__ = ["as_saved", "prompts_of", "resume_storage", "save_storage"]

T = TypeVar("T")
log = logging.getLogger(__name__)

_CHUNK_BYTES = 2 * 2**20
_CHUNK_GROUPS = 64
_READ_GROUPS = 16


def as_saved(row: Row, model_step: int | None) -> tuple[Record | None, int]:
    """The record that a row is saved as (None: it is not), and how many trained groups to add to its account.

    `model_step` None: the weights are not known, so nothing that is still held counts as trained.
    """
    record = row.record
    trained_in = record.train_step is not None and model_step is not None and record.train_step <= model_step
    if record.place is Place.LEASED:
        if trained_in:
            return None, 1
        return replace(record, place=Place.BUFFERED, owner=None, lease_id=None, train_step=None), 0
    if record.place is Place.IN_FLIGHT:
        return replace(record, place=Place.BUFFERED, status=Status.ABORTED, owner=None), 0
    if record.place is Place.ARCHIVED:
        if model_step is None or record.train_step is None or trained_in:
            return None, 0
        back = replace(record, place=Place.BUFFERED, status=group_status(row.group), train_step=None)
        return back, -1
    return record, 0


def prompts_of(group: Group) -> Group:
    """The prompts of a group, one per rollout, as they were issued; tries that were spent stay spent."""
    issued: dict[object, RolloutState] = {}
    for index, state in enumerate(group):
        rollout: object = index if state.rollout_id is None else ("rollout", state.rollout_id)
        if rollout not in issued or state.segment < issued[rollout].segment:
            issued[rollout] = state
    prompts = []
    for state in issued.values():
        prompt = reset_response(state)
        prompt.status = Status.INIT
        prompt.tokens = None  # one more copy of the prompt for each member; `_row` has them share it again
        prompts.append(prompt)
    return tuple(prompts)


# --- save ---------------------------------------------------------------------------------------------


async def save_storage(
    storage: Storage,
    directory: str | PathLike[str],
    *,
    model_step: int | None,
    extra: Callable[[], Mapping[str, Any]] = dict,
    prompts_only: bool = False,
    files: FileOps | None = None,
) -> Manifest:
    """Write a checkpoint; the one that was there stays until the new one is complete.

    `extra` is asked for right before the snapshot, so that it tells of the same moment: a storage decides on its
    content at once, and may then take a while. `prompts_only`: no responses. Values of references that are still being
    made are waited for.
    """
    writer = await in_thread(lambda: CheckpointWriter(directory, files), undo=CheckpointWriter.abort)
    chunks = _Chunks(writer)
    try:
        if model_step is not None:
            saved_step = (await storage.summary(())).saved_step
            if saved_step is None or saved_step > model_step:
                await storage.saved(model_step)  # keeps what is acknowledged for later steps while this is written
        content = dict(extra())
        snapshot = await storage.snapshot()
        accounts = dict(snapshot.accounts)
        lost: dict[int, str] = {}
        with as_values():  # what is decoded here is only written again
            async with aclosing(snapshot.rows) as rows:
                async for row in rows:
                    record, trained = as_saved(row, model_step)
                    account = accounts[row.record.task_name]
                    if trained:
                        account.end(End.TRAINED, trained * row.record.tokens, None, groups=trained)
                    if record is None:
                        continue
                    group = prompts_of(row.group) if prompts_only else row.group
                    try:
                        group = await resolve_group(group)
                    except ReferenceLost as error:
                        lost[record.uid] = str(error)
                        account.end(End.FAILED, row.record.tokens, str(error))
                        continue
                    if prompts_only:
                        record = replace(record, status=Status.INIT, tokens=0)
                        account.reset_tokens += row.record.tokens
                    await chunks.add(encode_record(record), encode_group(group))
        if lost:
            await storage.fail(lost)
        await chunks.finish()
        if model_step is not None:
            for account in accounts.values():
                account.rewind(model_step)
        manifest = Manifest(
            next_uid=snapshot.next_uid,
            next_timestamp_id=snapshot.next_timestamp_id,
            accounts={task_name: encode_account(account) for task_name, account in accounts.items()},
            store_id=storage.store_id,
            model_step=model_step,
            replay_buffer_saved=not prompts_only,
            extra=content,
        )
        published = await in_thread(lambda: chunks.locked(lambda: writer.publish(manifest)))
    finally:
        await grace(start_thread(lambda: chunks.locked(writer.abort)))
    if model_step is not None:
        await storage.saved(model_step)
    log.info("checkpoint_saved path=%s model_step=%s groups=%d", directory, model_step, published.files[0].entries)
    return published


class _Chunks:
    """Entries that are encoded here while the ones before them are written in a thread."""

    def __init__(self, writer: CheckpointWriter) -> None:
        self._writer = writer
        self._entries: list[tuple[bytes, bytes]] = []
        self._bytes = 0
        self._writing: asyncio.Future[None] | None = None
        self._lock = threading.Lock()

    def locked(self, call: Callable[[], T]) -> T:
        """Call something of the writer when no thread uses it, also one that a cancelled save left behind."""
        with self._lock:
            return call()

    async def add(self, record: bytes, frame: bytes) -> None:
        self._entries.append((record, frame))
        self._bytes += len(record) + len(frame)
        if self._bytes >= _CHUNK_BYTES or len(self._entries) >= _CHUNK_GROUPS:
            await self._hand_over()

    async def finish(self) -> None:
        await self._hand_over()
        await self._hand_over()

    async def _hand_over(self) -> None:
        if self._writing is not None:
            await asyncio.shield(self._writing)
            self._writing = None
        if self._entries:
            entries, self._entries, self._bytes = self._entries, [], 0
            self._writing = start_thread(lambda: self.locked(lambda: self._write(entries)))
            self._writing.add_done_callback(_look_at)
        await asyncio.sleep(0)

    def _write(self, entries: list[tuple[bytes, bytes]]) -> None:
        for record, frame in entries:
            self._writer.write(record, frame)


def _look_at(writing: asyncio.Future[None]) -> None:
    """What ended a save says more than the write that failed because of it."""
    if not writing.cancelled():
        writing.exception()


# --- resume -------------------------------------------------------------------------------------------


async def resume_storage(storage: Storage, directory: str | PathLike[str], *, files: FileOps | None = None) -> Manifest:
    """Take up a checkpoint: into an empty storage, or by rewinding the very store that it was made from."""
    checkpoint = await in_thread(lambda: open_checkpoint(directory, files), undo=Checkpoint.close)
    try:
        manifest = checkpoint.manifest
        await in_thread(checkpoint.verify)
        if storage.store_id is not None and storage.store_id == manifest.store_id:
            if manifest.model_step is None:
                log.warning("checkpoint_without_weights path=%s the store is left as it is", directory)
            else:
                await _check_retained(storage, manifest, manifest.model_step)
                rewound = await storage.rewind(manifest.model_step)
                log.info("store_rewound path=%s model_step=%d %s", directory, manifest.model_step, rewound)
            return manifest
        present = (await storage.summary()).tasks
        if is_used({task_name: task.account for task_name, task in present.items()}):
            raise InvalidInput(
                f"the checkpoint at {directory} comes from another store, and this one has been used; resume into an "
                "empty one"
            )
        accounts = {task_name: decode_account(data) for task_name, data in manifest.accounts.items()}
        with as_values() if storage.durable else nullcontext():
            rows = _rows(checkpoint, accounts)
            await storage.restore(accounts, manifest.next_uid, manifest.next_timestamp_id, rows)
        log.info("checkpoint_resumed path=%s model_step=%s", directory, manifest.model_step)
        return manifest
    finally:
        checkpoint.close()


async def _check_retained(storage: Storage, manifest: Manifest, model_step: int) -> None:
    """CheckpointTooOld unless the store can bring back every group that was trained after the checkpoint.

    It has all that were trained for steps after its last save. For every other checkpoint, what counts as trained and
    would not come back must have been trained when the checkpoint was made.
    """
    summary = await storage.summary()  # before the records: what is acknowledged in between is among those only
    saved_step = summary.saved_step
    if saved_step == model_step:
        return
    archived = await storage.records(parse({"place": Place.ARCHIVED}), None)
    kept = Counter(r.task_name for r in archived if r.train_step is not None and r.train_step > model_step)
    dropped = {}
    for task_name, task in summary.tasks.items():
        saved = decode_account(manifest.accounts[task_name]) if task_name in manifest.accounts else Account()
        trained = task.account.ended.get(End.TRAINED, 0) - saved.ended.get(End.TRAINED, 0)
        if trained > kept[task_name]:
            dropped[task_name] = trained - kept[task_name]
    if dropped:
        listed = ", ".join(f"{groups} groups of task {task_name!r}" for task_name, groups in dropped.items())
        raise CheckpointTooOld(
            f"the checkpoint of model step {model_step} cannot be resumed into the store that it was made from: that "
            f"has dropped {listed}, which were trained after the checkpoint (last save: model step {saved_step}). "
            "Nothing was changed. Resume from a later checkpoint, or resume this one into an empty store; a store that "
            "is opened with a larger keep_trained from the beginning can go back further"
        )


async def _rows(checkpoint: Checkpoint, accounts: Mapping[str, Account]) -> AsyncIterator[Row]:
    entries = checkpoint.entries()

    prompts_only = not checkpoint.manifest.replay_buffer_saved

    def read() -> list[Row]:
        return [_row(record, frame, prompts_only) for record, frame in itertools.islice(entries, _READ_GROUPS)]

    while rows := await in_thread(read):
        for row in rows:
            yield row


def _row(data: bytes, frame: bytes, prompts_only: bool) -> Row:
    record, group = decode_record(data), decode_group(frame)
    if prompts_only:
        for state in group:
            state.tokens = state.prompt_ids  # as they were issued
    if record.place is not Place.BUFFERED:
        raise DamagedData(f"group {record.group_id} of task {record.task_name!r} is saved as {record.place}")
    return Row(_described(record, group), group)


def _described(record: Record, group: Group) -> Record:
    """The record with what follows from the samples computed from them."""
    facts = asdict(describe(group))
    del facts["response_bytes"]
    if record.status is Status.ABORTED and facts["status"] in (Status.INIT, Status.EXPIRED):
        facts["status"] = Status.ABORTED  # its producer went away; see `record.present`
    return replace(record, **facts)
