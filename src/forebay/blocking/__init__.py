"""The buffer and the managers for synchronous trainers: the same methods, safe to call from any thread.

    with blocking.DisaggregatedAgentLoopManager(build) as manager:
        manager.start(64)                                        # produces in the background
        for step in range(1, 1001):
            with manager.get_batch(64, step, timeout_s=600) as batch:
                train(batch.groups)                              # acknowledged after the block, returned if it raises
            manager.pause_produce()
            load_weights(engine)
            manager.continue_produce(model_step=step)

    with blocking.ReplayBuffer(forebay.AsyncReplayBufferConfig()) as buffer:
        buffer.submit(produce(buffer.native))                    # async producers run on the buffer's own loop
        with buffer.lease_batch({"math": 64}, train_step=1, timeout_s=600) as lease:
            train(lease.groups)

The native object (`native`) lives on an event loop in its own thread. Every call runs there while the caller waits.
Ctrl-C (or any exception) in the waiting caller cancels the call, and surfaces when the call has ended; groups leased at
that very moment are returned. Groups that are taken for good (`get`, `take_batch`, `take`) cannot be returned: prefer a
lease.
"""

from forebay.blocking.buffer import Lease, ReplayBuffer
from forebay.blocking.managers import AgentLoopManager, Batch, BatchRequest, DisaggregatedAgentLoopManager

__all__ = ["AgentLoopManager", "Batch", "BatchRequest", "DisaggregatedAgentLoopManager", "Lease", "ReplayBuffer"]
