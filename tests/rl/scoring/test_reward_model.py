"""A reward model's score as a reward of a run: what it scores, what it is added to, and ranks that agree."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import lockstep
from lockstep import load_model
from lockstep.checkpoint import folder_if_model
from lockstep.cli import main
from lockstep.config import CheckpointConfig, EvalConfig, ParallelConfig, RewardModelConfig, RLConfig, TrainConfig
from lockstep.data import ByteTokenizer, load_tokenizer
from lockstep.data.chat import load_chat_template
from lockstep.errors import UserError
from lockstep.rl import Environment, Example
from lockstep.rl.conversations.rendering import Rendering
from lockstep.rl.reinforce import reinforce
from lockstep.rl.rollouts.eval_metrics import eval_metrics
from lockstep.rl.rollouts.records import Conversation, Rollout, Scores
from lockstep.rl.scoring.forward import ForwardPasses
from lockstep.rl.scoring.reward_model import RewardModel, RewardModelScorer
from lockstep.train.packing import pack_scored, target_scores
from lockstep.train.reward_model import train_reward_model
from tests.parallel.launch import launch
from tests.rl.small_runs import lines_of, rollouts_of, small_config, write_model

WORDS = ("stone", "river", "cloud", "apple", "paper", "glass")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


class Words(Environment):
    has_rewards = False

    def examples(self, split):
        for word in WORDS if split == "train" else ("light", "music"):
            yield Example(f"{word}:")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A policy, and a reward model that has learnt to like even bytes: of two answers that with more of them."""
    path = tmp_path_factory.mktemp("models")
    policy = write_model(path / "policy")
    pairs = [
        {"prompt": f"{w}:", "chosen": "bdfhj"[i:] + "xz", "rejected": "acegi"[i:] + "wy"}
        for w in WORDS
        for i in range(4)
    ]
    (path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    run = train_reward_model(
        RewardModelConfig(
            output=str(path / "reward"), model=str(policy), data=str(path / "pairs.jsonl"), dtype="float32", steps=12,
            tokens_per_step=256, sequence_length=64, train=TrainConfig(learning_rate=3e-3, warmup_steps=0),
        )
    )  # fmt: skip
    return policy, Path(folder_if_model(str(run)))


def _config(path, folders, **changes):
    train = TrainConfig(learning_rate=3e-3, warmup_steps=0, tokens_per_microbatch=128)
    options = dict(steps=3, prompts_per_step=4, max_new_tokens=6, validation_every=3, reward_model=str(folders[1]))
    return small_config(path, folders[0], **(options | dict(train=train, checkpoint=CheckpointConfig()) | changes))


def _scores_alone(folder, texts):
    model = load_model(folder, dtype="float32")
    with torch.no_grad():
        return [target_scores(model, pack_scored([[*t, 0]], [[len(t)]])).item() for t in texts]


def _is_scored_alone(lines, folder):
    """Whether each reward is the score of its text alone: in a batch that shares prompts it has the same bits."""
    tokenizer = load_tokenizer(folder)
    texts = [[*tokenizer.encode(r["prompt"] + r["completion"]), tokenizer.eos_id] for r in lines]
    return [r["rewards"]["reward_model"] for r in lines] == _scores_alone(folder, texts)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, folders):
    """A run of two steps."""
    return reinforce(_config(tmp_path_factory.mktemp("whole") / "run", folders, steps=2), Words())


@pytest.mark.slow
def test_a_policy_learns_what_the_reward_model_likes(tmp_path, folders):
    config = _config(
        tmp_path / "run", folders, steps=8, reward_model_weight=0.5, prompts_per_step=6, samples_per_prompt=16
    )
    config.train.learning_rate, config.train.schedule = 3e-2, "constant"
    run = reinforce(config, Words())
    metrics = lines_of(run / "metrics.jsonl")
    assert metrics[-1]["reward/mean"] > metrics[1]["reward/mean"] + 1
    assert metrics[0]["validation/reward"] == pytest.approx(metrics[0]["validation/reward_model"] / 2)
    assert all(m.get("parity/tokens_different", 0) == 0 for m in metrics)
    assert [r["reward"] for r in rollouts_of(run, 1)] == [
        r["rewards"]["reward_model"] * 0.5 for r in rollouts_of(run, 1)
    ]


def test_every_score_is_that_of_its_text_alone(whole, folders):
    assert _is_scored_alone(rollouts_of(whole, 1), folders[1])


def test_groups_are_dropped_by_the_total_with_the_score(tmp_path, folders):
    # All own rewards are equal: without the score every group would be dropped.
    run = reinforce(_config(tmp_path / "run", folders, steps=1, algorithm="dapo"), Words())
    metrics = lines_of(run / "metrics.jsonl")[1]
    assert metrics["reward/mean"] != 0 and len(rollouts_of(run, 1)) == 16
    assert not any(r.get("dropped") for r in rollouts_of(run, 1))


@pytest.mark.parametrize(
    "parallel",
    [pytest.param(ParallelConfig(data_shard=2), marks=pytest.mark.slow), ParallelConfig(tensor=2)],
    ids=["fsdp", "tensor"],
)
def test_ranks_give_each_text_its_score(tmp_path, folders, parallel):
    launch(2, _on_a_rank, _config(tmp_path / "two", folders, steps=1, parallel=parallel))
    assert _is_scored_alone(rollouts_of(tmp_path / "two", 1), folders[1])


def _on_a_rank(config):
    reinforce(config, Words())


def _rollout(prompt, completion, group=0, conversation=None, **scores):
    sample = Example(prompt), group, [1], [2], [0.0], "stop", completion, 0
    return Rollout(*sample, conversation=conversation, scores=Scores(**scores))


def _reward_model(folder, template=None):
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return RewardModel(load_model(folder, dtype="float32"), load_tokenizer(folder), load_chat_template(folder))


def test_texts_are_those_of_training(tmp_path, folders):
    folder = tmp_path / "model"
    shutil.copytree(folders[1], folder)
    tokenizer = ByteTokenizer()
    plain, chat = _reward_model(folder), _reward_model(folder, TEMPLATE)
    end = [tokenizer.eos_id]
    one = _rollout("ab", "cd")
    assert plain.tokens(one, is_chat=True) == tokenizer.encode("abcd") + end
    assert chat.tokens(one, is_chat=False) == tokenizer.encode("abcd") + end
    assert chat.tokens(one, is_chat=True) == tokenizer.encode("<u>ab<a>cd") + end
    asked = [{"role": "s", "content": "x"}, {"role": "u", "content": "ab"}]
    assert chat.tokens(_rollout(asked, "cd"), is_chat=True) == tokenizer.encode("<s>x<u>ab<a>cd") + end
    assert plain.tokens(_rollout([{"role": "user", "content": "ab"}], "cd"), True) == tokenizer.encode("abcd") + end
    with pytest.raises(UserError, match="has no chat template, so it cannot read conversations"):
        plain.tokens(_rollout(asked, "cd"), True)
    # A policy cannot say a special token of the reward model by its name.
    (name,) = [n for n in tokenizer.special_tokens() if tokenizer.encode(n) == end]
    assert plain.tokens(_rollout("ab", f"c{name}d"), True) == tokenizer.encode("abcd") + end
    # Nor by one that is left when another is taken out, nor by one that the prompt has begun.
    nested, half = f"c{name[:4]}{name}{name[4:]}d", len(name) // 2
    assert plain.tokens(_rollout("ab", nested), True) == tokenizer.encode("abcd") + end
    begun = "a" + name[:half]
    assert plain.tokens(_rollout(begun, name[half:] + "b"), True) == tokenizer.encode(begun + "b") + end
    said = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": f"b{name}"},
        {"role": "tool", "content": "c"},
    ]
    held = _rollout("a", "b", conversation=Conversation(said))
    assert chat.tokens(held, True)[: len("<u>a<a>b<t>c")] == tokenizer.encode("<u>a<a>b<t>c")
    assert plain.tokens(_rollout("ab", ""), False) == tokenizer.encode("ab") + end
    assert plain.tokens(_rollout(name, ""), False) == end  # as of a text that is begun with it: nothing is predicted
    with pytest.raises(UserError, match="neither a prompt nor a completion"):
        plain.tokens(_rollout("", ""), False)
    with pytest.raises(UserError, match="has no chat template, so it cannot read conversations"):
        plain.tokens(held, True)
    with pytest.raises(
        UserError, match="prompt and completion are 101 tokens for the reward model, whose context is 64"
    ):
        plain.tokens(_rollout("a" * 90, "b" * 10), False)


def test_failed_rewards_stay_without_and_right_answers_are_the_environments_own(folders):
    class Right(Environment):
        def knows_correct(self, rewards):
            return True

        def is_correct(self, rewards):
            assert "reward_model" not in rewards
            return rewards["reward"] > 0

    rollouts = [
        _rollout("ab", "c", rewards={"reward": 1.0}, reward=1.0),
        _rollout("ab", "d", rewards={}, failure="raised", counts=False),
        _rollout("ab", "", rewards={"reward": 0.0}),
        _rollout("x", "d", group=1, rewards={"reward": 1.0}, reward=1.0),
    ]
    forward = ForwardPasses(RLConfig().train.tokens_per_microbatch)
    scorer = RewardModelScorer(_reward_model(folders[1]), Rendering(ByteTokenizer()), 2.0, forward)
    scorer.score(rollouts)
    assert rollouts[1].scores.rewards == {} and rollouts[1].scores.reward == 0.0
    expected = _scores_alone(
        folders[1], [[*ByteTokenizer().encode(t), ByteTokenizer().eos_id] for t in ("abc", "ab", "xd")]
    )
    found = [rollouts[i] for i in (0, 2, 3)]
    assert [r.scores.rewards["reward_model"] for r in found] == expected
    assert [r.scores.reward for r in found] == [own + 2 * score for own, score in zip((1.0, 0.0, 1.0), expected)]
    # A failure that counts as 0 has a score too: it is not better than answers whose scores are negative.
    zero = _rollout("ab", "d", rewards={}, failure="raised")
    scorer.score([zero])
    assert zero.scores.reward == 2 * zero.scores.rewards["reward_model"] != 0
    assert eval_metrics(rollouts, Right()).pass_at[1].mean == pytest.approx(0.75)
    with pytest.raises(UserError, match="has a reward named reward_model"):
        scorer.score([_rollout("a", "b", rewards={"reward_model": 1.0})])
    broken = _reward_model(folders[1])
    with torch.no_grad():
        broken.model.score.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="score of example 'a' is nan"):
        RewardModelScorer(broken, Rendering(ByteTokenizer()), 2.0, forward).score([_rollout("a", "b")])


def test_prompts_from_a_file_are_rewarded_by_the_model_alone(tmp_path, folders, capsys):
    lines = [{"prompt": f"{w}:", "chosen": "a"} for w in WORDS] + [
        {"prompt": [{"role": "user", "content": "light:"}]}
    ] * 6
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["rl", "--model", str(folders[0]), "--environment", "prompts", "--data", str(data), "--steps", "1"]
    command += ["--max-new-tokens", "4", "--prompts-per-step", "2", "--samples-per-prompt", "2", "--dtype", "float32"]
    assert main([*command, "--output", str(tmp_path / "none")]) == 2
    assert "has no rewards of its own; give --reward-model" in capsys.readouterr().err
    assert main([*command, "--output", str(tmp_path / "none"), "--reward-model", str(folders[0])]) == 2
    assert "is a language model without a score head" in capsys.readouterr().err
    assert main([*command, "--output", str(tmp_path / "run"), "--reward-model", str(folders[1])]) == 0
    assert all(list(r["rewards"]) == ["reward_model"] for r in rollouts_of(tmp_path / "run", 1))
    for bad, message in (
        ([1], "`prompt` is a list, not a string"),
        (3 * [{"role": "user"}], "has no text as its content"),
        ({}, "an object, not a string"),
    ):
        data.write_text("".join(json.dumps({"prompt": bad}) + "\n" for _ in range(10)))
        assert main([*command, "--output", str(tmp_path / "bad"), "--reward-model", str(folders[1])]) == 2
        assert message in capsys.readouterr().err


def test_a_resumed_run_has_the_same_bits(tmp_path, whole, folders):
    config = _config(tmp_path / "stopped", folders, steps=1)
    reinforce(config, Words())
    reinforce(replace(config, steps=2, resume=True), Words())
    assert rollouts_of(tmp_path / "stopped", 2) == rollouts_of(whole, 2)


def test_eval_has_the_metrics_of_the_runs_validation(tmp_path, whole, folders):
    last = lines_of(whole / "metrics.jsonl")[-1]
    config = EvalConfig(
        model=(str(whole),), reward_model=str(folders[1]), examples=2, max_new_tokens=6, output=str(tmp_path / "eval")
    )
    (result,) = lockstep.evaluate(config, Words()).results
    assert result.metrics.reward.mean == last["validation/reward"]
    assert result.metrics.rewards["reward_model"].mean == last["validation/reward_model"]
    with pytest.raises(UserError, match="has no rewards of its own; give --reward-model"):
        lockstep.evaluate(replace(config, reward_model="", overwrite=True), Words())
