"""Saving a storage into a checkpoint directory, and resuming from one (G4, G8).

A checkpoint belongs to the weights of `model_step`: groups leased for a step that these weights already contain are
saved as trained; groups of later leases, and groups in flight, are saved to be handed out again. Saving streams a
snapshot of one moment while producers and trainers continue: memory does not grow with the buffer, files are written
in a thread, and the event loop stays free.

A checkpoint holds the values of references, never references: each value once per group, even if members share it.
Resuming into a storage that keeps references puts each value back once, owned by the resuming process; groups that
shared a value then have one each. A group whose value is lost ends as failed, in the storage and in the checkpoint.

All checksums are verified before a resume changes anything; `checkpoint.format` decodes what was saved.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import aclosing, nullcontext
from os import PathLike
from typing import Any

from msgspec.structs import replace

from forebay.checkpoint.files import FileOps
from forebay.checkpoint.format import (
    Checkpoint,
    CheckpointWriter,
    Manifest,
    open_checkpoint,
    saved_accounts,
    saved_rows,
)
from forebay.codec.frame import encode_group
from forebay.codec.records import encode_account, encode_record
from forebay.core.aio import grace, ignore_exception, in_thread, start_thread
from forebay.core.ledger import Account, End, Place, Record, Row
from forebay.core.query import parse
from forebay.core.references import as_values, resolve_group
from forebay.core.rollout import Group, RolloutState, Status, group_status, reset_response
from forebay.errors import CheckpointTooOld, InvalidInput, ReferenceLost
from forebay.storage.base import Storage
from forebay.storage.rules import is_used

log = logging.getLogger(__name__)

_CHUNK_BYTES = 2 * 2**20
_CHUNK_GROUPS = 64
_READ_GROUPS = 16


# --- save ---------------------------------------------------------------------------------------------


def _as_saved(row: Row, model_step: int | None) -> tuple[Record | None, int]:
    """The record that a row is saved as (None: it is not saved), and the trained groups to add to its account.

    `model_step` None: the weights are unknown, so no leased group counts as trained.
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


def _prompts_of(group: Group) -> Group:
    """The prompts of a group, one per rollout, as they were issued; `num_tries` is kept."""
    issued: dict[object, RolloutState] = {}
    for index, state in enumerate(group):
        rollout: object = index if state.rollout_id is None else ("rollout", state.rollout_id)
        if rollout not in issued or state.segment < issued[rollout].segment:
            issued[rollout] = state
    prompts = []
    for state in issued.values():
        prompt = reset_response(state)
        prompt.status = Status.INIT
        prompt.tokens = None  # one more copy of the prompt per member; `saved_rows` lets them share it again
        prompts.append(prompt)
    return tuple(prompts)


async def save_storage(
    storage: Storage,
    directory: str | PathLike[str],
    *,
    model_step: int | None,
    extra: Callable[[], Mapping[str, Any]] = dict,
    prompts_only: bool = False,
    files: FileOps | None = None,
    tasks: Collection[str] | None = None,
) -> Manifest:
    """Write a checkpoint; an existing one stays until the new one is complete.

    `extra` is called right before the snapshot, so that it describes the same moment. `prompts_only`: without
    responses. `tasks`: those that belong to these weights, if not all do. Waits for the values of references that are
    still being produced.
    """
    writer = await in_thread(lambda: CheckpointWriter(directory, files), undo=CheckpointWriter.abort)
    chunks = _Chunks(writer)
    try:
        if model_step is not None:
            summary = await storage.summary(tasks or ())
            steps = [summary.task(task_name).saved_step(summary.saved_step) for task_name in tasks or ("",)]
            if any(step is None or step > model_step for step in steps):
                await storage.saved(
                    model_step, tasks
                )  # from now on it keeps groups that are acknowledged for later steps
        content = dict(extra())
        snapshot = await storage.snapshot()
        accounts = dict(snapshot.accounts)
        lost: dict[int, str] = {}
        with as_values():  # groups that are decoded here are only encoded again
            async with aclosing(snapshot.rows) as rows:
                async for row in rows:
                    record, trained = _as_saved(row, model_step)
                    account = accounts[row.record.task_name]
                    if trained:
                        account.end(End.TRAINED, trained * row.record.tokens, None, groups=trained)
                    if record is None:
                        continue
                    group = _prompts_of(row.group) if prompts_only else row.group
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
        published = await in_thread(lambda: writer.publish(manifest))
    finally:
        await grace(start_thread(writer.abort))
    if model_step is not None:
        await storage.saved(model_step, tasks)
    log.info("checkpoint_saved path=%s model_step=%s groups=%d", directory, model_step, published.files[0].entries)
    return published


class _Chunks:
    """Collects encoded entries while a thread writes the entries before them."""

    def __init__(self, writer: CheckpointWriter) -> None:
        self._writer = writer
        self._entries: list[tuple[bytes, bytes]] = []
        self._bytes = 0
        self._writing: asyncio.Future[None] | None = None

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
            self._writing = start_thread(lambda: self._writer.write(entries))
            self._writing.add_done_callback(ignore_exception)  # the error that ended the save is the one to report
        await asyncio.sleep(0)


# --- resume -------------------------------------------------------------------------------------------


async def resume_storage(
    storage: Storage,
    directory: str | PathLike[str],
    *,
    files: FileOps | None = None,
    tasks: Collection[str] | None = None,
) -> Manifest:
    """Resume a checkpoint: into an empty storage, or by rewinding (these tasks of) the store that it was made from."""
    checkpoint = await in_thread(lambda: open_checkpoint(directory, files), undo=Checkpoint.close)
    try:
        manifest = checkpoint.manifest
        await in_thread(checkpoint.verify)
        if storage.store_id is not None and storage.store_id == manifest.store_id:
            if manifest.model_step is None:
                log.warning("checkpoint_without_weights path=%s: the store is not changed", directory)
            else:
                await _check_retained(storage, manifest, manifest.model_step, tasks)
                rewound = await storage.rewind(manifest.model_step, tasks)
                log.info("store_rewound path=%s model_step=%d %s", directory, manifest.model_step, rewound)
            return manifest
        present = (await storage.summary()).tasks
        if is_used({task_name: task.account for task_name, task in present.items()}):
            raise InvalidInput(
                f"the checkpoint at {directory} comes from another store, and this store is not empty; resume into "
                "an empty one"
            )
        accounts = saved_accounts(manifest)
        with as_values() if storage.durable else nullcontext():
            await storage.restore(accounts, manifest.next_uid, manifest.next_timestamp_id, _rows(checkpoint))
        log.info("checkpoint_resumed path=%s model_step=%s", directory, manifest.model_step)
        return manifest
    finally:
        checkpoint.close()


async def _check_retained(storage: Storage, manifest: Manifest, model_step: int, tasks: Collection[str] | None) -> None:
    """CheckpointTooOld unless the store still has every group that was trained after the checkpoint.

    A store keeps all groups that were trained after its last save. For an older checkpoint, each group that counts as
    trained and is no longer kept must have been trained before the checkpoint was made.
    """
    summary = await storage.summary(tasks)  # before the records: what is acknowledged in between is among those only
    steps = {task.saved_step(summary.saved_step) for task in summary.tasks.values()} or {summary.saved_step}
    if steps == {model_step}:
        return
    saved_step = next(iter(steps))
    saved = saved_accounts(manifest)
    archived = await storage.records(parse({"place": Place.ARCHIVED}), None)
    kept = Counter(r.task_name for r in archived if r.train_step is not None and r.train_step > model_step)
    dropped = {}
    for task_name, task in summary.tasks.items():
        before = saved.get(task_name, Account())
        trained = task.account.ended.get(End.TRAINED, 0) - before.ended.get(End.TRAINED, 0)
        if trained > kept[task_name]:
            dropped[task_name] = trained - kept[task_name]
    if dropped:
        listed = ", ".join(f"{groups} groups of task {task_name!r}" for task_name, groups in dropped.items())
        raise CheckpointTooOld(
            f"the checkpoint of model step {model_step} cannot be resumed into the store that it was made from: the "
            f"store has dropped {listed}, which were trained after the checkpoint (last save: model step "
            f"{saved_step}). Nothing was changed. Resume a later checkpoint, or resume this one into an empty store; a "
            "store that always had a larger keep_trained can be rewound further"
        )


async def _rows(checkpoint: Checkpoint) -> AsyncIterator[Row]:
    rows = saved_rows(checkpoint)
    while some := await in_thread(lambda: list(itertools.islice(rows, _READ_GROUPS))):
        for row in some:
            yield row
