"""A real server of the training API on a loopback port, and the released client that talks to it."""

from contextlib import contextmanager

import httpx
import pytest
import tinker
from tinker import types

from lockstep import build_model, save_model
from lockstep.config import EngineConfig, TrainServerConfig
from lockstep.data.tokenizer import ByteTokenizer
from lockstep.model import preset
from tests.server.conftest import in_a_thread

ENGINE = EngineConfig(max_tokens_per_step=512, max_sequences=64, cache_tokens=16384)
NAME = "Qwen/Qwen3-8B"
KEY = "tml-local"


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A small model with a byte tokenizer."""
    path = tmp_path_factory.mktemp("base") / "model"
    save_model(build_model(preset("qwen3:micro"), "float32", seed=1), path)
    ByteTokenizer().save(path)
    return path


class Running:
    """A server in a thread."""

    def __init__(self, service, server):
        self.service = service
        self.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"

    def client(self, **options):
        return tinker.ServiceClient(base_url=self.url, api_key=KEY, **options)

    def http(self):
        return httpx.Client(base_url=f"{self.url}/api/v1", timeout=60)

    def post(self, route, **body):
        with self.http() as http:
            return http.post(route, json=body)


@contextmanager
def running(folder, output, **options):
    from lockstep.generate.server.serve import Server
    from lockstep.train_server.app import create_app
    from lockstep.train_server.serve import build_service

    settings = {"engine": ENGINE, "port": 0, "model_name": NAME, "shutdown_seconds": 0.5} | options
    service = build_service(TrainServerConfig(model=str(folder), output=str(output), **settings), folder)
    server = Server(create_app(service), service.config, service.limits)
    with in_a_thread(server):
        yield Running(service, server)


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    with running(folder, tmp_path_factory.mktemp("states")) as each:
        yield each


@pytest.fixture(scope="module")
def client(server):
    with server.client() as each:
        yield each


def lora_client(client, rank=4, seed=3, head=True, **options):
    """A training client with an adapter of all layers, and of the head."""
    return client.create_lora_training_client(
        base_model=NAME, rank=rank, seed=seed, train_unembed=head, **options
    ).result()


def datum(text, **inputs):
    """The text's next-token targets, and a loss's other inputs: numbers, or one for all tokens."""
    tokens = list(text) if isinstance(text, bytes) else text
    given = {"target_tokens": tokens[1:]}
    for name, value in inputs.items():
        given[name] = [value] * (len(tokens) - 1) if isinstance(value, float) else value
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=given)


def log_probs(output):
    return [each["logprobs"].tolist() for each in output.loss_fn_outputs]


def matrices(trained):
    """The values of a training client's adapter, by name; of a server in this process."""
    return {name: each.detach().clone() for name, each in trained.adapter.named_parameters()}
