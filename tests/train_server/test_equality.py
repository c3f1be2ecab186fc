"""Training through the API has the bits of Lockstep's own runs, and what a request is packed with changes none."""

from contextlib import ExitStack
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tinker import types

from lockstep import score
from lockstep.checkpoint import model_folder as newest_folder
from lockstep.config import CheckpointConfig, EngineConfig, LoraConfig, RLConfig, SFTConfig, TrainConfig
from lockstep.data import ConversationEncoder
from lockstep.model.adapted_rows import AdaptedRows, adapted
from lockstep.observe import read_metrics
from lockstep.parallel import World
from lockstep.rl.environments.digit_sum import DigitSum
from lockstep.rl.reinforce import reinforce
from lockstep.rl.rollouts.packing import packing_of, policy_batches
from lockstep.rl.rollouts.recorded import read_lines, rollout_of
from lockstep.train.rows import run_rows
from lockstep.train.schedule import make_schedule
from lockstep.train.setup import chat_template, chat_tokenizer
from lockstep.train.sft import conversation_sources, finetune
from lockstep.train_server import trained_model
from lockstep.train_server.batches import log_probs_of
from tests.train.runs import write_lines
from tests.train_server.conftest import datum, log_probs, lora_client, running

DTYPES = ["float32", "bfloat16"]
TRAIN = TrainConfig(
    learning_rate=1e-2, warmup_steps=2, schedule="cosine", beta1=0.8, beta2=0.97, epsilon=1e-6, weight_decay=0.1,
    max_grad_norm=0.5, tokens_per_microbatch=128,
)  # fmt: skip


@pytest.fixture(scope="module")
def servers(folder, tmp_path_factory):
    """servers(dtype): a running server, and a client of it."""
    with ExitStack() as opened:

        @cache
        def of(dtype):
            server = opened.enter_context(running(folder, tmp_path_factory.mktemp("states"), dtype=dtype))
            return server, opened.enter_context(server.client())

        yield of


def adam(config, step, updates):
    """What the API is to be sent for a run's step, from 0."""
    return types.AdamParams(
        learning_rate=make_schedule(config, updates)(step), beta1=config.beta1, beta2=config.beta2,
        eps=config.epsilon, weight_decay=config.weight_decay, grad_clip_norm=config.max_grad_norm,
    )  # fmt: skip


def assert_equal_states(server, training, run, updates):
    """The adapter, its float32 masters and the moments are those of the run's last checkpoint; gradients were clipped.

    updates: what the API has answered for each step.
    """
    norms = [metrics["grad_norm"] for metrics in read_metrics(run / "metrics.jsonl") if "grad_norm" in metrics]
    assert [update.metrics["grad_norm"] for update in updates] == norms and max(norms) > TRAIN.max_grad_norm
    path = training.save_state("last").result().path
    _, ours = server.service.states.find(path)
    theirs = newest_folder(run)
    for file, of_run in (("adapter_model", "adapter_model"), ("optimizer", "trainer/optimizer")):
        found, expected = load_file(ours / f"{file}.safetensors"), load_file(theirs / f"{of_run}.safetensors")
        assert expected.keys() <= found.keys()
        different = [name for name, value in expected.items() if not torch.equal(found[name], value)]
        assert not different, f"{file}: {len(different)} of {len(expected)} tensors differ, such as {different[0]}"
    assert any(name.startswith("exp_avg.") and bool(value.any()) for name, value in expected.items()), "no gradients"


def sft_config(tmp_path, folder, dtype, **changes):
    lines = [{"prompt": f"Say {i}.", "completion": f" {i}" * (1 + i % 4)} for i in range(40)]
    return SFTConfig(
        output=str(tmp_path / "run"), model=str(folder), data=write_lines(tmp_path / "data.jsonl", lines), dtype=dtype,
        steps=3, tokens_per_step=384, sequence_length=64, lora=LoraConfig(rank=4, alpha=32.0), seed=3, train=TRAIN,
        checkpoint=CheckpointConfig(last_model_only=False), **changes,
    )  # fmt: skip


def loader_of(config):
    sources = conversation_sources(config, config.data)
    tokenizer = chat_tokenizer(config)
    encoder = ConversationEncoder(tokenizer, chat_template(config, tokenizer, sources, []), config.turns, {})
    return run_rows(config, sources, [], encoder, World(torch.device("cpu")))[0]


def data_of_rows(rows, targets):
    """A run's rows as a client's data: the sequences one after the other, padding among them. targets: of the step."""
    for row in rows:
        assert row.shared is None
        for tokens, scored in zip(*(np.split(each, np.cumsum(row.lengths)[:-1]) for each in (row.tokens, row.scored))):
            # The last token's row predicts nothing: a target that weighs nothing stands there.
            inputs = {
                "target_tokens": [*tokens[1:].tolist(), 0],
                "weights": [*np.where(scored[1:], np.float32(1.0 / targets), 0.0).tolist(), 0.0],
            }
            yield types.Datum(model_input=types.ModelInput.from_ints(tokens.tolist()), loss_fn_inputs=inputs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fine_tuning_through_the_api_has_the_weights_and_moments_of_a_run(servers, folder, tmp_path, dtype):
    server, client = servers(dtype)
    config = sft_config(tmp_path, folder, dtype)
    run = finetune(config)
    training = lora_client(client, rank=4, seed=3, head=False)
    loader, updates = loader_of(config), []
    for step in range(config.steps):
        batch = loader.next()
        assert len(batch.microbatches) == 3
        for rows in batch.microbatches:
            training.forward_backward([*data_of_rows(rows, batch.targets)], "cross_entropy")
        updates.append(training.optim_step(adam(config.train, step, config.steps)).result())
    assert_equal_states(server, training, run, updates)


class EvenSums(DigitSum):
    """Prompts of which some differ only in their last token, with rewards that random weights earn for half of them."""

    def examples(self, split):
        for example in super().examples(split):
            if example.id[0] in "12" and len(example.id) == 3:
                yield replace(example, prompt=example.id)

    def reward(self, example, completion):
        return {"even": float(sum(completion.encode()) % 2 == 0 and example.id[2] in "02468")}


def rl_config(tmp_path, folder, dtype, **changes):
    return RLConfig(
        output=str(tmp_path / "run"), model=str(folder), dtype=dtype, steps=2, prompts_per_step=6,
        samples_per_prompt=4, max_new_tokens=6, validation_examples=0, seed=3, lora=LoraConfig(rank=4, alpha=32.0),
        engine=EngineConfig(max_sequences=32, cache_tokens=4096), checkpoint=CheckpointConfig(last_model_only=False),
        **changes,
    )  # fmt: skip


def data_of_batch(batch):
    """A run's micro-batch as a client's data, with each token's weight in the advantage."""
    advantages = iter((batch.weights * batch.advantages).tolist())
    for rollout in batch.rollouts:
        tokens, nothing = rollout.prompt_ids + rollout.token_ids, [0.0] * (len(rollout.prompt_ids) - 1)
        yield datum(
            tokens,
            logprobs=nothing + rollout.logprobs,
            advantages=nothing + [next(advantages) for _ in rollout.token_ids],
        )


def samples(sampler, config, step, prompts):
    """The API's samples of a step, from 1, with the seeds of the run."""
    seeds = np.random.default_rng([config.seed, step]).integers(2**62, size=len(prompts)).tolist()
    for prompt, seed in zip(prompts, seeds):
        params = types.SamplingParams(max_tokens=config.max_new_tokens, seed=seed, stop=list(EvenSums.stop))
        yield sampler.sample(types.ModelInput.from_ints(prompt), config.samples_per_prompt, params)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("loss", "budget"), [("importance_sampling", 8192), ("ppo", 64)], ids=["one-microbatch", "several"]
)
def test_reinforcement_through_the_api_has_the_samples_weights_and_moments_of_a_run(
    servers, folder, tmp_path, monkeypatch, dtype, loss, budget
):
    server, client = servers(dtype)
    computed = []
    monkeypatch.setattr(
        trained_model, "log_probs_of", lambda model, batch: computed.append(batch.row) or log_probs_of(model, batch)
    )
    config = rl_config(tmp_path, folder, dtype, train=replace(TRAIN, tokens_per_microbatch=budget))
    run = reinforce(config, EvenSums())
    training = lora_client(client, rank=4, seed=3, head=False)
    without_advantage, updates = 0, []
    for step in range(config.steps):
        lines = read_lines(run / f"rollouts/step_{step + 1:08}.jsonl")
        rollouts = [rollout_of(line) for line in lines]
        for rollout, line in zip(rollouts, lines):
            rollout.scores.advantage = line["advantage"]
            without_advantage += line["advantage"] == 0
        sampler = training.save_weights_and_get_sampling_client().result()
        prompts = [rollout.prompt_ids for rollout in rollouts[:: config.samples_per_prompt]]
        answers = [future.result() for future in [*samples(sampler, config, step + 1, prompts)]]
        found = [(each.tokens, each.logprobs) for answer in answers for each in answer.sequences]
        assert found == [(rollout.token_ids, rollout.logprobs) for rollout in rollouts]
        batches = policy_batches(rollouts, packing_of(config))
        assert (len(batches) > 1) == (budget < 8192)
        for batch in batches:
            training.forward_backward([*data_of_batch(batch)], loss)
        updates.append(training.optim_step(adam(config.train, step, config.steps)).result())
        assert [row.tokens.tolist() for row in computed] == [batch.row.tokens.tolist() for batch in batches]
        computed.clear()
    assert 0 < without_advantage < len(lines) * config.steps
    assert_equal_states(server, training, run, updates)


def custom(logprobs, advantages):
    ratio = torch.exp(logprobs - logprobs.detach())
    return -(ratio * advantages).sum(), {"custom/mean:mean": logprobs.mean(), "custom/count:sum": advantages.sum()}


TEXTS = [b"3+4=7", b"3+4=12", b"3+4=?", b"the quick brown fox jumps over the lazy dog", b"one two three", b"ab", b"3+4"]
GIVEN = {"logprobs": -5.0, "advantages": 0.5}
LOSSES = {
    "cross_entropy": {"weights": 0.25}, "importance_sampling": GIVEN, "ppo": GIVEN, "cispo": GIVEN, "dro": GIVEN,
    "gspo": GIVEN | {"sequence_ratio_mask": 1.0}, "custom": {"advantages": 0.3},
}  # fmt: skip
SAMPLED = types.SamplingParams(max_tokens=40, seed=1)


def of_samples(text, **inputs):
    """A datum whose inputs are zero for the first three tokens."""
    size = len(text) - 1
    return datum(text, **{name: [0.0] * min(2, size) + [value] * max(size - 2, 0) for name, value in inputs.items()})


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_computed_together_changes_no_answer(servers, dtype, monkeypatch):
    server, client = servers(dtype)
    training, other = lora_client(client, seed=5), lora_client(client, seed=6)
    for each in (training, other):
        each.forward_backward([datum(text, weights=1.0) for text in TEXTS], "cross_entropy")
        each.optim_step(types.AdamParams(learning_rate=0.03)).result()
    sampler = other.save_weights_and_get_sampling_client().result()
    handle = client.create_custom_loss(custom, {"logprobs": 1, "advantages": 1}).result()
    with adapted([AdaptedRows(server.service.model(training.model_id).trained.adapter)]):
        alone = [scores.tolist() for scores in score(server.service.base, [[*text] for text in TEXTS])]

    def answers(tokens_per_microbatch):
        monkeypatch.setattr(server.service.config, "tokens_per_microbatch", tokens_per_microbatch)
        of_others = [sampler.sample(types.ModelInput.from_ints([*text]), 1, SAMPLED) for text in TEXTS[:3]]
        of_others += [other.forward_backward([datum(TEXTS[3], weights=1.0)] * 3, "cross_entropy")]
        futures = []
        for name, inputs in LOSSES.items():
            data = [of_samples(text, **inputs) for text in TEXTS]
            if name == "custom":
                futures.append(training.forward_backward_custom(data, handle))
            else:
                futures.append(training.forward_backward(data, name))
        outputs = [future.result() for future in futures]
        assert [future.result() for future in of_others]
        return [log_probs(output) for output in outputs], [output.metrics for output in outputs]

    whole = answers(8192)
    assert whole[0] == [alone] * len(LOSSES)
    for budget in (1, 33):
        assert answers(budget) == whole, budget
