"""`lockstep dpo`: pairs from TRL's columns, the reference's scores, runs that resume, and ranks that agree with one."""

import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lockstep import build_model, load_model, save_model, score
from lockstep.checkpoint import model_folder as model_folder_of
from lockstep.cli import main
from lockstep.config import CheckpointConfig, DataConfig, DPOConfig, ParallelConfig, TrainConfig
from lockstep.data import ByteTokenizer, load_tokenizer
from lockstep.data.chat import load_chat_template
from lockstep.data.conversations import Conversation
from lockstep.data.preferences import MARK, SCORED, PreferenceEncoder
from lockstep.errors import UserError
from lockstep.model import preset
from lockstep.train.dpo import prefer
from tests.data.test_conversations import MARKED
from tests.parallel.launch import launch
from tests.train.runs import logged, write_lines

PAIRS = [
    {"prompt": f"{a}+{b}=", "chosen": f"{a + b}\n", "rejected": f"{a}{b} {'or so ' * (a % 3)}\n"}
    for a in range(1, 5)
    for b in range(2, 5)
]
LABELLED = [
    {"prompt": p["prompt"], "completion": p[kind], "label": kind == "chosen"}
    for p in PAIRS
    for kind in ("chosen", "rejected")
]


def settings_of(tmp_path, folder, name, lines=PAIRS, **changes):
    """Settings that runs on preferences and reward models share."""
    train = TrainConfig(learning_rate=1e-3, warmup_steps=0, schedule="constant", tokens_per_microbatch=128)
    options = dict(
        output=str(tmp_path / name), model=str(folder), data=write_lines(tmp_path / "pairs.jsonl", lines),
        dtype="float32", steps=4, tokens_per_step=256, sequence_length=64, checkpoint=CheckpointConfig(every=2),
        train=train,
    )  # fmt: skip
    return options | changes


def _config(tmp_path, folder, name, lines=PAIRS, **changes):
    return DPOConfig(**settings_of(tmp_path, folder, name, lines, **({"beta": 0.5} | changes)))


@pytest.fixture(scope="module")
def run(tmp_path_factory, model_folder):
    folder = tmp_path_factory.mktemp("dpo")
    held_out = write_lines(folder / "held.jsonl", PAIRS)
    return prefer(_config(folder, model_folder, "run", validation_data=held_out))


def test_a_run_starts_at_the_reference_and_learns(run):
    losses = logged(run)
    # The reference's forward pass had other company, and yet the same bits: every margin is 0.
    assert losses[0] == pytest.approx(math.log(2), rel=1e-7) and losses[-1] < 0.6
    for name in ("rewards/chosen", "rewards/rejected", "rewards/margin", "rewards/accuracy"):
        assert logged(run, name)[0] == 0.0
    assert logged(run, "rewards/margin")[-1] > 0.2 and logged(run, "rewards/accuracy")[-1] > 0.8
    assert logged(run, "validation/rewards/accuracy")[-1] > 0.8 and logged(run, "validation/loss")[-1] < 0.6


def _flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[-2] ^= 64
    file.write_bytes(content)


def _of_another_type(file):
    with safe_open(file, "pt") as opened:
        described = opened.metadata()
    save_file({name: t.to(torch.int64) for name, t in load_file(file).items()}, file, described)


def test_a_resumed_run_keeps_its_reference_or_computes_a_damaged_one_again_to_the_same_bits(
    run, tmp_path, model_folder, caplog
):
    shutil.copytree(run, tmp_path / "run")
    file = tmp_path / "run" / "reference.safetensors"
    scores = {name: scores.numpy().tobytes() for name, scores in load_file(file).items()}
    for damage in (lambda file: None, _flip_a_bit, _of_another_type, lambda file: file.unlink()):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000004")
        damage(file)
        before, _ = file.stat().st_mtime_ns if file.exists() else 0, caplog.clear()
        prefer(_config(tmp_path, model_folder, "run", resume=True))
        assert logged(tmp_path / "run") == logged(run)
        assert {name: scores.numpy().tobytes() for name, scores in load_file(file).items()} == scores
        damaged = damage in (_flip_a_bit, _of_another_type)
        messages = [r.getMessage() for r in caplog.records if file.name in r.getMessage()]
        assert [message.endswith("recomputing it") for message in messages] == [True] * damaged
        assert (file.stat().st_mtime_ns == before) == (not damaged and before > 0)
    file.unlink()
    file.mkdir()
    with pytest.raises(UserError, match="reference.safetensors: cannot be written .* move the existing file"):
        prefer(_config(tmp_path, model_folder, "run", resume=True, steps=5))


@pytest.mark.parametrize("loss", ["ipo", *(pytest.param(loss, marks=pytest.mark.slow) for loss in ("simpo", "kto"))])
def test_runs_with_other_losses_resume_to_the_same_bits(tmp_path, model_folder, loss):
    lines = LABELLED if loss == "kto" else PAIRS
    whole = prefer(_config(tmp_path, model_folder, "whole", lines, loss=loss, steps=3))
    assert len(set(logged(whole))) == 3 and (whole / "reference.safetensors").is_file() == (loss != "simpo")
    shutil.copytree(whole, tmp_path / "stopped")
    shutil.rmtree(tmp_path / "stopped" / "checkpoints" / "step_00000003")
    stopped = prefer(_config(tmp_path, model_folder, "stopped", lines, loss=loss, steps=3, resume=True))
    assert logged(stopped) == logged(whole)


def _sums(model, tokenizer, pair):
    """The log-probability of each of a pair's answers."""
    start = len(tokenizer.encode(pair["prompt"])) - 1
    for kind in ("chosen", "rejected"):
        (scores,) = score(model, [[*tokenizer.encode(pair["prompt"] + pair[kind]), tokenizer.eos_id]])
        yield float(scores[start:].sum())


def test_the_loss_is_that_of_the_scores_and_bad_pairs_are_named_counted_and_left_out(tmp_path, model_folder, caplog):
    # All pairs once, in one step of two micro-batches, of which the second is empty.
    once = dict(steps=1, loader=DataConfig(packing="whole", repeat=False), tokens_per_step=512, sequence_length=256)
    equal, long = {"prompt": "a", "chosen": "b", "rejected": "b"}, {"prompt": "a" * 400, "chosen": "b", "rejected": "c"}
    run = prefer(_config(tmp_path, model_folder, "run", [*PAIRS, equal, long], loss="ipo", **once))
    assert logged(run, "examples") == [len(PAIRS)]
    model, tokenizer = load_model(model_folder, dtype="float32"), load_tokenizer(model_folder)
    for name, mean in zip(("chosen", "rejected"), np.mean([[*_sums(model, tokenizer, pair)] for pair in PAIRS], 0)):
        assert logged(run, f"log_probs/{name}")[0] == pytest.approx(mean, rel=1e-5)
    assert logged(run, "data/equal_pairs") == [1] and logged(run, "data/long_pairs") == [1]
    assert "pairs.jsonl:13: its two answers are identical; it is left out" in caplog.text
    assert "pairs.jsonl:14: has " in caplog.text


def test_the_reference_may_be_another_model(run, tmp_path, model_folder):
    shutil.copytree(model_folder, tmp_path / "copy")
    same = prefer(_config(tmp_path, model_folder, "same", reference=str(tmp_path / "copy"), steps=2))
    for name in ("loss", "rewards/margin"):
        assert logged(same, name) == logged(run, name)[:2]
    # A run that begins from trained weights, and is measured from those before.
    held_out = write_lines(tmp_path / "held.jsonl", PAIRS[:3])
    still = _config(tmp_path, run, "still", reference=str(model_folder), validation_data=held_out, steps=1)
    still.train.learning_rate = 1e-12
    before, after = (load_model(model_folder_of(at), dtype="float32") for at in (model_folder, run))
    tokenizer, margins = load_tokenizer(model_folder), []
    for pair in PAIRS[:3]:
        chosen, rejected = (
            new - old for new, old in zip(_sums(after, tokenizer, pair), _sums(before, tokenizer, pair))
        )
        margins.append(still.beta * (chosen - rejected))
    # Differences of sums in float32.
    assert logged(prefer(still), "validation/rewards/margin")[0] == pytest.approx(np.mean(margins), abs=1e-4)
    assert min(margins) > 0.01
    prefer(replace(still, steps=2, resume=True))
    assert len(logged(tmp_path / "still")) == 2


def test_a_reference_that_cannot_be_one_is_named(tmp_path, model_folder):
    ByteTokenizer().save(tmp_path / "bytes")
    save_model(build_model(replace(preset("qwen3:micro", 258), num_layers=1)), tmp_path / "bytes")
    for changes, message in (
        (dict(reference="none"), "reference none: no such model"),
        (
            dict(reference=str(tmp_path / "bytes")),
            r"reference .*bytes: its vocabulary is not that of .* \(258 tokens, not 512\)",
        ),
        (dict(parallel=ParallelConfig(pipeline=2)), "reference does not work with parallel.pipeline yet"),
        (dict(loss="simpo"), "loss simpo has none; leave it out"),
    ):
        with pytest.raises(UserError, match=message):
            prefer(_config(tmp_path, model_folder, "run", **({"reference": str(model_folder)} | changes)))


@pytest.mark.parametrize("command", ["dpo", "reward-model", "kto"])
def test_data_whose_examples_are_all_left_out_say_why(tmp_path, model_folder, capsys, command):
    long = "a" * 90
    lines = [{"prompt": "a", "chosen": "b", "rejected": "b"}] * 3
    lines += [{"prompt": long, "chosen": "b", "rejected": "c"}, {"prompt": "", "chosen": 1}]
    expected = "2 malformed and skipped (--skip-bad-lines), 3 with two identical answers, 1 longer than a row"
    if command == "kto":
        lines = [{"prompt": long, "completion": "b", "label": True}] * 5 + [{"prompt": "a"}]
        expected = "2 malformed and skipped (--skip-bad-lines), 5 longer than a row"
    data = write_lines(tmp_path / "pairs.jsonl", [*lines, 7])
    arguments = [*(["dpo", "--loss", "kto"] if command == "kto" else [command]), "--model", str(model_folder)]
    arguments += ["--data", data, "--output", str(tmp_path / "run"), "--skip-bad-lines"]
    assert main([*arguments, "--tokens-per-step", "128", "--sequence-length", "64"]) == 2
    count = len(lines) + 1
    said = f"{data}: none of its {count} examples can be trained on: {expected} (give a larger --sequence-length)"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "paired", "message"),
    [
        ({"chosen": "a"}, True, 'needs "chosen" and "rejected"'),
        ({"prompt": "a", "chosen": "b", "rejected": [{"role": "user", "content": "a"}]}, True, 'needs "chosen"'),
        ({"prompt": "a", "chosen": "", "rejected": "b"}, True, "the assistant says nothing"),
        ({"chosen": "b", "rejected": "c"}, True, "its two answers begin differently, so it needs a"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, False, 'needs "label"'),
        ({"prompt": "", "chosen": "a", "rejected": "b"}, True, "its answer has no token that can be scored"),
        ({"prompt": "", "completion": "a", "label": True}, False, "its answer has no token that can be scored"),
    ],
)
def test_a_line_that_is_no_preference_is_named(model_folder, line, paired, message):
    tokenizer = load_tokenizer(model_folder)
    tokenizer.eos_id = None
    (encoded,) = PreferenceEncoder(tokenizer, None, 1000, paired).encode([Conversation("a.jsonl:1", line)])
    assert encoded.problem.startswith(f"a.jsonl:1: {message}")


def test_prompts_in_both_answers_and_messages_give_the_same_tokens(tmp_path, model_folder):
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    (folder / "chat_template.jinja").write_text(MARKED)

    def encoded(**line):
        encoder = PreferenceEncoder(load_tokenizer(folder), load_chat_template(folder), 1000)
        (one,) = encoder.encode([Conversation("a.jsonl:1", line)])
        assert not one.problem
        return one.tokens.tolist(), one.scored.tolist()

    both = ("chosen", "rejected")
    assert encoded(**{kind: PAIRS[0]["prompt"] + PAIRS[0][kind] for kind in both})[0] == encoded(**PAIRS[0])[0]
    assert encoded(question="a?", chosen="b", rejected="c") == encoded(prompt="a?", chosen="b", rejected="c")
    prompt = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    answers = {kind: [{"role": "assistant", "content": kind}] for kind in both}
    whole = {kind: prompt + answer for kind, answer in answers.items()}
    explicit = encoded(prompt=prompt, **answers)
    # The last is as in data sets of which TRL takes the prompt from the answers.
    assert explicit == encoded(**whole) == encoded(prompt="c", **whole)
    system = [{"role": "system", "content": "s"}, *prompt]
    assert encoded(prompt=prompt, system="s", **answers) == encoded(prompt=system, **answers)
    tokenizer, (tokens, marks) = load_tokenizer(folder), explicit
    said = [token for token, mark in zip(tokens, marks) if mark & SCORED]
    # What the assistant said in the prompt is not among it.
    assert tokenizer.decode([t for t in said if t != tokenizer.eos_id]) == "chosenrejected"
    assert sum(mark & MARK > 0 for mark in marks) == 1


RANKS = {
    "fsdp": ParallelConfig(), "ddp": ParallelConfig(data_replicate=2), "tensor": ParallelConfig(tensor=2),
    "context": ParallelConfig(context=2), "pipeline": ParallelConfig(pipeline=2), "expert": ParallelConfig(expert=2),
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "pipeline" else pytest.mark.slow) for n in RANKS])
def test_two_ranks_follow_one(run, tmp_path, model_folder, name):
    alone, model, settings = run, model_folder, {}
    if name in ("tensor", "expert"):
        model = _folder(tmp_path, "qwen3_moe:micro") if name == "expert" else model_folder
        settings = dict(parallel=ParallelConfig(reduction_chunks=2)) if name == "tensor" else {}
        alone = prefer(_config(tmp_path, model, "alone", **settings))
    launch(2, prefer, _config(tmp_path, model, "two", steps=2, parallel=RANKS[name]))
    # The step's sums are added in another order, in float32.
    assert logged(tmp_path / "two") == pytest.approx(logged(alone)[:2], rel=1e-4)
    margins = logged(tmp_path / "two", "rewards/margin")
    assert margins == pytest.approx(logged(alone, "rewards/margin")[:2], abs=1e-4) and margins[0] == 0.0


LAYOUTS = {
    "HSDP 2 x 2": (4, ParallelConfig(data_replicate=2, reduction_chunks=2)),
    "FSDP 2 x TP 2": (4, ParallelConfig(tensor=2)),
    "CP 2 x TP 2": (4, ParallelConfig(context=2, tensor=2)),
    "TP 2 x PP 2": (4, ParallelConfig(tensor=2, pipeline=2)),
    "PP 2, interleaved": (2, ParallelConfig(pipeline=2, pipeline_schedule="interleaved", reduction_chunks=2)),
    "PP 2, ZBV": (2, ParallelConfig(pipeline=2, pipeline_schedule="zbv", reduction_chunks=2)),
    "full DTensor": (4, ParallelConfig(context=2, tensor=2, full_dtensor=True)),
}


def _folder(folder, shape):
    tokenizer = ByteTokenizer()
    config = preset(shape, tokenizer.vocab_size, (tokenizer.eos_id,))
    save_model(build_model(config, dtype="float32", seed=1), folder / "model")
    tokenizer.save(folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def deterministic(tmp_path_factory):
    """Settings, and a run with them in one process; on four layers for two stages per rank."""
    folder = tmp_path_factory.mktemp("alone")
    train = TrainConfig(learning_rate=1e-3, warmup_steps=0, deterministic_layout=True, tokens_per_microbatch=64)
    parallel, model = ParallelConfig(reduction_chunks=2), _folder(folder, "qwen3:micro")
    config = _config(folder, model, "alone", parallel=parallel, steps=3, train=train)
    return config, prefer(config)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_deterministic_layout_has_the_bits_of_one_process(deterministic, tmp_path, layout):
    (config, alone), (ranks, parallel) = deterministic, LAYOUTS[layout]
    launch(ranks, prefer, replace(config, output=str(tmp_path / "many"), parallel=parallel))
    for name in ("loss", "grad_norm", "rewards/margin"):
        assert logged(tmp_path / "many", name) == logged(alone, name), name


@pytest.mark.parametrize("fixed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_kto_on_two_ranks_has_the_divergence_of_one_process(tmp_path, model_folder, fixed):
    # Desirable answers only, which begin alike: what a prompt's own answer gains, another prompt's gains too.
    lines = [{"prompt": p["prompt"], "completion": f"yes, {p['chosen']}", "label": True} for p in PAIRS]
    train = TrainConfig(learning_rate=1e-3, warmup_steps=0, tokens_per_microbatch=64, deterministic_layout=fixed)
    settings = dict(lines=lines, loss="kto", steps=2, train=train)
    alone = prefer(_config(tmp_path, model_folder, "alone", **settings))
    launch(2, prefer, _config(tmp_path, model_folder, "two", **settings))
    assert logged(alone, "kl")[0] == 0 < min(logged(alone, "kl")[1:])
    for name in ("loss", "kl", "rewards/chosen", "grad_norm"):
        one, two = logged(alone, name), logged(tmp_path / "two", name)
        # Sums over ranks are added in another order, in float32; in one order all have the same bits.
        assert two == (one if fixed else pytest.approx(one, rel=1e-4, abs=1e-6)), name


def test_the_command_line_refuses_what_cannot_be(tmp_path, model_folder, capsys):
    data = write_lines(tmp_path / "pairs.jsonl", PAIRS)
    arguments = ["--model", str(model_folder), "--data", data, "--output", str(tmp_path / "run")]
    arguments += ["--steps", "1", "--tokens-per-step", "128", "--sequence-length", "64"]
    assert main(["dpo", *arguments]) == 0
    assert 'loss = "dpo"' in (tmp_path / "run" / "config.toml").read_text()
    for command, options, message in (
        ("dpo", ["--loss", "ipo", "--label-smoothing", "0.1"], "label_smoothing is for dpo and simpo"),
        ("dpo", ["--dry-run", "1"], "dry_run is only for pretrain and rl"),
        ("sft", ["--dry-run", "1"], "dry_run is only for pretrain and rl"),
        ("dpo", ["--loader.packing", "cut"], "loader.packing"),
    ):
        assert main([command, *arguments, "--overwrite", *options]) == 2
        assert message in capsys.readouterr().err
