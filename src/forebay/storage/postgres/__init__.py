"""PostgresStorage: one buffer for many producers and many consumers on many machines. Needs asyncpg.

`storage` has the class. What its operations do: `puts`, `claims`, `moves`, `reads`, `owners`, `accounts`. How they do
it: `step` (the changes of one transaction), `connections` (the pool, cancelled and doubtful commits), `notify`
(wake-ups and heartbeats). What is stored: `schema`, `columns`.
"""

from forebay.storage.postgres.storage import PostgresStorage

__all__ = ["PostgresStorage"]
