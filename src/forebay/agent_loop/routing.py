"""Which server of a loop gets a request, and how a server that is away comes back.

The rule of `choose`, among the servers that answer and have the current weights:
- A request goes to the server that its rollout used last (a continuation, a later turn), or else to the server that its
  group used first (members share a prompt), because that server has the prefix in its cache.
- It does so while that server has fewer than 8 requests more than the least loaded one, or less than half more.
- All others go to the server with the fewest requests of this loop in flight; the first of them in the order given.

A server that cannot be reached, or whose weights are not the current ones, leaves at once. A task in the background
asks it whether it is back, and has its control load the current weights; only then it returns. While another server
works, nobody waits for it. A server that restarted and has no control stays out until its weights are pushed again
(`weights_loaded`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Hashable, Sequence

from forebay.agent_loop.endpoint import Endpoint
from forebay.agent_loop.monitor import Unreachable
from forebay.agent_loop.outage import Outage
from forebay.core.aio import ignore_exception
from forebay.core.rollout import RolloutState
from forebay.errors import EngineError, EngineRestarted

log = logging.getLogger(__name__)

_SLACK = 8
_REMEMBERED = 65_536  # rollouts and groups whose server is remembered


class Router:
    """Chooses among the servers of one loop. With one server it always chooses that one, whatever its state."""

    def __init__(self, servers: Sequence[Endpoint]) -> None:
        self.servers = tuple(servers)
        self._used: OrderedDict[Hashable, Endpoint] = OrderedDict()
        self._returning: dict[Endpoint, asyncio.Task[None]] = {}
        if self.several:
            works = Outage("another server")  # never away: the tasks in the background do not give up
            for server in self.servers:
                server.outage.peers = (works,)

    @property
    def several(self) -> bool:
        """Whether requests can move."""
        return len(self.servers) > 1

    def choose(self, state: RolloutState) -> Endpoint | None:
        """The server for the next request of a sample; None if none can be used now."""
        if not self.several:
            return self.servers[0]
        for server in self.servers:
            if not server.usable:
                self.leave(server, server.gone or server.monitor.doubts or "")
        usable = [server for server in self.servers if server.usable]
        if not usable:
            return None
        chosen = least = min(usable, key=lambda server: server.in_flight)
        group, rollout = _keys(state)
        last = self._used.get(rollout) or self._used.get(group)
        if last is not None and last.usable and last.in_flight < least.in_flight + max(_SLACK, least.in_flight // 2):
            chosen = last
        if state.group_id is not None:
            self._used.setdefault(group, chosen)
            self._used[rollout] = chosen
            for key in (group, rollout):
                self._used.move_to_end(key)
            while len(self._used) > _REMEMBERED:
                self._used.popitem(last=False)
        return chosen

    def leave(self, server: Endpoint, reason: str) -> None:
        """Send no more requests to a server until it is back with the current weights."""
        if server.gone is None:
            log.warning("server_left url=%s reason=%s: requests go to the others", server.root, reason)
        server.gone = reason
        if not server.lost and not self._is_returning(server):
            task = asyncio.create_task(self._return(server), name=f"return of {server.root}")
            task.add_done_callback(ignore_exception)
            self._returning[server] = task

    def _is_returning(self, server: Endpoint) -> bool:
        task = self._returning.get(server)
        return task is not None and not task.done() and task.get_loop() is asyncio.get_running_loop()

    async def _return(self, server: Endpoint) -> None:
        monitor = server.monitor
        while not server.lost:
            try:
                await server.outage.wait(server.gone or "", monitor.check_reachable)
                await monitor.ready()
            except (EngineError, Unreachable) as error:
                server.gone = str(error)
                continue  # the next wait is longer
            server.outage.over()
            server.gone = None
            log.warning("server_back url=%s: it gets requests again", server.root)
            return
        log.warning("server_lost url=%s: its weights have to be pushed again", server.root)

    async def check_any(self) -> None:
        """Return if a server can be used; else Unreachable, or EngineRestarted if only new weights can change that."""
        if any(server.usable for server in self.servers):
            return
        reasons = "; ".join(f"{server.root}: {server.gone}" for server in self.servers)
        if all(server.lost for server in self.servers):
            raise EngineRestarted(f"none of {len(self.servers)} servers has the current weights: {reasons}")
        raise Unreachable(reasons)

    async def weights_loaded(self, model_step: int) -> None:
        """Record which processes have the weights of a step. A server without them leaves; EngineError if all do."""
        asked = (server.monitor.weights_loaded(model_step) for server in self.servers)
        results = await asyncio.gather(*asked, return_exceptions=True)
        errors = [error for error in results if error is not None]
        for error in errors:
            if len(errors) == len(self.servers) or not isinstance(error, EngineError):
                raise error
        for server, failed in zip(self.servers, results, strict=True):
            if failed is not None:
                if not server.monitor.doubted:
                    server.monitor.doubt(str(failed))
                self.leave(server, str(failed))
            elif server.gone is not None and not server.monitor.doubted and not self._is_returning(server):
                server.gone = None

    def explain(self) -> str | None:
        """Which servers get no requests now, for people."""
        away = [f"{server.root} gets no requests ({server.gone})" for server in self.servers if server.gone is not None]
        return "; ".join(away) or None

    async def close(self) -> None:
        """Stop asking for servers that are away; the next request does."""
        returning, self._returning = self._returning, {}
        loop = asyncio.get_running_loop()
        here = [task for task in returning.values() if task.get_loop() is loop]
        for task in here:
            task.cancel()
        await asyncio.gather(*here, return_exceptions=True)


def _keys(state: RolloutState) -> tuple[Hashable, Hashable]:
    group = (state.task_name, state.group_id)
    return group, (*group, state.rollout_id)
