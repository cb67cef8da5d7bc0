"""The contents of a checkpoint of groups: accounts and rows, decoded; and the check that it can be resumed.

Nothing is trusted: what a record says about its group is computed again from the group. A checkpoint that
`check_contents` accepts can be resumed: every checksum matches, every record and group decodes, and the ledgers close.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec
from msgspec.structs import asdict, replace

from forebay.checkpoint.format import Checkpoint, Manifest
from forebay.codec.frame import decode_group
from forebay.codec.records import decode_account, decode_record
from forebay.core.ledger import Account, Place, Record, Row, describe, open_ledger
from forebay.core.references import as_values
from forebay.core.report import Progress, Steps
from forebay.core.rollout import Group, Status
from forebay.errors import DamagedData

__all__ = ["Contents", "check_contents", "saved_accounts", "saved_rows"]


def saved_accounts(manifest: Manifest) -> dict[str, Account]:
    """The account of each task."""
    return {task_name: decode_account(data) for task_name, data in manifest.accounts.items()}


def saved_rows(checkpoint: Checkpoint) -> Iterator[Row]:
    """The groups and their records, in the order of their uids; DamagedData names the group that cannot be read."""
    prompts_only = not checkpoint.manifest.replay_buffer_saved
    for data, frame in checkpoint.entries():
        record = decode_record(data)
        try:
            group = decode_group(frame)
        except DamagedData as error:
            raise type(error)(f"{_name(record)}: {error}") from None
        if record.place is not Place.BUFFERED:
            raise DamagedData(f"{_name(record)} is saved as {record.place}; a checkpoint holds buffered groups only")
        if prompts_only:
            for state in group:
                state.tokens = state.prompt_ids  # as they were issued
        yield Row(_described(record, group), group)


def _described(record: Record, group: Group) -> Record:
    facts = asdict(describe(group))
    del facts["response_bytes"]
    if record.status is Status.ABORTED and facts["status"] in (Status.INIT, Status.EXPIRED):
        facts["status"] = Status.ABORTED  # its producer ended; see `record.present`
    return replace(record, **facts)


def _name(record: Record) -> str:
    return f"group {record.group_id} of task {record.task_name!r} (uid {record.uid})"


class Contents(msgspec.Struct):
    """The sums over all groups of a checkpoint, by task."""

    groups: Counter[str]
    tokens: Counter[str]
    statuses: dict[str, Counter[str]]


def check_contents(checkpoint: Checkpoint, progress: Progress | None = None) -> Contents:
    """Read everything and check that it can be resumed; DamagedData says why not. One group in memory at a time."""
    manifest = checkpoint.manifest
    accounts = saved_accounts(manifest)
    contents = Contents(Counter(), Counter(), {task_name: Counter() for task_name in accounts})
    steps = Steps(progress, checkpoint.file.entries)
    seen: set[tuple[str, int]] = set()
    last_uid = 0
    with as_values():
        for row in saved_rows(checkpoint):
            record = row.record
            if not last_uid < record.uid < manifest.next_uid or record.timestamp_id >= manifest.next_timestamp_id:
                raise DamagedData(f"{_name(record)} does not follow uid {last_uid} below {manifest.next_uid}")
            if (record.task_name, record.group_id) in seen:
                raise DamagedData(f"{_name(record)} appears twice in the checkpoint")
            if record.task_name not in accounts:
                raise DamagedData(f"{_name(record)} belongs to a task that has no account")
            seen.add((record.task_name, record.group_id))
            last_uid = record.uid
            contents.groups[record.task_name] += 1
            contents.tokens[record.task_name] += record.tokens
            contents.statuses[record.task_name][str(record.status)] += 1
            steps.more()
    for task_name, account in accounts.items():
        groups, tokens = ({Place.BUFFERED: count[task_name]} for count in (contents.groups, contents.tokens))
        for problem in open_ledger(account, groups, tokens, task_name):
            raise DamagedData(f"the ledger does not close: {problem}")
    return contents
