"""From groups to arrays that a trainer takes: `pack`, `pad`, `advantages` and `shard`.

Pure functions: they change nothing that they are given, and the same groups always give the same arrays.

**Which tokens.** A sample is its `prompt_ids` followed by its `response_ids`. A sample without `response_ids` is an
agent trace: its `input_ids`, of which those with a label other than -100 are trained on. Prompts have `loss_mask` 0,
logprob 0 and version -1. Responses have their `response_mask` (1 without one), their `logprobs`, and the model step
of each token (-1 if unknown).

**Alignment.** `logprobs[i]`, `loss_mask[i]`, `versions[i]` and `advantages[i]` belong to the token `input_ids[i]`.
With `shifted=True` they belong to the token that position i predicts, `input_ids[i + 1]`: entry i of a model's output
can be compared with entry i of these columns. The last entry of each sequence then predicts nothing and is masked.

**Padding.** Tokens that belong to no sample have `loss_mask` 0, logprob 0, advantage 0 and version -1.

**Token masks.** A buffer with `token_stale_threshold` writes its mask into `response_mask` when it hands out a group.
Nothing is masked again here. `masked_tokens` counts the response tokens that `response_mask` excludes: too old, or
written by a tool or environment.
"""

from forebay.collate.balance import shard
from forebay.collate.estimators import Advantages, advantages
from forebay.collate.packing import Packed, pack
from forebay.collate.padding import Padded, pad

__all__ = ["Advantages", "Packed", "Padded", "advantages", "pack", "pad", "shard"]
