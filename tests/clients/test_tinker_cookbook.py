"""Recipes of tinker-cookbook, unchanged, in an environment of their own, against a server process.

Their `optim/kl_sample_train_v1` and `_v2` compare the log-probability of each sampled token with the trainer's. The
README of their `rl_numerics_check` gives 0.0002 to 0.002 for healthy runs of two models on the service that the client
was made for; here, both are 0.0 at every step.
"""

import json
import statistics

import pytest

from tests.clients.cookbook import MODEL, Cookbook, train_server, write_data, write_model

pytestmark = pytest.mark.slow
EXACT = ("optim/kl_sample_train_v1", "optim/kl_sample_train_v2")
RL = ("loss_fn=importance_sampling", "max_tokens=24", "learning_rate=0.001")


@pytest.fixture(scope="module")
def cookbook(tmp_path_factory):
    home = tmp_path_factory.mktemp("cookbook")
    write_model(home / MODEL)
    write_data(home)
    with train_server(home, home / "states") as url:
        yield Cookbook(home, url)


@pytest.fixture(scope="module")
def taught(cookbook):
    """Metrics of supervised training on boxed sums, and the state that it ends with."""
    options = "batch_size=8", "learning_rate=0.003", "save_every=4", "eval_every=7", "rolling_save_every=1"
    steps = cookbook.run("chat_sl.train", "taught", *options)
    return steps, cookbook.checkpoints("taught")[-1]


def exact(steps):
    return all(step[name] == 0.0 for step in steps for name in EXACT)


def test_the_supervised_loop_learns_and_resumes_with_the_same_numbers(cookbook):
    options = "batch_size=8", "max_steps=6", "save_every=3", "learning_rate=0.003"
    steps = cookbook.run("sl_loop", "sl_loop", *options)
    assert steps[-1]["train_mean_nll"] < 0.8 * steps[0]["train_mean_nll"]
    at_three, end = cookbook.checkpoints("sl_loop")
    assert at_three["batch"] == 3 and end["sampler_path"].startswith("tinker://")
    (cookbook.home / "logs" / "killed").mkdir()
    cookbook.checkpoint_file("killed").write_text(json.dumps(at_three) + "\n")
    resumed = cookbook.run("sl_loop", "killed", *options)
    for name in ("step", "train_mean_nll", "grad_norm", "learning_rate"):
        assert [step[name] for step in resumed] == [step[name] for step in steps[3:]]


def test_chat_training_evaluates_and_saves_as_it_goes(cookbook, taught):
    steps, end = taught
    assert steps[7]["train_mean_nll"] < 0.8 * steps[0]["train_mean_nll"]
    assert steps[7]["test/nll"] < 0.8 * steps[0]["test/nll"]
    saved = [each for each in cookbook.checkpoints("taught") if not each.get("rolling")]
    assert [each["name"] for each in saved] == ["000004", "final"]
    # The states of each step were deleted when there was a newer one.
    states = list((cookbook.home / "states").glob(f"{end['state_path'].split('/')[2].replace(':', '_')}/weights/*"))
    assert {state.name for state in states} == {"000004", "final"}


def test_direct_preference_starts_from_log_two_exactly_and_learns_every_pair(cookbook):
    options = "batch_size=8", "max_steps=4", "learning_rate=0.001"
    first, *others = cookbook.run("preference.dpo.train", "dpo", *options)
    assert first["margin"] == first["chosen_reward"] == first["rejected_reward"] == 0.0
    assert first["dpo_loss"] == pytest.approx(0.693147, abs=1e-6)  # the loss of no margin, a float32 mean of logs
    assert others[-1]["accuracy"] == 1.0 and others[-1]["margin"] > others[0]["margin"] > 0


def test_the_reinforcement_loop_earns_more_and_has_no_loss_without_a_formula(cookbook):
    options = "batch_size=4", "group_size=16", "max_tokens=24", "learning_rate=0.001"
    refused = cookbook.start("rl_loop", "refused", *options)
    assert refused.returncode and "stable_reinforce has no public formula" in refused.stdout + refused.stderr
    steps = cookbook.run("rl_loop", "rl_loop", *options, "loss_fn=importance_sampling", "max_steps=12")
    rewards = [step["reward/total"] for step in steps]
    # 256 samples each: 0.09 and 0.24 where they were seen, with a standard error of 0.02.
    assert statistics.mean(rewards[-4:]) > statistics.mean(rewards[:4])
    sequences = cookbook.run("rl_loop", "gspo", *options, "loss_fn=gspo", "max_steps=3")
    assert any(step.get("grad_norm", 0.0) > 0 for step in sequences)


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo"])
def test_sampler_and_trainer_agree_in_math_from_a_saved_state_whatever_the_loss(cookbook, taught, loss):
    start = f"load_checkpoint_path={taught[1]['state_path']}"
    sizes = "groups_per_batch=4", "group_size=8", "max_steps=3", "eval_every=2", "env=gsm8k", "compute_post_kl=True"
    steps = cookbook.run("math_rl.train", f"math_{loss}", *RL[1:], *sizes, start, f"loss_fn={loss}")
    assert len(steps) == 3 and exact(steps)
    assert steps[0]["kl_pre_post_v2"] > 0 and any(step["env/all/correct"] > 0 for step in steps)


def test_sampler_and_trainer_agree_in_arithmetic_and_differ_off_policy_alone(cookbook):
    sizes = "groups_per_batch=4", "group_size=4", "max_steps=4"
    steps = cookbook.run("math_rl.train", "arithmetic", *RL, *sizes)
    assert exact(steps) and any(step["grad_norm"] > 0 for step in steps)
    halves = [f"stream_minibatch_config.{option}" for option in ("groups_per_batch=4", "num_minibatches=2")]
    streamed = cookbook.run("math_rl.train", "streamed", *RL, *sizes, *halves)
    assert exact(streamed[:1])
    late = cookbook.run("math_rl.train", "late", *RL, *sizes, "max_steps_off_policy=2")
    assert late and not exact(late)


def test_sampler_and_trainer_agree_over_the_turns_of_a_guessing_game(cookbook):
    sizes = "batch_size=1", "group_size=4", "max_steps=2", "max_tokens=24", "eval_every=0", "learning_rate=0.001"
    steps = cookbook.run("multiplayer_rl.guess_number.train", "guess", *sizes)
    assert exact(steps) and all(step["env/all/turns_per_episode"] > 5 for step in steps)
    assert any(step["grad_norm"] > 0 for step in steps)


def test_a_player_is_answered_by_the_base_model(cookbook):
    sizes = "batch_size=1", "group_size=2", "num_epochs=1", "max_steps=1", "max_tokens=8", "eval_every=0"
    steps = cookbook.run("multiplayer_rl.twenty_questions.train", "twenty", *sizes)
    assert exact(steps) and steps[0]["env/all/total_turns"] == 40


def test_distillation_from_the_base_has_nothing_to_learn_and_from_another_state_approaches_it(cookbook, taught):
    # The teacher is, by default, of this name.
    sizes = "dataset=deepmath", "group_size=16", "groups_per_batch=8", "max_tokens=24", "lora_rank=32"
    recipe = "distillation.on_policy_distillation"
    steps = cookbook.run(recipe, "same", *sizes, "max_steps=2")
    assert exact(steps) and all(step["teacher_kl"] == step["grad_norm"] == 0.0 for step in steps)
    teacher = f"teacher_checkpoint={taught[1]['sampler_path']}"
    steps = cookbook.run(recipe, "other", *sizes, "max_steps=6", "learning_rate=0.003", teacher)
    distances = [step["teacher_kl"] for step in steps]
    assert exact(steps) and sum(distances[-2:]) < 0.7 * sum(distances[:2])


def test_the_cookbooks_check_of_numerics_finds_no_difference_at_all(cookbook):
    """Their own figures are 0.0002 for a dense model and 0.001 to 0.002 for one with experts."""
    pages = "task.num_pages_min=2", "task.num_pages_max=3", "task.page_chars=300", "task.reward_tolerance=4"
    sizes = "group_size=8", "groups_per_batch=2", "max_steps=3", "max_tokens=64", "learning_rate=0.001"
    renderer = "renderer_name=qwen3_5_disable_thinking"
    steps = cookbook.run("rl_numerics_check.train", "numerics", *sizes, *pages, renderer)
    assert len(steps) == 3 and exact(steps)
    assert any(step["env/all/turns_per_episode"] > 1 for step in steps)
    assert any(step["grad_norm"] > 0 for step in steps)
