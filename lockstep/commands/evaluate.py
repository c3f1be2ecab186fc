"""The output of `lockstep eval`."""

from __future__ import annotations

import re
from functools import partial

from lockstep.rl.evaluate import Comparison, Evaluation
from lockstep.rl.rollouts.eval_metrics import EvalMetrics


def as_text(evaluation: Evaluation) -> str:
    """A table with a row for each model, and a sentence for each comparison."""
    config, results = evaluation.config, evaluation.results
    how = "greedy" if config.temperature == 0 else f"temperature {config.temperature:g}"
    samples = f"{config.samples_per_prompt} sample{'s' * (config.samples_per_prompt > 1)}"
    lines = [f"{evaluation.environment}: {results[0].metrics.prompts} prompts, {samples} of each, {how}", ""]
    rows = [_row(result.metrics) for result in results]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    table = [["model", *columns]]
    table += [[result.model, *(row.get(column, "") for column in columns)] for result, row in zip(results, rows)]
    widths = [max(map(len, column)) for column in zip(*table)]
    lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
    lines += ["", "± is the standard error of the mean over prompts", *map(_sentence, evaluation.comparisons)]
    return "\n".join(lines)


def _row(metrics: EvalMetrics) -> dict[str, str]:
    rewards = metrics.rewards if len(metrics.rewards) > 1 else {}
    failed = {"failed": str(sum(metrics.failed.values()))} if metrics.failed else {}
    return {
        **{f"pass@{k}": mean.text() for k, mean in metrics.pass_at.items()},
        "reward": metrics.reward.text() if metrics.reward else "none counts",
        **{_one_word(name): mean.text() for name, mean in rewards.items()},
        "truncated": f"{metrics.truncated:.1%}",
        "tokens": f"{metrics.tokens_mean:.1f}",
        **failed,
    }


_one_word = partial(re.sub, r"\s+", "_")


def _sentence(compared: Comparison) -> str:
    models = f"{compared.model} against {compared.baseline}"
    if compared.difference is None:
        return f"{models}: no prompt has valid rewards for both"
    sign = "+" * (compared.difference.mean >= 0)
    p_value = "too few prompts to test"
    if compared.p_value is not None:
        p_value = f"p = {compared.p_value:.2g}" if compared.p_value else "p < 1e-300"  # below the smallest float
        p_value += f" ({compared.test})"
    left_out = f" ({compared.left_out} left out because rewards failed)" if compared.left_out else ""
    return (
        f"{models}: {compared.measure} {sign}{compared.difference.text()}, better on {compared.better} of "
        f"{compared.prompts} prompts, worse on {compared.worse}{left_out}; {p_value}"
    )
