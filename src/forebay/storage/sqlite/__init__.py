"""SQLiteStorage: the embedded durable store, in one file."""

from forebay.storage.sqlite.storage import SQLiteStorage

__all__ = ["SQLiteStorage"]
