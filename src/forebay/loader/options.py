"""The arguments of a loader, in one place: for `AsyncRolloutLoader`, `RolloutLoader` and `connect`."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from os import PathLike
from typing import TypedDict

from forebay.buffer.group_ends import OnGroupEnd
from forebay.loader.functions import Hook
from forebay.loader.plane import Mode
from forebay.loader.progress import ShowProgress
from forebay.loader.store import StorageLike


class LoaderOptions(TypedDict, total=False):
    """What a loader takes beside its tasks.

    - `batch_groups`: groups of a step, over all tasks; or `batch_tokens`: a step is filled up to so many tokens.
    - `max_staleness`, `max_token_staleness`: how many weight updates old a group, or a token, may be; 0 is on-policy.
    - `mode`: "in_turns" (generate, then train; the default on-policy) or "ahead" (the default otherwise).
      `sync_weights_interval`: steps that share one weight update.
    - `storage`: a URL ("memory", "sqlite:///run.db", "postgresql://..."), a storage, a buffer (such as a
      `RayReplayBuffer`) or its config. `max_groups` and `max_bytes` bound it.
    - `checkpoints`: the directory for `save` and `resume`; the last `keep_checkpoints` are kept.
    - `epochs`: passes over the prompts, after which the loop ends; the last batch may be smaller, unless `drop_last`.
    - `timeout_s`: how long a batch is waited for; WaitTimeout explains what was missing.
    - `on_generate`, `on_train`: called before generating and before training, in turns; for engines on the devices of
      the trainer (wake, sleep). Plain or async.
    - `on_group_end`: gets a `GroupEnd` for every group that leaves for good. `progress`: gets a `StepProgress` while a
      batch is waited for; by default a live line on a terminal; None shows nothing.
    - `produce`: False if other processes produce for this trainer (`forebay produce`).
    - `stop_on`: signals that end the loop after the current batch.
    - `storage_retry_s`: how long an outage of the storage may last before it is an error.
    """

    batch_groups: int | None
    batch_tokens: int | None
    max_staleness: int
    max_token_staleness: int | None
    mode: Mode | None
    sync_weights_interval: int
    storage: StorageLike
    max_groups: int | None
    max_bytes: int | None
    checkpoints: str | PathLike[str] | None
    keep_checkpoints: int
    epochs: int | None
    drop_last: bool
    timeout_s: float
    on_generate: Hook | None
    on_train: Hook | None
    on_group_end: OnGroupEnd | None
    progress: ShowProgress | None
    produce: bool
    stop_on: Sequence[signal.Signals]
    storage_retry_s: float
