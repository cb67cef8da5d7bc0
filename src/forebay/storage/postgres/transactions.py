"""Transactions on a connection, and which errors mean that the server is not there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

__all__ = ["GONE", "LOST", "READ", "roll_back", "transaction"]

GONE = (
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,  # the server shuts down, or starts
    asyncpg.TooManyConnectionsError,
)
"""The server says that it is not there for us."""

LOST: tuple[type[BaseException], ...] = (
    *GONE,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,  # TimeoutError included
)
"""What is raised when the server is not there or goes away; the last three also for other reasons."""

READ = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
"""Begins a transaction that reads one moment."""


@asynccontextmanager
async def transaction(connection: Any, begin: str = "BEGIN") -> AsyncIterator[None]:
    """One transaction. (asyncpg's own remembers one whose start was cancelled as if it were still open.)"""
    try:
        await connection.execute(begin)
        yield
    except BaseException:
        await roll_back(connection)
        raise
    await connection.execute("COMMIT")


async def roll_back(connection: Any) -> None:
    """End a transaction without effect.

    Always: after a cancelled statement the connection does not know yet whether a transaction is open.
    """
    if connection.is_closed():
        return
    try:
        await connection.execute("ROLLBACK")
    except BaseException as error:
        connection.terminate()
        if not isinstance(error, LOST):
            raise
