"""Prompts that are messages: from rows of every environment and from a user's own, to the tokens of transformers."""

import dataclasses
import json

import pytest

import lockstep.rl as rl
from lockstep.config import RewardConfig, RLConfig
from lockstep.data.chat import ChatTemplate
from lockstep.errors import UserError
from lockstep.rl.conversations.rendering import Rendering
from lockstep.rl.environments.code import INSTRUCTION as IN_PYTHON
from lockstep.rl.environments.loading import load_environment
from lockstep.rl.environments.math_jsonl import INSTRUCTION as IN_A_BOX
from lockstep.rl.grading.pool import fields_of
from lockstep.rl.grading.sandbox import missing_protections
from lockstep.rl.rollouts.prompts import PromptLoader, examples_of, fingerprint
from tests.rl.collected import collected
from tests.rl.conversations.families import FAMILIES, rendering_of
from tests.rl.conversations.scripted import converse

SYSTEM, USER = {"role": "system", "content": "Be exact."}, {"role": "user", "content": "What is 3 * 5?"}


def read(name, folder, row, **others):
    for file in ("train", "validation"):
        (folder / f"{file}.jsonl").write_text(json.dumps(row | others) + "\n")
    return examples_of(load_environment(name, str(folder)), "train")[0]


ROWS = {
    "gsm8k": ({"answer": "so #### 15"}, "", "15"),
    "math": ({"answer": "15"}, IN_A_BOX, "15"),
    "prompts": ({}, "", ""),
    "code": ({"tests": "assert f() == 15"}, IN_PYTHON, ""),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_messages_are_read_by_every_environment(tmp_path, name):
    if name == "code" and missing_protections():
        pytest.skip("the kernel cannot confine code")
    row, instruction, answer = ROWS[name]
    example = read(
        name, tmp_path, row, prompt=[SYSTEM, USER], chat_template_kwargs={"enable_thinking": False, "a": None}
    )
    system, user = example.messages
    assert system == SYSTEM and user["role"] == "user"
    assert user["content"].startswith(USER["content"] + instruction)
    assert example.answer == answer and example.chat_template_kwargs == {"enable_thinking": False}
    texts = {"problem": "column", "question": "that the messages were made from"}
    for prompt in ([SYSTEM, USER], json.dumps([SYSTEM, USER])):
        assert read(name, tmp_path, row, prompt=prompt, **texts).messages == example.messages
    turns = [{"role": "user", "content": "What is 1 + 1?"}, {"role": "assistant", "content": "2"}, USER]
    messages = read(name, tmp_path, row, prompt=turns).messages
    assert messages[:2] == turns[:2] and messages[2]["content"] == user["content"]
    if name != "gsm8k":
        text = read(name, tmp_path, row, prompt=USER["content"])
        assert [{"role": "user", "content": text.prompt}] == read(name, tmp_path, row, prompt=[USER]).messages


@pytest.mark.parametrize("name", ["gsm8k", "math"])
def test_rows_in_verls_layout_have_their_answer_in_the_reward_model(tmp_path, name):
    judged = {"data_source": "x", "ability": "math", "reward_model": {"style": "rule", "ground_truth": "15"}}
    example = read(name, tmp_path, judged, prompt=[SYSTEM, USER], extra_info={"split": "train", "index": 0})
    assert example.answer == "15" and example.messages[0] == SYSTEM
    environment = load_environment(name, str(tmp_path))
    right = environment.reward(example, "#### 15" if name == "gsm8k" else "\\boxed{15}")
    assert right["correct"] == 1.0


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([], "`prompt` is empty"),
        (["x"], "`prompt` is a list, not a string"),
        ([{"content": "x"}], "is a list, but not of messages"),
        ([{"role": 3, "content": "x"}], "a message whose role is not a string"),
        ([USER, {"role": "assistant", "content": "It"}], "ends with the assistant"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}], "no text as its content"),
    ],
)
def test_lists_that_are_no_prompt_are_refused_with_their_line_or_skipped(tmp_path, prompt, problem):
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps({"prompt": prompt}) + "\n" + json.dumps({"prompt": [USER]}) + "\n")
    with pytest.raises(UserError, match=f"train.jsonl:1: .*{problem}"):
        examples_of(load_environment("prompts", str(tmp_path)), "train")
    assert [e.messages for e in examples_of(load_environment("prompts", str(tmp_path), True), "train")] == [[USER]]


def test_values_for_the_template_that_are_no_object_are_refused_with_their_line(tmp_path):
    with pytest.raises(UserError, match=r"train.jsonl:1: its `chat_template_kwargs` are not an object"):
        read("prompts", tmp_path, {"prompt": "x"}, chat_template_kwargs="[1]")
    with pytest.raises(UserError, match="yields nothing"):
        examples_of(load_environment("prompts", str(tmp_path), True), "train")
    example = read("prompts", tmp_path, {"prompt": "x"}, chat_template_kwargs='{"enable_thinking": false}')
    assert example.chat_template_kwargs == {"enable_thinking": False}


class Own(rl.Environment):
    """A user's environment."""

    given: list[rl.Example] = []  # noqa: RUF012

    def examples(self, split):
        return self.given

    def reward(self, example, completion):
        return 1.0


class OwnTalk(rl.ConversationEnvironment):
    """A user's conversations, which begin with the example's prompt."""

    async def converse(self, example, chat):
        chat.add(example.prompt)
        await chat.reply()
        return 1.0


def own(*examples):
    environment = Own()
    environment.given = list(examples)
    return environment


def test_parts_of_texts_are_one_text_and_calls_are_objects():
    parts = [{"type": "text", "text": "What"}, {"type": "text", "text": "is it?"}]
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    given = [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": [call]},
             {"role": "tool", "content": "3", "name": None}]  # fmt: skip
    (example,) = examples_of(own(rl.Example(given, "a")), "train")
    assert [m.get("content") for m in example.messages] == ["What\nis it?", None, "3"]
    assert example.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert "name" not in example.messages[2] and example.text.startswith("user: What\nis it?\nassistant: ")


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([], "is a list, but not of messages"),
        ([USER, {"role": "assistant", "content": "It"}], "ends with the assistant"),
        ([{"role": "user", "content": "\ud800"}], "are not JSON"),
        ([{"role": "user", "content": "x", "at": object()}], "are not JSON"),
    ],
)
def test_a_users_prompts_that_cannot_be_asked_are_refused(prompt, problem):
    with pytest.raises(UserError, match=rf'Own.examples\("train"\) yields the prompt .*{problem}'):
        examples_of(own(rl.Example(prompt)), "train")


def test_examples_with_messages_go_through_json_and_are_told_apart():
    one, other = rl.Example([SYSTEM, USER], "15"), rl.Example([USER], "15")
    thinking = dataclasses.replace(one, chat_template_kwargs={"enable_thinking": False})
    for example in (one, other, thinking):
        assert rl.Example(**json.loads(json.dumps(fields_of(example)))) == example
    assert len({fingerprint([e]) for e in (one, other, thinking)}) == 3 and len({one, other}) == 2
    assert PromptLoader([one], 0).shared([one, other, thinking]) == 1
    assert one.name == repr("system: Be exact.\nuser: What is 3 * 5?") and one.messages is not one.prompt


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_of_messages_has_the_tokens_of_transformers(name, families, renderings):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(str(families / name))
    for messages in ([SYSTEM, USER], [USER], [SYSTEM, USER, {"role": "assistant", "content": "15"}, USER]):
        wanted = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert renderings[name].prompt(rl.Example(messages)) == wanted
        assert messages != [USER] or renderings[name].prompt(rl.Example(USER["content"])) == wanted


def test_the_developer_speaks_as_the_system_where_the_template_knows_no_developer(renderings):
    developer = {**SYSTEM, "role": "developer"}
    ids = {name: renderings[name].prompt(rl.Example([developer, USER])) for name in ("qwen3", "llama3_1")}
    assert "developer" in renderings["llama3_1"].tokenizer.decode(ids["llama3_1"])
    assert ids["qwen3"] == renderings["qwen3"].prompt(rl.Example([SYSTEM, USER]))


def test_a_message_that_the_template_drops_is_refused(renderings):
    source = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    rendering = Rendering(renderings["qwen3"].tokenizer, ChatTemplate(source, {}))
    assert rendering.prompt(rl.Example([USER]))
    for role in ("system", "developer", "critic"):
        with pytest.raises(UserError, match=f"does not show a message of the role {role}"):
            rendering.prompt(rl.Example([{**SYSTEM, "role": role}, USER]))


def test_without_a_template_only_one_users_message_is_a_text(renderings):
    rendering = Rendering(renderings["qwen3"].tokenizer)
    assert rendering.prompt(rl.Example([USER])) == rendering.prompt(rl.Example(USER["content"]))
    with pytest.raises(UserError, match="its prompt is a list of messages, but the model has no chat template"):
        rendering.prompt(rl.Example([SYSTEM, USER]))


def test_an_examples_values_win_over_the_runs(families, renderings):
    plain = renderings["qwen3"]
    off = rendering_of(families / "qwen3", template_values={"enable_thinking": False})
    example, thinks = rl.Example([USER]), rl.Example([USER], chat_template_kwargs={"enable_thinking": True})
    assert off.prompt(example) != plain.prompt(example) and off.prompt(thinks) == plain.prompt(example)
    with pytest.raises(
        UserError, match="has 'enable_thinkin', which the chat template does not read. Did you mean \"enable"
    ):
        plain.prompt(rl.Example("x", chat_template_kwargs={"enable_thinkin": False}))


@pytest.mark.parametrize("environment", [Own(), OwnTalk()], ids=["completions", "conversations"])
def test_completions_continue_the_messages_with_the_examples_values(environment, engine_of, renderings):
    engine, rendering = engine_of("qwen3"), renderings["qwen3"]
    examples = [rl.Example([SYSTEM, USER]), rl.Example([SYSTEM, USER], chat_template_kwargs={"enable_thinking": False})]
    config = RLConfig(samples_per_prompt=2, max_new_tokens=4, rewards=RewardConfig())
    rollouts = collected(examples, environment, engine, rendering, config)
    assert [r.prompt_ids for r in rollouts] == [rendering.prompt(e) for e in examples for _ in range(2)]
    with pytest.raises(UserError, match="has 'nothing', which the chat template does not read"):
        wrong = [rl.Example([USER], chat_template_kwargs={"nothing": 1})]
        collected(wrong, environment, engine, rendering, config)


def test_a_conversation_begins_with_all_messages_of_its_prompt(tmp_path):
    example = read("math", tmp_path, {"answer": "15"}, prompt=[SYSTEM, USER])
    rewards, chat = converse(load_environment("math", str(tmp_path)), example, "\\boxed{15}")
    assert rewards == {"correct": 1.0} and [m["role"] for m in chat.messages] == ["system", "user", "assistant"]
