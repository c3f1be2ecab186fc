"""Folders from folders: every family, a run's checkpoint and Meta's own format, with the same logits; what cannot be
loaded is not converted."""

import json
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from lockstep import build_model, load_model, save_model
from lockstep.checkpoint.convert import convert
from lockstep.checkpoint.meta_llama import LAYER_NAMES
from lockstep.cli import main
from lockstep.errors import UserError
from lockstep.model import load_weights, preset
from tests.checkpoint.runs import files_of_at_most

TOKENS = [3, 1, 41, 59, 26, 53, 58, 97]


def _tensors(folder):
    return {n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()}


@pytest.mark.parametrize("family", ["qwen3:micro", "llama3:tiny"])
def test_a_folder_is_written_in_another_dtype_and_in_several_files(tmp_path, family):
    save_model(build_model(preset(family, 100), dtype="float32"), tmp_path / "one")
    convert(tmp_path / "one", tmp_path / "two", "bfloat16", max_file_bytes=400_000)
    convert(tmp_path / "two", tmp_path / "three", "float32")
    one, two, three = (_tensors(tmp_path / name) for name in ("one", "two", "three"))
    assert len(list((tmp_path / "two").glob("model-*.safetensors"))) > 2
    assert one.keys() == two.keys() == three.keys()
    assert all(torch.equal(one[n].bfloat16(), two[n]) and torch.equal(two[n].float(), three[n]) for n in one)
    assert load_model(tmp_path / "two").dtype == torch.bfloat16


def test_a_reward_model_keeps_the_pad_token_with_which_transformers_scores_batches(tmp_path):
    shape = replace(preset("llama3:micro", 100), score_head=True, tie_embeddings=False, pad_token_id=3)
    save_model(build_model(shape, "float32", seed=0), tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "converted")
    assert load_model(tmp_path / "converted").config == shape
    one, two = (
        AutoModelForSequenceClassification.from_pretrained(tmp_path / name)(torch.tensor([[5, 6, 7], [8, 9, 3]])).logits
        for name in ("saved", "converted")
    )
    assert torch.equal(one, two)
    load_weights(build_model(replace(shape, pad_token_id=4), "float32"), tmp_path / "converted")  # is not the model's


def test_a_runs_checkpoint_becomes_a_model_folder_by_command(tmp_path, capsys):
    (tmp_path / "t.txt").write_text("some text to learn from. " * 50)
    run = ["pretrain", "--model", "qwen3:micro", "--data", str(tmp_path / "t.txt"), "--output", str(tmp_path / "run")]
    assert main([*run, "--steps", "1", "--tokens-per-step", "128", "--sequence-length", "32", "--device", "cpu"]) == 0
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "model"), "--dtype", "float32"]) == 0
    names = {p.name for p in (tmp_path / "model").iterdir()}
    tokenizer = {"byte_tokenizer.json", "tokenizer.json", "tokenizer_config.json"}
    assert names == {"config.json", "model.safetensors"} | tokenizer
    assert main(["generate", "--model", str(tmp_path / "model"), "--prompt", "a", "--max-tokens", "1"]) == 0
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "model")]) == 2
    assert "is not an empty folder" in capsys.readouterr().err


def _write_as_meta(model, folder, ranks, **params):
    """The inverse of the conversion: neighbouring rotary rows, Meta's names, cut for `ranks` tensor-parallel ranks."""
    config = model.config
    folder.mkdir()
    values = {"dim": config.dim, "n_layers": config.num_layers, "n_heads": config.num_heads, "vocab_size": -1}
    values |= {"n_kv_heads": config.num_kv_heads, "norm_eps": config.norm_eps, "rope_theta": config.rope_theta}
    (folder / "params.json").write_text(json.dumps(values | params))
    cut = {"tok_embeddings.weight": (model.embed_tokens.weight, 0), "norm.weight": (model.norm.weight, None)}
    cut["output.weight"] = (model.head_weight, 0)
    weights = dict(model.named_parameters())
    for layer in range(config.num_layers):
        for meta, (ours, axis) in LAYER_NAMES.items():
            weight = weights[f"layers.{layer}.{ours}.weight"]
            if ours.endswith(("q_proj", "k_proj")):
                heads = weight.shape[0] // config.head_dim
                halves = weight.view(heads, 2, config.head_dim // 2, config.dim)
                weight = halves.transpose(1, 2).reshape(weight.shape)
            cut[f"layers.{layer}.{meta}.weight"] = (weight, axis)
    for rank in range(ranks):
        part = {n: (w if a is None else w.chunk(ranks, a)[rank]).detach().clone() for n, (w, a) in cut.items()}
        torch.save(part | {"rope.freqs": torch.zeros(4)}, folder / f"consolidated.{rank:02}.pth")


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_metas_format_gives_the_logits_that_transformers_gives(tmp_path, ranks):
    from transformers import AutoModelForCausalLM

    model = build_model(preset("llama3:tiny", 100), dtype="float32", seed=2)
    save_model(model, tmp_path / "known")
    _write_as_meta(model, tmp_path / "meta", ranks, use_scaled_rope=True)
    assert main(["convert", str(tmp_path / "meta"), str(tmp_path / "converted")]) == 0
    known, converted = _tensors(tmp_path / "known"), _tensors(tmp_path / "converted")
    assert known.keys() == converted.keys() and all(torch.equal(known[n], converted[n]) for n in known)
    logits = [
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)(torch.tensor([TOKENS])).logits
        for name in ("known", "converted")
    ]
    assert torch.equal(*logits)
    assert load_model(tmp_path / "converted").config == load_model(tmp_path / "known").config


def test_a_head_that_equals_the_embedding_is_tied_and_its_frequencies_are_those_of_the_small_models(tmp_path):
    model = build_model(preset("llama3:tiny", 100), dtype="bfloat16", seed=2)
    model.lm_head.weight.data.copy_(model.embed_tokens.weight)
    _write_as_meta(model, tmp_path / "meta", 2, use_scaled_rope=True)
    convert(tmp_path / "meta", tmp_path / "converted")
    config = load_model(tmp_path / "converted").config
    assert config.tie_embeddings and config.rope_scaling.factor == 32.0
    assert "lm_head.weight" not in _tensors(tmp_path / "converted")


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    marker = tmp_path / "ran"
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "params.json").write_text('{"dim": 8, "n_layers": 1, "n_heads": 1}')

    class Harm:
        def __reduce__(self):
            return (open, (str(marker), "w"))

    torch.save({"tok_embeddings.weight": Harm()}, tmp_path / "meta" / "consolidated.00.pth")
    with pytest.raises(UserError, match="consolidated.00.pth: cannot be read as plain tensors"):
        convert(tmp_path / "meta", tmp_path / "out")
    assert not marker.exists() and not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def meta(tmp_path_factory):
    folder = tmp_path_factory.mktemp("metas") / "meta"
    _write_as_meta(build_model(preset("llama3:tiny", 100), dtype="bfloat16"), folder, 2)
    return folder


def _set(**params):
    return lambda folder: _rewrite(folder / "params.json", params)


def _rewrite(path, params):
    path.write_text(json.dumps(json.loads(path.read_text()) | params))


def _reshape(name):
    def change(folder):
        tensors = torch.load(folder / "consolidated.00.pth")
        torch.save(tensors | {name: torch.zeros(3)}, folder / "consolidated.00.pth")

    return change


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda f: (f / "consolidated.01.pth").unlink(), r"tensor model.layers.0.self_attn.q_proj.weight has shape"),
        (lambda f: [p.unlink() for p in f.glob("*.pth")], "no consolidated"),
        (lambda f: (f / "params.json").unlink(), r"neither config.json .Hugging Face. nor params.json"),
        (lambda f: (f / "params.json").write_text("{}"), "params.json: cannot be read as Meta's parameters"),
        (lambda f: (f / "params.json").write_text("[" * 100_000), "cannot be read as Meta's parameters"),
        (_set(n_heads="x"), "n_heads is 'x'"),
        (_set(n_heads=0), "n_heads is 0"),
        (_set(n_heads=6), "do not fit each other or the heads"),
        (_set(n_layers=10**6), "has 1000000 layers, the files have fewer"),
        (_set(norm_eps="x"), "norm_eps is 'x'"),
        (_reshape("tok_embeddings.weight"), r"tok_embeddings.weight has the shape \[3\]"),
        (_reshape("layers.0.attention.wq.weight"), r"wq.weight has the shape \[3\]"),
        (_reshape(5), "contains more than tensors"),
    ],
)
def test_an_incomplete_or_odd_folder_of_metas_is_named(meta, tmp_path, harm, message):
    shutil.copytree(meta, tmp_path / "meta")
    harm(tmp_path / "meta")
    with pytest.raises(UserError, match=message):
        convert(tmp_path / "meta", tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("*.partial"))


@pytest.mark.slow
def test_converting_needs_little_more_memory_than_a_tensor(tmp_path):
    config = preset("qwen3:small", 8000)
    model = build_model(config, dtype="float32")
    size = sum(p.nbytes for p in model.parameters())
    save_model(model, tmp_path / "one", max_shard_bytes=10**8)
    del model
    script = f"""
from lockstep.checkpoint.convert import convert
own = lambda: int([l for l in open("/proc/self/status") if l.startswith("RssAnon")][0].split()[1]) * 1024
import threading, time
peak, before = [0], own()
def watch():
    while True:
        peak[0] = max(peak[0], own())
        time.sleep(0.002)
threading.Thread(target=watch, daemon=True).start()
convert({str(tmp_path / "one")!r}, {str(tmp_path / "two")!r}, "bfloat16")
print(peak[0] - before)
"""
    used = int(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)
    # The largest tensor in both dtypes is 37 MB; mapped files are the kernel's to drop.
    assert size > 3.5e8 and used < 0.3 * size, used / size


@pytest.mark.parametrize("pickled", [b"\x80\x02" + b"0" * 2**20, b"\x80\x02(."], ids=["repeats", "small"])
def test_parts_that_are_compressed_or_no_pickles_are_refused(tmp_path, pickled):
    (tmp_path / "params.json").write_text('{"dim": 8, "n_layers": 1, "n_heads": 1}')
    kind = zipfile.ZIP_DEFLATED if len(pickled) > 100 else zipfile.ZIP_STORED
    with zipfile.ZipFile(tmp_path / "consolidated.00.pth", "w", kind) as file:
        for name, content in {"data.pkl": pickled, "version": b"3\n", "byteorder": b"little"}.items():
            file.writestr(f"archive/{name}", content)
    said = "its parts are compressed" if kind else "pop from empty list"
    with pytest.raises(UserError, match=rf"consolidated\.00\.pth: cannot be read as plain tensors .{said}"):
        convert(tmp_path, tmp_path / "converted")


def test_a_disk_that_is_full_is_named_and_nobody_elses_folder_is_touched(tmp_path):
    save_model(build_model(preset("llama3:tiny", 100), dtype="bfloat16"), tmp_path / "model")
    theirs = tmp_path / "out.partial"
    theirs.mkdir()
    (theirs / "mine").write_text("precious")
    message = f"{tmp_path / 'out'}: cannot be written .File too large.; free space"
    with files_of_at_most(2**20), pytest.raises(UserError, match=message):
        convert(tmp_path / "model", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"model", "out.partial"}
    convert(tmp_path / "model", tmp_path / "out")
    assert (theirs / "mine").read_text() == "precious" and (tmp_path / "out" / "config.json").is_file()


EXPERTS = "model.layers.0.mlp.experts."


def folder_with(tmp_path, change=None, family="qwen3_moe", **config):
    save_model(build_model(preset(f"{family}:micro", 64), "bfloat16", seed=0), tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    if change:
        change(tensors)
        save_file(tensors, tmp_path / "model" / "model.safetensors")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return tmp_path / "model"


def stacked(rows=slice(None), experts=slice(None)):
    def change(tensors):
        parts = [tensors.pop(f"{EXPERTS}{e}.gate_proj.weight") for e in range(8)]
        tensors[f"{EXPERTS}gate_proj"] = torch.stack(parts)[experts, rows].contiguous()

    return change


def cast(name, dtype):
    return lambda tensors: tensors.update({name: tensors[name].to(dtype)})


MOE, DEEPSEEK = "qwen3_moe", "deepseek_v3"


@pytest.mark.parametrize(
    ("family", "change", "config", "message"),
    [
        (MOE, stacked(rows=slice(64)), {}, r"gate_proj has shape \[8, 64, 128\], but"),
        (MOE, stacked(experts=slice(4)), {}, r"gate_proj has shape \[4, 128, 128\], but"),
        (MOE, cast(f"{EXPERTS}3.up_proj.weight", torch.float8_e4m3fn), {}, "up_proj.weight is F8_E4M3; only"),
        (DEEPSEEK, cast("model.layers.1.mlp.gate.e_score_correction_bias", torch.int64), {}, "bias is I64; only"),
        (MOE, None, dict(num_hidden_layers=10**12), "num_hidden_layers is 1000000000000"),
        (MOE, None, dict(num_attention_heads=0), "at least one head"),
        (MOE, None, dict(num_experts=10**9, num_local_experts=10**9), "weights, but the files have"),
        (MOE, None, dict(mlp_only_layers=[True]), "must be a list of layers"),
        (DEEPSEEK, None, dict(routed_scaling_factor=True), "must be a number above 0"),
        ("gpt_oss", None, dict(rope_scaling=dict(rope_type="yarn", factor=1e-300)), "factor is 1e-300"),
    ],
)
def test_what_cannot_be_loaded_is_not_converted(tmp_path, family, change, config, message):
    folder = folder_with(tmp_path, change, family, **config)
    with pytest.raises(UserError, match=message):
        load_model(folder)
    with pytest.raises(UserError, match=message):
        convert(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
