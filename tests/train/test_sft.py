"""Fine-tuning on conversations: the loss counts what the assistant says, as the model's own template has it."""

import json
import re
import shutil

import numpy as np
import pytest

from lockstep import load_model, score
from lockstep.checkpoint import model_folder
from lockstep.cli import main
from lockstep.config import CheckpointConfig, DataConfig, SFTConfig, TrainConfig
from lockstep.data import ConversationEncoder, load_tokenizer
from lockstep.data.chat import load_chat_template
from lockstep.data.conversations import Conversation
from lockstep.data.workers import encode_all
from lockstep.errors import UserError
from lockstep.train.sft import finetune
from tests.parallel.launch import launch

MARKED = (
    "{% for message in messages %}"
    "<{{ message.role }}>\n"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content | trim }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content }}{{ eos_token }}{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
CONVERSATIONS = [
    [("user", "Say one."), ("assistant", "one")],
    [
        ("system", "Be brief. 日本語 🙂"),
        ("user", "Two?"),
        ("assistant", " two 🙂 "),
        ("user", "Three?"),
        ("assistant", "3"),
    ],
    [("user", "<assistant>\nnot said"), ("assistant", "def f(x):\n    return x"), ("user", "and after that")],
]
LINES = [{"messages": [{"role": r, "content": c} for r, c in talk]} for talk in CONVERSATIONS]


@pytest.fixture
def chat_folder(tmp_path, model_folder):
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    (folder / "chat_template.jinja").write_text(MARKED)
    return folder


def _encoder(folder, template=MARKED):
    if template is not None:
        (folder / "own.jinja").write_text(template)
    file = str(folder / "own.jinja") if template is not None else ""
    return ConversationEncoder(load_tokenizer(folder), load_chat_template(folder, file))


def _encode(folder, line, template=MARKED):
    (encoded,) = _encoder(folder, template).encode([Conversation("a.jsonl:1", line)])
    return encoded


@pytest.mark.parametrize("line", LINES)
def test_tokens_and_mask_are_those_of_transformers(chat_folder, line):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(chat_folder).apply_chat_template(
        line["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ours = _encode(chat_folder, line)
    assert ours.problem == "" and ours.tokens.tolist() == theirs["input_ids"]
    assert ours.scored.astype(int).tolist() == theirs["assistant_masks"]


@pytest.mark.parametrize("line", LINES)
def test_a_template_without_marks_gives_the_same_mask_by_its_prefixes(chat_folder, line):
    marked, plain = _encode(chat_folder, line), _encode(chat_folder, line, PLAIN)
    assert np.array_equal(marked.tokens, plain.tokens) and np.array_equal(marked.scored, plain.scored)


def test_what_is_scored_reads_as_what_the_assistant_said(chat_folder):
    tokenizer = load_tokenizer(chat_folder)
    encoded = _encode(chat_folder, LINES[1])
    said = encoded.tokens[encoded.scored].tolist()
    assert tokenizer.decode(said) == "two 🙂3" and said.count(tokenizer.eos_id) == 2


def test_a_prompt_and_its_completion_need_no_template(model_folder):
    tokenizer = load_tokenizer(model_folder)
    encoded = _encode(model_folder, {"prompt": "3+4=", "completion": "7\n"}, None)
    assert encoded.tokens.tolist() == [*tokenizer.encode("3+4=7\n"), tokenizer.eos_id]
    assert encoded.tokens[encoded.scored].tolist() == [*tokenizer.encode("7\n"), tokenizer.eos_id]


@pytest.mark.parametrize("template", [MARKED, PLAIN])
def test_a_prompt_and_a_completion_of_messages_score_the_assistant_in_the_completion_alone(chat_folder, template):
    whole = _encode(chat_folder, LINES[1], template)
    messages = LINES[1]["messages"]
    for prompt in (messages[:2], messages[:4]):
        line = {"prompt": prompt, "completion": messages[len(prompt) :]}
        encoded = _encode(chat_folder, line, template)
        assert encoded.problem == "" and np.array_equal(encoded.tokens, whole.tokens)
        said = load_tokenizer(chat_folder).decode(encoded.tokens[encoded.scored].tolist())
        assert said == ("two 🙂3" if len(prompt) == 2 else "3")


def test_a_messages_parts_are_joined_and_a_call_of_a_tool_needs_no_content(chat_folder):
    parts = [{"type": "text", "text": "Say"}, {"type": "text", "text": "one."}]
    line = {"messages": [{"role": "user", "content": parts}, LINES[0]["messages"][1]]}
    joined = {"messages": [{"role": "user", "content": "Say\none."}, LINES[0]["messages"][1]]}
    assert np.array_equal(_encode(chat_folder, line).tokens, _encode(chat_folder, joined).tokens)
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "sum", "arguments": {}}}], "content": None}
    shows = MARKED.replace("{{ message.content | trim }}", "{{ message.tool_calls[0].function.name }}")
    encoded = _encode(chat_folder, {"messages": [LINES[0]["messages"][0], call]}, shows)
    assert load_tokenizer(chat_folder).decode(encoded.tokens[encoded.scored].tolist()) == "sum"


def test_a_run_says_how_many_conversations_it_cuts_and_every_step_has_something_to_learn(tmp_path, chat_folder, caplog):
    long = {"messages": [{"role": "user", "content": "word " * 200}, {"role": "assistant", "content": "yes"}]}
    (tmp_path / "long.jsonl").write_text("\n".join(json.dumps(line) for line in [long] * 5 + LINES))
    options = dict(data=str(tmp_path / "long.jsonl"), steps=4, tokens_per_step=128)
    folder = finetune(_config(tmp_path, chat_folder, "run", **options))
    assert "5 conversations are longer than a row of 128 tokens and are cut" in caplog.text
    assert all(loss > 0 for loss in _metrics(folder))


CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "sum", "arguments": {}}}]}
CALLS = """{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}\
{% endgeneration %}{% for call in m.tool_calls or [] %}<{{ call.function.name }}>{% endfor %}{% else %}\
{{ m.content }}{% endif %}{% endfor %}"""


def test_a_call_without_content_is_rendered_as_transformers_does(chat_folder):
    from transformers import AutoTokenizer

    shows = "{% for m in messages %}{{ m['content'] }}|{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}"  # fmt: skip # noqa: E501
    theirs = AutoTokenizer.from_pretrained(chat_folder)
    for call in (CALL, CALL | {"content": ""}, CALL | {"content": None}):
        messages = [LINES[0]["messages"][0], call, {"role": "tool", "content": {"sum": 7}}, LINES[0]["messages"][1]]
        encoded = _encode(chat_folder, {"messages": messages}, shows)
        expected = theirs.apply_chat_template(messages, chat_template=shows, tokenize=False)
        assert load_tokenizer(chat_folder).decode(encoded.tokens.tolist()) == expected, encoded.problem


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("said", ["2+3 is 5", ""])
def test_reasoning_is_found_by_the_names_that_transformers_knows(chat_folder, name, said):
    from transformers import AutoTokenizer

    shows = (
        "{% for m in messages %}{{ m.reasoning_content is string }} {{ m.reasoning_content }}|{{ m.thinking }}|"
        "{{ m.content }}{% endfor %}"
    )
    messages = [LINES[0]["messages"][0], LINES[0]["messages"][1] | {name: said}]
    expected = AutoTokenizer.from_pretrained(chat_folder).apply_chat_template(
        messages, chat_template=shows, tokenize=False
    )
    encoded = _encode(chat_folder, {"messages": messages}, shows)
    assert f"True {said}|{said}" in expected
    assert load_tokenizer(chat_folder).decode(encoded.tokens.tolist()) == expected, encoded.problem


def test_of_several_names_of_reasoning_the_first_counts_and_content_stays_text(chat_folder):
    from transformers import AutoTokenizer

    shows = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.content }}{% endfor %}"
    several = {"reasoning": "a", "thinking": "b", "reasoning_content": "c"}
    messages = [LINES[0]["messages"][0], LINES[0]["messages"][1] | several]
    theirs = AutoTokenizer.from_pretrained(chat_folder)
    expected = theirs.apply_chat_template(messages, chat_template=shows, tokenize=False)
    encoded = _encode(chat_folder, {"messages": messages}, shows)
    assert load_tokenizer(chat_folder).decode(encoded.tokens.tolist()) == expected
    messages[1]["content"] = 7
    assert "no text as its content" in _encode(chat_folder, {"messages": messages}, shows).problem


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}], ids=str)
def test_a_message_can_be_reasoning_alone(chat_folder, content):
    from transformers import AutoTokenizer

    shows = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.content }}{% endfor %}"
    messages = [LINES[0]["messages"][0], {"role": "assistant", "reasoning_content": "2+3 is 5", **content}]
    theirs = AutoTokenizer.from_pretrained(chat_folder)
    expected = theirs.apply_chat_template(messages, chat_template=shows, tokenize=False)
    encoded = _encode(chat_folder, {"messages": messages}, shows)
    assert load_tokenizer(chat_folder).decode(encoded.tokens.tolist()) == expected, encoded.problem
    lacks = content.get("content") is None
    for other in ({"reasoning": ""}, {"reasoning": {"x": 1}}, {"reasoning": "a", "role": "user"}):
        nothing = _encode(
            chat_folder, {"messages": [*messages, {"role": "assistant", **other, **content}, *messages]}, shows
        )
        assert ("no text as its content" in nothing.problem) == lacks, other
    hides = shows.replace("m.reasoning_content", "''")
    said = {"role": "user", "content": "2+3 is 5"}  # so that it is in the text, but not as the reasoning
    hidden = _encode(chat_folder, {"messages": [said, *messages, LINES[0]["messages"][1]]}, hides)
    shouts = shows.replace("m.reasoning_content", "m.reasoning_content | upper")
    assert not _encode(chat_folder, {"messages": messages}, shouts).problem
    assert "does not show the reasoning of the role 'assistant'" in hidden.problem


@pytest.mark.parametrize("prompt", [[CALL], [CALL | {"content": ""}], []])
def test_what_the_assistant_says_in_a_prompt_can_be_nothing(chat_folder, prompt):
    prompt = [LINES[0]["messages"][0], *prompt, {"role": "tool", "content": "7"}]
    encoded = _encode(chat_folder, {"prompt": prompt, "completion": [LINES[0]["messages"][1]]}, CALLS)
    said = LINES[0]["messages"][1]["content"]
    assert load_tokenizer(chat_folder).decode(encoded.tokens[encoded.scored].tolist()) == said, encoded.problem
    nothing = _encode(chat_folder, {"prompt": prompt, "completion": [CALL]}, CALLS)
    assert "the assistant says nothing in it" in nothing.problem


@pytest.mark.parametrize("changes", [{"epochs": 1}, {"loader": DataConfig(packing="whole", repeat=False)}], ids=str)
@pytest.mark.parametrize(
    ("row", "said"),
    [
        (16, r"data\.jsonl: the conversations are longer than a row of 16 tokens"),
        (256, r"data\.jsonl:1: its answer has no token that can be scored; give it a prompt"),
    ],
)
def test_a_run_without_anything_to_learn_is_refused(tmp_path, chat_folder, changes, row, said):
    begins = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{{ 'b' * 63 }}{% endfor %}"  # fmt: skip # noqa: E501
    (tmp_path / "begins.jinja").write_text(begins)
    said_alone = [{"role": "assistant", "content": "a"}]
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": said_alone * (2 if row == 16 else 1)}))
    tokenizer = load_tokenizer(chat_folder)
    assert len(tokenizer.encode("a" + "b" * 63)) > 16
    options = dict(data=str(tmp_path / "data.jsonl"), template=str(tmp_path / "begins.jinja"), sequence_length=row)
    with pytest.raises(UserError, match=said):
        finetune(_config(tmp_path, chat_folder, "run", tokens_per_step=row, **options, **changes))
    options |= dict(data=_data(tmp_path, [{"prompt": "a", "completion": "b"}]), validation_data=options["data"])
    with pytest.raises(UserError, match=said):
        finetune(_config(tmp_path, chat_folder, "validated", tokens_per_step=row, **options, steps=1))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"conversations": [{"from": "human", "value": "a"}]}, "the assistant says nothing in it"),
        ({"conversations": [{"from": "bing", "value": "a"}]}, "a turn is from 'bing'; only human, user, gpt"),
        ({"text": "a"}, "(here: text)"),
    ],
    ids=["ShareGPT", "speaker", "text"],
)
def test_another_layout_of_conversations_is_told_the_names_here(tmp_path, chat_folder, line, said):
    with pytest.raises(UserError, match=re.escape(said)):
        finetune(_config(tmp_path, chat_folder, "run", data=_data(tmp_path, [line])))


def test_an_answer_of_one_token_needs_a_prompt_or_an_end(chat_folder, monkeypatch):
    encoder = ConversationEncoder(load_tokenizer(chat_folder), None)
    monkeypatch.setattr(encoder.tokenizer, "eos_id", None)
    nothing, something = encoder.encode(
        [Conversation(f"a.jsonl:{n}", {"prompt": said, "completion": "a"}) for n, said in enumerate(("", "b"), 1)]
    )
    assert nothing.problem.startswith("a.jsonl:1: its answer has no token that can be scored") and not something.problem
    assert something.scored.tolist() == [False, True]


@pytest.mark.parametrize("said", ["yes ", "yes  ", " ", "\n    "])
def test_spaces_at_the_end_count_where_the_tokenizer_trims_offsets(chat_folder, said):
    lines = [{"prompt": "3+4=", "completion": said}, {"messages": [LINES[0]["messages"][0] | {"content": said}] * 2}]
    lines[1]["messages"][1] = {"role": "assistant", "content": said}
    expected = [_encode(chat_folder, line) for line in lines]
    file = json.loads((chat_folder / "tokenizer.json").read_text())
    file["post_processor"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    (chat_folder / "tokenizer.json").write_text(json.dumps(file))
    for line, right in zip(lines, expected):
        found = _encode(chat_folder, line)
        assert found.tokens.tolist() == right.tokens.tolist() and found.scored.tolist() == right.scored.tolist()


@pytest.mark.parametrize("end", ["", "{{ eos_token }}"])
def test_a_mark_that_ends_before_the_line_break_still_has_the_end_of_text_in_the_loss(chat_folder, end):
    template = MARKED.replace("{{ eos_token }}{% endgeneration %}", "{% endgeneration %}" + end)
    tokenizer = load_tokenizer(chat_folder)
    encoded = _encode(chat_folder, LINES[0], template)
    said = [*tokenizer.encode("one"), tokenizer.eos_id]
    assert encoded.tokens[encoded.scored].tolist() == said
    assert encoded.tokens.tolist()[-len(said) - 1 :] == [*said, *tokenizer.encode("\n")]
    # An answer in the middle gets none that the template does not write.
    several = _encode(chat_folder, LINES[1], template)
    assert several.tokens[several.scored].tolist().count(tokenizer.eos_id) == (2 if end else 1)
    asked = _encode(chat_folder, LINES[2], template)
    assert asked.tokens[asked.scored].tolist().count(tokenizer.eos_id) == (1 if end else 0)


TOOLS = "{% if tools is not none %}{{ tools | tojson }}{% endif %}{% if documents is not none %}?{% endif %}" + MARKED
SUM = [{"type": "function", "function": {"name": "sum", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("marks", [True, False])
@pytest.mark.parametrize("tools", [None, SUM, json.dumps(SUM)])
def test_a_rows_tools_reach_the_template_as_in_transformers(chat_folder, tools, marks):
    from transformers import PreTrainedTokenizerFast

    template = TOOLS if marks else TOOLS.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    theirs = PreTrainedTokenizerFast.from_pretrained(chat_folder).apply_chat_template(
        LINES[1]["messages"], tools=SUM if tools else None, chat_template=TOOLS,
        tokenize=True, return_dict=True, return_assistant_tokens_mask=True,
    )  # fmt: skip
    ours = _encode(chat_folder, LINES[1] | {"tools": tools}, template)
    assert ours.problem == "" and ours.tokens.tolist() == theirs["input_ids"]
    assert ours.scored.astype(int).tolist() == theirs["assistant_masks"]


FORGETS = "{% for m in messages %}{% if m.role != 'user' or loop.index0 > 1 %}[{{ m.content }}]{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("line", "template", "message"),
    [
        (LINES[1], FORGETS, "a.jsonl:1: the chat template does not show the content of the role 'user'"),
        (LINES[0], MARKED.replace("{% for", "{{ raise_exception('not these') }}{% for"), "a.jsonl:1: .*not these"),
        ({"messages": LINES[0]["messages"][:1]}, MARKED, "a.jsonl:1: the assistant says nothing"),
        (
            {"messages": [{"role": "human", "content": "a"}, {"role": "gpt", "content": "b"}]},
            MARKED,
            r"a.jsonl:1: the assistant says nothing in it \(roles here: human, gpt\)",
        ),
        ({"messages": [{"role": "user", "content": 3}]}, MARKED, "a.jsonl:1: a message of the role 'user' has no text"),
        ({"messages": [{"role": "assistant"}]}, MARKED, "a.jsonl:1: a message of the role 'assistant' has no text"),
        (LINES[0] | {"prompt": "a", "completion": "b"}, MARKED, 'a.jsonl:1: has "messages" as well as "completion"'),
        ({"prompt": "a", "completion": LINES[0]["messages"]}, MARKED, 'a.jsonl:1: needs "messages"'),
        ({"prompt": "a", "completion": ""}, MARKED, "a.jsonl:1: the assistant says nothing"),
        ({"text": "a"}, MARKED, r'a.jsonl:1: needs "messages".* \(here: text\)'),
        ({"messages": ["hello"]}, MARKED, 'a.jsonl:1: needs "messages"'),
        (LINES[0] | {"tools": SUM}, MARKED, 'a.jsonl:1: has "tools", which the chat template does not show'),
        (LINES[0] | {"tools": "sum"}, TOOLS, 'a.jsonl:1: "tools" is not JSON'),
        (LINES[0] | {"tools": ["sum"]}, TOOLS, 'a.jsonl:1: "tools" is neither a list of objects'),
        ({"prompt": "a", "completion": "half \ud83d"}, None, "a.jsonl:1: .*half a surrogate pair after 'ahalf '"),
    ],
)
def test_a_conversation_that_cannot_be_learnt_from_is_named(model_folder, line, template, message):
    assert re.match(message, _encode(model_folder, line, template).problem)


def test_messages_without_a_template_are_no_bad_lines(tmp_path, model_folder):
    with pytest.raises(UserError, match="no chat template; give --template FILE"):
        finetune(_config(tmp_path, model_folder, "run", skip_bad_lines=True))


def test_conversations_go_through_worker_processes(chat_folder):
    items = [Conversation(f"a.jsonl:{n}", LINES[n % 3]) for n in range(50)]
    alone, together = (list(encode_all(items, _encoder(chat_folder), workers)) for workers in (0, 1))
    assert all(
        np.array_equal(a.tokens, b.tokens) and np.array_equal(a.scored, b.scored) for a, b in zip(alone, together)
    )


def _data(tmp_path, lines=LINES):
    path = tmp_path / f"talk{len(lines)}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def _config(tmp_path, folder, name, **changes):
    options = dict(
        output=str(tmp_path / name), model=str(folder), data=_data(tmp_path), dtype="float32", steps=4,
        tokens_per_step=512, sequence_length=128, checkpoint=CheckpointConfig(every=2),
        train=TrainConfig(learning_rate=3e-3, warmup_steps=0, tokens_per_microbatch=128),
    )  # fmt: skip
    return SFTConfig(**(options | changes))


def _metrics(folder, name="loss"):
    return [json.loads(line)[name] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_loss_is_that_of_the_assistants_tokens(tmp_path, chat_folder):
    # Without an update the validation on the same conversations measures the same.
    options = {"steps": 1, "loader": DataConfig(packing="whole", repeat=False), "validation_data": _data(tmp_path)}
    frozen = TrainConfig(learning_rate=1e-30, warmup_steps=0, tokens_per_microbatch=128)
    folder = finetune(_config(tmp_path, chat_folder, "run", train=frozen, **options))
    (loss,) = _metrics(folder)
    assert _metrics(folder, "validation/loss") == pytest.approx([loss], rel=1e-6)
    encoded = [_encode(chat_folder, line) for line in LINES]
    model = load_model(chat_folder, dtype="float32")
    scores = score(model, [e.tokens.tolist() for e in encoded])
    said = [s[e.scored[1:]] for s, e in zip(scores, encoded)]
    # The same terms added in another order, in float32.
    assert loss == pytest.approx(-float(sum(s.sum() for s in said)) / sum(len(s) for s in said), rel=1e-6)


def test_a_run_learns_resumes_and_keeps_the_template(tmp_path, chat_folder):
    config = _config(tmp_path, chat_folder, "whole")
    whole = finetune(config)
    losses = _metrics(whole)
    assert losses[-1] < losses[0] - 0.5 and all(0 < share < 1 for share in _metrics(whole, "data/padding"))
    stopped = finetune(_config(tmp_path, chat_folder, "stopped"))
    shutil.rmtree(stopped / "checkpoints" / "step_00000004")
    finetune(_config(tmp_path, chat_folder, "stopped", resume=True))
    assert _metrics(stopped) == losses
    rendered = load_chat_template(model_folder(str(whole))).render(LINES[1]["messages"])
    assert rendered == load_chat_template(chat_folder).render(LINES[1]["messages"])


def test_the_report_shows_answers_before_and_after_that_data_and_validation_hold(tmp_path, chat_folder):
    folder = finetune(_config(tmp_path, chat_folder, "run", steps=2))
    before, after = (
        [json.loads(line) for line in (folder / "rollouts" / f"validation_{step:08}.jsonl").read_text().splitlines()]
        for step in (0, 2)
    )
    asked = {"Say one.": "one", "Two?": "two 🙂", "not said": "def f(x):\n    return x"}
    for line in before:
        (answer,) = [answer for question, answer in asked.items() if question in line["prompt"]]
        assert line["answer"] == answer
    assert before and [line["prompt"] for line in before] == [line["prompt"] for line in after]
    assert any(a["completion"] != b["completion"] for a, b in zip(before, after))
    page = (folder / "report.html").read_text()
    assert "The same prompts, before and after" in page and "What the assistant says in the data" in page


def test_a_template_given_by_hand_is_used_and_kept(tmp_path, model_folder):
    (tmp_path / "own.jinja").write_text(PLAIN)
    folder = finetune(_config(tmp_path, model_folder, "run", steps=1, template=str(tmp_path / "own.jinja")))
    assert (folder / "checkpoints" / "step_00000001" / "chat_template.jinja").read_text() == PLAIN
    with pytest.raises(UserError, match=r"none\.jinja: no such file"):
        finetune(_config(tmp_path, model_folder, "other", template=str(tmp_path / "none.jinja")))


def test_another_tokenizer_comes_with_its_template_and_its_end_of_text(tmp_path, chat_folder):
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(chat_folder / "tokenizer.json", other)
    (other / "tokenizer_config.json").write_text('{"eos_token": "!"}')
    template = PLAIN.replace("<assistant>", "[assistant]").replace("<{{ message.role }}>", "[{{ message.role }}]")
    (other / "chat_template.jinja").write_text(template)
    run = finetune(_config(tmp_path, chat_folder, "run", steps=1, tokenizer=str(other)))
    checkpoint = model_folder(str(run))
    tokenizer, end = load_tokenizer(checkpoint), load_tokenizer(other).encode("!")[0]
    assert load_model(checkpoint).config.eos_token_ids == (end,) == (tokenizer.eos_id,)
    for file in other.iterdir():
        shutil.copy(file, chat_folder)
    assert load_chat_template(checkpoint).source == load_chat_template(chat_folder).source
    # It trained on what it carries: as a model does in whose folder the same files are.
    assert _metrics(run) == _metrics(finetune(_config(tmp_path, chat_folder, "same", steps=1)))
    (other / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="no chat template; give --template FILE"):
        finetune(_config(tmp_path, chat_folder, "none", tokenizer=str(other)))


def test_generation_stops_at_the_token_that_the_loss_scored(tmp_path, chat_folder):
    (chat_folder / "tokenizer_config.json").write_text('{"eos_token": "!"}')
    tokenizer = load_tokenizer(chat_folder)
    before = load_model(chat_folder).config.eos_token_ids
    run = model_folder(str(finetune(_config(tmp_path, chat_folder, "run", steps=1))))
    assert tokenizer.eos_id not in before
    assert load_model(run).config.eos_token_ids == (*before, tokenizer.eos_id)


def test_tokens_made_beforehand_give_the_same_run(tmp_path, chat_folder, capsys):
    direct = finetune(_config(tmp_path, chat_folder, "direct", steps=2))
    arguments = ["--data", _data(tmp_path), "--tokenizer", str(chat_folder), "--output", str(tmp_path / "tokens")]
    assert main(["data", "tokenize", "--chat", "--workers", "0", *arguments]) == 0
    assert "3 documents" in capsys.readouterr().out
    folder = finetune(_config(tmp_path, chat_folder, "folder", steps=2, data=str(tmp_path / "tokens")))
    assert _metrics(folder) == _metrics(direct)
    assert main(["data", "tokenize", *arguments]) == 2 and "already exists" in capsys.readouterr().err
    arguments[-1] = str(tmp_path / "texts")
    assert main(["data", "tokenize", "--template", "{text}", *arguments]) == 2
    assert not (tmp_path / "texts").exists()


def test_conversations_are_tokenized_with_a_template_given_by_hand(tmp_path, model_folder, capsys):
    (tmp_path / "own.jinja").write_text(PLAIN)
    arguments = ["--data", _data(tmp_path), "--tokenizer", str(model_folder), "--output", str(tmp_path / "tokens")]
    assert main(["data", "tokenize", "--chat", *arguments, "--template", str(tmp_path / "own.jinja")]) == 0
    tokens = dict(data=str(tmp_path / "tokens"), steps=1)
    folder = finetune(_config(tmp_path, model_folder, "run", **tokens))
    assert (folder / "checkpoints" / "step_00000001" / "chat_template.jinja").read_text() == PLAIN
    (tmp_path / "other.jinja").write_text(MARKED)
    with pytest.raises(UserError, match="tokens: was tokenized with another chat template; give --template"):
        finetune(_config(tmp_path, model_folder, "other", template=str(tmp_path / "other.jinja"), **tokens))
    with pytest.raises(UserError, match="tokens: was tokenized with another chat template; give --template"):
        other = dict(template=str(tmp_path / "other.jinja"), validation_data=str(tmp_path / "tokens"))
        finetune(_config(tmp_path, model_folder, "validated", **other))
    assert main(["data", "tokenize", "--chat", *arguments[:-1], str(tmp_path / "more")]) == 2
    assert "no chat template; give --template FILE" in capsys.readouterr().err


def test_text_tokens_are_refused_and_bad_lines_counted(tmp_path, chat_folder):
    (tmp_path / "a.txt").write_text("some text")
    arguments = ["--data", str(tmp_path / "a.txt"), "--tokenizer", str(chat_folder)]
    assert main(["data", "tokenize", *arguments, "--output", str(tmp_path / "texts")]) == 0
    with pytest.raises(UserError, match="was tokenized as text; .*--chat"):
        finetune(_config(tmp_path, chat_folder, "run", data=str(tmp_path / "texts")))
    with pytest.raises(UserError, match=r"a\.txt: contains no conversations; give \.jsonl \(one object per line\)"):
        finetune(_config(tmp_path, chat_folder, "run", data=str(tmp_path / "a.txt")))
    bad = [*LINES, {"messages": []}, {"prompt": 3}]
    with pytest.raises(UserError, match=r"talk5\.jsonl:4: the assistant says nothing.*--skip-bad-lines"):
        finetune(_config(tmp_path, chat_folder, "run", data=_data(tmp_path, bad)))
    folder = finetune(_config(tmp_path, chat_folder, "run", data=_data(tmp_path, bad), steps=1, skip_bad_lines=True))
    assert _metrics(folder, "data/skipped_lines") == [2]


FORGETS_THOUGHTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}<think>{{ m.reasoning_content }}"
    "</think>{% endif %}{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def forgetful(tmp_path, chat_folder):
    """A folder whose template drops earlier reasoning, and conversations with such."""
    (chat_folder / "chat_template.jinja").write_text(FORGETS_THOUGHTS)
    answers = [{"role": "assistant", "content": str(n), "reasoning_content": f"it is {n}"} for n in range(9)]
    asked = [{"role": "user", "content": f"What is {n}?"} for n in range(9)]
    lines = [{"messages": [m for n in range(k, k + 3) for m in (asked[n], answers[n])]} for k in range(6)]
    (tmp_path / "thoughts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return chat_folder


def test_answers_that_a_template_changes_later_are_trained_on_as_sampled(tmp_path, forgetful, capsys):
    config = _config(tmp_path, forgetful, "apart", data=str(tmp_path / "thoughts.jsonl"), steps=3)
    losses = _metrics(finetune(config))
    assert "12 answers that the chat template writes otherwise once others follow" in capsys.readouterr().err
    launch(2, _on_a_rank, _config(tmp_path, forgetful, "two", data=config.data, steps=3))
    # The step's sums are added in another order, in float32.
    assert _metrics(tmp_path / "two") == pytest.approx(losses, rel=1e-5)
    main(["data", "tokenize", "--chat", "--tokenizer", str(forgetful), "--data", config.data, "--output", str(tmp_path / "tokens")])  # fmt: skip # noqa: E501
    assert _metrics(finetune(_config(tmp_path, forgetful, "again", data=str(tmp_path / "tokens"), steps=3))) == losses
    capsys.readouterr()
    whole = _config(tmp_path, forgetful, "whole", data=config.data, steps=3, turns="whole")
    assert _metrics(finetune(whole)) != losses and "sequences of their own" not in capsys.readouterr().err


def test_sequences_that_share_tokens_and_ranks_that_share_sequences_are_refused(tmp_path, forgetful):
    config = _config(tmp_path, forgetful, "run", data=str(tmp_path / "thoughts.jsonl"), steps=1)
    config.parallel.context = 2
    with pytest.raises(AssertionError, match="give --turns whole"):
        launch(2, _on_a_rank, config)


def test_two_ranks_follow_one(tmp_path, chat_folder):
    alone = _metrics(finetune(_config(tmp_path, chat_folder, "alone")))
    launch(2, _on_a_rank, _config(tmp_path, chat_folder, "two"))
    # The step's sums are added in another order, in float32.
    assert _metrics(tmp_path / "two") == pytest.approx(alone, rel=1e-5)


def _on_a_rank(config):
    finetune(config)


def test_the_command_line_starts_a_run_from_a_recipe(tmp_path, chat_folder):
    arguments = ["--recipe", "chat", "--model", str(chat_folder), "--data", _data(tmp_path), "--steps", "1"]
    arguments += ["--tokens-per-step", "256", "--sequence-length", "128", "--output", str(tmp_path / "run")]
    assert main(["sft", *arguments]) == 0
    assert 'packing = "whole"' in (tmp_path / "run" / "config.toml").read_text()
    assert main(["sft", "--model", str(chat_folder)]) == 2
    config = _config(tmp_path, chat_folder, "other")
    config.loader.packing = "wole"  # as from a TOML file
    with pytest.raises(UserError, match='loader.packing is "wole"; give cut or whole'):
        finetune(config)
