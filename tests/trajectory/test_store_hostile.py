"""Stores of trajectories that somebody else made: a clear error or the truth, never a crash, never code, never memory
that a number asks for.

Every case is a copy of one small store, altered. They are opened in a process of their own, with little memory, by
`main`: to read, to load and to write. What it says of each is judged here.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sqlite3
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.errors import DamagedData, ForebayError, InvalidInput
from forebay.trajectory import TrajectoryReplayBuffer
from tests.processes import finished
from tests.trajectory.crash_child import Buffer, check_batch, make

ROOT = Path(__file__).parent.parent.parent
KEYS = range(12)
MEMORY_BYTES = 2**30
GOOD = "good"

Harm = Callable[[Path, sqlite3.Connection], object]


# --- in a process of its own --------------------------------------------------------------------------


def main(root: Path) -> None:
    """Open every store under a directory; a line of JSON for each: what happened, by how it was opened."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    ran: list[str] = []
    watched = {"exec", "pickle.find_class", "os.system", "subprocess.Popen", "os.exec", "sqlite3.enable_load_extension"}
    sys.addaudithook(lambda event, _: ran.append(event) if event in watched else None)
    for path in (root / GOOD, *sorted(root.iterdir())):
        os.write(1, f"{json.dumps({'case': path.name})}\n".encode())
        ran.clear()
        outcomes = {}
        for way in (_reads, _loads, _writes):
            try:
                way(path)
                outcomes[way.__name__] = "ok"
            except ForebayError as error:
                outcomes[way.__name__] = f"{type(error).__name__}: {error}"
            except BaseException as error:
                outcomes[way.__name__] = f"WRONG {type(error).__name__}: {error}"
        found = {"case": path.name, "outcomes": outcomes, "ran": ran}
        os.write(1, f"{json.dumps(found)}\n".encode())
    # Not getrusage, which tells what the parent had.
    (peak,) = (line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    os.write(1, f"{json.dumps({'peak': int(peak) * 1024})}\n".encode())


def _reads(path: Path) -> None:
    with Buffer(sample_window_size=0, auto_save_path=path, read_only=True, arrays="numpy") as buffer:
        _use(buffer)


def _loads(path: Path) -> None:
    with TrajectoryReplayBuffer(sample_window_size=0, arrays="numpy") as buffer:
        buffer.load_checkpoint(path, verify=False)
        _use(buffer)


def _writes(path: Path) -> None:
    buffer = Buffer(sample_window_size=0, auto_save=True, auto_save_path=path, arrays="numpy")
    try:
        _use(buffer)
        buffer.add_trajectories([make(int(buffer.get_stats()["next_id"]))], durable=True)
    finally:
        buffer.close()


def _use(buffer: TrajectoryReplayBuffer) -> None:
    if not len(buffer):
        return
    true_rows = not (Path(os.fspath(buffer._store.directory)) / "altered").exists() if buffer._store else False
    for _ in range(3):
        batch = buffer.sample(64)
        if true_rows:
            check_batch(batch)
    with suppress(InvalidInput):  # there may be none
        buffer.sample(16, sequence_length=2)
    assert buffer._window is not None
    for number in buffer._window.index.listing().rows["id"].tolist():
        buffer.trajectory(number)
    buffer.get_stats()
    buffer._check()


# --- in the test --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "store"
    with Buffer(sample_window_size=0, auto_save=True, auto_save_path=path, arrays="numpy") as buffer:
        buffer.add_trajectories([make(key) for key in KEYS])
    return path


def examined(template: Path, root: Path, cases: dict[str, Harm]) -> dict[str, dict[str, str]]:
    """What happened to each case, by how it was opened."""
    root.mkdir()
    # The good one comes first, and once more: by then everything is imported.
    cases = {**cases, GOOD: lambda directory, connection: None}
    for name, harm in cases.items():
        shutil.copytree(template, root / name)
        directory = root / name / "rank_0"
        connection = sqlite3.connect(directory / "catalogue.db", isolation_level=None)
        try:
            harm(directory, connection)
        finally:
            connection.close()
    done = finished("-X", "faulthandler", "-m", "tests.trajectory.test_store_hostile", root)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"{lines[-1:]}: {done.returncode} {done.stderr[-3000:]}"
    assert lines[-1]["peak"] < MEMORY_BYTES // 2
    found = {line["case"]: line for line in lines if "outcomes" in line}
    assert found.keys() == cases.keys()
    for name, line in found.items():
        assert not line["ran"], f"{name}: {line['ran']}"
        for way, outcome in line["outcomes"].items():
            assert not outcome.startswith("WRONG"), f"{name}, {way}: {outcome}"
    outcomes = {name: line["outcomes"] for name, line in found.items()}
    assert set(outcomes.pop(GOOD).values()) == {"ok"}
    return outcomes


def sql(*statements: str, values: tuple[Any, ...] = ()) -> Harm:
    def harm(_: Path, connection: sqlite3.Connection) -> None:
        for statement in statements:
            connection.execute(statement, values if "?" in statement else ())

    return harm


def meta(key: str, value: Any) -> Harm:
    return sql("INSERT OR REPLACE INTO meta VALUES (?, ?)", values=(key, value))


def schema(change: Callable[[dict[str, Any]], object]) -> Harm:
    def harm(_: Path, connection: sqlite3.Connection) -> None:
        (text,) = connection.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
        found = json.loads(text)
        change(found)
        connection.execute("UPDATE meta SET value = ? WHERE key = 'schema'", (json.dumps(found),))

    return harm


def field(path: list[Any], dtype: str = "F32", shape: Any = ()) -> dict[str, Any]:
    return {"path": path, "dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape}


def refused(outcomes: dict[str, dict[str, str]]) -> None:
    for name, ways in outcomes.items():
        for way, outcome in ways.items():
            assert outcome.startswith("DamagedData: "), f"{name}, {way}: {outcome}"


def test_g09_a_store_of_trajectories_runs_nothing_that_is_in_it(template: Path, tmp_path: Path) -> None:
    copied = "CREATE TABLE other AS SELECT * FROM {0}", "DROP TABLE {0}"
    tables = ("meta", "texts", "segments", "trajectories")
    cases: dict[str, Harm] = {
        f"view-{name}": sql(*(line.format(name) for line in copied), f"CREATE VIEW {name} AS SELECT * FROM other")
        for name in tables
    }
    cases |= {f"gone-{name}": sql(f"DROP TABLE {name}") for name in tables}
    cases |= {
        f"trigger-{verb}-{name}": sql(f"CREATE TRIGGER evil AFTER {verb} ON {name} BEGIN DELETE FROM trajectories; END")
        for verb in ("INSERT", "UPDATE", "DELETE")
        for name in tables
    }
    cases |= {
        "hidden-trigger": sql(
            "CREATE TRIGGER evil AFTER INSERT ON meta BEGIN DELETE FROM trajectories; END",
            "PRAGMA writable_schema = ON",
            "UPDATE sqlite_master SET name = 'sqlite_evil' WHERE name = 'evil'",
        ),
        "computed": sql(
            "ALTER TABLE texts RENAME TO other",
            "CREATE TABLE texts (code INTEGER PRIMARY KEY, text TEXT AS (hex(zeroblob(1000000))))",
            "INSERT INTO texts (code) SELECT code FROM other",
            "DROP TABLE other",
        ),
        "one-more-column": sql("ALTER TABLE segments ADD COLUMN more"),
        "one-more-table": sql("CREATE TABLE more (a)"),
        "one-more-view": sql("CREATE VIEW more AS SELECT randomblob(900000000)"),
        "expression-index": sql("CREATE INDEX more ON texts (hex(zeroblob(length(text) * 100000)))"),
        "no-index": sql("DROP INDEX trajectories_by_segment"),
        "virtual": sql("DROP TABLE texts", "CREATE VIRTUAL TABLE texts USING fts5(code, text)"),
    }
    refused(examined(template, tmp_path / "cases", cases))


def test_a_store_that_says_impossible_things_of_itself_is_refused(template: Path, tmp_path: Path) -> None:
    cases: dict[str, Harm] = {"other-format": meta("format", "forebay-groups"), "no-format": meta("format", None)}
    cases |= {"newer": meta("version", 2), "version-text": meta("version", "1"), "version-blob": meta("version", b"1")}
    wrong = [-1, 2**63 - 1, None, "12", 12.0, b"12"]
    for key in ("next_id", "floor_id", "clean"):
        cases |= {f"{key}-{k}": meta(key, value) for k, value in enumerate(wrong)}
    cases |= {"next-id-again": meta("next_id", 11), "floor-above": meta("floor_id", 13)}
    cases |= {
        "texts-gap": sql("DELETE FROM texts WHERE code = 1"),
        "texts-from-1": sql("DELETE FROM texts WHERE code = 0"),
        "texts-below": sql("INSERT INTO texts VALUES (-1, 'a')"),
        "texts-blob": sql("UPDATE texts SET text = x'00ff' WHERE code = 1"),
        "texts-utf8": sql("UPDATE texts SET text = CAST(x'ff' AS TEXT) WHERE code = 1"),
        "texts-none": sql("DELETE FROM texts"),
        "no-schema": sql("DELETE FROM meta WHERE key = 'schema'"),
        "segment-0": sql("UPDATE segments SET number = 0 WHERE sealed = 0"),
        "segment-below": sql("UPDATE segments SET number = -1 WHERE sealed = 0"),
        "segment-huge": sql("UPDATE segments SET number = 9223372036854775807 WHERE sealed = 0"),
    }
    names = ["../../../etc/passwd", "", "0123456789ABCDEF", "0123456789abcde/", "0123456789abcdef\n", "..", "a" * 10**6]
    for k, name in enumerate([*names, b"0123456789abcdef", "0123456789abcde\0"]):
        cases[f"segment-name-{k}"] = sql("UPDATE segments SET name = ? WHERE sealed = 0", values=(name,))
    refused(examined(template, tmp_path / "cases", cases))


def test_a_schema_that_cannot_be_is_refused(template: Path, tmp_path: Path) -> None:
    fields = {
        "dtype": field(["actions"], "OBJECT"),
        "dtype-long": field(["actions"], "F" * 10**6),
        "shape-below": field(["prev_values"], shape=(-1,)),
        "shape-huge": field(["prev_values"], shape=(2**62,)),
        "shape-many": field(["prev_values"], shape=(2**16, 2**16, 2**16)),
        "shape-beside-0": field(["prev_values"], shape=(0, 2**62)),
        "shape-beyond": field(["prev_values"], shape=(2**100,)),
        "shape-deep": field(["prev_values"], shape=(1,) * 40),
        "shape-text": field(["prev_values"], shape="12"),
        "shape-float": field(["prev_values"], shape=[1.5]),
        "twice": field(["rewards"]),
        "inside": field(["rewards", "more"]),
        "around": field(["curr_obs"]),
        "in-both": field(["curr_obs", "state"]),
        "under-both": field(["curr_obs", "state", "more"]),
        "own-next": field(["#next"], "F64", (3,)),
        "own-valid": field(["#valid"], "I64"),
        "added-by-sample": field(["trajectory_id"]),
        "unknown": field(["__class__"]),
        "reserved": field(["valid"], "BOOL"),
        "weights": field(["model_weights_id"]),
        "nowhere": field([]),
        "numbers": field([1, 2]),
        "deep": field(["forward_inputs", *(str(k) for k in range(50_000))]),
    }
    cases: dict[str, Harm] = {
        name: schema(lambda found, more=more: found["steps"].append(more))  # type: ignore[misc]
        for name, more in fields.items()
    }
    cases |= {
        "many": schema(
            lambda found: found["steps"].extend(field(["forward_inputs", str(k)], shape=()) for k in range(2_000))
        ),
        "wide": schema(
            lambda found: found["steps"].extend(field(["forward_inputs", str(k)], "U8", (2**30,)) for k in range(900))
        ),
        "steps-none": schema(lambda found: found.pop("steps")),
        "steps-text": schema(lambda found: found.update(steps="rewards")),
        "other-observations": schema(lambda found: found.update(observations=[field(["#next"], "F32", (1, 2**20))])),
        "not-json": meta("schema", "{"),
        "blob": meta("schema", b"{}"),
        "nested": meta("schema", "[" * 10**6),
        "nan": meta("schema", '{"steps": NaN}'),
        "null": meta("schema", "null"),
        "utf8": sql("UPDATE meta SET value = CAST(x'7bff7d' AS TEXT) WHERE key = 'schema'"),
    }
    outcomes = examined(template, tmp_path / "cases", cases)
    # Rows that no file has cost their trajectories; addresses for such rows cannot be had.
    assert all(outcome.startswith("StorageError: no addresses") for outcome in outcomes.pop("wide").values())
    for way, outcome in outcomes.pop("other-observations").items():
        assert outcome.startswith(("ok", "DamagedData: ", "InvalidTrajectory: ")), f"{way}: {outcome}"
    refused(outcomes)


def test_numbers_of_trajectories_that_cannot_be_lead_nowhere(template: Path, tmp_path: Path) -> None:
    """Refused; or, where a number says that rows are missing, that trajectory is left out."""
    columns = ["id", "segment", "first_step", "first_observation", "steps", "envs", "epochs", "observations"]
    columns += ["transitions", "longest", "weights", "texts", "crc"]
    values = [-1, -(2**63), 2**63 - 1, 2**62, 2**48 + 1, 2**31, 10**9, 7.5, 1e300, "3", b"3", float("inf")]
    cases: dict[str, Harm] = {}
    for column in columns:
        for k, value in enumerate(values):
            if column == "id" and not isinstance(value, int):
                continue  # a row's id is a number
            cases[f"{column}-{k}"] = sql(f"UPDATE trajectories SET {column} = ? WHERE id = 5", values=(value,))
    for column in ("reward", "added_at"):
        cases[f"{column}-text"] = sql(f"UPDATE trajectories SET {column} = 'x' WHERE id = 5")
        cases[f"{column}-blob"] = sql(f"UPDATE trajectories SET {column} = x'00' WHERE id = 5")
    cases |= {
        "overlap-steps": sql("UPDATE trajectories SET first_step = first_step - 1 WHERE id = 5"),
        "overlap-observations": sql("UPDATE trajectories SET first_observation = first_observation - 1 WHERE id = 5"),
        "all-the-same": sql("UPDATE trajectories SET first_step = 0, first_observation = 0"),
        "product": sql("UPDATE trajectories SET steps = 4294967296, envs = 4294967296 WHERE id = 5"),
        "product-of-0": sql("UPDATE trajectories SET steps = 0 WHERE id = 5"),
        "epochs-0": sql("UPDATE trajectories SET epochs = 0 WHERE id = 5"),
        "epochs-2": sql("UPDATE trajectories SET epochs = 2 WHERE id = 5"),
        "wraps": sql("UPDATE trajectories SET first_step = 9223372036854775807 - 1 WHERE id = 5"),
    }
    outcomes = examined(template, tmp_path / "cases", cases)
    harmless, missing = (
        ("crc", "longest"),
        ("segment", "first_step", "first_observation", "steps", "envs", "observations"),
    )
    for name, ways in outcomes.items():
        column, _, which = name.rpartition("-")
        whole = which.isdecimal() and isinstance(values[int(which)], int)
        for way, outcome in ways.items():
            allowed = whole and column in (*harmless, *missing) and outcome == "ok"
            assert allowed or outcome.startswith("DamagedData: "), f"{name}, {way}: {outcome}"
    assert outcomes["first_step-6"].keys() == {"_reads", "_loads", "_writes"}
    assert set(outcomes["first_step-6"].values()) == set(outcomes["segment-6"].values()) == {"ok"}


def test_runs_that_leave_their_trajectory_are_refused(template: Path, tmp_path: Path) -> None:
    # Trajectory 5 has three steps of one environment, 11 three of two.
    pairs: dict[str, list[tuple[int, int]]] = {
        "beyond": [(0, 4)],
        "before": [(-1, 3)],
        "empty": [(0, 0), (0, 3)],
        "below": [(2, -1)],
        "twice": [(0, 2), (1, 2)],
        "backwards": [(2, 1), (0, 2)],
        "wraps": [(2**63 - 1, 1)],
        "wraps-round": [(2**62, 2**62), (2**62, 2**62)],
        "huge": [(0, 2**63 - 1)],
        "many": [(0, 3)] * 10_000,
    }
    cases: dict[str, Harm] = {}
    for column in ("runs", "chains"):
        for name, runs in pairs.items():
            blob = b"".join(struct.pack("<qq", *pair) for pair in runs)
            cases[f"{column}-{name}"] = sql(f"UPDATE trajectories SET {column} = ? WHERE id = 5", values=(blob,))
        for k, value in enumerate([b"\0", b"\0" * 15, "text of 16 bytes", 5, 1.5]):
            cases[f"{column}-type-{k}"] = sql(f"UPDATE trajectories SET {column} = ? WHERE id = 5", values=(value,))
    cases["chain-over-environments"] = sql(
        "UPDATE trajectories SET chains = ? WHERE id = 11", values=(struct.pack("<qq", 1, 3),)
    )
    cases["other-transitions"] = sql(
        "UPDATE trajectories SET runs = ? WHERE id = 5", values=(struct.pack("<qq", 0, 2),)
    )
    refused(examined(template, tmp_path / "cases", cases))


def test_rows_that_point_elsewhere_are_not_followed(template: Path, tmp_path: Path) -> None:
    """Whatever is in the columns: rows of a trajectory never lead out of it, and text without a name is an error."""

    def overwrite(value: bytes) -> Harm:
        def harm(directory: Path, _: sqlite3.Connection) -> None:
            (directory / "altered").touch()
            for path in directory.glob("*.col"):
                size = path.stat().st_size
                path.write_bytes((value * (size // len(value) + 1))[:size])

        return harm

    def put(name: str, value: int) -> Harm:
        """In every row, at the place of one field."""

        def harm(directory: Path, connection: sqlite3.Connection) -> None:
            (directory / "altered").touch()
            (files,) = connection.execute("SELECT value FROM meta WHERE key = 'files'").fetchone()
            for k, file in enumerate(json.loads(files)):
                for item in file["fields"]:
                    if item["path"][-1] == name:
                        for path in directory.glob(f"*-{k}.col"):
                            rows = np.memmap(path, np.uint8, "r+").reshape(-1, file["row_bytes"])
                            rows[:, item["offset"] : item["offset"] + 4] = np.frombuffer(
                                struct.pack("<i", value), np.uint8
                            )
                            rows.flush()  # type: ignore[attr-defined]

        return harm

    noise = np.random.default_rng(0).bytes(2**16)
    cases: dict[str, Harm] = {f"bytes-{k}": overwrite(value) for k, value in enumerate((b"\xff", b"\x7f", noise))}
    cases |= {f"next-{k}": put("#next", value) for k, value in enumerate((-(2**31), -1, 2**31 - 1, 10**6))}
    cases |= {f"text-{k}": put("task", value) for k, value in enumerate((-(2**31), -1, 2**31 - 1, 10**6))}
    outcomes = examined(template, tmp_path / "cases", cases)
    for name, ways in outcomes.items():
        for way, outcome in ways.items():
            if name.startswith("next"):
                assert outcome == "ok", f"{name}, {way}: {outcome}"
            else:
                assert outcome.startswith("DamagedData: a text has the code"), f"{name}, {way}: {outcome}"


@pytest.mark.parametrize("flips", [30, pytest.param(500, marks=pytest.mark.slow)])
def test_any_flipped_byte_of_a_catalogue_is_survived(template: Path, tmp_path: Path, flips: int) -> None:
    size = (template / "rank_0" / "catalogue.db").stat().st_size
    chance = np.random.default_rng(1)

    def flip(places: list[int]) -> Harm:
        def harm(directory: Path, connection: sqlite3.Connection) -> None:
            connection.close()
            (directory / "altered").touch()
            data = bytearray((directory / "catalogue.db").read_bytes())
            for place in places:
                data[place] ^= 1 << int(chance.integers(8))
            (directory / "catalogue.db").write_bytes(data)

        return harm

    places: Iterator[list[int]] = (chance.integers(0, size, 1 + k % 3).tolist() for k in range(flips))
    cases: dict[str, Harm] = {f"flip-{k}": flip(where) for k, where in enumerate(places)}
    cases |= {f"header-{k}": flip([k]) for k in range(0, 100, 3 if flips > 100 else 9)}
    outcomes = examined(template, tmp_path / "cases", cases)
    said = {outcome.split(":")[0] for ways in outcomes.values() for outcome in ways.values()}
    assert said <= {"ok", "DamagedData", "StorageError", "InvalidTrajectory"}
    assert said >= {"ok", "DamagedData"}


def test_a_cut_off_catalogue_is_said(template: Path, tmp_path: Path) -> None:
    size = (template / "rank_0" / "catalogue.db").stat().st_size

    def cut(length: int) -> Harm:
        def harm(directory: Path, connection: sqlite3.Connection) -> None:
            connection.close()
            os.truncate(directory / "catalogue.db", length)

        return harm

    lengths = [1, 50, 100, 511, 4095, 4096, 5000, 8192, size // 2, size - 4096, size - 1]
    outcomes = examined(template, tmp_path / "cases", {f"cut-{length}": cut(length) for length in lengths})
    for name, ways in outcomes.items():
        for way, outcome in ways.items():
            # A piece of the last page may not be missed: what is drawn is the truth then.
            assert outcome.startswith(("DamagedData: ", "StorageError: ")) or name == f"cut-{size - 1}", (name, way)


def test_links_in_a_store_of_trajectories_are_not_followed(template: Path, tmp_path: Path) -> None:
    """Previously a lock file that is a link was followed, and what it led to was emptied."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in ("catalogue.db.lock", "catalogue.db"):
        path = tmp_path / name
        shutil.copytree(template, path)
        (path / "rank_0" / name).unlink(missing_ok=True)
        (path / "rank_0" / name).symlink_to(victim)
        with pytest.raises(DamagedData, match="symbolic link"):
            Buffer(auto_save=True, auto_save_path=path, arrays="numpy")
        assert victim.read_text() == "precious"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
