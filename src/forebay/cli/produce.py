"""`forebay produce`: a producer process. It joins the run of a trainer on a shared store, and fills its steps.

It can be started and stopped at any moment: other producers continue, and its groups return to the store at once when
it is stopped (SIGTERM, Ctrl-C), or after `lease_s` when it is killed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import click

from forebay.cli import INTERRUPTED
from forebay.config import ProduceConfig, load_object
from forebay.errors import InvalidConfig
from forebay.loader import AsyncRolloutLoader, RolloutLoader
from forebay.manager import DisaggregatedAgentLoopManager

_STOP_S = 10.0
"""How long stopping may take. Groups that are not back by then return when the lease of this process ends."""


@click.command()
@click.argument("config")
@click.option("--batch-size", type=click.IntRange(1), help="Groups of a train step, for a table [manager].")
@click.option("--ready-file", type=click.Path(path_type=Path), help="Exists while this producer takes part in a run.")
@click.option("--quiet", is_flag=True, help="Log warnings only.")
def produce(config: str, batch_size: int | None, ready_file: Path | None, quiet: bool) -> None:
    """Produce groups for a trainer in another process, until it is stopped.

    CONFIG is MODULE:FUNCTION, a function that returns the RolloutLoader (or AsyncRolloutLoader) of the trainer, or a
    TOML file with the tables [manager] and [produce]. Modules are found in the current directory, too. Tasks, data,
    limits and batch size must be those of the trainer.
    """
    logging.basicConfig(
        level=logging.WARNING if quiet else logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request
    sys.path.insert(0, str(Path.cwd()))
    if not config.endswith(".toml") and ":" not in config:
        raise click.BadParameter(f"{config!r} is neither a .toml file nor MODULE:FUNCTION", param_hint="CONFIG")
    made = ProduceConfig.from_file(config) if config.endswith(".toml") else ProduceConfig(loader=config)
    if made.loader is None and batch_size is None and made.batch_size is None:
        raise click.UsageError("the batch size is not known; pass --batch-size, or set batch_size in [produce]")
    if made.loader is not None and batch_size is not None:
        raise click.UsageError(f"--batch-size is set, but the loader {made.loader} has one already; leave it out")
    asyncio.run(_run(made, batch_size, ready_file))


async def _run(config: ProduceConfig, batch_size: int | None, ready_file: Path | None) -> None:
    close: Callable[[], Awaitable[None]]
    if config.loader is None:
        manager, size = config.build(), batch_size or config.batch_size
        close = manager.shutdown
    else:
        loader, manager = _loader(config.loader)
        size, close = loader.batch_groups, loader.close
    if size is None:
        raise InvalidConfig(f"{config.loader} has batch_tokens, which other processes cannot fill; use batch_groups")
    if not manager.replay_buffer.storage.shared:
        raise InvalidConfig(
            f"{manager.replay_buffer!r} cannot be shared with a trainer in another process; use a postgresql:// "
            "storage, or a RayReplayBuffer"
        )
    stopped: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def stop(code: int) -> None:
        if not stopped.done():
            stopped.set_result(code)

    for number, code in ((signal.SIGTERM, 0), (signal.SIGINT, INTERRUPTED)):
        asyncio.get_running_loop().add_signal_handler(number, stop, code)
    producing = asyncio.create_task(manager.produce_loop(size, load_weights=config.weight_loader()))
    watching = asyncio.create_task(_keep_ready(manager, ready_file))
    click.echo(f"forebay: {manager.replay_buffer.owner} produces {', '.join(manager.tasks)}", err=True)
    await asyncio.wait((producing, stopped), return_when=asyncio.FIRST_COMPLETED)
    watching.cancel()
    _mark(ready_file, False)
    error = None if not producing.done() or producing.cancelled() else producing.exception()
    try:
        async with asyncio.timeout(_STOP_S):
            await close()
            await manager.replay_buffer.close()
    except TimeoutError:
        click.echo(f"forebay: not everything was given back within {_STOP_S:g} s; its lease will end", err=True)
    if error is not None:
        raise error
    if stopped.done():
        logging.shutdown()
        os._exit(stopped.result())  # threads of an agent loop or a reward must not keep the process alive


def _loader(reference: str) -> tuple[AsyncRolloutLoader, DisaggregatedAgentLoopManager]:
    made = load_object(reference)()
    loader = made.native if isinstance(made, RolloutLoader) else made
    if not isinstance(loader, AsyncRolloutLoader):
        raise InvalidConfig(f"{reference} returns {made!r:.80}; expected a RolloutLoader or an AsyncRolloutLoader")
    if not isinstance(loader.manager, DisaggregatedAgentLoopManager):
        raise InvalidConfig(f"{reference} returns a loader with mode='in_turns'; a producer needs mode='ahead'")
    return loader, loader.manager


async def _keep_ready(manager: DisaggregatedAgentLoopManager, ready_file: Path | None) -> None:
    """Have the file exist while the manager takes part."""
    while True:
        _mark(ready_file, manager.run.member is not None)
        await asyncio.sleep(1)


def _mark(ready_file: Path | None, ready: bool) -> None:
    if ready_file is None:
        return
    if ready:
        ready_file.touch()
    else:
        ready_file.unlink(missing_ok=True)
