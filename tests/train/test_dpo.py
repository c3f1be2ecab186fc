"""`lockstep dpo`: pairs from TRL's columns, the reference's scores, runs that resume, and ranks that agree with one."""

import json
import logging
import math
import os
import shutil
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lockstep import build_model, load_model, save_model, score
from lockstep.checkpoint import model_folder as model_folder_of
from lockstep.cli import main
from lockstep.config import CheckpointConfig, CompileConfig, DataConfig, DPOConfig, ParallelConfig, TrainConfig
from lockstep.data import ByteTokenizer, load_tokenizer
from lockstep.data.chat import load_chat_template
from lockstep.data.conversations import Conversation
from lockstep.data.preferences import MARK, SCORED, PreferenceEncoder
from lockstep.errors import RunStopped, UserError
from lockstep.model import preset
from lockstep.train import dpo
from lockstep.train.dpo import prefer
from tests.parallel.launch import launch
from tests.train.test_sft import MARKED

PAIRS = [
    {"prompt": f"{a}+{b}=", "chosen": f"{a + b}\n", "rejected": f"{a}{b} {'or so ' * (a % 3)}\n"}
    for a in range(1, 5)
    for b in range(2, 5)
]


def _file(tmp_path, lines, name="pairs.jsonl"):
    (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(tmp_path / name)


def _config(tmp_path, folder, name, lines=PAIRS, **changes):
    options = dict(
        output=str(tmp_path / name), model=str(folder), data=_file(tmp_path, lines), dtype="float32", steps=4,
        tokens_per_step=256, sequence_length=64, beta=0.5, checkpoint=CheckpointConfig(every=2),
        train=TrainConfig(learning_rate=1e-3, warmup_steps=0, tokens_per_microbatch=128),
    )  # fmt: skip
    return DPOConfig(**(options | changes))


def _metrics(folder, name="loss"):
    return [json.loads(line)[name] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _encode(folder, line, longest=1000, paired=True, template=None):
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    encoder = PreferenceEncoder(load_tokenizer(folder), load_chat_template(folder), longest, paired)
    (encoded,) = encoder.encode([Conversation("a.jsonl:1", line)])
    return encoded


def test_a_run_starts_at_the_reference_and_learns(tmp_path, model_folder):
    run = prefer(_config(tmp_path, model_folder, "run", steps=6, validation_data=_file(tmp_path, PAIRS, "held.jsonl")))
    losses = _metrics(run)
    # The reference's forward pass had other company, and yet the same bits: every margin is 0.
    assert losses[0] == pytest.approx(math.log(2), rel=1e-7) and losses[-1] < 0.55
    for name in ("rewards/chosen", "rewards/rejected", "rewards/margin", "rewards/accuracy"):
        assert _metrics(run, name)[0] == 0.0
    assert _metrics(run, "rewards/margin")[-1] > 0.3 and _metrics(run, "rewards/accuracy")[-1] > 0.8
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["validation/rewards/accuracy"] > 0.8 and last["validation/loss"] < 0.6


@pytest.mark.parametrize("loss", ["dpo", "ipo", "simpo", "kto"])
def test_a_run_resumes_to_the_same_bits_with_the_reference_that_it_kept(tmp_path, model_folder, loss, monkeypatch):
    lines, sums = PAIRS, []
    if loss == "kto":
        labels = (("chosen", True), ("rejected", False))
        lines = [
            {"prompt": p["prompt"], "completion": p[kind], "label": label} for p in PAIRS for kind, label in labels
        ]

        def unclamped(total, count):
            sums.append(total)
            return total / count

        monkeypatch.setattr("lockstep.train.dpo.kto_divergence", unclamped)
    whole = prefer(_config(tmp_path, model_folder, "whole", lines, loss=loss))
    losses = _metrics(whole)
    assert len(set(losses)) == 4
    assert (whole / "reference.safetensors").is_file() == (loss != "simpo")
    stopped = tmp_path / "stopped"
    shutil.copytree(whole, stopped)
    shutil.rmtree(stopped / "checkpoints" / "step_00000004")
    if loss == "dpo":
        monkeypatch.setattr("lockstep.train.reference_scores._write", None)  # nothing is computed again
    prefer(_config(tmp_path, model_folder, "stopped", lines, loss=loss, resume=True))
    assert _metrics(stopped) == losses
    if loss == "kto":
        assert sums[0] == 0.0 and all(sums[1:])


def test_a_signal_in_a_step_of_kto_waits_for_its_end(tmp_path, model_folder, monkeypatch):
    lines = [{"prompt": p["prompt"], "completion": p["chosen"], "label": True} for p in PAIRS]

    exact, calls = dpo.answer_log_probs, []

    def ended(model, batch):
        calls.append(torch.is_grad_enabled())
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return exact(model, batch)

    # A step of KTO first evaluates its micro-batches without gradients, for the divergence.
    monkeypatch.setattr(dpo, "answer_log_probs", ended)
    config = _config(tmp_path, model_folder, "run", lines, loss="kto", tokens_per_step=512)
    with pytest.raises(RunStopped, match="SIGTERM ended the run after step 1, which is saved"):
        prefer(config)
    assert calls.count(False) == calls.count(True) >= 2


def _flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[-2] ^= 64
    file.write_bytes(content)


def _of_another_type(file):
    with safe_open(file, "pt") as opened:
        described = opened.metadata()
    save_file({name: t.to(torch.int64) for name, t in load_file(file).items()}, file, described)


def _gone(file):
    file.unlink()


@pytest.mark.parametrize("damage", [_flip_a_bit, _of_another_type, _gone])
def test_a_reference_that_was_damaged_is_computed_again(tmp_path, model_folder, damage, caplog):
    config = _config(tmp_path, model_folder, "run", steps=1)
    file = prefer(config) / "reference.safetensors"
    damage(file)
    prefer(replace(config, resume=True, steps=2))
    whole = prefer(replace(config, steps=2, output=str(tmp_path / "whole")))
    assert _metrics(tmp_path / "run") == _metrics(whole)
    found, computed = (
        {name: scores.numpy().tobytes() for name, scores in load_file(folder / file.name).items()}
        for folder in (file.parent, whole)
    )
    assert found == computed
    said = [r.getMessage() for r in caplog.records if "reference.safetensors" in r.getMessage()]
    assert [line.endswith("recomputing it") for line in said] == [True] * (damage is not _gone)


def test_a_reference_that_cannot_be_kept_is_said(tmp_path, model_folder):
    config = _config(tmp_path, model_folder, "run", steps=1)
    file = prefer(config) / "reference.safetensors"
    file.unlink()
    file.mkdir()
    with pytest.raises(UserError, match="reference.safetensors: cannot be written .* move the existing file"):
        prefer(replace(config, resume=True, steps=2))


def test_the_loss_is_that_of_the_scores(tmp_path, model_folder):
    # All pairs once, in one step of two micro-batches, of which the second is empty.
    once = dict(steps=1, loader=DataConfig(packing="whole", repeat=False), tokens_per_step=4096, sequence_length=2048)
    run = prefer(_config(tmp_path, model_folder, "run", loss="ipo", **once))
    assert _metrics(run, "examples") == [len(PAIRS)]
    tokenizer = load_tokenizer(model_folder)
    before = load_model(model_folder, dtype="float32")
    margins = []
    for pair in PAIRS:
        means = []
        for kind in ("chosen", "rejected"):
            prompt = tokenizer.encode(pair["prompt"])
            whole = [*tokenizer.encode(pair["prompt"] + pair[kind]), tokenizer.eos_id]
            (scores,) = score(before, [whole])
            means.append(float(scores[len(prompt) - 1 :].sum()))
        margins.append(means)
    chosen, rejected = np.mean(margins, axis=0)
    assert _metrics(run, "log_probs/chosen")[0] == pytest.approx(chosen, rel=1e-5)
    assert _metrics(run, "log_probs/rejected")[0] == pytest.approx(rejected, rel=1e-5)


def test_the_reference_may_be_another_model(tmp_path, model_folder):
    held_out = _file(tmp_path, PAIRS[:3], "held.jsonl")
    settings = dict(steps=2, validation_data=held_out)
    plain = prefer(_config(tmp_path, model_folder, "plain", **settings))
    shutil.copytree(model_folder, tmp_path / "copy")
    same = prefer(_config(tmp_path, model_folder, "same", reference=str(tmp_path / "copy"), **settings))
    for name in ("loss", "rewards/margin"):
        assert _metrics(same, name) == _metrics(plain, name)
    # A run that begins from trained weights, and is measured from those before.
    further = _config(tmp_path, plain, "further", reference=str(model_folder), **settings)
    prefer(further)
    before, after = (load_model(model_folder_of(at), dtype="float32") for at in (model_folder, plain))
    tokenizer, margins = load_tokenizer(model_folder), []
    for pair in PAIRS[:3]:
        ratios = []
        for kind in ("chosen", "rejected"):
            whole = [*tokenizer.encode(pair["prompt"] + pair[kind]), tokenizer.eos_id]
            scored = slice(len(tokenizer.encode(pair["prompt"])) - 1, None)
            ratios.append(float((score(after, [whole])[0] - score(before, [whole])[0])[scored].sum()))
        margins.append(further.beta * (ratios[0] - ratios[1]))
    still = replace(further, output=str(tmp_path / "still"), train=replace(further.train, learning_rate=1e-12), steps=1)
    # Differences of sums in float32.
    assert _metrics(prefer(still), "validation/rewards/margin")[0] == pytest.approx(np.mean(margins), abs=1e-4)
    assert min(margins) > 0.01
    losses = _metrics(tmp_path / "further")
    prefer(replace(further, steps=3, resume=True))
    assert _metrics(tmp_path / "further")[:2] == losses


def test_a_reference_of_another_vocabulary_is_named(tmp_path, model_folder):
    with pytest.raises(UserError, match="reference none: no such model"):
        prefer(_config(tmp_path, model_folder, "run", reference="none"))
    ByteTokenizer().save(tmp_path / "bytes")
    save_model(build_model(replace(preset("qwen3:micro", 258), num_layers=1)), tmp_path / "bytes")
    with pytest.raises(UserError, match=r"reference .*bytes: its vocabulary is not that of .* \(258 tokens, not 512\)"):
        prefer(_config(tmp_path, model_folder, "run", reference=str(tmp_path / "bytes")))
    with pytest.raises(UserError, match="reference does not work with parallel.pipeline yet"):
        staged = ParallelConfig(pipeline=2)
        prefer(_config(tmp_path, model_folder, "run", reference=str(model_folder), parallel=staged))
    with pytest.raises(UserError, match="loss simpo has none; leave it out"):
        prefer(_config(tmp_path, model_folder, "run", reference=str(model_folder), loss="simpo"))


def test_equal_and_long_pairs_are_named_counted_and_left_out(tmp_path, model_folder, caplog):
    equal, long = {"prompt": "a", "chosen": "b", "rejected": "b"}, {"prompt": "a" * 90, "chosen": "b", "rejected": "c"}
    lines = [*PAIRS, equal, long]
    with caplog.at_level(logging.WARNING, logger="lockstep"):
        run = prefer(_config(tmp_path, model_folder, "run", lines, steps=1))
    assert _metrics(run, "data/equal_pairs") == [1] and _metrics(run, "data/long_pairs") == [1]
    assert "pairs.jsonl:13: its two answers are identical; it is left out" in caplog.text
    assert "pairs.jsonl:14: has " in caplog.text


@pytest.mark.parametrize("command", ["dpo", "reward-model", "kto"])
def test_data_whose_examples_are_all_left_out_say_why(tmp_path, model_folder, capsys, command):
    long = "a" * 90
    lines = [{"prompt": "a", "chosen": "b", "rejected": "b"}] * 3
    lines += [{"prompt": long, "chosen": "b", "rejected": "c"}, {"prompt": "", "chosen": 1}]
    expected = "2 malformed and skipped (--skip-bad-lines), 3 with two identical answers, 1 longer than a row"
    if command == "kto":
        lines = [{"prompt": long, "completion": "b", "label": True}] * 5 + [{"prompt": "a"}]
        expected = "2 malformed and skipped (--skip-bad-lines), 5 longer than a row"
    data = _file(tmp_path, [*lines, 7])
    arguments = [*(["dpo", "--loss", "kto"] if command == "kto" else [command]), "--model", str(model_folder)]
    arguments += ["--data", data, "--output", str(tmp_path / "run"), "--skip-bad-lines"]
    assert main([*arguments, "--tokens-per-step", "128", "--sequence-length", "64"]) == 2
    count = len(lines) + 1
    said = f"{data}: none of its {count} examples can be trained on: {expected} (give a larger --sequence-length)"
    assert said in capsys.readouterr().err


def test_an_answer_without_a_token_that_can_be_scored_is_named(model_folder):
    tokenizer = load_tokenizer(model_folder)
    tokenizer.eos_id = None
    for line in ({"prompt": "", "chosen": "a", "rejected": "b"}, {"prompt": "", "completion": "a", "label": True}):
        encoder = PreferenceEncoder(tokenizer, None, 100, paired="chosen" in line)
        (encoded,) = encoder.encode([Conversation("a.jsonl:1", line)])
        assert encoded.problem == "a.jsonl:1: its answer has no token that can be scored; give it a prompt"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"chosen": "a"}, 'needs "chosen" and "rejected"'),
        ({"prompt": "a", "chosen": "b", "rejected": [{"role": "user", "content": "a"}]}, 'needs "chosen"'),
        ({"prompt": "a", "chosen": "", "rejected": "b"}, "the assistant says nothing"),
    ],
)
def test_a_line_that_is_no_pair_is_named(tmp_path, model_folder, line, message):
    with pytest.raises(UserError, match=rf"pairs\.jsonl:13: {message}.*--skip-bad-lines"):
        prefer(_config(tmp_path, model_folder, "run", [*PAIRS, line]))
    with pytest.raises(UserError, match=r'pairs\.jsonl:1: needs "label"'):
        prefer(_config(tmp_path, model_folder, "run", loss="kto"))


def test_prompts_in_both_answers_and_messages_give_the_same_tokens(tmp_path, model_folder):
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    text = _encode(folder, PAIRS[0])
    implicit = {kind: PAIRS[0]["prompt"] + PAIRS[0][kind] for kind in ("chosen", "rejected")}
    assert _encode(folder, implicit).tokens.tolist() == text.tokens.tolist()
    prompt = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    answers = {kind: [{"role": "assistant", "content": kind}] for kind in ("chosen", "rejected")}
    explicit = _encode(folder, {"prompt": prompt, **answers}, template=MARKED)
    whole = _encode(folder, {kind: prompt + answer for kind, answer in answers.items()}, template=MARKED)
    assert explicit.tokens.tolist() == whole.tokens.tolist() and explicit.scored.tolist() == whole.scored.tolist()
    asked = {"question": "a?", "chosen": "b", "rejected": "c"}
    plain = _encode(folder, {"prompt": "a?", "chosen": "b", "rejected": "c"})
    assert _encode(folder, asked).tokens.tolist() == plain.tokens.tolist()
    assert "needs a" in _encode(folder, {"chosen": "b", "rejected": "c"}).problem
    first = [{"role": "system", "content": "s"}, *prompt]
    named = {"prompt": prompt, "system": "s", **answers}
    expected = _encode(folder, {"prompt": first, **answers}, template=MARKED)
    assert _encode(folder, named, template=MARKED).tokens.tolist() == expected.tokens.tolist()
    # As in data sets of which TRL takes the prompt from the answers.
    named = {"prompt": "c", **{kind: prompt + answer for kind, answer in answers.items()}}
    assert _encode(folder, named, template=MARKED).tokens.tolist() == whole.tokens.tolist()
    tokenizer = load_tokenizer(folder)
    said = explicit.tokens[(explicit.scored & SCORED) > 0].tolist()
    # What the assistant said in the prompt is not among it.
    assert tokenizer.decode([t for t in said if t != tokenizer.eos_id]) == "chosenrejected"
    assert int(((explicit.scored & MARK) > 0).sum()) == 1


@pytest.mark.parametrize(
    "parallel",
    [ParallelConfig(), ParallelConfig(data_replicate=2)]
    + [ParallelConfig(**{name: 2}) for name in ("tensor", "context", "pipeline")],
    ids=["fsdp", "ddp", "tensor", "context", "pipeline"],
)  # fmt: skip
def test_two_ranks_follow_one(tmp_path, model_folder, parallel):
    own = ParallelConfig(reduction_chunks=2) if parallel.tensor > 1 else ParallelConfig()
    alone = prefer(_config(tmp_path, model_folder, "alone", steps=3, parallel=own))
    launch(2, _on_a_rank, _config(tmp_path, model_folder, "two", steps=3, parallel=parallel))
    # The step's sums are added in another order, in float32.
    assert _metrics(tmp_path / "two") == pytest.approx(_metrics(alone), rel=1e-4)
    assert _metrics(tmp_path / "two", "rewards/margin") == pytest.approx(_metrics(alone, "rewards/margin"), abs=1e-4)
    assert _metrics(tmp_path / "two", "rewards/margin")[0] == 0.0


LAYOUTS = {
    "HSDP 2 x 2": (4, ParallelConfig(data_replicate=2, reduction_chunks=2)),
    "FSDP 2 x TP 2": (4, ParallelConfig(tensor=2)),
    "CP 2 x TP 2": (4, ParallelConfig(context=2, tensor=2)),
    "TP 2 x PP 2": (4, ParallelConfig(tensor=2, pipeline=2)),
    "PP 2, interleaved": (2, ParallelConfig(pipeline=2, pipeline_schedule="interleaved", reduction_chunks=2)),
    "PP 2, ZBV": (2, ParallelConfig(pipeline=2, pipeline_schedule="zbv", reduction_chunks=2)),
    "full DTensor": (4, ParallelConfig(context=2, tensor=2, full_dtensor=True)),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_deterministic_layout_has_the_bits_of_one_process(tmp_path, layout):
    ranks, parallel = LAYOUTS[layout]
    model_folder = _folder(tmp_path, "qwen3:micro")  # of four layers, for two stages per rank
    train = replace(_config(tmp_path, model_folder, "").train, deterministic_layout=True, tokens_per_microbatch=64)
    settings = dict(steps=3, train=train)
    alone = prefer(_config(tmp_path, model_folder, "alone", parallel=ParallelConfig(reduction_chunks=2), **settings))
    launch(ranks, _on_a_rank, _config(tmp_path, model_folder, "many", parallel=parallel, **settings))
    for name in ("loss", "grad_norm", "rewards/margin"):
        assert _metrics(tmp_path / "many", name) == _metrics(alone, name), name


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [ParallelConfig(expert=2), ParallelConfig(context=2, expert=2)])
def test_two_ranks_that_share_experts_follow_one(tmp_path, parallel):
    folder = _folder(tmp_path, "qwen3_moe:micro")
    alone = prefer(_config(tmp_path, folder, "alone", steps=3))
    launch(2, _on_a_rank, _config(tmp_path, folder, "two", steps=3, parallel=parallel))
    # The step's sums are added in another order, in float32.
    assert _metrics(tmp_path / "two") == pytest.approx(_metrics(alone), rel=1e-4)
    assert _metrics(tmp_path / "two", "rewards/margin")[0] == 0.0


def _folder(tmp_path, shape):
    tokenizer = ByteTokenizer()
    config = preset(shape, tokenizer.vocab_size, (tokenizer.eos_id,))
    save_model(build_model(config, dtype="float32", seed=1), tmp_path / "model")
    tokenizer.save(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.slow
def test_compiled_layers_learn_the_same_from_margins_of_zero(tmp_path, model_folder):
    eager = prefer(_config(tmp_path, model_folder, "eager", steps=3))
    compiled = prefer(_config(tmp_path, model_folder, "compiled", steps=3, compile=CompileConfig(backend="inductor")))
    # What is compiled rounds elsewhere, in float32: measured are 2e-7.
    assert _metrics(compiled) == pytest.approx(_metrics(eager), rel=2e-6)
    assert _metrics(compiled, "rewards/margin")[0] == 0.0


@pytest.mark.parametrize("fixed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_kto_on_two_ranks_has_the_divergence_of_one_process(tmp_path, model_folder, fixed):
    # Desirable answers only, which begin alike: what a prompt's own answer gains, another prompt's gains too.
    lines = [{"prompt": p["prompt"], "completion": f"yes, {p['chosen']}", "label": True} for p in PAIRS]
    train = TrainConfig(learning_rate=1e-3, warmup_steps=0, tokens_per_microbatch=64, deterministic_layout=fixed)
    settings = dict(lines=lines, loss="kto", steps=3, train=train)
    alone = prefer(_config(tmp_path, model_folder, "alone", **settings))
    launch(2, _on_a_rank, _config(tmp_path, model_folder, "two", **settings))
    assert _metrics(alone, "kl")[0] == 0 < min(_metrics(alone, "kl")[1:])
    for name in ("loss", "kl", "rewards/chosen", "grad_norm"):
        one, two = _metrics(alone, name), _metrics(tmp_path / "two", name)
        # Sums over ranks are added in another order, in float32; in one order all have the same bits.
        assert two == (one if fixed else pytest.approx(one, rel=1e-4, abs=1e-6)), name


def _on_a_rank(config):
    prefer(config)


def test_the_command_line_refuses_what_cannot_be(tmp_path, model_folder, capsys):
    arguments = ["--model", str(model_folder), "--data", _file(tmp_path, PAIRS), "--output", str(tmp_path / "run")]
    arguments += ["--steps", "1", "--tokens-per-step", "128", "--sequence-length", "64"]
    assert main(["dpo", *arguments]) == 0
    assert 'loss = "dpo"' in (tmp_path / "run" / "config.toml").read_text()
    assert main(["dpo", *arguments, "--overwrite", "--loss", "ipo", "--label-smoothing", "0.1"]) == 2
    assert "label_smoothing is for dpo and simpo" in capsys.readouterr().err
    for command in ("dpo", "sft"):
        assert main([command, *arguments, "--dry-run", "1", "--overwrite"]) == 2
        assert "dry_run is only for pretrain and rl" in capsys.readouterr().err
    assert main(["dpo", *arguments, "--overwrite", "--loader.packing", "cut"]) == 2
    assert "loader.packing" in capsys.readouterr().err
