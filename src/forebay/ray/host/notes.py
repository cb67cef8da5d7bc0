"""The last known ledger of a buffer whose actor died, kept in the cluster's own key-value store.

A host in memory writes its ledger down after every change, in a dedicated thread, so the note may be some 50 ms older
than the last answer; a client that saw a newer answer uses that (`wire.Stand`). When the actor is lost, its clients
report from this how many groups were lost, and `ledger()` books them as discarded.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

import msgspec
from msgspec.structs import replace
from ray.experimental import internal_kv

from forebay.core.capacity import Usage
from forebay.core.ledger import End, Place
from forebay.ray.wire import Stand
from forebay.storage.base import Summary, TaskSummary
from forebay.storage.rules import copied

log = logging.getLogger(__name__)

LOST_REASON = "lost with the actor that hosted it"

_NAMESPACE = b"forebay"
_PAUSE_S = 0.05
_HELD = (Place.IN_FLIGHT, Place.BUFFERED, Place.LEASED)


class Note(msgspec.Struct, frozen=True):
    """The figures of all tasks after a number of changes."""

    version: int
    tasks: Mapping[str, TaskSummary]

    def with_stand(self, stand: Stand | None) -> Note:
        """The note with the ledger of an answer, if that is newer."""
        if stand is None or stand.version < self.version:
            return self
        empty = TaskSummary()
        return Note(stand.version, {name: _at(self.tasks.get(name, empty), line) for name, line in stand.lines.items()})

    def lost(self) -> dict[str, int]:
        """Groups by task that had not ended."""
        counted = {task_name: _held(task.places) for task_name, task in self.tasks.items()}
        return {task_name: groups for task_name, groups in counted.items() if groups}

    def summary(self) -> Summary:
        """The figures with all lost groups booked as discarded; the ledger closes (G1)."""
        tasks = {}
        for task_name, task in self.tasks.items():
            account = copied(task.account)
            account.end(End.DISCARDED, _held(task.place_tokens), LOST_REASON, groups=_held(task.places))
            tasks[task_name] = TaskSummary(account)
        return Summary(tasks, Usage(0, 0, 0))


def _held(places: Mapping[Place, int]) -> int:
    return sum(places.get(place, 0) for place in _HELD)


def _at(task: TaskSummary, line: Mapping[str, int]) -> TaskSummary:
    account = replace(task.account, issued=line["issued"], ended={end: line[end] for end in End})
    return replace(task, account=account, places={place: line[place] for place in _HELD})


class NoteWriter:
    """Writes the latest note of one actor whenever something changed; `read` returns it."""

    def __init__(self, actor_id: str, read: Callable[[], Note]) -> None:
        self._key = _key("note", actor_id)
        self._read = read
        self._news = threading.Event()
        self._ended = False
        self._writing = threading.Lock()
        threading.Thread(target=self._run, name="forebay-notes", daemon=True).start()

    def changed(self) -> None:
        self._news.set()

    def end(self) -> None:
        """Stop writing: the note is about to be removed."""
        with self._writing:
            self._ended = True

    def _run(self) -> None:
        while not self._ended:
            self._news.wait()
            self._news.clear()
            try:
                data = msgspec.msgpack.encode(self._read())
                with self._writing:
                    if not self._ended:
                        internal_kv._internal_kv_put(self._key, data, overwrite=True, namespace=_NAMESPACE)
            except Exception:
                # The buffer works without it; only the numbers after a loss would be older.
                log.warning("note_failed", exc_info=True)
            time.sleep(_PAUSE_S)


def _key(kind: str, name: str) -> bytes:
    return f"{kind}/{name}".encode()


def read_note(actor_id: str) -> Note | None:
    """The last note of an actor, if it wrote one."""
    data = internal_kv._internal_kv_get(_key("note", actor_id), namespace=_NAMESPACE)
    return None if data is None else msgspec.msgpack.decode(data, type=Note)


def write_actor(name: str, actor_id: str) -> None:
    """Write down which actor hosts a name."""
    internal_kv._internal_kv_put(_key("name", name), actor_id.encode(), overwrite=True, namespace=_NAMESPACE)


def last_actor(name: str) -> str | None:
    """The actor that hosted a name last."""
    data = internal_kv._internal_kv_get(_key("name", name), namespace=_NAMESPACE)
    return None if data is None else bytes(data).decode()


def forget_notes(name: str) -> None:
    """Remove the notes of a buffer that was destroyed on purpose: nothing was lost."""
    actor_id = last_actor(name)
    if actor_id is not None:
        internal_kv._internal_kv_del(_key("note", actor_id), namespace=_NAMESPACE)
        internal_kv._internal_kv_del(_key("name", name), namespace=_NAMESPACE)
