"""The buffer and the managers for trainers that are not async: the same verbs, safe to call from any thread.

    with blocking.DisaggregatedAgentLoopManager(build) as manager:
        manager.start(64)                                        # produces in the background
        for step in range(1, 1001):
            with manager.get_batch(64, step, timeout_s=600) as batch:
                train(batch.groups)                              # acknowledged after the block, given back if it raises
            manager.pause_produce()
            load_weights(engine)
            manager.continue_produce(model_step=step)

    with blocking.ReplayBuffer(forebay.AsyncReplayBufferConfig()) as buffer:
        buffer.submit(produce(buffer.native))                    # async producers run on the buffer's own loop
        with buffer.lease_batch({"math": 64}, train_step=1, timeout_s=600) as lease:
            train(lease.groups)

What is wrapped lives on an event loop in a thread of its own; every call is handed over to it and waited for. Ctrl-C
(or any exception) while a call waits cancels it there, and surfaces when that has ended; what was leased or drawn in
that very moment is given back. Only what is taken for good (`get`, `take_batch`, `take`) has nothing to give back once
it is taken: prefer a lease.
"""

from forebay.blocking.buffer import Lease, ReplayBuffer
from forebay.blocking.manager import AgentLoopManager, Batch, BatchRequest, DisaggregatedAgentLoopManager

__all__ = ["AgentLoopManager", "Batch", "BatchRequest", "DisaggregatedAgentLoopManager", "Lease", "ReplayBuffer"]
