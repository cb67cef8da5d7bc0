"""`forebay demo`: a small language model that learns through Forebay, on two CPU cores, from nothing.

The example itself is `examples/tiny_grpo` (in a checkout, or packed with the wheel); this finds it and gives it its
settings.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import sys
from contextlib import nullcontext
from pathlib import Path

import click

from forebay.cli import INTERRUPTED

__all__ = ["demo"]


def _example() -> Path:
    """The directory that `tiny_grpo` is in."""
    package = Path(__file__).resolve().parent.parent
    places = (package / "_examples", package.parent.parent / "examples")
    for place in places:
        if (place / "tiny_grpo" / "run.py").exists():
            return place
    raise click.ClickException("the example tiny_grpo is not here; it comes with the wheel and with a checkout")


@click.command()
@click.option("--steps", default=400, show_default=True, type=click.IntRange(1), help="Train steps.")
@click.option("--seed", default=0, show_default=True, help="Of weights, prompts and sampling.")
@click.option("--tasks", help="Some of the tasks, with commas between them (default: all).")
@click.option("--colocated", is_flag=True, help="Generate and train in turns, instead of at the same time.")
@click.option("--ray", is_flag=True, help="Buffer and engines as Ray actors (of RAY_ADDRESS, or a Ray of its own).")
@click.option("--engines", type=click.IntRange(1), help="Engine actors, with --ray (default: 1).")
@click.option("--storage", type=click.Choice(["memory", "sqlite"]), help="Where groups live (default: memory).")
@click.option("--runs", default="runs", show_default=True, type=click.Path(path_type=Path), help="Where runs are kept.")
@click.option("--name", help="Of the run (default: the next free of demo-1, demo-2, ...).")
@click.option("--resume", is_flag=True, help="Go on with a run (default: the last one).")
@click.option("--save-every", default=20, show_default=True, type=click.IntRange(1), help="Steps between checkpoints.")
@click.option("--crash-test", is_flag=True, help="Kill the training at random moments, resume it, check the account.")
@click.option("--kills", default=5, show_default=True, type=click.IntRange(1), help="Of the crash test.")
def demo(
    steps: int,
    seed: int,
    tasks: str | None,
    colocated: bool,
    ray: bool,
    engines: int | None,
    storage: str | None,
    runs: Path,
    name: str | None,
    resume: bool,
    save_every: int,
    crash_test: bool,
    kills: int,
) -> None:
    """Train a small transformer by GRPO, through Forebay, on two CPU cores.

    One to two minutes. Leaves runs/NAME/report.html; Ctrl-C leaves a checkpoint, and --resume goes on from it.
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
        raise click.BadParameter(f"{name!r} is no plain name of a directory", param_hint="--name")
    out = runs / (name or _free_name(runs, last=resume))
    if resume and not (out / "steps.jsonl").exists():
        raise click.ClickException(f"there is no run to resume in {out}")
    options = {} if tasks is None else {"tasks": tuple(task.strip() for task in tasks.split(","))}
    try:
        settings = settings_of(
            steps=steps,
            seed=seed,
            colocated=colocated,
            engine_actors=(engines or 1) if ray else 0,
            storage=storage or ("sqlite" if crash_test else "memory"),
            out=out,
            resume=resume,
            save_every=save_every,
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
