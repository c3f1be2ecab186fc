"""The summary that a reinforcement run prints at its end."""

from __future__ import annotations

import json
from pathlib import Path

from lockstep.observe.report import duration, in_tokens, parity_meaning, validated
from lockstep.rl.rollouts.prompt_balance import PromptBalance


def print_summary(folder: Path) -> None:
    """Prints the run's result in a few lines, with explanations."""
    summary = json.loads((folder / "summary.json").read_text())
    print()
    name, measured = "accuracy", validated(summary, "accuracy")
    if not measured:
        name, measured = summary["reward_name"], validated(summary, "reward")
    if measured:
        values, when = measured
        also_trained = summary.get("validation_also_trained")
        where = f"validation examples, {also_trained} of them also trained on" if also_trained else "held-out examples"
        print(f"{name} {' -> '.join(values)} on {where}" + (f", {when}" if len(values) == 1 else ""))
    checked, different = int(summary["parity_tokens_checked"]), int(summary["parity_tokens_different"])
    print(
        f"{checked} log-probabilities compared, {different} different; "
        f"largest ratio on a batch's first update: {summary['ratio_max_on_first_inner_step']!r}"
    )
    if "parity_routes_checked" in summary:
        routes, others = int(summary["parity_routes_checked"]), int(summary["parity_routes_different"])
        print(f"experts of {routes} tokens compared, {others} different")
    print(f"  {parity_meaning(checked, different, summary['staleness_max'] > 0)}")
    if "prompts" in summary:
        print(PromptBalance(**summary["prompts"]).text())
    tokens, seconds = summary["tokens"], sum(summary["seconds"].values())
    trained = sum(count for stage, count in tokens.items() if stage != "generated")
    whole = f"{in_tokens(trained)} tokens trained on, {in_tokens(tokens['generated'])} sampled"
    begun = summary.get("resumed_from")
    print(f"{whole}; {duration(seconds)} since step {begun}" if begun else f"{duration(seconds)} in all: {whole}")
    print(f"report: {folder / 'report.html'}")
