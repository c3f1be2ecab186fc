"""Loss and gradient of TRL's own GRPOTrainer on a small batch.

Weights and the old policy's and the reference's log-probabilities are formulas that both sides compute.
"""

import math
import tempfile

import torch

SHAPE = {"vocab_size": 16, "dim": 8, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 4, "intermediate": 12}
PROMPTS = [[1, 2, 3], [1, 2, 3], [4], [4]]
COMPLETIONS = [[5, 6, 7, 8, 0], [9, 0], [10, 11, 12, 13], [14]]
ADVANTAGES = [1.0, -1.0, 0.75, -1.5]
SETTINGS = {"temperature": 0.9, "clip_low": 0.2, "clip_high": 0.28, "kl_coefficient": 0.1}
AVERAGES = {"grpo": "sequence", "bnpo": "token", "dapo": "token", "dr_grpo": "budget"}
"""Loss types of TRL, and what Lockstep calls the average that they take."""
CASES = [("grpo", False), ("bnpo", False), *((kind, True) for kind in AVERAGES)]
"""A loss type, and whether truncated completions are masked: those that do not end with the end-of-text token."""
BUDGET = 8


def weight(name, shape):
    """A parameter's values by its Hugging Face name: around 0, those of norms around 1."""
    start = sum(name.encode())
    center, scale = (1.0, 0.2) if "norm" in name else (0.0, 0.8)
    return _formula(shape, lambda i: center + scale * math.sin(start + 1.7 * i))


def direction(name, shape):
    """What a gradient is multiplied with, so that one number stands for all of it."""
    return _formula(shape, lambda i: math.cos(sum(name.encode()) + 0.9 * i * i))


def old_log_prob(row, position):
    return -2.7 + 0.9 * math.sin(3 * row + 1.3 * position)


def reference_log_prob(row, position):
    return -2.7 + 0.5 * math.cos(2 * row + 0.7 * position)


def in_figures(name, gradient):
    return [float(gradient.double().norm()), float((gradient.double() * direction(name, gradient.shape)).sum())]


def _formula(shape, value):
    return torch.tensor([value(i) for i in range(math.prod(shape))], dtype=torch.float64).reshape(tuple(shape))


def losses_and_gradients():
    """Of each of CASES the loss, and of each parameter's gradient two figures."""
    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    found = {}
    tokens = Tokenizer(models.WordLevel({str(i): i for i in range(SHAPE["vocab_size"])}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="0", eos_token="0")
    for kind, masked in CASES:
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=SHAPE["vocab_size"], hidden_size=SHAPE["dim"], num_hidden_layers=SHAPE["layers"],
                num_attention_heads=SHAPE["heads"], num_key_value_heads=SHAPE["kv_heads"],
                head_dim=SHAPE["head_dim"], intermediate_size=SHAPE["intermediate"], tie_word_embeddings=False,
                rms_norm_eps=1e-6, rope_theta=1e6,
            )
        ).double()  # fmt: skip
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weight(name, parameter.shape))
        with tempfile.TemporaryDirectory() as folder:
            arguments = trl.GRPOConfig(
                output_dir=folder, loss_type=kind, beta=0.0, epsilon=SETTINGS["clip_low"],
                epsilon_high=SETTINGS["clip_high"], temperature=SETTINGS["temperature"], num_generations=2,
                per_device_train_batch_size=4, use_cpu=True, bf16=False, report_to="none", max_completion_length=BUDGET,
                # TRL can weigh the KL term by the ratio; Lockstep takes the plain estimator.
                use_bias_correction_kl=False,
            )  # fmt: skip
            trainer = trl.GRPOTrainer(
                model, lambda completions, **_: [0.0] * len(completions), args=arguments,
                train_dataset=Dataset.from_dict({"prompt": ["1", "2"] * 4}), processing_class=tokenizer,
            )  # fmt: skip
            # With a coefficient from the start it would load a reference model by name; the batch holds its values.
            trainer.beta = SETTINGS["kl_coefficient"]
            trainer.current_gradient_accumulation_steps = 1
            trainer.model.train()
            loss = trainer._compute_loss(trainer.model, _padded(masked))
            trainer.model.zero_grad()
            loss.backward()
        gradients = {name: in_figures(name, p.grad) for name, p in trainer.model.named_parameters()}
        found[kind, masked] = {"loss": float(loss.detach()), "gradients": gradients}
    return found


def _padded(masked):
    """TRL's batch: prompts padded on the left, completions on the right; with `mask_truncated_completions` if masked,
    which it applies when it makes the batch."""
    before, after = max(map(len, PROMPTS)), max(map(len, COMPLETIONS))

    def right(rows, fill):
        return torch.tensor([[*row, *[fill] * (after - len(row))] for row in rows])

    def values(log_prob):
        return right([[log_prob(r, t) for t in range(len(c))] for r, c in enumerate(COMPLETIONS)], 0.0)

    mask = right([[int(not masked or c[-1] == 0)] * len(c) for c in COMPLETIONS], 0)
    return {
        "prompt_ids": torch.tensor([[0] * (before - len(p)) + p for p in PROMPTS]),
        "prompt_mask": torch.tensor([[0] * (before - len(p)) + [1] * len(p) for p in PROMPTS]),
        "completion_ids": right(COMPLETIONS, 0),
        "completion_mask": mask,
        "advantages": torch.tensor(ADVANTAGES),
        "old_per_token_logps": values(old_log_prob),
        "ref_per_token_logps": values(reference_log_prob),
        "num_items_in_batch": mask.sum(),
    }
