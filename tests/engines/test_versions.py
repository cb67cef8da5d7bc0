"""Version spans are true on a live engine: weights change while a producer runs ahead with partial rollout."""

from __future__ import annotations

import logging
from pathlib import Path

from forebay.engines import EngineControl
from tests.engines.conftest import UPDATES
from tests.engines.plane import GROUPS, open_plane
from tests.engines.reference import Reference
from tests.engines.servers import Server

log = logging.getLogger(__name__)

_MEMBERS = 6
_TOKENS = 900


async def test_every_version_span_has_the_logprobs_of_the_weights_that_it_names(
    server: Server, versions: list[Path], reference: Reference, control_class: type[EngineControl]
) -> None:
    control = control_class(server.url)
    async with open_plane(server, members=_MEMBERS, max_tokens=_TOKENS, control=control) as plane:
        producer = plane.produce()
        for step in range(1, UPDATES + 1):
            await plane.train(step)
            await plane.streamed.more(300)  # the producer has begun the groups of later steps
            update = await control.update_weights(versions[step], model_step=step, manager=plane.manager)
            assert update.checked > 0
            assert update.unchecked == 0
        await plane.train(UPDATES + 1)
        await plane.streamed.more(300)  # of the last weights
        await plane.manager.shutdown()
        await producer
        samples = await plane.samples()

    findings = reference.check(samples)
    log.info("findings %s", findings)
    assert not findings.wrong
    assert not findings.ambiguous
    assert len(plane.trained) == (UPDATES + 1) * GROUPS * _MEMBERS >= 96
    assert findings.steps == set(range(UPDATES + 1))
    # A run whose updates interrupt no sample would show nothing.
    assert findings.of_several_versions() >= 32, f"samples by number of spans: {findings.by_spans}"
