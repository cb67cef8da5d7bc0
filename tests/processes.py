"""Python processes that tests start, and the one time limit that tests have.

Every process can be interrupted, wherever the tests run, and ends with its test, with its pipes closed. A process that
hangs is killed after `HANG_S`: whoever reads from it gets the end of its output instead of waiting indefinitely.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["HANG_S", "ROOT", "Child", "finished", "started"]

ROOT = Path(__file__).parent.parent
HANG_S = 300.0
"""After this time a wait counts as a hang. No test depends on how long anything takes otherwise."""

Child = subprocess.Popen[str]

# A shell without job control starts `command &` with SIGINT ignored, and everything that the command starts inherits
# that. Python then does not raise KeyboardInterrupt.
_INTERRUPTIBLE = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
)


@contextmanager
def started(
    *arguments: object, cwd: Path = ROOT, env: Mapping[str, str] | None = None, stderr: int | None = subprocess.PIPE
) -> Iterator[Child]:
    """Run Python with these arguments, in its own process group, and kill that group at the end of the block."""
    command = [sys.executable, "-ISc", _INTERRUPTIBLE, sys.executable, *map(str, arguments)]
    with subprocess.Popen(
        command,
        cwd=cwd,
        env=env,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        start_new_session=True,
    ) as child:
        watchdog = threading.Timer(HANG_S, _kill, (child,))
        watchdog.start()
        try:
            yield child
        finally:
            watchdog.cancel()
            watchdog.join()
            _kill(child)


def finished(
    *arguments: object, cwd: Path = ROOT, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments to its end."""
    with started(*arguments, cwd=cwd, env=env) as child:
        output, errors = child.communicate()
    return subprocess.CompletedProcess(child.args, child.returncode, output, errors)


def _kill(child: Child) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
