"""ChatML for a model that has no chat template: its tokens are added, learned, and end what the model says."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer

import lockstep
from lockstep.checkpoint import newest_checkpoint
from lockstep.cli import main
from lockstep.config import CheckpointConfig, DPOConfig, LoraConfig, SFTConfig, TrainConfig
from lockstep.data import ByteTokenizer, ConversationEncoder, load_tokenizer
from lockstep.data.chat import CHATML, CHATML_SOURCE, load_chat_template, with_chatml
from lockstep.data.conversations import Conversation
from lockstep.errors import UserError
from lockstep.model import build_model, preset, save_model
from lockstep.train.dpo import prefer
from lockstep.train.sft import finetune
from tests.train.runs import logged, write_lines

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Say one."},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "And two?"},
    {"role": "assistant", "content": "two"},
]


def _fresh(folder, tokenizer):
    """A folder as `lockstep pretrain` leaves it: no chat template, and a vocabulary without ChatML's tokens."""
    shape = replace(preset("qwen3:micro", tokenizer.vocab_size, (tokenizer.eos_id,)), num_layers=2)
    save_model(build_model(shape, "float32", seed=1), folder)
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="module")
def fresh(tmp_path_factory, bpe_tokenizer):
    return _fresh(tmp_path_factory.mktemp("fresh") / "model", bpe_tokenizer)


def _config(tmp_path, fresh, name="run", **changes):
    options = dict(
        output=str(tmp_path / name), model=str(fresh), data=write_lines(tmp_path / "talk.jsonl", [{"messages": TALK}]),
        template=CHATML, steps=2, device="cpu", tokens_per_step=128, sequence_length=128, dtype="float32",
        train=TrainConfig(learning_rate=1e-2, warmup_steps=0, schedule="constant"),
        checkpoint=CheckpointConfig(every=1),
    )  # fmt: skip
    return SFTConfig(**(options | changes))


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_the_new_tokens_begin_as_the_end_of_a_text_and_all_else_is_as_stored(tmp_path, bpe_tokenizer, kind):
    fresh = _fresh(tmp_path / "model", ByteTokenizer() if kind == "byte" else bpe_tokenizer)
    before = lockstep.load_model(fresh)
    after = lockstep.load_model(
        finetune(_config(tmp_path, fresh, steps=1, train=TrainConfig(learning_rate=1e-30, warmup_steps=0)))
    )
    tokens = load_tokenizer(newest_checkpoint(tmp_path / "run"))
    assert after.config.vocab_size == tokens.vocab_size > before.config.vocab_size - 1
    for name, old in before.named_parameters():
        new = dict(after.named_parameters())[name]
        assert torch.equal(new[: len(old)], old), name
        if len(new) > len(old):
            assert torch.equal(new[len(old) :], old[before.config.eos_token_ids[0]].expand(len(new) - len(old), -1))
    assert set(after.config.eos_token_ids) == {*before.config.eos_token_ids, tokens.eos_id}


def test_a_model_learns_to_answer_and_to_end_and_transformers_reads_the_same(tmp_path, fresh):
    train = TrainConfig(learning_rate=1e-2, warmup_steps=5)
    run = finetune(_config(tmp_path, fresh, steps=40, train=train, checkpoint=CheckpointConfig()))
    folder = newest_checkpoint(run)
    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    text = theirs.apply_chat_template(TALK, tokenize=False)
    assert text == load_chat_template(folder).render(TALK, add_generation_prompt=False)
    assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text)
    assert theirs.eos_token == "<|im_end|>" and theirs.eos_token_id == ours.eos_id
    (encoded,) = ConversationEncoder(ours, load_chat_template(folder)).encode([Conversation("", {"messages": TALK})])
    said = encoded.tokens[encoded.scored].tolist()
    assert said == [*ours.encode("one"), ours.eos_id, *ours.encode("two"), ours.eos_id]
    asked = write_lines(tmp_path / "ask.jsonl", [{"messages": TALK[:2]}])
    command = ["generate", "--model", str(run), "--prompts", asked, "--temperature", "0", "--max-tokens", "20"]
    assert main([*command, "--output", str(tmp_path / "out.jsonl"), "--device", "cpu"]) == 0
    answer = json.loads((tmp_path / "out.jsonl").read_text())
    assert answer["completion"] == "one" and answer["finish_reason"] == "stop"


def test_resumed_runs_runs_on_tokens_and_later_stages_have_the_tokens_that_were_learned(tmp_path, fresh):
    whole = finetune(_config(tmp_path, fresh))
    weights = (newest_checkpoint(whole) / "model.safetensors").read_bytes()
    cut = _config(tmp_path, fresh, "cut", steps=1)
    finetune(cut)
    assert (
        newest_checkpoint(finetune(replace(cut, steps=2, resume=True))) / "model.safetensors"
    ).read_bytes() == weights
    command = ["data", "tokenize", "--chat", "--data", cut.data, "--tokenizer", str(fresh), "--template", CHATML]
    assert main([*command, "--workers", "0", "--output", str(tmp_path / "tokens")]) == 0
    tokens = finetune(_config(tmp_path, fresh, "second", data=str(tmp_path / "tokens")))
    assert (newest_checkpoint(tokens) / "model.safetensors").read_bytes() == weights
    later = _config(tmp_path, whole, "later", lora=LoraConfig(rank=2), steps=1)
    assert newest_checkpoint(finetune(later)).is_dir()


def test_runs_that_would_not_learn_the_tokens_or_have_none_for_tools_are_refused(tmp_path, fresh):
    lacks = "lacks the tokens of template chatml, which only full fine-tuning learns"
    with pytest.raises(UserError, match=lacks):
        finetune(_config(tmp_path, fresh, lora=LoraConfig(rank=2)))
    with pytest.raises(UserError, match=lacks):
        prefer(DPOConfig(model=str(fresh), data="d", template=CHATML, output=str(tmp_path / "run")))
    with_chatml(load_tokenizer(fresh)).save(tmp_path / "larger")
    (tmp_path / "t.jinja").write_text(CHATML_SOURCE)
    with pytest.raises(UserError, match="the tokenizer has .* tokens, but .* only"):
        finetune(_config(tmp_path, fresh, template=str(tmp_path / "t.jinja"), tokenizer=str(tmp_path / "larger")))
    called = [*TALK[:2], {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}]
    for line in ({"messages": called}, {"messages": TALK, "tools": [{"name": "f"}]}):
        with pytest.raises(UserError, match=r"tools.jsonl:1: .*ChatML has no tools; train with a template that has"):
            finetune(_config(tmp_path, fresh, data=write_lines(tmp_path / "tools.jsonl", [line])))


def test_fine_tuning_takes_an_epoch_by_default_and_says_how_much_that_is(tmp_path, fresh, capsys):
    data = write_lines(tmp_path / "talk.jsonl", [{"messages": TALK}] * 10)
    run = tmp_path / "run"
    options = ["--model", str(fresh), "--data", data, "--output", str(run), "--template", CHATML]
    options += ["--device", "cpu", "--dtype", "float32", "--sequence-length", "128", "--tokens-per-step", "256"]
    assert main(["sft", *options]) == 0
    said, (*_, epoch) = capsys.readouterr().err, logged(run, "epoch")
    assert 0.9 < epoch <= 1.4
    assert "data: 10 conversations of " in said and f"{len(logged(run))} steps of up to 256 tokens are 1" in said
    assert main(["sft", *options, "--overwrite", "--epochs", "9", "--steps", "1"]) == 0
    assert len(logged(run)) == 1
    assert main(["sft", "--resume", "--output", str(run), "--epochs", "2"]) == 0
    assert 1.9 < logged(run, "epoch")[-1] <= 2.4
