"""`forebay doctor`: shows what `forebay.doctor` finds.

Exit code 1 if an error remains. Only `--fix` changes anything, and it says what it changed.
"""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from forebay import __version__
from forebay.cli import one_line, progress_bar, show_json
from forebay.doctor import Finding, Level, examine_installation, examine_store, repair_store

__all__ = ["doctor", "show_findings"]

_COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.ERROR: "red"}


@click.command()
@click.argument("store", type=click.Path(path_type=Path), required=False)
@click.option("--fix", is_flag=True, help="Mend what an accident left in STORE; no process may have it open.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.pass_context
def doctor(ctx: click.Context, store: Path | None, fix: bool, as_json: bool) -> None:
    """Check this installation, or the SQLite store or directory of trajectories at the path STORE.

    A store is read only, and may be in use. With --fix, groups whose payload is lost end as failed, payloads without
    a row are deleted, an interrupted restore is emptied and the write-ahead log written back; nothing else is touched.
    Exit code 1 if an error remains.
    """
    fixed: list[str] = []
    if store is None:
        if fix:
            raise click.UsageError("--fix needs the path of a STORE to mend")
        findings = examine_installation(Path.cwd())
    elif _has_trajectories(store):
        if fix:
            raise click.UsageError("--fix is for SQLite stores; trajectories are mended when a buffer opens them")
        from forebay.trajectory.checkup import verify

        with progress_bar("verifying") as progress:
            findings = verify(store, progress)
    else:
        if fix:
            with progress_bar("mending") as progress:
                fixed = repair_store(store, progress)
        with progress_bar("reading payloads") as progress:
            findings = examine_store(store, progress)
    if as_json:
        show_json(
            {
                "forebay_version": __version__,
                "store": None if store is None else str(store),
                "fixed": fixed,
                "findings": msgspec.to_builtins(findings),
            }
        )
    else:
        _show(findings, fixed, fix=fix)
    if any(finding.level is Level.ERROR for finding in findings):
        ctx.exit(1)


def _has_trajectories(path: Path) -> bool:
    if not path.is_dir():
        return False
    from forebay.trajectory.checkup import is_trajectories

    return is_trajectories(path)


def _show(findings: list[Finding], fixed: list[str], *, fix: bool) -> None:
    for action in fixed:
        click.echo(f"fixed: {one_line(action)}")
    if fix and not fixed:
        click.echo("fixed: nothing")
    show_findings(findings)


def show_findings(findings: list[Finding]) -> None:
    """A line for each, and one for what to do."""
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        level = click.style(f"{finding.level.value:<8}", fg=_COLOURS[finding.level])
        click.echo(f"{level} {finding.name:<{width}}  {one_line(finding.message)}")
        if finding.advice is not None:
            click.echo(f"{'':<8} {'':<{width}}  -> {one_line(finding.advice)}")
