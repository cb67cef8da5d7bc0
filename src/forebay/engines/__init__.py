"""Controls of inference servers: load new weights in a safe order, and check them. Needs the extra `http`."""

from forebay.engines.control import EngineControl, Producer, WeightUpdate
from forebay.engines.servers import SGLangControl, VLLMControl
from forebay.engines.several import EngineControls

__all__ = ["EngineControl", "EngineControls", "Producer", "SGLangControl", "VLLMControl", "WeightUpdate"]
