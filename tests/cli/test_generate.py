"""`lockstep generate` in all its forms: one prompt, several samples, a file of prompts, messages."""

import json

import pytest

from lockstep.cli import main
from lockstep.model import read_config
from lockstep.model.config_json import MAX_POSITIONS


def generate(folder, *options: object) -> int:
    return main(["generate", "--model", str(folder), "--max-tokens", "6", "--seed", "3", *map(str, options)])


def test_what_is_too_long_is_refused_before_anything_is_printed(model_folder, capsys):
    assert generate(model_folder, "--prompt", "abc", "--max-tokens", 10**6) == 2
    said = capsys.readouterr()
    assert said.out == "" and "lockstep: a prompt of" in said.err and "exceed the context" in said.err


def test_the_longest_text_can_be_less_than_the_folder_says(model_folder, capsys, monkeypatch):
    monkeypatch.setenv(MAX_POSITIONS, "")  # so that what the command sets is undone
    assert generate(model_folder, "--prompt", "abc", "--max-positions", 8, "--max-tokens", 2) == 0
    assert read_config(model_folder).max_positions == 8, "and so for processes that the command starts"
    assert generate(model_folder, "--prompt", "abc", "--max-tokens", 60) == 2
    assert "exceed the context of 8" in capsys.readouterr().err
    monkeypatch.setenv(MAX_POSITIONS, "1000000")
    assert read_config(model_folder).max_positions < 1000000
    assert generate(model_folder, "--prompt", "abc", "--max-positions", "4k") == 2
    assert "--max-positions (LOCKSTEP_MAX_POSITIONS) is 4k; it must be a whole number" in capsys.readouterr().err


def test_n_samples_of_a_prompt_are_numbered(model_folder, capsys):
    assert generate(model_folder, "--prompt", "def f(", "--n", 3) == 0
    lines = capsys.readouterr().out.split("[")
    assert [line[:2] for line in lines[1:]] == ["0]", "1]", "2]"] and len(set(lines)) == 4


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl"])
def test_a_file_of_prompts_becomes_a_file_of_completions(tmp_path, model_folder, capsys, name):
    prompts = ["def f(", "class A:", "def f("]
    lines = prompts if name.endswith("txt") else [json.dumps({"prompt": p, "more": 1}) for p in prompts]
    (tmp_path / name).write_text("\n".join(lines) + "\n\n")
    output = tmp_path / "made" / "out.jsonl"
    assert generate(model_folder, "--prompts", tmp_path / name, "--n", 2, "--output", output) == 0
    written = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(w["prompt"], w["sample"]) for w in written] == [(p, i) for p in prompts for i in range(2)]
    assert all(len(w["logprobs"]) == len(w["token_ids"]) <= 6 and w["finish_reason"] for w in written)
    assert all(w.get("more") == (1 if name.endswith("jsonl") else None) for w in written), "a line's own keys are kept"
    assert written[0]["token_ids"] != written[4]["token_ids"]  # one text twice is two draws
    # Without --output the same lines go to the terminal, and the same seed draws the same tokens.
    capsys.readouterr()
    assert generate(model_folder, "--prompts", tmp_path / name, "--n", 2) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == written
    # A line draws the same whatever other lines there are.
    (tmp_path / name).write_text(lines[0])
    assert generate(model_folder, "--prompts", tmp_path / name, "--n", 2) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == written[:2]


def test_messages_are_rendered_by_the_models_template(tmp_path, templated_folder, capsys):
    rendered = "<user>hello\n<assistant>"
    assert generate(templated_folder, "--prompt", "hello", "--chat") == 0
    alone = capsys.readouterr().out.strip()
    conversation = {"messages": [{"role": "user", "content": "hello"}]}
    (tmp_path / "m.jsonl").write_text(json.dumps(conversation) + "\n" + json.dumps({"prompt": rendered[:-1] + ">"}))
    assert generate(templated_folder, "--prompts", tmp_path / "m.jsonl", "--temperature", 0) == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first["messages"] == conversation["messages"] and first["token_ids"] == second["token_ids"]
    assert "<user>" not in alone


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "give either a text with --prompt TEXT or a file with --prompts FILE"),
        (["--prompts", "nowhere.txt"], "nowhere.txt: no such file"),
        (["--prompts", "empty.txt"], "contains no prompts"),
        (["--prompts", "bad.jsonl"], "bad.jsonl:1: has neither a `prompt`, a text or messages"),
        (["--prompts", "latin.txt"], "is not UTF-8 at byte 1"),
        (["--prompt", "a", "--chat"], "has no chat template"),
        (["--prompt", "a", "--output", "latin.txt"], "latin.txt: already exists; replace it with --overwrite"),
    ],
)
def test_what_cannot_be_generated_is_said_before_the_model_is_loaded(
    tmp_path, model_folder, monkeypatch, capsys, options, said
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "latin.txt").write_bytes(b"a\xff\n")
    assert main(["generate", "--model", str(model_folder), *options]) == 2
    assert said in capsys.readouterr().err


def test_the_options_of_the_draws_reach_the_sampler(tmp_path, model_folder, capsys):
    def line(*options: object) -> dict:
        (tmp_path / "p.txt").write_text("def f(\n")
        assert generate(model_folder, "--prompts", tmp_path / "p.txt", *options) == 0
        return json.loads(capsys.readouterr().out)

    likeliest = line("--temperature", 0)
    assert line()["token_ids"] != likeliest["token_ids"]
    # Each of these leaves nothing but the likeliest token.
    for option in (("--top-k", 1), ("--top-p", 1e-6), ("--min-p", 0.999)):
        assert line(*option)["token_ids"] == likeliest["token_ids"], option
    stopped = line("--temperature", 0, "--stop", likeliest["completion"][0])
    assert stopped["finish_reason"] == "stop" and likeliest["finish_reason"] == "length"
    assert len(stopped["token_ids"]) < len(likeliest["token_ids"])


def test_prompts_of_a_text_file_end_at_line_feeds_alone(tmp_path, model_folder):
    file, output = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    file.write_text("one \u2028 line\r\nalso \x85 one \x0c \r line\n\n", encoding="utf-8", newline="")
    command = ["generate", "--model", str(model_folder), "--prompts", str(file), "--output", str(output)]
    assert main([*command, "--max-tokens", "1", "--seed", "1", "--device", "cpu"]) == 0
    asked = [json.loads(line)["prompt"] for line in output.read_text().split("\n")[:-1]]
    assert asked == ["one \u2028 line", "also \x85 one \x0c \r line"]
