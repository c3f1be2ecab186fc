"""`--chat-template-kwargs`: values that reach the chat template from every command that renders with it."""

import json
import tomllib

import numpy as np
import pytest

from lockstep.cli import main
from lockstep.commands.chat import ChatOptions, open_chat
from lockstep.data import load_tokenizer
from lockstep.data.chat import load_chat_template
from lockstep.data.conversations import Conversation, ConversationEncoder
from lockstep.data.preferences import PreferenceEncoder
from lockstep.train.sft import finetune
from tests.train.runs import write_lines
from tests.train.test_sft import _config

ASKED = {"role": "user", "content": "hello"}
GIVEN = '{"loud": true, "word": "w"}'
TALK = {"messages": [ASKED, {"role": "assistant", "content": "yes"}]}


def prompts_of(run, tokenizer):
    """The texts of the prompts in a run's rollouts."""
    lines = (run / "rollouts" / "step_00000001.jsonl").read_text().splitlines()
    return {tokenizer.decode(json.loads(line)["prompt_ids"]) for line in lines}


WITHOUT_VALUES = {
    "rl": ["--environment", "digit_sum", "--output", "out"],
    "eval": ["--environment", "digit_sum", "--output", "out"],
    "generate": ["--prompt", "a", "--chat"],
    "chat": [],
    "sft": ["--data", "talk.jsonl", "--output", "out"],
    "dpo": ["--data", "talk.jsonl", "--output", "out"],
    "reward-model": ["--data", "talk.jsonl", "--output", "out"],
}


UNREAD = ('{"lout": true}', "has 'lout', which the chat template does not read. Did you mean \"loud\"?")


@pytest.mark.parametrize(
    ("command", "given", "said"),
    [
        *((command, *UNREAD) for command in WITHOUT_VALUES),
        ("generate", '{"messages": []}', "has 'messages', which the chat template does not read"),
        ("generate", "[1]", "--chat-template-kwargs is not an object"),
        ("generate", "loud", "--chat-template-kwargs is not JSON"),
    ],
)
def test_values_that_the_template_does_not_read_are_refused(
    tmp_path, templated_folder, monkeypatch, capsys, command, given, said
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "talk.jsonl").write_text(json.dumps(TALK | {"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    options = [command, "--model", str(templated_folder), *WITHOUT_VALUES[command], "--chat-template-kwargs", given]
    assert main(options) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_without_a_template_there_is_nothing_to_give_them_to(tmp_path, model_folder, templated_folder, capsys):
    options = ["--chat-template-kwargs", GIVEN, "--environment", "digit_sum", "--output", str(tmp_path / "out")]
    assert main(["rl", "--model", str(model_folder), *options]) == 2
    assert "has 'loud', which the chat template does not read" in capsys.readouterr().err
    assert main(["generate", "--model", str(templated_folder), "--prompt", "a", "--chat-template-kwargs", GIVEN]) == 2
    assert "no prompt is rendered by the chat template; add --chat" in capsys.readouterr().err


def test_values_reach_generation_and_a_lines_own_win(tmp_path, templated_folder, capsys):
    texts = ["loud:w<user>hello\n<assistant>", "loud:v<user>hello\n<assistant>", "<user>hello\n<assistant>"]
    off = {"loud": False, "word": ""}
    lines = [{"prompt": [ASKED]}, {"messages": [ASKED], "chat_template_kwargs": {"word": "v"}},
             {"prompt": [ASKED], "chat_template_kwargs": off}, *({"prompt": text} for text in texts)]  # fmt: skip
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--prompts", str(tmp_path / "m.jsonl"), "--temperature", "0", "--max-tokens", "6"]
    assert main(["generate", "--model", str(templated_folder), *options, "--chat-template-kwargs", GIVEN]) == 0
    found = [json.loads(line)["token_ids"] for line in capsys.readouterr().out.splitlines()]
    assert found[:3] == found[3:]


def test_values_reach_a_chat(templated_folder):
    session = open_chat(ChatOptions(str(templated_folder), chat_template_kwargs=GIVEN))
    assert session._rendering.tokenizer.decode(session._prompt("hello")) == "loud:w<user>hello\n<assistant>"


def encoded(encoder, line):
    (found,) = encoder.encode([Conversation("a.jsonl:1", line)])
    assert not found.problem, found.problem
    return found


def test_values_reach_conversations_and_preferences_and_a_rows_own_win(templated_folder):
    tokenizer, template = load_tokenizer(templated_folder), load_chat_template(templated_folder)
    values = json.loads(GIVEN)
    plain, given = (
        ConversationEncoder(tokenizer, template),
        ConversationEncoder(tokenizer, template, template_values=values),
    )
    row = TALK | {"chat_template_kwargs": {"word": "v"}}
    both = TALK | {"chat_template_kwargs": {"word": "v", "loud": True}}
    assert np.array_equal(encoded(given, row).tokens, encoded(plain, both).tokens)
    assert not np.array_equal(encoded(given, TALK).tokens, encoded(plain, TALK).tokens)
    assert given.describe() != plain.describe(), "tokens that are kept for later runs are others"
    pair = {"prompt": [ASKED], "chosen": TALK["messages"][1:], "rejected": [{"role": "assistant", "content": "no"}]}
    plain, given = PreferenceEncoder(tokenizer, template, 99), PreferenceEncoder(tokenizer, template, 99, True, values)
    own = {"chat_template_kwargs": {"word": "v"}}, {"chat_template_kwargs": {"word": "v", "loud": True}}
    assert np.array_equal(encoded(given, pair | own[0]).tokens, encoded(plain, pair | own[1]).tokens)
    assert not np.array_equal(encoded(given, pair).tokens, encoded(plain, pair).tokens)


def test_a_fine_tuning_run_records_them_and_refuses_them_for_tokens(tmp_path, templated_folder, capsys):
    data = write_lines(tmp_path / "talk.jsonl", [TALK] * 12)
    run = finetune(_config(tmp_path, templated_folder, "run", data=data, steps=1, chat_template_kwargs=GIVEN))
    assert json.loads(tomllib.loads((run / "config.toml").read_text())["chat_template_kwargs"]) == json.loads(GIVEN)
    tokens = str(tmp_path / "tokens")
    made = ["data", "tokenize", "--chat", "--data", data, "--tokenizer", str(templated_folder), "--output", tokens]
    assert main(made) == 0, capsys.readouterr().err
    options = ["sft", "--model", str(templated_folder), "--data", tokens, "--output", str(tmp_path / "other")]
    assert main([*options, "--chat-template-kwargs", GIVEN]) == 2
    assert "is tokenized already, so --chat-template-kwargs has no effect on it" in capsys.readouterr().err


def test_values_reach_the_prompts_of_a_run_and_of_an_evaluation(tmp_path, templated_folder):
    (tmp_path / "task.py").write_text(
        "import lockstep.rl as rl\n"
        "class Task(rl.Environment):\n"
        "    def examples(self, split):\n"
        "        own = {'word': 'v'}\n"
        f"        yield rl.Example([{ASKED!r}], id='a')\n"
        f"        yield rl.Example([{ASKED!r}], id='b', chat_template_kwargs=own)\n"
        "    def reward(self, example, completion):\n"
        "        return float(len(set(completion)))\n"
    )
    common = ["--environment", f"{tmp_path / 'task.py'}:Task", "--max-new-tokens", "3", "--dtype", "float32"]
    common += ["--chat-template-kwargs", GIVEN, "--rewards.isolate", "never"]
    rl = ["--output", str(tmp_path / "run"), "--steps", "1", "--prompts-per-step", "2", "--samples-per-prompt", "2"]
    assert main(["rl", "--model", str(templated_folder), *rl, *common, "--mask-truncated-completions"]) == 0
    assert prompts_of(tmp_path / "run", load_tokenizer(templated_folder)) == {
        f"loud:{word}<user>hello\n<assistant>" for word in "wv"
    }
    recorded = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert json.loads(recorded["chat_template_kwargs"]) == json.loads(GIVEN) and recorded["mask_truncated_completions"]
    (step,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][1:]
    assert step["rollout/masked_tokens"] > 0 and step["parity/tokens_different"] == 0
    assert main(["eval", "--model", str(templated_folder), "--output", str(tmp_path / "eval"), *common]) == 0
