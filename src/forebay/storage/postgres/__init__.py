"""PostgresStorage: one buffer for many producers and many consumers on many machines.

`storage` has the class; `schema` the tables; `arriving`, `leaving`, `looking` and `streams` what happens in them;
`connections` how a step runs, and `companion` how processes wake each other and keep their leases. Needs asyncpg.
"""

from forebay.storage.postgres.storage import PostgresStorage

__all__ = ["PostgresStorage"]
