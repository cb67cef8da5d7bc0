"""A tiny random language model in a directory that both engines and Hugging Face load, and versions of its weights.

The model is a Qwen2 with two layers and float32 weights; the tokenizer has one token for each byte. Everything follows
from a seed. Model step 0 is what servers start with; every later step has noise added to each of its parameters, enough
for its logprobs to differ clearly from those of all other steps.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

__all__ = ["VOCABULARY", "make_versions", "without_tensors"]

VOCABULARY = 272  # more rows than the tokenizer uses, as in real models; no multiple of 64, so that engines pad it
_END, _PAD = 256, 257
_NOISE = 0.03


def make_versions(directory: Path, updates: int) -> list[Path]:
    """One directory for each model step from 0 to `updates`, at its index."""
    # With this seed the two best tokens of greedy answers are never nearly equal, so rounding does not decide between
    # them.
    torch.manual_seed(15)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            initializer_range=0.1,  # with much smaller weights greedy answers repeat one token
            bos_token_id=None,
            eos_token_id=_END,
            pad_token_id=_PAD,
        )
    ).to(torch.float32)
    model.generation_config = GenerationConfig(do_sample=True, eos_token_id=_END, pad_token_id=_PAD)
    tokenizer = _tokenizer()
    start = [parameter.detach().clone() for parameter in model.parameters()]
    versions = [directory / f"step-{step}" for step in range(updates + 1)]
    for step, version in enumerate(versions):
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), start, strict=True):
                parameter.copy_(value + _NOISE * torch.randn_like(value) if step else value)
        model.save_pretrained(version)
        tokenizer.save_pretrained(version)
    return versions


def without_tensors(version: Path, directory: Path, is_left_out: Callable[[str], bool]) -> Path:
    """A copy of a version whose file lacks some tensors, as an upload that was cut off would leave it."""
    shutil.copytree(version, directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    kept = {name: tensor for name, tensor in tensors.items() if not is_left_out(name)}
    assert 0 < len(kept) < len(tensors), f"{len(kept)} of {len(tensors)} tensors are left"
    save_file(kept, file, metadata={"format": "pt"})
    return directory


def _tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>", "<pad>"])
    assert (tokenizer.token_to_id("<end>"), tokenizer.token_to_id("<pad>")) == (_END, _PAD)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>", model_max_length=2048
    )
