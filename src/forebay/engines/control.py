"""`EngineControl`: the weights of one server. Pause, idle, load, check, flush, version, continue, in one call.

What `update_weights` promises
- Weights are loaded only while the server runs no request: a running request would continue on a cache of old weights,
  and its tokens would be recorded with the new version.
- It returns only if the server took all of the weights (its checksums changed exactly where the files did), dropped the
  cache of the old ones, and reports the new version. Otherwise it raises, the producer stays paused, nothing is lost,
  and the call can be repeated. Until it succeeds no token of that server counts (see `agent_loop.monitor`).
- If the server is unreachable, or restarts meanwhile, the update waits for it and starts over. After `down_timeout_s`
  it raises EngineUnavailable.
- Files that would break the server (missing, unknown or misshapen tensors) are refused before the server is touched.

A control has no connections to close, and can be used from any event loop: each call makes a new connection.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Protocol, TypeVar

import httpx
import msgspec

from forebay.agent_loop.monitor import EngineGone, Process, ServerMonitor, Unreachable, is_step
from forebay.agent_loop.names import NamedHosts
from forebay.agent_loop.outage import DOWN_TIMEOUT_S, Outage
from forebay.agent_loop.server import authorization, checked_url, fetch, is_refused
from forebay.core.aio import Turns, in_thread, see_through
from forebay.core.validate import checked_integer, positive_seconds
from forebay.engines.weights import Checksums, Tensor, check_reloadable, check_same_tensors, check_update, read_weights
from forebay.errors import EngineError, EngineUnavailable, InvalidConfig

log = logging.getLogger(__name__)

T = TypeVar("T")

_QUOTED = 300


class Producer(Protocol):
    """A producer that an update pauses, such as a `DisaggregatedAgentLoopManager`."""

    async def pause_produce(self) -> float: ...

    async def continue_produce(self, model_step: int) -> None: ...


class WeightUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """A successful update. Tensors are counted by the server's names, which may combine several tensors on disk."""

    model_step: int
    path: str
    checked: int  # tensors of the server that changed exactly as their files did
    unchecked: int  # tensors of the files that the server lists under no known name
    seconds: float
    servers: int = 1  # that have the weights


class _Loaded(msgspec.Struct, frozen=True):
    """The weights that a process of the server has, or had when it started."""

    process: Process
    path: Path
    tensors: dict[str, Tensor]
    checksums: Checksums


class EngineControl(ABC):
    """Loads weights into a server. Abstract: use `VLLMControl` or `SGLangControl`.

    - `url`: the root of the server, like `http://127.0.0.1:8000`.
    - `weights`: the directory that the server was started with, to compare the first update with; by default the server
      is asked for it. If it cannot be read here, the first update is not checked (this is logged).
    - `verify`: compare checksums. This reads every file of weights once. Without it, a partial update is not noticed.
    - `trust_restarts`: the server loads the current weights itself whenever it starts.
    - `idle_timeout_s`, `load_timeout_s`: how long the server may take to become idle, and to load weights.
    - `down_timeout_s`: how long `update_weights` waits for an unreachable server.

        control = VLLMControl("http://127.0.0.1:8000")
        loop = OpenAIAgentLoop("http://127.0.0.1:8000/v1", "policy", engine=control)
        await control.update_weights("checkpoints/step_7", model_step=7, manager=manager)
    """

    while_running: bool = False
    """Whether weights are loaded while requests run: the server interrupts them, and reports each token's version."""

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
        self.verify = bool(verify)
        self.idle_timeout_s = positive_seconds("idle_timeout_s", idle_timeout_s)
        self.load_timeout_s = positive_seconds("load_timeout_s", load_timeout_s)
        self.down_timeout_s = positive_seconds("down_timeout_s", down_timeout_s)
        self.monitor = ServerMonitor(self.url, self._get, trust_restarts=trust_restarts, controlled=True)
        self._weights = None if weights is None else _absolute(weights)
        self._headers = authorization(api_key)
        self._tls = httpx.create_ssl_context() if self.url.startswith("https:") else False
        self._turns = Turns()
        self._loaded: _Loaded | None = None
        self._before: _Loaded | None = None  # the next update is compared with these
        self._step: int | None = None
        self._due: tuple[Path, int] | None = None  # weights that the server could not take yet, and their step
        self._updating: Outage | None = None  # of the update in progress
        self._stage: tuple[str, float] | None = None  # why the control waits, and since when
        self._held = False  # the server must not generate: its weights may be broken

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.url}>"

    def explain_wait(self) -> str | None:
        """Why an update, or `idle`, waits now, for people; None if none is in progress."""
        away = None if self._updating is None else self._updating.describe()
        if away is not None:
            return f"update_weights waits: {away}"
        if self._stage is None:
            return None
        what, since = self._stage
        return f"{self.url} {what}, for {time.monotonic() - since:.1f} s so far"

    @contextmanager
    def _at(self, stage: str) -> Iterator[None]:
        before, self._stage = self._stage, (stage, time.monotonic())
        try:
            yield
        finally:
            self._stage = before

    # --- for users ------------------------------------------------------------------------------------

    async def idle(self) -> None:
        """Return when the server has stopped our requests (and all others: it does not distinguish them).

        EngineError if it has not within `idle_timeout_s`. If nothing listens at its address, it runs no request.
        """
        if self._held:
            return
        try:
            with self._at(f"still runs requests (idle_timeout_s is {self.idle_timeout_s:g})"):
                await self._hold()
        except EngineGone as gone:
            log.warning("idle_server_gone url=%s error=%s", self.url, gone)
        except BaseException:
            with suppress(EngineError):  # the first error explains more
                await self._release_unless_held()
            raise
        else:
            await self._release_unless_held()

    async def _release_unless_held(self) -> None:
        """Let the server generate again, unless an update holds it; completes also when cancelled."""
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
        """Load weights from a directory that the server can read, in a safe order. See the top of this file.

        `manager`: paused before and continued afterwards; without one, pause all producers of this server yourself.
        """
        checked_integer("model_step", model_step, least=0)
        directory, began = _absolute(path), time.monotonic()
        outage = Outage(self.url, self.down_timeout_s)
        async with self._turns(), self._update_of(outage):
            tensors = await in_thread(lambda: read_weights(directory)) if self.verify else {}
            while True:
                process: Process | None = None
                try:
                    process = await self._reachable(self.monitor.find_start())
                    checked, unchecked = await self._update(directory, tensors, model_step, process, manager)
                    break
                except EngineError as error:
                    if not await self._is_away(error, process):
                        raise
                    if manager is not None:
                        with suppress(EngineError):  # it is paused nevertheless; the next attempt pauses it again
                            await manager.pause_produce()
                    try:
                        await outage.wait(str(error), self.monitor.find_process)
                    except EngineUnavailable as unavailable:
                        raise EngineUnavailable(
                            f"the weights of step {model_step} were not loaded; repeat the update. {unavailable}"
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

    @property
    def away(self) -> bool:
        """Whether an update in progress waits for an unreachable server."""
        return self._updating is not None and self._updating.away

    @property
    def behind(self) -> bool:
        """Whether the server has yet to load weights that it could not take (`postpone`)."""
        return self._due is not None

    def postpone(self, path: str | PathLike[str], *, model_step: int, reason: str) -> None:
        """The server could not take these weights; it loads them when it is back, before any of its tokens count.

        Its agent loop triggers that, or the next `update_weights` makes up for it.
        """
        self._due = _absolute(path), model_step
        self.monitor.expect(model_step, f"it has yet to load the weights of step {model_step}: {reason}")
        self.monitor.reload = self._reload

    async def version(self) -> str | None:
        """The version that the server reports for its weights."""
        try:
            return await self.monitor.version()
        except Unreachable as error:
            raise EngineError(f"{self.url} does not say which weights it has: {error}") from error

    async def _is_away(self, error: EngineError, process: Process | None) -> bool:
        """Whether an attempt failed because the server is unreachable, or was replaced by another process."""
        if process is None or isinstance(error, EngineGone):
            return True
        try:
            return await self.monitor.find_start() != process
        except Unreachable:
            return True

    # --- the steps of an update -----------------------------------------------------------------------

    async def _update(
        self, directory: Path, tensors: dict[str, Tensor], model_step: int, process: Process, manager: Producer | None
    ) -> tuple[int, int]:
        """One attempt at an update. The manager is paused afterwards."""
        baseline = await self._baseline(process)
        for known in (baseline, self._loaded):
            if known is not None and self.verify:
                check_same_tensors(tensors, known.tensors, directory)
        if manager is not None:
            await manager.pause_produce()
        return await self._load(directory, tensors, model_step, process, partial(self._check, baseline, tensors))

    async def _load(
        self,
        directory: Path,
        tensors: dict[str, Tensor],
        model_step: int,
        started: Process,
        check: Callable[[Checksums], tuple[int, int]],
    ) -> tuple[int, int]:
        """Load and check; the number of tensors that were checked, and of those that could not be."""
        held, self._held = self._held, True
        try:
            with self._at(f"still runs requests (idle_timeout_s is {self.idle_timeout_s:g})"):
                await self._hold()
            if self.verify:
                check_reloadable(await self._checksums(), self.url)
        except BaseException:
            self._held = held
            with suppress(EngineError):
                await self._release_unless_held()
            raise
        if self.while_running:  # requests that begin now wait for this load
            self._due, self.monitor.reload = (directory, model_step), self._reload
        self.monitor.doubt("an update of its weights has begun and has not ended")
        try:
            with self._at(f"loads the weights of step {model_step} (load_timeout_s is {self.load_timeout_s:g})"):
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
            process = await self._reachable(self.monitor.find_process())
            if await self._reachable(self.monitor.find_start()) != started:
                raise EngineGone(f"{self.url} restarted during an update of its weights")
        except BaseException as error:
            self.monitor.doubt(f"an update to step {model_step} failed: {type(error).__name__} {error}".rstrip())
            raise
        self._loaded, self._step = _Loaded(started, directory, tensors, checksums), model_step
        self._before = self._loaded
        self._held, self._due = False, None
        await self._release_unless_held()
        self.monitor.set_loaded(model_step, process)
        self.monitor.reload = self._reload
        return counts

    async def _reload(self) -> None:
        """The server restarted, or missed an update: load the current weights."""
        async with self._turns():
            loaded, step = self._loaded, self._step
            if not self.monitor.doubted:
                return  # an update came first
            if self._due is not None:
                await self._catch_up(*self._due)
                return
            if self.monitor.model_step != step:
                raise EngineError(f"the control has loaded step {step}, but step {self.monitor.model_step} is needed")
            assert loaded is not None, "only a control that has loaded weights loads them again"
            assert step is not None
            if self.verify and await in_thread(lambda: read_weights(loaded.path)) != loaded.tensors:
                raise EngineError(f"the weights at {loaded.path} changed since they were loaded; update the weights")
            process: Process | None = None
            try:
                process = await self._reachable(self.monitor.find_start())
                check = partial(self._check_same, loaded.checksums)
                await self._load(loaded.path, loaded.tensors, step, process, check)
            except EngineError as error:
                if not await self._is_away(error, process):
                    raise
                raise EngineGone(f"{self.url} went away while its weights were loaded again: {error}") from error
            log.warning("weights_loaded_again url=%s model_step=%d", self.url, step)

    async def _catch_up(self, directory: Path, step: int) -> None:
        """Load weights that were postponed."""
        tensors = await in_thread(lambda: read_weights(directory)) if self.verify else {}
        process: Process | None = None
        try:
            process = await self._reachable(self.monitor.find_start())
            await self._update(directory, tensors, step, process, None)
        except EngineError as error:
            if not await self._is_away(error, process):
                raise
            raise EngineGone(f"{self.url} went away while it loaded the weights of step {step}: {error}") from error
        log.warning("weights_loaded_late url=%s model_step=%d", self.url, step)

    def _check(self, baseline: _Loaded | None, tensors: Mapping[str, Tensor], checksums: Checksums) -> tuple[int, int]:
        if baseline is not None:
            checked, unchecked = check_update(baseline.tensors, tensors, baseline.checksums, checksums, self.url)
            if unchecked:
                log.warning("weights_partly_unchecked url=%s tensors=%d: unknown names", self.url, unchecked)
            return checked, unchecked
        if self.verify:
            log.warning("weights_unchecked url=%s: its previous weights are not known", self.url)
        return 0, len(tensors)

    def _check_same(self, before: Checksums, checksums: Checksums) -> tuple[int, int]:
        digests = {(rank, name): digest for rank, tensors in before.items() for name, digest in tensors.items()}
        other = {key for key, digest in digests.items() if checksums.get(key[0], {}).get(key[1]) != digest}
        if other:
            raise EngineError(
                f"{self.url} took only part of the weights: {len(other)} of {len(digests)} tensors differ from those "
                f"before its restart (the first: {min(other)!r})"
            )
        return len(digests), 0

    async def _baseline(self, process: Process) -> _Loaded | None:
        """The weights that this process was last loaded with, or started with; None if they are not known."""
        if not self.verify:
            return None
        if self._before is None or self._before.process != process:
            self._before = None
            # A server that reports a step no longer has its start-up weights.
            given = None if is_step(await self.version()) else self._weights
            directory = given or await self._reachable(self._started_with())
            if directory is not None and (given is not None or directory.is_dir()):
                tensors = await in_thread(lambda: read_weights(directory))
                self._before = _Loaded(process, directory, tensors, await self._checksums())
        return self._before

    async def _reachable(self, question: Awaitable[T]) -> T:
        """The answer of the server; EngineError if it is unreachable."""
        try:
            return await question
        except Unreachable as error:
            raise EngineError(f"{self.url} is unreachable: {error}") from error

    # --- different for each kind of server ------------------------------------------------------------

    @abstractmethod
    async def _hold(self) -> None:
        """Wait until the server runs no request; if it can, it starts none until `_release`."""

    @abstractmethod
    async def _release(self) -> None:
        """Let the server generate again."""

    @abstractmethod
    async def _load_weights(self, directory: Path, version: str) -> None:
        """Make the server load weights; EngineError if it reports a failure."""

    @abstractmethod
    async def _checksums(self) -> Checksums:
        """The checksums of the server's tensors, by rank and name."""

    @abstractmethod
    async def _drop_cache(self) -> None:
        """Drop the prefix cache of the old weights."""

    @abstractmethod
    async def _set_version(self, version: str) -> None:
        """Make the server report this version from now on."""

    @abstractmethod
    async def _started_with(self) -> Path | None:
        """The directory that the server was started with, if it still has those weights and reports it."""

    # --- HTTP -----------------------------------------------------------------------------------------

    def _client(self) -> httpx.AsyncClient:
        # A new client for every call: vLLM closes a connection after an error without announcing it.
        transport = NamedHosts(httpx.AsyncHTTPTransport(trust_env=False, verify=self._tls))
        return httpx.AsyncClient(trust_env=False, transport=transport, headers=self._headers)

    async def _get(self, path: str) -> bytes | None:
        async with self._client() as client:
            return await fetch(client, self.url + path, {})

    async def _post(
        self, path: str, body: object = None, *, timeout_s: float = 30.0, params: Mapping[str, str] | None = None
    ) -> httpx.Response:
        """The response, with any status; EngineError (or `EngineGone`) if there is none."""
        content = b"" if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            async with self._client() as client:
                return await client.post(
                    self.url + path, content=content, headers=headers, params=params, timeout=timeout_s
                )
        except httpx.TransportError as error:
            if is_refused(error):
                raise EngineGone(f"{self.url} is unreachable: {error}") from error
            problem = f"{type(error).__name__} {error}".rstrip()
            raise EngineError(f"{self.url}: POST {path} got no answer: {problem}") from error

    def _refused(self, path: str, response: httpx.Response) -> EngineError:
        said, hint = response.text[:_QUOTED], self._hint(response.status_code)
        return EngineError(f"{self.url}: POST {path} answered {response.status_code}: {said!r}{hint}")

    def _hint(self, status: int) -> str:
        return ""

    def _busy(self) -> EngineError:
        return EngineError(
            f"{self.url} still runs requests after {self.idle_timeout_s:g} s (idle_timeout_s), so loading new weights "
            "is not safe; check who else sends it requests"
        )

    def _read(self, path: str, response: httpx.Response, kind: type[T]) -> T:
        """The body of a response; EngineError unless it is a success of this type."""
        if not response.is_success:
            raise self._refused(path, response)
        try:
            return msgspec.json.decode(response.content, type=kind)
        except msgspec.MsgspecError as error:
            raise EngineError(f"{self.url}: POST {path} returned an unexpected body: {error}") from None


def _absolute(path: str | PathLike[str]) -> Path:
    """An absolute path: the server runs in another working directory."""
    return Path(path).absolute()
