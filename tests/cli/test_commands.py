"""The command line as a user meets it: its output, messages and exit codes."""

import json
import shutil
import subprocess
import sys
import tomllib
from types import SimpleNamespace

import pytest

import lockstep
from lockstep.checkpoint.manifest import MANIFEST, write_manifest
from lockstep.cli import main
from lockstep.commands.generate import Prompt, _stream
from lockstep.data import ByteTokenizer
from lockstep.errors import UserError
from lockstep.model.layers import FeedForward


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "lockstep", *arguments], capture_output=True, text=True, timeout=120)


def test_parity_prints_its_table_and_exits_0(model_folder, capsys):
    assert main(["parity", "--model", str(model_folder), "--tokens", "200"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Bitwise identical : True" and lines[2] == "Tokens different  : 0"
    assert lines[4].startswith("Arithmetic        : ") and lines[4].endswith(", on both sides")
    assert lines[3] == "Max delta         : 0.000000e+00" and int(lines[1].split(":")[1]) >= 200


def test_parity_refuses_a_model_with_an_operator_that_nobody_vouches_for(model_folder, monkeypatch, capsys):
    monkeypatch.setattr(FeedForward, "forward", lambda self, x: x.mean(-1, keepdim=True).expand_as(x))
    assert main(["parity", "--model", str(model_folder), "--tokens", "20"]) == 2
    said = capsys.readouterr()
    assert "forward uses PyTorch's mean" in said.err and "identical" not in said.out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("pretrian", 'unknown command "pretrian". Did you mean "pretrain"'),
        ("grpo", 'unknown command "grpo". Use lockstep rl.'),
        ("rl --recipe gsm9k", 'unknown recipe "gsm9k". Did you mean "gsm8k"'),
        ("rl", "model is empty; give a Hugging Face folder with --model DIR"),
        ("rl --model /nowhere", "which environment? Give --environment code, "),
        ("pretrain --model qwen3:tini", 'unknown model "qwen3:tini". Did you mean "qwen3:tiny"'),
        ("pretrain --data /nowhere/*.txt", "no such file, folder or match"),
        ("pretrain --config /nowhere.toml", "/nowhere.toml: cannot be read (No such file"),
        ("pretrain --recipe llama3_8b --output run", "source would be used, which is too little for llama3:8b"),
        (
            f"pretrain --recipe llama3_8b --output run --data {__file__}",
            'tokenizer is "byte", whose 258 tokens are too few for llama3:8b',
        ),
        ("pretrain --output rum --resume", "rum: has no run to resume; to start one, give its settings along with"),
        ("pretrain --model MODEL --device cuda:99 --output run", 'device is "cuda:99"'),
        ("rl --model MODEL --device cuda:99 --environment digit_sum --output run", 'device is "cuda:99"'),
        ("serve --model MODEL --device cuda:99 --port 0", 'device is "cuda:99"'),
        ("generate --model MODEL --device cuda:99 --prompt a", 'device is "cuda:99"'),
        ("generate --model /nowhere --prompt x", "/nowhere: no such folder"),
        ("generate --model a\x1b]0;b\x07 --prompt x", "a\\x1b]0;b\\x07"),
        (
            "generate --model MODEL --prompt a --max-tokens 3 --overwrite --output /dev/full",
            "/dev/full: cannot be written (No space left on device)",
        ),
    ],
)
def test_bad_input_gets_one_clear_message_and_exit_code_2(
    command, message, capsys, tmp_path, model_folder, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main([word.replace("MODEL", str(model_folder)) for word in command.split(" ")]) == 2
    said = capsys.readouterr().err
    assert message in said and said.replace("\n", "").isprintable() and not list(tmp_path.iterdir())


def test_a_config_file_starts_a_run_and_the_command_line_overrides_it(tmp_path):
    (tmp_path / "c.toml").write_text('model = "qwen3:micro"\ntokens_per_step = 256\nsequence_length = 32\nsteps = 9\n')
    (tmp_path / "t.txt").write_text("some text to learn from. " * 50)
    arguments = ["--config", str(tmp_path / "c.toml"), "--data", str(tmp_path / "t.txt"), "--steps", "2"]
    assert main(["pretrain", *arguments, "--output", str(tmp_path / "run"), "--train.warmup-steps", "1"]) == 0
    resolved = (tmp_path / "run" / "config.toml").read_text()
    assert "steps = 2\n" in resolved and "tokens_per_step = 256" in resolved and "warmup_steps = 1" in resolved
    (tmp_path / "c.toml").write_text("stepz = 9\n")
    assert main(["pretrain", "--config", str(tmp_path / "c.toml")]) == 2


def _tiny_run(tmp_path, *more):
    (tmp_path / "t.txt").write_text("some text to learn from. " * 50)
    options = ["--model", "qwen3:micro", "--data", str(tmp_path / "t.txt"), "--output", str(tmp_path / "run")]
    return ["pretrain", *options, "--tokens-per-step", "256", "--sequence-length", "32", "--device", "cpu", *more]


def test_a_run_says_what_runs_where_records_what_it_chose_and_is_spared_by_one_that_reads_it(tmp_path, capsys):
    assert main(_tiny_run(tmp_path, "--steps", "2")) == 0
    output = capsys.readouterr()
    chosen, line = output.err.splitlines()[-2:]
    config = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    dtype, arithmetic = config["dtype"], config["arithmetic"]
    assert dtype in ("float32", "bfloat16") and arithmetic in ("portable", "bf16_pairs", "bf16_tiles")
    assert chosen.startswith(f"dtype auto: {dtype}, ") and (arithmetic == "portable") == (dtype == "float32")
    assert line.startswith("pretrain: qwen3:micro, 821k parameters | cpu (") and " thread" in line
    assert line.endswith(f"| {dtype}, {arithmetic} arithmetic | 512 tokens to go, 256 per step")
    assert "pretrain: qwen3" not in output.out
    for name, inside in (("model", "checkpoints/step_00000002"), ("data", "metrics.jsonl")):
        path = tmp_path / "run" / inside
        assert main(["pretrain", "--output", str(tmp_path / "run"), "--overwrite", f"--{name}", str(path)]) == 2
        assert f"{name} {path} is in" in capsys.readouterr().err and path.exists(), "which the run is to read"
    state = json.loads((tmp_path / "run" / "checkpoints" / "step_00000002" / "state.json").read_text())
    assert state["arithmetic"] == arithmetic
    model = lockstep.load_model(tmp_path / "run")  # Python takes a run's folder, too
    for sequences, message in [
        ([[1, 258]], "token 258 at position 1 of sequence 0 is outside the vocabulary of 258"),
        ([[1], []], "sequence 1 is empty"),
    ]:
        with pytest.raises(UserError, match=message):
            lockstep.score(model, sequences)


def test_resuming_to_other_bits_is_named(tmp_path, caplog, capsys):
    assert main(_tiny_run(tmp_path, "--steps", "1", "--dtype", "float32")) == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000001"
    state = json.loads((checkpoint / "state.json").read_text())
    (checkpoint / "state.json").write_text(json.dumps(state | {"arithmetic": "cuda sm_90"}, indent=1))
    (checkpoint / MANIFEST).unlink()
    write_manifest(checkpoint, [])
    assert main(_tiny_run(tmp_path, "--steps", "2", "--resume")) == 0
    assert "dtype auto: float32, as the run began" in capsys.readouterr().err
    assert f"computed in cuda sm_90 arithmetic, but the run resumes in {state['arithmetic']}" in caplog.text
    assert main(_tiny_run(tmp_path, "--steps", "3", "--resume", "--parallel.reduction-chunks", "2")) == 0
    assert "computed with reduction_chunks 1, but the run resumes with 2" in caplog.text
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text())["parallel"]["reduction_chunks"] == 2


def test_generate_prints_only_its_result_on_stdout(model_folder):
    result = run("generate", "--model", str(model_folder), "--prompt", "def f(", "--max-tokens", "3", "--device", "cpu")
    assert result.returncode == 0 and result.stdout.startswith("def f(") and "parameters" not in result.stdout
    assert len(result.stdout) > len("def f(\n")
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"generate: {model_folder}, ") and line.endswith("arithmetic | up to 3 tokens to go")


@pytest.mark.parametrize("command", ["parity --matrix covering", "demo"])
def test_commands_of_one_process_are_refused_under_torchrun_by_name(command, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(command.split()) == 2
    command = command.removesuffix(" covering")
    assert f"{command} runs in one process so far, but torchrun started 2" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["generate", "--prompt", "a"], ["parity"], ["serve"]])
def test_as_many_ranks_as_the_tensor_degree_must_run(command, model_folder, monkeypatch, capsys):
    for degree, ranks, said in [
        ("2", "1", "parallel.tensor is 2, but the number of ranks is 1; start torchrun --nproc-per-node 2"),
        ("3", "1", "parallel.tensor is 3; give 1, 2, 4 or 8"),
        ("1", "2", "parallel.tensor is 1, but the number of ranks is 2; give --parallel.tensor 2, or"),
    ]:
        monkeypatch.setenv("WORLD_SIZE", ranks)
        assert main([*command, "--model", str(model_folder), "--parallel.tensor", degree]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.slow
def test_parity_over_ranks_explains_a_difference_of_one_of_them(model_folder, tmp_path):
    script = tmp_path / "differs.py"
    script.write_text(
        "import os, sys\nfrom lockstep import ops\nfrom lockstep.cli import main\nexact = ops.silu_mul\n"
        "def differs(gate, up):\n    out = exact(gate, up)\n"
        # Not one row alone: whether there are such steps depends on what drafts gain.
        "    return out * 2 if os.environ['RANK'] == '1' and len(gate) <= 8 else out\n"
        "ops.silu_mul = differs\nsys.exit(main(sys.argv[1:]))\n"
    )
    options = ["parity", "--model", str(model_folder), "--tokens", "200", "--parallel.tensor", "2", "--explain"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script), *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "The first operator that differs is layer 0, silu_mul on tensor rank 1: " in result.stdout, result.stderr
    assert "Bitwise identical : False" in result.stdout and result.returncode != 0


@pytest.mark.slow
def test_generate_on_two_ranks_writes_once_what_one_process_writes(model_folder, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\nanother one\n")
    options = ["generate", "--model", str(model_folder), "--prompts", str(prompts), "--max-tokens", "8", "--seed", "3"]
    both = []
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "lockstep"]
    shutil.copytree(model_folder, tmp_path / "model")
    # A checkpoint's files: it comes from a run, which had bits of its own.
    (tmp_path / "model" / "state.json").write_text('{"arithmetic": "portable"}')
    write_manifest(tmp_path / "model", [])
    options[2] = str(tmp_path / "model")
    alone = [sys.executable, "-m", "lockstep", *options, "--parallel.reduction-chunks", "2"]
    for command in (alone, [*torchrun, *options, "--parallel.tensor", "2"]):
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, result.stderr
        assert result.stderr.count("was trained with reduction_chunks 1, but 2 are used here") == 1
        both.append([json.loads(line) for line in result.stdout.splitlines()])
    assert both[0] == both[1] and [line["prompt"] for line in both[0]] == ["one", "another one"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pretrain", "--lr", "1"], "there is no --lr; use --train.learning-rate"),
        (["pretrain", "--batch_size=8"], "there is no --batch-size; use --tokens-per-step"),
        (["generate", "--max-new-tokens", "8"], "there is no --max-new-tokens; use --max-tokens"),
        (["sft", "--num-train-epochs", "2"], "use --epochs or --steps"),
        (["pretrain", "--bf16"], "use --dtype bfloat16"),
        (["pretrain", "--parallelism.tensor_parallel_degree", "2"], "use --parallel.tensor"),
        (["rl", "--loss-type", "dapo"], "use --algorithm or --loss or --loss-average"),
        (["serve", "--enable-auto-tool-choice"], "format of the model's chat template; leave it out"),
        (["serve", "--reasoning-parser", "qwen3"], "format of the model's chat template; leave it out"),
        (["serve", "--tool-call-parser=hermes"], "format of the model's chat template; leave it out"),
        (["serve", "--chat-template", "x.jinja"], "put the template into the model's folder as chat_template.jinja"),
        (["serve", "--enable-lora"], "name the adapters with --lora-modules NAME=FOLDER"),
        (["serve", "--max-model-len", "9"], "use --max-prompt-tokens"),
        (["serve", "--trust-remote-code"], "there is no --trust-remote-code: code in a model's folder is never run"),
        (["serve", "run-sft"], "run-sft: settings have names; give the model as --model run-sft"),
        (["pretrain", "run/config.toml"], "give the file as --config run/config.toml"),
        (["pretrain", "--dtype", "bf16"], 'is not one of auto, bfloat16, float32. Did you mean "bfloat16"?'),
        (["dpo", "--loss=sigmoid"], 'is not one of dpo, ipo, simpo, kto. Did you mean "dpo"?'),
        (["kto"], 'unknown command "kto". Use lockstep dpo --loss kto.'),
        (["rl", "--samples-per-promt", "3"], ""),
    ],
)
def test_an_option_of_another_trainer_is_answered_with_the_name_it_has_here(arguments, said, capsys):
    if said:
        assert main(arguments) == 2 and said in capsys.readouterr().err
    else:  # not an option of this command under any name: the parser's own answer, with the nearest
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2 and "--samples-per-prompt" in capsys.readouterr().err


def test_help_may_be_cut_off():
    command = f"{sys.executable} -m lockstep sft --help | head -1; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert "Traceback" not in result.stderr and result.stdout.startswith("Fine-tuning on"), result.stderr


def test_every_name_that_is_answered_exists_in_some_command():
    from lockstep.commands.generate import GenerateOptions
    from lockstep.commands.option_names import LOCKSTEP_NAMES, options_of
    from lockstep.config import DPOConfig, PretrainConfig, RLConfig, ServeConfig, SFTConfig

    known = {
        name
        for kind in (PretrainConfig, RLConfig, ServeConfig, SFTConfig, GenerateOptions, DPOConfig)
        for name, _ in options_of(kind)
    }
    assert {name.partition(" ")[0] for names in LOCKSTEP_NAMES.values() for name in names} <= known


def test_resuming_takes_the_settings_of_the_run_and_says_what_the_command_line_changes(tmp_path, capsys, caplog):
    assert main(_tiny_run(tmp_path, "--steps", "1", "--train.learning-rate", "0.002", "--resume")) == 0
    assert "run has no run to resume: this is its first start" in capsys.readouterr().err
    run = tmp_path / "run"
    begun = tomllib.loads((run / "config.toml").read_text())
    assert main(["pretrain", "--output", str(run), "--resume", "--steps", "2"]) == 0
    assert "resumes with different settings: steps 2, was 1" in caplog.text
    assert "learning_rate" not in caplog.text and "dtype" not in caplog.text
    assert tomllib.loads((run / "config.toml").read_text()) == begun | {"steps": 2, "resume": True}
    assert json.loads((run / "summary.json").read_text())["resumed_from"] == 1
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    # A file is between the run's own settings and the command line.
    (tmp_path / "more.toml").write_text("steps = 3\n[train]\nlearning_rate = 0.001\n")
    caplog.clear()
    arguments = ["pretrain", f"--output={run}", "--resume", "--config", str(tmp_path / "more.toml")]
    assert main([*arguments, "--train.learning-rate", "0.003"]) == 0
    assert "settings: steps 3, was 2; train.learning_rate 0.003, was 0.002" in caplog.text
    recorded = (run / "config.toml").read_text()
    assert main(["pretrain", "--output", str(run), "--resume", "--steps", "1"]) == 2
    assert "run is at step 3, but is to end at step 1, counted from its beginning" in capsys.readouterr().err
    assert (run / "config.toml").read_text() == recorded
    (run / "config.toml").write_text("")
    assert main(["pretrain", "--output", str(run), "--resume"]) == 2
    assert "config.toml: is empty" in capsys.readouterr().err


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_gets_no_control_characters_of_a_models(capsys, monkeypatch, terminal):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    engine = SimpleNamespace(stream=lambda ids, params: [SimpleNamespace(token_id=byte) for byte in b"\x1b[2Jok\n"])
    _stream("a", Prompt({}, "a"), None, engine, ByteTokenizer())
    assert capsys.readouterr().out == ("a\\x1b[2Jok\n\n" if terminal else "a\x1b[2Jok\n\n")
