"""JSON bodies of the training API, as release 0.38 of the `tinker` client sends them. Unknown fields are refused."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from lockstep.errors import UserError

SHORTEST_LIFE, LONGEST_LIFE = 3600, 315_360_000
"""Of a saved state that expires, in seconds: an hour, and ten years."""


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    type: str = ""


class Lora(Strict):
    rank: int = Field(description="a whole number", ge=1)
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerChoice(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: str = "adamw"

    def check(self) -> None:
        """Raises UserError for any optimizer but AdamW."""
        if self.type != "adamw":
            raise UserError(f"the optimizer {self.type[:60]!r} is not supported; leave it out, or choose adamw")


class CreateSession(Strict):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class OfSession(Strict):
    session_id: str


class CreateModel(Strict):
    session_id: str
    model_seq_id: int
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: Lora | None = None
    optimizer_config: OptimizerChoice = OptimizerChoice()


class OfModel(Strict):
    model_id: str


class Numbered(BaseModel):
    """What every request of a model has, whatever else is in it."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model_id: str
    seq_id: int


class AdamParams(BaseModel):
    """`optim_step`'s settings. The defaults are the client's."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    learning_rate: float = Field(default=1e-4, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-12, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    grad_clip_norm: float = Field(default=0.0, description="a number; 0: no clipping")


class OptimStep(Strict):
    model_id: str
    seq_id: int
    adam_params: AdamParams | None = None
    optimizer_params: OptimizerChoice | None = None


class SavedUnder(Strict):
    """What names a state to save."""

    model_id: str
    path: str | None = None
    seq_id: int
    ttl_seconds: int | None = Field(None, ge=SHORTEST_LIFE, le=LONGEST_LIFE, description="from 3600 to ten years")


class SaveWeights(SavedUnder):
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveForSampler(SavedUnder):
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    user_metadata: dict[str, str] | None = None


class SaveExternal(SavedUnder):
    age_encryption_recipients: list[str] | None = None


class LoadWeights(Strict):
    """Into an existing model (`model_id`, `seq_id`), or into a new one of a session."""

    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool = False
    optimizer_config: OptimizerChoice | None = None
    weights_access_token: str | None = None


class CopyWeights(Strict):
    session_id: str | None = None
    model_seq_id: int | None = None
    destination_project_id: str | None = None
    source_path: str
    ttl_seconds: int | None = Field(None, ge=SHORTEST_LIFE, le=LONGEST_LIFE, description="from 3600 to ten years")
    weights_access_token: str | None = None


class OfPath(Strict):
    tinker_path: str


class Life(Strict):
    ttl_seconds: int | None = Field(None, ge=SHORTEST_LIFE, le=LONGEST_LIFE, description="from 3600 to ten years")


class CreateSampler(Strict):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class OfSampler(Strict):
    sampling_session_id: str


class TokenChunk(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: str = "encoded_text"
    tokens: list[int] = []


class Prompt(Strict):
    chunks: list[TokenChunk]

    def token_ids(self) -> list[int]:
        """Raises UserError for anything but text."""
        if other := next((chunk.type for chunk in self.chunks if chunk.type != "encoded_text"), ""):
            raise UserError(f"the prompt contains a chunk of type {other[:60]!r}; this server samples text alone")
        return [token for chunk in self.chunks for token in chunk.tokens]


class Sampling(BaseModel):
    model_config = ConfigDict(extra="forbid")

    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = None
    stop: str | list[str] | list[int] | None = Field(None, description="a text, texts, or tokens")
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class PlainTensor(BaseModel):
    """A tensor in JSON."""

    model_config = ConfigDict(extra="forbid")

    data: list[int]
    dtype: Literal["int64"]
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class Sample(Strict):
    num_samples: int = Field(1, ge=1)
    prompt: Prompt
    sampling_params: Sampling
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(0, ge=0)
    topk_sample_logprobs: int = Field(0, ge=0)
    target_prompt_logprobs: PlainTensor | None = None
    prompt_alt_tokens_k: int = Field(0, ge=0)
    prompt_logprobs_last_n: int | None = Field(None, ge=1)
    record_stability_info: bool | None = None


class LossInput(Strict):
    name: str = Field(pattern=re.compile(r"^[a-z_][a-z0-9_]{0,63}$"))
    rank: Literal[0, 1, 2]


class LossNode(BaseModel):
    model_config = ConfigDict(extra="forbid")

    op: str
    name: str
    target: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class LossGraph(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: Literal[1] = 1
    nodes: list[LossNode] = Field(max_length=256)


class CreateLoss(Strict):
    session_id: str
    custom_loss_seq_id: int
    name: str
    inputs: list[LossInput] = Field(min_length=1, max_length=16)
    graph: LossGraph


class Retrieve(Strict):
    request_id: str
    allow_metadata_only: bool = False


class SamplerTarget(Strict):
    sampling_session_id: str
    cloned_sampler_id: int = 0


class RetrieveMany(Strict):
    target: SamplerTarget
    prev_cursor: int = 0
    timeout: float | None = None
    retrieved_request_ids: list[str] = []


class Cancel(Strict):
    request_id: str


class Finish(Strict):
    reason: dict[str, Any] = {}
    detail: str | None = None
