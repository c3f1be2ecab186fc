"""Loss and gradient of a batch of pairs equal those of TRL's own trainers, which run here."""

import shutil
from dataclasses import replace

import pytest
import torch

from lockstep import build_model, load_model, save_model
from lockstep.config import DPOConfig
from lockstep.data import load_tokenizer
from lockstep.data.preferences import AnswerTokens, Example
from lockstep.model import hugging_face_name, read_config
from lockstep.parallel import World
from lockstep.train.dpo import preference_losses
from lockstep.train.preference_losses import bradley_terry_loss, kto_divergence
from lockstep.train.preferences import answer_log_probs, end_scores, preference_batch, with_end_target

PAIRS = [("3+4=", "7", "34 or so"), ("Say it twice: ", "it it", "it"), ("a", "b c d e", "f g")]
REFERENCE = [(-20.0, -61.0), (-33.5, -38.0), (-40.0, -42.0)]


def _examples(tokenizer):
    examples = []
    for number, ((prompt, *answers), reference) in enumerate(zip(PAIRS, REFERENCE)):
        start = len(tokenizer.encode(prompt))
        whole = [[*tokenizer.encode(prompt), *tokenizer.encode(answer), tokenizer.eos_id] for answer in answers]
        sequences = tuple(AnswerTokens(tokens, list(range(start, len(tokens)))) for tokens in whole)
        examples.append(Example(sequences, number != 1, reference))
    return examples


def _ours(folder, examples, loss, which="both", divergence=0.0, **settings):
    model = load_model(folder, dtype="float32")
    batch = preference_batch(examples, World(torch.device("cpu")), True, which)
    assert which != "both" or sum(batch.row.left_out) > 0
    log_probs, _ = answer_log_probs(model, batch)
    config = DPOConfig(loss=loss, **settings)
    found = preference_losses(config, log_probs, batch, divergence).mean()
    found.backward()
    return found.item(), {hugging_face_name(n, model.config): p.grad for n, p in model.named_parameters()}


def _padded(examples, sides=(0, 1), pad=0):
    """TRL's batch: all chosen sequences, then all rejected ones, padded on the right."""
    sequences = [example.sequences[side] for side in sides for example in examples]
    most = max(len(s.tokens) for s in sequences)
    ids = torch.tensor([s.tokens + [pad] * (most - len(s.tokens)) for s in sequences])
    mask = torch.tensor([[int(i in s.scored) for i in range(most)] for s in sequences])
    attention = torch.tensor([[1] * len(s.tokens) + [0] * (most - len(s.tokens)) for s in sequences])
    return {"input_ids": ids, "attention_mask": attention, "completion_mask": mask}


def _trainer(folder, tmp_path, rows, kind="DPO", **settings):
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

    model_class = AutoModelForSequenceClassification if kind == "Reward" else AutoModelForCausalLM
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    arguments = getattr(trl, f"{kind}Config")(
        output_dir=str(tmp_path / "trl"), use_cpu=True, bf16=False, report_to="none", disable_dropout=True,
        gradient_checkpointing=False, **({} if kind == "Reward" else {"precompute_ref_log_probs": True}), **settings,
    )  # fmt: skip
    model, rows = model_class.from_pretrained(folder, dtype=torch.float32), Dataset.from_list(rows)
    trainer = getattr(trl, f"{kind}Trainer")(model, args=arguments, train_dataset=rows, processing_class=tokenizer)
    trainer.model.train()
    return trainer


def _agree(loss, gradients, trainer, batch):
    """With TRL's loss of its batch, and the gradients of that."""
    theirs = trainer.compute_loss(trainer.model, batch)
    trainer.model.zero_grad()
    theirs.backward()
    assert loss == pytest.approx(theirs.item(), rel=1e-5)
    expected = {name: p.grad for name, p in trainer.model.named_parameters()}
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        # Both sides sum in float32, in different orders.
        assert torch.dist(gradient, expected[name]) <= 1e-4 * expected[name].norm(), name


@pytest.mark.parametrize(
    ("loss", "theirs", "settings", "pairs"),
    [
        ("dpo", "sigmoid", {}, 3),
        # TRL smooths the labels of "aot" only, which sorts a batch's log-ratios and is otherwise DPO.
        ("dpo", "aot", {"label_smoothing": 0.1}, 1),
        ("ipo", "ipo", {}, 3),
    ],
    ids=["dpo", "smoothed", "ipo"],
)
def test_loss_and_gradient_are_those_of_trl(model_folder, tmp_path, loss, theirs, settings, pairs):
    examples = _examples(load_tokenizer(model_folder))[:pairs]
    rows = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in PAIRS[:pairs]]
    trainer = _trainer(model_folder, tmp_path, rows, beta=0.2, loss_type=theirs, **settings)
    reference = torch.tensor(REFERENCE[:pairs])
    known = {"ref_chosen_logps": reference[:, 0], "ref_rejected_logps": reference[:, 1]}
    _agree(*_ours(model_folder, examples, loss, beta=0.2, **settings), trainer, _padded(examples) | known)


def test_kto_and_its_divergence_are_those_of_trl(model_folder, tmp_path):
    examples = _examples(load_tokenizer(model_folder))
    rows = [{"prompt": p, "completion": c, "label": e.desirable} for (p, c, _), e in zip(PAIRS, examples)]
    settings = dict(beta=0.2, desirable_weight=1.5, undesirable_weight=0.5)
    trainer = _trainer(model_folder, tmp_path, rows, "KTO", per_device_train_batch_size=2, **settings)
    reference = torch.tensor(REFERENCE)
    batch = _padded(examples, [0]) | {f"KL_{name}": value for name, value in _padded(examples, [1]).items()}
    batch |= {"label": torch.tensor([e.desirable for e in examples])}
    batch |= {"ref_logps": reference[:, 0], "ref_KL_logps": reference[:, 1]}
    mixed = preference_batch(examples, World(torch.device("cpu")), True, "second")
    with torch.no_grad():
        log_probs, _ = answer_log_probs(load_model(model_folder, dtype="float32"), mixed)
    divergence = kto_divergence(float((log_probs - reference[:, 1]).sum()), len(examples))
    assert divergence > 0
    _agree(*_ours(model_folder, examples, "kto", "first", divergence, **settings), trainer, batch)


def test_simpo_is_that_of_trl(model_folder):
    from trl.experimental.cpo import CPOTrainer

    examples = _examples(load_tokenizer(model_folder))
    batch = preference_batch(examples, World(torch.device("cpu")), True, "both")
    log_probs = torch.tensor([-4.0, -6.0, -30.5, -20.0, -2.25, -2.5], requires_grad=True)
    chosen, rejected = (log_probs / torch.tensor(batch.lengths)).view(-1, 2).T
    trainer = CPOTrainer.__new__(CPOTrainer)
    trainer.__dict__.update(beta=2.0, simpo_gamma=0.8, alpha=0.0, label_smoothing=0.1, loss_type="simpo")
    trainer.__dict__["accelerator"] = type("Accelerator", (), {"device": torch.device("cpu")})
    theirs = trainer.cpo_loss(chosen, rejected)[0]
    config = DPOConfig(loss="simpo", beta=2.0, simpo_margin=0.8, label_smoothing=0.1)
    ours = preference_losses(config, log_probs, batch)
    # Both in float32, which divides and multiplies here in another order.
    assert torch.allclose(ours, theirs, rtol=1e-5)
    gradients = [torch.autograd.grad(losses.sum(), log_probs, retain_graph=True)[0] for losses in (ours, theirs)]
    assert torch.allclose(*gradients, rtol=1e-5)


@pytest.mark.parametrize("centering", [0.0, 0.5])
def test_a_reward_models_loss_and_gradient_are_those_of_trl(model_folder, tmp_path, centering):
    shape = replace(read_config(model_folder), score_head=True, tie_embeddings=False)
    save_model(build_model(shape, "float32", seed=1), folder := tmp_path / "model")
    shutil.copy(model_folder / "tokenizer.json", folder)
    model, examples = load_model(folder, dtype="float32"), _examples(load_tokenizer(model_folder))
    batch = preference_batch([with_end_target(e) for e in examples], World(torch.device("cpu")), True)
    assert sum(batch.row.left_out) > 0
    chosen, rejected = end_scores(model, batch)[0].view(-1, 2).T
    loss = (bradley_terry_loss(chosen, rejected) + centering * (chosen + rejected).square()).mean()
    loss.backward()
    gradients = {hugging_face_name(n, model.config): p.grad for n, p in model.named_parameters()}
    rows = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in PAIRS]
    trainer = _trainer(folder, tmp_path, rows, "Reward", center_rewards_coefficient=centering or None)
    trainer.model.config.pad_token_id = 300  # in none of the texts
    padded = _padded(examples, pad=300)
    padded.pop("completion_mask")
    _agree(loss.item(), gradients, trainer, padded)
    assert "score.weight" in gradients
