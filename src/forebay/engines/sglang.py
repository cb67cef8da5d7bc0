"""The control of an SGLang server. It needs no special settings of the server."""

from __future__ import annotations

from pathlib import Path

import msgspec

from forebay.engines.control import EngineControl
from forebay.engines.weights import Checksums
from forebay.errors import EngineError

__all__ = ["SGLangControl"]


class _Answer(msgspec.Struct):
    success: bool
    message: str = ""


class _Rank(msgspec.Struct):
    checksums: dict[str, str]


class _Checksums(msgspec.Struct):
    ranks: list[_Rank]


class _ModelInfo(msgspec.Struct):
    model_path: str


class SGLangControl(EngineControl):
    """Controls an SGLang server. Its scheduler drops the prefix cache only when idle, so `idle` costs that cache."""

    async def _hold(self) -> None:
        # The counts that it publishes leave out a request that has just begun; the scheduler, which drops the cache,
        # knows it. The update itself holds back new requests.
        path, seconds = "/flush_cache", f"{self.idle_timeout_s:g}"
        response = await self._post(path, timeout_s=self.idle_timeout_s + 10, params={"timeout": seconds})
        if not response.is_success:
            raise self._busy()

    async def _release(self) -> None:
        """Nothing to do: the server is held only while it loads."""

    async def _load_weights(self, directory: Path, version: str) -> None:
        path, body = "/update_weights_from_disk", {"model_path": str(directory), "weight_version": version}
        answer = self._read(path, await self._post(path, body, timeout_s=self.load_timeout_s), _Answer)
        if not answer.success:
            raise EngineError(f"{self.url} did not load the weights at {directory}: {answer.message[:300]!r}")

    async def _checksums(self) -> Checksums:
        path = "/weights_checker"
        response = await self._post(path, {"action": "checksum"}, timeout_s=self.load_timeout_s)
        ranks = self._read(path, response, _Checksums).ranks
        return {f"rank {number}": rank.checksums for number, rank in enumerate(ranks)}

    async def _drop_cache(self) -> None:
        """Nothing to do: a successful update has dropped it."""

    async def _set_version(self, version: str) -> None:
        """Nothing to do: it was set together with the weights."""

    async def _started_with(self) -> Path | None:
        info = await self._get("/model_info")
        return None if info is None else Path(msgspec.json.decode(info, type=_ModelInfo).model_path)
