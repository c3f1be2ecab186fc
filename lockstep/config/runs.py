"""What each command runs: one flat dataclass per run, with nested ones for its parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from lockstep.config.actors import ActorsConfig
from lockstep.config.alarms import AlarmConfig
from lockstep.config.algorithm import ADVANTAGES, LOSSES, AlgorithmName
from lockstep.config.bounds import Above, AtLeast, AtMost, Below, OneOf
from lockstep.config.checkpoint import CheckpointConfig
from lockstep.config.data import DataConfig
from lockstep.config.engine import CompileConfig, EngineConfig, RanksConfig
from lockstep.config.faults import FaultConfig
from lockstep.config.lora import LoraConfig
from lockstep.config.observe import ObserveConfig
from lockstep.config.parallel import ParallelConfig
from lockstep.config.precision import PrecisionConfig
from lockstep.config.recompute import RecomputeConfig
from lockstep.config.rewards import RewardConfig
from lockstep.config.train import Arithmetic, ModelDtype, TrainConfig


@dataclass
class PretrainConfig:
    """A next-token run on text."""

    output: str = "run"
    """Output folder of the run."""
    model: str = "qwen3:tiny"
    """`family:size` for fresh weights (see lockstep.model.PRESETS); or, to start from existing weights, a Hugging Face
    folder, a run's folder, or a model on the Hugging Face hub as ORGANISATION/MODEL or ORGANISATION/MODEL@REVISION.
    FILE.py:NAME: a size or a folder of a family of your own."""
    data: str = ""
    """Text, JSONL, a JSON array or Parquet: a file, a folder or a glob; hf:NAME[:config][:split]; a folder of tokens;
    several as a.jsonl=0.7,b.parquet=0.3. Empty: the source of the Python standard library."""
    template: str = "{text}"
    """How a JSONL line or a row becomes text: keys in braces are replaced by their values."""
    tokenizer: str = "byte"
    """`byte`, `bpe:VOCABULARY` (trained on the data), or a folder with a tokenizer.json."""
    skip_bad_lines: bool = False
    """Count and skip malformed JSONL lines instead of stopping at the first."""
    steps: Annotated[int, AtLeast(0)] = 200
    """Optimizer steps; 0: only write the initial weights, as a checkpoint that other runs can start from."""
    tokens_per_step: Annotated[int, Above(0)] = 8192
    """Tokens per optimizer step, over all ranks and micro-batches: a multiple of sequence_length."""
    sequence_length: Annotated[int, Above(0)] = 256
    """Tokens per row of documents; a micro-batch is as many rows as fit into train.tokens_per_microbatch."""
    dtype: ModelDtype = "auto"
    """Dtype of the weights in the forward pass; the optimizer keeps float32 master weights. auto: the folder's; for
    fresh weights bfloat16 if the device has instructions for it, else float32."""
    arithmetic: Arithmetic = "auto"
    """On a CPU: `portable` gives the same bits on every processor, `bf16_pairs` and `bf16_tiles` are faster in bfloat16
    if the processor supports them; auto: the recorded one in a resumed run, else the fastest on this machine."""
    seed: Annotated[int, AtLeast(0), Below(2**63)] = 0
    """Seed of the initial weights and of the data order."""
    device: str = ""
    """`cpu`, `cuda` or `cuda:1` …; empty: the machine's accelerator if it has one."""
    loader: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    faults: FaultConfig = field(default_factory=FaultConfig)
    validation_data: str = ""
    """Data to measure the validation loss on, in the forms of `data`; empty: none."""
    validation_share: Annotated[float, AtLeast(0), Below(1)] = 0.0
    """In place of validation_data: hold out this share of the documents of `data`, always the same ones."""
    validation_every: Annotated[int, Above(0)] = 100
    """Steps between validations; there is always one after the last step."""
    validation_tokens: Annotated[int, Above(0)] = 65536
    """Tokens per validation: the first of the validation data, in the same order every time."""
    resume: bool = False
    """Continue the run in `output` from its newest complete checkpoint; if there is no run yet, start one."""
    overwrite: bool = False
    """Delete an existing run in `output`."""
    dry_run: Annotated[int, AtLeast(0)] = 0
    """Only print the memory and messages of a rank in a run on this many ranks; runs in one process without allocating
    the memory."""


@dataclass
class SFTConfig(PretrainConfig):
    """Fine-tuning on conversations: like a pretraining run, with the loss on the assistant's tokens only."""

    model: str = ""
    """Model to start from: a Hugging Face folder, a run's folder, or ORGANISATION/MODEL[@REVISION] of the hub."""
    data: str = ""
    """JSONL, JSON, Parquet or hf:…, with `messages`, or `prompt` and `completion`; several as
    a.jsonl=0.7,b.jsonl=0.3."""
    template: str = ""
    """Chat template file (jinja) to use instead of the model's own; `chatml`: ChatML, whose special tokens are added to
    tokenizer and model if they are missing."""
    turns: Literal["apart", "whole"] = "apart"
    """`apart`: an answer that the template renders differently once other messages follow (Qwen3's drops its
    reasoning) is a separate sequence, as it was sampled; `whole`: one sequence per conversation, as rendered."""
    chat_template_kwargs: str = ""
    """Values for the chat template, a JSON object such as '{"enable_thinking": false}'; a row's override them."""
    tokenizer: str = ""
    """Folder to take the tokenizer, the chat template and the end-of-text token from, instead of the model's."""
    steps: Annotated[int, AtLeast(0)] = 0
    """Optimizer steps; 0: as many as `epochs` take."""
    epochs: Annotated[float, Above(0)] = 1.0
    """Passes over the data, if `steps` is 0."""
    sequence_length: Annotated[int, Above(0)] = 1024
    """Tokens per row of conversations; only longer conversations are cut."""
    loader: DataConfig = field(default_factory=lambda: DataConfig(packing="whole"))
    train: TrainConfig = field(default_factory=lambda: TrainConfig(learning_rate=2e-5))


@dataclass
class RLConfig:
    """A reinforcement run: sample groups of completions, reward them, move the policy towards the better ones."""

    output: str = "run"
    """Output folder of the run."""
    model: str = ""
    """The model to start from: a Hugging Face folder, a run's folder, or ORGANISATION/MODEL[@REVISION] of the
    hub."""
    environment: str = ""
    """What to learn: `code`, `digit_sum`, `gsm8k`, `math` or `prompts`; `gymnasium:ID` or `verifiers:TASKSET`; or
    `FILE.py:Class` for your own task."""
    data: str = ""
    """The environment's data. code, gsm8k, math, prompts: a folder with train.jsonl and validation.jsonl (or
    test.jsonl; .json and .parquet too), one such file, or hf:NAME[:config][:split]; verifiers: a .toml file."""
    skip_bad_lines: bool = False
    """Count and skip malformed JSONL lines instead of stopping at the first."""
    steps: Annotated[int, Above(0)] = 100
    """Reinforcement steps."""
    prompts_per_step: Annotated[int, Above(0)] = 16
    """Prompts per step."""
    oversampling_factor: Annotated[float, AtLeast(1), AtMost(16)] = 1.0
    """Prompts sampled for each prompt that a step trains on. It trains on those whose longest completion is shortest;
    the others (stragglers) are aborted as soon as that is known, and dropped. 1: no oversampling."""
    samples_per_prompt: Annotated[int, AtLeast(2)] = 8
    """Completions per prompt, at least 2: the group that advantages are relative to."""
    max_new_tokens: Annotated[int, Above(0)] = 32
    """Completions are truncated after this many tokens."""
    mask_truncated_completions: bool = False
    """Learn nothing from completions that reach max_new_tokens, or conversations whose last reply does. Their rewards
    still count for the others of their group."""
    chat: Literal["auto", "always", "never"] = "auto"
    """Whether to render prompts and conversations with the model's chat template. auto: if it has one, except prompts
    that contain a special token, which count as already rendered; never: the model reads them as they are."""
    chat_template_kwargs: str = ""
    """Values for the chat template, a JSON object such as '{"enable_thinking": false}'; an example's override them."""
    temperature: Annotated[float, AtLeast(0.01), AtMost(100)] = 1.0
    """Sampling temperature; log-probabilities on both sides are computed at it."""
    top_k: Annotated[int, AtLeast(0)] = 0
    """Sample from the k likeliest tokens only; 0: off."""
    top_p: Annotated[float, Above(0), AtMost(1)] = 1.0
    """Sample from the smallest set of tokens with this probability; 1: off."""
    min_p: Annotated[float, AtLeast(0), Below(1)] = 0.0
    """Sample from tokens at least this likely relative to the likeliest; 0: off."""
    algorithm: AlgorithmName = "grpo"
    """Predefined values of the settings from `advantage` to `overlong_share`, each of which can be overridden;
    docs/algorithms.md describes each algorithm."""
    advantage: Annotated[str, OneOf(("", *ADVANTAGES))] = ""
    """What a completion's reward is compared with; empty: the algorithm's. `group`: the mean of its group,
    `leave_one_out`: the mean of the others in its group, `batch`: the mean over the step's tokens, `group_batch`: the
    mean of its group, then as `batch`. `best`: 1 for the best of a group, else 0. `teacher`: per token, by the teacher.
    `gae`: per token, by a value function that is trained with the policy. Or FILE.py:NAME, a function of your own
    (docs/rl.md)."""
    normalize_advantages: bool | None = None
    """Divide advantages by the (population) standard deviation of the group's rewards, or of the step's tokens for
    `batch`, `group_batch` and `gae`, whose mean is subtracted as well; None: the algorithm's."""
    loss: Annotated[str, OneOf(("", *LOSSES))] = ""
    """Policy loss; empty: the algorithm's. `clip`: clip the importance ratio per token; `clip_sequence`: per
    completion (GSPO); `clip_weight`: weight the log-probability by the clipped ratio (CISPO); `reinforce`:
    the log-probability times the advantage, without a ratio. Or FILE.py:NAME, a function of your own
    (docs/rl.md)."""
    loss_average: Literal["", "token", "sequence", "budget"] = ""
    """Average the loss over all tokens, or over each completion first; `budget`: divide the sum of each completion or
    conversation by max_new_tokens, whatever its length or number of turns. Empty: the algorithm's."""
    clip_low: Annotated[float | None, AtLeast(0), AtMost(1)] = None
    """The importance ratio is clipped below at 1 - clip_low; 1: not at all; None: the algorithm's."""
    clip_high: Annotated[float | None, AtLeast(0)] = None
    """The importance ratio is clipped above at 1 + clip_high; None: the algorithm's."""
    kl_in: Literal["", "loss", "reward"] = ""
    """Where the KL penalty applies: in the loss, or subtracted from the reward, per token for the advantages `batch`
    and `gae`, and per completion for the others; empty: the algorithm's."""
    kl_estimator: Literal["", "k1", "k2", "k3"] = ""
    """Estimator of the KL divergence from one sampled token, d = log p - log p_reference: k1 = d, k2 = d²/2,
    k3 = exp(-d) + d - 1; empty: the algorithm's."""
    extra_rounds: Annotated[int | None, AtLeast(0)] = None
    """Dynamic sampling: groups whose completions all have the same reward are replaced by others, drawn in at most this
    many extra rounds; 0: such groups stay; None: the algorithm's."""
    overlong_share: Annotated[float | None, AtLeast(0), AtMost(1)] = None
    """Length penalty: over this last share of max_new_tokens the reward falls by up to 1; None: the algorithm's."""
    gae_gamma: Annotated[float | None, AtLeast(0), AtMost(1)] = None
    """Advantage `gae`: discount factor per token; None: the algorithm's."""
    gae_lambda: Annotated[float | None, AtLeast(0), AtMost(1)] = None
    """Advantage `gae`: 1 uses the rewards up to the end (no bias), 0 the next token's value (low variance); None: the
    algorithm's."""
    value_coefficient: Annotated[float | None, AtLeast(0)] = None
    """Weight of the value loss relative to the policy loss; None: the algorithm's."""
    value_clip: Annotated[float | None, AtLeast(0)] = None
    """Clip the value loss where a value is further than this from its value before the step; 0: no clipping; None: the
    algorithm's."""
    value_learning_rate: Annotated[float, AtLeast(0)] = 10.0
    """Learning rate of the value head, which starts at zero, as a multiple of the schedule's."""
    value_detached: bool = False
    """Train only the value head with the value loss, without a gradient through the model."""
    kl_coefficient: Annotated[float, AtLeast(0)] = 0.0
    """Weight of the KL divergence to the reference model; 0: no reference model."""
    kl_reference: str = "start"
    """`start`: the weights that the run began with; `average`: a moving average of the policy's weights; or the
    folder of a model with the same vocabulary."""
    kl_average_decay: Annotated[float, AtLeast(0), Below(1)] = 0.99
    """`kl_reference = "average"`: the share of the average that each step keeps."""
    teacher: str = ""
    """Folder of the model to distill from, with the same vocabulary (algorithm distillation)."""
    reward_model: str = ""
    """Folder of a model that scores completions, from `lockstep reward-model`; adds a reward named reward_model."""
    reward_model_weight: Annotated[float, AtLeast(0)] = 1.0
    """Weight of its score in the total reward."""
    entropy_coefficient: Annotated[float, AtLeast(0)] = 0.0
    """Weight of the policy's entropy, in nats, which is subtracted from the loss."""
    off_policy: Literal["", "none", "truncate", "mask"] = ""
    """Correction for completions from older weights, another engine or truncated sampling, by the ratio p / p_sampler:
    p from the weights before the step, p_sampler after top_k, top_p and min_p. `truncate`: cap the ratio at
    off_policy_high; `mask`: leave out tokens outside the bounds; `none`: use the sampler's log-probabilities before
    top_k, top_p and min_p as the policy's. Empty: none, but truncate if vLLM samples (actors.urls)."""
    off_policy_level: Literal["token", "sequence"] = "token"
    """Ratio per token, or per completion (the product over its tokens)."""
    off_policy_low: Annotated[float, AtLeast(0), AtMost(1)] = 0.5
    """mask: smallest ratio that counts."""
    off_policy_high: Annotated[float, AtLeast(1)] = 2.0
    """truncate: largest factor; mask: largest ratio that counts."""
    router_replay: bool = False
    """Mixtures of experts: train with the experts that the generator chose for each sampled token, with the trainer's
    router weights. For samples from an engine with different bits that records its routes; with equal bits it
    changes nothing."""
    updates_per_batch: Annotated[int, Above(0)] = 1
    """Optimizer steps per batch of rollouts; from the second on, the ratio leaves 1 and clipping takes effect."""
    on_parity_error: Literal["stop", "warn", "measure"] = "stop"
    """What to do when a token's log-probability differs between generator and trainer. measure: only log the
    difference as a metric, as for vLLM (actors.urls), whose log-probabilities always differ."""
    dtype: ModelDtype = "auto"
    """Dtype of the weights in the forward pass; the optimizer keeps float32 master weights. auto: the folder's."""
    arithmetic: Arithmetic = "auto"
    """On a CPU: `portable` gives the same bits on every processor, `bf16_pairs` and `bf16_tiles` are faster in bfloat16
    if the processor supports them; auto: the recorded one in a resumed run, else the fastest on this machine."""
    seed: Annotated[int, AtLeast(0), Below(2**63)] = 0
    """Seed of the order of prompts and of every draw."""
    device: str = ""
    """`cpu`, `cuda` or `cuda:1` …, for trainer and generator; empty: the machine's accelerator if it has one."""
    train: TrainConfig = field(default_factory=lambda: TrainConfig(learning_rate=1e-5, schedule="constant"))
    lora: LoraConfig = field(default_factory=LoraConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    rewards: RewardConfig = field(default_factory=RewardConfig)
    actors: ActorsConfig = field(default_factory=ActorsConfig)
    validation_every: Annotated[int, AtLeast(0)] = 0
    """Steps between validations; 0: only before the first and after the last step."""
    validation_examples: Annotated[int, AtLeast(0)] = 256
    """Held-out examples per validation; 0: no validation, and the environment needs no examples for it."""
    validation_samples: Annotated[int, Above(0)] = 1
    """Completions per example."""
    validation_temperature: Annotated[float | None, AtLeast(0), AtMost(100)] = None
    """Sampling temperature of validations; 0: greedy; None: that of training."""
    validation_seed: Annotated[int | None, AtLeast(0), Below(2**63)] = None
    """Seed of the draws in validations, the same each time; None: the run's."""
    alarms: AlarmConfig = field(default_factory=AlarmConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    faults: FaultConfig = field(default_factory=FaultConfig)
    resume: bool = False
    """Continue the run in `output` from its newest complete checkpoint; if there is no run yet, start one."""
    overwrite: bool = False
    """Delete an existing run in `output`."""
    dry_run: Annotated[int, AtLeast(0)] = 0
    """Only print the memory of a rank and the bytes of a weight sync in a run on this many ranks; runs in one process
    without allocating the memory. `model` can be `family:size`."""


@dataclass
class ServeConfig:
    """An HTTP server over the engine, with OpenAI's routes."""

    model: str
    """Hugging Face folder, a run's folder (its newest checkpoint), or ORGANISATION/MODEL[@REVISION] of the hub."""
    host: str = "127.0.0.1"
    """Address to listen on; any but a loopback address needs an API key."""
    port: Annotated[int, AtLeast(0), AtMost(65535)] = 8000
    """Port to listen on; 0: any free one."""
    model_name: str = ""
    """Name that requests use for the model; empty: the folder's name."""
    generation_config: Literal["auto", "vllm"] = "auto"
    """Sampling parameters of requests that give none. auto: those in the model's generation_config.json; vllm: the
    same for every model (temperature 1, no cut, no penalty)."""
    lora_modules: tuple[str, ...] = ()
    """Adapters of the model, NAME=FOLDER each: requests name one as their model."""
    lora_folder: str = ""
    """Folder whose adapters can be loaded while the server runs, with the admin key; empty: none can."""
    max_loras: Annotated[int, AtLeast(0)] = 16
    """Maximum number of adapters loaded at a time."""
    dtype: Annotated[str, "dtype"] = "auto"
    """`bfloat16` or `float32`; auto or empty: as in the files."""
    arithmetic: Arithmetic = "auto"
    """On a CPU: `portable`, `bf16_pairs` or `bf16_tiles`; auto: the one that the model was trained in, if known, else
    the fastest."""
    device: str = ""
    """`cpu`, `cuda` or `cuda:1` …; empty: the machine's accelerator if it has one."""
    api_key: str = ""
    """Key that the /v1 routes require; empty: the environment variable LOCKSTEP_API_KEY; if that is empty too, none."""
    admin_key: str = ""
    """Key of the /admin routes; empty: the environment variable LOCKSTEP_ADMIN_KEY. Without either, there are none."""
    max_body_bytes: Annotated[int, Above(0)] = 2 * 2**20
    """Maximum size of a request's body in bytes."""
    max_prompt_tokens: Annotated[int, AtLeast(0)] = 0
    """Maximum number of tokens in a prompt; 0: the model's context."""
    max_n: Annotated[int, Above(0)] = 128
    """Maximum number of samples per prompt (`n`)."""
    max_requests: Annotated[int, Above(0)] = 512
    """Maximum number of concurrent requests; further ones get 429."""
    max_waiting: Annotated[int, AtLeast(0)] = 1024
    """Maximum number of sequences waiting for one of the engine's max_sequences; requests that exceed it get 429."""
    max_connections: Annotated[int, Above(0)] = 2048
    """Maximum number of open connections; further ones are closed at once."""
    client_seconds: Annotated[float, AtLeast(0)] = 60.0
    """Seconds that a client has to send a request, and to read the response; then its connection is closed. 0: no
    limit."""
    request_seconds: Annotated[float, AtLeast(0)] = 0.0
    """Time limit of a request in seconds, including reading it; 0: none."""
    shutdown_seconds: Annotated[float, AtLeast(0)] = 20.0
    """Seconds that running requests have after SIGTERM or SIGINT before they are aborted; torchrun kills its ranks
    after 30 seconds unless given another `--shutdown-timeout`."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    parallel: RanksConfig = field(default_factory=RanksConfig)
