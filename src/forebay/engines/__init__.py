"""How an inference server is given new weights: in an order that is safe, and checked. Needs the extra `http`."""

from forebay.engines.control import EngineControl, Producer, WeightUpdate
from forebay.engines.sglang import SGLangControl
from forebay.engines.vllm import VLLMControl

__all__ = ["EngineControl", "Producer", "SGLangControl", "VLLMControl", "WeightUpdate"]
