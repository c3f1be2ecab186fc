"""How the generator runs, and how the model is compiled for both sides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from lockstep.config.bounds import Above, AtLeast

Graphs = Literal["auto", "none", "full"]


@dataclass
class EngineConfig:
    """How the generator uses memory and batches its work."""

    max_tokens_per_step: Annotated[int, Above(0)] = 2048
    """Token budget per forward pass; longer prompts are prefilled in chunks."""
    max_sequences: Annotated[int, Above(0)] = 256
    """Maximum number of concurrent sequences."""
    cache_tokens: Annotated[int, Above(0)] = 65536
    """Capacity of the KV cache in tokens; when it runs out, the newest sequences are preempted. On a CPU, memory is
    allocated as it is used."""
    prefix_cache: bool = True
    """Share full cache pages between sequences with a common prefix, and compute equal prompts that come one after the
    other once (such as the n samples of a prompt)."""
    cuda_graphs: Graphs = "auto"
    """CUDA graphs for the generator: `full` captures decode steps. `auto`: `full` on one GPU, unless the model has
    latent attention; else `none`."""
    draft: Literal["auto", "none", "ngram", "model"] = "auto"
    """Source of draft tokens for speculative decoding; results have the same bits with any of them.
    `ngram`: what followed the last tokens earlier; `auto`: that, and in `rl` earlier completions of the same prompt;
    `model`: see draft_model."""
    draft_tokens: Annotated[int, Above(0)] = 15
    """Maximum number of draft tokens per sequence and step; the actual number follows recent acceptance."""
    draft_model: str = ""
    """With draft `model`: folder of a smaller model with the same tokenizer."""


@dataclass
class RanksConfig:
    """The ranks that a generating model is sharded over."""

    tensor: int = 1
    """Ranks that share each layer's matrices and the vocabulary: 1, 2, 4 or 8, started with torchrun."""
    reduction_chunks: Annotated[int, AtLeast(0)] = 0
    """Number of parts that sums over these ranks are made of, a power of two: other tensor degrees have the same bits
    with the same number. 0: `tensor`, or the number that the model was trained with if that is larger."""


@dataclass
class CompileConfig:
    """How the model is compiled, for trainer and generator alike."""

    backend: Literal["none", "inductor"] = "none"
    """`inductor` compiles each block's two halves once for all layers; the artifacts are cached in the cache folder."""
