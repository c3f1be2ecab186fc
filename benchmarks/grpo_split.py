"""Where the time of a GRPO step goes, on one thread: native operators by phase, and what is left to Python and torch.

Run: OMP_NUM_THREADS=1 python benchmarks/grpo_split.py

Processor time of the thread, so that other work on the machine hardly shows. The step is that of `grpo.py`.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from grpo import PROMPTS, steps_of_run, write_model

STEPS = 6
PHASES = ("generate", "forward", "backward", "optimizer")
KINDS = {"product": "products", "attend": "attention", "attend_backward": "attention", "write_pages": "attention"}


def timed(owner: Any, name: str, of: Callable[..., Any]) -> None:
    """Replaces `owner.name` by what `of` makes of its arguments: a span of time."""
    function = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        with of(*arguments):
            return function(*arguments, **options)

    setattr(owner, name, call)


class Split:
    """Seconds by phase, and within a phase by kind of operator."""

    def __init__(self) -> None:
        self.phase = "other"
        self.seconds: Counter[tuple[str, str]] = Counter()

    def during(self, phase: str) -> Callable[[Any], Any]:
        return lambda *_: _Span(self, phase, "all")

    def generation(self, _: Any, prompts: list[list[int]], *rest: Any) -> Any:
        return _Span(self, "generate" if len(prompts) == PROMPTS else "validate", "all")

    def operator(self, name: str, *_: Any) -> Any:
        return _Span(self, self.phase, KINDS.get(name, "other operators"))

    def replay(self, graph: Any) -> Any:
        """As `StepGraph.replay`, with each kernel timed; other calls are torch's functions."""
        for call, arguments in graph._calls:
            name = getattr(call, "__name__", "").removesuffix("_f32")
            with self.operator(name) if name else nullcontext():
                call(*arguments)
        return graph.results


class _Span:
    def __init__(self, split: Split, phase: str, kind: str):
        self.split, self.phase, self.kind = split, phase, kind

    def __enter__(self) -> None:
        self.before, self.split.phase = self.split.phase, self.phase
        self.began = time.thread_time()

    def __exit__(self, *error: object) -> None:
        self.split.seconds[self.phase, self.kind] += time.thread_time() - self.began
        self.split.phase = self.before


def main() -> None:
    import torch

    from lockstep.generate import Engine
    from lockstep.ops import StepGraph, native
    from lockstep.rl.scoring.policy_loss import PolicyLoss
    from lockstep.train.optimizer import MasterOptimizer

    assert torch.get_num_threads() == 1, "run it with OMP_NUM_THREADS=1"
    split = Split()
    timed(native, "call", split.operator)
    StepGraph.replay = lambda graph: split.replay(graph)  # type: ignore[method-assign]
    timed(Engine, "generate", split.generation)
    timed(PolicyLoss, "__call__", split.during("forward"))
    timed(torch.Tensor, "backward", split.during("backward"))
    timed(MasterOptimizer, "gradient_norms", split.during("optimizer"))
    timed(MasterOptimizer, "update", split.during("optimizer"))
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder, "tiny", 2048, "float32")
        steps_of_run(folder, steps=STEPS, dtype="float32")
    kinds = ["products", "attention", "other operators"]
    print(f"{'ms of a step':13}" + "".join(f"{name:>17}" for name in (*kinds, "Python and torch", "all")))
    for phase in PHASES:
        own = [split.seconds[phase, kind] for kind in kinds]
        whole = split.seconds[phase, "all"]
        columns = (*own, whole - sum(own), whole)
        print(f"{phase:13}" + "".join(f"{1000 * seconds / STEPS:17.0f}" for seconds in columns))


if __name__ == "__main__":
    main()
