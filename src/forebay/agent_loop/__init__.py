"""How one group is generated: the contract, and the loops that come with Forebay."""

from forebay.agent_loop.base import AgentLoop
from forebay.agent_loop.function import FunctionAgentLoop

__all__ = ["AgentLoop", "FunctionAgentLoop"]
