"""The command line as a user meets it: real processes, their output and exit codes."""

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


@pytest.mark.slow
def test_a_task_from_a_file_goes_through_the_command_line(tmp_path, model_folder):
    (tmp_path / "my_task.py").write_text(
        "import lockstep.rl as rl\n\n"
        "class ReverseWord(rl.Environment):\n"
        "    def examples(self, split):\n"
        "        for word in ('stone', 'river'): yield rl.Example(prompt=f'Reverse: {word}\\n', answer=word[::-1])\n"
        "    def reward(self, example, completion):\n"
        "        return float(completion.strip() == example.answer)\n"
    )
    options = ["--environment", f"{tmp_path / 'my_task.py'}:ReverseWord", "--model", str(model_folder)]
    options += ["--output", str(tmp_path / "run"), "--steps", "2", "--prompts-per-step", "2", "--max-new-tokens", "6"]
    result = run("rl", *options)
    assert result.returncode == 0, result.stderr
    assert "0 different" in result.stdout and "largest ratio on a batch's first update: 1.0" in result.stdout
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["parity_tokens_different"] == 0
    again = run("rl", *options)
    assert again.returncode == 2 and "already contains a run" in again.stderr and "Traceback" not in again.stderr
    assert run("generate", "--model", str(tmp_path / "run"), "--prompt", "a", "--max-tokens", "2").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pretrian"], 'unknown command "pretrian". Did you mean "pretrain"'),
        (["grpo"], 'unknown command "grpo". Use lockstep rl.'),
        (["rl", "--recipe", "gsm9k"], 'unknown recipe "gsm9k". Did you mean "gsm8k"'),
        (["pretrain", "--recipe", "tny"], 'Did you mean "tiny"'),
        (["rl"], "model is empty; give a Hugging Face folder with --model DIR"),
        (["rl", "--model", "/nowhere"], "which environment? Give --environment code, "),
        (["rl", "--model", "/nowhere", "--environment", "digit_sum"], "/nowhere: no such folder"),
        (["pretrain", "--model", "qwen3:tini"], 'unknown model "qwen3:tini". Did you mean "qwen3:tiny"'),
        (["pretrain", "--data", "/nowhere/*.txt"], "no such file, folder or match"),
        (["generate", "--model", "/nowhere", "--prompt", "x"], "/nowhere: no such folder"),
        (["pretrain", "--config", "/nowhere.toml"], "/nowhere.toml: cannot be read (No such file"),
    ],
)
def test_bad_input_gets_one_clear_message_and_exit_code_2(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert message in output.err and not list(tmp_path.iterdir())


def test_an_unknown_option_is_met_with_the_nearest_one(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["rl", "--samples-per-promt", "3"])
    assert stopped.value.code == 2
    assert "--samples-per-prompt" in capsys.readouterr().err


def test_a_config_file_starts_a_run_and_the_command_line_overrides_it(tmp_path):
    (tmp_path / "c.toml").write_text('model = "qwen3:micro"\ntokens_per_step = 256\nsequence_length = 32\nsteps = 9\n')
    (tmp_path / "t.txt").write_text("some text to learn from. " * 50)
    arguments = ["--config", str(tmp_path / "c.toml"), "--data", str(tmp_path / "t.txt"), "--steps", "2"]
    assert main(["pretrain", *arguments, "--output", str(tmp_path / "run"), "--train.warmup-steps", "1"]) == 0
    resolved = (tmp_path / "run" / "config.toml").read_text()
    assert "steps = 2\n" in resolved and "tokens_per_step = 256" in resolved and "warmup_steps = 1" in resolved
    more = ["--model", str(tmp_path / "run"), "--tokenizer", str(tmp_path / "run"), "--output", str(tmp_path / "more")]
    assert main(["pretrain", *arguments, *more]) == 0
    (tmp_path / "c.toml").write_text("stepz = 9\n")
    assert main(["pretrain", "--config", str(tmp_path / "c.toml")]) == 2


def test_a_cache_that_others_may_write_to_is_met_with_one_message_and_exit_code_2(tmp_path, model_folder, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "lockstep").mkdir()
    (tmp_path / "lockstep").chmod(0o777)
    result = run("generate", "--model", str(model_folder), "--prompt", "a")
    last = result.stderr.splitlines()[-1]
    assert result.returncode == 2 and last.startswith("lockstep: ") and "other users can write" in last
    assert "Traceback" not in result.stderr


def _tiny_run(tmp_path, *more):
    (tmp_path / "t.txt").write_text("some text to learn from. " * 50)
    options = ["--model", "qwen3:micro", "--data", str(tmp_path / "t.txt"), "--output", str(tmp_path / "run")]
    return ["pretrain", *options, "--tokens-per-step", "256", "--sequence-length", "32", "--device", "cpu", *more]


def test_a_run_says_at_start_what_runs_where_and_records_what_it_chose_by_itself(tmp_path, capsys):
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
    state = json.loads((tmp_path / "run" / "checkpoints" / "step_00000002" / "state.json").read_text())
    assert state["arithmetic"] == arithmetic


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


def test_a_dry_run_of_a_cluster_says_what_dtype_it_takes(capsys):
    assert main(["pretrain", "--model", "qwen3:micro", "--dry-run", "4"]) == 0
    assert "parameters in bfloat16 (auto: which GPUs train faster in)" in capsys.readouterr().out


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
    arguments = [*command, "--model", str(model_folder)]
    assert main([*arguments, "--parallel.tensor", "2"]) == 2
    assert (
        "parallel.tensor is 2, but the number of ranks is 1; start torchrun --nproc-per-node 2"
        in capsys.readouterr().err
    )
    assert main([*arguments, "--parallel.tensor", "3"]) == 2
    assert "parallel.tensor is 3; give 1, 2, 4 or 8" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(arguments) == 2
    assert "parallel.tensor is 1, but the number of ranks is 2; give --parallel.tensor 2, or" in capsys.readouterr().err


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


@pytest.mark.slow
def test_what_rank_0_refuses_is_printed_once(model_folder, tmp_path):
    taken = tmp_path / "there.jsonl"
    taken.touch()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "lockstep", "generate"]
    options = ["--model", str(model_folder), "--prompt", "a", "--output", str(taken), "--parallel.tensor", "2"]
    result = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120)
    assert result.returncode != 0 and result.stderr.count("already exists; replace it with --overwrite") == 1


def test_a_full_disk_under_the_output_is_named(model_folder, capsys):
    options = ["--model", str(model_folder), "--prompt", "a", "--output", "/dev/full", "--overwrite"]
    assert main(["generate", *options, "--max-tokens", "3"]) == 2
    assert "/dev/full: cannot be written (No space left on device)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["rl", "--environment", "digit_sum"],
        ["generate", "--prompt", "a"],
        ["parity"],
        ["serve", "--port", "0"],
        ["pretrain"],
    ],
)
def test_every_command_refuses_a_device_that_is_not_there(arguments, model_folder, capsys, tmp_path):
    output = ["--output", str(tmp_path / "run")] if arguments[0] in ("rl", "pretrain") else []
    assert main([*arguments, *output, "--model", str(model_folder), "--device", "cuda:99"]) == 2
    assert 'device is "cuda:99"' in capsys.readouterr().err and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pretrain", "--lr", "1"], "there is no --lr; use --train.learning-rate"),
        (["pretrain", "--batch_size=8"], "there is no --batch-size; use --tokens-per-step"),
        (["rl", "--batch-size", "8"], "there is no --batch-size; use --prompts-per-step"),
        (["rl", "--num-generations", "8"], "use --samples-per-prompt"),
        (["generate", "--max-new-tokens", "8"], "there is no --max-new-tokens; use --max-tokens"),
        (["sft", "--num-train-epochs", "2"], "use --epochs or --steps"),
        (["pretrain", "--bf16"], "use --dtype bfloat16"),
        (["pretrain", "--train.lr", "1"], "there is no --train.lr; use --train.learning-rate"),
        (["pretrain", "--training.steps", "1"], "there is no --training.steps; use --steps"),
        (["pretrain", "--parallelism.tensor_parallel_degree", "2"], "use --parallel.tensor"),
        (["serve", "--tensor-parallel-size", "2"], "use --parallel.tensor"),
        (["sft", "--lora-r", "8"], "there is no --lora-r; use --lora.rank"),
        (["rl", "--inner-steps", "2"], "there is no --inner-steps; use --updates-per-batch"),
        (["rl", "--loss-type", "dapo"], "use --algorithm or --loss or --loss-average"),
        (["serve", "--max-model-len", "99"], "use --max-prompt-tokens"),
        (["serve", "--trust-remote-code"], "there is no --trust-remote-code: code in a model's folder is never run"),
        (["serve", "run-sft"], "run-sft: settings have names; give the model as --model run-sft"),
        (["pretrain", "run/config.toml"], "give the file as --config run/config.toml"),
        (["serve", "run/config.toml"], "give the model as --model run/config.toml"),
        (["pretrain", "--dtype", "bf16"], 'is not one of auto, bfloat16, float32. Did you mean "bfloat16"?'),
        (["dpo", "--loss=sigmoid"], 'is not one of dpo, ipo, simpo, kto. Did you mean "dpo"?'),
        (["rl", "--algorithm", "dapoo"], 'Did you mean "dapo"'),
        (["kto"], 'unknown command "kto". Use lockstep dpo --loss kto.'),
        (["generate", "--lr", "2"], ""),
    ],
)
def test_an_option_of_another_trainer_is_answered_with_the_name_it_has_here(arguments, said, capsys):
    if said:
        assert main(arguments) == 2 and said in capsys.readouterr().err
    else:  # not an option of this command under any name: the parser's own answer
        with pytest.raises(SystemExit):
            main(arguments)


def test_help_may_be_cut_off():
    command = f"{sys.executable} -m lockstep sft --help | head -1; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert "Traceback" not in result.stderr and result.stdout.startswith("Fine-tuning on"), result.stderr


def test_overwriting_spares_what_the_run_is_to_read(tmp_path, capsys):
    assert main(_tiny_run(tmp_path, "--steps", "1")) == 0
    for name, inside in (("model", "checkpoints/step_00000001"), ("data", "metrics.jsonl")):
        path = tmp_path / "run" / inside
        assert main(["pretrain", "--output", str(tmp_path / "run"), "--overwrite", f"--{name}", str(path)]) == 2
        assert f"{name} {path} is in" in capsys.readouterr().err and path.exists()


def test_what_is_too_long_for_a_file_is_no_traceback(tmp_path, capsys):
    assert main(_tiny_run(tmp_path, "--data", "a" * 300)) == 2
    assert f"lockstep: {'a' * 80}…: too long for a file name" in capsys.readouterr().err


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
    assert main(_tiny_run(tmp_path, "--steps", "1", "--train.learning-rate", "0.002")) == 0
    run = tmp_path / "run"
    begun = tomllib.loads((run / "config.toml").read_text())
    assert main(["pretrain", "--output", str(run), "--resume", "--steps", "2"]) == 0
    assert "resumes with different settings: steps 2, was 1" in caplog.text
    assert "learning_rate" not in caplog.text and "dtype" not in caplog.text
    now = tomllib.loads((run / "config.toml").read_text())
    assert now == begun | {"steps": 2, "resume": True}
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 2
    # A file is between the run's own settings and the command line.
    (tmp_path / "more.toml").write_text("steps = 3\n[train]\nlearning_rate = 0.001\n")
    caplog.clear()
    arguments = ["pretrain", f"--output={run}", "--resume", "--config", str(tmp_path / "more.toml")]
    assert main([*arguments, "--train.learning-rate", "0.003"]) == 0
    assert "settings: steps 3, was 2; train.learning_rate 0.003, was 0.002" in caplog.text


def test_a_run_is_not_resumed_to_an_earlier_step_or_with_empty_settings(tmp_path, capsys):
    assert main(_tiny_run(tmp_path, "--steps", "2")) == 0
    run = tmp_path / "run"
    recorded = (run / "config.toml").read_text()
    assert main(["pretrain", "--output", str(run), "--resume", "--steps", "1"]) == 2
    assert "run is at step 2, but is to end at step 1, counted from its beginning" in capsys.readouterr().err
    assert (run / "config.toml").read_text() == recorded
    assert main(["pretrain", "--output", str(run), "--resume", "--steps", "3"]) == 0
    assert json.loads((run / "summary.json").read_text())["resumed_from"] == 2
    (run / "config.toml").write_text("")
    assert main(["pretrain", "--output", str(run), "--resume"]) == 2
    assert "config.toml: is empty" in capsys.readouterr().err


def test_a_run_that_is_not_there_is_not_resumed_with_settings_of_its_own(tmp_path, capsys):
    assert main(["pretrain", "--output", str(tmp_path / "rum"), "--resume"]) == 2
    assert "rum: has no run to resume; to start one, give its settings along with --resume" in capsys.readouterr().err
    with pytest.raises(SystemExit) as shown:
        main(["pretrain", "--resume", "-h"])
    assert shown.value.code == 0 and "--sequence-length" in capsys.readouterr().out
    assert main(_tiny_run(tmp_path, "--steps", "1", "--resume")) == 0
    assert "run has no run to resume: this is its first start" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "data is empty, so the standard library's source would be used, which is too little for llama3:8b"),
        (["--data", __file__], 'tokenizer is "byte", whose 258 tokens are too few for llama3:8b'),
    ],
)
def test_a_large_model_is_not_begun_on_a_small_ones_data(arguments, message, capsys, tmp_path):
    assert main(["pretrain", "--recipe", "llama3_8b", "--output", str(tmp_path / "run"), *arguments]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_control_characters_in_a_message_are_escaped(capsys, tmp_path):
    assert main(["generate", "--model", str(tmp_path / "a\x1b]0;b\x07"), "--prompt", "x"]) == 2
    said = capsys.readouterr().err
    assert "\\x1b]0;b\\x07" in said and "\x1b" not in said and "\x07" not in said


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_gets_no_control_characters_of_a_models(capsys, monkeypatch, terminal):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    engine = SimpleNamespace(stream=lambda ids, params: [SimpleNamespace(token_id=byte) for byte in b"\x1b[2Jok\n"])
    _stream("a", Prompt({}, "a"), None, engine, ByteTokenizer())
    assert capsys.readouterr().out == ("a\\x1b[2Jok\n\n" if terminal else "a\x1b[2Jok\n\n")


def test_python_takes_a_runs_folder_and_names_what_is_of_the_wrong_kind(tmp_path):
    assert main(_tiny_run(tmp_path, "--steps", "1")) == 0
    model = lockstep.load_model(tmp_path / "run")
    assert "Engine" in dir(lockstep) and len(lockstep.score(model, [[1, 2, 3]])[0]) == 2
    for sequences, message in [
        ([[1, 258]], "token 258 at position 1 of sequence 0 is outside the vocabulary of 258"),
        ([[1], []], "sequence 1 is empty"),
    ]:
        with pytest.raises(UserError, match=message):
            lockstep.score(model, sequences)
