"""Measure how often a model solves a task of your own, and whether another one does better.

python examples/evaluate.py --model DIR [--against DIR]
"""

import argparse

import lockstep
import lockstep.rl as rl

WORDS = ("stone", "river", "cloud", "apple", "glass", "paper", "light", "music")


class LetterE(rl.Environment):
    def examples(self, split: str):  # "train" or "validation"
        for word in WORDS:
            yield rl.Example(prompt=f"{word}:")

    def reward(self, example: rl.Example, completion: str) -> dict[str, float]:
        # A reward named `correct` makes pass@k; the others are averaged.
        return {"correct": float("e" in completion), "length": len(completion) / 100}


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", required=True)
parser.add_argument("--against", default="", help="a second model, which is compared with the first")
arguments = parser.parse_args()

evaluation = lockstep.evaluate(
    lockstep.EvalConfig(
        model=tuple(filter(None, (arguments.model, arguments.against))),
        samples_per_prompt=8,
        max_new_tokens=16,
        output="run-example-eval",
        overwrite=True,
    ),
    LetterE(),
)
for result in evaluation.results:
    for k, estimate in result.metrics.pass_at.items():
        print(f"{result.model}: pass@{k} {estimate.text()}")
for compared in evaluation.comparisons:
    print(
        f"{compared.model}: better on {compared.better} prompts, worse on {compared.worse}, p = {compared.p_value:.3f}"
    )
print(f"completions and figures: {evaluation.path.parent}")
