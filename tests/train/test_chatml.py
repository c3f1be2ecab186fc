"""ChatML for a model that has no chat template: its tokens are added, learned, and end what the model says."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoTokenizer

import lockstep
from lockstep.checkpoint import newest_checkpoint
from lockstep.cli import main
from lockstep.config import DPOConfig, LoraConfig, SFTConfig, TrainConfig
from lockstep.data import ByteTokenizer, ConversationEncoder, load_tokenizer
from lockstep.data.chat import load_chat_template
from lockstep.data.chatml import CHATML, SOURCE, with_chatml
from lockstep.data.conversations import Conversation
from lockstep.errors import UserError
from lockstep.model import build_model, preset, save_model
from lockstep.model.more_tokens import MoreTokens
from lockstep.train.dpo import prefer
from lockstep.train.sft import finetune

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Say one."},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "And two?"},
    {"role": "assistant", "content": "two"},
]


@pytest.fixture(params=["byte", "bpe"])
def fresh(request, tmp_path, bpe_tokenizer):
    """A folder as `lockstep pretrain` leaves it: no chat template, and a vocabulary without ChatML's tokens."""
    tokenizer = ByteTokenizer() if request.param == "byte" else bpe_tokenizer
    shape = replace(preset("qwen3:micro", tokenizer.vocab_size, (tokenizer.eos_id,)), num_layers=2)
    save_model(build_model(shape, "float32", seed=1), tmp_path / "fresh")
    tokenizer.save(tmp_path / "fresh")
    return tmp_path / "fresh"


def _config(fresh, **changes):
    data = fresh.parent / "talk.jsonl"
    data.write_text(json.dumps({"messages": TALK}) + "\n")
    options = dict(
        output=str(fresh.parent / "run"), model=str(fresh), data=str(data), template=CHATML, steps=60, device="cpu",
        tokens_per_step=512, sequence_length=512, dtype="float32",
        train=TrainConfig(learning_rate=1e-2, warmup_steps=5),
    )  # fmt: skip
    return SFTConfig(**(options | changes))


def test_the_new_tokens_begin_as_the_end_of_a_text_and_all_else_is_as_stored(fresh):
    before = lockstep.load_model(fresh)
    frozen = TrainConfig(learning_rate=1e-30, warmup_steps=0)
    after = lockstep.load_model(finetune(_config(fresh, steps=1, train=frozen)))
    tokens = load_tokenizer(newest_checkpoint(fresh.parent / "run"))
    assert after.config.vocab_size == tokens.vocab_size > before.config.vocab_size - 1
    for name, old in before.named_parameters():
        new = dict(after.named_parameters())[name]
        assert torch.equal(new[: len(old)], old), name
        if len(new) > len(old):
            assert torch.equal(new[len(old) :], old[before.config.eos_token_ids[0]].expand(len(new) - len(old), -1))
    assert set(after.config.eos_token_ids) == {*before.config.eos_token_ids, tokens.eos_id}


def test_a_model_learns_to_answer_and_to_end_and_transformers_reads_the_same(fresh, capsys):
    run = finetune(_config(fresh))
    folder = newest_checkpoint(run)
    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    text = theirs.apply_chat_template(TALK, tokenize=False)
    assert text == load_chat_template(folder).render(TALK, add_generation_prompt=False)
    assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text)
    assert theirs.eos_token == "<|im_end|>" and theirs.eos_token_id == ours.eos_id
    encoded = ConversationEncoder(ours, load_chat_template(folder)).encode([Conversation("", {"messages": TALK})])[0]
    said = [int(token) for token, scored in zip(encoded.tokens, encoded.scored) if scored]
    assert said == [*ours.encode("one"), ours.eos_id, *ours.encode("two"), ours.eos_id]
    command = ["generate", "--model", str(run), "--prompts", str(fresh.parent / "ask.jsonl"), "--temperature", "0"]
    (fresh.parent / "ask.jsonl").write_text(json.dumps({"messages": TALK[:2]}) + "\n")
    assert main([*command, "--output", str(fresh.parent / "out.jsonl"), "--device", "cpu"]) == 0
    answer = json.loads((fresh.parent / "out.jsonl").read_text())
    assert answer["completion"] == "one" and answer["finish_reason"] == "stop"


def test_a_resumed_run_has_the_bits_of_a_whole_one(fresh):
    whole = finetune(_config(fresh, steps=4, train=TrainConfig(schedule="constant")))
    cut = _config(fresh, steps=2, train=TrainConfig(schedule="constant"), output=str(fresh.parent / "cut"))
    finetune(cut)
    finetune(replace(cut, steps=4, resume=True))
    files = [newest_checkpoint(run) / "model.safetensors" for run in (whole, fresh.parent / "cut")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_run_that_would_not_learn_the_tokens_is_refused(fresh):
    for config, run in (
        (_config(fresh, lora=LoraConfig(rank=2)), finetune),
        (DPOConfig(model=str(fresh), data="d", template=CHATML, output=str(fresh.parent / "run")), prefer),
    ):
        with pytest.raises(UserError, match="lacks the tokens of template chatml, which only full fine-tuning learns"):
            run(config)


def test_later_stages_take_a_model_that_has_learned_the_tokens(fresh):
    run = finetune(_config(fresh, steps=1))
    again = _config(fresh, model=str(run), output=str(fresh.parent / "again"), lora=LoraConfig(rank=2), steps=1)
    assert newest_checkpoint(finetune(again)).is_dir()


def test_a_larger_tokenizer_alone_does_not_enlarge_a_model(fresh, tmp_path):
    with_chatml(load_tokenizer(fresh)).save(tmp_path / "larger")
    (tmp_path / "t.jinja").write_text(SOURCE)
    with pytest.raises(UserError, match="the tokenizer has .* tokens, but .* only"):
        finetune(_config(fresh, template=str(tmp_path / "t.jinja"), tokenizer=str(tmp_path / "larger")))


def test_new_rows_are_read_alike_wherever_a_shard_is_cut(tmp_path):
    whole = torch.arange(15.0).view(5, 3)
    save_file({"w": whole}, tmp_path / "w.safetensors")
    with safe_open(tmp_path / "w.safetensors", "pt") as file:
        more = MoreTokens(file.get_slice("w"), 9, 2)
        expected = torch.cat([whole, whole[2:3].expand(4, -1)])
        for start in range(9):
            for stop in range(start + 1, 10):
                assert torch.equal(more[slice(start, stop), slice(0, 2)], expected[start:stop, :2])
    assert more.get_shape() == [9, 3]


def test_a_tokenizer_that_has_the_tokens_keeps_its_ids_and_files(bpe_tokenizer):
    once = with_chatml(bpe_tokenizer)
    assert once.vocab_size == bpe_tokenizer.vocab_size + 2
    assert with_chatml(once).vocabulary() == once.vocabulary() and with_chatml(once).eos_id == once.eos_id
    once.carried["special_file.json"] = "{}"
    assert with_chatml(once).carried == once.carried


@pytest.mark.parametrize("given", ["calls", "tools"])
def test_tools_are_refused_since_chatml_has_none(fresh, given):
    talk = [*TALK[:2], {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}]
    line = {"messages": talk} if given == "calls" else {"messages": TALK, "tools": [{"name": "f"}]}
    config = _config(fresh)
    (fresh.parent / "talk.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(UserError, match=r"talk.jsonl:1: .*ChatML has no tools; give a template that has"):
        finetune(config)


def test_data_that_was_tokenized_with_chatml_is_trained_on(fresh, capsys):
    config = _config(fresh, steps=2)
    command = ["data", "tokenize", "--chat", "--data", config.data, "--tokenizer", str(fresh), "--template", CHATML]
    assert main([*command, "--output", str(fresh.parent / "tokens")]) == 0
    first = finetune(config)
    second = finetune(replace(config, data=str(fresh.parent / "tokens"), output=str(fresh.parent / "second")))
    files = [newest_checkpoint(run) / "model.safetensors" for run in (first, second)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_fine_tuning_takes_an_epoch_by_default_and_says_how_much_that_is(fresh, capsys):
    config = _config(fresh)
    (fresh.parent / "talk.jsonl").write_text((json.dumps({"messages": TALK}) + "\n") * 40)
    options = ["--model", config.model, "--data", config.data, "--output", config.output, "--template", CHATML]
    options += ["--device", "cpu", "--dtype", "float32", "--sequence-length", "512", "--tokens-per-step", "1024"]
    assert main(["sft", *options]) == 0
    said = capsys.readouterr().err
    steps = json.loads((fresh.parent / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert 0.9 < steps["epoch"] <= 1.2
    assert "data: 40 conversations of " in said and f"{steps['step']} steps of up to 1.02k tokens are 1" in said
    assert main(["sft", *options, "--overwrite", "--epochs", "9", "--steps", "1"]) == 0
    assert len((fresh.parent / "run" / "metrics.jsonl").read_text().splitlines()) == 1
    assert main(["sft", "--resume", "--output", config.output, "--epochs", "2"]) == 0
    more = json.loads((fresh.parent / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert 1.9 < more["epoch"] <= 2.2
