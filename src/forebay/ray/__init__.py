"""The same buffers and agent loops on a Ray cluster, for more than one machine. Needs `forebay[ray]`.

`RayReplayBuffer` is a ReplayBuffer that an actor hosts; `RayAgentLoop` runs an agent loop as a pool of actors. Samples
may hold Ray's object references. See docs/guide/scaling.md.
"""

try:
    import ray as _ray  # noqa: F401
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError("forebay.ray needs Ray: pip install 'forebay[ray]'", name="ray") from missing

from forebay.ray.buffer import RayReplayBuffer
from forebay.ray.client.storage import RayStorage
from forebay.ray.loops.loop import RayAgentLoop

__all__ = ["RayAgentLoop", "RayReplayBuffer", "RayStorage"]
