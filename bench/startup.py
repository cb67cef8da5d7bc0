"""What `import forebay` costs in a fresh process (CPU time), on a warm disk, beside what it cannot do without."""

from __future__ import annotations

import subprocess
import sys

from _harness import Verdict, arguments, quiet, table

TIMED = "import time; start = time.process_time(); import {}; print((time.process_time() - start) * 1000)"


def import_ms(modules: str, repeat: int) -> float:
    rounds = []
    for _ in range(repeat):
        done = subprocess.run([sys.executable, "-c", TIMED.format(modules)], capture_output=True, text=True, check=True)
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
