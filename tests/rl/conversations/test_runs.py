"""Whole runs on conversations and on rendered prompts: a small model, real templates, every bit compared."""

import os

import pytest

from lockstep.config import CheckpointConfig, EngineConfig, RewardConfig, RLConfig, TrainConfig
from lockstep.data import load_tokenizer
from lockstep.errors import UserError
from lockstep.rl.reinforce import reinforce
from lockstep.rl.replay import replay
from lockstep.workers.processes import descendants
from tests.rl.processes import command_of
from tests.rl.small_runs import rollouts_of, steps_of, trained_despite_failures

TASK = '''
import os
import lockstep.rl as rl
from lockstep.rl.conversations import Reply, ToolCall
from lockstep.rl.conversations.tools import answer_calls

def words(text: str) -> int:
    """Counts words.

    Args:
        text: Any text.
    """
    return len(text.split())

class Talk(rl.ConversationEnvironment):
    tools = (words,)
    def examples(self, split):
        for word in ("stone", "river", "cloud", "apple"):
            yield rl.Example(prompt=word, answer="e")
    async def converse(self, example, chat):
        chat.add(example.prompt)
        reply = await chat.reply()
        # Random weights write no call, so here is one as a model would have made it.
        call = ToolCall("words", {"text": reply.text})
        await answer_calls(chat, Reply(reply.text, tool_calls=(call,)), self.tools)
        await chat.reply()
        del chat.messages[1]
        await chat.reply()
    async def grade(self, example, episodes):
        return [e.answer.count("e") / max(1, len(e.answer)) for e in episodes]

class Faulty(Talk):
    async def converse(self, example, chat):
        chat.add(example.prompt)
        reply = await chat.reply()
        if example.prompt == "stone" or len(reply.text) % 4 == 0:
            os._exit(1)
        return {"elsewhere": float(os.getpid() != self.loaded_by), "e": reply.text.count("e")}
    def __init__(self):
        super().__init__()
        self.loaded_by = os.getpid()

class Last(rl.ConversationEnvironment):
    def __init__(self, data="", skip_bad_lines=False):
        self.process = os.getpid()
    def examples(self, split):
        for word in ("stone", "river", "cloud", "apple"):
            yield rl.Example(prompt=word, answer=str(os.getpid()))
    def reward(self, example, completion):
        return {"elsewhere": float(example.answer != str(os.getpid())), "e": completion.count("e")}

class Tools(Last):
    tools = (words,)
'''


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    file = tmp_path_factory.mktemp("task") / "my_talk.py"
    file.write_text(TASK)
    return lambda name: f"{file}:{name}"


def config(output, model, environment, **changes):
    """Settings of a short run on conversations."""
    defaults = dict(
        output=str(output), model=str(model), environment=environment, steps=2, prompts_per_step=2,
        samples_per_prompt=3, max_new_tokens=8, validation_examples=2,
        train=TrainConfig(learning_rate=1e-3, warmup_steps=0, schedule="constant", tokens_per_microbatch=300),
        engine=EngineConfig(max_tokens_per_step=128, max_sequences=4, cache_tokens=4096),
    )  # fmt: skip
    return RLConfig(**(defaults | changes))


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [pytest.param(*pair, marks=pytest.mark.slow) for pair in (("qwen3", "grpo"), ("llama3_1", "ppo"), (None, "gspo"))],
)
def test_a_run_of_conversations_trains_with_every_bit_compared(
    tmp_path, chat_model, model_folder, task, name, algorithm
):
    model = chat_model(name) if name else model_folder
    changes = dict(algorithm=algorithm, kl_coefficient=0.05, updates_per_batch=2, checkpoint=CheckpointConfig(every=1))
    whole = reinforce(config(tmp_path / "whole", model, task("Talk"), **changes))
    for step in steps_of(whole):
        assert step["parity/tokens_different"] == 0 and step["policy/ratio_first_max"] == 1.0
        assert step["parity/tokens_checked"] == step["rollout/tokens"] > 0
        assert step["rollout/turns_mean"] == 3.0 and step["rollout/rows_mean"] >= 2.0
        assert step["rollout/environment_tokens"] > 0
        assert step["rollout/environment_seconds"] > step["rollout/tool_seconds/words"] > 0
    for line in rollouts_of(whole, 2):
        assert len(line["log_probs"]) == sum(line["sampled"]) and len(line["sampled"]) == len(line["token_ids"])
        assert line["turns"] == 3 and line["messages"][0]["content"] == line["prompt"]
        assert any(message["role"] == "tool" for message in line["messages"])
    with pytest.raises(UserError, match="step 2 of .* has conversations.*--sample"):
        replay(whole, 2)
    again = replay(whole, 2, sample=True)
    assert again.equal, again.text()
    torn = reinforce(config(tmp_path / "torn", model, task("Talk"), **changes))
    (torn / "checkpoints" / "step_00000002").rename(torn / "checkpoints" / "step_00000002.partial")
    reinforce(config(tmp_path / "torn", model, task("Talk"), resume=True, **changes))
    assert rollouts_of(torn, 2) == rollouts_of(whole, 2), "a resumed run draws the same"


@pytest.mark.parametrize("on_failure", ["drop", pytest.param("zero", marks=pytest.mark.slow)])
def test_a_run_goes_on_where_conversations_end_their_processes_and_its_ledger_adds_up(
    tmp_path, chat_model, task, on_failure
):
    rewards = RewardConfig(on_failure=on_failure, failure_limit=0.9, workers=1)
    changes = dict(steps=1, prompts_per_step=4, samples_per_prompt=4, rewards=rewards)
    folder = reinforce(config(tmp_path / "run", chat_model("llama3"), task("Faulty"), **changes))
    below = [" ".join(command_of(process)) for process in descendants(os.getpid())]
    assert not any("grading.supervisor" in command for command in below), "no process is left behind"
    (step,), rollouts = steps_of(folder), rollouts_of(folder, 1)
    assert len(trained_despite_failures(step, rollouts, on_failure, "killed")) > 1
    assert all(r["rewards"]["elsewhere"] == 1.0 for r in rollouts if "failure" not in r)


def test_a_run_renders_prompts_rewards_replies_in_workers_and_warns_of_tools_that_are_not_shown(
    tmp_path, chat_model, model_folder, renderings, task, caplog
):
    model, rendering = chat_model("llama3"), renderings["llama3"]
    prompts = {}
    for chat in ("auto", "never"):
        changes = dict(steps=1, prompts_per_step=1, validation_examples=0, chat=chat)
        folder = reinforce(config(tmp_path / chat, model, task("Tools"), **changes))
        prompts[chat] = rollouts_of(folder, 1)[0]["prompt_ids"]
        assert steps_of(folder)[-1]["reward/elsewhere/mean"] == 1.0
        assert steps_of(folder)[-1]["parity/tokens_different"] == 0
        assert ("does not show tools" if chat == "auto" else "has no chat template, so the model") in caplog.text
    said = rollouts_of(folder, 1)[0]["prompt"]
    assert prompts["never"] == load_tokenizer(model).encode(said)
    assert prompts["auto"] == rendering.tokens(rendering.text([{"role": "user", "content": said}]))
    with pytest.raises(UserError, match='chat is "always", but .* has no chat template'):
        reinforce(config(tmp_path / "always", model_folder, task("Tools"), chat="always"))
