"""One server and its weights: pause, idle, load, check, flush, version, continue, in one call.

What `update_weights` promises
- Weights are loaded only while the server runs no request: one that it still works on would continue over a cache of
  old weights, and its tokens would be stamped with new ones.
- It returns only if the server took all of the weights (its checksums changed exactly where the files did), dropped the
  cache of the old ones, and reports the new version. Otherwise it raises, the producer stays paused, nothing is lost,
  and the call can be repeated. Until it succeeds no token of that server counts (see `agent_loop.gate`).
- A server that is away, or restarts meanwhile, is waited for, and the update is repeated from its beginning. After
  `down_timeout_s` it is EngineUnavailable.
- Files that would break the server (missing, foreign or misshapen tensors) are refused before it is touched.

A control has no connection of its own to close, and can be used from any event loop: each call makes a fresh one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import Protocol, TypeVar

import httpx
import msgspec

from forebay.agent_loop.gate import EngineGone, Process, ServerGate, Unreachable, is_step
from forebay.agent_loop.names import NamedHosts
from forebay.agent_loop.outage import DOWN_TIMEOUT_S, Outage
from forebay.agent_loop.server import authorization, checked_url, fetch, is_refused
from forebay.checks import whole_number
from forebay.engines.weights import Checksums, Tensor, check_reloadable, check_same_tensors, check_update, read_weights
from forebay.errors import EngineError, EngineUnavailable, InvalidConfig
from forebay.threads import Turns, in_thread, see_through

__all__ = ["Checksums", "EngineControl", "Producer", "WeightUpdate"]

log = logging.getLogger(__name__)

T = TypeVar("T")

_QUOTED = 300


class Producer(Protocol):
    """What is paused around an update: a `DisaggregatedAgentLoopManager`, say."""

    async def pause_produce(self) -> float: ...

    async def continue_produce(self, model_step: int) -> None: ...


class WeightUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """An update that succeeded. Tensors are counted by the server's names, which may stand for several on disk."""

    model_step: int
    path: str
    checked: int  # tensors of the server that changed exactly as their files did
    unchecked: int  # tensors of the files that the server does not show by a name we know
    seconds: float


class _Loaded(msgspec.Struct, frozen=True):
    """Weights that a process of the server is known to have, or to have had when it started."""

    process: Process
    path: Path
    tensors: dict[str, Tensor]
    checksums: dict[str, dict[str, str]]


class EngineControl(ABC):
    """Gives a server its weights. Not made directly: see `VLLMControl`, `SGLangControl`.

    - `url`: the root of the server, like `http://127.0.0.1:8000`.
    - `weights`: the directory that the server was started with, to compare the first update with; by default the server
      is asked for it. One that cannot be read here leaves the first update unchecked (it is logged).
    - `verify`: compare checksums. It reads every file of weights once; without it a server may take half of an update.
    - `trust_restarts`: the server loads the current weights by itself whenever it starts.
    - `idle_timeout_s`, `load_timeout_s`: how long it may take to run dry, and to load weights.
    - `down_timeout_s`: how long `update_weights` waits for a server that is away.

        control = VLLMControl("http://127.0.0.1:8000")
        loop = OpenAIAgentLoop("http://127.0.0.1:8000/v1", "policy", engine=control)
        await control.update_weights("checkpoints/step_7", model_step=7, manager=manager)
    """

    def __init__(
        self,
        url: str,
        *,
        weights: str | PathLike[str] | None = None,
        verify: bool = True,
        api_key: str | None = None,
        trust_restarts: bool = False,
        idle_timeout_s: float = 60.0,
        load_timeout_s: float = 600.0,
        down_timeout_s: float = DOWN_TIMEOUT_S,
    ) -> None:
        self.url = checked_url(url)
        if self.url.endswith("/v1"):
            raise InvalidConfig(f"url is {url!r:.200}; expected the root of the server, without /v1")
        for name, value in (("idle_timeout_s", idle_timeout_s), ("load_timeout_s", load_timeout_s)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise InvalidConfig(f"{name} is {value!r}; expected a positive number of seconds")
        self.verify = bool(verify)
        self.idle_timeout_s, self.load_timeout_s = float(idle_timeout_s), float(load_timeout_s)
        self.down_timeout_s = Outage(self.url, down_timeout_s).down_timeout_s
        self.gate = ServerGate(self.url, self._get, trust_restarts=trust_restarts, controlled=True)
        self._weights = None if weights is None else _absolute(weights)
        self._headers = authorization(api_key)
        self._tls = httpx.create_ssl_context() if self.url.startswith("https:") else False
        self._turns = Turns()
        self._loaded: _Loaded | None = None
        self._before: _Loaded | None = None  # what an update is compared with
        self._step: int | None = None
        self._updating: Outage | None = None  # of an update that runs
        self._stage: tuple[str, float] | None = None  # what is waited for, and since when
        self._held = False  # the server is kept from generating, because it may have broken weights

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.url}>"

    def explain_wait(self) -> str | None:
        """What an update, or `idle`, waits for at the moment, for people; None if nothing runs."""
        away = None if self._updating is None else self._updating.describe()
        if away is not None:
            return f"update_weights waits: {away}"
        if self._stage is None:
            return None
        what, since = self._stage
        return f"{self.url}: {what} for {time.monotonic() - since:.1f} s"

    @contextmanager
    def _at(self, stage: str) -> Iterator[None]:
        before, self._stage = self._stage, (stage, time.monotonic())
        try:
            yield
        finally:
            self._stage = before

    # --- verbs ----------------------------------------------------------------------------------------

    async def idle(self) -> None:
        """Return when the server has stopped our requests (and all others: it does not tell them apart).

        EngineError if it does not within `idle_timeout_s`. A server that cannot be reached runs nothing.
        """
        if self._held:
            return
        try:
            with self._at(f"it still runs requests (idle_timeout_s is {self.idle_timeout_s:g})"):
                await self._hold()
        except EngineGone as gone:
            log.warning("idle_server_gone url=%s error=%s", self.url, gone)
        except BaseException:
            with suppress(EngineError):  # what ended the wait says more
                await self._let_go()
            raise
        else:
            await self._let_go()

    async def _let_go(self) -> None:
        """Let the server generate again, unless an update holds it; also when cancelled."""
        if self._held:
            return
        releasing = asyncio.ensure_future(self._release())
        cancelled = await see_through(releasing)
        releasing.result()
        if cancelled is not None:
            raise cancelled

    async def update_weights(
        self, path: str | PathLike[str], *, model_step: int, manager: Producer | None = None
    ) -> WeightUpdate:
        """Load weights from a directory that the server can read, in the safe order. See the top of this file.

        `manager`: paused before and continued afterwards; without one, nothing of yours may be generating.
        """
        whole_number("model_step", model_step, least=0)
        directory, began = _absolute(path), time.monotonic()
        outage = Outage(self.url, self.down_timeout_s)
        async with self._turns(), self._update_of(outage):
            tensors = await in_thread(lambda: read_weights(directory)) if self.verify else {}
            while True:
                process: Process | None = None
                try:
                    process = await self._asked(self.gate.started())
                    checked, unchecked = await self._update(directory, tensors, model_step, process, manager)
                    break
                except EngineError as error:
                    if not await self._is_away(error, process):
                        raise
                    if manager is not None:
                        with suppress(EngineError):  # it is paused all the same, and asked again by the next attempt
                            await manager.pause_produce()
                    try:
                        await outage.wait(str(error), self.gate.ask)
                    except EngineUnavailable as unavailable:
                        raise EngineUnavailable(
                            f"the weights of step {model_step} were not loaded; update them again. {unavailable}"
                        ) from error
            outage.over()
            if manager is not None:
                await manager.continue_produce(model_step)
        seconds = time.monotonic() - began
        log.info("weights_loaded url=%s model_step=%d checked=%d seconds=%.3f", self.url, model_step, checked, seconds)
        return WeightUpdate(
            model_step=model_step, path=str(directory), checked=checked, unchecked=unchecked, seconds=seconds
        )

    @asynccontextmanager
    async def _update_of(self, outage: Outage) -> AsyncIterator[None]:
        self._updating = outage
        try:
            yield
        finally:
            self._updating = None

    async def version(self) -> str | None:
        """The version that the server says its weights have."""
        try:
            return await self.gate.version()
        except Unreachable as error:
            raise EngineError(f"{self.url} does not say which weights it has: {error}") from error

    async def _is_away(self, error: EngineError, process: Process | None) -> bool:
        """Whether an attempt failed because the server is away, or is not the process any more that it began with."""
        if process is None or isinstance(error, EngineGone):
            return True
        try:
            return await self.gate.started() != process
        except Unreachable:
            return True

    # --- the order ------------------------------------------------------------------------------------

    async def _update(
        self, directory: Path, tensors: dict[str, Tensor], model_step: int, process: Process, manager: Producer | None
    ) -> tuple[int, int]:
        """One attempt at an update, which leaves the manager paused."""
        baseline = await self._baseline(process)
        for known in (baseline, self._loaded):
            if known is not None and self.verify:
                check_same_tensors(tensors, known.tensors, directory)
        if manager is not None:
            await manager.pause_produce()
        return await self._load(
            directory, tensors, model_step, process, lambda checksums: self._check(baseline, tensors, checksums)
        )

    async def _load(
        self,
        directory: Path,
        tensors: dict[str, Tensor],
        model_step: int,
        started: Process,
        check: Callable[[Checksums], tuple[int, int]],
    ) -> tuple[int, int]:
        """Load and check; how many tensors were checked, and how many could not be."""
        held, self._held = self._held, True
        try:
            with self._at(f"it still runs requests (idle_timeout_s is {self.idle_timeout_s:g})"):
                await self._hold()
            if self.verify:
                check_reloadable(await self._checksums(), self.url)
        except BaseException:
            self._held = held
            with suppress(EngineError):
                await self._let_go()
            raise
        self.gate.doubt("an update of its weights has begun, and has not ended")
        try:
            with self._at(f"it loads the weights of step {model_step} (load_timeout_s is {self.load_timeout_s:g})"):
                await self._load_weights(directory, str(model_step))
            checksums = await self._checksums() if self.verify else {}
            counts = check(checksums)
            await self._drop_cache()
            await self._set_version(str(model_step))
            found = await self.version()
            if found != str(model_step):
                raise EngineError(
                    f"{self.url} was given the weights of step {model_step}, but reports version {found!r}"
                )
            process = await self._asked(self.gate.ask())
            if await self._asked(self.gate.started()) != started:
                raise EngineGone(f"{self.url} restarted during an update of its weights")
        except BaseException as error:
            self.gate.doubt(f"an update to step {model_step} failed: {type(error).__name__} {error}".rstrip())
            raise
        self._loaded, self._step = _Loaded(started, directory, tensors, _plain(checksums)), model_step
        self._before = self._loaded
        self._held = False
        await self._let_go()
        self.gate.loaded(model_step, process)
        self.gate.reload = self._reload
        return counts

    async def _reload(self) -> None:
        """The server restarted: give it again what it had."""
        async with self._turns():
            loaded, step = self._loaded, self._step
            if not self.gate.doubted:
                return  # an update came first
            if self.gate.model_step != step:
                raise EngineError(f"the control has loaded step {step}, and step {self.gate.model_step} is needed")
            assert loaded is not None, "only a control that has loaded weights loads them again"
            assert step is not None
            if self.verify and await in_thread(lambda: read_weights(loaded.path)) != loaded.tensors:
                raise EngineError(f"the weights at {loaded.path} changed since they were loaded; update the weights")
            process: Process | None = None
            try:
                process = await self._asked(self.gate.started())
                await self._load(
                    loaded.path,
                    loaded.tensors,
                    step,
                    process,
                    lambda checksums: self._check_same(loaded.checksums, checksums),
                )
            except EngineError as error:
                if not await self._is_away(error, process):
                    raise
                raise EngineGone(f"{self.url} went away while its weights were loaded again: {error}") from error
            log.warning("weights_loaded_again url=%s model_step=%d", self.url, step)

    def _check(self, baseline: _Loaded | None, tensors: Mapping[str, Tensor], checksums: Checksums) -> tuple[int, int]:
        if baseline is not None:
            checked, unchecked = check_update(baseline.tensors, tensors, baseline.checksums, checksums, self.url)
            if unchecked:
                log.warning("weights_partly_unchecked url=%s tensors=%d: it names them otherwise", self.url, unchecked)
            return checked, unchecked
        if self.verify:
            log.warning("weights_unchecked url=%s: it is not known what it was loaded with before", self.url)
        return 0, len(tensors)

    def _check_same(self, before: Checksums, checksums: Checksums) -> tuple[int, int]:
        digests = {(rank, name): digest for rank, tensors in before.items() for name, digest in tensors.items()}
        other = {key for key, digest in digests.items() if checksums.get(key[0], {}).get(key[1]) != digest}
        if other:
            raise EngineError(
                f"{self.url} took only part of the weights: {len(other)} of {len(digests)} tensors are not what they "
                f"were before it restarted (the first: {min(other)!r})"
            )
        return len(digests), 0

    async def _baseline(self, process: Process) -> _Loaded | None:
        """What this process was last loaded with, or started with; None if that cannot be known."""
        if not self.verify:
            return None
        if self._before is None or self._before.process != process:
            self._before = None
            # A server that reports a step has not had its start-up weights since.
            given = None if is_step(await self.version()) else self._weights
            directory = given or await self._asked(self._started_with())
            if directory is not None and (given is not None or directory.is_dir()):
                tensors = await in_thread(lambda: read_weights(directory))
                self._before = _Loaded(process, directory, tensors, _plain(await self._checksums()))
        return self._before

    async def _asked(self, question: Awaitable[T]) -> T:
        try:
            return await question
        except Unreachable as error:
            raise EngineError(f"{self.url} cannot be reached: {error}") from error

    # --- what servers differ in -----------------------------------------------------------------------

    @abstractmethod
    async def _hold(self) -> None:
        """Wait until the server runs nothing, and keep it from beginning anything until `_release` where it can."""

    @abstractmethod
    async def _release(self) -> None:
        """Let the server generate again."""

    @abstractmethod
    async def _load_weights(self, directory: Path, version: str) -> None:
        """Have the server load weights; EngineError if it says that it did not."""

    @abstractmethod
    async def _checksums(self) -> Checksums:
        """A checksum of each tensor of the server by name, by rank."""

    @abstractmethod
    async def _drop_cache(self) -> None:
        """Forget what was computed with the old weights."""

    @abstractmethod
    async def _set_version(self, version: str) -> None:
        """Have the server report this version from now on."""

    @abstractmethod
    async def _started_with(self) -> Path | None:
        """The directory that the server was started with, if it still has those weights and says so."""

    # --- HTTP -----------------------------------------------------------------------------------------

    def _client(self) -> httpx.AsyncClient:
        # Fresh for every call: vLLM closes a connection after an error without saying so.
        transport = NamedHosts(httpx.AsyncHTTPTransport(trust_env=False, verify=self._tls))
        return httpx.AsyncClient(trust_env=False, transport=transport, headers=self._headers)

    async def _get(self, path: str) -> bytes | None:
        async with self._client() as client:
            return await fetch(client, self.url + path, {})

    async def _post(
        self, path: str, body: object = None, *, timeout_s: float = 30.0, params: Mapping[str, str] | None = None
    ) -> httpx.Response:
        """The response, whatever its status; EngineError (or `EngineGone`) if there is none."""
        content = b"" if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            async with self._client() as client:
                return await client.post(
                    self.url + path, content=content, headers=headers, params=params, timeout=timeout_s
                )
        except httpx.TransportError as error:
            if is_refused(error):
                raise EngineGone(f"{self.url} cannot be reached: {error}") from error
            raise EngineError(
                f"{self.url}: POST {path} got no answer: {type(error).__name__} {error}".rstrip()
            ) from error

    def _refused(self, path: str, response: httpx.Response) -> EngineError:
        hint = self._hint(response.status_code)
        return EngineError(
            f"{self.url}: POST {path} answered {response.status_code}: {response.text[:_QUOTED]!r}{hint}"
        )

    def _hint(self, status: int) -> str:
        return ""

    def _busy(self) -> EngineError:
        return EngineError(
            f"{self.url} still runs requests after {self.idle_timeout_s:g} s (idle_timeout_s): it is not safe to give "
            "it new weights; see what else uses it"
        )

    def _read(self, path: str, response: httpx.Response, kind: type[T]) -> T:
        """The body of a response that must be a success."""
        if not response.is_success:
            raise self._refused(path, response)
        try:
            return msgspec.json.decode(response.content, type=kind)
        except msgspec.MsgspecError as error:
            raise EngineError(f"{self.url}: POST {path} answered something else: {error}") from None


def _plain(checksums: Checksums) -> dict[str, dict[str, str]]:
    return {rank: dict(tensors) for rank, tensors in checksums.items()}


def _absolute(path: str | PathLike[str]) -> Path:
    """The server does not run where we do."""
    return Path(path).absolute()
