"""Virtual time: hours of producing and training in milliseconds, the same every time.

`run` runs a program on an event loop whose clock jumps from timer to timer and whose tasks take turns in an order that
a seed decides; `SimulatedEngine` answers prompts there, with long tails, failures and hangs as asked for; `train` runs
the real strategies, samplers and buffer around it, and says what was trained, when, and at what age. A seed under
which a test fails fails again, in another process too.

>>> import asyncio
>>> from forebay.testing import simulate
>>> async def main():
...     await asyncio.sleep(3600)
...     return asyncio.get_running_loop().time()
>>> simulate.run(main, seed=7)
3600.0
"""

from forebay.testing.simulate.driver import StepReport, TrainingReport, check_ledger, check_nothing_lost, train
from forebay.testing.simulate.engine import EngineFigures, LengthModel, LongTail, SimulatedEngine, token, tokens
from forebay.testing.simulate.loop import NotSimulated, SimulatedLoop, SimulationLimit, SimulationStuck, run

__all__ = [
    "EngineFigures",
    "LengthModel",
    "LongTail",
    "NotSimulated",
    "SimulatedEngine",
    "SimulatedLoop",
    "SimulationLimit",
    "SimulationStuck",
    "StepReport",
    "TrainingReport",
    "check_ledger",
    "check_nothing_lost",
    "run",
    "token",
    "tokens",
    "train",
]
