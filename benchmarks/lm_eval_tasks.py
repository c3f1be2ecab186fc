"""lm-eval's tasks over Lockstep against lm-eval's own Hugging Face model: the same weights in float32, in one run.

Run: python benchmarks/lm_eval_tasks.py [--questions 100 --shots 4 --rounds 2]

Needs lm-eval and transformers in this environment. A task of multiple choice with few-shot examples, and one of greedy
generation, made of generated text; the 5M-parameter Qwen3 of the other benchmarks with fresh weights. Times are those
of the requests alone, in turns; the best of each. Checks that both give the same answers.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from grpo import write_model

WORDS = ("def", "self", "return", "class", "import", "value", "parser", "None", "decode", "string", "loop", "river")
CHOICE = """
task: choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
num_fewshot: {shots}
fewshot_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
GENERATION = """
task: generation
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{choices[label]}}}}"
generation_kwargs: {{until: ["Question:"], max_gen_toks: 32, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


def write_tasks(folder: Path, questions: int, shots: int) -> None:
    """Questions of some 40 words with four choices of 2 to 6, by a fixed seed."""
    draw = random.Random(0)

    def words(count: int) -> str:
        return " ".join(draw.choices(WORDS, k=count))

    lines = [
        {"question": words(40), "choices": [f"{words(draw.randint(1, 5))} {i}" for i in range(4)], "label": n % 4}
        for n in range(questions)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, text in (("choice", CHOICE), ("generation", GENERATION)):
        (folder / f"{name}.yaml").write_text(text.format(data=folder / "data.jsonl", shots=shots))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--shots", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--batch-sizes", default="1,16", help="of the Hugging Face model; its best counts")
    arguments = parser.parse_args()

    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from lockstep.harness import LockstepLM

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(str(folder / "model"), arguments.size, 2048, "float32")
        write_tasks(folder, arguments.questions, arguments.shots)
        manager = TaskManager(include_path=str(folder), include_defaults=False)
        model = str(folder / "model")
        peers = {
            f"hf, batches of {size}": HFLM(pretrained=model, dtype="float32", device="cpu", batch_size=int(size))
            for size in arguments.batch_sizes.split(",")
        }
        models: dict[str, Any] = {"lockstep": LockstepLM(model, dtype="float32"), **peers}

        def run(lm: Any, task: str) -> tuple[float, dict[str, Any]]:
            spent = [0.0]
            for kind in ("loglikelihood", "generate_until"):
                timed(lm, kind, spent)
            found = simple_evaluate(lm, tasks=[task], task_manager=manager, bootstrap_iters=0, log_samples=True)
            for kind in ("loglikelihood", "generate_until"):
                delattr(lm, kind)
            return spent[0], found

        for task in ("choice", "generation"):
            best: dict[str, float] = {}
            answers: dict[str, list[Any]] = {}
            for _ in range(arguments.rounds):
                for title, lm in models.items():
                    seconds, found = run(lm, task)
                    best[title] = min(seconds, best.get(title, seconds))
                    answers[title] = [sample["resps"] for sample in found["samples"][task]]
                    figures = {k: float(v) for k, v in found["results"][task].items() if isinstance(v, float)}
                    print(f"{task:12} {title:20} {seconds:8.2f} s  {figures}")
            peer = min(peers, key=lambda title: best[title])
            ratio = best[peer] / best["lockstep"]
            print(f"{task}: {ratio:.2f}x as fast as {peer}; {difference(answers['lockstep'], answers[peer])}\n")


def timed(lm: Any, name: str, spent: list[float]) -> None:
    """Adds to `spent` what the model's own method takes, without the loading and the metrics around it."""
    method = getattr(lm, name)

    def call(*given: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(*given, **options)
        finally:
            spent[0] += time.perf_counter() - began

    setattr(lm, name, call)


def difference(ours: list[Any], theirs: list[Any]) -> str:
    """How far two models' answers are apart."""
    if isinstance(ours[0][0][0], str):
        return f"{sum(a != b for a, b in zip(ours, theirs))} of {len(ours)} texts differ"
    pairs = [(a[0], b[0]) for own, other in zip(ours, theirs) for a, b in zip(own, other)]
    most = max(abs(float(a[0]) - float(b[0])) for a, b in pairs)
    return f"log-likelihoods differ by {most:.1e} at most, is_greedy in {sum(a[1] != b[1] for a, b in pairs)}"


if __name__ == "__main__":
    main()
