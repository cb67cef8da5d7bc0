"""Forebay: the rollout data plane for reinforcement learning.

It connects inference engines with the trainer, and owns every prompt from the moment it is drawn until the trainer has
confirmed that it trained on it. Start with `RolloutLoader` and `Task`; `forebay.collate` makes tensors of a batch. The
parts below them (buffer, samplers, agent loops, strategies, managers) are here, too. `OpenAIAgentLoop`,
`SGLangGenerateLoop`, `SQLiteStorage`, `PostgresStorage` and `PandasStorage` are imported on first use, so that `import
forebay` needs no optional dependency. All public names of `errors`, `loader`, `manager` and `produce` are here.
"""

import typing as _typing

from forebay import errors as _errors
from forebay import loader as _loader
from forebay import manager as _manager
from forebay import produce as _produce
from forebay.agent_loop import AgentLoop, FunctionAgentLoop
from forebay.buffer.buffer import ReplayBuffer, checkpoint_exists
from forebay.buffer.lease import Lease
from forebay.config import (
    AsyncReplayBufferConfig,
    ManagerConfig,
    ReplayBufferConfig,
    StrategyConfig,
    SyncReplayBufferConfig,
    TaskConfig,
)
from forebay.core.lazy import lazy_names as _lazy_names
from forebay.core.ledger import End, GroupEnd, Place, Record
from forebay.core.payload import group_bytes
from forebay.core.policy import (
    Column,
    FIFOReplayPolicy,
    FreshestReplayPolicy,
    Order,
    PriorityReplayPolicy,
    ReplayPolicy,
    StalenessReplayPolicy,
)
from forebay.core.rollout import RolloutState, SampleParams, Status, finish_status, group_status, version_spans_of
from forebay.core.staleness import group_staleness, sample_staleness, stale_threshold, staleness, token_mask
from forebay.errors import *  # noqa: F403
from forebay.loader import *  # noqa: F403
from forebay.manager import *  # noqa: F403
from forebay.produce import *  # noqa: F403
from forebay.prompts.chat import chat_tokenize
from forebay.prompts.prompt_source import PromptSource
from forebay.prompts.sampler import Sampler, SamplerWithReplayBuffer
from forebay.storage.base import Storage
from forebay.storage.local.memory import MemoryStorage

if _typing.TYPE_CHECKING:
    from forebay.agent_loop.openai import OpenAIAgentLoop as OpenAIAgentLoop
    from forebay.agent_loop.sglang import SGLangGenerateLoop as SGLangGenerateLoop
    from forebay.storage.local.pandas import PandasStorage as PandasStorage
    from forebay.storage.postgres import PostgresStorage as PostgresStorage
    from forebay.storage.sqlite import SQLiteStorage as SQLiteStorage
else:
    __getattr__ = _lazy_names(
        __name__,
        {
            "OpenAIAgentLoop": "forebay.agent_loop.openai",
            "PandasStorage": "forebay.storage.local.pandas",
            "PostgresStorage": "forebay.storage.postgres",
            "SGLangGenerateLoop": "forebay.agent_loop.sglang",
            "SQLiteStorage": "forebay.storage.sqlite",
        },
    )

__version__ = "0.2.0.dev0"

__all__ = [
    "AgentLoop",
    "AsyncReplayBufferConfig",
    "Column",
    "End",
    "FIFOReplayPolicy",
    "FreshestReplayPolicy",
    "FunctionAgentLoop",
    "GroupEnd",
    "Lease",
    "ManagerConfig",
    "MemoryStorage",
    "Order",
    "Place",
    "PriorityReplayPolicy",
    "PromptSource",
    "Record",
    "ReplayBuffer",
    "ReplayBufferConfig",
    "ReplayPolicy",
    "RolloutState",
    "SampleParams",
    "Sampler",
    "SamplerWithReplayBuffer",
    "StalenessReplayPolicy",
    "Status",
    "Storage",
    "StrategyConfig",
    "SyncReplayBufferConfig",
    "TaskConfig",
    "chat_tokenize",
    "checkpoint_exists",
    "finish_status",
    "group_bytes",
    "group_staleness",
    "group_status",
    "sample_staleness",
    "stale_threshold",
    "staleness",
    "token_mask",
    "version_spans_of",
]
__all__ += _errors.__all__
__all__ += _loader.__all__
__all__ += _manager.__all__
__all__ += _produce.__all__
