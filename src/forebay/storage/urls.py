"""The URLs of storages: checked without importing or opening anything, and built when they are needed.

memory                        MemoryStorage
pandas                        PandasStorage; needs pandas
sqlite:///path                SQLiteStorage; sqlite:////path if the path is absolute
postgresql://host/database    PostgresStorage; needs asyncpg. `#name` at the end names a buffer (default: forebay)
"""

from __future__ import annotations

import re

from forebay.errors import InvalidConfig
from forebay.storage.base import Storage
from forebay.storage.local.memory import MemoryStorage

SQLITE_URL = "sqlite:///"
"""The beginning of the URL of a SQLite store; the rest is its path."""

IN_MEMORY = ("memory", "pandas")
"""Storages whose content is lost when their process ends."""

_POSTGRES_URLS = ("postgresql://", "postgres://")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,40}")


def check_storage_url(url: str) -> None:
    """InvalidConfig unless the URL names a storage. Imports and opens nothing."""
    if isinstance(url, str) and url.startswith(_POSTGRES_URLS):
        checked_name(url.partition("#")[2] or "forebay")
    elif url not in IN_MEMORY and not (isinstance(url, str) and url.startswith(SQLITE_URL) and url != SQLITE_URL):
        raise InvalidConfig(
            f"unknown storage {url!r}; expected 'memory', 'pandas', 'sqlite:///path' or 'postgresql://host/database'"
        )


def checked_name(name: str) -> str:
    """The name of a buffer in PostgreSQL, safe as an identifier; InvalidConfig otherwise."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidConfig(
            f"the name of a buffer in PostgreSQL is {name!r}; expected a lowercase letter, followed by up to 40 "
            "lowercase letters, digits and underscores"
        )
    return name


def build_storage(url: str) -> Storage:
    """The storage that a URL names; InvalidConfig if there is none, or if a package that it needs is missing."""
    check_storage_url(url)
    if url == "memory":
        return MemoryStorage()
    if url.startswith(SQLITE_URL):
        from forebay.storage.sqlite import SQLiteStorage

        return SQLiteStorage(url.removeprefix(SQLITE_URL))
    if url == "pandas":
        try:
            from forebay.storage.local.pandas import PandasStorage
        except ModuleNotFoundError as missing:
            raise InvalidConfig("storage 'pandas' needs pandas: pip install 'forebay[pandas]'") from missing
        return PandasStorage()
    try:
        from forebay.storage.postgres import PostgresStorage
    except ModuleNotFoundError as missing:
        raise InvalidConfig("storage 'postgresql://' needs asyncpg: pip install 'forebay[postgres]'") from missing
    dsn, _, name = url.partition("#")
    return PostgresStorage(dsn, name or "forebay")
