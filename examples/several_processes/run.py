"""Start everything on this machine: two engines, three producers, one trainer, on one store.

    python examples/several_processes/run.py --store postgresql://user@host/database [--steps 60]
    python examples/several_processes/run.py --store ray:grpo       # in a Ray cluster, or a new local one

On a cluster each of these processes runs on its own host; only STORE and ENGINE differ. Needs forebay[postgres] or
forebay[ray].
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

HERE = Path(__file__).resolve().parent


def start(stack: ExitStack, *command: str, **more: str) -> subprocess.Popen[str]:
    """A process that is ended with SIGTERM when the run is over."""
    environment = os.environ | more
    process = subprocess.Popen(command, cwd=HERE, env=environment, stdout=subprocess.PIPE, text=True)

    def stop() -> None:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

    stack.callback(stop)
    return process


def run(store: str, steps: int, checkpoints: str | None) -> int:
    with ExitStack() as stack:
        if store.startswith("ray:"):
            import ray
            from plane import LEASE_S

            from forebay import ReplayBufferConfig
            from forebay.ray import RayReplayBuffer

            ray.init(
                ignore_reinit_error=True, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
            )
            name = store.removeprefix("ray:")
            config = ReplayBufferConfig(policy="staleness", max_groups=128, lease_s=LEASE_S)
            RayReplayBuffer.create(name, config)
            stack.callback(RayReplayBuffer.destroy, name)
            os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        urls = []
        for _ in range(2):
            engine = start(stack, sys.executable, "engine.py", "0")
            assert engine.stdout is not None
            urls.append(f"http://127.0.0.1:{engine.stdout.readline().split()[-1]}")
        forebay = (sys.executable, "-m", "forebay", "produce", "plane:make_loader", "--quiet")
        for number in range(3):
            start(stack, *forebay, STORE=store, ENGINE=urls[number % 2])
        command = [sys.executable, "trainer.py", "--steps", str(steps)]
        if checkpoints is not None:
            command += ["--checkpoints", checkpoints]
        environment = os.environ | {"STORE": store, "ENGINE": urls[0], "ENGINES": ",".join(urls)}
        return subprocess.run(command, cwd=HERE, env=environment, check=False).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True, help="postgresql://... or ray:NAME")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--checkpoints", help="a directory for the checkpoint of the trainer")
    options = parser.parse_args()
    sys.path.insert(0, str(HERE))
    sys.exit(run(options.store, options.steps, options.checkpoints))


if __name__ == "__main__":
    main()
