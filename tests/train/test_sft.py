"""Fine-tuning on conversations: the loss counts what the assistant says, as the model's own template has it."""

import json
import shutil

import pytest
import torch

from lockstep import load_model, score
from lockstep.checkpoint import model_folder as newest_model
from lockstep.cli import main
from lockstep.config import CheckpointConfig, DataConfig, SFTConfig, TrainConfig
from lockstep.data import ConversationEncoder, load_tokenizer
from lockstep.data.chat import load_chat_template
from lockstep.data.conversations import Conversation
from lockstep.errors import UserError
from lockstep.parallel.world import AXES, World
from lockstep.train.context import shard_row
from lockstep.train.packing import pack_scored
from lockstep.train.sft import finetune
from tests.data.test_conversations import LINES, MARKED, PLAIN
from tests.parallel.launch import launch
from tests.train.runs import logged, write_lines


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory, model_folder):
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(model_folder, folder)
    (folder / "chat_template.jinja").write_text(MARKED)
    return folder


def _config(tmp_path, folder, name, lines=LINES, **changes):
    options = dict(
        output=str(tmp_path / name), model=str(folder), data=write_lines(tmp_path / f"{name}.jsonl", lines),
        dtype="float32", steps=3, tokens_per_step=256, sequence_length=128, checkpoint=CheckpointConfig(every=2),
        train=TrainConfig(learning_rate=3e-3, warmup_steps=0, schedule="constant", tokens_per_microbatch=128),
    )  # fmt: skip
    return SFTConfig(**(options | changes))


@pytest.fixture(scope="module")
def run(tmp_path_factory, chat_folder):
    return finetune(_config(tmp_path_factory.mktemp("sft"), chat_folder, "run"))


def test_a_run_learns_keeps_the_template_and_shows_answers_before_and_after(run, chat_folder):
    losses = logged(run)
    assert losses[-1] < losses[0] - 0.5 and all(0 < share < 1 for share in logged(run, "data/padding"))
    saved, given = (load_chat_template(folder) for folder in (newest_model(str(run)), chat_folder))
    assert saved.render(LINES[1]["messages"]) == given.render(LINES[1]["messages"])
    before, after = (
        [json.loads(line) for line in (run / "rollouts" / f"validation_{step:08}.jsonl").read_text().splitlines()]
        for step in (0, 3)
    )
    asked = {"Say one.": "one", "Two?": "two 🙂", "not said": "def f(x):\n    return x"}
    for line in before:
        (answer,) = [answer for question, answer in asked.items() if question in line["prompt"]]
        assert line["answer"] == answer
    assert before and [line["prompt"] for line in before] == [line["prompt"] for line in after]
    assert any(a["completion"] != b["completion"] for a, b in zip(before, after))
    page = (run / "report.html").read_text()
    assert "The same prompts, before and after" in page and "What the assistant says in the data" in page


def test_a_resumed_run_and_one_on_tokens_made_beforehand_have_the_bits_of_the_whole_run(
    run, tmp_path, chat_folder, capsys
):
    shutil.copytree(run, tmp_path / "stopped")
    shutil.rmtree(tmp_path / "stopped" / "checkpoints" / "step_00000003")
    finetune(_config(tmp_path, chat_folder, "stopped", resume=True))
    assert logged(tmp_path / "stopped") == logged(run)
    data = write_lines(tmp_path / "talk.jsonl", LINES)
    arguments = ["--data", data, "--tokenizer", str(chat_folder), "--output", str(tmp_path / "tokens")]
    assert main(["data", "tokenize", "--chat", "--workers", "0", *arguments]) == 0
    assert "3 documents" in capsys.readouterr().out
    folder = finetune(_config(tmp_path, chat_folder, "folder", steps=1, data=str(tmp_path / "tokens")))
    assert logged(folder) == logged(run)[:1]
    assert main(["data", "tokenize", *arguments]) == 2 and "already exists" in capsys.readouterr().err


def test_two_ranks_follow_one(run, tmp_path, chat_folder):
    launch(2, finetune, _config(tmp_path, chat_folder, "two", steps=2))
    # The step's sums are added in another order, in float32.
    assert logged(tmp_path / "two") == pytest.approx(logged(run)[:2], rel=1e-5)


def test_the_loss_is_that_of_the_assistants_tokens_and_generation_stops_at_the_token_that_it_scored(
    tmp_path, chat_folder
):
    # Another tokenizer comes with its template and its end of text. Without an update validation measures the same.
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(chat_folder / "tokenizer.json", other)
    (other / "tokenizer_config.json").write_text('{"eos_token": "!"}')
    (other / "chat_template.jinja").write_text(MARKED.replace("<assistant>", "[assistant]"))
    config = _config(tmp_path, chat_folder, "run", steps=1, tokenizer=str(other), sequence_length=128)
    config.loader = DataConfig(packing="whole", repeat=False)
    config.validation_data, config.train.learning_rate = config.data, 1e-30
    run = finetune(config)
    (loss,) = logged(run)
    assert logged(run, "validation/loss") == pytest.approx([loss], rel=1e-6)
    checkpoint = newest_model(str(run))
    tokenizer, template = load_tokenizer(checkpoint), load_chat_template(checkpoint)
    model, (end,) = load_model(checkpoint), load_tokenizer(other).encode("!")
    assert model.config.eos_token_ids == (end,) == (tokenizer.eos_id,)
    assert template.source == (other / "chat_template.jinja").read_text()
    encoded = ConversationEncoder(tokenizer, template).encode([Conversation("", line) for line in LINES])
    scores = score(load_model(chat_folder, dtype="float32"), [e.tokens.tolist() for e in encoded])
    said = torch.cat([s[torch.from_numpy(e.scored[1:])] for s, e in zip(scores, encoded)])
    # The same terms added in another order, in float32.
    assert loss == pytest.approx(-float(said.mean()), rel=1e-6)
    (other / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="no chat template; give --template FILE"):
        finetune(_config(tmp_path, chat_folder, "none", tokenizer=str(other)))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (16, r"begins\.jsonl: the conversations are longer than a row of 16 tokens"),
        (256, r"begins\.jsonl:1: its answer has no token that can be scored; give it a prompt"),
    ],
)
def test_a_run_without_anything_to_learn_is_refused(tmp_path, chat_folder, row, message):
    template = tmp_path / "begins.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% endif %}{{ 'b' * 63 }}{% endfor %}"
    )
    lines = [{"messages": [{"role": "assistant", "content": "a"}] * (2 if row == 16 else 1)}]
    begins = write_lines(tmp_path / "begins.jsonl", lines)
    options = dict(template=str(template), sequence_length=row, tokens_per_step=row)
    whole, prompted = DataConfig(packing="whole", repeat=False), [{"prompt": "a", "completion": "b"}]
    for changes in (
        dict(data=begins, steps=0, epochs=1),
        dict(data=begins, loader=whole),
        dict(validation_data=begins),
    ):
        with pytest.raises(UserError, match=message):
            finetune(_config(tmp_path, chat_folder, "run", prompted, **options, **changes))


def test_conversations_that_are_cut_are_counted_and_bad_ones_named_or_skipped(tmp_path, chat_folder, caplog):
    long = {"messages": [{"role": "user", "content": "word " * 200}, {"role": "assistant", "content": "yes"}]}
    bad = [long, *LINES, {"messages": []}, {"prompt": 3}]
    with pytest.raises(UserError, match=r"run\.jsonl:5: the assistant says nothing.*--skip-bad-lines"):
        finetune(_config(tmp_path, chat_folder, "run", bad))
    folder = finetune(_config(tmp_path, chat_folder, "run", bad, skip_bad_lines=True))
    assert logged(folder, "data/skipped_lines") == [2] * 3 and all(loss > 0 for loss in logged(folder))
    assert "1 conversations are longer than a row of 128 tokens and are cut" in caplog.text


def test_a_template_given_by_hand_is_kept_and_data_that_does_not_fit_it_is_refused(tmp_path, model_folder, capsys):
    (tmp_path / "own.jinja").write_text(PLAIN)
    (tmp_path / "other.jinja").write_text(MARKED)
    (tmp_path / "a.txt").write_text("some text")
    data, other = write_lines(tmp_path / "talk.jsonl", LINES), str(tmp_path / "other.jinja")

    def tokenize(data, name, *options):
        paths = ["--data", str(data), "--output", str(tmp_path / name), "--tokenizer", str(model_folder)]
        return main(["data", "tokenize", *paths, *options]), str(tmp_path / name)

    done, tokens = tokenize(data, "tokens", "--chat", "--template", str(tmp_path / "own.jinja"))
    assert done == 0
    folder = finetune(_config(tmp_path, model_folder, "run", data=tokens, steps=1))
    assert (folder / "checkpoints" / "step_00000001" / "chat_template.jinja").read_text() == PLAIN
    assert tokenize(data, "more", "--chat")[0] == 2
    assert "no chat template; give --template FILE" in capsys.readouterr().err
    _, texts = tokenize(tmp_path / "a.txt", "texts")
    of_another = "tokens: was tokenized with another chat template; give --template"
    for changes, message in (
        (dict(data=tokens, template=other), of_another),
        (dict(validation_data=tokens, template=other), of_another),
        (dict(skip_bad_lines=True), "no chat template; give --template FILE"),
        (dict(template=str(tmp_path / "none.jinja")), r"none\.jinja: no such file"),
        (dict(data=texts), "was tokenized as text; .*--chat"),
        (dict(data=str(tmp_path / "a.txt")), r"a\.txt: contains no conversations; give \.jsonl"),
    ):
        with pytest.raises(UserError, match=message):
            finetune(_config(tmp_path, model_folder, "other", **changes))


FORGETS_THOUGHTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}<think>{{ m.reasoning_content }}"
    "</think>{% endif %}{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_answers_that_a_template_changes_later_are_trained_on_as_sampled(tmp_path, chat_folder, capsys):
    (tmp_path / "forgets.jinja").write_text(FORGETS_THOUGHTS)
    answers = [{"role": "assistant", "content": str(n), "reasoning_content": f"it is {n}"} for n in range(9)]
    asked = [{"role": "user", "content": f"What is {n}?"} for n in range(9)]
    lines = [{"messages": [m for n in range(k, k + 3) for m in (asked[n], answers[n])]} for k in range(6)]
    options = dict(template=str(tmp_path / "forgets.jinja"), steps=2)
    losses = logged(finetune(_config(tmp_path, chat_folder, "apart", lines, **options)))
    assert "12 answers that the chat template writes otherwise once others follow" in capsys.readouterr().err
    launch(2, finetune, _config(tmp_path, chat_folder, "two", lines, **options))
    # The step's sums are added in another order, in float32.
    assert logged(tmp_path / "two") == pytest.approx(losses, rel=1e-5)
    whole = logged(finetune(_config(tmp_path, chat_folder, "whole", lines, turns="whole", **options)))
    assert whole != losses and "sequences of their own" not in capsys.readouterr().err


def test_sequences_that_share_tokens_and_ranks_that_share_sequences_are_refused():
    row = pack_scored([[1, 2, 3], [1, 2, 4]], [[2], [2]], [0, 1])
    with pytest.raises(UserError, match="give --turns whole"):
        shard_row(row, World(torch.device("cpu"), dict.fromkeys(AXES, 1) | {"context": 2}))
