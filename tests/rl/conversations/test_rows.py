"""Rows of a conversation in advantages, loss, ledger and metrics: an episode counts as one completion would."""

import json
from dataclasses import replace
from itertools import chain

import pytest
import torch

import lockstep.rl as rl
from lockstep.config import ALGORITHMS, RLConfig, TrainConfig
from lockstep.rl.grading.calling import Outcome
from lockstep.rl.rollouts.advantages import assign_advantages
from lockstep.rl.rollouts.ledger import Ledger
from lockstep.rl.rollouts.metrics import rollout_metrics
from lockstep.rl.rollouts.records import Conversation, Scores, episodes_of, write_rollouts
from lockstep.rl.rollouts.rewards import charge_overlong
from lockstep.rl.scoring.parity import Parity
from tests.rl.losses import batches_of


def completions():
    """Two groups of three completions, of one prompt each."""
    made = []
    for number in range(6):
        tokens = [20 + number + index for index in range(3 + number)]
        made.append(
            rl.Rollout(
                rl.Example(f"p{number // 3}"), number // 3, [1, 2, 3], tokens, [-0.1 * t for t in tokens], "stop",
                completion="x", version=0,
                scores=Scores(
                    rewards={"reward": float(number * number)}, reward=float(number * number),
                    reference_logprobs=[-0.2 * t + number for t in tokens],
                    teacher_logprobs=[-0.3 * t for t in tokens], values=[0.01 * t * t - number for t in tokens],
                ),
            )
        )  # fmt: skip
    return made


def as_rows(rollouts):
    """Each as a conversation of two rows: the first two tokens of the model, then the rest after the environment's."""
    rows = []
    for number, whole in enumerate(rollouts):
        scores = whole.scores
        conversation = Conversation([], Outcome(scores.rewards), False, 2, environment_seconds=0.25)
        for part in (slice(0, 2), slice(2, None)):
            tokens = whole.token_ids[part]
            rows.append(
                replace(
                    whole, prompt_ids=[1, 9] if part.start else [1, 2, 3], token_ids=[tokens[0], 7, 8, *tokens[1:]],
                    sampled=[True, False, False] + [True] * len(tokens[1:]), logprobs=whole.logprobs[part],
                    scores=replace(
                        scores, reference_logprobs=scores.reference_logprobs[part],
                        teacher_logprobs=scores.teacher_logprobs[part], values=scores.values[part],
                        rewards=dict(scores.rewards),
                    ),
                    episode=number % 3, conversation=conversation,
                )
            )  # fmt: skip
    return rows


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("kl", [0.0, 0.3])
def test_an_episode_has_the_advantages_and_weights_of_one_completion(name, kl):
    algorithm = replace(ALGORITHMS[name], kl_coefficient=kl)
    config = RLConfig(algorithm=name, max_new_tokens=10, kl_coefficient=kl, train=TrainConfig(tokens_per_microbatch=40))
    whole, rows = completions(), as_rows(completions())
    for rollouts in (whole, rows):
        assign_advantages(rollouts, algorithm)
    assert len(episodes_of(rows)) == 6 and len(episodes_of(whole)) == 6
    if algorithm.advantage != "teacher":
        first, second, expected = ([r.scores.advantage for r in some] for some in (rows[::2], rows[1::2], whole))
        assert first == second == expected
    got = [[a for r in episode for a in r.advantages_of_tokens()] for episode in episodes_of(rows)]
    assert got == [r.advantages_of_tokens() for r in whole]
    fields = ("weights", "old_log_probs", "advantages", "reference_log_probs", "old_values", "returns")
    fields = fields if algorithm.advantage == "gae" else fields[:-1]
    given, expected = of_episodes(rows, config, fields), of_episodes(whole, config, fields)
    assert given == expected, "what the environment said is no target"


def of_episodes(rollouts, config, fields):
    """Of each episode, its targets and what the loss has of each, wherever its rows were packed."""
    found = {}
    for batch in batches_of(rollouts, config):
        lengths = [r.num_sampled for r in batch.rollouts]
        columns = [getattr(batch, field).split(lengths) for field in fields] + [batch.row.targets.split(lengths)]
        for rollout, *own in zip(batch.rollouts, *columns):
            found[id(rollout)] = [column.tolist() for column in own]
    assert len(found) == len(rollouts)
    of_rows = [[found[id(rollout)] for rollout in episode] for episode in episodes_of(rollouts)]
    return [[list(chain.from_iterable(column)) for column in zip(*own)] for own in of_rows]


def test_a_target_is_predicted_by_the_token_before_it():
    (batch,) = batches_of(as_rows(completions())[:2], RLConfig(max_new_tokens=10))
    assert batch.row.tokens.tolist()[:7] == [1, 2, 3, 20, 7, 8, 1]
    assert batch.row.tokens[batch.row.predictors].tolist()[:2] == [3, 8] and batch.row.targets.tolist()[:2] == [20, 21]


def test_a_difference_is_located_in_its_row():
    rows, parity = as_rows(completions())[:2], Parity()
    own = torch.tensor([x for r in rows for x in r.logprobs])
    other = own.clone()
    other[3 - 1] += 1
    parity.compare(own, other, rows)
    assert "token 22 at position 2 after 'p0'" in parity.first
    assert parity.sequence == (rows[1].prompt_ids + rows[1].token_ids, 2)


def test_an_episode_counts_once_in_metrics_and_ledger():
    rows, whole = as_rows(completions()), completions()
    for rollout in rows[:4]:
        rollout.scores.failure, rollout.scores.counts = "raised", False
    for rollout in whole[:2]:
        rollout.scores.failure, rollout.scores.counts = "raised", False
    metrics, expected = rollout_metrics(rows), rollout_metrics(whole)
    own = {
        "rollout/turns_mean": 2.0,
        "rollout/tool_calls_mean": 0.0,
        "rollout/rows_mean": 2.0,
        "rollout/limit_reached": 0.0,
    }
    own |= {"rollout/environment_tokens": 24, "rollout/prompt_tokens": 30, "rollout/environment_seconds": 1.5}
    assert metrics == expected | own
    ledger = Ledger(2)
    ledger.add(rows, [0, 1])
    ledger.drop_failed()
    assert {r.group for r in ledger.trained} == {1}, "one conversation is no group, though it has two rows"
    assert ledger.metrics(ledger.trained)["rollout/completions_trained"] == 3


def test_the_longest_reply_is_charged_for(tmp_path):
    rows = as_rows(completions())
    assert [r.longest_reply() for r in rows[:4]] == [1, 1, 1, 1] and rows[-1].longest_reply() == 5
    charge_overlong(rows, 6, 0.5)
    assert {r.scores.rewards["overlong"] for r in rows[-2:]} == {-2 / 3} and rows[0].scores.rewards["overlong"] == 0.0
    write_rollouts(tmp_path / "r.jsonl", rows)
    line = json.loads((tmp_path / "r.jsonl").read_text().splitlines()[1])
    assert (line["episode"], line["sampled"], line["turns"], line["messages"]) == (0, [1, 0, 0], 2, [])
