"""PostgresStorage: one buffer for many producers and many consumers on many machines.

`storage` has the class, on top of its `life`; `schema` the tables; `arriving`, `claiming`, `leaving`, `looking` and
`streams` what happens in them; `answers` what is remembered of calls; `connections` how a step runs, and `companion`
how processes wake each other and keep their leases. Needs asyncpg.
"""

from forebay.storage.postgres.storage import PostgresStorage

__all__ = ["PostgresStorage"]
