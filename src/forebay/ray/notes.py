"""What is known of a buffer when the actor that hosted it is gone: its ledger, noted where the cluster keeps its own.

A host that has everything in memory writes down how its ledger stands after every change, in a thread of its own, so
the note may be some 50 ms older than the last answer; a client that saw a newer answer knows better (`Stand`).
When the actor is lost, its clients say from this how many groups were lost, and `ledger()` books them as discarded.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

import msgspec
from msgspec.structs import replace
from ray.experimental import internal_kv

from forebay.core.ledger import Account, End, Place
from forebay.ray.wire import Stand

__all__ = ["LOST_REASON", "Note", "NoteWriter", "forget_notes", "last_actor", "read_note", "write_actor"]

log = logging.getLogger(__name__)

LOST_REASON = "lost with the actor that hosted it"

_NAMESPACE = b"forebay"
_PAUSE_S = 0.05
_HELD = (str(Place.IN_FLIGHT), str(Place.BUFFERED), str(Place.LEASED))


class Note(msgspec.Struct, frozen=True):
    """How a ledger stood after so many changes, in groups and in tokens, and why groups had ended."""

    version: int
    lines: dict[str, dict[str, int]]
    tokens: dict[str, dict[str, int]]
    reasons: dict[str, dict[str, int]]

    def with_stand(self, stand: Stand | None) -> Note:
        """The note with what an answer said, if that was later."""
        return self if stand is None or stand.version < self.version else replace(self, lines=stand.lines)

    def lost(self) -> dict[str, int]:
        """Groups by task that were not at their end."""
        counted = {task_name: sum(line[place] for place in _HELD) for task_name, line in self.lines.items()}
        return {task_name: groups for task_name, groups in counted.items() if groups}

    def ledger(self, *, tokens: bool) -> dict[str, dict[str, int]]:
        """The ledger with what was lost booked as discarded; it closes (G1)."""
        return {name: _booked_out(line) for name, line in (self.tokens if tokens else self.lines).items()}

    def accounts(self) -> dict[str, Account]:
        """Accounts that say the same."""
        found = {}
        lost = self.lost()
        for task_name, line in self.ledger(tokens=False).items():
            tokens = self.ledger(tokens=True).get(task_name, {})
            reasons = dict(self.reasons.get(task_name, {}))
            if task_name in lost:
                reasons[LOST_REASON] = reasons.get(LOST_REASON, 0) + lost[task_name]
            found[task_name] = Account(
                issued=line["issued"],
                issued_tokens=tokens.get("issued", 0),
                reset_tokens=tokens.get("reset", 0),
                ended={end: line[end] for end in End},
                ended_tokens={end: tokens.get(end, 0) for end in End},
                reasons=reasons,
            )
        return found


def _booked_out(line: Mapping[str, int]) -> dict[str, int]:
    lost = sum(line[place] for place in _HELD)
    return {**line, **dict.fromkeys(_HELD, 0), "discarded": line["discarded"] + lost}


class NoteWriter:
    """Writes the latest note of one actor whenever it is told of a change; `read` says how things stand."""

    def __init__(self, actor_id: str, read: Callable[[], Note]) -> None:
        self._key = _note_key(actor_id)
        self._read = read
        self._news = threading.Event()
        self._ended = False
        self._writing = threading.Lock()
        threading.Thread(target=self._run, name="forebay-notes", daemon=True).start()

    def changed(self) -> None:
        self._news.set()

    def end(self) -> None:
        """Write no more: what was written is about to be removed."""
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
                # The buffer works without it; only what is said after a loss would be older.
                log.warning("note_failed", exc_info=True)
            time.sleep(_PAUSE_S)


def _note_key(actor_id: str) -> bytes:
    return f"note/{actor_id}".encode()


def _name_key(name: str) -> bytes:
    return f"name/{name}".encode()


def read_note(actor_id: str) -> Note | None:
    """The last note of an actor, if it wrote one."""
    data = internal_kv._internal_kv_get(_note_key(actor_id), namespace=_NAMESPACE)
    return None if data is None else msgspec.msgpack.decode(data, type=Note)


def write_actor(name: str, actor_id: str) -> None:
    """Which actor hosts a name now."""
    internal_kv._internal_kv_put(_name_key(name), actor_id.encode(), overwrite=True, namespace=_NAMESPACE)


def last_actor(name: str) -> str | None:
    """Which actor hosted a name last."""
    data = internal_kv._internal_kv_get(_name_key(name), namespace=_NAMESPACE)
    return None if data is None else bytes(data).decode()


def forget_notes(name: str) -> None:
    """A name was given up on purpose: nothing was lost."""
    actor_id = last_actor(name)
    if actor_id is not None:
        internal_kv._internal_kv_del(_note_key(actor_id), namespace=_NAMESPACE)
        internal_kv._internal_kv_del(_name_key(name), namespace=_NAMESPACE)
