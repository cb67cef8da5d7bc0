"""A worker extension for vLLM on CPU that makes `reload_weights` load every tensor.

When vLLM loads a linear layer on CPU, it keeps a repacked copy for its fast matrix product and drops the original. A
later `reload_weights` has nothing to write to: it answers 200 and changes the other tensors only (8 of 16 for the tiny
model of these tests). This module, imported by each worker before it loads the model, makes linear layers use torch's
own product over the unpacked weight.

    --worker-extension-cls tests.engines.vllm_plain_cpu.PlainLinear
"""

from __future__ import annotations

from typing import Any

from torch.nn.functional import linear
from vllm.model_executor.layers import utils as vllm_layers


class PlainLinear:
    """Named by the command line; importing this module is what counts, so it adds nothing to the worker."""


def _use_unpacked_weight(layer: Any, *_: Any, **__: Any) -> None:
    layer.cpu_linear = linear


vllm_layers.dispatch_cpu_unquantized_gemm = _use_unpacked_weight
