"""Controls of inference servers: load new weights in a safe order, and check them. Needs the extra `http`."""

from forebay.engines.control import EngineControl, Producer, WeightUpdate
from forebay.engines.sglang import SGLangControl
from forebay.engines.vllm import VLLMControl

__all__ = ["EngineControl", "Producer", "SGLangControl", "VLLMControl", "WeightUpdate"]
