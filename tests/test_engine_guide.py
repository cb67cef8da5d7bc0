"""The programs of docs/guide/engines.md that need servers run against servers over HTTP, as they are printed.

Only the addresses, the numbers of groups and steps, and the names that the guide leaves to the reader are replaced.
"""

from __future__ import annotations

import asyncio
import gc
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from forebay import RolloutState
from tests.engine_server import EngineServer, GenerateServer, save_weights, wrong_spans
from tests.openai_server import Script
from tests.processes import HANG_S, ROOT
from tests.test_readme import FENCE

GUIDE = ROOT / "docs" / "guide" / "engines.md"


def program(section: str) -> str:
    """The Python of a section of the guide."""
    text = GUIDE.read_text()
    begin = text.index(f"\n## {section}\n")
    return next(found["content"] for found in FENCE.finditer(text, begin) if found["info"].startswith("python"))


@contextmanager
def serving(servers: list[EngineServer]) -> Iterator[None]:
    """Run servers on the event loop of another thread."""
    ready, done = threading.Event(), threading.Event()

    async def serve() -> None:
        for server in servers:
            await server.__aenter__()
        ready.set()
        await asyncio.to_thread(done.wait)
        for server in servers:
            await server.__aexit__()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(HANG_S)
        yield
    finally:
        done.set()
        thread.join()


# A loader does not close the loops that it was given, so the connections of the program are closed by the collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("section", "kinds", "addresses"),
    [
        ("The short version", [EngineServer], ["http://engine:8000"]),
        ("Several servers", [EngineServer, EngineServer], ["http://engine-0:8000", "http://engine-1:8001"]),
        ("SGLang: new weights while requests run", [GenerateServer], ["http://engine-0:30000"]),
    ],
)
def test_a_program_of_the_guide_trains(
    section: str,
    kinds: list[Callable[..., EngineServer]],
    addresses: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # the weights are written below it
    servers = [kind(started_with=save_weights(tmp_path / "start", 0)) for kind in kinds]
    samples: list[list[RolloutState]] = []

    def save(path: str) -> None:
        step = int(path.rpartition("_")[2])
        Path(path).mkdir(parents=True)
        save_weights(Path(path), step)

    with serving(servers):
        source = program(section)
        for server, address in zip(servers, addresses, strict=True):
            server.usual = Script(pause_s=0.0005)
            assert address in source
            source = source.replace(address, server.root)
        source = re.sub(r"batch_groups=64", "batch_groups=4", source).replace("4096", "30").replace("1, 1000", "1, 5")
        source = source.replace("        train(", "        seen(batch)\n        train(")
        names: dict[str, Any] = {
            "prompts": [{"prompt": f"question {n}", "prompt_ids": [n, 7]} for n in range(100)],
            "score": lambda state: 1.0,
            "train": lambda micro_batches: None,
            "seen": lambda batch: samples.extend(batch.groups),
            "save_as_safetensors": save,
        }
        exec(compile(source, str(GUIDE), "exec"), names)
        names.clear()
        gc.collect()
    assert len(samples) == 5 * 4
    assert wrong_spans(samples) == []
    assert all(server.version == "5" for server in servers)
    assert all(server.received for server in servers)
