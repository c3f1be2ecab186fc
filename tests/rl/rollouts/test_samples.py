"""The completions of a step that the trackers get."""

from lockstep.config import ObserveConfig
from lockstep.observe.readable import readable_rollouts
from lockstep.rl.environments.protocol import Example
from lockstep.rl.reinforce import reinforce
from lockstep.rl.rollouts.records import Conversation, Rollout, Scores
from lockstep.rl.rollouts.run_records import LONGEST, SAMPLES, samples_of
from tests.rl.small_runs import EvenBytes, small_config


def _rollout(group=0, completion="text", reward=0.0, **more):
    scores = Scores(reward=reward, advantage=-reward)
    return Rollout(Example(f"prompt {group}"), group, [1], [2], [0.0], "stop", completion, 0, scores=scores, **more)


def test_a_sample_is_spread_over_all_prompts_and_has_what_each_earned():
    rollouts = [_rollout(group, f"{group}.{place}", group + place / 4) for group in range(4) for place in range(4)]
    table = samples_of(7, rollouts)
    assert table.columns == ("step", "prompt", "completion", "reward", "advantage")
    assert table.rows == [
        (7, f"prompt {group}", f"{group}.{place}", group + place / 4, -group - place / 4)
        for group in range(4)
        for place in (0, 2)
    ]
    assert len(table.rows) == SAMPLES and len(samples_of(7, rollouts[:3]).rows) == 3
    held_out = samples_of(7, rollouts[:1], advantages=False)
    assert held_out.columns == table.columns[:-1] and held_out.rows == [(7, "prompt 0", "0.0", 0.0)]


def test_a_conversation_is_one_sample_with_all_of_its_messages():
    held = Conversation(
        [
            {"role": "user", "content": "what is 2 + 2?"},
            {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]},
            {"role": "assistant", "content": "4"},
        ]
    )
    rows = [_rollout(completion="4", episode=0, conversation=held) for _ in range(3)]
    ((_, _, text, _, _),) = samples_of(1, rows).rows
    assert text == 'user: what is 2 + 2?\nassistant: {"tool_calls": [{"name": "add"}]}\nassistant: 4'


def test_what_no_tracker_can_store_is_shortened_and_replaced():
    (row,) = samples_of(1, [_rollout(completion="\ud800" + "x" * 2 * LONGEST)]).rows
    assert row[2] == "?" + "x" * (LONGEST - 1) + "…"


def test_a_run_sends_the_samples_of_the_steps_that_are_due_and_of_every_validation(tmp_path, folders):
    observe = ObserveConfig(tensorboard=True, samples_every=2)
    config = small_config(
        tmp_path / "run", folders[0], steps=3, validation_examples=2, validation_every=2, observe=observe
    )
    run = reinforce(config, EvenBytes())
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    found = {name: events.Tensors(f"{name}/text_summary") for name in ("rollout/samples", "validation/samples")}
    steps = {name: [event.step for event in of_name] for name, of_name in found.items()}
    assert steps == {"rollout/samples": [1, 2], "validation/samples": [0, 2, 3]}
    first = found["rollout/samples"][0].tensor_proto.string_val[0].decode().splitlines()
    rollouts = readable_rollouts(run / "rollouts" / "step_00000001.jsonl")
    assert first[0] == "|step|prompt|completion|reward|advantage|"
    assert first[2].split("|")[-3:-1] == [f"{rollouts[0]['reward']:.6g}", f"{rollouts[0]['advantage']:.6g}"]
