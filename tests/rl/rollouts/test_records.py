"""The rollouts' file: every value as it was, and never half of it."""

import json

import pytest

import lockstep.rl as rl
from lockstep.rl.rollouts.records import Scores, write_rollouts


def _rollout(**changes):
    values = dict(
        example=rl.Example("3+5=", "8"), group=2, prompt_ids=[51, 43], token_ids=[56, 10], logprobs=[-0.1, -1e-7],
        finish_reason="stop", completion="8\n", version=7,
        scores=Scores({"correct": 1.0, "format": 0.0}, reward=1.0, advantage=-0.5),
    )  # fmt: skip
    return rl.Rollout(**(values | changes))


def test_a_line_holds_what_is_known_about_a_rollout(tmp_path):
    path = tmp_path / "step.jsonl"
    bits = [-1.17549435e-38, -88.72283935546875]
    write_rollouts(path, [_rollout(), _rollout(completion="é\u2028\ud800\n", finish_reason="length", logprobs=bits)])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0] == {
        "prompt": "3+5=", "completion": "8\n", "answer": "8", "rewards": {"correct": 1.0, "format": 0.0},
        "reward": 1.0, "advantage": -0.5, "finish_reason": "stop", "group": 2, "version": 7, "prompt_ids": [51, 43],
        "token_ids": [56, 10], "log_probs": [-0.1, -1e-7],
    }  # fmt: skip
    assert lines[1]["completion"] == "é\u2028\ud800\n", "line separators and lone surrogates come back too"
    assert lines[1]["log_probs"] == bits


def test_a_failed_write_leaves_the_older_file_whole(tmp_path):
    path = tmp_path / "step.jsonl"
    write_rollouts(path, [_rollout()])
    before = path.read_bytes()

    broken = _rollout()
    broken.scores.rewards = object()  # which JSON cannot say, after the first line is already written
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_rollouts(path, [_rollout(), broken])
    assert path.read_bytes() == before
