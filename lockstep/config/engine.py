"""How the generator runs, and how the model is compiled for both sides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from lockstep.config.bounds import Above, AtLeast


@dataclass
class EngineConfig:
    """How the generator uses memory and batches its work."""

    max_tokens_per_step: Annotated[int, Above(0)] = 2048
    """Token budget of one forward pass; longer prompts are computed in chunks."""
    max_sequences: Annotated[int, Above(0)] = 256
    """Sequences that run at the same time."""
    cache_tokens: Annotated[int, Above(0)] = 65536
    """Capacity of the key-value cache in tokens; when it runs out, the newest sequences are preempted. On a CPU memory
    is taken as it is used."""
    prefix_cache: bool = True
    """Share full cache pages between sequences with a common prefix (such as the n samples of a prompt)."""
    cuda_graphs: Literal["none", "piecewise", "full", "full_and_piecewise"] = "none"
    """Record the generator's launches and replay them: decode steps whole, or small steps between attentions."""
    draft: Literal["auto", "none", "ngram", "layers", "model"] = "auto"
    """Source of draft tokens for speculative decoding; results have the same bits with any of them.
    `ngram`: what followed the last tokens before; `auto`: that, and in `rl` earlier completions of the same prompt;
    `layers` and `model`: as the two settings below say."""
    draft_tokens: Annotated[int, Above(0)] = 15
    """Tokens guessed at once for a sequence at most. How many it is goes by what was accepted lately."""
    draft_layers: Annotated[int, AtLeast(0)] = 0
    """With draft `layers`: as many of the model's own first layers guess."""
    draft_model: str = ""
    """With draft `model`: folder of a smaller model with the same tokenizer."""


@dataclass
class RanksConfig:
    """The ranks that a model which generates is spread over."""

    tensor: int = 1
    """Ranks that share each layer's matrices and the vocabulary: 1, 2, 4 or 8, started with torchrun."""
    reduction_chunks: Annotated[int, AtLeast(0)] = 0
    """Parts that their sums are made of, a power of two: another tensor degree has the same bits with as many. 0:
    `tensor`, or what the model was trained with if that is more."""


@dataclass
class CompileConfig:
    """How the model is compiled, for trainer and generator alike."""

    backend: Literal["none", "inductor"] = "none"
    """`inductor` compiles each block's two halves once for all layers; the artifacts are kept in the cache folder."""
