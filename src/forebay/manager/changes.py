"""Tasks and weights that change while a run continues.

Steps that were planned and not handed out are planned again; leased batches stay valid. The weights of tasks are part
of the agreement of a run and may change in all of its processes; the tasks themselves only where nobody else takes
part, because other processes could not generate for a task that they do not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from forebay.errors import InvalidInput
from forebay.manager.agreement import Agreed
from forebay.manager.base import Manager
from forebay.manager.run import Run
from forebay.manager.schedule import ProduceProgress, check_weights
from forebay.manager.task import ManagedTask, check_tasks, terms_of


async def change_tasks(manager: Manager, tasks: Sequence[ManagedTask]) -> None:
    """Have these tasks from now on.

    Groups in flight of a task that is no longer among them are aborted; its groups stay in the buffer.
    """
    interval, before = manager.sync_weights_interval, manager.run
    changed = check_tasks(tasks, manager.replay_buffer, interval)
    if others := await before.others():
        raise InvalidInput(
            f"tasks cannot be added or removed while other processes take part in the run ({', '.join(others)}); end "
            "them, and start them with the new tasks afterwards"
        )
    async with manager.hold():
        for name, task in manager.tasks.items():
            if name not in changed:
                await task.strategy.close()
        agreed, plan, joined = before.agreed, before.progress.dump(), before.member  # as they are: `before` reads on
        terms = replace(terms_of(changed, interval), batch_size=agreed.terms.batch_size)
        if joined is not None:
            await before.leave()
        run = Run(before.internals, terms)
        manager.adopt(changed, run)
        if joined is None:
            return

        def carry_over(now: Agreed, progress: ProduceProgress) -> None:
            progress.load(plan)
            progress.change_weights(terms.weights, leased=manager.leased_steps)
            now.model_step, now.begun, now.paused = agreed.model_step, agreed.begun, agreed.paused

        await run.join(terms, trains=joined.trains, produces=joined.produces)
        await run.begin_epoch(carry_over)


async def reopen_task(manager: Manager, name: str) -> None:
    """A task has more prompts: plan with it again, if its data had ended."""
    await manager.run.change(lambda agreed, progress: progress.reopen_task(name, leased=manager.leased_steps))
    manager.run.internals.nudge()


async def set_weights(manager: Manager, weights: Mapping[str, float]) -> None:
    """Share the steps that were not handed out by these weights from now on, in all processes of the run."""
    if unknown := set(weights) - manager.tasks.keys():
        raise InvalidInput(f"there is no task {min(unknown)!r}; expected one of {', '.join(manager.tasks)}")
    new = {name: weights.get(name, task.weight) for name, task in manager.tasks.items()}
    check_weights(new)

    def edit(agreed: Agreed, progress: ProduceProgress) -> None:
        agreed.terms = agreed.terms.with_weights(new)
        progress.change_weights(new, leased=manager.leased_steps)

    await manager.run.change(edit)
    manager.run.terms = manager.run.terms.with_weights(new)
    manager.adopt({name: replace(task, weight=new[name]) for name, task in manager.tasks.items()}, manager.run)
