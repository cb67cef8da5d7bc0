"""The controls of vLLM and SGLang servers.

vLLM needs VLLM_SERVER_DEV_MODE=1 to load weights over HTTP; SGLang needs no special settings.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import msgspec

from forebay.agent_loop.monitor import Unreachable
from forebay.agent_loop.server import until_idle
from forebay.engines.control import EngineControl
from forebay.engines.weights import Checksums
from forebay.errors import EngineError


class _Results(msgspec.Struct):
    results: list[Any]


class _Checksums(msgspec.Struct):
    checksums: dict[str, str]


class _Success(msgspec.Struct):
    success: bool


class _Model(msgspec.Struct):
    root: str


class _Models(msgspec.Struct):
    data: list[_Model]


class VLLMControl(EngineControl):
    """Controls a vLLM server. The server is paused while weights are loaded, and requests of other clients wait."""

    async def idle(self) -> None:
        """See `EngineControl.idle`. Without the developer mode, the server's gauges are read instead."""
        try:
            pausable = await self._get("/is_paused") is not None
        except Unreachable:
            pausable = True  # the pause then raises
        if pausable:
            await super().idle()
            return
        try:
            async with asyncio.timeout(self.idle_timeout_s):
                await until_idle(self._get, self.url)
        except TimeoutError:
            raise self._busy() from None

    async def _hold(self) -> None:
        path = "/pause"
        # It answers when all running requests have ended; requests whose clients are gone end at once.
        params = {"mode": "wait", "clear_cache": "false"}
        try:
            response = await self._post(path, timeout_s=self.idle_timeout_s, params=params)
        except EngineError as error:
            if isinstance(error.__cause__, httpx.ReadTimeout):
                raise self._busy() from error
            raise
        if not response.is_success:
            raise self._refused(path, response)

    async def _release(self) -> None:
        response = await self._post("/resume")
        if not response.is_success:
            raise self._refused("/resume", response)

    async def _load_weights(self, directory: Path, version: str) -> None:
        path, body = "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        response = await self._post(path, body, timeout_s=self.load_timeout_s)
        if response.status_code == 500:
            # After a failed load it has no weights at all, and the next load can fail with the same error once.
            response = await self._post(path, body, timeout_s=self.load_timeout_s)
        self._read(path, response, _Results)

    async def _checksums(self) -> Checksums:
        path = "/weight_checker"
        response = await self._post(path, {"action": "checksum"}, timeout_s=self.load_timeout_s)
        return _by_rank(self._read(path, response, _Checksums).checksums)

    async def _drop_cache(self) -> None:
        path = "/reset_prefix_cache"
        if not self._read(path, await self._post(path), _Success).success:
            raise EngineError(f"{self.url} did not drop its prefix cache because requests are running")

    async def _set_version(self, version: str) -> None:
        path = "/update_weight_version"
        self._read(path, await self._post(path, {"new_version": version}), _Success)

    async def _started_with(self) -> Path | None:
        if await self.version() != "default":
            return None  # other weights were loaded since
        models = msgspec.json.decode(await self._get("/v1/models") or b'{"data":[]}', type=_Models)
        return Path(models.data[0].root) if models.data else None

    def _hint(self, status: int) -> str:
        return "; start vLLM with VLLM_SERVER_DEV_MODE=1, which enables this path" if status == 404 else ""


def _by_rank(checksums: dict[str, str]) -> Checksums:
    """The checksums of each rank by name, from keys like "dp0:pp0:pcp0:tp1:model.norm.weight"."""
    ranks: dict[str, dict[str, str]] = {}
    for key, digest in checksums.items():
        rank, _, name = key.rpartition(":")
        ranks.setdefault(rank, {})[name] = digest
    return ranks


class _Answer(msgspec.Struct):
    success: bool
    message: str = ""


class _Ranks(msgspec.Struct):
    ranks: list[_Checksums]


class _ModelInfo(msgspec.Struct):
    model_path: str


class SGLangControl(EngineControl):
    """Controls an SGLang server. Its scheduler drops the prefix cache only when idle, so `idle` costs that cache.

    `while_running`: weights are loaded while requests run, for `SGLangGenerateLoop`. The server takes its requests back
    into its queue meanwhile, and continues them with the new weights, on a new cache.
    """

    def __init__(self, url: str, *, while_running: bool = False, **settings: Any) -> None:
        super().__init__(url, **settings)
        self.while_running = bool(while_running)

    async def _hold(self) -> None:
        if self.while_running and self._held:  # not for `idle`
            path = "/pause_generation"
            response = await self._post(path, {"mode": "retract"}, timeout_s=self.idle_timeout_s)
            if not response.is_success:
                raise self._refused(path, response)
            return
        # The counts that it publishes leave out a request that has just begun; the scheduler, which drops the cache,
        # knows it. The update itself holds back new requests.
        path, seconds = "/flush_cache", f"{self.idle_timeout_s:g}"
        response = await self._post(path, timeout_s=self.idle_timeout_s + 10, params={"timeout": seconds})
        if not response.is_success:
            raise self._busy()

    async def _release(self) -> None:
        if self.while_running:  # otherwise the server is held only while it loads
            path = "/continue_generation"
            response = await self._post(path, {})
            if not response.is_success:
                raise self._refused(path, response)

    async def _load_weights(self, directory: Path, version: str) -> None:
        path, body = "/update_weights_from_disk", {"model_path": str(directory), "weight_version": version}
        answer = self._read(path, await self._post(path, body, timeout_s=self.load_timeout_s), _Answer)
        if not answer.success:
            raise EngineError(f"{self.url} did not load the weights at {directory}: {answer.message[:300]!r}")

    async def _checksums(self) -> Checksums:
        path = "/weights_checker"
        response = await self._post(path, {"action": "checksum"}, timeout_s=self.load_timeout_s)
        ranks = self._read(path, response, _Ranks).ranks
        return {f"rank {number}": rank.checksums for number, rank in enumerate(ranks)}

    async def _drop_cache(self) -> None:
        """Nothing to do: a successful update has dropped it."""

    async def _set_version(self, version: str) -> None:
        """Nothing to do: it was set together with the weights."""

    async def _started_with(self) -> Path | None:
        info = await self._get("/model_info")
        return None if info is None else Path(msgspec.json.decode(info, type=_ModelInfo).model_path)
