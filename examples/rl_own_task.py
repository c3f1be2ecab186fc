"""Reinforce a model on a task of your own with GRPO: here, to write the letter e.

python examples/rl_own_task.py --model DIR [--steps 20]
"""

import argparse
from pathlib import Path

import lockstep
import lockstep.rl as rl
from lockstep.config import RLConfig, TrainConfig

WORDS = ("stone", "river", "cloud", "apple", "glass", "paper", "light", "music")


class LetterE(rl.Environment):
    def examples(self, split: str):  # "train" or "validation"
        for word in WORDS if split == "train" else WORDS[:2]:
            yield rl.Example(prompt=f"{word}:")

    def reward(self, example: rl.Example, completion: str) -> dict[str, float]:
        # Rewards by name add up, and each gets its curve.
        share = completion.count("e") / max(1, len(completion))
        return {"letters": share, "length": 0.1 * (len(completion) > 4)}


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True)
parser.add_argument("--output", default="run-example-rl")
parser.add_argument("--steps", type=int, default=20)
arguments = parser.parse_args()

run = lockstep.reinforce(
    RLConfig(
        model=arguments.model,
        output=arguments.output,
        steps=arguments.steps,
        prompts_per_step=4,
        samples_per_prompt=8,
        max_new_tokens=16,
        train=TrainConfig(learning_rate=1e-4, schedule="constant"),
        overwrite=Path(arguments.output).is_dir(),
    ),
    LetterE(),
    on_metrics=lambda step, metrics: print(
        # Step 0 is the validation before the first update.
        f"step {step}: reward {metrics.get('reward/mean', metrics.get('validation/reward', float('nan'))):.3f}, "
        f"log-probabilities that differ: {metrics.get('parity/tokens_different', 0):.0f}"
    ),
)
print(f"curves and completions: {run / 'report.html'}")
