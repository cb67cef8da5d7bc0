"""The tables of one buffer in PostgreSQL: one schema for each buffer name, created once, versioned.

- `groups`: one row a group, metadata only. `payloads`: its codec frame, so that counting and choosing never read it.
- `accounts`: the cursor, the clocks, the limits and the plan of each task; `floor_oldest` and `floor_token` follow
  from clocks and limits, so that claims compare with them in SQL.
- `counters`: what the ledger says, in shards: a transaction adds its changes to the shard of its connection, so that
  puts do not wait for one row; a reader adds the shards up. `reasons`: the same by reason. `sizes`: the same by the
  rounded size of responses, kept if there is a limit in bytes.
- `owners`: the owners that have the buffer open, and their deadlines.
- `ends`: groups that ended and that were not reported yet, if `store.notes_ends`.
- `calls`: the answers of calls that may be repeated.

All strings are COLLATE "C", which for UTF-8 is the order of code points. Processes may create one buffer at the same
time; a schema of another version is refused. Statements name no schema: it is the search path of the connections.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from forebay.core.capacity import Settings
from forebay.core.policy import Order
from forebay.errors import InvalidConfig
from forebay.storage.postgres.columns import DEFINITIONS
from forebay.storage.postgres.step import COUNTERS

VERSION = 5

QUEUE = "(task_name || '/' || status)"
"""The queue that a buffered group waits in: groups of one queue are claimed in one order. It is one value, so that only
the index of that order fits a claim: until the tables are analysed, the planner takes any index for as good."""

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
CREATE TABLE groups ({DEFINITIONS}, PRIMARY KEY (uid), UNIQUE (task_name, group_id))
    WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.05);
CREATE INDEX groups_oldest ON groups (task_name, status, oldest_step) WHERE place = 'buffered';
CREATE INDEX groups_again ON groups ({QUEUE}, group_id)
    WHERE place = 'buffered' AND status IN ('init', 'expired', 'aborted');
CREATE INDEX groups_held ON groups (owner, uid) WHERE owner IS NOT NULL;
CREATE INDEX groups_archived ON groups (moved_at, uid) WHERE place = 'archived';
CREATE INDEX groups_trained ON groups (train_step) WHERE place = 'archived';
CREATE TABLE payloads (uid bigint PRIMARY KEY, frame bytea NOT NULL)
    WITH (autovacuum_vacuum_scale_factor = 0.02, toast.autovacuum_vacuum_scale_factor = 0.02);
ALTER TABLE payloads ALTER COLUMN frame SET STORAGE EXTERNAL;
CREATE TABLE accounts (
    task_name text COLLATE "C" PRIMARY KEY,
    cursor bigint NOT NULL DEFAULT 0,
    source_state bytea,
    train_step bigint,
    model_step bigint,
    limits text NOT NULL DEFAULT '{{}}',
    epoch bigint NOT NULL DEFAULT 0,
    saved_step bigint,
    plan bytea,
    plan_revision bigint NOT NULL DEFAULT 0,
    floor_oldest bigint,
    floor_token bigint
) WITH (fillfactor = 50);
CREATE TABLE counters (
    task_name text COLLATE "C" NOT NULL,
    shard smallint NOT NULL,
    {", ".join(f"{name} bigint NOT NULL DEFAULT 0" for name in COUNTERS)},
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
CREATE TABLE owners (
    owner text COLLATE "C" PRIMARY KEY,
    lease_s double precision,
    deadline timestamptz,
    reaped boolean NOT NULL DEFAULT false
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
CREATE TABLE calls (
    client text COLLATE "C" NOT NULL,
    sequence bigint NOT NULL,
    part bigint NOT NULL,
    data bytea NOT NULL,
    PRIMARY KEY (client, sequence, part)
) WITH (autovacuum_vacuum_scale_factor = 0.02, toast.autovacuum_vacuum_scale_factor = 0.02);
ALTER TABLE calls ALTER COLUMN data SET STORAGE EXTERNAL;
"""

# Read as data: what a connection has cached of the catalogue may be older than its lock.
_EXISTS = """
SELECT EXISTS (SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = $1 AND c.relname = 'store')"""


def advisory_key(name: str, purpose: str) -> int:
    """The number of an advisory lock of this buffer."""
    digest = hashlib.blake2b(f"forebay/{name}/{purpose}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


async def ensure_schema(connection: Any, name: str) -> str:
    """The id of the store, which is created if it does not exist; InvalidConfig if it has another version.

    In a transaction: either all tables exist afterwards, or none.
    """
    if not await connection.fetchval(_EXISTS, name):
        await connection.execute("SELECT pg_advisory_xact_lock($1)", advisory_key(name, "schema"))
        if not await connection.fetchval(_EXISTS, name):
            if await connection.fetchval("SELECT getdatabaseencoding()") != "UTF8":
                raise InvalidConfig("the database does not store strings as UTF-8; create it with ENCODING 'UTF8'")
            await connection.execute(f'CREATE SCHEMA IF NOT EXISTS "{name}"')
            await connection.execute(_TABLES)
            await connection.execute("INSERT INTO store (version) VALUES ($1)", VERSION)
    version = await connection.fetchval("SELECT version FROM store")
    if version != VERSION:
        advice = (
            "use a newer Forebay"
            if version > VERSION
            else "finish with the Forebay that made it, or choose another name and restore a checkpoint into it"
        )
        raise InvalidConfig(
            f"the buffer {name!r} in this database has schema version {version}; this Forebay reads version "
            f"{VERSION}: {advice}"
        )
    store_id: str = await connection.fetchval("SELECT store_id FROM store")
    return store_id


def settings_text(settings: Settings) -> str:
    """The settings that all owners must share, as they are stored. A `choose` is known by its name."""
    choose: Any = settings.choose
    name = None
    if choose is not None:
        name = f"{choose.__module__}.{getattr(choose, '__qualname__', type(choose).__name__)}"
    return msgspec.json.encode({**msgspec.structs.asdict(settings), "choose": name}).decode()


def read_settings(stored: str) -> Settings:
    """The settings in what `settings_text` wrote. A `choose` cannot be read back, because it is code."""
    content = msgspec.json.decode(stored)
    if content.pop("choose") is not None:
        raise InvalidConfig("the policy of this buffer chooses by a function of its own; open it with that policy")
    return Settings(**content | {"order": msgspec.convert(content["order"], Order)})


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
        f"CREATE INDEX IF NOT EXISTS \"{wanted}\" ON groups ({QUEUE}, {clause}) WHERE place = 'buffered'"
    )
