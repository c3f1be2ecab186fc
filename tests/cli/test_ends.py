"""Everything that samples ends at the same tokens, says which, and saves them for others."""

import dataclasses
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import lockstep
from lockstep.checkpoint.convert import convert
from lockstep.cli import main
from lockstep.model import preset
from tests.data.test_end_tokens import TURNS, write_tokenizer

CONFIGURED, GENERATION, NAMED, TURN = 97, [98, 99], 256, 258
NAMES = "ends at ¤ (97), ¥ (98), ¦ (99), <|endoftext|> (256), <|im_end|> (258)"
ENVIRONMENT = """
import lockstep.rl as rl

class Short(rl.Environment):
    def examples(self, split):
        yield rl.Example(prompt="hi")

    def reward(self, example, completion):
        return float(completion == "")
"""


def says(token):
    """Writes a folder, once per token, whose model says nothing else."""

    def write(folder):
        shape = dataclasses.replace(preset("llama3:micro", 262), eos_token_ids=(CONFIGURED,), tie_embeddings=False)
        model = lockstep.build_model(shape, dtype="float32", seed=0)
        with torch.no_grad():
            for name, values in model.named_parameters():
                values.fill_(1.0) if "norm" in name or "embed" in name else values.zero_()
            model.lm_head.weight[token] = 1.0
        lockstep.save_model(model, folder)
        write_tokenizer(folder, TURNS)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": GENERATION, "temperature": 0.6}))
        return folder

    return write


@pytest.mark.parametrize(
    ("token", "reason", "chat"),
    [(97, "stop", True), (99, "stop", False), (256, "stop", True), (258, "stop", False), (257, "length", False)],
)
def test_generate_ends_at_each_of_them_and_at_no_other(tmp_path, capsys, token, reason, chat):
    options = ["--prompt", "hi", "--temperature", "0", "--max-tokens", "3", "--device", "cpu"]
    output = tmp_path / "out.jsonl"
    given = ["generate", "--model", says(token)(tmp_path / "model"), *options, "--output", output]
    assert main([*map(str, given), *["--chat"] * chat]) == 0
    line = json.loads(output.read_text())
    assert (line["finish_reason"], line["token_ids"]) == (reason, [token] * (1 if reason == "stop" else 3))
    assert line["completion"] == ""
    assert f", {NAMES} | cpu" in capsys.readouterr().err


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return says(TURN)(tmp_path_factory.mktemp("turn") / "model")


def test_rl_ends_there_and_its_checkpoints_say_so(tmp_path, capsys, folder):
    (tmp_path / "task.py").write_text(ENVIRONMENT)
    run = ["rl", "--model", folder, "--environment", f"{tmp_path / 'task.py'}:Short", "--output", tmp_path / "out"]
    sizes = "--steps 1 --prompts-per-step 1 --samples-per-prompt 2 --max-new-tokens 4 --device cpu --dtype float32"
    assert main([*map(str, run), *sizes.split()]) == 0
    assert f", {NAMES} | cpu" in capsys.readouterr().err
    samples = [json.loads(line) for file in tmp_path.rglob("step_*.jsonl") for line in file.read_text().splitlines()]
    assert {sample["finish_reason"] for sample in samples} == {"stop"}
    (saved,) = (tmp_path / "out" / "checkpoints").glob("step_*1")
    assert AutoModelForCausalLM.from_pretrained(saved).generation_config.eos_token_id == [97, 98, 99, 256, 258]


def test_fine_tuning_saves_the_templates_end_of_turn_too(tmp_path, folder):
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    run = ["sft", "--model", folder, "--data", tmp_path / "data.jsonl", "--output", tmp_path / "run", "--steps", "1"]
    sizes = ["--sequence-length", "64", "--tokens-per-step", "64", "--device", "cpu"]
    assert main([*map(str, run), *sizes]) == 0
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step_*1")
    assert json.loads((saved / "config.json").read_text())["eos_token_id"] == [97, 98, 99, 256, 258]


def test_convert_writes_them_where_others_read_them(tmp_path, folder):
    convert(folder, tmp_path / "one")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "one").generation_config
    assert (theirs.eos_token_id, theirs.temperature) == ([97, 98, 99, 256, 258], 0.6)
    assert json.loads((tmp_path / "one" / "config.json").read_text())["eos_token_id"] == theirs.eos_token_id
    convert(tmp_path / "one", tmp_path / "two")
    files = ["config.json", "generation_config.json"]
    assert [(tmp_path / "one" / f).read_text() for f in files] == [(tmp_path / "two" / f).read_text() for f in files]
