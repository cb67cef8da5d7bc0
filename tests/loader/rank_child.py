"""One rank of a trainer in its own process: `python -m tests.loader.rank_child RANK WORLD_SIZE PROGRAM DIRECTORY`.

It prints what it saw as JSON. The programs are those that trainers write; a rank that fails on purpose says so.
"""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from forebay import RankFailed, RolloutLoader, RolloutState, Task, TorchBroadcast, WeightsTooOld

calls = {"generate": 0}


async def generate(state: RolloutState) -> None:
    calls["generate"] += 1
    await asyncio.sleep(0)
    number = state.rollout_id or 0
    state.prompt_ids, state.response_ids = [number], [7] * (1 + number % 5)


def loader_of(directory: Path) -> RolloutLoader:
    prompts = [{"prompt": f"question {number}"} for number in range(100)]
    task = Task("math", prompts, generate, reward=lambda state: 1.0, group_size=2, shuffle=False)
    return RolloutLoader(
        task, broadcast=TorchBroadcast(), batch_groups=7, max_staleness=1, checkpoints=directory, progress=None
    )


def ids(groups: list[list[RolloutState]]) -> list[int]:
    return [group[0].group_id or 0 for group in groups]


def train(directory: Path, rank: int) -> dict[str, Any]:
    seen: dict[int, list[int]] = {}
    tokens: list[int] = []
    loaded: list[int] = []
    with loader_of(directory) as loader:
        start = loader.resume(loaded.append) or 0
        for batch in loader.batches(start + 1, start + 4):
            seen[batch.step] = ids(batch.groups)
            tokens.append(sum(len(each.input_ids) for each in batch.packed(max_tokens=100)))
            if batch.step % 2:
                batch.ack()
                assert not batch.open
            loader.update_weights(loaded.append)
            if batch.step % 3 == 0:
                loader.save(batch.step)
        evaluation = loader.evaluate("math")
        ledger = loader.ledger() if rank == 0 else None
    return {
        "seen": seen,
        "tokens": tokens,
        "loaded": loaded,
        "evaluated": len(evaluation.groups),
        "ledger": ledger,
        "generated": calls["generate"],
    }


def errors(directory: Path, rank: int) -> dict[str, Any]:
    """A load that fails on rank 1, weights that get too old, a rank that gives up."""
    found = []
    with loader_of(directory) as loader:
        for batch in loader.batches(1, 1):
            assert batch.open

            def load(step: int) -> None:
                if rank == 1:
                    raise OSError("no route")

            try:
                loader.update_weights(load)
            except (OSError, RankFailed) as error:
                found.append(f"{type(error).__name__}: {error}")
            loader.update_weights(lambda: None)
        try:
            for _batch in loader.batches(2):
                pass
        except WeightsTooOld as old:
            found.append(f"too old for {old.step}")
        loader.update_weights(lambda: None)
        try:
            with next(loader.batches(4)):
                raise KeyError(rank)
        except KeyError:
            found.append("given back")
        again = next(loader.batches(4))
        found.append(f"again {again.step}")
    return {"errors": found}


def apart(directory: Path, rank: int) -> dict[str, Any]:
    """Ranks that do not do the same: one saves alone, and then one raises in the body."""
    found = []
    for how in ("save", "raise", "break"):
        try:
            with loader_of(directory / how) as loader:
                for batch in loader.batches(1, 3):
                    if how == "save" and rank == 0:
                        loader.save(batch.step)
                    if how == "raise" and rank == 1:
                        raise ValueError("bad loss")
                    if how == "break" and rank == 1:
                        break
                    loader.update_weights(lambda: None)
        except (RankFailed, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append("no error")
        dist.barrier()
    return {"errors": found}


def main() -> None:
    rank, world_size, program, directory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    dist.init_process_group(
        "gloo", f"file://{directory}/meet", timeout=timedelta(minutes=5), rank=rank, world_size=world_size
    )
    result = {"train": train, "errors": errors, "apart": apart}[program](directory / "saves", rank)
    sys.stdout.write(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
