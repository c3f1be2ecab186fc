"""A folder in which recipes of tinker-cookbook find everything they load by name, and the server they train on."""

import argparse
import dataclasses
import inspect
import json
import os
import random
import re
import subprocess
import sys
import time
from contextlib import contextmanager

import torch

from lockstep.data import load_tokenizer, train_bpe
from lockstep.model import build_model, preset, save_model
from lockstep.train.packing import pack, target_log_prob_sum
from tests.clients.environments import client_python
from tests.data.call_templates import write_call_family

MODEL = "Qwen/Qwen3.5-9B"
"""A name that the recipes know: they choose prompts and tokenizer by it. Two of them ask for this one themselves."""
CALL = "<tool_call>\n<function=read_page>\n<parameter=page>\n{}\n</parameter>\n</function>\n</tool_call>"
EXAMPLE = CALL.replace("read_page", "example_function_name").replace("=page", "=example_parameter_1")
"""As prompts that allow calls show the form of one."""
REPLIES = "{}", "Guess: {}", "Answer: {}", "\\boxed{{{}}}", "\\boxed{{{}}}", CALL, CALL
LEADS = ("<think>\n", "\n</think>\n\n"), ("<think>\n\n</think>\n\n", "")
"""How prompts end, and how their replies begin: with thoughts, and without."""
STEPS, BATCH, RATE = 220, 8, 3e-3
WORDS = "after many years the river rose again and several towns that stood before it were later under water"


def write_model(folder):
    """A small model that replies to everything with a reply of one of the recipes, drawn at random: rewards differ
    within every group, and training on them shows."""
    text = inspect.getsource(argparse)
    write_call_family(folder, "qwen3", train_bpe([text, f"{CALL}\n" * 300], 512))  # a call has few tokens
    tokenizer = load_tokenizer(folder)
    shape = preset("qwen3:micro", tokenizer.vocab_size, (tokenizer.eos_id,))
    model = build_model(dataclasses.replace(shape, num_layers=2, max_positions=32768), dtype="float32", seed=1)
    draw, words = random.Random(0), tokenizer.encode(text)
    optimizer = torch.optim.Adam(model.parameters())

    def reply():
        return draw.choice(REPLIES).format(draw.randrange(4))

    def some_words():
        start = draw.randrange(len(words))
        return words[start : start + draw.choice([4, 16, 64, 384])]

    def conversation():
        lead, rest = draw.choice(LEADS)
        turn = tokenizer.encode(f"<|im_end|>\n<|im_start|>assistant\n{lead}")
        earlier = tokenizer.encode(draw.choice([EXAMPLE.format("value_1"), reply()]))
        prompt = some_words() + earlier + some_words() + turn
        return prompt + tokenizer.encode(f"{rest}{reply()}<|im_end|>"), len(prompt)

    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * min(1, (step + 1) / 10) * (1 - step / STEPS)
        row = pack(*zip(*(conversation() for _ in range(BATCH))))
        optimizer.zero_grad()
        (-target_log_prob_sum(model, row, 1.0) / len(row.targets)).backward()
        optimizer.step()
    save_model(model, folder)


def _sum(draw):
    a, b = draw.randrange(2), draw.randrange(3)
    return f"What is {a} + {b}?", a + b


def write_data(home):
    """Sums, in the folders and forms of the public datasets that recipes load; a text in place of an encyclopedia."""
    draw = random.Random(0)

    def write(name, rows, count, config="default", splits=("train", "test")):
        folder = home / name
        folder.mkdir(parents=True)
        files = ["---", "configs:", f"- config_name: {config}", "  data_files:"]
        for split in splits:
            lines = [json.dumps(rows(*_sum(draw))) + "\n" for _ in range(count if split == "train" else 8)]
            (folder / f"{split}.jsonl").write_text("".join(lines))
            files += [f"  - split: {split}", f"    path: {split}.jsonl"]
        (folder / "README.md").write_text("\n".join([*files, "---\n"]))

    def robots(question, answer):
        said = [{"role": "user", "content": question}, {"role": "assistant", "content": f"\\boxed{{{answer}}}"}]
        return {"prompt": question, "messages": said}

    def preference(question, answer):
        asked = f"\n\nHuman: {question}\n\nAssistant:"
        return {"chosen": f"{asked} \\boxed{{{answer}}}", "rejected": f"{asked} Guess: {answer}"}

    def page(question, answer):
        return {"text": " ".join(draw.choices(WORDS.split(), k=20)) + "\n"}

    write("openai/gsm8k", lambda question, answer: {"question": question, "answer": f"#### {answer}"}, 64, "main")
    write("HuggingFaceH4/no_robots", robots, 64)
    write("Anthropic/hh-rlhf", preference, 64)
    write("zwhe99/DeepMath-103K", lambda question, answer: {"question": question}, 64, splits=("train",))
    write("Salesforce/wikitext", page, 500, "wikitext-103-raw-v1", ("train",))


class Cookbook:
    """Runs recipes in their own environment, against a server, in a folder of `write_model` and `write_data`."""

    def __init__(self, home, url):
        self.home, self.url = home, url

    def start(self, recipe, log, *options):
        """The finished process of a recipe that logs into a folder of this name."""
        logs = f"log_path={self.home / 'logs' / log}"
        command = [client_python("tinker_cookbook"), "-m", f"tinker_cookbook.recipes.{recipe}", logs, *options]
        server = {"TINKER_BASE_URL": self.url, "TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0"}
        home = {"HOME": str(self.home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]}
        model = f"model_name={MODEL}"
        return subprocess.run(
            [*command, model], capture_output=True, text=True, env=server | home, cwd=self.home, timeout=600
        )

    def run(self, recipe, log, *options):
        """The metrics of each of its steps."""
        done = self.start(recipe, log, *options)
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        lines = [json.loads(line) for line in (self.home / "logs" / log / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if any(name.startswith("progress") for name in line)]

    def checkpoints(self, log):
        """What it has saved, oldest first."""
        return [json.loads(line) for line in self.checkpoint_file(log).read_text().splitlines()]

    def checkpoint_file(self, log):
        return self.home / "logs" / log / "checkpoints.jsonl"


@contextmanager
def train_server(home, output):
    """The URL of `lockstep train-server` of the model in `home`."""
    options = ["--model", str(home / MODEL), "--model-name", MODEL, "--port", "0", "--output", str(output)]
    command = [sys.executable, "-m", "lockstep", "train-server", *options, "--engine.cache-tokens", "65536"]
    log = home / "server.log"
    with log.open("w") as lines:  # a pipe that nobody reads would hold the server up
        process = subprocess.Popen(command, stdout=lines, stderr=lines, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        while not (found := re.search(r"running on (http://\S+)", log.read_text())):
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        yield found[1]
    finally:
        process.kill()
        process.wait()
