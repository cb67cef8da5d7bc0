"""`forebay demo`: finds and runs the example `tiny_grpo`, which is part of the repository and of the wheel."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from forebay.cli import INTERRUPTED


def _example() -> Path:
    """The directory that contains `tiny_grpo`."""
    package = Path(__file__).resolve().parent.parent
    for directory in (package / "_examples", package.parent.parent / "examples"):
        if (directory / "tiny_grpo" / "run.py").exists():
            return directory
    raise click.ClickException(
        "the example tiny_grpo is missing; install the wheel, or use a checkout of the repository"
    )


@click.command()
@click.option("--steps", default=400, show_default=True, type=click.IntRange(1), help="Number of train steps.")
@click.option("--seed", default=0, show_default=True, help="Seed of weights, prompts and sampling.")
@click.option("--tasks", help="Tasks, separated by commas (default: all).")
@click.option(
    "--mode",
    type=click.Choice(["ahead", "in_turns"]),
    default="ahead",
    show_default=True,
    help="Generate ahead of training, or generate and train in turns.",
)
@click.option("--ray", is_flag=True, help="Run buffer and engines as Ray actors (RAY_ADDRESS, or a new local Ray).")
@click.option("--engines", type=click.IntRange(1), help="Number of engine actors, with --ray (default: 1).")
@click.option("--storage", type=click.Choice(["memory", "sqlite"]), help="Where groups are stored (default: memory).")
@click.option(
    "--runs", default="runs", show_default=True, type=click.Path(path_type=Path), help="Directory of all runs."
)
@click.option("--name", help="Name of the run (default: the next free of demo-1, demo-2, ...).")
@click.option("--resume", is_flag=True, help="Continue a run (default: the last one).")
@click.option("--save-every", default=20, show_default=True, type=click.IntRange(1), help="Steps between checkpoints.")
@click.option("--crash-test", is_flag=True, help="Kill the training at random moments, resume it, check its ledger.")
@click.option(
    "--kills", default=5, show_default=True, type=click.IntRange(1), help="Number of kills of the crash test."
)
def demo(
    steps: int,
    tasks: str | None,
    ray: bool,
    engines: int | None,
    storage: str | None,
    runs: Path,
    name: str | None,
    resume: bool,
    crash_test: bool,
    kills: int,
    **options: Any,
) -> None:
    """Train a small transformer with GRPO on two CPU cores.

    Takes one to two minutes and writes runs/NAME/report.html. Ctrl-C saves a checkpoint; --resume continues from it.
    """
    sys.path.insert(0, str(_example()))
    try:
        tiny = importlib.import_module("tiny_grpo.demo")
        settings_of = importlib.import_module("tiny_grpo.run").Settings
    except ModuleNotFoundError as missing:
        if missing.name != "torch":
            raise
        raise click.ClickException("the demo needs torch: pip install 'forebay[demo]'") from missing
    if engines is not None and not ray:
        raise click.UsageError("--engines needs --ray: without Ray there is one engine, in the same process")
    if ray and importlib.util.find_spec("ray") is None:
        raise click.ClickException("--ray needs Ray: pip install 'forebay[ray]'")
    cluster = importlib.import_module("tiny_grpo.cluster").ray_cluster() if ray else nullcontext()
    if name is not None and (Path(name).name != name or name in (".", "..")):
        raise click.BadParameter(f"{name!r} is not a plain directory name", param_hint="--name")
    out = runs / (name or _free_name(runs, last=resume))
    if resume and not (out / "steps.jsonl").exists():
        raise click.ClickException(f"there is no run to resume in {out}")
    if tasks is not None:
        options["tasks"] = tuple(task.strip() for task in tasks.split(","))
    try:
        settings = settings_of(
            steps=steps,
            engine_actors=(engines or 1) if ray else 0,
            storage=storage or ("sqlite" if crash_test else "memory"),
            out=out,
            resume=resume,
            **options,
        )
    except ValueError as wrong:
        raise click.UsageError(str(wrong)) from wrong
    try:
        if crash_test:
            sys.exit(not tiny.crash_test(settings, kills, click.echo))
        with cluster:
            outcome = asyncio.run(tiny.demo(settings, click.echo, terminal=sys.stderr.isatty()))
    except (FileExistsError, ConnectionError) as problem:
        raise click.ClickException(str(problem)) from problem
    if outcome.last_step < steps:
        sys.exit(INTERRUPTED)


def _free_name(runs: Path, *, last: bool) -> str:
    number = 1
    while (runs / f"demo-{number}" / "steps.jsonl").exists():
        number += 1
    return f"demo-{max(1, number - 1) if last else number}"
