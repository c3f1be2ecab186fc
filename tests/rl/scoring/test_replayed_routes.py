"""Routes of a generator that chooses other experts, replayed in every layout with the bits of one process."""

import math
from base64 import b64decode, b64encode
from dataclasses import replace

import pytest

from lockstep.config import CompileConfig, ParallelConfig, RecomputeConfig, TrainConfig
from tests.parallel.launch import launch
from tests.rl.generators.test_colocated import TASK, config_of, mixture
from tests.rl.small_runs import rollouts_of, steps_of


def run_with_other_routes(config):
    """A run whose generator says, for every third token, another expert than it used, in one of its mixtures."""
    from lockstep.rl import task
    from lockstep.rl.reinforce import reinforce

    exact = task.policy_batches

    def batches(rollouts, *given, **named):
        for rollout in rollouts:  # in place: the step counts on getting its rollouts back
            rollout.routes[:] = [another(route, number) for number, route in enumerate(rollout.routes)]
        return exact(rollouts, *given, **named)

    task.policy_batches = batches
    reinforce(config)


def another(route, number):
    experts = bytearray(b64decode(route))
    if number % 3 == 2:
        place = number // 3 % len(experts)
        layer = set(experts[place - place % 2 :][:2])
        experts[place] = next(e for e in (experts[place] + 1, experts[place] + 2) if e % 8 not in layer) % 8
    return b64encode(bytes(experts)).decode()


FULL = dict(recompute=RecomputeConfig("full"))
LAYOUTS = {
    "TP 2, selectively recomputed": (2, ParallelConfig(tensor=2), dict(recompute=RecomputeConfig("selective"))),
    "TP 2, compiled": (2, ParallelConfig(tensor=2), dict(compile=CompileConfig("inductor"))),
    "PP 2, ZBV, recomputed": (2, ParallelConfig(pipeline=2, pipeline_schedule="zbv"), FULL),
    "TP 2 x PP 2, recomputed": (4, ParallelConfig(tensor=2, pipeline=2), FULL),
    "CP 2 x TP 2": (4, ParallelConfig(context=2, tensor=2), {}),
    "CP 2 x PP 2": (4, ParallelConfig(context=2, pipeline=2), {}),
    "expert 2 x TP 2": (4, ParallelConfig(expert=2, tensor=2), {}),
    "full DTensor": (4, ParallelConfig(context=2, tensor=2, full_dtensor=True), {}),
}
QUICK, *SLOW = LAYOUTS


@pytest.mark.parametrize("layout", [QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_every_layout_replays_the_routes_that_one_process_does(model_folder, tmp_path, layout):
    ranks, parallel, changes = LAYOUTS[layout]
    task = tmp_path / "task.py"
    task.write_text(TASK)
    model = mixture(model_folder, tmp_path / "model", 2 * parallel.pipeline)
    train = TrainConfig(learning_rate=1e-3, warmup_steps=0, schedule="constant", tokens_per_microbatch=64)
    first = config_of(
        task, model, tmp_path / "one", ParallelConfig(reduction_chunks=parallel.tensor), train=train, steps=1,
        dtype="float32", router_replay=True, on_parity_error="measure", kl_coefficient=0.0, off_policy="truncate",
        compile=changes.get("compile", CompileConfig()),  # compiled code rounds elsewhere
    )  # fmt: skip
    launch(1, run_with_other_routes, first)
    launch(ranks, run_with_other_routes, replace(first, output=str(tmp_path / "many"), parallel=parallel, **changes))
    (alone,), (many,) = (steps_of(tmp_path / name) for name in ("one", "many"))
    own, theirs = (rollouts_of(tmp_path / name, 1) for name in ("one", "many"))
    assert 0.05 < alone["routes/different"] < 0.5 and alone["rollout/microbatches"] > 2
    assert 0 < alone["parity/tokens_different"] < alone["parity/tokens_checked"]
    assert own == theirs and sum(line["trainer_log_probs"] != [] for line in own) > 5
    for name in (n for n in alone if n.startswith("parity/") or n == "routes/different"):
        assert many[name] == alone[name], name
    for name in ("loss", "grad_norm", "policy/ratio_first_max"):
        # float32 sums in another order: some units in the last of 24 bits, of terms up to a hundred times the sum.
        assert math.isclose(many[name], alone[name], rel_tol=1e-5, abs_tol=1e-8), name
