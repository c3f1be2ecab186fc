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
from lockstep.checkpoint.manifest import MANIFEST, _with_checksum, damage
from lockstep.cli import main
from lockstep.config import ParallelConfig
from lockstep.errors import UserError
from lockstep.parallel import World
from tests.checkpoint.runs import checkpoints_of, equal, rewrite_state, trainer_of, update, whole

WORLD = World(torch.device("cpu"))
KINDS = ("flip", "cut", "remove", "swap within", "swap with another checkpoint", "old manifest", "old file")


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
    if kind == "cut":
        length = draw.randrange(file.stat().st_size)
        os.truncate(file, length)
        return f"{name} cut to {length} bytes"
    if kind == "remove":
        file.unlink()
        return f"{name} removed"
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


def _rename_a_piece(files):
    entry = files["model.safetensors"]
    entry["pieces"][0]["name"] = "model.nowhere"


HOSTILE = {
    "unknown piece": _rename_a_piece,
    "outside": lambda files: files.update({"../../secret": files["state.json"]}),
    "absolute": lambda files: files.update({"/etc/hostname": files["state.json"]}),
    "no state": lambda files: files.pop("state.json"),
    "no sizes": lambda files: files["state.json"].pop("bytes"),
    "a box beyond the tensor": lambda files: files["model.safetensors"]["pieces"][0].update(offsets=[10**9, 0]),
    "a name that no file can have": lambda files: files.update({"a\0b": files["state.json"]}),
}


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


@pytest.mark.parametrize(
    "harm, named",
    [
        (lambda f: os.truncate(f / "model.safetensors", 5000), r"model.safetensors has 5000 bytes instead of \d+"),
        (lambda f: _flip(f / "model.safetensors", -1), "model.safetensors: tensor .* does not match its checksum"),
        (
            lambda f: _flip(f / "trainer/optimizer.safetensors", -9),
            "trainer/optimizer.safetensors: tensor step.* checksum",
        ),
        (lambda f: _flip(f / "model.safetensors", 40), "model.safetensors does not match its checksum"),
        (lambda f: _flip(f / "state.json", 3), "state.json does not match its checksum"),
        (lambda f: (f / "trainer/random.safetensors").unlink(), "trainer/random.safetensors is missing"),
        (lambda f: (f / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda f: os.truncate(f / "manifest.json", 99), "manifest.json cannot be read .*"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_newest_whole_one_is_used(saved, newest, tmp_path, harm, named, caplog):
    harm(newest)
    assert saved[2].resume()["mark"] == 2 and saved[2].trainer.updates == 2
    assert re.search(f"step_00000003 cannot be resumed from: {named}; trying an older one", caplog.text)
    if "tensor" in named and "model" in named:
        with pytest.raises(UserError, match=f"is damaged: {named}; use an older checkpoint"):
            convert(newest, tmp_path / "converted")
        assert not (tmp_path / "converted").exists()


def test_a_run_of_which_no_checkpoint_is_whole_cannot_resume(saved, tmp_path):
    run, _, checkpoints = saved
    alone = checkpoints_of(tmp_path, checkpoints.trainer)
    shutil.copytree(checkpoints_in(run / "checkpoints")[0], tmp_path / "checkpoints" / "step_00000003")
    (tmp_path / "checkpoints" / "step_00000003" / MANIFEST).unlink()
    with pytest.raises(UserError, match="cannot resume from any checkpoint in it, the oldest because manifest.json is"):
        alone.resume()


@pytest.mark.parametrize("harm", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_manifest_with_a_right_checksum_of_its_own_is_still_not_believed(saved, newest, harm, caplog):
    files = json.loads((newest / MANIFEST).read_text())["files"]
    harm(files)
    (newest / MANIFEST).write_bytes(_with_checksum(json.dumps(files).encode()))
    assert saved[2].resume()["mark"] == 2 and f"{newest.name} cannot be resumed from" in caplog.text


@pytest.mark.parametrize("deep", [b"[" * 200_000, b"[]", b'{"state.json": 3}', b"null", b"\xff"])
def test_a_manifest_of_another_shape_is_damage(saved, newest, deep, caplog):
    (newest / MANIFEST).write_bytes(_with_checksum(deep))
    assert damage(newest) and damage(newest, checksums=False)
    assert saved[2].resume()["mark"] == 2


@pytest.mark.parametrize("text", [b"[" * 200_000, b"{}", b"null", b'{"step": 2, "model_only": false}', b"\xff"])
def test_a_state_of_another_shape_is_damage_whatever_the_manifest_says(saved, newest, text, caplog):
    rewrite_state(newest, text)
    assert saved[2].resume()["mark"] == 2 and "cannot be resumed from: state.json" in caplog.text


@pytest.mark.parametrize("values", ['"updates": null', '"updates": Infinity', '"updates": 7, "mark": [3]'])
def test_a_state_that_no_one_can_restore_is_damage_and_nothing_of_it_stays(saved, newest, values, caplog):
    _, _, checkpoints = saved
    rewrite_state(newest, b'{"step": 3, "model_only": false, "mark": 3, %s}' % values.encode())
    restored = []
    checkpoints.resume(lambda state: restored.append(int(state["mark"])))
    assert restored == [2] and checkpoints.trainer.updates == 2
    assert "step_00000003 cannot be resumed from: it cannot be read (" in caplog.text


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
