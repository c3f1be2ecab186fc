"""`lockstep eval`: the metrics of a run's own validation, several models on the same draws, and what is refused."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import lockstep
from lockstep.cli import main
from lockstep.commands.evaluate import as_text
from lockstep.config import EvalConfig, RewardConfig
from lockstep.errors import UserError
from lockstep.model import build_model, read_config
from lockstep.rl.environments.protocol import Environment, Example
from lockstep.rl.evaluate import Evaluation, ModelResult, compare
from lockstep.rl.reinforce import reinforce
from lockstep.rl.rollouts.eval_metrics import EvalMetrics, eval_metrics
from lockstep.rl.rollouts.records import Rollout, Scores
from tests.rl.small_runs import lines_of, small_config


class Early(Environment):
    """Right where the first byte is below 128; the other reward is a length."""

    def examples(self, split):
        for n in range(40):
            yield Example(prompt=f"{split} {n}:")

    def reward(self, example, completion):
        return {"correct": float(completion[:1].isascii()), "length": len(completion) / 10}


def eval_config(tmp_path, *models, **changes):
    defaults = dict(
        model=tuple(map(str, models)), output=str(tmp_path / "eval"), max_new_tokens=5, dtype="float32", overwrite=True
    )
    return EvalConfig(**(defaults | changes))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"temperature": 0.0}, marks=pytest.mark.slow),
        pytest.param({"seed": 7, "samples_per_prompt": 3, "temperature": 0.5}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_results_are_those_of_the_validation_of_a_run_on_the_same_weights(tmp_path, folders, settings):
    """Of the run's last checkpoint, as eval reads it, the completions are those of the run's last validation."""
    names = dict(seed="validation_seed", samples_per_prompt="validation_samples", temperature="validation_temperature")
    of_run = {names[name]: value for name, value in settings.items()}
    run = reinforce(small_config(tmp_path / "run", folders[0], validation_examples=12, **of_run), Early())
    (result,) = lockstep.evaluate(eval_config(tmp_path, run, examples=12, **settings), Early()).results
    own, recorded = lines_of(result.completions), lines_of(run / "rollouts/validation_00000002.jsonl")
    for line in own + recorded:
        line.pop("version")
    assert own == recorded and len(own) == 12 * settings.get("samples_per_prompt", 1)
    metrics = lines_of(run / "metrics.jsonl")[-1]
    assert metrics["validation/accuracy"] == result.metrics.pass_at[1].mean
    assert metrics["validation/accuracy_stderr"] == result.metrics.pass_at[1].standard_error
    assert metrics["validation/reward"] == result.metrics.reward.mean
    assert metrics["validation/length"] == result.metrics.rewards["length"].mean
    assert ("validation/pass@3" in metrics) == ("samples_per_prompt" in settings)


def test_the_command_compares_models_and_writes_a_table_a_json_file_and_the_completions(tmp_path, folders, capsys):
    policy, other, _ = map(str, folders)
    options = ["--environment", f"{__file__}:Early", "--samples-per-prompt", "4", "--dtype", "float32"]
    options += ["--max-new-tokens", "3", "--output", str(tmp_path / "out"), "--rewards.isolate", "never"]
    assert main(["eval", "--model", policy, other, *options]) == 0
    printed = capsys.readouterr().out
    result = json.loads((tmp_path / "out/eval.json").read_text())
    first, second = result["models"]
    assert [name for name in first if name.startswith("pass@")] == ["pass@1", "pass@2", "pass@4"]
    assert first["pass@1"]["mean"] < first["pass@2"]["mean"] < first["pass@4"]["mean"]
    lines = lines_of(tmp_path / "out/completions_1.jsonl")
    assert len(lines) == 160 and first["prompts"] == 40
    shares = [sum(line["rewards"]["correct"] for line in lines if line["group"] == g) / 4 for g in range(40)]
    mean = sum(shares) / 40
    assert first["pass@1"]["mean"] == pytest.approx(mean, abs=1e-12)
    spread = math.sqrt(sum((share - mean) ** 2 for share in shares) / 39 / 40)
    assert first["pass@1"]["standard_error"] == pytest.approx(spread, abs=1e-12)
    (compared,) = result["comparisons"]
    gain = second["pass@1"]["mean"] - first["pass@1"]["mean"]
    assert compared["difference"]["mean"] == pytest.approx(gain, abs=1e-12) and compared["prompts"] == 40
    assert 0 <= compared["p_value"] <= 1 and compared["better"] + compared["worse"] <= 40
    assert f"pass@1 {'+' * (gain >= 0)}{gain:.3f} ± " in printed and "(exact paired randomization test)" in printed
    header = next(line for line in printed.splitlines() if line.startswith("model"))
    assert header.split() == [
        "model", "pass@1", "pass@2", "pass@4", "reward", "correct", "length", "truncated", "tokens"
    ]  # fmt: skip
    assert main(["eval", "--model", policy, *options]) == 2
    assert "eval.json: already exists; replace it with --overwrite" in capsys.readouterr().err


def test_two_models_get_the_same_draws_and_mean_rewards_are_compared_without_right_answers(tmp_path, folders):
    class Length(Early):
        def reward(self, example, completion):
            return len(completion.encode()) / 10

    (tmp_path / "again").symlink_to(folders[0])
    evaluation = lockstep.evaluate(eval_config(tmp_path, folders[0], tmp_path / "again", folders[1]), Length())
    first, second, _ = (result.completions.read_text() for result in evaluation.results)
    assert first == second and not evaluation.results[0].metrics.pass_at
    same, other = evaluation.comparisons
    assert (same.better, same.worse, same.p_value) == (0, 0, 1.0)
    assert other.measure == "reward" and other.test == "paired randomization test"
    rewards = [result.rewards_by_prompt for result in evaluation.results[::2]]
    assert other.difference.mean == pytest.approx(sum(b - a for a, b in zip(*rewards)) / 40)


def test_a_completion_whose_reward_failed_is_left_out_or_no_right_answer():
    class Task(Early):
        pass

    def rollout(group, right, failure="", counts=True):
        rewards = {} if failure else {"correct": float(right)}
        return Rollout(
            Example("p"), group, [1], [2], [0.0], "stop", "", 0, scores=Scores(rewards, float(right), failure, counts)
        )

    rollouts = [rollout(0, True), rollout(0, False), rollout(1, True), rollout(1, False, "raised", False)]
    metrics = eval_metrics(rollouts, Task(), (1, 2))
    assert metrics.right == [(1, 2), (1, 1)] and metrics.failed == {"raised": 1}
    assert eval_metrics(rollouts, Task()).pass_at[1].mean == 0.75
    assert metrics.pass_at[1].mean == 0.5 and metrics.pass_at[2].mean == 1.0  # of the prompt that has two
    rollouts[3] = rollout(1, False, "raised", True)
    assert eval_metrics(rollouts, Task()).pass_at[1].mean == 0.5
    rollouts[0].scores.rewards = {"right": 1.0}
    with pytest.raises(UserError, match="are right for one example, but correct for another"):
        eval_metrics(rollouts, Task())


def test_rewards_that_fail_too_often_end_it_with_their_causes(tmp_path, folders):
    class Broken(Early):
        def reward(self, example, completion):
            raise ZeroDivisionError

    with pytest.raises(
        UserError, match=r"more rewards failed than rewards.failure_limit 0.25 allows \(40 raised of 40\)"
    ):
        lockstep.evaluate(eval_config(tmp_path, folders[0]), Broken())
    assert not (tmp_path / "eval/eval.json").exists()
    config = eval_config(tmp_path, folders[0], rewards=RewardConfig(failure_limit=1.0))
    assert lockstep.evaluate(config, Broken()).results[0].metrics.reward is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": ()}, "model is empty"),
        ({"model": ("a", "b", "a")}, "lists one twice"),
        ({"samples_per_prompt": 2, "temperature": 0.0}, "so samples_per_prompt 2 would all be the same"),
        ({"samples_per_prompt": 2, "pass_at": (1, 3)}, "pass_at 3 needs at least 3 samples_per_prompt, not 2"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path, changes, said):
    with pytest.raises(UserError, match=said):
        lockstep.evaluate(replace(eval_config(tmp_path, "x"), **changes), Early())


def test_a_prompt_that_is_no_text_is_named(tmp_path, folders):
    class Broken(Early):
        def examples(self, split):
            yield Example("whole", id="a:1")
            yield Example("half \ud800 of it", id="a:2")

    with pytest.raises(UserError, match="'a:2': a text contains half a surrogate pair after 'half '; fix it"):
        lockstep.evaluate(eval_config(tmp_path, folders[0]), Broken())


def with_a_short_context(folder):
    shape = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(shape | {"max_position_embeddings": 12}))


def with_a_damaged_tokenizer(folder):
    (folder / "byte_tokenizer.json").unlink()
    (folder / "tokenizer.json").write_text("{")


def with_a_score_head(folder):
    shape = replace(read_config(folder), score_head=True, tie_embeddings=False)
    shutil.rmtree(folder)
    lockstep.save_model(build_model(shape, "float32", seed=0), folder)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (with_a_damaged_tokenizer, "broken/tokenizer.json"),
        (with_a_score_head, "broken: is a reward model"),
        (with_a_short_context, "exceed the context of 12"),
    ],
)
def test_a_model_that_cannot_be_asked_is_refused_before_any_is_sampled(tmp_path, folders, damage, said):
    broken = tmp_path / "broken"
    shutil.copytree(folders[0], broken)
    damage(broken)
    config = eval_config(tmp_path, folders[0], broken, overwrite=False, output=str(tmp_path / "deep/er/eval"))
    with pytest.raises(UserError, match=said):
        lockstep.evaluate(config, Early())
    assert not (tmp_path / "deep").exists()


class Interrupting(Early):
    """The models are asked one example each, of which the last one is interrupted."""

    def __init__(self, models):
        super().__init__()
        self.left = models

    def reward(self, example, completion):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return super().reward(example, completion)


def test_an_interruption_names_the_completions_that_are_kept(tmp_path, folders):
    config = eval_config(tmp_path, *folders[:2], examples=1)
    with pytest.raises(KeyboardInterrupt, match=r"completions_1.jsonl kept, without eval.json"):
        lockstep.evaluate(config, Interrupting(2))
    assert len(lines_of(tmp_path / "eval" / "completions_1.jsonl")) == 1
    assert [path.name for path in (tmp_path / "eval").iterdir()] == ["completions_1.jsonl"]


def test_an_interruption_before_the_first_model_is_done_keeps_nothing_but_folders_that_were_there(tmp_path, folders):
    (tmp_path / "eval").mkdir()
    for output in ("eval", "deep/er/eval"):
        config = eval_config(tmp_path, folders[0], output=str(tmp_path / output), examples=1)
        with pytest.raises(KeyboardInterrupt, match="no model was finished, so nothing is kept"):
            lockstep.evaluate(config, Interrupting(1))
    assert not list((tmp_path / "eval").iterdir()) and not (tmp_path / "deep").exists()


def test_a_comparison_says_how_many_prompts_it_left_out_and_never_that_a_p_value_is_0():
    def printed(*right):
        """Of two models, of which each prompt has so many right answers of so many that count."""
        results = [
            ModelResult(
                "m", EvalMetrics(len(own), len(own), own, {}, None, {}, {}, 0.0, 0.0), Path("m"), [1.0] * len(own)
            )
            for own in right
        ]
        return as_text(Evaluation(EvalConfig(), "task", results, [compare(*results, 1)], Path("eval.json")))

    said = "better on 1 of 2 prompts, worse on 0 (1 left out because rewards failed); p"
    assert said in printed([(1, 1), (0, 1), (0, 0)], [(1, 1), (1, 1), (1, 1)])
    assert "; p < 1e-300 (exact paired randomization test)" in printed([(0, 1)] * 2000, [(1, 1)] * 2000)
