"""Recomputes a finished step from the checkpoint before it and its rollouts, and compares it bit for bit."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from lockstep.checkpoint import model_folder, step_name
from lockstep.checkpoint.folders import STATE
from lockstep.config import (
    CONFIG,
    ActorsConfig,
    AlarmConfig,
    ObserveConfig,
    ParallelConfig,
    RLConfig,
    from_toml,
    to_toml,
)
from lockstep.errors import UserError
from lockstep.model import read_config
from lockstep.observe import RunFolder, read_metrics
from lockstep.parallel import refuse_ranks
from lockstep.rl.environments.protocol import Environment, Example
from lockstep.rl.own_functions import with_kept_functions
from lockstep.rl.reinforce import replay_step
from lockstep.rl.rollouts.recorded import read_lines, refuse_unknown_tokens, rollout_of
from lockstep.rl.rollouts.records import Rollout

OF_ROLLOUTS = {
    "prompts": ("prompt", "answer"),
    "tokens": ("token_ids", "completion"),
    "generator's log-probabilities": ("log_probs", "truncated_logprobs"),
    "routes": ("routes",),
    "conversations": ("sampled", "messages"),
    "rewards": ("rewards", "reward", "failure"),
    "dropped": ("dropped",),
    "reference's log-probabilities": ("reference_log_probs",),
    "teacher's log-probabilities": ("teacher_log_probs",),
    "values": ("values",),
    "advantages": ("advantage", "token_advantages"),
    "trainer's log-probabilities": ("trainer_log_probs",),
    "entropies": ("entropies",),
}
"""What is compared for each rollout, in order of dependence, with its field names in the file."""
SAMPLED = ("tokens", "generator's log-probabilities", "routes", "conversations")
"""Taken from the file, unless they are sampled again."""
NOT_COMPARED = (
    "time",
    "tokens/",
    "ranks",
    "pipeline/",
    "generators/",
    "buffer/",
    "rollout/tokens_per_second",
    "rollout/environment_seconds",
    "rollout/tool_seconds/",
    "validation/",
    "alarm/",
)
"""Prefixes of metrics that differ every time, or that a replay does not compute."""
REWARDS_DIFFER = (
    "Rewards differ: the environment, its data or its reward has changed, or the reward depends on more than example "
    "and completion, for instance because it is random or asks a judge. What is computed from rewards differs as well."
)


@dataclass(frozen=True)
class Quantity:
    """One of the quantities that are compared."""

    name: str
    compared: int
    different: int
    first: str = ""
    """The first difference: where, the recorded value, and the new one."""


@dataclass(frozen=True)
class Replay:
    """A recomputed step."""

    step: int
    quantities: list[Quantity]

    @property
    def equal(self) -> bool:
        """Whether everything that was compared is bitwise identical to the record."""
        return not any(quantity.different for quantity in self.quantities)

    def text(self) -> str:
        """What `lockstep replay` prints."""
        lines = [f"step {self.step}, recomputed from the checkpoint before it:"]
        for quantity in self.quantities:
            result = f"{quantity.different} of {quantity.compared} differ" if quantity.different else "equal"
            lines.append(f"  {quantity.name:32} {result}" + (f": {quantity.first}" if quantity.first else ""))
        if any(quantity.name == "rewards" and quantity.different for quantity in self.quantities):
            lines.append(REWARDS_DIFFER)
        return "\n".join([*lines, "the recorded bits" if self.equal else "NOT the recorded bits"])


def replay(
    run: str | Path, step: int | None = None, environment: Environment | None = None, sample: bool = False
) -> Replay:
    """Grades the rollouts of a finished `step` of `run` and trains on them again, and compares the results.

    It runs the loop's own code in a temporary folder; the run's folder is only read. step: None is the last one that
    can be recomputed. environment: the one that the run was given as an object. sample: also sample again, instead of
    taking tokens and log-probabilities from the file. Raises UserError if the step cannot be recomputed, naming those
    that can.
    """
    folder = RunFolder(Path(run))
    recorded = _recorded(folder, step)
    step = recorded["step"]
    refuse_ranks("replay")
    rollouts_file = folder.rollouts_path(step)
    before = read_lines(rollouts_file)
    if not sample and any("messages" in line for line in before):
        raise UserError(
            f"step {step} of {folder.path} has conversations, whose rewards depend on holding them; use --sample to "
            "hold them again"
        )
    if sample and recorded.get("policy/staleness_max"):
        raise UserError(
            f"step {step} of {folder.path} was partly sampled from weights of earlier steps (actors.max_staleness), "
            "which its checkpoint does not contain; remove --sample"
        )
    rollouts = None if sample else _RecordedRollouts([rollout_of(line) for line in before])
    with tempfile.TemporaryDirectory(prefix="lockstep-replay-") as name:
        again = RunFolder(Path(name) / "run")
        config = _config(folder, step, again.path)
        if (ranks := recorded.get("ranks", 1)) > 1 and not config.train.deterministic_layout:
            raise UserError(
                f"step {step} of {folder.path} was computed on {ranks} ranks, which sum gradients in another order "
                "than one process does; only runs with train.deterministic_layout can be recomputed in one process"
            )
        if not sample:
            refuse_unknown_tokens(rollouts_file, before, read_config(model_folder(config.model)).vocab_size)
        (again.path / "checkpoints").mkdir(parents=True)
        again.record(to_toml(config))
        if step > 1:
            start = Path("checkpoints") / step_name(step - 1)
            (again.path / start).symlink_to((folder.path / start).resolve(), target_is_directory=True)
        replay_step(config, environment, step, rollouts)
        lines = before, read_lines(again.rollouts_path(step))
        metrics = next(m for m in read_metrics(again.metrics) if m["step"] == step)
    names = [name for name in OF_ROLLOUTS if sample or name not in SAMPLED]
    of_rollouts = [_compared_rollouts(name, *lines) for name in names]
    return Replay(step, [_counted(*lines), *filter(None, of_rollouts), *_compared_metrics(recorded, metrics)])


def replayable(run: Path) -> list[int]:
    """The finished steps that have rollouts and a checkpoint before them; step 1 starts from the run's own model."""
    folder, steps = RunFolder(run), {m["step"] for m in read_metrics(run / "metrics.jsonl") if "loss" in m}
    return [s for s in sorted(steps) if folder.rollouts_path(s).is_file() and (s == 1 or _can_resume(run, s - 1))]


class _RecordedRollouts:
    """Recorded rollouts, returned group by group as the examples of a step are requested."""

    def __init__(self, rollouts: Sequence[Rollout]):
        self._rollouts, self._requested = rollouts, 0

    def __call__(self, examples: Sequence[Example]) -> list[Rollout]:
        """No rollouts for stragglers, and for requests beyond the record, which changed rewards can lead to."""
        first, self._requested = self._requested, self._requested + len(examples)
        return [
            dataclasses.replace(rollout, example=examples[rollout.group - first], group=rollout.group - first)
            for rollout in self._rollouts
            if first <= rollout.group < self._requested
        ]


def _recorded(folder: RunFolder, step: int | None) -> dict[str, Any]:
    """The step's metrics."""
    if not (folder.path / CONFIG).is_file():
        raise UserError(f"{folder.path}: contains no run; give the folder of a reinforcement run")
    possible = replayable(folder.path)
    if step is None and possible:
        step = possible[-1]
    if step is None or step not in possible:
        there = f"steps that can: {_ranges(possible)}" if possible else "no step of this run can"
        rollouts = "its rollouts" if not step else f"rollouts/{folder.rollouts_path(step).name}"
        raise UserError(
            f"{'the last step' if step is None else f'step {step}'} of {folder.path} cannot be recomputed: that "
            f"requires its metrics, {rollouts} and, except for step 1, a complete checkpoint of the step before "
            f"(checkpoint.every, checkpoint.keep_last); {there}"
        )
    return next(m for m in reversed(read_metrics(folder.metrics)) if m["step"] == step)


def _config(folder: RunFolder, step: int, output: Path) -> RLConfig:
    """The settings with which the step was computed: a later resume of the run may have changed them."""
    after = folder.path / "checkpoints" / step_name(step) / CONFIG
    config = from_toml(after if after.is_file() else folder.path / CONFIG, RLConfig())
    config = with_kept_functions(config, folder.path)
    return dataclasses.replace(
        config,
        output=str(output),
        resume=True,
        overwrite=False,
        on_parity_error="measure" if config.on_parity_error == "measure" else "warn",
        alarms=AlarmConfig(),
        observe=ObserveConfig(deterministic=config.observe.deterministic),
        actors=ActorsConfig(),
        parallel=ParallelConfig(reduction_chunks=config.parallel.reduction_chunks),
    )


def _can_resume(run: Path, step: int) -> bool:
    try:
        return json.loads((run / "checkpoints" / step_name(step) / STATE).read_text())["model_only"] is False
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _counted(recorded: list[dict[str, Any]], again: list[dict[str, Any]]) -> Quantity:
    difference = abs(len(recorded) - len(again))
    first = f"{len(recorded)} recorded, {len(again)} now" if difference else ""
    return Quantity("rollouts", len(recorded), difference, first)


def _compared_rollouts(name: str, recorded: list[dict[str, Any]], again: list[dict[str, Any]]) -> Quantity | None:
    """None if neither side has it."""
    fields = OF_ROLLOUTS[name]
    if not any(field in line for line in [*recorded, *again] for field in fields):
        return None
    different = [
        (index, field, before.get(field), now.get(field))
        for index, (before, now) in enumerate(zip(recorded, again))
        for field in fields
        if _bits(before.get(field)) != _bits(now.get(field))
    ]
    first = ""
    if different:
        index, field, before, now = different[0]
        if isinstance(before, list) and isinstance(now, list):
            place = next((i for i, pair in enumerate(zip(before, now)) if _bits(pair[0]) != _bits(pair[1])), len(now))
            field, before, now = f"{field}[{place}]", before[place : place + 1], now[place : place + 1]
        first = f"line {index + 1}, {field}: {_short(before)} recorded, {_short(now)} now"
    return Quantity(name, len(recorded), len({index for index, *_ in different}), first)


def _compared_metrics(recorded: dict[str, Any], again: dict[str, Any]) -> list[Quantity]:
    """Loss and gradient norm separately, all others together."""
    names = [name for name in recorded if not name.startswith(NOT_COMPARED)]
    different = [name for name in names if _bits(recorded[name]) != _bits(again.get(name))]

    def difference(name: str) -> str:
        return f"{recorded[name]!r} recorded, {again.get(name)!r} now"

    alone = [
        Quantity(name, 1, int(name in different), difference(name) if name in different else "")
        for name in ("loss", "grad_norm")
    ]
    others = [name for name in different if name not in ("loss", "grad_norm")]
    first = f"{others[0]} {difference(others[0])}" if others else ""
    return [*alone, Quantity("other metrics", len(names) - 2, len(others), first)]


def _bits(value: Any) -> str:
    """JSON keeps every bit of a number, and the sign of a zero."""
    return json.dumps(value)


def _short(value: Any) -> str:
    return f"{value!r:.60}"


def _ranges(steps: Sequence[int]) -> str:
    """`1-4, 7`."""
    runs = [[step for _, step in members] for _, members in groupby(enumerate(steps), key=lambda p: p[1] - p[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
