"""What a reinforcement run does before its first step and after its last."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import Any

import torch

from lockstep.checkpoint.checkpoints import Checkpoints
from lockstep.config import RLConfig, algorithm_of, to_toml
from lockstep.data import Tokenizer, name_ends
from lockstep.model import TrainableModel, arithmetic_of, resolve_dtype
from lockstep.observe import RunFolder, announce, in_short, log, merge_timelines, read_metrics, start_line, write_report
from lockstep.parallel import World
from lockstep.rl.environments.loading import GIVEN, check_environment, given_name, load_environment
from lockstep.rl.environments.protocol import Environment, Example
from lockstep.rl.generators.colocated import Generators
from lockstep.rl.generators.models import refuse_on_ranks
from lockstep.rl.rollouts.metrics import summarize
from lockstep.rl.rollouts.prompt_balance import prompt_balance
from lockstep.rl.rollouts.prompts import PromptLoader, examples_of, refuse_other_examples
from lockstep.rl.scoring.value_head import ValueHead, refuse_run_without_values
from lockstep.train.resolve_defaults import refuse_fewer_steps


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


def resumed_state(
    config: RLConfig,
    world: World,
    run: RunFolder,
    checkpoints: Checkpoints,
    prompts: PromptLoader,
    critic: ValueHead | None,
) -> dict[str, Any]:
    """The state of the newest checkpoint if the run resumes from one, else that of step 0; restores `prompts`.

    What the run's folder has from later steps is removed.
    """
    state: dict[str, Any] | None = None
    if config.resume and critic:
        refuse_run_without_values(run.path, config)
    if config.resume:
        state = checkpoints.resume(lambda state: prompts.restore(state["prompts"]))
        refuse_fewer_steps(config, state["step"] if state else 0)
    if config.resume and world.is_main:
        # Without a checkpoint the validation before the first step is repeated, too.
        run.truncate((state["step"] if state else 0) or -1)
        run.record(to_toml(config))
    return state or {"step": 0}


def announce_start(
    config: RLConfig,
    environment: Environment,
    model: TrainableModel,
    tokenizer: Tokenizer,
    world: World,
    start: int,
    ended: bool = False,
) -> None:
    """Announces what the run will do, and with what. ended: there is nothing left to do."""
    samples = max(config.steps - start, 0) * config.prompts_per_step * config.samples_per_prompt
    work = f"{type(environment).__name__}, {in_short(samples)} samples to go, of up to {config.max_new_tokens} tokens"
    compute = resolve_dtype(config.dtype)
    ends = name_ends(model.config.eos_token_ids, tokenizer)
    announce("rl: " + start_line(config.model, model.config, world.device, compute, work, world.size, ends))
    if world.device.type == "cuda" and (count := torch.cuda.device_count()) > world.size:
        announce(f"rl uses {world.size} of {count} GPUs; torchrun --nproc-per-node {count} -m lockstep rl … uses all")
    if start and ended:
        log.warning("the run has finished at step %d; give more --steps to continue", start)


def learns_from_spread_alone(config: RLConfig) -> bool:
    """Whether groups of equal rewards teach nothing."""
    algorithm = algorithm_of(config)
    others = max(algorithm.kl_coefficient, algorithm.entropy_coefficient) > 0
    return algorithm.advantage not in ("teacher", "gae") and not others


def title_of(config: RLConfig) -> str:
    """Title of the run's report."""
    return f"{config.algorithm} on {config.environment.removeprefix(GIVEN)}"


def write_ending(
    config: RLConfig, world: World, run: RunFolder, generators: Generators, start: int, clock: float, shared: int
) -> None:
    """Writes the summary, the timeline and the report of a finished run.

    start, clock: the step and the time at which this process began. shared: validation examples that are also trained
    on.
    """
    merge_timelines(run.path, generators.trace_events())
    summary = summarize(read_metrics(run.metrics), config.updates_per_batch) | {
        "seconds": {"rl": time.perf_counter() - clock},
        "arithmetic": arithmetic_of(world.device),
        "validation_also_trained": shared,
    }
    if start:
        summary["resumed_from"] = start
    if balance := prompt_balance(run.path):
        summary["prompts"] = asdict(balance)
        if balance.repeated or balance.lost:
            log.warning("%s; this is a bug in Lockstep", balance.text())
    run.write_summary(summary)
    write_report(run.path, title_of(config))
