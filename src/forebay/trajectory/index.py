"""What is in the window, and how a number drawn at random becomes a step of it.

Trajectories and their runs of steps are kept in *tapes*: parallel arrays that are appended to at the end and forgotten
at the front. What a reader got of a tape is never moved under it: a tape that grows is copied to new arrays. So a
snapshot costs nothing, and a draw is a search in one sorted array, however many trajectories there are. A run is a
stretch of rows of which each may be drawn; a chain is a stretch in which each step continues into the next.

All methods are called under the buffer's lock; `Drawn.rows` is not, and needs none.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np

from forebay.errors import InvalidInput
from forebay.trajectory.listing import ROW, Listing, Row

__all__ = ["Drawn", "Index", "Rows", "Tape"]

Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

_MAX_LENGTHS = 8  # sequence lengths whose sums are kept


class Tape:
    """Parallel arrays whose elements have a number that never changes; live are those from `first` up to `end`."""

    def __init__(self, **columns: Any) -> None:
        self._names = tuple(columns)
        self._size = 64
        self._arrays = [np.empty(self._size, dtype) for dtype in columns.values()]
        # Records as plain bytes: numpy copies them field by field otherwise.
        self._plain = [np.dtype(f"V{array.itemsize}") if array.dtype.names else None for array in self._arrays]
        self._offset = 0  # the number of the first element of the arrays
        self.first = self.end = 0

    def append(self, count: int, *values: Any) -> None:
        """Add elements; values are in the order of the columns."""
        start = self.end - self._offset
        if start + count > self._size:
            start = self._grow(count)
        for array, plain, value in zip(self._arrays, self._plain, values, strict=True):
            if plain is None:
                array[start : start + count] = value
            else:
                array.view(plain)[start : start + count] = value.view(plain)
        self.end += count

    def _grow(self, count: int) -> int:
        """New arrays with the live elements at their start; where the next one goes."""
        live = slice(self.first - self._offset, self.end - self._offset)
        size = self.end - self.first
        self._size = max(2 * (size + count), 64)
        for k, old in enumerate(self._arrays):
            new = np.empty(self._size, old.dtype)
            new[:size] = old[live]
            self._arrays[k] = new
        self._offset = self.first
        return size

    def start_at(self, number: int) -> None:
        """Forget everything; the next element gets this number, in other arrays: these may be read by somebody."""
        self._size = 0
        self.first = self.end = self._offset = number

    def forget(self, until: int) -> None:
        self.first = until

    def column(self, name: str) -> np.ndarray[Any, Any]:
        """The live elements; the view stays right for who holds it."""
        return self._arrays[self._names.index(name)][self.first - self._offset : self.end - self._offset]

    def __len__(self) -> int:
        return self.end - self.first


class Rows(NamedTuple):
    """Drawn steps: which they are, and where their rows are."""

    trajectory_id: Numbers
    step: Numbers
    env: Numbers
    age: Numbers
    row: Numbers
    observation: Numbers
    """The row of the observation."""
    first_observation: Numbers
    last_observation: Numbers
    """Between these two is every observation of the trajectory; nothing read from a file leads outside."""
    texts: Numbers
    """What is added to the codes of texts."""


class Drawn(NamedTuple):
    """Random numbers, and what of the index is needed to make steps of them."""

    numbers: Numbers
    until: Numbers
    weight: Numbers
    slot: Numbers
    local: Numbers
    slots: np.ndarray[Any, Any]
    first_slot: int

    def rows(self, length: int | None) -> Rows:
        run = np.searchsorted(self.until, self.numbers, side="right")
        local = self.local[run] + (self.numbers - (self.until[run] - self.weight[run]))
        slot = self.slot[run] - self.first_slot
        age = len(self.slots) - 1 - slot
        if length is not None:
            local = (local[:, None] + np.arange(length)).reshape(-1)
            slot, age = np.repeat(slot, length), np.repeat(age, length)
        slots = np.take(self.slots, slot, mode="clip")  # ten times as fast as indexing an array of records
        steps = slots["steps"]
        env = local // steps
        first = slots["first_observation"]
        return Rows(
            slots["id"],
            local - env * steps,
            env,
            age,
            slots["first_step"] + local,
            first + local,
            first,
            first + slots["observations"] - 1,
            slots["texts"],
        )


class _Runs:
    """Stretches of rows, with sums of how many draws each is worth."""

    def __init__(self) -> None:
        self.tape = Tape(slot="i8", local="i8", length="i8")
        self._sums: dict[int, Tape] = {}

    def append(self, slots: int | np.ndarray[Any, Any], runs: np.ndarray[Any, Any]) -> None:
        if len(runs) == 1:
            (local, length) = runs[0].tolist()
            self.tape.append(1, slots, local, length)
        else:
            self.tape.append(len(runs), slots, runs[:, 0], runs[:, 1])

    def listed(self) -> np.ndarray[Any, Any]:
        """All of them, as a listing has them."""
        return np.stack((self.tape.column("local"), self.tape.column("length")), axis=1)

    def forget(self, count: int) -> None:
        """The oldest so many."""
        first = self.tape.first + count
        self.tape.forget(first)
        for sums in self._sums.values():
            if sums.end < first:  # it was not used for a while
                sums.start_at(first)
            else:
                sums.forget(first)

    def sums(self, length: int) -> Tape:
        """By run: how many starts of `length` steps there are up to and with it, and in it."""
        tape = self._sums.pop(length, None)
        if tape is None:
            tape = Tape(until="i8", weight="i8")
            tape.start_at(self.tape.first)
            while len(self._sums) >= _MAX_LENGTHS:
                del self._sums[next(iter(self._sums))]
        self._sums[length] = tape  # the last used is the last to go
        if tape.end < self.tape.end:
            new = self.tape.column("length")[tape.end - self.tape.first :]
            weight = np.maximum(new - (length - 1), 0)
            before = tape.column("until")[-1] if len(tape) else 0
            tape.append(len(new), before + np.cumsum(weight), weight)
        return tape


class Index:
    """The trajectories of the window, oldest first."""

    def __init__(self) -> None:
        self.slots = Tape(row=ROW)
        self._runs, self._chains = _Runs(), _Runs()
        self.transitions = 0

    def __len__(self) -> int:
        return len(self.slots)

    def append(self, listing: Listing) -> int:
        """Add the newest trajectories, which are where their rows say; the number of the first slot."""
        number, rows = self.slots.end, listing.rows
        self.slots.append(len(rows), rows)
        runs: int | np.ndarray[Any, Any]
        chains: int | np.ndarray[Any, Any]
        if len(rows) == 1:
            runs = chains = number
        else:
            slots = np.arange(number, number + len(rows))
            runs, chains = np.repeat(slots, rows["runs"]), np.repeat(slots, rows["chains"])
        self._runs.append(runs, listing.runs)
        self._chains.append(chains, listing.chains)
        self.transitions += int(rows["transitions"].sum())
        return number

    def listing(self) -> Listing:
        """What is in the window, in a copy."""
        return Listing(self.rows.copy(), self._runs.listed(), self._chains.listed())

    @property
    def rows(self) -> np.ndarray[Any, Any]:
        """The trajectories as a listing has them, with absolute rows; changing one moves it for later readers."""
        return self.slots.column("row")

    def forget_oldest(self) -> Row:
        """Take the oldest trajectory out; its row."""
        first = self.slots.first
        gone = Row(*self.rows[0].item())
        self.slots.forget(first + 1)
        self._runs.forget(gone.runs)
        self._chains.forget(gone.chains)
        self.transitions -= gone.transitions
        return gone

    def draw(self, count: int, length: int | None, replace: bool, random: np.random.Generator) -> Drawn:
        """Draw steps, or starts of `length` steps, uniformly; InvalidInput says what is there if that cannot be."""
        runs = self._runs if length is None else self._chains
        sums = runs.sums(1 if length is None else length)
        until, weight = sums.column("until"), sums.column("weight")
        before = int(until[0] - weight[0]) if len(until) else 0
        total = int(until[-1]) - before if len(until) else 0
        if not total:
            what = "transitions" if length is None else f"runs of {length} continuing steps"
            raise InvalidInput(
                f"{count} {what} were asked for, and there are none: the window has {len(self.slots)} trajectories "
                f"with {self.transitions} transitions to draw"
            )
        if replace:
            numbers = random.integers(before, before + total, count)
        elif count > total:
            raise InvalidInput(
                f"{count} different rows were asked for; the window has {total}. Use replace=True, or wait_ready()"
            )
        else:
            numbers = before + random.choice(total, count, replace=False)
        return Drawn(
            numbers, until, weight, runs.tape.column("slot"), runs.tape.column("local"), self.rows, self.slots.first
        )

    def _check(self) -> None:
        """What is counted is what is there."""
        assert (np.diff(self.rows["id"]) > 0).all()
        assert self.transitions == int(self.rows["transitions"].sum())
        assert self.transitions == int(self._runs.tape.column("length").sum())
        for runs in (self._runs, self._chains):
            slots = runs.tape.column("slot")
            assert (np.diff(slots) >= 0).all()
            assert not len(slots) or self.slots.first <= slots[0] <= slots[-1] < self.slots.end
