"""How long `import forebay` takes in a fresh process, on a warm disk, beside what it cannot do without."""

from __future__ import annotations

import os
import subprocess
import sys

from _harness import Verdict, arguments, quiet, table

TIMED = "import time; start = time.perf_counter(); import {}; print((time.perf_counter() - start) * 1000)"

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def import_ms(modules: str, repeat: int) -> float:
    rounds = []
    for _ in range(repeat):
        command = [sys.executable, "-c", TIMED.format(modules)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT)
        rounds.append(float(done.stdout))
    return quiet(rounds[1:])  # the first one warms the disk and writes the bytecode


def main() -> None:
    options = arguments(__doc__)
    verdict = Verdict("startup", options)
    repeat = 12 if options.quick else 32
    base = import_ms("numpy, asyncio, msgspec", repeat)
    ours = import_ms("forebay", repeat)
    table(["import", "ms"], [["numpy, asyncio, msgspec", f"{base:.0f}"], ["forebay (with these)", f"{ours:.0f}"]])
    verdict.at_most("import forebay", ours, 150.0, "ms")
    verdict.finish()


if __name__ == "__main__":
    main()
