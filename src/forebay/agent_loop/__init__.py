"""How one group is generated: the contract, and the loops that come with Forebay.

`OpenAIAgentLoop` needs the extra `http`, and is imported on first use.
"""

import typing as _typing

from forebay.agent_loop.base import AgentLoop, FunctionAgentLoop
from forebay.core.lazy import lazy_names as _lazy_names

if _typing.TYPE_CHECKING:
    from forebay.agent_loop.openai import OpenAIAgentLoop as OpenAIAgentLoop
else:
    __getattr__ = _lazy_names(__name__, {"OpenAIAgentLoop": "forebay.agent_loop.openai"})

__all__ = ["AgentLoop", "FunctionAgentLoop"]
