"""A run that drafts by earlier completions of its prompts is the run that does not, bit for bit."""

from dataclasses import replace

import pytest

from lockstep.config import ActorsConfig, CheckpointConfig, EngineConfig
from lockstep.generate.drafts import HistoryDraft
from lockstep.observe import read_metrics
from lockstep.rl.reinforce import reinforce
from lockstep.rl.rollouts.recorded import sampled_before
from tests.parallel.launch import launch
from tests.rl.generators.test_colocated import TASK, config_of, outcome, run


@pytest.fixture
def task(tmp_path):
    file = tmp_path / "task.py"
    file.write_text(TASK)
    return file


def drafted(folder):
    steps = read_metrics(folder / "metrics.jsonl")[1:]
    return [m.get("generators/own/tokens_guessed", 0) for m in steps]


@pytest.mark.slow
def test_a_run_of_several_epochs_is_the_same_with_drafts_and_remembers_when_it_is_resumed(
    task, model_folder, tmp_path, monkeypatch
):
    # A few prompts, which each epoch asks again, and whose answers hardly differ: what came before is right.
    settings = dict(steps=4, max_new_tokens=12, temperature=0.02, checkpoint=CheckpointConfig(every=1))
    config = config_of(task, model_folder, tmp_path / "plain", **settings, engine=EngineConfig(draft="none"))
    reinforce(config)
    reinforce(replace(config, output=str(tmp_path / "drafted"), engine=EngineConfig()))
    assert outcome(tmp_path / "drafted") == outcome(tmp_path / "plain")
    assert drafted(tmp_path / "plain") == [0] * 4 and drafted(tmp_path / "drafted")[-1] > 0
    for metrics in read_metrics(tmp_path / "drafted" / "metrics.jsonl"):
        accepted = metrics.get("generators/own/guesses_accepted", 0)
        assert min(1, accepted) <= metrics.get("generators/own/mean_accepted_run", 0) <= accepted

    begun = replace(config, output=str(tmp_path / "resumed"), engine=EngineConfig(), steps=2)
    reinforce(begun)
    recalled, remember = [], HistoryDraft.remember
    monkeypatch.setattr(HistoryDraft, "remember", lambda self, *pair: (recalled.append(pair), remember(self, *pair))[1])
    reinforce(replace(begun, steps=4, resume=True))
    rollouts, expected = (outcome(tmp_path / name)[1] for name in ("resumed", "plain"))
    assert all(rollouts[name] == text for name, text in expected.items() if name.startswith("step_"))
    assert recalled == sampled_before(tmp_path / "resumed", 1 << 22)[: len(recalled)] and len(recalled) > 8


@pytest.mark.slow
def test_generators_of_their_own_draft_too(task, model_folder, tmp_path):
    config = config_of(task, model_folder, tmp_path / "one", steps=3, engine=EngineConfig(draft="none"))
    reinforce(config)
    separate = replace(
        config, output=str(tmp_path / "two"), engine=EngineConfig(draft_tokens=3), resume=True,
        actors=ActorsConfig(generators=1, threads=1), checkpoint=CheckpointConfig(every=1),
    )  # fmt: skip
    launch(1, run, replace(separate, steps=2), seconds=300)
    log, count = tmp_path / "two" / "logs" / "generator_0.log", len(sampled_before(tmp_path / "two", 1 << 22))
    assert "drafts start" not in log.read_text() and count > 0
    launch(1, run, separate, seconds=300)
    assert f"drafts start from {count} completions of {tmp_path / 'two'}" in log.read_text()
    found, expected = (outcome(tmp_path / name) for name in ("two", "one"))
    # The first of its two parts ended with a validation of its own.
    steps = [
        [{k: v for k, v in m.items() if not k.startswith("validation")} for m in each[0]] for each in (found, expected)
    ]
    assert steps[0] == steps[1] and len(steps[0]) == 4
    assert all(found[1][name] == text for name, text in expected[1].items())


def test_what_was_sampled_before_comes_in_the_order_of_steps_and_as_much_of_it_as_is_kept(task, model_folder, tmp_path):
    reinforce(config_of(task, model_folder, tmp_path / "run", steps=3))
    everything = sampled_before(tmp_path / "run", 1 << 22)
    files = sorted((tmp_path / "run" / "rollouts").glob("step_*.jsonl"))
    assert len(files) == 3 and len(everything) == sum(len(f.read_text().splitlines()) for f in files)
    assert sampled_before(tmp_path / "run", 1) == everything[-len(files[-1].read_text().splitlines()) :]
    files[-1].write_text("{")
    assert len(sampled_before(tmp_path / "run", 1)) == len(files[-2].read_text().splitlines())
    assert sampled_before(tmp_path / "nothing", 1) == []
