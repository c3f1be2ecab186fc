"""Runs and adapters that are moved or copied, and what other tools find in a run's folder."""

import json
import shutil
from dataclasses import replace

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from lockstep import load_model, score
from lockstep.checkpoint import newest_checkpoint
from lockstep.checkpoint.folders import adapters_that_need
from lockstep.checkpoint.manifest import damage
from lockstep.cli import main
from lockstep.config import CheckpointConfig, LoraConfig, TrainConfig
from lockstep.errors import UserError
from lockstep.model import adapter_folder, base_folder, read_config, write_adapter_description
from lockstep.model.adapter_folder import BASE
from lockstep.train.pretrain import pretrain
from tests.train.runs import text_run

ROWS = [list(range(5, 40))]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run in `all/full`, and one in `all/lora` that trains an adapter for its newest checkpoint; their settings."""
    home = tmp_path_factory.mktemp("adapters")
    full = text_run(
        home, "all/full", steps=2, tokens_per_step=64, sequence_length=32,
        checkpoint=CheckpointConfig(every=1, keep_last=1),
        train=TrainConfig(learning_rate=1e-2, warmup_steps=0, schedule="constant", tokens_per_microbatch=64),
    )  # fmt: skip
    pretrain(full)
    lora = replace(full, output=str(home / "all" / "lora"), model=full.output, lora=LoraConfig(rank=2))
    pretrain(lora)
    (home / "all").rename(home / "untouched")
    return home, full, lora


@pytest.fixture
def runs(trained, monkeypatch):
    """`trained`, as it was, where it was made."""
    monkeypatch.delenv(BASE, raising=False)
    home, full, lora = trained
    shutil.rmtree(home / "all", ignore_errors=True)
    shutil.copytree(home / "untouched", home / "all", symlinks=True)
    return home / "all", full, lora


def _scores(folder):
    return score(load_model(folder), ROWS)[0]


def test_base_and_adapter_that_move_together_are_loaded_and_resumed_as_they_are(runs, tmp_path):
    before, lora = _scores(runs[0] / "lora"), tmp_path / "elsewhere" / "lora"
    shutil.copytree(runs[0], tmp_path / "copy", symlinks=True)
    assert base_folder(newest_checkpoint(tmp_path / "copy" / "lora")).is_relative_to(tmp_path / "copy")
    runs[0].rename(tmp_path / "elsewhere")
    assert torch.equal(_scores(lora), before)
    again = pretrain(replace(runs[2], output=str(lora), steps=3, resume=True))
    assert newest_checkpoint(again).name == "step_00000003"


def test_an_adapter_alone_asks_for_its_base_and_takes_it_from_the_option(runs, tmp_path, capsys, monkeypatch):
    before = _scores(runs[0] / "lora")
    shutil.copytree(runs[0] / "full", tmp_path / "base")
    (runs[0] / "lora").rename(tmp_path / "moved")
    shutil.rmtree(runs[0])
    command = ["generate", "--model", str(tmp_path / "moved"), "--prompt", "the", "--max-tokens", "2", "--seed", "1"]
    assert main(command) == 2
    assert "its base was not found" in (said := capsys.readouterr().err) and "say where it is with --base DIR" in said
    monkeypatch.setenv(BASE, "")  # so that what the command sets is undone
    assert main([*command, "--base", str(tmp_path / "base")]) == 0
    assert torch.equal(_scores(tmp_path / "moved"), before), "and so do processes that the command starts"
    assert main([*command, "--base"]) == 2


def test_a_corrected_path_leaves_the_checkpoint_whole_and_other_changes_do_not(runs, tmp_path):
    (runs[0] / "full").rename(tmp_path / "base")
    folder = newest_checkpoint(runs[0] / "lora")
    file = folder / "adapter_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"base_model_name_or_path": str(newest_checkpoint(tmp_path / "base"))}))
    assert damage(folder) == "" and len(_scores(runs[0] / "lora")) == len(ROWS[0]) - 1
    file.write_text(json.dumps(settings | {"lora_alpha": 1.0}))
    assert damage(folder) == "adapter_config.json does not match its checksum"


def test_a_moved_run_resumes_with_its_base_and_the_bits_of_one_that_did_not_move(runs, tmp_path, monkeypatch):
    *_, lora = runs
    pretrain(replace(lora, output=str(tmp_path / "whole"), steps=4))
    (runs[0] / "full").rename(tmp_path / "base")
    (runs[0] / "lora").rename(tmp_path / "moved")
    monkeypatch.setenv(BASE, "")
    base, run = str(tmp_path / "base"), str(tmp_path / "moved")
    assert main(["pretrain", "--resume", "--output", run, "--steps", "4", "--base", base]) == 0
    ends = [newest_checkpoint(tmp_path / name) / "adapter_model.safetensors" for name in ("whole", "moved")]
    assert ends[0].read_bytes() == ends[1].read_bytes()


def test_a_base_that_is_another_model_is_refused(runs, tmp_path, monkeypatch):
    other = replace(runs[1], output=str(tmp_path / "other"), seed=1)
    monkeypatch.setenv(BASE, str(newest_checkpoint(pretrain(other))))
    with pytest.raises(UserError, match="for other weights than those in .*other.*; give its own base with --base DIR"):
        load_model(runs[0] / "lora")


def test_a_checkpoint_that_adapters_need_outlives_newer_ones_and_is_not_overwritten(runs, caplog):
    _, full, _ = runs
    kept = newest_checkpoint(runs[0] / "full")
    assert adapters_that_need(kept) == [str(runs[0] / "lora")]
    (runs[0] / "lora").rename(runs[0] / "moved")  # which nobody notes
    pretrain(replace(full, steps=4, resume=True))
    assert kept.is_dir() and base_folder(newest_checkpoint(runs[0] / "moved")) == kept
    said = [m for m in caplog.messages if "is kept because it is the base of the adapter in" in m]
    assert len(said) == 1 and str(runs[0] / "lora") in said[0], "said once"
    with pytest.raises(UserError, match="step_00000002 is the base of an adapter, which would lose it"):
        pretrain(replace(full, steps=1, overwrite=True))
    (kept / "adapters.json").unlink()
    pretrain(replace(full, steps=5, resume=True))
    assert not kept.exists()


def test_transformers_and_peft_load_a_run_by_its_link_to_the_newest_checkpoint(runs):
    theirs = AutoModelForCausalLM.from_pretrained(runs[0] / "full" / "latest", dtype=torch.float32)
    own = score(load_model(runs[0] / "full"), ROWS)[0]
    with torch.no_grad():
        logits = theirs(torch.tensor(ROWS)).logits[0, :-1].log_softmax(-1)
    found = logits.gather(1, torch.tensor(ROWS[0][1:])[:, None])[:, 0]
    torch.testing.assert_close(found, own, rtol=0, atol=1e-4)  # float32 sums in another order
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(runs[0] / "lora" / "latest")
    assert adapted.peft_config["default"].r == 2
    shutil.copytree(runs[0] / "full", runs[0] / "copy", symlinks=True)
    assert (runs[0] / "copy" / "latest").resolve() == newest_checkpoint(runs[0] / "copy").resolve()


def test_the_link_follows_newer_checkpoints_and_a_run_with_it_can_be_overwritten(runs):
    _, full, _ = runs
    (newest_checkpoint(runs[0] / "full") / "adapters.json").unlink()
    (runs[0] / "full" / "latest.partial").symlink_to("nowhere")  # as a run leaves it that is killed there
    pretrain(replace(full, steps=3, resume=True))
    assert (runs[0] / "full" / "latest").resolve().name == "step_00000003"
    pretrain(replace(full, steps=1, overwrite=True))
    assert (runs[0] / "full" / "latest").resolve().name == "step_00000001"


def test_a_base_from_the_hub_is_recorded_and_found_by_its_name(runs, tmp_path, monkeypatch):
    snapshot = tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / "0123abc"
    shutil.copytree(newest_checkpoint(runs[0] / "full"), snapshot)
    folder = newest_checkpoint(runs[0] / "lora")
    write_adapter_description(folder, read_config(folder), snapshot, "digest")
    (folder / "manifest.json").unlink()
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["revision"]) == ("Qwen/Qwen3-0.6B", "0123abc")
    asked = []
    monkeypatch.setattr(adapter_folder, "local_folder", lambda name: asked.append(name) or snapshot)
    assert base_folder(folder) == snapshot and asked == ["Qwen/Qwen3-0.6B@0123abc"]
