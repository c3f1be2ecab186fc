"""Evaluation of models on an environment's held-out examples, with the code that validates reinforcement runs."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.checkpoint import folder_if_model, model_folder, open_model
from lockstep.config import EvalConfig, RLConfig, validate
from lockstep.data import load_tokenizer, name_ends, with_ends
from lockstep.data.chat import load_chat_template
from lockstep.errors import RunStopped, UserError
from lockstep.generate import Engine
from lockstep.model import empty_model, is_auto, open_device, read_config, refuse_score_head
from lockstep.observe import announce, start_line
from lockstep.parallel import apply_compile
from lockstep.progress import Progress
from lockstep.rl.conversations.protocol import ConversationEnvironment
from lockstep.rl.conversations.rendering import Rendering, open_rendering
from lockstep.rl.environments.loading import EnvironmentSource
from lockstep.rl.environments.protocol import Environment, Example
from lockstep.rl.grading import Grader
from lockstep.rl.grading.pool import open_grader
from lockstep.rl.rollouts.collect import collect, encode_prompt, validation_params
from lockstep.rl.rollouts.estimates import Estimate, estimate, randomization_test, randomization_test_of_means
from lockstep.rl.rollouts.eval_metrics import EvalMetrics, eval_metrics
from lockstep.rl.rollouts.prompts import examples_of
from lockstep.rl.rollouts.records import Rollout, episodes_of, write_rollouts
from lockstep.rl.rollouts.rewards import assign_rewards
from lockstep.rl.scoring.forward import ForwardPasses
from lockstep.rl.scoring.reward_model import RewardModel, RewardModelScorer, load_reward_model
from lockstep.rl.setup import named_environment

RESULT = "eval.json"


@dataclass(frozen=True)
class ModelResult:
    """The results of one model's completions."""

    model: str
    metrics: EvalMetrics
    completions: Path
    """The file with its completions: JSON lines like a run's rollouts."""
    rewards_by_prompt: list[float | None]
    """Mean reward of each prompt by index; None if no completion counts."""


@dataclass(frozen=True)
class Comparison:
    """A model compared with the first one, prompt by prompt."""

    model: str
    baseline: str
    measure: str
    """`pass@1`, or `reward` if the environment has no notion of right answers."""
    prompts: int
    """Prompts compared: those for which all completions of both models count, or for `reward` at least one of each."""
    left_out: int
    """The other prompts."""
    difference: Estimate | None
    """The model's mean minus the baseline's, with the standard error of the paired differences. None: no prompts."""
    better: int
    """Prompts on which the model does better than the baseline."""
    worse: int
    p_value: float | None
    """Two-sided; None if there are no prompts to compare."""
    test: str


@dataclass(frozen=True)
class Evaluation:
    """The models' results, in the order of `config.model`."""

    config: EvalConfig
    environment: str
    results: list[ModelResult]
    comparisons: list[Comparison]
    path: Path
    """Path of eval.json, which contains all of this."""


def evaluate(config: EvalConfig, environment: Environment | None = None) -> Evaluation:
    """Samples and grades completions of `config.model` for the examples of `environment`, or of the one `config` names.

    Every model gets the same examples with the same draws. Writes `config.output`. Raises UserError for bad input, and
    if more rewards failed than `rewards.failure_limit` allows.
    """
    validate(config)
    is_given = environment is not None
    settings, environment = named_environment(_settings(config), environment)
    source = None if is_given else EnvironmentSource(settings.environment, settings.data, settings.skip_bad_lines)
    examples = examples_of(environment, config.split)[: config.examples or None]
    folders = [model_folder(model) for model in config.model]
    reward_model = _reward_model(config, settings, environment)
    models = [
        _open(config, settings, name, folder, examples, environment) for name, folder in zip(config.model, folders)
    ]
    results: list[ModelResult] = []
    with (
        _output(config, results) as output,
        open_grader(environment, settings.rewards, source, output) as grader,
    ):
        for number, model in enumerate(models, 1):
            rollouts = _graded_completions(config, model, examples, environment, grader, reward_model)
            completions = output / f"completions_{number}.jsonl"
            _write_completions(completions, rollouts)
            metrics = eval_metrics(rollouts, environment, _pass_at(config))
            _refuse_failures(metrics, config.rewards.failure_limit, rollouts)
            results.append(ModelResult(model.name, metrics, completions, _rewards_by_prompt(rollouts, len(examples))))
    comparisons = [compare(results[0], other, config.samples_per_prompt) for other in results[1:]]
    evaluation = Evaluation(config, settings.environment, results, comparisons, output / RESULT)
    _write(evaluation)
    return evaluation


def compare(baseline: ModelResult, model: ModelResult, samples: int) -> Comparison:
    """Pairs the models' results by prompt, for prompts of which all `samples` of both count.

    Right answers are compared by the exact paired randomization test, rewards by the same test, with random signs if
    there are many.
    """
    against = model.model, baseline.model
    if baseline.metrics.right and model.metrics.right:
        both = zip(model.metrics.right, baseline.metrics.right)
        gains = [right - other for (right, n), (other, m) in both if n == m == samples]
        p_value, test = (randomization_test(gains) if gains else None), "exact paired randomization test"
        differences, measure = [gain / samples for gain in gains], "pass@1"
    else:
        pairs = zip(model.rewards_by_prompt, baseline.rewards_by_prompt)
        differences = [reward - other for reward, other in pairs if reward is not None and other is not None]
        p_value = randomization_test_of_means(differences) if differences else None
        test, measure = "paired randomization test", "reward"
    difference = estimate([[each] for each in differences]) if differences else None
    better, worse = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    left_out = len(model.rewards_by_prompt) - len(differences)
    return Comparison(*against, measure, len(differences), left_out, difference, better, worse, p_value, test)


def _settings(config: EvalConfig) -> RLConfig:
    """The settings that a reinforcement run would have for its validation."""
    taken = {field.name for field in dataclasses.fields(EvalConfig)} & {f.name for f in dataclasses.fields(RLConfig)}
    taken -= {"model", "samples_per_prompt"}
    return RLConfig(**{name: getattr(config, name) for name in taken}, validation_samples=config.samples_per_prompt)


def _reward_model(config: EvalConfig, settings: RLConfig, environment: Environment) -> RewardModel | None:
    folder = folder_if_model(config.reward_model) if config.reward_model else ""
    settings = dataclasses.replace(settings, reward_model=folder)
    return load_reward_model(settings, environment, open_device(config.device))


@dataclass(frozen=True)
class _OpenedModel:
    """A model whose examples have been checked."""

    name: str
    folder: Path
    settings: RLConfig
    """As for its validation."""
    rendering: Rendering
    ends: tuple[int, ...]
    """The tokens that end a completion."""


def _open(
    config: EvalConfig,
    settings: RLConfig,
    name: str,
    folder: Path,
    examples: Sequence[Example],
    environment: Environment,
) -> _OpenedModel:
    """Raises UserError for a model that cannot take all examples, before any is sampled or a folder is created."""
    refuse_score_head(read_config(folder), str(folder))
    model = empty_model(folder, None if is_auto(config.dtype) else config.dtype)
    tokenizer = load_tokenizer(folder, model.config.vocab_size)
    model.config = with_ends(model.config, tokenizer, load_chat_template(folder))
    settings = dataclasses.replace(settings, model=str(folder))
    rendering = open_rendering(
        settings.model, settings.chat, settings.chat_template_kwargs, environment, tokenizer, model
    )
    engine = Engine(model, dataclasses.replace(config.engine, cuda_graphs="none"), tokenizer)
    if not isinstance(environment, ConversationEnvironment):  # its prompts are only known during a conversation
        for example in examples:
            encode_prompt(rendering, example, engine, config.max_new_tokens)
    return _OpenedModel(name, folder, settings, rendering, model.config.eos_token_ids)


def _graded_completions(
    config: EvalConfig,
    opened: _OpenedModel,
    examples: Sequence[Example],
    environment: Environment,
    grader: Grader,
    reward_model: RewardModel | None,
) -> list[Rollout]:
    """One model's graded completions; the model is freed afterwards."""
    model = open_model(opened.folder, config.dtype, config.device, config.arithmetic, precision=config.precision)
    model.config = dataclasses.replace(model.config, eos_token_ids=opened.ends)
    apply_compile(model, config.compile, trains=False)
    rendering, tokenizer = opened.rendering, opened.rendering.tokenizer
    engine = Engine(model, config.engine, tokenizer)
    count = len(examples) * config.samples_per_prompt
    work = f"{type(environment).__name__}, {count} samples of up to {config.max_new_tokens} tokens to go"
    ends = name_ends(opened.ends, tokenizer)
    announce("eval: " + start_line(opened.name, model.config, model.device, model.dtype, work, ends=ends))
    # Draws do not depend on what else is in the batch, so examples can go in parts, and the progress bar moves.
    part = max(1, 4 * config.engine.max_sequences // config.samples_per_prompt)
    params, seed = validation_params(opened.settings, environment, rendering)
    forward = ForwardPasses(opened.settings.train.tokens_per_microbatch)
    weight = opened.settings.reward_model_weight
    scorer = RewardModelScorer(reward_model, rendering, weight, forward) if reward_model else None
    rollouts: list[Rollout] = []
    with Progress("eval", len(examples)) as bar:
        for start in range(0, len(examples), part):
            numbers = range(start, min(start + part, len(examples)))
            groups = {number: examples[number] for number in numbers}
            sampled = collect(groups, params, seed, environment, engine, rendering, grader)
            assign_rewards(sampled, environment, opened.settings.rewards, grader)
            if scorer:
                scorer.score(sampled)
            rollouts += sampled
            bar.advance(len(numbers))
    return rollouts


def _pass_at(config: EvalConfig) -> list[int]:
    powers = [2**i for i in range(config.samples_per_prompt.bit_length())]
    return sorted({1, *(config.pass_at or [*powers, config.samples_per_prompt])})


def _rewards_by_prompt(rollouts: Sequence[Rollout], prompts: int) -> list[float | None]:
    rewards: list[list[float]] = [[] for _ in range(prompts)]
    for rows in episodes_of(rollouts):
        if rows[-1].scores.counts:
            rewards[rows[-1].group].append(rows[-1].scores.reward)
    return [math.fsum(of_prompt) / len(of_prompt) if of_prompt else None for of_prompt in rewards]


def _refuse_failures(metrics: EvalMetrics, failure_limit: float, rollouts: Sequence[Rollout]) -> None:
    if sum(metrics.failed.values()) > failure_limit * len(episodes_of(rollouts)):
        causes = ", ".join(f"{count} {cause}" for cause, count in metrics.failed.items())
        raise UserError(
            f"more rewards failed than rewards.failure_limit {failure_limit:g} allows ({causes} of "
            f"{metrics.completions}); the warning above shows the first failure"
        )


@contextmanager
def _output(config: EvalConfig, results: Sequence[ModelResult]) -> Iterator[Path]:
    """The folder, without an earlier evaluation's files; if the evaluation fails, new empty folders are removed again.

    results: those of the models finished so far, whose files a KeyboardInterrupt then names. Raises UserError if there
    are files and they must not be replaced.
    """
    output = Path(config.output)
    made = [folder for folder in (output, *output.parents) if not folder.exists()]
    there = [path for path in (output / RESULT, *output.glob("completions_*.jsonl")) if path.exists()]
    if there and not config.overwrite:
        raise UserError(f"{there[0]}: already exists; replace it with --overwrite, or give another --output")
    try:
        output.mkdir(parents=True, exist_ok=True)
        for path in there:
            path.unlink()
    except OSError as error:
        raise UserError(f"{output}: cannot be written ({error.strerror}); give another --output") from error
    try:
        yield output
    except BaseException as error:
        with suppress(OSError):  # not empty: there are finished files
            for folder in made:
                folder.rmdir()
        if isinstance(error, KeyboardInterrupt):
            files = ", ".join(str(result.completions) for result in results)
            saved = f"{files} kept, without {RESULT}" if files else "no model was finished, so nothing is kept"
            raise KeyboardInterrupt(saved) from None
        raise


def _write_completions(path: Path, rollouts: Sequence[Rollout]) -> None:
    try:
        write_rollouts(path, rollouts)
    except RunStopped as error:
        raise _write_error(path, error.__cause__) from error


def _write(evaluation: Evaluation) -> None:
    """Writes eval.json atomically."""
    path = evaluation.path
    partial_path = path.with_name(path.name + ".partial")
    try:
        partial_path.write_text(json.dumps(as_json(evaluation), indent=1, ensure_ascii=False))
        partial_path.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial_path.unlink(missing_ok=True)
        raise _write_error(path, error) from error


def _write_error(path: Path, error: BaseException | None) -> RunStopped:
    why = error.strerror if isinstance(error, OSError) else error
    return RunStopped(f"{path}: cannot be written ({why}); free some space, or give another --output", exit_code=1)


def as_json(evaluation: Evaluation) -> dict[str, Any]:
    """The contents of eval.json."""
    return {
        "environment": evaluation.environment,
        "config": dataclasses.asdict(evaluation.config),
        "models": [_model_json(result) for result in evaluation.results],
        "comparisons": [dataclasses.asdict(comparison) for comparison in evaluation.comparisons],
    }


def _model_json(result: ModelResult) -> dict[str, Any]:
    metrics = dataclasses.asdict(result.metrics)
    by_k = {f"pass@{k}": estimate for k, estimate in metrics.pop("pass_at").items()}
    return {"model": result.model, "completions_file": result.completions.name} | by_k | metrics
