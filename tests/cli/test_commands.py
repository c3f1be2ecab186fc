"""The command line as a user meets it: real processes, their output and exit codes."""

import json
import subprocess
import sys

import pytest

from lockstep.cli import main


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "lockstep", *arguments], capture_output=True, text=True, timeout=120)


def test_parity_prints_its_table_and_exits_0(model_folder):
    result = run("parity", "--model", str(model_folder), "--tokens", "200")
    lines = result.stdout.splitlines()
    assert result.returncode == 0, result.stderr
    assert lines[0] == "Bitwise identical : True" and lines[2] == "Tokens different  : 0"
    assert lines[3] == "Max delta         : 0.000000e+00" and int(lines[1].split(":")[1]) >= 200


def test_generate_streams_the_prompt_and_its_continuation(model_folder):
    result = run("generate", "--model", str(model_folder), "--prompt", "def f(", "--max-tokens", "8", "--seed", "1")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("def f(") and len(result.stdout) > len("def f(\n")


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
    assert "0 different" in result.stdout and "largest ratio on a first inner step: 1.0" in result.stdout
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["parity_tokens_different"] == 0
    again = run("rl", *options)
    assert again.returncode == 2 and "already holds a run" in again.stderr and "Traceback" not in again.stderr
    assert run("generate", "--model", str(tmp_path / "run"), "--prompt", "a", "--max-tokens", "2").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pretrian"], 'unknown command "pretrian". Did you mean "pretrain"'),
        (["rl", "--recipe", "gsm9k"], 'unknown recipe "gsm9k". Did you mean "gsm8k"'),
        (["pretrain", "--recipe", "tny"], 'Did you mean "tiny"'),
        (["rl"], "model is empty; give a Hugging Face folder with --model DIR"),
        (["rl", "--model", "/nowhere"], "/nowhere: no such folder"),
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


def test_help_and_version_answer_at_once():
    assert "lockstep rl" in run("--help").stdout and run("--version").stdout.startswith("lockstep ")


def test_a_cache_that_others_may_write_to_is_met_with_one_message_and_exit_code_2(tmp_path, model_folder, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "lockstep").mkdir()
    (tmp_path / "lockstep").chmod(0o777)
    result = run("generate", "--model", str(model_folder), "--prompt", "a")
    assert result.returncode == 2 and result.stderr.startswith("lockstep: ") and "others may write" in result.stderr
    assert "Traceback" not in result.stderr
