"""The tables of one buffer in PostgreSQL: one schema for each buffer name, created once, versioned.

- `groups`: a row for each group, metadata only; `payloads`: its codec frame, so that counting and choosing never
  read it. `accounts`: positions and watermarks by task. `owners`: who has the store open, and until when.
- `tallies`: what the ledger says, in shards: a transaction adds its changes to the shard of its own connection,
  so that puts do not wait for one row; a reader adds the shards up. `reasons`: the same, by reason. `sizes`: the same,
  of responses by their rounded size, kept if there is a limit in bytes.
- `ends`: groups that ended and that nobody was told of, if `store.notes_ends` (see `group_ends`).
- `calls`: what calls answered that may come twice; buffers of earlier versions get it when they are first used.

All text is COLLATE "C", which for UTF-8 is the order of code points. Creating is free of races between processes; a
schema of a newer version is refused. Statements elsewhere name no schema: connections have it as their
search path.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from forebay.core.policy import Order
from forebay.core.rollout import Status
from forebay.errors import InvalidConfig
from forebay.storage.base import Settings
from forebay.storage.postgres.transactions import transaction

__all__ = [
    "END_COUNTERS",
    "SHARDS",
    "SHELF",
    "TALLY_COLUMNS",
    "advisory_key",
    "ensure_schema",
    "order_clause",
    "replace_order_index",
    "settings_text",
]

VERSION = 3
SHARDS = 16


END_COUNTERS = ("trained", "filtered", "failed", "discarded")
TALLY_COLUMNS = (
    "issued",
    "in_flight",
    "leased",
    *(f"buffered_{status}" for status in Status),
    "in_flight_tokens",
    "buffered_tokens",
    "leased_tokens",
    "bytes",
    "reserved",
    *END_COUNTERS,
    *(f"{end}_tokens" for end in END_COUNTERS),
    "issued_tokens",
    "reset_tokens",
)
"""Counters of a task. `bytes` and `reserved` are those of the groups in flight, buffered and leased."""

SHELF = "(task_name || '/' || status)"
"""Where a buffered group stands: those that are claimed in one order together. As one value, so that only the index of
that order fits a claim: until the tables are analysed, the planner takes any index for as good as another."""

_TABLES = f"""
CREATE TABLE store (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    version integer NOT NULL,
    store_id text COLLATE "C" NOT NULL DEFAULT gen_random_uuid()::text,
    saved_step bigint,
    notes_ends boolean NOT NULL DEFAULT false,
    settings text COLLATE "C"
);
CREATE SEQUENCE uids;
CREATE SEQUENCE arrivals;
CREATE SEQUENCE hand_ids;
CREATE SEQUENCE archive_ids;
CREATE TABLE groups (
    uid bigint PRIMARY KEY,
    timestamp_id bigint NOT NULL,
    task_name text COLLATE "C" NOT NULL,
    group_id bigint NOT NULL,
    status text COLLATE "C" NOT NULL,
    place text COLLATE "C" NOT NULL,
    samples bigint NOT NULL,
    tokens bigint NOT NULL,
    bytes bigint NOT NULL,
    num_tries bigint NOT NULL,
    reward double precision,
    oldest_step bigint,
    newest_step bigint,
    token_step bigint,
    given_staleness bigint NOT NULL,
    unjudged bigint NOT NULL,
    created_at double precision NOT NULL,
    moved_at double precision NOT NULL,
    priority double precision NOT NULL,
    attempt bigint NOT NULL,
    deliveries bigint NOT NULL,
    revision bigint NOT NULL,
    owner text COLLATE "C",
    lease_id text COLLATE "C",
    train_step bigint,
    reserved_bytes bigint NOT NULL,
    session_ids bytea,
    tags bytea,
    tag_values jsonb,
    archive_id bigint,
    trained_as text COLLATE "C",
    UNIQUE (task_name, group_id)
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.05);
CREATE INDEX groups_oldest ON groups (task_name, status, oldest_step) WHERE place = 'buffered';
CREATE INDEX groups_token ON groups (task_name, status, token_step)
    WHERE place = 'buffered' AND token_step IS DISTINCT FROM oldest_step;
CREATE INDEX groups_again ON groups ({SHELF}, group_id)
    WHERE place = 'buffered' AND status IN ('init', 'expired', 'aborted');
CREATE INDEX groups_held ON groups (owner, uid) WHERE owner IS NOT NULL;
CREATE INDEX groups_archived ON groups (archive_id) WHERE place = 'archived';
CREATE INDEX groups_trained ON groups (train_step) WHERE place = 'archived';
CREATE TABLE payloads (uid bigint PRIMARY KEY, frame bytea NOT NULL)
    WITH (autovacuum_vacuum_scale_factor = 0.02, toast.autovacuum_vacuum_scale_factor = 0.02);
ALTER TABLE payloads ALTER COLUMN frame SET STORAGE EXTERNAL;
CREATE TABLE accounts (
    task_name text COLLATE "C" PRIMARY KEY,
    cursor bigint NOT NULL DEFAULT 0,
    train_step bigint,
    stale_threshold bigint,
    token_stale_threshold bigint,
    retryable boolean,
    floor_oldest bigint,
    floor_token bigint,
    source_state bytea
) WITH (fillfactor = 50);
CREATE TABLE tallies (
    task_name text COLLATE "C" NOT NULL,
    shard smallint NOT NULL,
    {", ".join(f"{column} bigint NOT NULL DEFAULT 0" for column in TALLY_COLUMNS)},
    PRIMARY KEY (task_name, shard)
) WITH (fillfactor = 30, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_scale_factor = 0);
CREATE TABLE reasons (
    task_name text COLLATE "C" NOT NULL,
    reason text COLLATE "C" NOT NULL,
    shard smallint NOT NULL,
    groups bigint NOT NULL,
    PRIMARY KEY (task_name, reason, shard)
) WITH (fillfactor = 50);
CREATE TABLE sizes (
    task_name text COLLATE "C" NOT NULL,
    size bigint NOT NULL,
    shard smallint NOT NULL,
    groups bigint NOT NULL,
    PRIMARY KEY (task_name, size, shard)
) WITH (fillfactor = 50);
CREATE TABLE ends (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    task_name text COLLATE "C" NOT NULL,
    group_id bigint NOT NULL,
    delivery bigint NOT NULL,
    owner text COLLATE "C",
    data bytea NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.02);
CREATE INDEX ends_identity ON ends (task_name, group_id);
CREATE TABLE owners (
    owner text COLLATE "C" PRIMARY KEY,
    lease_s double precision,
    deadline timestamptz,
    reaped boolean NOT NULL DEFAULT false
) WITH (fillfactor = 50);
"""
_CALLS = """
CREATE TABLE calls (
    client text COLLATE "C" NOT NULL,
    sequence bigint NOT NULL,
    part bigint NOT NULL,
    data bytea NOT NULL,
    PRIMARY KEY (client, sequence, part)
) WITH (autovacuum_vacuum_scale_factor = 0.02, toast.autovacuum_vacuum_scale_factor = 0.02);
ALTER TABLE calls ALTER COLUMN data SET STORAGE EXTERNAL;
"""

# Where both steps are equal, which is nearly always, groups_oldest answers both questions of age: see `due`.


# Read as data: what a connection has cached of the catalogue may be older than its lock.
_IS_THERE = """
SELECT EXISTS (SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = $1 AND c.relname = $2)"""


def advisory_key(name: str, purpose: str) -> int:
    """The number of an advisory lock of this buffer."""
    digest = hashlib.blake2b(f"forebay/{name}/{purpose}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


async def ensure_schema(connection: Any, name: str) -> str:
    """The id of the store, created if it is not there; InvalidConfig if another version of Forebay made it."""
    if not await connection.fetchval(_IS_THERE, name, "store"):
        async with transaction(connection):
            await connection.execute("SELECT pg_advisory_xact_lock($1)", advisory_key(name, "schema"))
            if not await connection.fetchval(_IS_THERE, name, "store"):
                if await connection.fetchval("SELECT getdatabaseencoding()") != "UTF8":
                    raise InvalidConfig("the database does not store text as UTF-8; create it with ENCODING 'UTF8'")
                await connection.execute(f'CREATE SCHEMA IF NOT EXISTS "{name}"')
                await connection.execute(_TABLES + _CALLS)
                await connection.execute("INSERT INTO store (version) VALUES ($1)", VERSION)
    version = await connection.fetchval("SELECT version FROM store")
    if version != VERSION:
        raise InvalidConfig(
            f"the buffer {name!r} in this database has schema version {version}; this Forebay knows version {VERSION}: "
            "use the Forebay that made it, or a newer one"
        )
    if not await connection.fetchval(_IS_THERE, name, "calls"):
        async with transaction(connection):
            await connection.execute("SELECT pg_advisory_xact_lock($1)", advisory_key(name, "schema"))
            if not await connection.fetchval(_IS_THERE, name, "calls"):
                await connection.execute(_CALLS)
    store_id: str = await connection.fetchval("SELECT store_id FROM store")
    return store_id


def settings_text(settings: Settings) -> str:
    """The settings that all openers must share, as stored. A `choose` is known by its name."""
    choose: Any = settings.choose
    chooser = None
    if choose is not None:
        chooser = f"{choose.__module__}.{getattr(choose, '__qualname__', type(choose).__name__)}"
    return msgspec.json.encode(
        {
            "order": [[column.name, column.descending] for column in settings.order.columns],
            "choose": chooser,
            "max_groups": settings.max_groups,
            "max_bytes": settings.max_bytes,
            "expect_group_bytes": settings.expect_group_bytes,
            "keep_trained": settings.keep_trained,
        }
    ).decode()


def order_clause(order: Order) -> str:
    """The order in which groups leave, as SQL over `groups`. Column names are those that `Column` allows."""
    columns = [f'"{column.name}" {"DESC" if column.descending else "ASC"} NULLS LAST' for column in order.columns]
    return ", ".join([*columns, "timestamp_id", "uid"])


async def replace_order_index(connection: Any, order: Order) -> None:
    """Keep exactly the index that this order needs."""
    clause = order_clause(order)
    wanted = "groups_order_" + hashlib.blake2b(clause.encode(), digest_size=6).hexdigest()
    found = await connection.fetch(
        "SELECT indexname FROM pg_indexes WHERE schemaname = current_schema() AND indexname LIKE 'groups\\_order\\_%'"
    )
    for row in found:
        if row["indexname"] != wanted:
            await connection.execute(f'DROP INDEX "{row["indexname"]}"')
    await connection.execute(
        f"CREATE INDEX IF NOT EXISTS \"{wanted}\" ON groups ({SHELF}, {clause}) WHERE place = 'buffered'"
    )
