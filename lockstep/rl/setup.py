"""What a reinforcement run does before its first step and after its last."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from lockstep.config import RLConfig, algorithm_of
from lockstep.config.bounds import function_in_file
from lockstep.data import Tokenizer, load_tokenizer, name_ends, with_ends
from lockstep.data.chat import load_chat_template
from lockstep.hub import local_folder
from lockstep.model import Decoder, TrainableModel, arithmetic_of, resolve_dtype
from lockstep.observe import RunFolder, announce, in_short, log, read_metrics, start_line
from lockstep.parallel import World
from lockstep.rl.conversations.rendering import Rendering, open_rendering
from lockstep.rl.environments.loading import GIVEN, check_environment, given_name, load_environment
from lockstep.rl.environments.protocol import Environment, Example
from lockstep.rl.generators.open import open_policy
from lockstep.rl.generators.protocol import Generators
from lockstep.rl.generators.refusals import refuse_on_ranks
from lockstep.rl.own_functions import OwnFunctions, load_own_functions
from lockstep.rl.rollouts.metrics import summarize
from lockstep.rl.rollouts.prompt_balance import prompt_balance
from lockstep.rl.rollouts.prompts import PromptLoader, examples_of, refuse_other_examples
from lockstep.rl.scoring.forward import ForwardPasses, Scorer
from lockstep.rl.scoring.reference import LogProbScorer, load_reference, load_teacher, reference_is_base
from lockstep.rl.scoring.reward_model import RewardModel, RewardModelScorer, load_reward_model
from lockstep.rl.scoring.value_head import ValueHead, ValueScorer, make_value_head


@dataclass(frozen=True)
class RunParts:
    """What a reinforcement run is made of, besides its settings."""

    environment: Environment
    is_given: bool
    """Whether `environment` is the caller's object, which worker processes cannot load."""
    prompts: PromptLoader
    held_out: list[Example]
    policy: TrainableModel
    tokenizer: Tokenizer
    rendering: Rendering
    reference: Decoder | None
    """The reference of the KL divergence, if it is a model besides the policy's."""
    teacher: Decoder | None
    reward_model: RewardModel | None
    value_head: ValueHead | None
    functions: OwnFunctions
    """The user's loss and advantages, if the settings name any."""


def load_parts(config: RLConfig, environment: Environment, is_given: bool, world: World) -> RunParts:
    """Loads examples and models. Raises UserError if they, or the ranks, are unsuitable."""
    functions = load_own_functions(config, world)
    prompts, held_out = open_examples(config, environment, world)
    policy = open_policy(config, world)
    tokenizer = load_tokenizer(config.model, policy.config.vocab_size)
    policy.config = with_ends(policy.config, tokenizer, load_chat_template(local_folder(config.model)))
    reference = load_reference(config, world, tokenizer)
    teacher = load_teacher(config, world, tokenizer)
    reward_model = load_reward_model(config, environment, world.device)
    rendering = open_rendering(config.model, config.chat, config.chat_template_kwargs, environment, tokenizer, policy)
    value_head = make_value_head(config, policy, world)
    return RunParts(
        environment, is_given, prompts, held_out, policy, tokenizer, rendering, reference, teacher, reward_model,
        value_head, functions,
    )  # fmt: skip


def scorers(config: RLConfig, parts: RunParts, generators: Generators, forward: ForwardPasses) -> list[Scorer]:
    """What scores a step's rollouts before their advantages."""
    scorers: list[Scorer] = []
    if reference_is_base(config):
        assert isinstance(generators.policy, Decoder)
        scorers.append(
            LogProbScorer(generators.policy, config.temperature, forward, "reference_logprobs", is_base=True)
        )
    if parts.reference:
        scorers.append(LogProbScorer(parts.reference, config.temperature, forward, "reference_logprobs"))
    if parts.teacher:
        scorers.append(LogProbScorer(parts.teacher, config.temperature, forward, "teacher_logprobs"))
    if parts.value_head:
        scorers.append(ValueScorer(generators.policy, parts.value_head, forward))
    return scorers


def reward_scorer(config: RLConfig, parts: RunParts, forward: ForwardPasses) -> RewardModelScorer | None:
    """What adds the reward model's scores to the rewards of rollouts; None without a reward model."""
    if parts.reward_model is None:
        return None
    return RewardModelScorer(parts.reward_model, parts.rendering, config.reward_model_weight, forward)


def named_environment(config: RLConfig, environment: Environment | None) -> tuple[RLConfig, Environment]:
    """The environment that is given, with its name recorded in the settings, or else the one that the settings name."""
    if environment is None:
        return config, load_environment(config.environment, config.data, config.skip_bad_lines)
    check_environment(environment)
    return replace(config, environment=given_name(environment)), environment


def open_examples(config: RLConfig, environment: Environment, world: World) -> tuple[PromptLoader, list[Example]]:
    """The prompts to train on, and those for validation. Raises UserError if they, or the ranks, are unsuitable."""
    prompts = PromptLoader(examples_of(environment, "train"), config.seed)
    wanted = config.validation_examples
    held_out = examples_of(environment, "validation")[:wanted] if wanted else []
    refuse_on_ranks(config, world)
    for split, examples in (("train", prompts.examples), ("validation", held_out)):
        refuse_other_examples(split, examples, world)
    if (shared := prompts.shared(held_out)) and world.is_main:
        log.warning(
            "%d of %d validation examples are also trained on, so results on them say nothing about other prompts; let "
            "examples(split) yield different examples for each split",
            shared,
            len(held_out),
        )
    return prompts, held_out


def announce_start(
    config: RLConfig,
    environment: Environment,
    model: TrainableModel,
    tokenizer: Tokenizer,
    world: World,
    start: int,
) -> None:
    """Announces what the run will do, and with what."""
    samples = max(config.steps - start, 0) * config.prompts_per_step * config.samples_per_prompt
    work = f"{type(environment).__name__}, {in_short(samples)} samples to go, of up to {config.max_new_tokens} tokens"
    compute = resolve_dtype(config.dtype)
    ends = name_ends(model.config.eos_token_ids, tokenizer)
    announce("rl: " + start_line(config.model, model.config, world.device, compute, work, world.size, ends))
    if world.device.type == "cuda" and (count := torch.cuda.device_count()) > world.size:
        announce(f"rl uses {world.size} of {count} GPUs; torchrun --nproc-per-node {count} -m lockstep rl … uses all")


def learns_from_spread_alone(config: RLConfig) -> bool:
    """Whether groups of equal rewards are known to teach nothing."""
    algorithm = algorithm_of(config)
    others = max(algorithm.kl_coefficient, algorithm.entropy_coefficient) > 0
    names_function = function_in_file(algorithm.loss) or function_in_file(algorithm.advantage)
    return algorithm.advantage not in ("teacher", "gae") and not others and not names_function


def title_of(config: RLConfig) -> str:
    """Title of the run's report."""
    return f"{config.algorithm} on {config.environment.removeprefix(GIVEN)}"


def summary_of(config: RLConfig, run: RunFolder, world: World, shared: int) -> dict[str, Any]:
    """The summary of a finished run. shared: validation examples that are also trained on."""
    summary = summarize(read_metrics(run.metrics), config.updates_per_batch) | {
        "arithmetic": arithmetic_of(world.device),
        "validation_also_trained": shared,
    }
    if balance := prompt_balance(run.path):
        summary["prompts"] = asdict(balance)
        if balance.repeated or balance.lost:
            log.warning("%s; this is a bug in Lockstep", balance.text())
    return summary
