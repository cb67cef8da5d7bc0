"""Transactions on a connection, and the errors that mean that the server is away."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

__all__ = ["AWAY", "LOST", "READ", "is_closed", "roll_back", "transaction"]

AWAY = (
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,  # the server shuts down, or starts
    asyncpg.TooManyConnectionsError,
)
"""The server says that it cannot serve us."""

LOST: tuple[type[BaseException], ...] = (
    *AWAY,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,  # TimeoutError included
)
"""Raised when the server is away or goes away; the last three are raised for other reasons as well."""

READ = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
"""Begins a transaction that reads one moment."""


def is_closed(connection: Any) -> bool:
    """Whether a connection can no longer be used; a pool refuses even the question then."""
    try:
        return bool(connection.is_closed())
    except asyncpg.InterfaceError:
        return True


@asynccontextmanager
async def transaction(connection: Any, begin: str = "BEGIN") -> AsyncIterator[None]:
    """One transaction. (asyncpg's own takes one whose start was cancelled to be still open.)"""
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
    if is_closed(connection):
        return
    try:
        await connection.execute("ROLLBACK")
    except BaseException as error:
        if not is_closed(connection):
            connection.terminate()
        if not isinstance(error, LOST):
            raise
