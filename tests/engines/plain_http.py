"""The control calls of each engine as bare HTTP, for tests that must not depend on the library they test.

`push_weights` is what a trainer without `forebay.engines` would send. `checksums` is what the server itself says of its
tensors. Both speak to an idle server.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from forebay import RolloutState
from tests.engines.servers import MODEL_NAME

__all__ = ["checksums", "complete", "push_weights", "weight_version"]

_TIMEOUT_S = 120.0


async def push_weights(engine: str, url: str, version: Path, name: str) -> None:
    """Load weights from a directory, drop the cache of the old ones, and set the name that the server reports."""
    if engine == "vllm":
        arguments = {"method": "reload_weights", "kwargs": {"weights_path": str(version)}}
        await _post(f"{url}/collective_rpc", arguments)
        dropped = await _post(f"{url}/reset_prefix_cache")
        assert dropped["success"], "the server did not drop its cache: it runs requests"
        await _post(f"{url}/update_weight_version", {"new_version": name})
    else:
        await _post(f"{url}/flush_cache", params={"timeout": "60"})
        await _post(f"{url}/update_weights_from_disk", {"model_path": str(version), "weight_version": name})


async def checksums(engine: str, url: str) -> dict[str, str]:
    """A checksum for each tensor of the server, by its name there."""
    if engine == "vllm":
        found: dict[str, str] = (await _post(f"{url}/weight_checker", {"action": "checksum"}))["checksums"]
    else:
        found = (await _post(f"{url}/weights_checker", {"action": "checksum"}))["ranks"][0]["checksums"]
    return found


async def weight_version(engine: str, url: str) -> str:
    """The version that the server reports; "default" after a start."""
    async with httpx.AsyncClient(trust_env=False, timeout=_TIMEOUT_S) as client:
        response = await client.get(f"{url}/weight_info" if engine == "vllm" else f"{url}/model_info")
    version: str = response.raise_for_status().json()["weight_version"]
    return version


async def complete(url: str, state: RolloutState, tokens: int) -> None:
    """Answer a sample with this number of tokens at temperature 1."""
    body = {
        "model": MODEL_NAME,
        "prompt": state.prompt_ids,
        "max_tokens": tokens,
        "temperature": 1.0,
        "logprobs": 1,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    choice = (await _post(f"{url}/v1/completions", body))["choices"][0]
    state.response_ids, state.logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]


async def _post(url: str, body: object = None, *, params: dict[str, str] | None = None) -> Any:
    async with httpx.AsyncClient(trust_env=False, timeout=_TIMEOUT_S) as client:
        response = await client.post(url, json=body, params=params)
    assert response.status_code == 200, f"POST {url} answered {response.status_code}: {response.text[:500]}"
    return response.json() if response.headers.get("content-type", "").startswith("application/json") else response.text
