"""Alarms: each with a series of metrics that raises it, and one that just does not."""

import json

import pytest

from lockstep.config import ALARMS, AlarmConfig, CheckpointConfig, RLConfig, validate
from lockstep.errors import RunStopped, UserError
from lockstep.rl.alarms import Alarms, alarms
from lockstep.rl.environments.digit_sum import DigitSum
from lockstep.rl.reinforce import reinforce
from tests.rl.small_runs import lines_of, small_config

CALM = {
    "loss": 0.1, "reward/mean": 0.5, "reward/std": 0.4, "reward/groups_without_spread": 0.2, "policy/entropy": 2.0,
    "policy/ratio_min": 0.5, "policy/ratio_max": 2.0, "policy/kl": 0.01, "rollout/tokens_mean": 20.0,
    "rollout/truncated": 0.25,
}  # fmt: skip
CONFIG = AlarmConfig(window=3, no_signal=4)


def _series(steps=12, validations=None, **changes):
    """`steps` calm ones, of which `changes` names the last values of a metric; validations by step."""
    history = [{"step": step, **CALM} for step in range(1, steps + 1)]
    for name, values in changes.items():
        for metrics, value in zip(history[-len(values) :], values):
            metrics[name.replace("__", "/")] = value
    for step, value in (validations or {}).items():
        if step == 0:
            history.insert(0, {"step": 0, "validation/reward": value})
        else:
            next(m for m in history if m["step"] == step)["validation/reward"] = value
    return history


def _watched(series):
    """What a run raises at the last step, which of the others has kept what it needs."""
    *before, last = series
    return list(Alarms(CONFIG, before).observe(last["step"], last))


RISING = {"reward__mean": [0.5] * 3 + [0.6] * 6 + [0.7] * 3}


@pytest.mark.parametrize(
    ("name", "raising", "calm"),
    [
        ("no_signal", {"reward__groups_without_spread": [1.0] * 4}, {"reward__groups_without_spread": [1.0] * 3}),
        ("no_signal", {"reward__groups_without_spread": [1.0] * 4},
         {"reward__groups_without_spread": [1.0] * 4 + [0.9]}),
        ("reward_gap", {"validations": {0: 0.55, 6: 0.5, 12: 0.4}, **RISING},
         {"validations": {0: 0.55, 6: 0.6, 12: 0.6}, **RISING}),
        ("reward_gap", {"validations": {0: 0.3, 3: 0.55, 12: 0.4}, **RISING},
         {"validations": {0: 0.55, 12: 0.4}}),
        ("reward_gap", {"validations": {0: 0.55, 12: 0.54}, "reward__std": [0.4] * 9 + [0.1] * 3, **RISING},
         {"validations": {0: 0.55, 12: 0.54}, "reward__std": [0.5] * 3, **RISING}),
        ("reward_gap", {"validations": {0: 0.55, 12: 0.54}, "reward__std": [0.1, 0.1, 0.5], **RISING},
         {"validations": {0: 0.55, 12: 0.54}, "reward__std": [1.2, 0.1, 0.1], **RISING}),
        ("reward_gap", {"validations": {6: 0.55, 12: 0.4}, **RISING},
         {"validations": {6: 0.55, 12: 0.4}, "reward__mean": [0.0] * 3 + [0.7] * 9}),
        ("reward_gap", {"validations": {0: 0.55, 10: 0.4}, **RISING},
         {"validations": {0: 0.55, 5: 0.4}, **RISING}),
        ("length", {"rollout__tokens_mean": [40.0, 41.0, 42.0]}, {"rollout__tokens_mean": [39.0, 40.0, 41.0]}),
        ("entropy", {"policy__entropy": [0.2, 0.2, 0.1]}, {"policy__entropy": [0.3, 0.25, 0.1]}),
        ("ratio", {"policy__ratio_max": [10.5]}, {"policy__ratio_max": [10.5, 9.5]}),
        ("ratio", {"policy__ratio_min": [0.09]}, {"policy__ratio_min": [0.11]}),
        ("ratio", {"policy__ratio_max": [float("inf")]}, {"policy__ratio_max": [None]}),
        ("ratio", {"off_policy__ratio_min": [0.5], "off_policy__ratio_max": [11.0]},
         {"off_policy__ratio_min": [0.5], "off_policy__ratio_max": [2.0]}),
        ("kl", {"policy__kl": [1.1]}, {"policy__kl": [0.9]}),
        ("kl", {"policy__kl": [-1.1]}, {"policy__kl": [None]}),
    ],
)  # fmt: skip
def test_an_alarm_names_its_cause_where_its_limit_is_passed_and_only_there(name, raising, calm):
    raised = alarms(_series(**raising), CONFIG)
    assert list(raised) == [name] and raised[name].endswith(ALARMS[name])
    assert alarms(_series(**calm), CONFIG) == {}
    assert _watched(_series(**raising)) == [f"alarm/{name}"] and _watched(_series(**calm)) == []
    off = AlarmConfig(window=3, no_signal=4)
    setattr(off, name, type(getattr(off, name))(0))
    assert alarms(_series(**raising), off) == {}


def test_a_charge_for_length_is_no_gap_between_training_and_validation():
    """The reward without it, which is what validations measure, stays where it was."""
    charged = {"reward__overlong__mean": [-0.4] * 9 + [-0.2] * 3, "reward__mean": [0.1] * 9 + [0.3] * 3}
    assert alarms(_series(validations={0: 0.55, 12: 0.45}, **charged), CONFIG) == {}
    assert _watched(_series(validations={0: 0.55, 12: 0.45}, **charged)) == []
    del charged["reward__overlong__mean"]
    assert list(alarms(_series(validations={0: 0.55, 12: 0.45}, **charged), CONFIG)) == ["reward_gap"]


def test_a_short_run_and_one_that_learns_from_a_teacher_raise_nothing():
    series = _series(rollout__tokens_mean=[40.0, 41.0, 42.0], rollout__truncated=[0.75] * 3)
    assert "75 % are cut off" in alarms(series, CONFIG)["length"]
    assert alarms([], CONFIG) == alarms(_series(validations={0: 0.5})[:1], CONFIG) == {}
    assert alarms(_series(steps=5, rollout__tokens_mean=[1.0, 1.0, 90.0, 90.0, 90.0]), CONFIG) == {}
    silent = _series(reward__groups_without_spread=[1.0] * 12)
    assert alarms(silent, CONFIG, learns_from_spread_alone=False) == {}


def test_an_alarm_is_logged_once_until_it_is_over_also_by_a_resumed_run(caplog):
    def lengths(*values):
        return [{"step": step, **CALM, "policy/kl": kl} for step, kl in enumerate(values, 1)]

    series = lengths(0.1, 1.5, 1.6, 0.2, 1.7, 1.8)
    watch = Alarms(CONFIG)
    found = [watch.observe(m["step"], m) for m in series]
    assert found == [{}, {"alarm/kl": 1.0}, {"alarm/kl": 1.0}, {}, {"alarm/kl": 1.0}, {"alarm/kl": 1.0}]
    said = [record.message.split(":")[0] for record in caplog.records]
    assert said == ["alarm kl at step 2", "alarm kl at step 5"]
    caplog.clear()
    again = Alarms(CONFIG, json.loads(json.dumps(watch.history[:5])))
    assert again.observe(6, series[5]) == {"alarm/kl": 1.0} and not caplog.records


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stop": ("kl", "rato")}, 'alarms.stop: there is no alarm "rato". Did you mean "ratio"?'),
        ({"stop": ("kl",), "kl": 0.0}, "alarms.stop names kl, but alarms.kl is 0"),
        ({"window": 0}, "alarms.window is 0; it must be above 0"),
    ],
)
def test_settings_that_could_never_be_meant_are_refused(changes, message):
    with pytest.raises(UserError) as error:
        validate(RLConfig(model="m", alarms=AlarmConfig(**changes)))
    assert message in str(error.value)


class Impossible(DigitSum):
    """Sums that no one is told the right answer of."""

    def reward(self, example, completion):
        return {"correct": 0.0}


def test_a_run_whose_rewards_are_all_equal_warns_and_ends_by_setting_also_when_it_is_resumed(tmp_path, folders, caplog):
    changes = dict(environment="digit_sum", prompts_per_step=2, samples_per_prompt=2, max_new_tokens=2, steps=6)
    changes |= dict(checkpoint=CheckpointConfig(every=1, asynchronous=False), alarms=AlarmConfig(no_signal=3))
    run = reinforce(small_config(tmp_path / "run", folders[0], **changes | {"steps": 4}), Impossible())
    said = [r.message for r in caplog.records if r.message.startswith("alarm no_signal at step")]
    assert len(said) == 1 and "step 3: in 3 steps in a row: all completions of each prompt had the same" in said[0]
    metrics = lines_of(run / "metrics.jsonl")
    assert [m.get("alarm/no_signal") for m in metrics] == [None, None, None, 1.0, 1.0]
    assert "no_signal" in (run / "report.html").read_text()

    changes["alarms"] = AlarmConfig(no_signal=3, stop=("no_signal",))
    with pytest.raises(RunStopped, match="step 3: alarm no_signal, which is in alarms.stop: in 3 steps") as ended:
        reinforce(small_config(tmp_path / "stopped", folders[0], **changes), Impossible())
    assert ended.value.exit_code == 1 and (tmp_path / "stopped" / "report.html").is_file()
    assert not (tmp_path / "stopped" / "summary.json").exists()
    with pytest.raises(RunStopped, match="step 4: alarm no_signal"):
        reinforce(small_config(tmp_path / "stopped", folders[0], resume=True, **changes), Impossible())
