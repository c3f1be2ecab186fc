"""A GRPO step's loss and gradient equal those of TRL's own trainer, which runs here, on the same batch."""

import math
import tempfile

import pytest
import torch

from lockstep import build_model, save_model
from lockstep.config import RLConfig, TrainConfig
from lockstep.model import ModelConfig, hugging_face_name
from lockstep.rl import Example
from lockstep.rl.rollouts.packing import packing_metrics, packing_of
from lockstep.rl.rollouts.records import Conversation, Rollout, Scores
from tests.rl.losses import batches_of, loss_of

SHAPE = ModelConfig(
    family="qwen3", vocab_size=16, dim=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, intermediate_size=12,
    tie_embeddings=False, qk_norm="head", max_positions=64,
)  # fmt: skip
PROMPTS = [[1, 2, 3], [1, 2, 3], [4], [4]]
COMPLETIONS = [[5, 6, 7, 8, 0], [9, 0], [10, 11, 12, 13], [14]]
"""The end-of-text token is 0: two of them are truncated."""
ADVANTAGES = [1.0, -1.0, 0.75, -1.5]
OLD = [[-2.7 + 0.9 * math.sin(3 * row + 1.3 * t) for t in range(len(c))] for row, c in enumerate(COMPLETIONS)]
REFERENCE = [[-2.7 + 0.5 * math.cos(2 * row + 0.7 * t) for t in range(len(c))] for row, c in enumerate(COMPLETIONS)]
AVERAGES = {"grpo": "sequence", "bnpo": "token", "dapo": "token", "dr_grpo": "budget"}
"""Loss types of TRL, and what Lockstep calls the average that they take."""
CASES = [("grpo", False), ("bnpo", False), *((kind, True) for kind in AVERAGES)]
"""A loss type, and whether truncated completions are masked."""
BUDGET = 8


def model_of():
    """Weights far from 0, so that ratios are far from 1."""
    model, draw = build_model(SHAPE, dtype="float32"), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            parameter.copy_(1 + 0.15 * noise if "norm" in name else 0.6 * noise)
    return model


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Of each of CASES TRL's loss and gradients, of our model in float64."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    save_model(model_of(), folder := tmp_path_factory.mktemp("model"))
    found = {}
    tokens = Tokenizer(models.WordLevel({str(i): i for i in range(SHAPE.vocab_size)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="0", eos_token="0")
    for kind, masked in CASES:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        with tempfile.TemporaryDirectory() as output:
            arguments = trl.GRPOConfig(
                output_dir=output, loss_type=kind, beta=0.0, epsilon=0.2, epsilon_high=0.28, temperature=0.9,
                num_generations=2, per_device_train_batch_size=4, use_cpu=True, bf16=False, report_to="none",
                max_completion_length=BUDGET,
                # TRL can weigh the KL term by the ratio; Lockstep takes the plain estimator.
                use_bias_correction_kl=False,
            )  # fmt: skip
            trainer = trl.GRPOTrainer(
                model, lambda completions, **_: [0.0] * len(completions), args=arguments,
                train_dataset=Dataset.from_dict({"prompt": ["1", "2"] * 4}), processing_class=tokenizer,
            )  # fmt: skip
            # With a coefficient from the start it would load a reference model by name; the batch holds its values.
            trainer.beta = 0.1
            trainer.current_gradient_accumulation_steps = 1
            trainer.model.train()
            loss = trainer._compute_loss(trainer.model, padded(masked))
            trainer.model.zero_grad()
            loss.backward()
        found[kind, masked] = float(loss.detach()), {n: p.grad for n, p in trainer.model.named_parameters()}
    return found


def padded(masked):
    """TRL's batch: prompts padded on the left, completions on the right."""
    before, after = max(map(len, PROMPTS)), max(map(len, COMPLETIONS))

    def right(rows, fill):
        return torch.tensor([[*row, *[fill] * (after - len(row))] for row in rows])

    mask = right([[int(not masked or c[-1] == 0)] * len(c) for c in COMPLETIONS], 0)
    return {
        "prompt_ids": torch.tensor([[0] * (before - len(p)) + p for p in PROMPTS]),
        "prompt_mask": torch.tensor([[0] * (before - len(p)) + [1] * len(p) for p in PROMPTS]),
        "completion_ids": right(COMPLETIONS, 0),
        "completion_mask": mask,
        "advantages": torch.tensor(ADVANTAGES),
        "old_per_token_logps": right(OLD, 0.0),
        "ref_per_token_logps": right(REFERENCE, 0.0),
        "num_items_in_batch": mask.sum(),
    }


@pytest.mark.parametrize("tokens_per_microbatch", [1000, 5])
@pytest.mark.parametrize(("kind", "masked"), CASES)
def test_loss_and_gradient_of_a_step_are_those_of_trl(theirs, kind, masked, tokens_per_microbatch):
    config = RLConfig(
        model="none", loss_average=AVERAGES[kind], mask_truncated_completions=masked, max_new_tokens=BUDGET,
        temperature=0.9, clip_low=0.2, clip_high=0.28, kl_coefficient=0.1,
        train=TrainConfig(tokens_per_microbatch=tokens_per_microbatch),
    )  # fmt: skip
    rollouts = []
    for row, (prompt, tokens, advantage) in enumerate(zip(PROMPTS, COMPLETIONS, ADVANTAGES)):
        scores = Scores(advantage=advantage, reference_logprobs=REFERENCE[row])
        reason = "stop" if tokens[-1] == 0 else "length"
        rollouts.append(Rollout(Example("p"), row // 2, prompt, tokens, OLD[row], reason, "", 0, scores=scores))
    model, step, loss = model_of(), loss_of(config), 0.0
    batches = batches_of(rollouts, config)
    for batch in batches:
        part = step(model, batch)
        part.backward()
        loss += float(part.detach())
    assert len(batches) == (1 if tokens_per_microbatch == 1000 else 3)
    assert 0.1 < step.metrics()["policy/clip_fraction"] < 0.9, "some tokens are clipped, others not"
    assert packing_metrics(batches, packing_of(config)).get("rollout/masked_tokens") == (5 if masked else None)
    expected, gradients = theirs[kind, masked]
    # TRL's model is in float64, ours in float32.
    assert loss == pytest.approx(expected, rel=1e-6)
    ours = {hugging_face_name(name, model.config): parameter.grad for name, parameter in model.named_parameters()}
    assert ours.keys() == gradients.keys()
    for name, gradient in ours.items():
        assert (gradient - gradients[name]).norm() < 1e-5 * gradients[name].norm() and gradient.any(), name


def test_a_step_of_truncated_completions_alone_moves_nothing():
    for average in ("token", "sequence", "budget"):
        config = RLConfig(model="none", loss_average=average, mask_truncated_completions=True)
        rollout = Rollout(Example("p"), 0, [1, 2], [5, 6], [-2.0, -2.0], "length", "", 0, scores=Scores(advantage=1.0))
        (batch,) = batches_of([rollout], config)
        model, step = model_of(), loss_of(config)
        step(model, batch).backward()
        assert all(not parameter.grad.any() for parameter in model.parameters())
        assert all(math.isfinite(value) for value in step.metrics().values())


def test_a_conversation_is_truncated_if_its_last_reply_is():
    rollouts = [
        Rollout(
            Example("p"), 0, [1], [5, 6], [-2.0, -2.0], reason, "", 0, episode=episode,
            conversation=Conversation([], None, False, 2, 0, {}), scores=Scores(advantage=1.0),
        )
        for episode, reasons in enumerate((("length", "stop"), ("stop", "length")))
        for reason in reasons
    ]  # fmt: skip
    config = RLConfig(model="none", loss_average="token", mask_truncated_completions=True)
    weights = {id(r): batch.weights for batch in batches_of(rollouts, config, budget=1) for r in batch.rollouts}
    assert [weights[id(r)].tolist() for r in rollouts] == [[0.25, 0.25], [0.25, 0.25], [0.0, 0.0], [0.0, 0.0]]
