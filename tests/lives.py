"""Many short lives of a process. Starting Python costs more than what they do, so a warm process forks one for each.

The module that they run has a `main`, which gets the words of a line and reports on standard output. A life that is
killed ends as any process does: nothing in it gets a chance to tidy up. With `whole`, other lives end as processes do,
too: exceptions are printed, functions of `atexit` run, and the exit code is that of Python.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from tests.processes import Child, started

__all__ = ["Lives", "lives"]

_KILLED = f"ended {int(signal.SIGKILL)}"


class Lives:
    """The warm process, as its parent sees it."""

    def __init__(self, child: Child) -> None:
        self._child = child

    def live(self, *words: object, killed: bool = True) -> list[str]:
        """The lines that one life reported; it was killed, or came to a good end."""
        *lines, ended = self._run(*words)
        assert ended == (_KILLED if killed else "ended 0"), [*lines[-2:], ended]
        return lines

    def exit_code(self, *words: object) -> int:
        """How one life ended: its exit code, or, if a signal ended it, the number of the signal as a negative one."""
        return os.waitstatus_to_exitcode(int(self._run(*words)[-1].split()[1]))

    def _run(self, *words: object) -> list[str]:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write("\t".join(map(str, words)) + "\n")
        self._child.stdin.flush()
        lines: list[str] = []
        for line in self._child.stdout:
            lines.append(line.rstrip("\n"))
            if line.startswith("ended "):
                return lines
        raise AssertionError(f"the warm process hung, or ended: {lines[-3:]}")


@contextmanager
def lives(module: str, *, whole: bool = False) -> Iterator[Lives]:
    """A warm process for lives that run this module. `whole`: they end as Python processes do."""
    words = (module, "whole") if whole else (module,)
    with started("-m", "tests.lives", *words, stderr=None, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"}) as child:
        yield Lives(child)


def _serve(module: str, whole: str = "") -> None:
    main = importlib.import_module(module).main
    for line in sys.stdin:
        pid = os.fork()
        if not pid and whole:
            main(*line.rstrip("\n").split("\t"))
            return
        if not pid:
            try:
                main(*line.rstrip("\n").split("\t"))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        os.write(1, f"ended {status}\n".encode())


if __name__ == "__main__":
    _serve(*sys.argv[1:])
