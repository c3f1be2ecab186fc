"""What `lockstep eval` measures, and how it samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from lockstep.config.bounds import Above, AtLeast, AtMost, Below
from lockstep.config.engine import CompileConfig, EngineConfig
from lockstep.config.precision import PrecisionConfig
from lockstep.config.rewards import RewardConfig
from lockstep.config.train import Arithmetic


@dataclass
class EvalConfig:
    """Grade a model's answers to held-out examples, or compare several models on the same ones."""

    model: tuple[str, ...] = ()
    """Models, each a Hugging Face folder, a run's folder (its newest checkpoint), or ORGANISATION/MODEL[@REVISION] of
    the hub. Those after the first are compared with it."""
    environment: str = ""
    """As for `rl`: a built-in environment, `gymnasium:ID`, `verifiers:TASKSET`, or `FILE.py:Class`."""
    data: str = ""
    """The environment's data, as for `rl`."""
    skip_bad_lines: bool = False
    """Count and skip malformed JSONL lines instead of stopping at the first."""
    split: Literal["validation", "train"] = "validation"
    """Examples to use: held-out ones, or those that runs train on."""
    examples: Annotated[int, AtLeast(0)] = 0
    """Number of examples, from the beginning; 0: all."""
    samples_per_prompt: Annotated[int, Above(0)] = 1
    """Completions per prompt."""
    pass_at: tuple[int, ...] = ()
    """Values of k for pass@k, at most samples_per_prompt; empty: 1, 2, 4 … and samples_per_prompt."""
    reward_model: str = ""
    """Folder of a model that scores completions, as for `rl`."""
    reward_model_weight: Annotated[float, AtLeast(0)] = 1.0
    """Weight of its score in the total reward."""
    max_new_tokens: Annotated[int, Above(0)] = 32
    """Completions are truncated after this many tokens."""
    chat: Literal["auto", "always", "never"] = "auto"
    """Whether prompts are rendered by the model's chat template, as for `rl`."""
    chat_template_kwargs: str = ""
    """Values for the chat template, as for `rl`."""
    temperature: Annotated[float, AtLeast(0), AtMost(100)] = 1.0
    """Sampling temperature; 0: greedy, the likeliest token each time."""
    top_k: Annotated[int, AtLeast(0)] = 0
    """Sample from the k likeliest tokens only; 0: off."""
    top_p: Annotated[float, Above(0), AtMost(1)] = 1.0
    """Sample from the smallest set of tokens with this probability; 1: off."""
    min_p: Annotated[float, AtLeast(0), Below(1)] = 0.0
    """Sample from tokens at least this likely relative to the likeliest; 0: off."""
    seed: Annotated[int, AtLeast(0), Below(2**63)] = 0
    """Seed of the draws, which are the same for every model, and the same as in a run's validation with this seed."""
    output: str = "eval"
    """Folder to write: eval.json, and each model's completions."""
    overwrite: bool = False
    """Replace the evaluation that is already in `output`."""
    dtype: Annotated[str, "dtype"] = "auto"
    """`bfloat16` or `float32`; auto: as in the files."""
    arithmetic: Arithmetic = "auto"
    """On a CPU: `portable`, `bf16_pairs` or `bf16_tiles`; auto: the one that the model was trained in, if known, else
    the fastest."""
    device: str = ""
    """`cpu`, `cuda` or `cuda:1` …; empty: the machine's accelerator if it has one."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    rewards: RewardConfig = field(default_factory=RewardConfig)

    def problems(self) -> Iterator[str]:
        """A message for each combination that cannot work, beyond the fields' bounds."""
        if not self.model:
            yield "model is empty; give one or more with --model DIR"
        if len(set(self.model)) < len(self.model):
            yield f"model lists one twice ({', '.join(self.model)}); give each once"
        yield from greedy_problems("temperature", self.temperature, "samples_per_prompt", self.samples_per_prompt)
        for k in self.pass_at:
            if k < 1:
                yield f"pass_at is {k}; give numbers from 1 to samples_per_prompt"
            elif k > self.samples_per_prompt:
                yield f"pass_at {k} needs at least {k} samples_per_prompt, not {self.samples_per_prompt}"


def greedy_problems(name: str, temperature: float | None, samples_name: str, samples: int) -> Iterator[str]:
    """A message if several samples are drawn at temperature 0, where all are the same."""
    if temperature == 0 and samples > 1:
        yield (
            f"{name} 0 takes the likeliest token each time, so {samples_name} {samples} would all be the same; set "
            f"{samples_name} = 1, or a higher {name}"
        )
