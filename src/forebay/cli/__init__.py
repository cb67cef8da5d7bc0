"""The command `forebay`: inspect, check and repair checkpoints and stores from a shell.

Results go to stdout; errors (one line each) and progress bars (on a terminal only) go to stderr. Exit codes: 0 success,
1 failure or a problem was found, 2 wrong arguments, 3 damaged data, 130 interrupted. Commands are imported when they
are used, and `import forebay` never imports this package. The rules are in the library; the commands print its results.
"""

from __future__ import annotations

import importlib
from typing import Any

import click

from forebay import __version__
from forebay.cli import show
from forebay.errors import DamagedData, ForebayError

__all__ = ["DAMAGED", "INTERRUPTED", "main"]

DAMAGED, INTERRUPTED = 3, 130

_COMMANDS = ("checkpoint", "demo", "doctor", "produce", "trajectories")


class _Main(click.Group):
    """Imports a command when it is used, and turns every error into one line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"forebay.cli.{cmd_name}"), cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("forebay: interrupted", err=True)
            ctx.exit(INTERRUPTED)
        except BrokenPipeError:
            raise  # the reader of the output has ended; click exits without a message
        except (ForebayError, OSError) as error:
            click.echo(f"forebay: {show.one_line(error)}", err=True)
            ctx.exit(DAMAGED if isinstance(error, DamagedData) else 1)


@click.group(cls=_Main, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="forebay")
def main() -> None:
    """Produce groups; inspect, check and repair the checkpoints and stores of Forebay.

    Exit codes: 0 success, 1 failure or a problem was found, 2 wrong arguments, 3 damaged data, 130 interrupted.
    """
