"""The command `forebay`: checkpoints and stores as a shell sees them: intact, damaged, locked and repaired."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from zlib import crc32

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result

import forebay
from forebay import FIFOReplayPolicy, MemoryStorage, ReplayBuffer, Status
from forebay.checkpoint.format import CheckpointWriter, open_checkpoint
from forebay.cli import main
from forebay.cli.doctor import examine_machine
from forebay.codec.frame import encode_group
from forebay.codec.records import decode_account, encode_account
from forebay.core.report import Level
from forebay.storage.sqlite import SQLiteStorage, schema
from forebay.storage.sqlite.doctor import examine_library, examine_store
from forebay.testing import make_group
from tests.processes import finished
from tests.support import closed_ledger

REASON = "its payload was damaged on disk"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def shell(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return finished("-c", "from forebay.cli import main; main()", *arguments)


async def fill(buffer: ReplayBuffer, directory: Path | None = None) -> None:
    """Six groups of `math`, one of them trained, and one of `code`."""
    await buffer.set_limits("math", stale_threshold=7)
    for number in range(6):
        group = make_group(group_id=number, score=0.5)
        for state in group:
            state.extra_fields["array"] = np.arange(64)
        await buffer.put(group, "math", model_step=1)
    await buffer.put(make_group(status=Status.ABORTED), "code", model_step=1)
    await buffer.get(1, "math", Status.COMPLETED)
    if directory is not None:
        await buffer.save(directory, model_step=12)
    await buffer.close()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    asyncio.run(fill(ReplayBuffer(FIFOReplayPolicy(), MemoryStorage()), path))
    return path


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "store.db"
    asyncio.run(fill(ReplayBuffer(FIFOReplayPolicy(), SQLiteStorage(path))))
    return path


def alter(store: Path, *statements: str, values: tuple[Any, ...] = ()) -> list[Any]:
    connection = sqlite3.connect(store, isolation_level=None)
    found = [connection.execute(statement, values).fetchone() for statement in statements]
    connection.close()
    return found


def look(store: Path, *options: str) -> tuple[int, dict[str, dict[str, Any]], list[str]]:
    """Exit code, findings by name, and what was fixed."""
    result = run("doctor", store, "--json", *options)
    told = json.loads(result.stdout)
    return result.exit_code, {finding["name"]: finding for finding in told["findings"]}, told["fixed"]


def repaired(store: Path) -> str:
    """Fix it; the first thing that was done. Nothing is wrong afterwards."""
    code, findings, fixed = look(store, "--fix")
    assert (code, wrong(findings)) == (0, {})
    return fixed[0]


def wrong(findings: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: finding["level"] for name, finding in findings.items() if finding["level"] != "ok"}


async def reopened_ledger(store: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Of `math`, and its reasons, after every group that is left was read."""
    async with ReplayBuffer(FIFOReplayPolicy(), SQLiteStorage(store)) as buffer:
        before = await closed_ledger(buffer)
        reasons = dict((await buffer.storage.summary()).task("math").account.reasons)
        assert len(await buffer.get(99, "math", Status.COMPLETED)) == before["buffered"]
        assert (await closed_ledger(buffer)).get("failed") == before.get("failed"), "a fault was left"
    return before, reasons


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


# --- the command itself -------------------------------------------------------------------------------


def test_the_shell_gets_version_help_and_exit_codes(saved: Path, tmp_path: Path) -> None:
    version = shell("--version")
    assert (version.returncode, version.stdout) == (0, f"forebay, version {forebay.__version__}\n")
    assert shell("checkpoint", "verify", saved).returncode == 0
    missing = shell("checkpoint", "verify", tmp_path / "nothing")
    assert (missing.returncode, missing.stdout, missing.stderr.count("\n")) == (1, "", 1)
    flip(next(saved.glob("*.fbr")), -1)
    assert shell("checkpoint", "verify", saved).returncode == 3
    assert shell("checkpoint", "verify").returncode == 2


@pytest.mark.parametrize("line", ["nonsense", "checkpoint nonsense", "doctor --wrong", "doctor --fix", "doctor a b"])
def test_wrong_arguments_are_usage_errors(line: str) -> None:
    assert run(*line.split()).exit_code == 2


def commands(command: click.Command) -> Iterator[click.Command]:
    yield command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from commands(found)


def test_every_command_and_option_has_a_help_text() -> None:
    found = list(commands(main))
    assert {command.name for command in found} == {
        *("main", "checkpoint", "verify", "info", "doctor", "demo", "produce"),
        *("trajectories", "sample", "merge", "split", "show", "import", "export"),
    }
    options = [option for command in found for option in command.params if isinstance(option, click.Option)]
    assert all(command.help for command in found)
    assert all(option.help for option in options)


def test_an_interrupt_ends_with_130(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.cli.checkpoint.open_checkpoint", Mock(side_effect=KeyboardInterrupt))
    result = run("checkpoint", "verify", saved)
    assert (result.exit_code, result.stderr) == (130, "forebay: interrupted\n")


# --- checkpoints --------------------------------------------------------------------------------------


def test_verify_calls_a_good_checkpoint_whole(saved: Path) -> None:
    result = run("checkpoint", "verify", saved)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"{saved}: 6 groups, ")
    assert result.stdout.endswith("kB, model step 12: whole\n")
    told = json.loads(run("checkpoint", "verify", saved, "--json").stdout)
    assert (told["whole"], told["groups"], told["model_step"]) == (True, 6, 12)


@pytest.mark.parametrize("position", [0, 30, 500, -1])
def test_verify_names_the_damage(saved: Path, position: int) -> None:
    flip(next(saved.glob("*.fbr")), position)
    result = run("checkpoint", "verify", saved, "--json")
    told = json.loads(result.stdout)
    assert (result.exit_code, told["whole"]) == (3, False)
    assert told["error"] in result.stderr
    assert result.stderr.startswith(f"forebay: {saved} is damaged: ")


def rewrite(saved: Path, issued: int = 0, issued_tokens: int = 0, cut: int | None = None) -> None:
    """Write the checkpoint again, wrong behind valid checksums: a ledger that does not close, frames that are cut."""
    with open_checkpoint(saved) as old, CheckpointWriter(saved) as writer:
        writer.write((record, frame[:cut]) for record, frame in old.entries())
        account = decode_account(old.manifest.accounts["math"])
        account.issued += issued
        account.issued_tokens += issued_tokens
        old.manifest.accounts["math"] = encode_account(account)
        writer.publish(old.manifest)


def test_verify_finds_faults_behind_valid_checksums(saved: Path) -> None:
    faults: list[tuple[dict[str, int], str]] = [
        ({"issued": 1}, "the ledger does not close: task 'math' issued 7 groups, but 6 are accounted for"),
        ({"issued": -1, "issued_tokens": 5}, "task 'math' issued 41 tokens, but 36 are accounted for"),
        ({"issued_tokens": -5, "cut": -1}, "group 1 of task 'math'"),
    ]
    for changes, problem in faults:
        rewrite(saved, **changes)
        result = run("checkpoint", "verify", saved)
        assert result.exit_code == 3
        assert problem in result.stderr


@pytest.mark.parametrize("command", ["verify", "info"])
def test_a_path_without_a_checkpoint_is_refused(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("hello")
    for path in (tmp_path / "missing", tmp_path, tmp_path / "file"):
        result = run("checkpoint", command, path)
        assert (result.exit_code, result.stdout) == (1, "")
        assert "checkpoint" in result.stderr


def test_info_shows_the_contents_of_a_checkpoint(saved: Path) -> None:
    lines = run("checkpoint", "info", saved).stdout.splitlines()
    assert "model step    12" in lines
    assert "store         none (it was saved from memory)" in lines
    rows = [line.split() for line in lines]
    assert ["task", "issued", "buffered", "trained", "filtered", "failed", "discarded", "cursor"] in rows
    assert ["math", "6", "5", "1", "0", "0", "0", "0"] in rows
    assert "limits of math: stale_threshold 7, token_stale_threshold none, retryable True" in lines
    assert "buffered of code: 1 aborted\n" in run("checkpoint", "info", saved, "--full").stdout
    told = json.loads(run("checkpoint", "info", saved, "--json", "--full").stdout)
    assert (told["groups"], told["limits"]["math"]["stale_threshold"]) == (6, 7)
    assert told["statuses"] == {"code": {"aborted": 1}, "math": {"completed": 5}}
    assert told["tasks"]["math"]["tokens"] == 30


def test_info_does_not_read_the_groups_unless_asked(saved: Path) -> None:
    flip(next(saved.glob("*.fbr")), -1)
    assert run("checkpoint", "info", saved).exit_code == 0
    assert run("checkpoint", "info", saved, "--full").exit_code == 3
    flip(saved / "manifest.json", 400)
    assert [run("checkpoint", command, saved).exit_code for command in ("verify", "info")] == [3, 3]


# --- the installation ---------------------------------------------------------------------------------


def test_doctor_checks_this_machine() -> None:
    result = run("doctor")
    assert result.exit_code == 0
    assert "Python 3." in result.stdout
    told = json.loads(run("doctor", "--json").stdout)
    assert [finding["name"] for finding in told["findings"]] == [
        "python", "sqlite", "forebay", "msgspec", "numpy", "click", "extras", "file system",
    ]  # fmt: skip


def test_a_sqlite_with_the_fault_is_a_warning_and_one_too_old_an_error() -> None:
    faulty = examine_library("3.40.1")
    assert faulty.level is Level.WARNING
    assert "one connection write and checkpoint" in faulty.message
    assert examine_library("3.51.3").level is Level.OK
    assert examine_library("3.37.2").level is Level.ERROR


def test_a_network_file_system_is_a_warning_here_and_an_error_for_a_store(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.storage.sqlite.lock.file_system_of", lambda path: "nfs4")
    *_, here = examine_machine(store.parent)
    assert (here.name, here.level) == ("file system", Level.WARNING)
    assert examine_store(store)[0].level is Level.ERROR


# --- stores -------------------------------------------------------------------------------------------


def test_doctor_finds_nothing_wrong_with_a_clean_store(store: Path) -> None:
    code, findings, fixed = look(store)
    assert (code, wrong(findings), fixed) == (0, {}, [])
    assert findings["rows"]["message"] == "6 groups"
    assert run("doctor", store, "--fix").stdout.startswith("fixed: nothing\n")
    assert asyncio.run(reopened_ledger(store)) == ({"issued": 6, "buffered": 5, "trained": 1}, {})


def test_a_payload_without_a_row_is_deleted(store: Path) -> None:
    alter(store, "INSERT INTO payloads SELECT 999, frame, summary FROM payloads LIMIT 1")
    code, findings, _ = look(store)
    assert (code, wrong(findings)) == (0, {"payloads without row": "warning"})
    assert repaired(store) == "deleted 1 payloads without a row"
    assert asyncio.run(reopened_ledger(store)) == ({"issued": 6, "buffered": 5, "trained": 1}, {})


def test_a_payload_whose_row_was_lost_is_kept(store: Path) -> None:
    alter(store, "DELETE FROM group_rows WHERE group_id = 3 AND task_name = 'math'")
    _, findings, fixed = look(store, "--fix")
    assert wrong(findings) == {"payloads without row": "warning", "ledger": "error"}
    assert not any("deleted" in action for action in fixed)


LOSSES = {
    "missing": ("DELETE FROM payloads WHERE uid = 4", "rows without payload"),
    "cut off": ("UPDATE payloads SET frame = substr(frame, 1, length(frame) - 9) WHERE uid = 4", "damaged payloads"),
    "text": ("UPDATE payloads SET frame = 'hello' WHERE uid = 4", "damaged payloads"),
    "zeroed": ("UPDATE payloads SET frame = zeroblob(500) WHERE uid = 4", "damaged payloads"),
}


@pytest.mark.parametrize("loss", list(LOSSES))
def test_a_group_without_its_payload_ends_as_failed(store: Path, loss: str) -> None:
    statement, name = LOSSES[loss]
    alter(store, statement)
    code, findings, _ = look(store)
    assert (code, wrong(findings)) == (1, {name: "error"})
    assert repaired(store) == f"ended group 3 of task 'math' as failed: {REASON}"
    expected = {"issued": 6, "buffered": 4, "trained": 1, "failed": 1}
    assert asyncio.run(reopened_ledger(store)) == (expected, {REASON: 1})


def test_an_archived_group_without_its_payload_stays_trained(store: Path) -> None:
    async def archive() -> None:
        async with ReplayBuffer(FIFOReplayPolicy(), SQLiteStorage(store)) as buffer:
            await buffer.save(store.parent / "saved", model_step=1)
            lease = await buffer.lease_batch({"math": 1}, train_step=2)
            await lease.ack()

    asyncio.run(archive())
    alter(store, "DELETE FROM payloads WHERE uid = (SELECT uid FROM group_rows WHERE place = 'archived')")
    assert look(store)[0] == 1
    assert repaired(store).startswith("removed group 1 of task 'math' from the archive")
    assert asyncio.run(reopened_ledger(store)) == ({"issued": 6, "buffered": 4, "trained": 2}, {})


def test_a_payload_that_only_a_newer_forebay_reads_is_left_alone(store: Path) -> None:
    frame = bytearray(encode_group(make_group()))
    frame[4] = 9
    frame[20:24] = crc32(frame[24:], crc32(frame[:20])).to_bytes(4, "little")
    alter(store, "UPDATE payloads SET frame = ? WHERE uid = 4", values=(bytes(frame),))
    code, findings, fixed = look(store, "--fix")
    assert (code, wrong(findings)) == (1, {"unreadable payloads": "error"})
    assert not any("group" in action for action in fixed)


def test_an_account_that_does_not_add_up_is_reported_and_not_repaired(store: Path) -> None:
    account = decode_account(alter(store, "SELECT data FROM accounts WHERE task_name = 'math'")[0][0])
    account.issued += 2
    alter(store, "UPDATE accounts SET data = ? WHERE task_name = 'math'", values=(encode_account(account),))
    for options in ((), ("--fix",)):
        code, findings, _ = look(store, *options)
        assert (code, wrong(findings)) == (1, {"ledger": "error"})
        assert "task 'math' issued 8 groups, but 6 are accounted for" in findings["ledger"]["message"]


def test_an_account_or_row_that_cannot_be_read_is_an_error(store: Path) -> None:
    alter(store, "UPDATE accounts SET data = x'ff'", "UPDATE group_rows SET place = 'x' WHERE uid = 4")
    code, findings, _ = look(store, "--fix")
    assert (code, wrong(findings)) == (1, {"rows": "error", "accounts": "error", "ledger": "error"})


def test_an_interrupted_restore_is_emptied(store: Path) -> None:
    alter(store, "INSERT INTO meta VALUES ('restoring', 1)", "DELETE FROM accounts")
    code, findings, _ = look(store)
    assert (code, wrong(findings)) == (0, {"restore": "warning"})
    assert repaired(store).startswith("emptied the store")
    assert look(store)[1]["rows"]["message"] == "0 groups"


async def test_a_store_in_use_can_be_examined_but_not_repaired(store: Path) -> None:
    async with ReplayBuffer(FIFOReplayPolicy(), SQLiteStorage(store)) as buffer:
        await buffer.put(make_group(), "math")
        code, findings, _ = look(store)
        assert (code, wrong(findings)) == (0, {})
        assert f"process {os.getpid()} on " in findings["lock"]["message"]
        assert findings["rows"]["message"] == "7 groups"
        refused = run("doctor", store, "--fix")
        assert (refused.exit_code, refused.stdout) == (1, "")
        assert "is open for writing by this process" in refused.stderr
    assert look(store)[1]["lock"]["message"] == "no process has it open for writing"


def test_a_path_without_a_store_is_refused_and_not_changed(tmp_path: Path) -> None:
    assert "there is no store at" in run("doctor", tmp_path / "missing").stderr
    assert "is a directory" in run("doctor", tmp_path).stderr
    (tmp_path / "text").write_text("hello " * 1000)
    alter(tmp_path / "other.db", "CREATE TABLE t (x)")
    for name, finding in (("text", "database"), ("other.db", "schema")):
        before = (tmp_path / name).read_bytes()
        code, findings, _ = look(tmp_path / name)
        assert (code, wrong(findings)) == (1, {finding: "error"})
        assert run("doctor", tmp_path / name, "--fix").exit_code == 1
        assert (tmp_path / name).read_bytes() == before
        assert not (tmp_path / f"{name}.lock").exists()


def test_a_newer_or_incomplete_store_is_refused(store: Path) -> None:
    alter(store, f"PRAGMA user_version = {schema.SCHEMA_VERSION + 1}")
    assert "or a newer one" in str(look(store, "--fix")[1]["schema"])
    alter(store, f"PRAGMA user_version = {schema.SCHEMA_VERSION}", "DELETE FROM meta WHERE key = 'store_id'")
    assert "lost its store_id" in look(store, "--fix")[1]["schema"]["message"]


def test_damage_that_sqlite_reports_is_not_repaired(store: Path) -> None:
    data = bytearray(store.read_bytes())
    data[16384 * 3 : 16384 * 4] = bytes(16384)
    store.write_bytes(data)
    code, findings, fixed = look(store, "--fix")
    assert (code, fixed, wrong(findings)) == (1, [], {"database": "error"})
    assert store.read_bytes() == data


def test_fix_writes_the_log_of_a_killed_process_back(store: Path, tmp_path: Path) -> None:
    connection = sqlite3.connect(store, isolation_level=None)
    connection.execute("UPDATE group_rows SET priority = 1")
    for name in ("store.db", "store.db-wal"):
        (tmp_path / f"copied-{name}").write_bytes((tmp_path / name).read_bytes())
    connection.close()
    code, findings, fixed = look(tmp_path / "copied-store.db", "--fix")
    assert (code, wrong(findings), fixed) == (0, {}, ["the write-ahead log was written back and emptied"])
    assert findings["wal"]["message"].endswith(" 0 bytes")


# --- produce ------------------------------------------------------------------------------------------

LOADERS = """
    from forebay import AsyncRolloutLoader, RolloutLoader, Task
    from forebay.testing.simulate import SimulatedEngine

    task = Task("math", [{"prompt": "1 + 1"}], SimulatedEngine())
    nothing = lambda: None
    in_turns = lambda: RolloutLoader(task, batch_groups=4)
    ahead = lambda: RolloutLoader(task, batch_groups=4, max_staleness=1)
    by_tokens = lambda: AsyncRolloutLoader(task, batch_tokens=4, max_staleness=1)
    """


@pytest.mark.parametrize(
    ("config", "code", "message"),
    [
        ("plane", 2, "neither a .toml file nor MODULE:FUNCTION"),
        ("no_such_module:make", 1, "'no_such_module:make' cannot be loaded"),
        ("missing.toml", 1, "No such file"),
        ("run.toml", 1, "cannot be shared with a trainer in another process"),
        ("typo.toml", 1, "unknown field `batch_sise`"),
        ("both.toml", 1, "either a table [manager], or loader=MODULE:FUNCTION"),
        ("twice.toml", 1, "[produce] has agent_loop, which the loader already has"),
        ("loaders:nothing", 1, "loaders:nothing returns None; expected a RolloutLoader"),
        ("loaders:in_turns", 1, "loaders:in_turns returns a loader with mode='in_turns'"),
        ("loaders:ahead", 1, "cannot be shared with a trainer in another process"),
        ("loaders:by_tokens", 1, "loaders:by_tokens has batch_tokens"),
        ("loader.toml", 1, "cannot be shared with a trainer in another process"),
    ],
)
def test_produce_refuses_what_cannot_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str, code: int, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    content = """
        [[manager.tasks]]
        name = "math"
        dataset = "math.jsonl"
        [produce]
        agent_loop = "forebay.testing.simulate:SimulatedEngine"
        """
    Path("math.jsonl").write_text('{"prompt": "1 + 1"}\n')
    Path("run.toml").write_text(textwrap.dedent(content))
    Path("typo.toml").write_text(textwrap.dedent(content) + "batch_sise = 4\n")
    Path("both.toml").write_text(textwrap.dedent(content) + 'loader = "loaders:ahead"\n')
    Path("loader.toml").write_text('[produce]\nloader = "loaders:ahead"\n')
    Path("twice.toml").write_text('[produce]\nloader = "loaders:ahead"\nagent_loop = "loops:make"\n')
    Path("loaders.py").write_text(textwrap.dedent(LOADERS))
    monkeypatch.delitem(sys.modules, "loaders", raising=False)
    result = run("produce", config, *(["--batch-size", "4"] if config in ("run.toml", "typo.toml") else []))
    assert result.exit_code == code
    assert message in result.stderr
