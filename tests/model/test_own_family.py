"""Families in users' files: sizes, shapes and folders, in every process of a run, and errors that name the file."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, SeedOssConfig

from lockstep import Engine, EngineConfig, SamplingParams, build_model, load_model, save_model, score
from lockstep.checkpoint import newest_checkpoint
from lockstep.config import ActorsConfig, EvalConfig, LoraConfig, PretrainConfig, RLConfig, SFTConfig, TrainConfig
from lockstep.data import ByteTokenizer
from lockstep.errors import UserError
from lockstep.hub import is_local, is_model, local_folder, split_family
from lockstep.model import preset, read_config
from lockstep.model.families import own
from lockstep.rl.evaluate import evaluate
from lockstep.rl.reinforce import reinforce
from lockstep.train.pretrain import pretrain
from lockstep.train.sft import finetune
from tests.rl.small_runs import EvenBytes

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
MINE = f"{EXAMPLES / 'my_family.py'}"
TEXTS = ["a text of a few words " * 20] * 4
FILE = """
from lockstep.model.config import ModelConfig
ARCHITECTURE, MODEL_TYPE = "FileForCausalLM", "file"
CONSTANTS = dict(vocab_size=258, qk_norm="head")
DEFAULTS = dict(rms_norm_eps=1e-6, rope_theta=1e4, max_position_embeddings=64, tie_word_embeddings=True)
SIZE = dict(dim=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48)
PRESETS = {"tiny": SIZE}
"""


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No family of another test is known."""
    monkeypatch.setattr(own, "OWN", {})
    monkeypatch.setattr("lockstep.model.families.settings.OWN", own.OWN)


def forget():
    own.OWN.clear()


def family(folder, text="", name="family.py"):
    (folder / name).write_text(FILE + text)
    return str(folder / name)


def samples_with_the_bits_of_score(model):
    prompts = [[5, 9, 2], list(range(40, 75))]
    params = SamplingParams(max_tokens=12, n=2, seed=1, ignore_eos=True)
    groups = Engine(model, EngineConfig(cache_tokens=512, max_tokens_per_step=16)).generate(prompts, params)
    pairs = [(prompt, c) for prompt, group in zip(prompts, groups) for c in group]
    scores = score(model, [prompt + list(c.token_ids) for prompt, c in pairs])
    return all(torch.equal(s[len(p) - 1 :], torch.tensor(c.logprobs)) for s, (p, c) in zip(scores, pairs))


def pretrained(model, output, **settings):
    config = PretrainConfig(
        output=str(output), model=model, tokens_per_step=128, sequence_length=64, dtype="float32",
        train=TrainConfig(tokens_per_microbatch=128), **{"steps": 2, **settings},
    )  # fmt: skip
    return pretrain(config, TEXTS)


@pytest.mark.parametrize("name", ["tiny", "config"])
def test_a_run_of_an_own_family_is_saved_resumed_opened_and_sampled_from(tmp_path, name):
    run = pretrained(f"{MINE}:{name}", tmp_path / "run")
    stopped = pretrained(f"{MINE}:{name}", tmp_path / "stopped", steps=1)
    forget()
    pretrained(f"{MINE}:{name}", stopped, resume=True)
    forget()
    with pytest.raises(UserError, match='"MyForCausalLM" is not supported. The nearest family is '):
        load_model(newest_checkpoint(run))
    model, resumed = (load_model(f"{MINE}:{newest_checkpoint(each)}") for each in (run, stopped))
    assert all(map(torch.equal, model.parameters(), resumed.parameters()))
    assert replace(model.config, eos_token_ids=()) == preset(f"{MINE}:{name}", 258)
    assert model.config.rotated == (True, True, True, False) and samples_with_the_bits_of_score(model)


def test_further_runs_start_from_a_folder_of_an_own_family(tmp_path):
    run = pretrained(f"{MINE}:tiny", tmp_path / "run")
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n' * 4)
    start = f"{MINE}:{run}"
    for lora in (0, 2):
        forget()
        config = SFTConfig(
            output=str(tmp_path / f"sft{lora}"), model=start, data=str(tmp_path / "data.jsonl"), steps=1,
            tokens_per_step=128, sequence_length=64, lora=LoraConfig(rank=lora), dtype="float32",
        )  # fmt: skip
        finetuned = finetune(config)
        forget()
        finetune(replace(config, model=f"{MINE}:{newest_checkpoint(run)}", resume=True, steps=2))
        forget()
        assert samples_with_the_bits_of_score(load_model(f"{MINE}:{newest_checkpoint(finetuned)}"))
    forget()
    rl = RLConfig(
        output=str(tmp_path / "rl"), model=start, steps=1, prompts_per_step=2, samples_per_prompt=2, max_new_tokens=4,
        dtype="float32", teacher="",
    )  # fmt: skip
    reinforce(rl, EvenBytes())
    forget()
    evaluation = EvalConfig(
        model=(f"{MINE}:{tmp_path / 'rl'}", start),
        output=str(tmp_path / "eval"),
        max_new_tokens=4,
        samples_per_prompt=2,
    )
    assert len(evaluate(evaluation, EvenBytes()).results) == 2


@pytest.mark.slow
def test_generators_in_processes_of_their_own_know_the_family(tmp_path):
    run = pretrained(f"{MINE}:tiny", tmp_path / "run")
    (tmp_path / "task.py").write_text("from tests.rl.small_runs import EvenBytes\nclass Task(EvenBytes):\n    pass\n")
    config = RLConfig(
        output=str(tmp_path / "rl"), model=f"{MINE}:{run}", environment=f"{tmp_path / 'task.py'}:Task", steps=2,
        prompts_per_step=2, samples_per_prompt=2, max_new_tokens=4, dtype="float32",
        actors=ActorsConfig(generators=1, threads=1),
    )  # fmt: skip
    assert is_model(f"{MINE}:{reinforce(config)}")


@torch.no_grad()
@pytest.mark.parametrize("output_bias", [False, True])
def test_the_example_of_seed_oss_reads_what_transformers_wrote(tmp_path, output_bias):
    torch.manual_seed(0)
    config = SeedOssConfig(
        vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, attention_out_bias=output_bias, pad_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    for name, tensor in model.named_parameters():
        tensor.copy_(1 + 0.2 * torch.randn_like(tensor)) if "norm" in name else tensor.normal_(0, 0.15)
    model.save_pretrained(tmp_path / "theirs")
    with pytest.raises(UserError, match='"SeedOssForCausalLM" is not supported. The nearest family is '):
        load_model(tmp_path / "theirs")
    ours = load_model(f"{EXAMPLES / 'seed_oss.py'}:{tmp_path / 'theirs'}")
    tokens = torch.randint(101, (40,), generator=torch.Generator().manual_seed(1))
    logits = model.eval()(tokens[None]).logits[0].log_softmax(-1)
    expected = logits[:-1].gather(1, tokens[1:, None])[:, 0]
    # Both sides sum in float32, in different orders, through two layers.
    torch.testing.assert_close(score(ours, [tokens.tolist()])[0], expected, rtol=1e-4, atol=1e-4)
    assert samples_with_the_bits_of_score(ours)
    save_model(ours, tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nothing_of_that_name", r"family\.py:8: does not import \(ModuleNotFoundError: No module named"),
        ("def (", r"family\.py:8: does not import \(SyntaxError"),
        ("del MODEL_TYPE", r"family\.py: MODEL_TYPE is missing; a family's file has ARCHITECTURE, MODEL_TYPE, CONST"),
        ("CONSTANTS = [1]", r"family\.py: CONSTANTS is \[1\]; it must be of type dict"),
        ("WITHOUT_EFFECT = ['a']", r"family\.py: WITHOUT_EFFECT is \['a'\]; it must be of type set"),
        ("read_attention = 3", r"family\.py: read_attention is 3; it must be a function"),
        ("read_experts = print", r"family\.py: has read_experts but no write_experts, its inverse"),
        ("ARCHITECTURE = 'FileModel'", r'family\.py: ARCHITECTURE is "FileModel"; its name must end in ForCausalLM'),
        ("del DEFAULTS['rope_theta']", r"family\.py: DEFAULTS has no rope_theta; say what"),
        ("CONSTANTS['qk_nrom'] = 'head'", r'family\.py: CONSTANTS: qk_nrom is not a .* Did you mean "qk_norm"\?'),
        ("SIZE['heads'] = 2", r'family\.py: PRESETS\["tiny"\]: heads is not a field of ModelConfig'),
        ("PRESETS['tiny'] = 3", r'family\.py: PRESETS\["tiny"\] is 3; it must be a dict'),
        ("del SIZE['dim'], SIZE['head_dim']", r'PRESETS\["tiny"\]: lacks dim, head_dim; set them there or in CONST'),
        ("SIZE['dim'] = '32'", r'PRESETS\["tiny"\]: .* not supported between instances of'),
        ("SIZE['num_kv_heads'] = 3", r'PRESETS\["tiny"\]: model: 2 heads do not divide'),
        # What a folder would not say.
        (
            "SIZE['rotated'] = (True, False)",
            r"family\.py: rotated is \(True, False\), but .* gives \(\); write",
        ),
        ("SIZE['embedding_scale'] = 2.0", r"family\.py: embedding_scale is 2\.0, but .* gives 1\.0; write it there"),
    ],
)
def test_a_bad_file_is_refused_for_what_is_wrong_with_it(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        preset(f"{family(tmp_path, text)}:tiny")


def test_a_name_that_the_file_lacks_is_refused_with_those_that_it_has(tmp_path):
    file = family(tmp_path, "config = ModelConfig(family=__file__, **CONSTANTS | SIZE)")
    assert preset(f"{file}:tiny") == preset(f"{file}:config")
    with pytest.raises(UserError, match=r'no folder "tny", .* Did you mean "tiny"\? It has: tiny, config'):
        preset(f"{file}:tny")
    with pytest.raises(UserError, match=r"family\.py: which model of this family\? Write .*family\.py:SIZE"):
        preset(file)
    with pytest.raises(UserError, match=r"none\.py: no such file; give the family as FILE\.py:NAME"):
        preset(f"{tmp_path / 'none.py'}:tiny")
    with pytest.raises(UserError, match=rf'other\.py: MODEL_TYPE is "file", as in {file}'):
        preset(f"{family(tmp_path, name='other.py')}:tiny")


def test_a_file_may_replace_a_family_of_lockstep(tmp_path, caplog):
    save_model(build_model(replace(preset("qwen2:micro", 258), num_layers=1), "float32", seed=0), tmp_path / "model")
    file = family(
        tmp_path,
        'ARCHITECTURE, MODEL_TYPE = "Qwen2ForCausalLM", "qwen2"\nCONSTANTS = dict(qkv_bias=True, norm_offset=True)\n'
        'ONLY = {"use_sliding_window": False}\nWITHOUT_EFFECT = {"sliding_window", "max_window_layers"}\n',
    )
    assert read_config(tmp_path / "model").family == "qwen2"
    model = load_model(f"{file}:{tmp_path / 'model'}")
    assert (model.config.family, model.config.norm_offset) == (file, True)
    assert f"all folders of model_type qwen2 are read with {file} now, not as qwen2" in caplog.text


def test_a_folder_never_has_a_file_imported(tmp_path):
    marked = family(tmp_path, f"open({str(tmp_path / 'imported')!r}, 'w')")
    base = tmp_path / "base"
    save_model(build_model(preset("llama3:micro", 258), "float32", seed=0), base)
    ByteTokenizer().save(base)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    settings = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "base_model_name_or_path": f"{marked}:{base}"}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    values = json.loads((base / "config.json").read_text())
    shutil.copytree(base, other := tmp_path / "other")
    for change in ({"family": marked}, {"model_type": marked}, {"architectures": [f"{marked}:tiny"]}):
        (other / "config.json").write_text(json.dumps(values | change))
        with pytest.raises(UserError):
            load_model(other)
    with pytest.raises(UserError):
        load_model(adapter)
    assert local_folder(f"{marked}:{base}") == base and is_local(f"{marked}:{base}") and not is_local(f"{marked}:tiny")
    assert not (tmp_path / "imported").exists()
    preset(f"{marked}:tiny")
    assert (tmp_path / "imported").exists()


def test_names_are_split_at_the_first_file():
    assert split_family("a/my.py:b:c") == ("a/my.py", "b:c") and split_family(Path("m.py:run/x")) == ("m.py", "run/x")
    for name in ("qwen3:tiny", "my.py", "my.py:", "", "org/model@main", "a.pyx:b"):
        assert split_family(name) == ("", name)
    assert is_model("my.py:org/model") and not is_model("my.py:tiny")
