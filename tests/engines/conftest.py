"""One live server for all tests of this folder; `make test-engines` runs them inside the engine's environment.

ENGINE names the engine, vllm or sglang. Tests marked for the other one are deselected, and the report says which. Every
test starts with a server that has its start-up weights; after a failed test the next one gets a new server.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from forebay.engines import EngineControl, SGLangControl, VLLMControl
from tests.engines.plain_http import push_weights
from tests.engines.reference import Reference
from tests.engines.servers import Server, sglang_server, vllm_server
from tests.engines.tiny_model import make_versions

UPDATES = 8
_CONTROLS: dict[str, type[EngineControl]] = {"vllm": VLLMControl, "sglang": SGLangControl}
_LOGS = Path(sys.prefix) / "server-logs"
_failed: list[str] = []
_deselected: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    if _engine() not in _CONTROLS:
        raise pytest.UsageError(f"ENGINE is {_engine()!r}; expected one of {', '.join(_CONTROLS)} (make test-engines)")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the server must not outlive the tests
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it writes a line for every request
    config.addinivalue_line("markers", "engine(name): the rule holds for this engine only")


def pytest_report_header() -> str:
    return f"engine: {_engine()}, logs of the server in {_LOGS}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    others = [item for item in items if any(mark.args != (_engine(),) for mark in item.iter_markers("engine"))]
    if others:
        _deselected.extend(item.nodeid for item in others)
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]
    items.sort(key=lambda item: "partial_server" in getattr(item, "fixturenames", ()))  # starting one takes a minute


def pytest_report_collectionfinish() -> list[str]:
    return [f"not for {_engine()}: {name}" for name in _deselected]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        _failed.append(item.nodeid)
    return report


def _engine() -> str:
    return os.environ.get("ENGINE", "")


class OneServer:
    """Runs at most one server at a time, of the kind that was last asked for."""

    def __init__(self, versions: list[Path], logs: Path) -> None:
        self._versions, self._logs = versions, logs
        self._server: Server | None = None
        self._kind = ""

    def get(self, kind: str) -> Server:
        """The running server of a kind: "whole" reloads all of its weights, "partial" only some (vLLM)."""
        if self._server is not None and (self._kind != kind or _failed or not self._server.running):
            _failed.clear()
            self.stop()
        if self._server is None:
            log_file = self._logs / f"{_engine()}-{kind}.log"
            if _engine() == "sglang":
                assert kind == "whole", "SGLang always reloads all of its weights"
                server = sglang_server(self._versions[0], log_file)
            else:
                server = vllm_server(self._versions[0], log_file, keeps_weights_plain=kind == "whole")
            server.start()
            self._server, self._kind = server, kind
        return self._server

    def stop(self) -> None:
        """Kill the server, if there is one."""
        if self._server is not None:
            self._server.kill()
            self._server = None


@pytest.fixture(scope="session")
def engine() -> str:
    """The name of the engine."""
    return _engine()


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The directory of the weights of each model step."""
    return make_versions(tmp_path_factory.mktemp("weights"), UPDATES)


@pytest.fixture(scope="session")
def reference(versions: list[Path]) -> Reference:
    """Computes the logprobs of every version."""
    return Reference(versions)


@pytest.fixture(scope="session")
def one_server(versions: list[Path]) -> Iterator[OneServer]:
    """The place of the server."""
    _LOGS.mkdir(exist_ok=True)
    for old in _LOGS.iterdir():
        old.unlink()
    place = OneServer(versions, _LOGS)
    yield place
    place.stop()


@pytest.fixture
async def server(one_server: OneServer, versions: list[Path]) -> Server:
    """A running server with its start-up weights."""
    server = one_server.get("whole")
    await push_weights(_engine(), server.url, versions[0], "default")
    return server


@pytest.fixture
def partial_server(one_server: OneServer) -> Server:
    """A running server that reloads only some of its weights, and says that it did."""
    return one_server.get("partial")


@pytest.fixture
def control_class() -> type[EngineControl]:
    """The control of the engine."""
    return _CONTROLS[_engine()]
