"""How one group is generated: the contract, and the loops that come with Forebay.

`OpenAIAgentLoop` and `SGLangGenerateLoop` need the extra `http`, and are imported on first use.
"""

import typing as _typing

from forebay.agent_loop.base import AgentLoop, FunctionAgentLoop
from forebay.core.lazy import lazy_names as _lazy_names

if _typing.TYPE_CHECKING:
    from forebay.agent_loop.openai import OpenAIAgentLoop as OpenAIAgentLoop
    from forebay.agent_loop.sglang import SGLangGenerateLoop as SGLangGenerateLoop
else:
    __getattr__ = _lazy_names(
        __name__, {"OpenAIAgentLoop": "forebay.agent_loop.openai", "SGLangGenerateLoop": "forebay.agent_loop.sglang"}
    )

__all__ = ["AgentLoop", "FunctionAgentLoop"]
