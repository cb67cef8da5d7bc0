"""Storages that live in this process: one engine over a table of rows."""
