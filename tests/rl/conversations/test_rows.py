"""Rows of a conversation in advantages, loss, ledger and metrics: an episode counts as one completion would."""

import json
import math
from dataclasses import replace
from itertools import chain

import pytest
import torch

import lockstep.rl as rl
from lockstep.config import ALGORITHMS, RLConfig, TrainConfig
from lockstep.model import build_model, preset
from lockstep.rl.grading.calling import Outcome
from lockstep.rl.rollouts.advantages import assign_advantages
from lockstep.rl.rollouts.ledger import Ledger
from lockstep.rl.rollouts.metrics import rollout_metrics
from lockstep.rl.rollouts.records import Conversation, Scores, episodes_of, write_rollouts
from lockstep.rl.rollouts.rewards import charge_overlong
from lockstep.rl.scoring.parity import Parity
from lockstep.train.packing import pack_scored, target_log_probs
from tests.rl.losses import batches_of, loss_of


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


def test_a_conversations_reward_is_earned_with_the_last_token_of_its_last_row():
    """With λ = 0 an advantage is r + V' − V of its own token, and so tells where the reward and the rows' ends are."""
    algorithm = replace(ALGORITHMS["ppo"], gae_lambda=0.0, normalize_advantages=False, kl_coefficient=0.0)
    rows = as_rows(completions())
    assign_advantages(rows, algorithm)
    for scores in ([row.scores for row in episode] for episode in episodes_of(rows)):
        values = [value for row in scores for value in row.values]
        expected = [after - v for v, after in zip(values, [*values[1:], scores[0].reward])]
        assert [advantage for row in scores for advantage in row.token_advantages] == expected
        assert [value for row in scores for value in row.returns] == [a + v for a, v in zip(expected, values)]
        assert {row.advantage for row in scores} == {math.fsum(expected) / len(expected)}
        assert all(len(row.returns) == len(row.values) for row in scores)


def test_the_entropies_that_a_step_records_are_those_of_the_models_own_tokens():
    model, rows, config = build_model(preset("qwen3:micro", 64), "float32"), as_rows(completions()), RLConfig()
    assign_advantages(rows, ALGORITHMS["grpo"])
    for batch in batches_of(rows, config):
        loss_of(config, compare=True)(model, batch)
    for row in rows:
        alone = pack_scored([row.prompt_ids + row.token_ids], [row.targets()])
        assert row.scores.entropies == target_log_probs(model, alone)[1].tolist()
