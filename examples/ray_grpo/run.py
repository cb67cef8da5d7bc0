"""The trainer of `tiny_grpo` on Ray, from the command line.

    cd examples
    python -m ray_grpo.run --engines 2 --steps 100                        # in a new Ray, on this machine
    python -m ray_grpo.run --out runs/ray --steps 100                     # with checkpoints
    python -m ray_grpo.run --out runs/ray --steps 200 --resume            # continue
    python -m ray_grpo.run --address auto --storage sqlite:////data/grpo.db        # in a cluster, on disk

Ctrl-C ends it after the current step, with a checkpoint if there is --out; a second one ends it at once.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forebay import AsyncRolloutLoader, ForebayError
from tiny_grpo.checkpoint import has_checkpoint
from tiny_grpo.cluster import ray_cluster
from tiny_grpo.tasks import TASKS

__all__ = ["main"]


def parse(arguments: Sequence[str] | None = None) -> tuple[str | None, dict[str, Any]]:
    """The address, and the settings of the trainer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="train steps (default: %(default)s)")
    parser.add_argument("--engines", type=int, default=2, help="engine actors (default: %(default)s)")
    parser.add_argument("--task", action="append", choices=list(TASKS), help="once for each task (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, prompts and sampling (default: %(default)s)")
    parser.add_argument("--warm-start", type=int, default=100, help="supervised steps before (default: %(default)s)")
    parser.add_argument("--address", help="of a cluster to join (default: RAY_ADDRESS, else a new Ray)")
    parser.add_argument("--name", default="ray-grpo", help="of the buffer in the cluster (default: %(default)s)")
    parser.add_argument("--storage", default="memory", help="memory, sqlite:///... or postgresql://... (%(default)s)")
    parser.add_argument("--keep", action="store_true", help="leave the buffer in the cluster; needs --address")
    parser.add_argument("--out", type=Path, help="a directory for checkpoints")
    parser.add_argument("--save-every", type=int, default=20, help="steps between checkpoints (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --out")
    options = vars(parser.parse_args(arguments))
    for name in ("steps", "engines", "save_every"):
        if options[name] < 1:
            parser.error(f"--{name.replace('_', '-')} is {options[name]}; expected at least 1")
    begun = options["out"] is not None and has_checkpoint(options["out"])
    if options["resume"] and not begun:
        parser.error(f"--resume, but there is no checkpoint in --out {options['out']}")
    if begun and not options["resume"]:
        parser.error(f"{options['out']} contains a run already; give --resume, or another --out")
    address: str | None = options.pop("address")
    if options["keep"] and address is None:
        parser.error("--keep leaves the buffer in a running cluster; it needs --address")
    options["tasks"] = tuple(dict.fromkeys(options.pop("task") or TASKS))
    return address, options


async def run(options: dict[str, Any]) -> bool:
    """Run the trainer, show how far it is, and report; whether it came to its last step."""
    from ray_grpo.trainer import Settings, train  # imports ray: see ray_cluster

    settings = Settings(**options)
    began = time.monotonic()

    def show(step: int, rewards: dict[str, float], staleness: float) -> None:
        shown = "  ".join(f"{name} {reward:.2f}" for name, reward in rewards.items())
        text = f"step {step:>4}/{settings.steps}   reward  {shown}   staleness {staleness:.2f}"
        if sys.stdout.isatty():
            done = 20 * step // settings.steps
            print(f"\r[{'#' * done}{'.' * (20 - done)}] {text} ", end="", flush=True)
        elif step % 10 == 0 or step == settings.steps:
            print(f"{text}   {time.monotonic() - began:.0f} s", flush=True)

    def stop_on_ctrl_c(loader: AsyncRolloutLoader) -> None:
        def interrupted() -> None:
            loop.remove_signal_handler(signal.SIGINT)  # the second one ends it at once
            print("\nstopping after this step", flush=True)
            loader.stop()

        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, interrupted)

    outcome = await train(settings, stop_on_ctrl_c, show)

    print("\nmean reward        first ten steps   last ten")
    for name in settings.tasks:
        rewards = [of_step[name] for of_step in outcome.rewards]
        first, last = rewards[:10], rewards[-10:]
        if rewards:
            print(f"  {name:<20}{sum(first) / len(first):>10.2f}{sum(last) / len(last):>14.2f}")
    for name, line in outcome.ledger.items():
        closed = line["issued"] == sum(line.values()) - line["issued"]
        print(f"ledger of {name}, {'closed' if closed else 'OPEN'}: {dict(line)}")
    if outcome.last_step < settings.steps:
        more = "; continue with --resume" if settings.out else ""
        print(f"stopped at step {outcome.last_step} of {settings.steps}{more}")
    return outcome.last_step >= settings.steps


def main() -> None:
    address, options = parse()
    finished, problems = False, {}
    try:
        with ray_cluster(address):
            finished = asyncio.run(run(options))
    except* (ForebayError, ConnectionError) as failed:
        problems = {str(problem): None for problem in failed.exceptions}  # each once
    except* KeyboardInterrupt:
        pass
    if problems:
        sys.exit("\n".join(problems))
    sys.exit(0 if finished else 128 + signal.SIGINT)


if __name__ == "__main__":
    main()
