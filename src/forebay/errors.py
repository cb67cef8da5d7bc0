"""The exceptions of Forebay.

    ForebayError
    ├── InvalidInput (ValueError)      an argument cannot be right; nothing was changed
    │   ├── InvalidGroup               members that do not make a group: mixed, unequal lengths, bad ids
    │   │   └── DuplicateGroup         a group of this identity already exists
    │   ├── InvalidQuery               a query that names no field, no operator, or a wrong operand
    │   ├── InvalidConfig              settings that contradict each other, or that must deadlock
    │   ├── InvalidDataset             a data set that is empty, changed, or that cannot be drawn from
    │   │   ├── ChangedDataset         another data set than the one that the store or checkpoint was drawn from
    │   │   └── InvalidRecord          a record of a data set that makes no prompt; has its index
    │   ├── StoreAhead                 the store was trained further than the run that opens it
    │   ├── CheckpointTooOld           its store dropped groups that were trained after it
    │   ├── NameTaken                  a buffer of this name already exists
    │   ├── InvalidTrajectory          arrays that make no trajectory, or not one of the buffer's schema
    │   └── UnsupportedPayload         a value inside a sample that cannot be stored as plain data
    ├── CheckpointError                a file operation of a checkpoint failed; the earlier one is unchanged
    ├── DamagedData                    bytes that are not what they claim to be
    │   └── UnreadableData             intact, but this installation cannot read it: a newer version, a missing package
    ├── StorageError                   the storage could not do it: disk full, I/O error, server gone
    │   ├── StorageInUse               another process has it open for writing
    │   ├── StorageVanished            files of an open store were deleted, moved or replaced
    │   ├── StorageUnavailable         the server cannot be reached, or went away
    │   │   ├── NoCluster              Ray is not running, or this process has not joined it
    │   │   └── NoSuchBuffer           no buffer of this name is hosted in the cluster
    │   ├── BufferLost                 the actor that hosted it in memory died, and its groups with it
    │   ├── VersionMismatch            the other side runs another version of Forebay
    │   └── TooManyWaits               more calls wait at one host than it has places for
    ├── ReferenceLost                  a sample refers to a value that no longer exists
    ├── EngineError                    an inference server answered wrongly, or not at all
    │   └── EngineUnavailable          it cannot be used just now; no try is spent
    │       └── EngineRestarted        it may have lost the weights that it was given; push them again
    ├── ProduceError                   producing cannot continue; carries the last cause
    │   ├── TooManyFailures            too many groups in a row failed, without one success
    │   ├── TooManyRejections          too many groups in a row were filtered, without one success
    │   ├── RewardUnavailable          rewards or filters fail for every group; no try is spent
    │   └── ProducerStopped            no producer runs that could complete the batch
    ├── EndOfData                      a data set has no more prompts: all of its epochs were drawn
    ├── WeightsTooOld                  what the present weights generate is too old for the step; update them
    ├── RankFailed                     another rank of the trainer failed in a call that all ranks make
    ├── PolicyError                    a user's policy chose rows that it was not offered
    ├── WaitTimeout (TimeoutError)     a wait ran out of time; carries what it was waiting for
    ├── NoRoom                         the capacity is used up now; the buffer waits until some is free
    ├── LostLease                      the caller no longer holds the groups that it gives back
    ├── CursorMoved                    another producer drew from this task in between
    ├── EpochMoved                     a pause or a resume began that the producer has not followed yet
    ├── BufferClosed                   the buffer was closed
    └── WrongEventLoop                 used from another event loop than the one it belongs to

Every message says what was asked, what was found, and what to do about it.
"""

from __future__ import annotations

__all__ = [
    "BufferClosed",
    "BufferLost",
    "ChangedDataset",
    "CheckpointError",
    "CheckpointTooOld",
    "CursorMoved",
    "DamagedData",
    "DuplicateGroup",
    "EndOfData",
    "EngineError",
    "EngineRestarted",
    "EngineUnavailable",
    "EpochMoved",
    "ForebayError",
    "InvalidConfig",
    "InvalidDataset",
    "InvalidGroup",
    "InvalidInput",
    "InvalidQuery",
    "InvalidRecord",
    "InvalidTrajectory",
    "LostLease",
    "NameTaken",
    "NoCluster",
    "NoRoom",
    "NoSuchBuffer",
    "PolicyError",
    "ProduceError",
    "ProducerStopped",
    "RankFailed",
    "ReferenceLost",
    "RewardUnavailable",
    "StorageError",
    "StorageInUse",
    "StorageUnavailable",
    "StorageVanished",
    "StoreAhead",
    "TooManyFailures",
    "TooManyRejections",
    "TooManyWaits",
    "UnreadableData",
    "UnsupportedPayload",
    "VersionMismatch",
    "WaitTimeout",
    "WeightsTooOld",
    "WrongEventLoop",
]


class ForebayError(Exception):
    """Everything that Forebay raises on purpose."""


class InvalidInput(ForebayError, ValueError):
    """An argument cannot be right. Nothing was changed."""


class InvalidGroup(InvalidInput):
    """Samples that do not make a group."""


class DuplicateGroup(InvalidGroup):
    """A group of this task and group_id already exists, or has already ended."""


class InvalidQuery(InvalidInput):
    """A query that does not fit the schema of the records."""


class InvalidConfig(InvalidInput):
    """Settings that contradict each other, or under which a wait could never end."""


class InvalidDataset(InvalidInput):
    """A data set that is empty, has changed, or cannot be drawn from."""


class ChangedDataset(InvalidDataset):
    """A task has another data set than the one it was drawn from before. `changes`: field -> (was, is).

    `generation`: the generation of prompts (`Sampler.set_prompts`) that the store or the checkpoint is at.
    """

    def __init__(
        self, task_name: str, drawn: int, changes: dict[str, tuple[object, object]], generation: int = 0
    ) -> None:
        listed = "; ".join(f"{field} was {was}, is {now}" for field, (was, now) in changes.items())
        at, use = "", "the earlier data set and settings"
        if generation:
            at = f" (the store or checkpoint is at generation {generation} of its prompts, see set_prompts)"
            use = f"the data set and settings of generation {generation}"
        super().__init__(
            f"task {task_name!r} has another data set than the one its {drawn} groups were drawn from{at}: {listed}; "
            f"positions in it no longer mean the same records. Use {use}, give the task another name, or give its "
            "Task (or Sampler) allow_changed_data=True to continue with this one"
        )
        self.changes = changes
        self.generation = generation


class InvalidRecord(InvalidDataset):
    """A record of a data set makes no prompt. `index` says which one."""

    def __init__(self, index: int, problem: str) -> None:
        super().__init__(f"record {index} of the data set {problem}")
        self.index = index


class StoreAhead(InvalidInput):
    """The store handed out batches for later train steps than the one this run starts with. Nothing was changed."""


class CheckpointTooOld(InvalidInput):
    """The store that a checkpoint was made from has dropped groups that were trained after it. Nothing was changed."""


class NameTaken(InvalidInput):
    """A buffer of this name is already hosted in the cluster; `connect` to it, or choose another name."""


class InvalidTrajectory(InvalidInput):
    """Arrays that make no trajectory, or one that differs from those before it; names the field."""


class UnsupportedPayload(InvalidInput):
    """A value inside a sample is not plain data; the message has its path."""


class CheckpointError(ForebayError):
    """A file operation of a checkpoint failed. An earlier checkpoint at that path is unchanged.

    One exception: if the very last sync fails, the new checkpoint is in place and complete; the message says so.
    """


class DamagedData(ForebayError):
    """Bytes that are truncated, altered, foreign, or of a newer version. Nothing was taken from them."""


class UnreadableData(DamagedData):
    """Data that is intact, but that this installation cannot read. Use a newer Forebay, or install what is missing."""


class StorageError(ForebayError):
    """The storage could not do what was asked (disk full, I/O error, server gone). It was not half done."""


class StorageInUse(StorageError):
    """Another process has the store open for writing."""


class StorageVanished(StorageError):
    """Files of an open store were deleted, moved or replaced. Nothing was written; trajectories are still in memory."""


class StorageUnavailable(StorageError):
    """The database server cannot be reached, or went away. Try again when it is back."""


class NoCluster(StorageUnavailable):
    """Ray is not installed, not running, or this process has not joined a cluster."""


class NoSuchBuffer(StorageUnavailable):
    """No buffer of this name is hosted in the cluster: it was never created, or was destroyed."""


class BufferLost(StorageError):
    """The actor that hosted a buffer in memory died, and its groups with it.

    `lost`: groups by task that were in flight, buffered or leased then; `ledger()` books them as discarded.
    """

    def __init__(self, message: str, lost: dict[str, int]) -> None:
        super().__init__(message)
        self.lost = lost


class VersionMismatch(StorageError):
    """The host of a buffer and its client run different versions of Forebay; install the same one everywhere."""


class TooManyWaits(StorageError):
    """More calls wait at one host than it has places for; nothing was taken. Wait less, or create it with more."""


class ReferenceLost(ForebayError):
    """A sample refers to a value that no longer exists: its owner died, or no copy is left."""


class EngineError(ForebayError):
    """An inference server answered with an error, with something that is no answer, or not at all."""


class EngineUnavailable(EngineError):
    """An inference server cannot be used just now. Raised by an agent loop, it ends producing: the group goes back with
    its tokens and spends no try.
    """


class EngineRestarted(EngineUnavailable):
    """An inference server is not known to have the current weights. Nothing was lost: push the weights again."""


class ProduceError(ForebayError):
    """Producing cannot continue. Nothing was lost: all groups in flight are back in the buffer."""


class TooManyFailures(ProduceError):
    """Too many groups in a row failed, without one success: the run would continue to fail."""


class RewardUnavailable(ProduceError):
    """Rewards or filters have failed for every group for `judge_give_up_s`. The groups return to the buffer with their
    responses, which are only judged again, and spend no try. Produce again when the reward works.
    """


class TooManyRejections(ProduceError):
    """Too many groups in a row were filtered, without one success: the batch would never fill."""


class ProducerStopped(ProduceError):
    """The batch is incomplete, and no producer runs: it failed, ended, or was never started."""


class WeightsTooOld(ForebayError):
    """What the weights of `model_step` generate is too old for train step `step`. Update them, and ask again."""

    def __init__(self, step: int, model_step: int, reason: str) -> None:
        super().__init__(
            f"there is no batch for train step {step}: what the weights of step {model_step} generate is too old for "
            f"it ({reason}); update the weights, and ask for step {step} again"
        )
        self.step = step
        self.model_step = model_step


class EndOfData(ForebayError):
    """All epochs of the data sets were drawn, and no group waits for a retry. Nothing was drawn or leased."""

    @classmethod
    def of(cls, task_name: str, records: int, epochs: int) -> EndOfData:
        """The error for one task."""
        return cls(
            f"task {task_name!r} has no prompt left: {records} records were drawn, which is all of {epochs} "
            f"{'epoch' if epochs == 1 else 'epochs'}; raise epochs, or give it more prompts with set_prompts"
        )


class RankFailed(ForebayError):
    """Another rank of the trainer failed in a call that all ranks make together."""


class PolicyError(ForebayError):
    """`choose` of a user's policy returned something other than a choice among its rows."""


class WaitTimeout(ForebayError, TimeoutError):
    """A wait ran out of time; nothing was taken. `explanation` is what `explain_wait()` said then."""

    def __init__(self, what: str, timeout_s: float, explanation: str) -> None:
        super().__init__(f"{what}: not within {timeout_s:g} s\n{explanation}")
        self.timeout_s = timeout_s
        self.explanation = explanation


class NoRoom(ForebayError):
    """The capacity is used up. Only storages raise this; the buffer waits until capacity is free.

    `groups` and `bytes`: the size of the groups that do not fit.
    """

    def __init__(self, message: str, groups: int, size: int) -> None:
        super().__init__(message)
        self.groups = groups
        self.bytes = size


class LostLease(ForebayError):
    """The caller no longer holds the groups that it gives back. Drop the work: another owner has them."""


class CursorMoved(ForebayError):
    """Another producer drew from the task in between; `cursor` is its position now."""

    def __init__(self, task_name: str, expected: int, cursor: int) -> None:
        super().__init__(
            f"task {task_name!r} was to be drawn at group {expected}, but its position is {cursor}: "
            "another producer drew from it; build the prompts for the new position and try again"
        )
        self.task_name = task_name
        self.cursor = cursor


class EpochMoved(ForebayError):
    """A pause or a resume began since the producer last looked; `epoch` is that of the task now."""

    def __init__(self, task_name: str, expected: int, epoch: int) -> None:
        super().__init__(
            f"groups of task {task_name!r} were to be drawn in epoch {expected}, but it is in epoch {epoch}: a pause "
            "or a resume began meanwhile; follow it, and draw again"
        )
        self.task_name = task_name
        self.epoch = epoch


class BufferClosed(ForebayError):
    """The buffer was closed while, or before, it was used."""


class WrongEventLoop(ForebayError):
    """A buffer belongs to one event loop at a time; `forebay.blocking` serves other threads."""
