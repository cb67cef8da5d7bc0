"""Weight updates that are not whole: a live server answers 200 to all of them, and the control notices."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from forebay import InvalidInput, RolloutState, SampleParams
from forebay.engines import EngineControl, VLLMControl
from forebay.errors import EngineError, EngineRestarted
from tests.engines.plain_http import checksums, complete, weight_version
from tests.engines.plane import LIMIT_S, fresh_samples, open_loop
from tests.engines.reference import Reference
from tests.engines.servers import Server
from tests.engines.tiny_model import without_tensors


async def _assert_serves(server: Server, reference: Reference, model_step: int) -> None:
    """The server generates, with the weights of this step."""
    state = fresh_samples(1)[0]
    await complete(server.url, state, 64)
    state.version_spans = ((model_step, 64),)
    assert not reference.check([state]).wrong


@pytest.mark.engine("vllm")
async def test_update_weights_refuses_a_server_that_reloads_only_a_part_of_its_weights(
    partial_server: Server, versions: list[Path], reference: Reference
) -> None:
    control = VLLMControl(partial_server.url)
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(EngineError, match="worker extension"):
            await control.update_weights(versions[1], model_step=1)
        assert await weight_version("vllm", partial_server.url) == "default"
        await _assert_serves(partial_server, reference, 0)


@pytest.mark.parametrize("lacks", ["model.layers.1.", "model.layers.1.self_attn.q_proj.weight", "model.embed_tokens"])
async def test_weights_with_missing_tensors_are_refused_before_the_server_is_touched(
    lacks: str,
    server: Server,
    versions: list[Path],
    reference: Reference,
    engine: str,
    control_class: type[EngineControl],
    tmp_path: Path,
) -> None:
    incomplete = without_tensors(versions[1], tmp_path / "incomplete", lambda name: name.startswith(lacks))
    control = control_class(server.url)
    async with asyncio.timeout(LIMIT_S):
        before = await checksums(engine, server.url)
        with pytest.raises(InvalidInput, match="missing"):
            await control.update_weights(incomplete, model_step=1)
        assert await checksums(engine, server.url) == before
        assert await weight_version(engine, server.url) == "default"
        await _assert_serves(server, reference, 0)
        await control.update_weights(versions[1], model_step=1)
        await _assert_serves(server, reference, 1)


async def test_a_reload_of_a_part_is_detected_and_no_token_counts_until_a_whole_one(
    server: Server, versions: list[Path], reference: Reference, control_class: type[EngineControl], tmp_path: Path
) -> None:
    incomplete = without_tensors(versions[1], tmp_path / "incomplete", lambda name: "layers.1." in name)
    directories = itertools.chain([incomplete], itertools.repeat(versions[1]))

    class FirstLoadIsIncomplete(control_class):  # type: ignore[misc, valid-type]
        async def _load_weights(self, directory: Path, version: str) -> None:
            await super()._load_weights(next(directories), version)  # what the server finds there

    control = FirstLoadIsIncomplete(server.url)
    params = SampleParams(max_tokens=64, temperature=1.0)
    async with asyncio.timeout(LIMIT_S), open_loop(server, params, control) as (loop, _):
        with pytest.raises(EngineError, match="took only part of the weights"):
            await control.update_weights(versions[1], model_step=1)
        refused = fresh_samples(2)
        with pytest.raises(EngineRestarted):
            await loop.generate_group(refused)
        assert all(_is_untouched(state) for state in refused)
        await control.update_weights(versions[1], model_step=1)
        group = await loop.generate_group(fresh_samples(2))
    for state in group:
        state.version_spans = ((1, 64),)
    assert not reference.check(group).wrong


def _is_untouched(state: RolloutState) -> bool:
    return state.response_ids is None or not len(state.response_ids)
