"""Server processes for clients of other projects, and how these are run."""

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import pytest

from lockstep.data import load_tokenizer
from lockstep.model import build_model, preset, save_model
from tests.clients.environments import client_python
from tests.data.call_templates import write_call_family
from tests.server.conftest import server_process

PROGRAMS = Path(__file__).parent / "programs"
OFFLINE = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_API_KEY": "none"}


def _folder(tmp_path_factory, family, bpe_tokenizer):
    """A small model with random weights and a public chat template, whose context has room for an agent's prompts."""
    folder = tmp_path_factory.mktemp("clients") / family
    write_call_family(folder, family, bpe_tokenizer)
    tokenizer = load_tokenizer(folder)
    size = tokenizer.vocab_size + tokenizer.vocab_size % 2
    config = dataclasses.replace(preset("qwen3:micro", size, (tokenizer.eos_id,)), max_positions=32768)
    save_model(build_model(config, dtype="float32", seed=1), folder)
    return folder


class Scripted:
    """A server process that says what tests tell it."""

    def __init__(self, url, folder):
        self.url, self.folder = url, folder

    def say(self, *replies):
        """What the model replies to the next requests, in order."""
        (self.folder / "replies.jsonl").write_text("".join(json.dumps(reply) + "\n" for reply in replies))
        (self.folder / "prompts.jsonl").write_text("")

    def prompts(self):
        """The prompts since, all of whose replies must have been given."""
        left = (self.folder / "replies.jsonl").read_text()
        assert not left, f"replies that no request took: {left}"
        return [json.loads(line) for line in (self.folder / "prompts.jsonl").read_text().splitlines()]


@pytest.fixture(scope="package")
def scripted(tmp_path_factory, bpe_tokenizer):
    """A server whose model, in Qwen3's format, is scripted."""
    script = tmp_path_factory.mktemp("script")
    options = "--model-name", "small", "--dtype", "float32", "--engine.cache-tokens", "65536"
    folder = _folder(tmp_path_factory, "qwen3", bpe_tokenizer)
    started = server_process(
        folder, *options, environment={"SCRIPT": str(script)}, module="tests.clients.scripted_server"
    )
    with started as (_, url):
        yield Scripted(url, script)


@pytest.fixture(scope="package")
def sampling(tmp_path_factory, bpe_tokenizer):
    """The URL of `lockstep serve` of a model with random weights, which says nothing of use unless it is forced to."""
    folder = _folder(tmp_path_factory, "mistral_args", bpe_tokenizer)
    with server_process(folder, "--model-name", "small", "--dtype", "float32") as (_, url):
        yield url


@pytest.fixture
def run(tmp_path):
    """run(client, program, *arguments): what the program, which runs in the client's environment, prints in its last
    line, as JSON."""

    def run_program(client, program, *arguments):
        command = [client_python(client), str(PROGRAMS / program), *arguments]
        home = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)}
        variables = {"PATH": os.environ["PATH"], **OFFLINE, **home}
        done = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=tmp_path, timeout=600)
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return json.loads(done.stdout.strip().splitlines()[-1])

    return run_program
