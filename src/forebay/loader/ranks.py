"""Ranks of one trainer that share a loader: rank 0 owns it, and the others get their parts from it.

Every verb of the loader is then a collective: all ranks call the same ones in the same order. Rank 0 acts when all have
arrived, and its result, or its error, reaches all of them. So a batch is acknowledged only after every rank trained on
its part, and no rank waits for another that has given up. What is sent is plain data, never pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import msgspec

from forebay import errors
from forebay.core.rollout import RolloutState
from forebay.errors import ForebayError, InvalidConfig, RankFailed

T = TypeVar("T")


class Broadcast(Protocol):
    """How ranks exchange bytes. `TorchBroadcast` does it with torch.distributed."""

    rank: int
    world_size: int

    def scatter(self, parts: Sequence[bytes] | None) -> bytes:
        """Rank 0 gives a part for each rank, the others None; every rank gets its own."""

    def gather(self, part: bytes) -> list[bytes] | None:
        """Every rank gives its part; rank 0 gets all of them in order, the others None."""


class TorchBroadcast:
    """Over a process group of torch.distributed (the default one) that can send CPU tensors: gloo.

    Beside NCCL: `TorchBroadcast(dist.new_group(backend="gloo"))`. Its timeout has to exceed the wait for a batch.
    """

    def __init__(self, group: Any = None) -> None:
        try:
            import torch
            import torch.distributed as dist
        except ModuleNotFoundError as missing:
            raise InvalidConfig("TorchBroadcast needs torch: pip install 'forebay[torch]'") from missing
        if not dist.is_available() or not dist.is_initialized():
            raise InvalidConfig("torch.distributed is not initialised; call init_process_group first")
        backend = str(dist.get_backend(group))
        if "gloo" not in backend:
            raise InvalidConfig(
                f"the process group has the backend {backend!r}, which does not send CPU tensors; give "
                "TorchBroadcast(torch.distributed.new_group(backend='gloo'))"
            )
        self._torch, self._dist, self._group = torch, dist, group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)

    def _global(self, rank: int) -> int:
        return rank if self._group is None else int(self._dist.get_global_rank(self._group, rank))

    def scatter(self, parts: Sequence[bytes] | None) -> bytes:
        """See `Broadcast.scatter`."""
        sizes = self._torch.zeros(self.world_size, dtype=self._torch.int64)
        if parts is not None:
            sizes = self._torch.tensor([len(part) for part in parts], dtype=self._torch.int64)
        self._dist.broadcast(sizes, self._global(0), group=self._group)
        if parts is None:
            return self._receive(int(sizes[self.rank]), 0)
        for rank in range(1, self.world_size):
            self._send(parts[rank], rank)
        return parts[0]

    def gather(self, part: bytes) -> list[bytes] | None:
        """See `Broadcast.gather`."""
        own = self._torch.tensor([len(part)], dtype=self._torch.int64)
        sizes = [self._torch.zeros(1, dtype=self._torch.int64) for _ in range(self.world_size)]
        self._dist.all_gather(sizes, own, group=self._group)
        if self.rank:
            self._send(part, 0)
            return None
        return [part] + [self._receive(int(sizes[rank]), rank) for rank in range(1, self.world_size)]

    def _send(self, part: bytes, rank: int) -> None:
        if part:
            content = self._torch.frombuffer(bytearray(part), dtype=self._torch.uint8)
            self._dist.send(content, self._global(rank), group=self._group)

    def _receive(self, size: int, rank: int) -> bytes:
        content = self._torch.empty(size, dtype=self._torch.uint8)
        if size:
            self._dist.recv(content, self._global(rank), group=self._group)
        return bytes(content.numpy().tobytes())


class _Message(msgspec.Struct, omit_defaults=True):
    """What a rank says: the call that it makes, and a value, or an error with its class, text and plain attributes."""

    call: str = ""
    stop: bool = False
    value: Any = None
    error: str | None = None
    text: str = ""
    attributes: dict[str, Any] = {}


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Message).decode


class Ranks:
    """The collectives of a loader. Without a `Broadcast` there is one rank, and nothing is sent."""

    def __init__(self, broadcast: Broadcast | None) -> None:
        self._broadcast = broadcast if broadcast is not None and broadcast.world_size > 1 else None
        self.rank = 0 if self._broadcast is None else self._broadcast.rank
        self.world_size = 1 if self._broadcast is None else self._broadcast.world_size
        self._parted = False  # a rank failed, or went its own way: there is nobody to meet
        self.stopping = False  # some rank was asked to stop: known to all after their next common call

    def run(self, call: str, work: Callable[[], T]) -> T:
        """Have rank 0 do something when all ranks make this call; every rank gets its result, which is plain data."""
        return self.each(call, lambda: [work()] * self.world_size)

    def each(self, call: str, work: Callable[[], list[T]]) -> T:
        """As `run`, with a result for each rank."""
        if self._broadcast is None:
            return work()[0]
        self.agree(call, None)
        if self.rank:
            value: T = self._result(_decode(self._broadcast.scatter(None)))
            return value
        try:
            values = work()
        except BaseException as error:
            self._broadcast.scatter([_encode(_describe(error))] * self.world_size)
            raise
        self._broadcast.scatter([_encode(_Message(value=value)) for value in values])
        return values[0]

    def agree(self, call: str, error: BaseException | None) -> None:
        """Wait for all ranks. If some have an error, or make another call, every rank raises."""
        if self._broadcast is None:
            if error is not None:
                raise error
            return
        mine = _Message() if error is None else _describe(error)
        mine.call, mine.stop = call, self.stopping
        self._parted = True  # unless all ranks agree
        gathered = self._broadcast.gather(_encode(mine))
        if gathered is not None:
            verdict = _verdict([_decode(part) for part in gathered])
            self._broadcast.scatter([_encode(verdict)] * self.world_size)
        else:
            verdict = _decode(self._broadcast.scatter(None))
        if error is not None:
            raise error
        self._result(verdict)
        self._parted, self.stopping = False, verdict.stop

    def leave(self, error: BaseException | None) -> None:
        """The end of the loader on this rank. Others that make another call learn why; nobody is waited for twice."""
        if self._broadcast is not None and not self._parted:
            with suppress(Exception):
                self.agree("close", error)

    def _result(self, message: _Message) -> Any:
        if message.error is None:
            return message.value
        kind = getattr(errors, message.error, None)
        if not (isinstance(kind, type) and issubclass(kind, ForebayError)):
            raise RankFailed(f"rank 0 failed: {message.error}: {message.text}")
        error = kind.__new__(kind)
        Exception.__init__(error, message.text)
        error.__dict__.update(message.attributes)
        raise error


def _verdict(said: list[_Message]) -> _Message:
    """What all ranks raise, if anything, after what each has said."""
    for rank, message in enumerate(said):
        if message.error is not None:
            return _Message(error="RankFailed", text=f"rank {rank} failed: {message.error}: {message.text}")
    if len({message.call for message in said}) > 1:
        calls = ", ".join(f"rank {rank} called {message.call}" for rank, message in enumerate(said))
        text = f"{calls}; all ranks make the same calls in the same order, and none alone"
        return _Message(error="RankFailed", text=text)
    return _Message(stop=any(message.stop for message in said))


def _describe(error: BaseException) -> _Message:
    plain = {key: value for key, value in error.__dict__.items() if isinstance(value, (str, int, float, type(None)))}
    known = plain if isinstance(error, ForebayError) else {}
    return _Message(error=type(error).__name__, text=str(error), attributes=known)


def encode_groups(groups: Sequence[Sequence[RolloutState]]) -> list[bytes]:
    """Groups as bytes."""
    from forebay.codec.frame import encode_group  # here: a single rank does not need it

    return [encode_group(tuple(group)) for group in groups]


def decode_groups(groups: Sequence[bytes]) -> list[list[RolloutState]]:
    """Groups from bytes."""
    from forebay.codec.frame import decode_group

    return [list(decode_group(group)) for group in groups]
