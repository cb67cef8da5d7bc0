"""A run: what all processes that produce or train the same tasks on one store agree on.

The agreement (`Agreed`) is stored with the account of the first task (`Account.plan`) and changed by compare-and-set,
so that a change of one process is never lost to a change of another. It has the plan of steps, the weights that
generate, whether producing is paused and in which epoch, and the members: the owners that produce or train. Groups are
not part of it: how many exist is read from the ledger, and a producer takes its share of the missing ones when it
draws.

An epoch begins with every pause and every resume. Draws name the epoch that their producer follows, and the storage
refuses those of an earlier one, so a producer that missed a pause cannot begin a group with the wrong weights.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Literal, TypeVar
from weakref import WeakMethod

import msgspec

from forebay.agent_loop.outage import Outage
from forebay.buffer.internal import Internals
from forebay.core.ledger import Account, Clock
from forebay.errors import InvalidConfig, InvalidInput, LostLease, WaitTimeout
from forebay.manager.agreement import Agreed, Handout, Member, Terms, decode, encode
from forebay.manager.schedule import ProduceProgress
from forebay.produce.plan import Among
from forebay.storage.base import Summary

log = logging.getLogger(__name__)

T = TypeVar("T")

_CALM_S = 0.1
"""How often a member looks at what others do. It is told at once what happens in its own process."""


class Run(Among):
    """One member's view of a run, and its way to change it."""

    lead: str
    """The task whose account has the plan."""

    def __init__(self, internals: Internals, terms: Terms) -> None:
        self.lead = min(terms.tasks)
        self.terms = terms
        self.owners: Collection[str] = ()  # that were alive when the storage was last read
        self.on_change: Callable[[], None] = lambda: None
        self.agreed = Agreed(terms, self._new_progress().dump())
        self.progress = self._new_progress()
        self.internals = internals
        self._revision = -1
        internals.on_summary.append(WeakMethod(self._see))

    @property
    def owner(self) -> str:
        return self.internals.session.owner

    @property
    def member(self) -> Member | None:
        """This process, if it has joined."""
        return self.agreed.members.get(self.owner)

    def _new_progress(self) -> ProduceProgress:
        return ProduceProgress(self.terms.weights)

    # --- reading --------------------------------------------------------------------------------------

    def _see(self, summary: Summary) -> None:
        """Take over a plan that another member has written."""
        self.owners = summary.owners
        if self.lead in summary.tasks:
            account = summary.tasks[self.lead].account
            if account.plan_revision > self._revision:
                self._adopt(account)

    def _adopt(self, account: Account) -> None:
        self._revision = account.plan_revision
        agreed = None if account.plan is None else decode(account.plan)
        if agreed is None or agreed.terms.tasks.keys() != self.terms.tasks.keys():
            self.agreed = Agreed(self.terms, self._new_progress().dump(), epoch=account.epoch)
        else:
            self.agreed = agreed
        self.progress = self._progress_of(self.agreed)
        self.on_change()

    def _progress_of(self, agreed: Agreed) -> ProduceProgress:
        progress = ProduceProgress(agreed.terms.weights)
        progress.load(agreed.progress)
        return progress

    def state_of(self, owner: str) -> str:
        """A member for people: its name, and whether it has confirmed a pause, or cannot reach its engine."""
        member = self.agreed.members[owner]
        waits = self.agreed.paused and member.idle < self.agreed.epoch
        notes = [note for note in (member.away, "has not confirmed the pause" if waits else None) if note]
        return f"{owner} ({'; '.join(notes)})" if notes else owner

    async def read(self) -> Summary:
        """Read the storage, and with it the plan."""
        return await self.internals.summary(self.terms.tasks)

    def share(self, wanted: int) -> int:
        """An equal part for each living producer whose engine can be reached."""
        present = [owner for owner, each in self.agreed.producers(self.owners).items() if each.away is None]
        return -(-wanted // (len(present) or 1))

    def leaves_to_others(self, outage: Outage) -> bool:
        """Whether the engine has been unreachable for a moment, and those of other producers are not."""
        others = self.agreed.producers(self.owners).items() if outage.lasts else ()
        return any(owner != self.owner and each.away is None for owner, each in others)

    async def set_away(self, reason: str | None) -> None:
        """Tell the others that the engine of this producer is unreachable, or may be back."""

        def edit(agreed: Agreed, progress: ProduceProgress) -> None:
            if self.owner in agreed.members:
                agreed.members[self.owner].away = reason

        await self.change(edit)

    def calm_s(self) -> float:
        """A tenth of a second, if others produce."""
        return _CALM_S if any(owner != self.owner for owner in self.agreed.producers(self.owners)) else 0.0

    def sets_clock(self) -> bool:
        """Whether this member trains. A producer of a run before must not move the clock of the run after a resume."""
        return self.member is not None and self.member.trains

    def follows(self, epoch: int) -> bool:
        """Whether this member has followed the plan into an epoch."""
        return epoch == self.agreed.epoch and not self.agreed.paused

    # --- changing -------------------------------------------------------------------------------------

    async def change(self, edit: Callable[[Agreed, ProduceProgress], T]) -> T:
        """Change the plan. `edit` is repeated if another member changed it meanwhile; if it raises, nothing changes."""
        while True:
            if self._revision < 0:
                await self.read()
                self._revision = max(self._revision, 0)  # the storage does not know the task yet
            before = encode(self.agreed)
            agreed = decode(before)
            progress = self._progress_of(agreed)
            result = edit(agreed, progress)
            agreed.progress = progress.dump()
            after = encode(agreed)
            revision = self._revision
            if after == before and revision:
                return result
            if await self.internals.write_plan(self.lead, after, revision=revision):
                if revision >= self._revision:
                    self._revision = revision + 1
                    self.agreed, self.progress = agreed, progress
                    self.on_change()
                return result
            self._revision = -1  # whatever the storage has now

    async def join(
        self, terms: Terms, *, trains: bool = False, produces: bool = False, leased: Collection[int] = ()
    ) -> None:
        """Take part; InvalidConfig, with the difference, if living members have other terms, or another one trains.

        A trainer that has died counts as living until its lease ends: it is waited for that long.
        """
        summary = await self.read()
        await self._check_tasks(summary)
        if trains:
            await self._only_trainer()
        epoch = self._epoch_of(summary)

        def edit(agreed: Agreed, progress: ProduceProgress) -> None:
            others = {
                owner: each for owner, each in agreed.members.items() if owner != self.owner and owner in self.owners
            }
            if (found := terms.differences(agreed.terms)) and others:
                raise InvalidConfig(
                    f"this process has other settings than the run of {', '.join(sorted(others))} on this store: "
                    f"{'; '.join(found)}; use the same configuration in every process, or a store for each run"
                )
            if trains and (other := [owner for owner, each in others.items() if each.trains]):
                raise InvalidConfig(
                    f"{other[0]} already trains {', '.join(map(repr, agreed.terms.tasks))} on this store; end it, or "
                    "declare this process as a rank of it: get_batch(..., rank=, world_size=)"
                )
            mine = agreed.members.get(self.owner)
            if mine is None and not others:  # the run before is over
                progress.load(self._new_progress().dump())
                progress.weights = terms.weights
                agreed.begun, agreed.paused, agreed.model_step = False, False, 0
            mine = mine or Member()
            if terms.batch_size is not None or not others:
                batch_size = agreed.terms.batch_size if terms.batch_size is None else terms.batch_size
                theirs = progress.weights if others and not trains else terms.weights
                agreed.terms = msgspec.structs.replace(terms.with_weights(theirs), batch_size=batch_size)
                if progress.weights != theirs:
                    progress.change_weights(theirs, leased=())
            agreed.members = others | {
                self.owner: Member(
                    produces=mine.produces or produces,
                    trains=mine.trains or trains,
                    followed=mine.followed,
                    idle=mine.idle,
                )
            }
            if terms.batch_size is not None:
                progress.change_batch_size(terms.batch_size, leased=leased)
            # A trainer that has not asked for a batch yet resumes or loads weights first: producers wait for that.
            agreed.begun = agreed.begun or (trains and terms.batch_size is not None)
            if trains:  # the trainer before may have died in the middle of beginning an epoch
                agreed.epoch = max(agreed.epoch, epoch)

        await self.change(edit)
        for name in self.terms.tasks:
            account = summary.task(name).account
            if name != self.lead and (
                account.plan is None or decode(account.plan).terms.tasks.keys() != terms.tasks.keys()
            ):
                await self.internals.write_plan(name, encode(self.agreed), revision=account.plan_revision)

    async def _check_tasks(self, summary: Summary) -> None:
        """InvalidConfig if a task belongs to a living run of other tasks."""
        for name in self.terms.tasks:
            plan = summary.task(name).account.plan
            run = None if plan is None else decode(plan)
            if run is not None and name != (lead := min(run.terms.tasks)):  # that of the lead has the members
                plan = (await self.internals.summary((lead,))).task(lead).account.plan
                run = None if plan is None else decode(plan)
            if run is None or name not in run.terms.tasks or run.terms.tasks.keys() == self.terms.tasks.keys():
                continue
            living = sorted(owner for owner in run.members if owner in summary.owners and owner != self.owner)
            if living:
                raise InvalidConfig(
                    f"task {name!r} belongs to a run of the tasks {', '.join(run.terms.tasks)} by {', '.join(living)}; "
                    f"this process has the tasks {', '.join(self.terms.tasks)}; give every process the same tasks"
                )

    async def _only_trainer(self) -> None:
        """Wait for a trainer that may have died to lose its lease."""

        async def attempt() -> bool | None:
            await self.read()
            return None if others() else True

        def others() -> list[str]:
            members = self.agreed.members.items()
            return [owner for owner, each in members if each.trains and owner in self.owners and owner != self.owner]

        lease_s = self.internals.session.lease_s
        await self.read()
        if others():
            log.info("trainer_waits for=%s: it may have died; waiting for at most lease_s=%s", others(), lease_s)
        try:
            await self.internals.until(attempt, "the trainer before to end", (self.lead,), timeout_s=lease_s or 0.0)
        except WaitTimeout:
            return  # it is alive; joining says so

    async def leave(self, *, failure: BaseException | None = None, produces_only: bool = False) -> None:
        """Stop taking part, or stop producing, with the reason if it failed."""

        def edit(agreed: Agreed, progress: ProduceProgress) -> None:
            member = agreed.members.get(self.owner)
            if member is None:
                return
            if not produces_only:
                del agreed.members[self.owner]
                return
            member.produces = False
            member.failure = None if failure is None else f"{type(failure).__name__}: {failure}"

        await self.change(edit)

    # --- ranks of a trainer ---------------------------------------------------------------------------

    async def hand_out(self, handout: Handout) -> None:
        """Let the ranks of the trainer have their parts of a batch."""

        def edit(agreed: Agreed, progress: ProduceProgress) -> None:
            agreed.handout = handout

        await self.change(edit)

    async def take_part(
        self, train_step: int, rank: int, world_size: int, timeout_s: float | None, void: str | None
    ) -> Handout:
        """Wait for rank 0 to lease the batch of a step, and take a rank's part of it. `void`: a lease that was lost."""

        async def attempt() -> Handout | None:
            await self.read()
            handout = self.agreed.handout
            if handout is None or handout.lease_id == void or handout.owner not in self.owners:
                return None
            return handout if handout.train_step >= train_step and handout.returned_by is None else None

        what = f"rank 0 to lease the batch of train step {train_step}"
        found = await self.internals.until(attempt, what, (self.lead,), timeout_s=timeout_s)
        if found.train_step > train_step or len(found.shards) != world_size:
            raise InvalidInput(
                f"rank {rank} of {world_size} asks for train step {train_step}, but rank 0 has leased train step "
                f"{found.train_step} for {len(found.shards)} ranks; give all ranks the same step and world_size"
            )

        def edit(agreed: Agreed, progress: ProduceProgress) -> None:
            if agreed.handout is not None and agreed.handout.lease_id == found.lease_id:
                agreed.handout.takers[rank] = self.owner

        await self.change(edit)
        return found

    async def handed_out_step(self, rank: int, timeout_s: float | None) -> int:
        """Wait for rank 0 to lease a batch that a rank has not trained on; its step."""

        async def attempt() -> int | None:
            await self.read()
            handout = self.agreed.handout
            if handout is None or handout.owner not in self.owners or rank in handout.trained:
                return None
            return handout.train_step

        return await self.internals.until(attempt, "rank 0 to lease a batch", (self.lead,), timeout_s=timeout_s)

    async def settle_part(self, lease_id: str, train_step: int, rank: int, *, trained: bool) -> None:
        """A rank has trained on its part, or gives it back. A part that was trained on waits for the others.

        LostLease if the batch is no longer handed out, or rank 0 died before it acknowledged it.
        """

        def edit(agreed: Agreed, progress: ProduceProgress) -> None:
            handout = agreed.handout
            if handout is None or handout.lease_id != lease_id:
                raise LostLease(f"the batch of lease {lease_id} was given back; the part of rank {rank} is void")
            if trained:
                handout.trained = sorted({*handout.trained, rank})
            else:
                handout.returned_by = rank

        await self.change(edit)
        if not trained:
            return

        async def attempt() -> bool | None:
            await self.read()
            if self.progress.next_consumer_step > train_step:
                return True
            handout = self.agreed.handout
            if handout is None or handout.lease_id != lease_id or handout.returned_by is not None:
                raise LostLease(f"the batch of train step {train_step} was given back; ask for it again")
            if handout.owner not in self.owners:
                raise LostLease(f"rank 0 died before it acknowledged train step {train_step}; ask for it again")
            return None

        what = f"rank 0 to acknowledge train step {train_step}"
        await self.internals.until(attempt, what, (self.lead,))

    async def until_trained(self, train_step: int, timeout_s: float | None) -> None:
        """Wait until every rank has trained on its part. LostLease if one gave it back, or has died."""

        async def attempt() -> bool | None:
            await self.read()
            handout = self.agreed.handout
            if handout is None or handout.train_step != train_step:
                return True
            dead = [rank for rank, owner in handout.takers.items() if owner not in self.owners]
            missing = sorted(set(range(1, len(handout.shards))) - set(handout.trained))
            if handout.returned_by is not None or (lost := [rank for rank in missing if rank in dead]):
                rank = handout.returned_by if handout.returned_by is not None else lost[0]
                raise LostLease(f"rank {rank} did not train on its part of step {train_step}; give the batch back")
            return None if missing else True

        what = f"all ranks to train on their parts of train step {train_step}"
        await self.internals.until(attempt, what, (self.lead,), timeout_s=timeout_s)

    # --- epochs ---------------------------------------------------------------------------------------

    def _epoch_of(self, summary: Summary) -> int:
        """The latest epoch that has begun, wholly or in part."""
        return max([self.agreed.epoch, *[summary.task(name).account.epoch for name in self.terms.tasks]])

    async def proceed(self, edit: Callable[[Agreed, ProduceProgress], None]) -> None:
        """Change the plan so that producers draw again, in the latest epoch."""
        epoch = self._epoch_of(await self.read())
        await self.internals.advance(dict.fromkeys(self.terms.tasks, Clock(epoch=epoch)))

        def follow(agreed: Agreed, progress: ProduceProgress) -> None:
            agreed.epoch, agreed.paused = max(epoch, agreed.epoch), False
            edit(agreed, progress)

        await self.change(follow)

    async def begin_epoch(self, edit: Callable[[Agreed, ProduceProgress], None]) -> int:
        """Begin an epoch: draws of all earlier ones are refused from now on. `edit` changes the plan with it."""
        epoch = 1 + self._epoch_of(await self.read())
        await self.internals.advance(dict.fromkeys(self.terms.tasks, Clock(epoch=epoch)))

        def begin(agreed: Agreed, progress: ProduceProgress) -> None:
            agreed.epoch = max(epoch, agreed.epoch)
            edit(agreed, progress)

        await self.change(begin)
        return epoch

    async def confirm(self, epoch: int, what: Literal["followed", "idle"]) -> None:
        """This member has seen, or completed, the pause of an epoch."""

        def edit(agreed: Agreed, progress: ProduceProgress) -> None:
            member = agreed.members.get(self.owner)
            if member is not None:
                setattr(member, what, max(epoch, getattr(member, what)))

        await self.change(edit)

    async def until_idle(self, epoch: int, patience_s: float) -> None:
        """Wait until every other living producer has confirmed the pause of this epoch.

        One that does not even see it within `lease_s`, or does not complete it within `patience_s` more, has hung: it
        is removed from the run, and its groups go back.
        """
        lease_s = self.internals.session.lease_s
        clock = asyncio.get_running_loop().time
        began, asked = clock(), set(self.agreed.producers(self.owners))
        while True:
            late = await self._until_idle(epoch, None if lease_s is None else began + lease_s - clock())
            if not late:
                for owner in sorted(asked - set(self.agreed.producers(self.owners))):
                    log.warning("producer_dropped owner=%s epoch=%d: it ended, or its lease did", owner, epoch)
                return
            gone = {owner: each for owner, each in late.items() if each.followed < epoch}
            if not gone and lease_s is not None:
                gone = late = await self._until_idle(epoch, began + lease_s + patience_s - clock())
            for owner in gone:
                await self.remove(owner)
                log.warning("producer_removed owner=%s epoch=%d: it did not follow a pause", owner, epoch)
            if not late:
                return

    async def _until_idle(self, epoch: int, timeout_s: float | None) -> dict[str, Member]:
        """Wait for the producers; those that are late."""
        late: dict[str, Member] = {}

        async def attempt() -> bool | None:
            nonlocal late
            await self.read()
            producers = self.agreed.producers(self.owners)
            late = {owner: each for owner, each in producers.items() if owner != self.owner and each.idle < epoch}
            return True if not late or self.agreed.epoch > epoch else None

        try:
            what = f"all producers to confirm pause {epoch}"
            await self.internals.until(
                attempt, what, (self.lead,), timeout_s=None if timeout_s is None else max(0.0, timeout_s)
            )
        except WaitTimeout:
            return late
        return {}

    async def own_tasks(self) -> list[str] | None:
        """The tasks of the store without those of other living runs; None: all."""
        summary = await self.internals.summary()
        plans = {name: task.account.plan for name, task in summary.tasks.items() if task.account.plan is not None}
        runs = {name: decode(plan) for name, plan in plans.items() if plan is not None}
        foreign = {
            name
            for lead, run in runs.items()
            if lead == min(run.terms.tasks) and run.terms.tasks.keys() != self.terms.tasks.keys()
            for name in run.terms.tasks
            if any(owner in self.owners for owner in run.members)
        }
        return sorted(summary.tasks.keys() - foreign | self.terms.tasks.keys()) if foreign else None

    async def others(self) -> list[str]:
        """The other living members."""
        await self.read()
        return [owner for owner in self.agreed.members if owner != self.owner and owner in self.owners]

    async def remove_others(self) -> None:
        """Take all others out of the run; living producers join again."""
        for owner in [owner for owner in self.agreed.members if owner != self.owner]:
            await self.remove(owner)

    async def remove(self, owner: str) -> None:
        """Take an owner out of the run, and give its groups back: it can no longer return them."""

        def edit(agreed: Agreed, progress: ProduceProgress) -> None:
            agreed.members.pop(owner, None)

        await self.change(edit)
        await self.internals.release(owner)
