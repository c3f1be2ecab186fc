"""Everything that samples ends at the same tokens, says which, and saves them for others."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

import lockstep
from lockstep.checkpoint.convert import convert
from lockstep.cli import main
from lockstep.commands.chat import ChatOptions, open_chat
from lockstep.config import EngineConfig, ServeConfig
from lockstep.generate.server import build_service
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


@pytest.mark.parametrize("token, reason", [(97, "stop"), (99, "stop"), (256, "stop"), (258, "stop"), (257, "length")])
@pytest.mark.parametrize("chat", [True, False])
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


def ended(tmp_path, capsys, *command):
    """The samples that a command wrote, after its start line."""
    (tmp_path / "task.py").write_text(ENVIRONMENT)
    given = ["--environment", f"{tmp_path / 'task.py'}:Short", "--max-new-tokens", "4", "--device", "cpu"]
    assert main([*map(str, command), *given, "--dtype", "float32", "--output", str(tmp_path / "out")]) == 0
    assert f", {NAMES} | cpu" in capsys.readouterr().err
    files = [*(tmp_path / "out").rglob("completions_*.jsonl"), *(tmp_path / "out").rglob("step_*.jsonl")]
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_eval_ends_there(tmp_path, capsys, folder):
    (sample,) = ended(tmp_path, capsys, "eval", "--model", folder)
    assert (sample["finish_reason"], sample["token_ids"], sample["completion"]) == ("stop", [TURN], "")


@pytest.mark.parametrize("chat", ["auto", "never"])
def test_rl_ends_there_and_its_checkpoints_say_so(tmp_path, capsys, folder, chat):
    run = ["--steps", "1", "--prompts-per-step", "1", "--samples-per-prompt", "2"]
    samples = ended(tmp_path, capsys, "rl", "--model", folder, "--chat", chat, *run)
    assert {sample["finish_reason"] for sample in samples} == {"stop"}
    (saved,) = (tmp_path / "out" / "checkpoints").glob("step_*1")
    assert AutoModelForCausalLM.from_pretrained(saved).generation_config.eos_token_id == [97, 98, 99, 256, 258]


def test_chat_ends_there(folder, capsys):
    session = open_chat(ChatOptions(model=str(folder), temperature=0.0, device="cpu"))
    assert "".join(session.answer("hi", [])) == "" and not session.was_truncated
    assert f", {NAMES} | cpu" in capsys.readouterr().err


def test_serve_ends_there_for_texts_and_chats(folder):
    engine = EngineConfig(cache_tokens=256, max_sequences=2)
    service = build_service(ServeConfig(model=str(folder), device="cpu", engine=engine), folder)
    ((sample,),) = service.engine.generate([[104]], lockstep.SamplingParams(max_tokens=4, temperature=0))
    assert (sample.finish_reason, sample.token_ids) == ("stop", [TURN])


@pytest.mark.slow
def test_the_server_names_them_when_it_starts(folder):
    command = [sys.executable, "-m", "lockstep", "serve", "--model", str(folder), "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ)
    try:
        start = next(line for line in process.stderr if "parameters" in line or "rror" in line)
        assert f", {NAMES} | cpu" in start
    finally:
        process.kill()
        process.communicate()


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
