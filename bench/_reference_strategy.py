"""The rival of `strategies.py`: producing as the field's default does it, in virtual time, with the same engine.

It over-issues, aborts what is left when the batch is there, and drops every group that had begun: its tokens would be
too old for the next step. Which prompts reach the trainer then depends on how long their answers are.
"""

from __future__ import annotations

import asyncio

from forebay import RolloutState, Status
from forebay.testing.simulate import SimulatedEngine


async def train_dropping(
    engine: SimulatedEngine, *, steps: int, batch_size: int, samples: int, over: float, train_s: float
) -> tuple[list[int], int]:
    """The group ids that were trained, and how many were drawn."""
    trained: list[int] = []
    drawn = 0
    leftovers: list[list[RolloutState]] = []  # aborted before their first token: begun again
    for step in range(1, steps + 1):
        await engine.resume()
        running: dict[asyncio.Task[list[RolloutState]], int] = {}
        done: list[int] = []
        while len(running) < batch_size + int(over * batch_size):
            group = leftovers.pop() if leftovers else None
            if group is None:
                group = [
                    RolloutState(message=[], group_id=drawn, rollout_id=drawn * samples + member)
                    for member in range(samples)
                ]
                drawn += 1
            running[asyncio.create_task(engine.generate_group(group))] = group[0].group_id or 0
        while len(done) < batch_size:
            finished, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            done += [running.pop(task) for task in finished]
        pausing = asyncio.create_task(engine.pause())
        if running:
            await asyncio.wait(running)
        await pausing
        for task in running:
            group = task.result()
            if all(state.response_ids is None for state in group):
                for state in group:
                    state.status = Status.INIT
                leftovers.append(group)
        trained += done[:batch_size]
        await asyncio.sleep(train_s)
        engine.set_weights(step)
    return trained, drawn
