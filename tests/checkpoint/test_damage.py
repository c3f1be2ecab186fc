"""Whatever happened to a checkpoint's files, it is named and the next older one is used."""

import json
import os
import random
import re
import shutil

import pytest
import torch

from lockstep.checkpoint import checkpoints_in, weights_folder
from lockstep.checkpoint.convert import convert
from lockstep.checkpoint.manifest import MANIFEST, _with_checksum
from lockstep.cli import main
from lockstep.config import ParallelConfig
from lockstep.errors import UserError
from lockstep.parallel import World
from tests.checkpoint.runs import checkpoints_of, equal, rewrite_state, trainer_of, update, whole

WORLD = World(torch.device("cpu"))
KINDS = ("flip", "swap within", "swap with another checkpoint", "old manifest", "old file")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Three checkpoints, what the first one holds, and the trainer that made them."""
    run = tmp_path_factory.mktemp("run")
    trainer = trainer_of(WORLD, ParallelConfig(), "float32", seed=3)
    with checkpoints_of(run, trainer) as checkpoints:
        for step in (1, 2, 3):
            update(trainer)
            held = whole(trainer) if step == 1 else held  # noqa: F821
            checkpoints.save(step, {"mark": step})
    return run, held, checkpoints


def _files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _harm(kind, draw, newest, older):
    """Damages `newest`, and `older` too where files change places; returns what was done."""
    file = draw.choice(_files(newest))
    name = file.relative_to(newest)
    if kind == "flip":
        # Half of them in the first bytes, where lengths and names are.
        size = file.stat().st_size
        position = draw.randrange(min(size, 200) if draw.random() < 0.5 else size)
        with file.open("r+b") as opened:
            opened.seek(position)
            byte = opened.read(1)[0]
            opened.seek(position)
            opened.write(bytes([byte ^ 1 << draw.randrange(8)]))
        return f"a bit of byte {position} of {name} flipped"
    if kind == "old manifest":
        shutil.copyfile(older / MANIFEST, newest / MANIFEST)
        return "the manifest of an older checkpoint"
    others = [older / name] if "another" in kind or kind == "old file" else _files(newest)
    if not (others := [other for other in others if other.read_bytes() != file.read_bytes()]):
        return ""
    other = draw.choice(others)
    contents = file.read_bytes(), other.read_bytes()
    file.write_bytes(contents[1])
    if kind != "old file":
        other.write_bytes(contents[0])
    return f"{kind}: {name} and {other}"


@pytest.mark.parametrize(("count", "seed"), [(28, 1), pytest.param(300, 2, marks=pytest.mark.slow)])
def test_of_many_random_damages_none_is_silent(saved, count, seed, caplog):
    run, held, checkpoints = saved
    draw = random.Random(seed)
    newest, older, _ = checkpoints_in(run / "checkpoints")
    untouched = run / "untouched"
    for folder in (newest, older):
        shutil.copytree(folder, untouched / folder.name)
    done = 0
    try:
        while done < count:
            if not (what := _harm(KINDS[done % len(KINDS)], draw, newest, older)):
                continue
            done += 1
            caplog.clear()
            state = checkpoints.resume()
            assert f"{newest.name} cannot be resumed from" in caplog.text, what
            between = "another" in what
            assert state["mark"] == (1 if between else 2), what
            assert not between or equal(whole(checkpoints.trainer), held), what
            for folder in (newest, older) if between else (newest,):
                for path in _files(untouched / folder.name):
                    back = folder / path.relative_to(untouched / folder.name)
                    if not back.is_file() or back.read_bytes() != path.read_bytes():
                        shutil.copyfile(path, back)
    finally:
        shutil.rmtree(untouched)
    assert checkpoints.resume()["mark"] == 3, "what was put back is whole"


@pytest.fixture
def newest(saved, tmp_path):
    run, _, _ = saved
    folder = checkpoints_in(run / "checkpoints")[0]
    shutil.copytree(folder, tmp_path / "untouched")
    yield folder
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "untouched", folder)


def _flip(path, position):
    with path.open("r+b") as file:
        file.seek(position, os.SEEK_SET if position >= 0 else os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def _manifest(body):
    return lambda folder: (folder / MANIFEST).write_bytes(_with_checksum(body))


def _in_manifest(change):
    """A manifest with a right checksum of its own."""

    def rewrite(folder):
        files = json.loads((folder / MANIFEST).read_text())["files"]
        change(files)
        _manifest(json.dumps(files).encode())(folder)

    return rewrite


def _state(text):
    return lambda folder: rewrite_state(folder, text)


MODEL = "model.safetensors"
HARMS = {
    "cut": (lambda f: os.truncate(f / MODEL, 5000), rf"{MODEL} has 5000 bytes instead of \d+"),
    "a value": (lambda f: _flip(f / MODEL, -1), f"{MODEL}: tensor .* does not match its checksum"),
    "a moment": (
        lambda f: _flip(f / "trainer/optimizer.safetensors", -9),
        "trainer/optimizer.safetensors: tensor step.* checksum",
    ),
    "a header": (lambda f: _flip(f / MODEL, 40), f"{MODEL} does not match its checksum"),
    "a state": (lambda f: _flip(f / "state.json", 3), "state.json does not match its checksum"),
    "a file": (lambda f: (f / "trainer/random.safetensors").unlink(), "trainer/random.safetensors is missing"),
    "no manifest": (lambda f: (f / MANIFEST).unlink(), "manifest.json is missing"),
    "half a manifest": (lambda f: os.truncate(f / MANIFEST, 99), "manifest.json cannot be read"),
    "unknown piece": (_in_manifest(lambda files: files[MODEL]["pieces"][0].update(name="model.nowhere")), ""),
    "outside": (_in_manifest(lambda files: files.update({"../../secret": files["state.json"]})), ""),
    "absolute": (_in_manifest(lambda files: files.update({"/etc/hostname": files["state.json"]})), ""),
    "unnameable": (_in_manifest(lambda files: files.update({"a\0b": files["state.json"]})), ""),
    "no state": (_in_manifest(lambda files: files.pop("state.json")), ""),
    "no sizes": (_in_manifest(lambda files: files["state.json"].pop("bytes")), ""),
    "a slice beyond": (_in_manifest(lambda files: files[MODEL]["pieces"][0].update(offsets=[10**9, 0])), ""),
    "a deep manifest": (_manifest(b"[" * 200_000), ""),
    "a list as manifest": (_manifest(b"[]"), ""),
    "a manifest of numbers": (_manifest(b'{"state.json": 3}'), ""),
    "a deep state": (_state(b"[" * 200_000), "state.json"),
    "an empty state": (_state(b"{}"), "state.json"),
    "another step's state": (_state(b'{"step": 2, "model_only": false}'), "state.json"),
    "a state that is no text": (_state(b"\xff"), "state.json"),
    "no updates": (_state(b'{"step": 3, "model_only": false, "updates": null, "mark": 3}'), "it cannot be read"),
    "infinite updates": (
        _state(b'{"step": 3, "model_only": false, "updates": Infinity, "mark": 3}'),
        "it cannot be read",
    ),
    "a mark": (_state(b'{"step": 3, "model_only": false, "mark": [3], "updates": 7}'), "it cannot be read"),
}


@pytest.mark.parametrize("name", HARMS)
def test_a_damaged_checkpoint_is_named_and_the_newest_whole_one_is_used(saved, newest, tmp_path, name, caplog):
    harm, said = HARMS[name]
    harm(newest)
    restored, (_, _, checkpoints) = [], saved
    checkpoints.resume(lambda state: restored.append(int(state["mark"])))
    assert restored == [2] and checkpoints.trainer.updates == 2, "nothing of the damaged one stays"
    assert re.search(f"step_00000003 cannot be resumed from: {said}.*; trying an older one", caplog.text)
    if name == "a value":
        with pytest.raises(UserError, match=f"is damaged: {said}; use an older checkpoint"):
            convert(newest, tmp_path / "converted")
        assert not (tmp_path / "converted").exists()


def test_a_run_of_which_no_checkpoint_is_whole_cannot_resume(saved, tmp_path):
    run, _, checkpoints = saved
    alone = checkpoints_of(tmp_path, checkpoints.trainer)
    shutil.copytree(checkpoints_in(run / "checkpoints")[0], tmp_path / "checkpoints" / "step_00000003")
    (tmp_path / "checkpoints" / "step_00000003" / MANIFEST).unlink()
    with pytest.raises(UserError, match="cannot resume from any checkpoint in it, the oldest because manifest.json is"):
        alone.resume()


def test_a_file_that_the_manifest_does_not_list_is_not_loaded(saved):
    run, _, checkpoints = saved
    newest, older, _ = checkpoints_in(run / "checkpoints")
    checkpoints.resume()
    held = whole(checkpoints.trainer)
    stranger = newest / "model-00002-of-00002.safetensors"
    shutil.copyfile(older / "model.safetensors", stranger)
    try:
        checkpoints.resume()
    finally:
        stranger.unlink()
    assert equal(whole(checkpoints.trainer), held)


def test_a_command_that_reads_a_model_says_what_is_wrong_with_the_checkpoints(tmp_path, saved, newest, capsys, caplog):
    run, _, _ = saved
    assert weights_folder(run) == newest and weights_folder(newest) == newest
    (newest / MANIFEST).write_bytes(b"{}")
    with pytest.raises(UserError, match=r"step_00000003: is not a complete checkpoint: manifest.json cannot be read"):
        weights_folder(newest)
    assert weights_folder(run).name == "step_00000002" and "step_00000003 is not complete: manifest.json" in caplog.text
    alone = tmp_path / "alone" / "checkpoints"
    shutil.copytree(newest, alone / newest.name)
    assert main(["generate", "--model", str(alone.parent), "--prompt", "a"]) == 2
    assert "has no complete checkpoint (step_00000003: manifest.json cannot" in capsys.readouterr().err
    (alone / newest.name).rename(alone / f"{newest.name}.partial")
    assert main(["generate", "--model", str(alone.parent), "--prompt", "a"]) == 2
    assert "is a run without a finished checkpoint yet" in capsys.readouterr().err
    assert main(["generate", "--model", str(alone / f"{newest.name}.partial"), "--prompt", "a"]) == 2
    assert "is an unfinished checkpoint" in capsys.readouterr().err
