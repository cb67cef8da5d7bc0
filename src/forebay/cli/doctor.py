"""`forebay doctor`: check this machine, a SQLite store or a directory of trajectories.

Only `--fix` changes anything, and it prints what it changed.
"""

from __future__ import annotations

import platform
import sqlite3
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click

from forebay import __version__
from forebay.cli import show
from forebay.core.report import Finding, Level
from forebay.storage.sqlite.doctor import examine_file_system, examine_library, examine_store, repair_store

_EXTRAS = ("pandas", "asyncpg", "httpx", "torch", "ray")


@click.command()
@click.argument("store", type=click.Path(path_type=Path), required=False)
@click.option("--fix", is_flag=True, help="Repair STORE after an accident; no process may have it open.")
@show.json_option
@click.pass_context
def doctor(ctx: click.Context, store: Path | None, fix: bool) -> None:
    """Check this machine, a SQLite store, or trajectories.

    STORE is the path of a SQLite store or of a directory of trajectories; without it this machine is checked. Without
    --fix nothing is changed, and STORE may be in use. With --fix, groups whose payload is lost end as failed, payloads
    without a row are deleted, the rest of an interrupted restore is removed, and the write-ahead log is written back;
    nothing else is changed. Exit code 1 if an error remains.
    """
    fixed: list[str] = []
    if store is None:
        if fix:
            raise click.UsageError("--fix needs the path of the STORE to repair")
        findings = list(examine_machine(Path.cwd()))
    elif store.is_dir() and _has_trajectories(store):
        if fix:
            raise click.UsageError("--fix is for SQLite stores; a trajectory store repairs itself when it is opened")
        from forebay.trajectory.checkup import verify

        with show.progress_bar("verifying") as progress:
            findings = verify(store, progress)
    else:
        if fix:
            with show.progress_bar("repairing") as progress:
                fixed = repair_store(store, progress)
        with show.progress_bar("reading payloads") as progress:
            findings = examine_store(store, progress)
    path = None if store is None else str(store)
    result = {"forebay_version": __version__, "store": path, "fixed": fixed, "findings": findings}
    show.result(result, lambda _: _print(fixed or ["nothing"] * fix, findings))
    if any(finding.level is Level.ERROR for finding in findings):
        ctx.exit(1)


def _has_trajectories(path: Path) -> bool:
    from forebay.trajectory.checkup import is_trajectories

    return is_trajectories(path)


def _print(fixed: list[str], findings: list[Finding]) -> None:
    for action in fixed:
        click.echo(f"fixed: {show.one_line(action)}")
    show.findings(findings)


def examine_machine(directory: Path) -> Iterator[Finding]:
    """Check Python, SQLite, packages, and the file system of a directory. Imports no optional package."""
    yield Finding("python", Level.OK, f"Python {platform.python_version()} (3.11 or newer is needed)")
    yield examine_library(sqlite3.sqlite_version)
    for package in ("forebay", "msgspec", "numpy", "click"):
        found = _version(package)
        level = Level.WARNING if found is None else Level.OK
        yield Finding(package, level, f"{package} {found or 'has no metadata that tells its version'}")
    extras = {package: _version(package) for package in _EXTRAS}
    installed = ", ".join(f"{package} {found}" for package, found in extras.items() if found is not None)
    missing = ", ".join(package for package, found in extras.items() if found is None)
    advice = f"install those that you use: {missing}" if missing else None
    yield Finding("extras", Level.OK, f"installed: {installed or 'none'}; not installed: {missing or 'none'}", advice)
    finding = examine_file_system(directory / "store.db")
    if finding.level is not Level.OK:
        message = "the current directory is on a network file system"
        finding = Finding(finding.name, Level.WARNING, message, finding.advice)
    yield finding


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
