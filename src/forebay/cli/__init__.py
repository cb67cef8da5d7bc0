"""The command `forebay`: what people ask of checkpoints and stores from a shell.

Promised: results go to stdout, errors as one line and progress (on a terminal only) to stderr. Exit codes: 0 done and
good, 1 it could not be done or something is wrong, 2 wrong arguments, 3 damaged data, 130 interrupted. Commands are
imported when they are asked for, and `import forebay` never imports this package. Nothing is decided here: the
commands show what the library says.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import click

from forebay import __version__
from forebay.errors import DamagedData, ForebayError

__all__ = ["DAMAGED", "INTERRUPTED", "main", "one_line", "progress_bar", "show_json", "size_text"]

DAMAGED, INTERRUPTED = 3, 130

Progress: TypeAlias = Callable[[int, int], None]
"""Called with how much is done, and of how much."""

_COMMANDS = {name: f"forebay.cli.{name}" for name in ("checkpoint", "demo", "doctor", "trajectories")}


class _Main(click.Group):
    """Finds its commands by name, and gives every error its line and its exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = _COMMANDS.get(cmd_name)
        if module is None:
            return None
        command: click.Command = getattr(importlib.import_module(module), cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("forebay: interrupted", err=True)
            ctx.exit(INTERRUPTED)
        except DamagedData as error:
            click.echo(f"forebay: {one_line(error)}", err=True)
            ctx.exit(DAMAGED)
        except BrokenPipeError:
            raise  # whoever read the output has gone; click ends quietly
        except (ForebayError, OSError) as error:
            click.echo(f"forebay: {one_line(error)}", err=True)
            ctx.exit(1)


@click.group(cls=_Main, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="forebay")
def main() -> None:
    """Look at and check what Forebay keeps on disk.

    Exit codes: 0 good, 1 failed or something is wrong, 2 wrong arguments, 3 damaged data, 130 interrupted.
    """


def one_line(text: object) -> str:
    """Text for a terminal: one line, and nothing in it that a terminal would obey.

    >>> one_line("a\\nb \\x1b[2J")
    'a b \\\\x1b[2J'
    """
    joined = " ".join(str(text).splitlines())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in joined)


def size_text(size: int) -> str:
    """Bytes as people read them.

    >>> size_text(999), size_text(104_200_000), size_text(2_000_000_000_000_000)
    ('999 bytes', '104.2 MB', '2,000.0 TB')
    """
    if size < 1000:
        return f"{size} bytes"
    number, unit = size / 1000, "kB"
    for larger in ("MB", "GB", "TB"):
        if number < 1000:
            break
        number, unit = number / 1000, larger
    return f"{number:,.1f} {unit}"


def show_json(value: object) -> None:
    """Print plain data as JSON."""
    click.echo(json.dumps(value, indent=2))


@contextmanager
def progress_bar(label: str) -> Iterator[Progress | None]:
    """A bar on stderr that is moved by calling what this yields; None where nobody would see it."""
    if not sys.stderr.isatty():
        yield None
        return
    with ExitStack() as stack:
        bar: Any = None

        def update(done: int, total: int) -> None:
            nonlocal bar
            if bar is None:
                bar = stack.enter_context(click.progressbar(length=total, label=label, file=sys.stderr))
            bar.update(done - bar.pos)

        yield update
