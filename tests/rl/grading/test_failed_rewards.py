"""Rewards that fail: what becomes of their rollouts, and the ledger that loses no group."""

import asyncio
import json
import threading
from contextlib import suppress
from typing import ClassVar

import pytest

import lockstep.rl as rl
from lockstep.config import ALGORITHMS, Algorithm, RewardConfig
from lockstep.errors import UserError
from lockstep.rl.grading import refuse_too_many
from lockstep.rl.grading.totals import grade_here
from lockstep.rl.reinforce import reinforce
from lockstep.rl.rollouts.advantages import assign_advantages
from lockstep.rl.rollouts.ledger import Ledger, LedgerError
from lockstep.rl.rollouts.metrics import summarize, validation_metrics
from lockstep.rl.rollouts.rewards import assign_rewards
from tests.rl.small_runs import VOWELS as TASK
from tests.rl.small_runs import EvenBytes, rollouts_of, steps_of, trained_despite_failures
from tests.rl.small_runs import small_config as run_of_even_bytes


class Says(rl.Environment):
    """The completion is the reward; `bad` raises."""

    def reward(self, example, completion):
        return {"correct": float(completion)}


def _rollouts(*groups):
    """A rollout for each completion of each group."""
    return [
        rl.Rollout(rl.Example(f"p{g}"), g, [1], [2], [-0.5], "stop", completion, 0)
        for g, group in enumerate(groups)
        for completion in group
    ]


PLAIN = Algorithm(normalize_advantages=False)


def _entered(rollouts):
    """The ledger of these rollouts, those that failed dropped."""
    groups = len({rollout.group for rollout in rollouts})
    ledger = Ledger(groups)
    ledger.add(rollouts, range(groups))
    ledger.drop_failed()
    ledger.restore_if_empty()
    return ledger


def test_a_failed_reward_is_left_out_with_its_rollout_alone():
    rollouts = _rollouts(["1", "bad", "0"], ["1", "0", "0"])
    assign_rewards(rollouts, Says())
    assert [r.scores.failure for r in rollouts] == ["", "raised", "", "", "", ""]
    trained = _entered(rollouts).trained
    assert [r.completion for r in trained] == ["1", "0", "1", "0", "0"]
    assign_advantages(trained, PLAIN)
    assert [r.scores.advantage for r in trained[:2]] == [0.5, -0.5], "the mean is that of the two that count"


def test_a_failed_reward_is_zero_where_that_is_set():
    rollouts = _rollouts(["1", "bad"])
    assign_rewards(rollouts, Says(), RewardConfig(on_failure="zero", failure_limit=0.5))
    assert _entered(rollouts).trained == rollouts
    assign_advantages(rollouts, PLAIN)
    scores = [(r.scores.reward, r.scores.advantage, r.scores.failure) for r in rollouts]
    assert scores == [(1.0, 0.5, ""), (0.0, -0.5, "raised")]


@pytest.mark.parametrize(
    ("algorithm", "rewards", "advantages"),
    [
        # Float64 has steps of 1.2e-10 at a million, 2e-8 of what is expected; float32's are six times as large as that.
        (PLAIN, [1e6, 1e6 + 0.01], [-0.005, 0.005]),
        (ALGORITHMS["rejection"], [1e6, 1e6 + 0.01], [0.0, 1.0]),
        # Of equally good answers none is the best by its rounding.
        (ALGORITHMS["rejection"], [0.3, 0.1 + 0.2, 0.3], [0.0, 0.0, 0.0]),
        (ALGORITHMS["rejection"], [-0.3, -0.1 - 0.2, -0.3], [0.0, 0.0, 0.0]),
        (ALGORITHMS["rejection"], [0.0, 0.1 + 0.2 - 0.3, 0.0], [0.0, 0.0, 0.0]),
        (ALGORITHMS["rejection"], [0.0, 0.1 + 0.2 - 0.3, -1e-9], [1.0, 1.0, 0.0]),
    ],
)
def test_advantages_are_of_the_rewards_themselves_and_not_of_their_rounding(algorithm, rewards, advantages):
    rollouts = _rollouts([""] * len(rewards))
    for rollout, reward in zip(rollouts, rewards):
        rollout.scores.reward = reward
    assign_advantages(rollouts, algorithm)
    assert [r.scores.advantage for r in rollouts] == pytest.approx(advantages, rel=1e-6, abs=0)


def test_a_group_with_fewer_than_two_rewards_is_dropped_and_entered_in_the_ledger():
    rollouts = _rollouts(["1", "bad"], ["bad", "bad"], ["1", "0"])
    assign_rewards(rollouts, Says(), RewardConfig(failure_limit=0.6))
    ledger = _entered(rollouts)
    metrics = ledger.metrics(ledger.trained)
    groups = {name: value for name, value in metrics.items() if name.startswith("groups/")}
    assert groups == {"groups/drawn": 3, "groups/trained": 1, "groups/dropped/failed_rewards": 2}
    for rollout in rollouts:
        rollout.scores.dropped = ""
    with pytest.raises(UserError, match="no group of this step has two rewards that did not fail"):
        _entered(rollouts[:4])
    rollouts = _rollouts(["1"], ["bad"], ["0"])
    assign_rewards(rollouts, Says(), RewardConfig(failure_limit=0.6))
    assert [rollout.completion for rollout in _entered(rollouts).trained] == ["1", "0"], "groups of one need only one"


def test_a_ledger_that_does_not_add_up_stops_the_run():
    ledger = _entered(_rollouts(["1", "0"], ["0", "1"]))
    with pytest.raises(LedgerError, match=r"2 groups were drawn, 2 trained on and 0 dropped \(none\)"):
        ledger.metrics(ledger.trained[1:])
    ledger.rollouts = ledger.rollouts[:2]
    with pytest.raises(LedgerError, match=r"2 groups were drawn, 1 trained on and 0 dropped \(none\)"):
        ledger.metrics(ledger.trained)


def test_too_many_failures_end_the_run_with_their_causes_and_the_first():
    said = r"more rewards .*limit 0.25 allows: 2 of 4 rewards failed \(2 raised\). The first: .*'p0' \(ValueError"
    with pytest.raises(UserError, match=said):
        refuse_too_many(assign_rewards(_rollouts(["1", "bad", "bad", "0"]), Says()), 0.25)
    refuse_too_many(assign_rewards(_rollouts(["1", "bad", "1", "0"]), Says()), 0.25)


def test_failures_are_counted_over_all_rounds_of_a_step(tmp_path, folders):
    """Two of four fail in the second round, six of sixteen in the step: below a limit of 0.4."""

    class Later(EvenBytes):
        words = ("=a", "=b", "=c", "d", "e", "f")
        calls = 0

        def reward(self, example, completion):
            self.calls += 1
            # The validation before the first step has two; twelve are the first round of three prompts.
            if self.calls > 2 + 12 and self.calls % 2:
                raise ValueError("from the second round on")
            return super().reward(example, completion)

    environment = Later()
    changes = dict(algorithm="dapo", extra_rounds=2, steps=1, seed=0, rewards=RewardConfig(failure_limit=0.4))
    run = reinforce(run_of_even_bytes(tmp_path / "run", folders[0], **changes), environment)
    rollouts = [json.loads(line) for line in (run / "rollouts/step_00000001.jsonl").read_text().splitlines()]
    rounds = [[r.get("failure", "") for r in rollouts[part]] for part in (slice(0, 12), slice(12, None))]
    assert not any(rounds[0]) and sum(map(bool, rounds[1])) / len(rounds[1]) > 0.4, "one round alone is above it"
    assert sum(map(bool, rounds[1])) / len(rollouts) < 0.4


def test_rewards_may_be_functions_by_name_and_coroutines():
    async def judged(example, completion):
        return len(completion) / 10

    class Named(rl.Environment):
        rewards: ClassVar = {"right": lambda example, completion: completion == example.answer, "judged": judged}
        reward_weights: ClassVar = {"judged": 0.5}

    (grade,) = rl.grade(Named(), [rl.Example("p", "four")], ["four"])
    assert grade.by_name == {"right": 1.0, "judged": 0.4} and grade.total == 1.2


def test_coroutines_of_all_steps_share_a_loop_also_where_one_runs_already():
    class Loops(rl.Environment):
        async def reward(self, example, completion):
            return float(id(asyncio.get_running_loop()))

    async def notebook():
        return [rl.grade(Loops(), [rl.Example("p")], [""])[0].total for _ in range(2)]

    first, second = asyncio.run(notebook())
    assert first == second


def test_coroutines_that_take_too_long_or_exit_fail_by_themselves_also_when_they_ignore_it():
    class Bad(rl.Environment):
        async def reward(self, example, completion):
            async def end(error):
                raise error

            match completion:
                case "slow":
                    await asyncio.sleep(60)
                case "exits":
                    await end(SystemExit(3))
                case "exits in a task":
                    await asyncio.create_task(end(SystemExit(3)))
                case "interrupts":
                    await asyncio.create_task(end(KeyboardInterrupt()))
            while completion == "stubborn" and not over.is_set():
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.05)
            await asyncio.sleep(0)
            return 1.0

    over = threading.Event()
    bad = {"slow": "timeout", "exits": "raised", "exits in a task": "raised", "interrupts": "raised"}
    completions = {"a": ""} | bad | {"b": "", "stubborn": "timeout", "c": ""}
    try:
        for _ in range(2):
            outcomes = grade_here(Bad(), [(rl.Example("p"), text) for text in completions], seconds=1.0)
            assert [outcome.cause for outcome in outcomes] == [*completions.values()]
    finally:
        over.set()


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Unspeakable(), "(Unspeakable: its message cannot be read)"),
        (ValueError("\x1b]0;owned\x07\nWARNING: \ud800é"), r"(ValueError: \x1b]0;owned\x07\nWARNING: \ud800é)"),
    ],
)
def test_what_an_error_says_fails_nothing_and_forges_nothing(error, said):
    class Raises(rl.Environment):
        def reward(self, example, completion):
            raise error

    class Awaited(Raises):
        async def reward(self, example, completion):
            raise error

    for environment in (Raises(), Awaited()):
        (outcome,) = grade_here(environment, [(rl.Example("p"), "")])
        assert outcome.cause == "raised" and outcome.message.endswith(said)


@pytest.mark.parametrize(
    ("on_failure", "isolate", "fault", "cause"),
    [
        pytest.param("zero", "never", "raise ValueError", "raised", marks=pytest.mark.slow),
        ("drop", "auto", "import os; os._exit(1)", "killed"),
    ],
)
def test_a_run_with_failures_trains_on_and_its_ledger_adds_up_in_every_step(
    tmp_path, model_folder, on_failure, isolate, fault, cause
):
    # One prompt's reward always fails, and so do some others'.
    fails = f'if example.prompt == "stone:" or len(completion) % 4 == 0: {fault}\n        return'
    (tmp_path / "task.py").write_text(TASK.replace("return completion", f"{fails} completion"))
    rewards = RewardConfig(isolate=isolate, on_failure=on_failure, failure_limit=0.9)
    changes = dict(environment=f"{tmp_path / 'task.py'}:Vowels", prompts_per_step=4, dtype="float32", rewards=rewards)
    run = reinforce(run_of_even_bytes(tmp_path / "run", model_folder, steps=3, max_new_tokens=12, **changes))
    for metrics in steps_of(run):
        rollouts = rollouts_of(run, metrics["step"])
        trained = trained_despite_failures(metrics, rollouts, on_failure, cause)
        assert metrics["parity/tokens_checked"] == sum(len(r["token_ids"]) for r in trained)


def test_a_summary_leaves_out_the_accuracy_that_one_of_the_validations_lacks():
    """Where all of its rewards failed and are left out."""
    rollouts = _rollouts(["1"], ["0"])
    assign_rewards(rollouts, Says())
    first = {"step": 0} | validation_metrics(rollouts, Says())
    rollouts = _rollouts(["bad"], ["bad"])
    assign_rewards(rollouts, Says())
    last = validation_metrics(rollouts, Says()) | {"parity/tokens_checked": 1, "parity/tokens_different": 0}
    summary = summarize([first, last | {"step": 1, "policy/ratio_first_max": 1.0}])
    assert first["validation/accuracy"] == 0.5 and "validation/accuracy" not in last
    assert summary["reward_before"] == 0.5 and "accuracy_after" not in summary
