"""Model folders: what is written is what was there, and a bad folder is named for what is wrong with it."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep import build_model, load_model, save_model
from lockstep.errors import UserError
from lockstep.model import preset


@pytest.mark.parametrize(("family", "dtype"), [("qwen3:micro", "bfloat16"), ("llama3:micro", "float32")])
def test_a_folder_survives_loading_and_saving_tensor_by_tensor_in_shards_and_whole(tmp_path, family, dtype):
    model = build_model(replace(preset(family, 100), num_layers=2), dtype=dtype)
    save_model(model, tmp_path / "one")
    save_model(load_model(tmp_path / "one"), tmp_path / "two", max_shard_bytes=2 * 10**5)
    first = load_file(tmp_path / "one" / "model.safetensors")
    shards = sorted((tmp_path / "two").glob("*.safetensors"))
    second = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    assert len(shards) > 1 and first.keys() == second.keys()
    assert all(torch.equal(first[n], second[n]) and first[n].dtype == second[n].dtype for n in first)
    for (name, one), two in zip(model.named_parameters(), load_model(tmp_path / "two").parameters(), strict=True):
        assert torch.equal(one, two), name
    save_model(model, tmp_path / "two")
    assert sorted(p.name for p in (tmp_path / "two").iterdir()) == ["config.json", "model.safetensors"], "nothing stale"


@pytest.mark.slow
def test_loading_needs_little_more_memory_than_the_model(tmp_path):
    config = preset("qwen3:small", 60000)
    model = build_model(config, dtype="float32")
    size = sum(p.nbytes for p in model.parameters())
    save_model(model, tmp_path, max_shard_bytes=10**8)
    del model
    script = f"""
import resource, torch
from lockstep import load_model
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
model = load_model({str(tmp_path)!r})
print(peak() - before)
"""
    used = int(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)
    assert size > 4e8 and used <= 1.2 * size, used / size


def test_the_meta_device_allocates_nothing_and_a_seed_gives_the_same_weights():
    model = build_model(preset("llama3:8b"), device="meta")
    assert all(p.is_meta for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == preset("llama3:8b").num_parameters == 8_030_261_248
    one, two = (build_model(preset("qwen3:micro"), dtype=d, seed=5) for d in ("float32", "bfloat16"))
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(one.parameters(), two.parameters()))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder of a small model, which nobody changes."""
    folder = tmp_path_factory.mktemp("whole")
    save_model(build_model(replace(preset("qwen3:micro", 100), num_layers=2), dtype="float32"), folder)
    return folder


def _set(**values):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def _tensors(change):
    def rewrite(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return rewrite


def _renamed(rename):
    return _tensors(lambda t: [t.update({rename(name): t.pop(name)}) for name in list(t)])


NAME, NORM = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"
SLIDING = ["sliding_attention"] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "config.json: not valid JSON"),
        (
            lambda f: (f / "adapter_config.json").write_text("{}"),
            "both a model .config.json. and an adapter .adapter_c",
        ),
        (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors nor"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x" * 100), "cannot be read as safetensors"),
        # What transformers would read otherwise, or not at all.
        (
            _set(architectures=["Qwen3NewForCausalLM"]),
            'NewForCausalLM" is not supported. The nearest family is qwen3 ',
        ),
        (_set(architectures=None, model_type="qwen4", a=1), '"qwen4" is not .* nearest family is qwen3; .* keys a'),
        (_set(model_type="llama"), "model_type is 'llama', but architectures Qwen3ForCausalLM"),
        (
            _set(text_config={"hidden_size": 8}),
            "text_config describes the language model inside a larger one .Q",
        ),
        (_set(layer_types=["chunked_attention"] * 2), "layer_types is .* it must name one of sliding_attention"),
        (_set(layer_types=SLIDING), "layer_types has sliding_attention, which needs use_sliding_window and sliding_w"),
        (
            _set(layer_types=SLIDING, use_sliding_window=True, sliding_window=0),
            "sliding_window is 0; it must be a whol",
        ),
        (_set(head_dims=64), 'key head_dims is not known for qwen3; .* Did you mean "head_dim"'),
        (_set(b=0.5, a=2.0, null=None), r"config\.json: key a is not known for qwen3; .* The same holds for b\."),
        (_set(hidden_act="gelu"), "hidden_act is 'gelu'; only 'silu'"),
        (_set(num_key_value_heads=3), "config.json: model: 4 heads do not divide into 3"),
        (_set(rms_norm_eps=10**400), "rms_norm_eps is 1000.*must be a number above 0"),
        (_set(rms_norm_eps=float("nan")), "rms_norm_eps is nan"),
        (_set(rope_parameters={"rope_type": "proportional"}), 'rope type "proportional" is not supported'),
        (_set(rope_parameters={"rope_type": "longrope"}), "short_factor is None; rope type longrope needs a list"),
        (_set(rope_parameters={"rope_type": "yarn"}), "rope type yarn needs factor"),
        (_set(rope_scaling={"type": "mrope", "factor": 2.0}), 'rope_scaling: rope type "mrope" is not supported'),
        (_set(rope_scaling={"type": "linear"}), "rope_scaling: rope type linear needs factor"),
        *((_set(dtype=dtype), rf"config.json: dtype is '?{dtype}") for dtype in ("float16", 16, "nn")),
        # Tensors that are missing, with the reason if their names tell it, or too many.
        (_set(tie_word_embeddings=False), "lm_head.weight is missing, the output head: the model was saved without it"),
        (_tensors(lambda t: t.pop(NAME)), f"tensor {NAME} is missing"),
        (_tensors(lambda t: t.update({NAME: torch.zeros(3, 4)})), f"{NAME} has shape .3, 4., but .* .384, 128."),
        (_tensors(lambda t: t.update({"model.odd": torch.zeros(3)})), "tensor model.odd is not part of this model"),
        (_tensors(lambda t: t.update({"norm.weight": torch.ones(128)})), "tensor norm.weight is not part of"),
        (_renamed(lambda n: f"module._orig_mod.{n}"), 'have the prefix "module._orig_mod." of a wrapper'),
        (_renamed(lambda n: f"module.{n.removeprefix('model.')}"), 'have the prefix "module."'),
        (_renamed(lambda n: f"base_model.model.{n}"), 'have the prefix "base_model.model."'),
        (_renamed(lambda n: n.replace("q_proj.weight", "q_proj.qweight")), "qweight is part of a quantized weight"),
        (_tensors(lambda t: t.update({f"{NORM}_scale_inv": torch.ones(1)})), "weight_scale_inv is part of a quant"),
    ],
)
def test_a_bad_folder_is_refused_for_what_is_wrong_with_it(tmp_path, whole, change, message):
    shutil.copytree(whole, folder := tmp_path / "changed")
    change(folder)
    with pytest.raises(UserError, match=message):
        load_model(folder)


@pytest.fixture
def sharded(tmp_path):
    """A folder of shards as a snapshot in a Hugging Face cache: links to blobs."""
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "abc", tmp_path / "hub" / "blobs"
    model = build_model(replace(preset("qwen3:micro", 100), num_layers=1))
    save_model(model, snapshot, max_shard_bytes=100_000)
    blobs.mkdir()
    for number, file in enumerate(sorted(snapshot.glob("*.safetensors"))):
        file.rename(blobs / str(number))
        file.symlink_to(f"../../blobs/{number}")
    return snapshot


def test_the_links_of_a_hugging_face_cache_are_followed(tmp_path, sharded):
    (tmp_path / "link").symlink_to(sharded)
    whole = load_model(tmp_path / "link").state_dict()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in load_model(sharded).state_dict().items())


@pytest.mark.parametrize("name", ["../blobs/0", "{hub}/blobs/0", "\0"])
def test_shard_names_that_leave_the_folder_are_refused(tmp_path, sharded, name):
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = name.format(hub=tmp_path / "hub")
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"index\.json: names .*, which is not in this folder"):
        load_model(sharded)


@pytest.mark.parametrize("shards", [True, False])
def test_links_that_leave_the_folder_are_refused(tmp_path, sharded, shards):
    if not shards:
        save_model(load_model(sharded), sharded)
    file = min(sharded.glob("*.safetensors"))
    elsewhere = tmp_path / "elsewhere.safetensors"
    elsewhere.write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(elsewhere)
    with pytest.raises(UserError, match=r"is a link to .*elsewhere\.safetensors, outside the model's folder"):
        load_model(sharded)
