"""An inference server on loopback that has weights: a real HTTP server with the control paths of vLLM and of SGLang.

Its weights are the safetensors of a directory, which it really reads. Each logprob encodes the weights of its token:
-(step + 1), and 0.5 less if it was computed on a cache of other weights. So a test can compare the samples of a trainer
with what was generated. On request it misbehaves: it continues requests whose clients are gone (`tail_ticks`), refuses
an update that it has made, takes only part of the weights, or restarts with its start-up weights.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import parse_qs, urlsplit

import numpy as np

from forebay.core.rollout import RolloutState
from forebay.engines.weights import server_name
from tests.openai_server import CompletionServer, Received, Script, text_of

__all__ = ["EngineServer", "GenerateServer", "save_weights", "wrong_spans"]

TENSORS = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.0.self_attn.v_proj.weight",
    "model.layers.0.mlp.gate_proj.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.norm.weight",
)


def save_weights(
    directory: Path, step: int, names: tuple[str, ...] = TENSORS, *, shape: tuple[int, ...] = (2, 3)
) -> Path:
    """Weights of a step: every tensor is filled with the number of the step."""
    directory.mkdir(parents=True, exist_ok=True)
    data = np.full(shape, step, np.float32).tobytes()
    header = {
        name: {"dtype": "F32", "shape": list(shape), "data_offsets": [i * len(data), (i + 1) * len(data)]}
        for i, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data * len(names))
    return directory


def _load(directory: Path) -> dict[str, bytes]:
    content = (directory / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    fused: dict[str, bytes] = {}
    for name, entry in json.loads(content[8:start]).items():
        low, high = entry["data_offsets"]
        fused[server_name(name)] = fused.get(server_name(name), b"") + content[start + low : start + high]
    return fused


def wrong_spans(groups: list[list[RolloutState]]) -> list[tuple[int | None, tuple[tuple[int, int], ...], list[float]]]:
    """Samples with a token whose version is not that of the weights that generated it."""
    wrong = []
    for state in (state for group in groups for state in group):
        assert state.logprobs is not None
        made_by = [-float(value) - 1 for value in state.logprobs]
        if made_by != state.response_model_steps:
            wrong.append((state.rollout_id, state.version_spans, made_by))
    return wrong


@dataclass
class EngineServer(CompletionServer):
    """`async with EngineServer(started_with=directory, kind="vllm") as server:`."""

    started_with: Path = field(default_factory=Path)
    kind: Literal["vllm", "sglang", "anonymous"] = "vllm"
    tail_ticks: int = 0  # turns of the event loop for which a request continues after its client has left
    refuse_updates: int = 0  # the number of updates that are made and then refused
    partial_updates: int = 0  # the number of updates that silently take only half of the tensors
    keep_version: int = 0  # the number of updates that do not change the version
    started_version: str = "default"
    hold_tails: bool = False  # requests continue forever after their clients have left
    silent: bool = False  # questions about itself are not answered while it generates

    weights: dict[str, bytes] = field(default_factory=dict)
    version: str = "default"
    model_path: str = ""  # SGLang reports the directory that it loaded last
    cache_of: bytes = b""
    tails: int = 0
    paused: bool = False
    updates_while_busy: int = 0
    loads: int = 0  # updates that changed the weights
    snapshots: int = 0

    async def __aenter__(self) -> Self:
        self._start_up()
        return await super().__aenter__()

    def _start_up(self) -> None:
        self.weights = _load(self.started_with)
        self.version, self.cache_of, self.paused = self.started_version, self._made_of, False
        self.model_path = str(self.started_with)

    @property
    def _made_of(self) -> bytes:
        return b"".join(self.weights.values())

    @property
    def step(self) -> int:
        """The step of the current weights; that of the norm, if they are mixed."""
        return int(np.frombuffer(self.weights["model.norm.weight"], np.float32)[0])

    @property
    def running(self) -> int:
        return self.active + self.tails

    @property
    def root(self) -> str:
        return self.url.removesuffix("/v1")

    async def kill(self) -> None:
        """Like a process that is killed: all connections are closed."""
        assert self._server is not None
        self._server.close()
        for handler in list(self._handlers):
            handler.cancel()
        await asyncio.gather(*self._handlers, return_exceptions=True)
        await self._server.wait_closed()

    async def start_again(self) -> None:
        """Start another process at the same address, with the start-up weights."""
        self.start = (self.start or 0) + 1
        self._start_up()
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)

    async def restart(self) -> None:
        await self.kill()
        await self.start_again()

    def load(self, directory: Path) -> None:
        """Load new weights without the control paths; drops the cache."""
        self.weights = _load(directory)
        self.cache_of = self._made_of

    # --- generating -----------------------------------------------------------------------------------

    async def _stream(self, request: Received, script: Script) -> AsyncIterator[bytes]:
        prompt, asked = request.body["prompt"], request.body.get("max_tokens", 16)
        try:
            for position in range(asked):
                token = (31 * prompt[0] + len(prompt) + position) % 1000
                await self._until(lambda: not self.paused)
                if script.cut_after == position:
                    return
                await asyncio.sleep(script.pause_s)
                stale = 0.5 if self.cache_of != self._made_of else 0.0
                choice: dict[str, Any] = {
                    "text": text_of(token),
                    "token_ids": [token],
                    "logprobs": {"tokens": [text_of(token)], "token_logprobs": [-float(self.step) - 1 - stale]},
                    "finish_reason": "length" if position == asked - 1 else None,
                }
                yield b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
                request.sent += 1
                self._changed.set()
            yield b"data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            if self.tail_ticks or self.hold_tails:
                self.tails += 1
                asyncio.get_running_loop().create_task(self._tail())
            raise

    async def _tail(self) -> None:
        for _ in range(self.tail_ticks):
            await asyncio.sleep(0.001)
        await self._until(lambda: not self.hold_tails)
        self.tails -= 1
        self._changed.set()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    # --- control --------------------------------------------------------------------------------------

    async def control(self, method: str, path: str, body: Any) -> tuple[int, bytes]:
        await self._until(lambda: not (self.silent and self.active))
        url = urlsplit(path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        answer = getattr(self, f"_{self.kind}{url.path.replace('/', '_')}", None)
        if answer is None:
            return 404, b'{"detail":"Not Found"}'
        found = await answer(query if body is None else body)
        status, content = found if isinstance(found, tuple) else (200, found)
        return status, content if isinstance(content, bytes) else json.dumps(content).encode()

    def _update(self, directory: str) -> bool:
        """Make an update; returns whether a request was running."""
        new = _load(Path(directory))
        if self.partial_updates:
            self.partial_updates -= 1
            new = {**self.weights, **dict(list(new.items())[: len(new) // 2])}
        busy = bool(self.running)
        self.updates_while_busy += busy
        self.weights, self.loads = new, self.loads + 1
        return busy

    def _checksums(self) -> dict[str, str]:
        return {name: hashlib.sha256(data).hexdigest() for name, data in self.weights.items()}

    # vLLM

    async def _vllm_metrics(self, _: Any) -> bytes:
        return (
            f"process_start_time_seconds {self.start}\n"
            f'vllm:num_requests_running{{engine="0"}} {self.running:.1f}\n'
            'vllm:num_requests_waiting{engine="0"} 0.0\n'
        ).encode()

    async def _vllm_v1_models(self, _: Any) -> Any:
        return {"data": [{"id": "policy", "root": str(self.started_with)}]}

    async def _vllm_is_paused(self, _: Any) -> Any:
        return {"is_paused": self.paused}

    async def _vllm_pause(self, query: Any) -> Any:
        assert query["mode"] == "wait"
        await self._until(lambda: not self.running)
        self.paused = True
        return {"status": "paused"}

    async def _vllm_resume(self, _: Any) -> Any:
        self.paused = False
        return {"status": "resumed"}

    async def _vllm_collective_rpc(self, body: Any) -> Any:
        self._update(body["kwargs"]["weights_path"])
        if self.refuse_updates:
            self.refuse_updates -= 1
            return 500, {"error": {"message": "Worker failed", "code": 500}}
        return {"results": [None]}

    async def _vllm_weight_checker(self, body: Any) -> Any:
        return {"checksums": {f"dp0:pp0:pcp0:tp0:{name}": digest for name, digest in self._checksums().items()}}

    async def _vllm_reset_prefix_cache(self, _: Any) -> Any:
        if not self.running:
            self.cache_of = self._made_of
        return {"success": not self.running}

    async def _vllm_update_weight_version(self, body: Any) -> Any:
        if self.keep_version:
            self.keep_version -= 1
        else:
            self.version = body["new_version"]
        return {"success": True, "new_version": self.version}

    async def _vllm_weight_info(self, _: Any) -> Any:
        return {"weight_version": self.version}

    # SGLang

    async def _sglang_server_info(self, _: Any) -> Any:
        return {"random_seed": int(self.start or 0), "startup_time": {"scheduler_e2e": self.start}}

    async def _sglang_model_info(self, _: Any) -> Any:
        return {"model_path": self.model_path, "weight_version": self.version}

    async def _sglang_v1_loads(self, _: Any) -> Any:
        self.snapshots += 1
        load = {"num_running_reqs": self.running, "num_waiting_reqs": 0, "timestamp": float(self.snapshots)}
        return {"loads": [load]}

    async def _sglang_flush_cache(self, query: Any) -> Any:
        try:
            async with asyncio.timeout(float(query.get("timeout", 0.001))):
                await self._until(lambda: not self.running)
        except TimeoutError:
            return 400, b"Timed out waiting for idle state."
        self.cache_of = self._made_of
        return b"Cache flushed."

    async def _sglang_update_weights_from_disk(self, body: Any) -> Any:
        busy = self._update(body["model_path"])
        if busy or self.refuse_updates:
            self.refuse_updates = max(0, self.refuse_updates - 1)
            return 400, {"success": False, "message": "Weights were updated, but the cache was not flushed"}
        self.cache_of, self.version = self._made_of, self.version if self.keep_version else body["weight_version"]
        self.keep_version = max(0, self.keep_version - 1)
        self.model_path = body["model_path"]
        return {"success": True, "message": "Succeeded to update model weights."}

    async def _sglang_weights_checker(self, body: Any) -> Any:
        return {"success": True, "ranks": [{"checksums": {name: d[:16] for name, d in self._checksums().items()}}]}


@dataclass
class GenerateServer(EngineServer):
    """An SGLang server with `/generate`: it reports the version of each token, and takes weights while requests run."""

    kind: Literal["vllm", "sglang", "anonymous"] = "sglang"
    generates: str = "/generate"
    incremental: bool = False  # events hold the new tokens only
    between: Callable[[int], None] | None = None  # called before the n-th token of a request

    @property
    def running(self) -> int:
        return 0 if self.paused else super().running  # a pause takes requests back into the queue

    async def whole(self, request: Received, script: Script) -> dict[str, Any]:
        events = [json.loads(event[len("data: ") :]) async for event in self._stream(request, script) if b"{" in event]
        answer: dict[str, Any] = events[-1]
        return answer

    async def _stream(self, request: Received, script: Script) -> AsyncIterator[bytes]:
        prompt = request.body["input_ids"]
        asked = request.body["sampling_params"].get("max_new_tokens", 128)
        ids: list[int] = []
        entries: list[tuple[float, int, None]] = []
        versions: list[str] = []
        shown = 0
        reason = None
        while reason is None:
            position = len(ids)
            if script.hold_after == position:
                await self.go.wait()
            if self.between is not None:
                self.between(position)
            await asyncio.sleep(script.pause_s)
            await self._until(lambda: not self.paused)
            if script.cut_after == position:
                return
            if script.report_after == position:
                error = {"message": "the engine stumbled", "code": script.report_code}
                yield b"data: " + json.dumps({"error": error}).encode() + b"\n\n"
                break
            ids.append((31 * prompt[0] + len(prompt) + position) % 1000)
            stale = 0.5 if self.cache_of != self._made_of else 0.0
            entries.append((-float(self.step) - 1 - stale, ids[-1], None))
            versions.append(self.version)
            aborted = script.end_after == len(ids)
            if len(ids) == asked or aborted:
                reason = {"type": "abort" if aborted else "length"}
            if reason is None and len(ids) % script.tokens_per_chunk:
                continue
            first = shown if self.incremental else 0
            meta: dict[str, Any] = {
                "completion_tokens": len(ids),
                "finish_reason": reason,
                "output_token_logprobs": entries[first:],
                "weight_version": self.version,
            }
            if reason is not None:
                meta["weight_versions"] = _runs(versions)
            event = {"text": "".join(map(text_of, ids[first:])), "output_ids": ids[first:], "meta_info": meta}
            yield b"data: " + json.dumps(event).encode() + b"\n\n"
            if aborted:  # as SGLang does, it sends the last token once more
                event |= {"output_ids": ids[-1:] if self.incremental else ids, "text": "".join(map(text_of, ids))}
                yield b"data: " + json.dumps(event).encode() + b"\n\n"
            shown = len(ids)
            request.sent = shown
            self._changed.set()
        yield b"data: [DONE]\n\n"

    async def _sglang_pause_generation(self, body: Any) -> Any:
        assert body["mode"] == "retract"
        self.paused = True
        return {"status": "ok"}

    async def _sglang_continue_generation(self, body: Any) -> Any:
        self.paused = False
        return {"status": "ok"}


def _runs(versions: list[str]) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = []
    for position, version in enumerate(versions):
        if not runs or runs[-1]["version"] != version:
            runs.append({"version": version, "start": position, "end": position})
        runs[-1]["end"] = position + 1
    return runs
