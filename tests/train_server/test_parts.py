"""The messages against the client's own, the losses that clients trace, saved states, and what is packed together."""

import math
import operator
import os
import signal
import subprocess
import sys
import time

import peft
import pytest
import tinker
import torch
import transformers
from tinker import types
from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss
from tinker.proto import tinker_public_pb2 as theirs

from lockstep.errors import UserError
from lockstep.train_server import batches, wire
from lockstep.train_server.loss_graph import GraphLoss
from lockstep.train_server.losses import LOSSES
from lockstep.train_server.protocol import LossGraph, LossInput
from lockstep.train_server.states import States
from tests.train_server.conftest import KEY, NAME, datum, log_probs, lora_client

RENAMED = {"TokenSpan": "SampledProvenanceSpan"}
LEFT_OUT = {"ImageChunk": {"expected_tokens", "override_dimensions"}, "SampleResponse": {"prompt_alt_tokens"}}


@pytest.mark.parametrize("name", list(wire.FIELDS))
def test_messages_have_the_numbers_and_types_of_the_clients(name):
    own, other = wire.MESSAGES[name].DESCRIPTOR, theirs.DESCRIPTOR.message_types_by_name[RENAMED.get(name, name)]

    def form(field):
        kind = "enum" if field.enum_type else field.type
        return field.number, "int32" if kind in ("enum", field.TYPE_INT32) else kind, field.is_repeated

    fields = {field.name: form(field) for field in other.fields}
    assert {field.name: form(field) for field in own.fields} == {
        field: value for field, value in fields.items() if field not in LEFT_OUT.get(name, ())
    }


def graph_of(function, **ranks):
    """The client's tracing and encoding, and our reading of it."""
    handle = trace_loss(function, {"logprobs": 1, **ranks}, "session")
    inputs = [LossInput(name=each.name, rank=each.rank) for each in handle.inputs]
    return GraphLoss("loss", inputs, LossGraph.model_validate_json(encode_graph(handle).model_dump_json()))


def test_a_traced_loss_has_the_value_and_gradient_of_the_function():
    def loss(logprobs, advantages, old):
        ratio = (logprobs - old).exp()
        kept = torch.where(advantages > 0, ratio, 1 / ratio)[1:]
        value = (-torch.minimum(kept, torch.tensor(0.5) if False else kept * 0.5) * advantages[1:]).sum()
        value = value + torch.logsumexp(logprobs, dim=0) / logprobs.shape[0] + math.pi * logprobs.mean().square()
        return value, {"custom/x:sum": ratio.max(), "custom/n:mean": ratio.detach().sum()}

    graph = graph_of(loss, advantages=1, old=1)
    draws = torch.Generator().manual_seed(0)
    values = [torch.randn(9, generator=draws) for _ in range(3)]
    expected, found = (values[0].clone().requires_grad_() for _ in range(2))
    loss(expected, *values[1:])[0].backward()
    value, metrics = graph(found, values[1:])
    value.backward()
    assert torch.equal(found.grad, expected.grad) and set(metrics) == {"custom/x:sum", "custom/n:mean"}


def node(op, name, target, *args, **kwargs):
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


P = node("placeholder", "p", "logprobs")
OUT = node("output", "output", "output", {"tuple": [{"ref": "x"}, {"dict": {}}]})
REFUSED = {
    "function": [P, node("call_function", "x", "os.system", "true"), OUT],
    "builtin": [P, node("call_function", "x", "builtins.eval", "1"), OUT],
    "attribute": [P, node("call_function", "x", "getattr", {"ref": "p"}, "__class__"), OUT],
    "method": [P, node("call_method", "x", "apply_", {"ref": "p"}), OUT],
    "backward": [P, node("call_method", "x", "backward", {"ref": "p"}), OUT],
    "storage": [P, node("call_function", "x", "torch.load", "file"), OUT],
    "module": [P, node("call_module", "x", "linear", {"ref": "p"}), OUT],
    "captured": [P, node("get_attr", "x", "secret"), OUT],
    "later": [P, node("call_function", "x", "torch.exp", {"ref": "y"}), OUT],
    "twice": [P, node("call_function", "p", "torch.exp", {"ref": "p"}), OUT],
    "no output": [P, node("call_function", "x", "torch.exp", {"ref": "p"})],
    "other inputs": [node("placeholder", "p", "weights"), OUT],
}
FAILING = {
    "vector": [P, node("call_function", "x", "torch.exp", {"ref": "p"}), OUT],
    "infinite": [P, node("call_function", "y", "torch.sum", {"ref": "p"}),
                 node("call_function", "x", "operator.truediv", {"ref": "y"}, 0), OUT],
    "large": [P, node("call_function", "x", "torch.flip", {"ref": "p"}, [5]), OUT],
    "text": [P, node("call_function", "x", "operator.mul", "ab", 3), OUT],
    "number on a number": [P, node("call_function", "y", "operator.pow", 10, 400),
                           node("call_function", "x", "operator.mul", {"ref": "y"}, {"ref": "p"}), OUT],
    "dtype": [P, node("call_method", "x", "to", {"ref": "p"}, {"dtype": "complex128"}), OUT],
    "list": [P, node("call_function", "y", "operator.mul", [0], 50_000_000),
             node("call_function", "x", "torch.sum", {"ref": "p"}), OUT],
    "outer product": [P, *(node("call_function", f"c{i}", "torch.cat", [{"ref": f"c{i - 1}" if i else "p"}] * 32)
                           for i in range(3)),
                      node("call_method", "r", "unsqueeze", {"ref": "c2"}, 1),
                      node("call_function", "y", "operator.mul", {"ref": "c2"}, {"ref": "r"}),
                      node("call_function", "x", "torch.sum", {"ref": "y"}), OUT],
    "metric": [P, node("call_function", "x", "torch.sum", {"ref": "p"}),
               node("output", "output", "output",
                    {"tuple": [{"ref": "x"}, {"dict": {"custom/a:sum": {"ref": "p"}}}]})],
    "called on a number": [P, node("call_method", "x", "sum", 3), OUT],
}  # fmt: skip


def graph(nodes):
    inputs = [LossInput(name="logprobs", rank=1)]
    return GraphLoss("loss", inputs, LossGraph.model_validate({"nodes": nodes}))


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_is_not_on_the_list_is_refused_before_anything_runs(case):
    with pytest.raises(UserError, match="the loss loss"):
        graph(REFUSED[case])


@pytest.mark.parametrize("case", list(FAILING))
def test_a_loss_that_fails_is_a_named_error(case):
    with pytest.raises(UserError, match="the loss loss"):
        graph(FAILING[case])(torch.ones(4, requires_grad=True), [])


def test_a_loss_cannot_grow_beyond_the_bound():
    nodes = [P] + [
        node("call_function", f"c{i}", "torch.cat", [{"ref": f"c{i - 1}" if i else "p"}] * 4) for i in range(14)
    ]
    with pytest.raises(UserError, match="at most"):
        graph([*nodes, node("call_function", "x", "torch.sum", {"ref": "c13"}), OUT])(torch.ones(8), [])
    assert operator.pow(2.0, 3) == 8


def test_samples_of_a_prompt_compute_it_once_and_have_their_own_log_probabilities():
    prompt = [5, 6, 7, 8]

    def of(sampled, advantage):
        tokens = prompt + sampled
        own = torch.tensor([0.0] * 3 + [advantage] * len(sampled))
        return batches.Datum(tokens[:-1], torch.tensor(tokens[1:]), {"advantages": own, "logprobs": -own})

    data = [of([1, 2], 1.0), of([3], -1.0), of([4, 5, 6], 0.5)]
    (batch,) = batches.micro_batches(data, LOSSES["ppo"], 100)
    assert batch.row.left_out == [0, 3, 3] and batch.row.lengths == [5, 4, 6]
    assert batch.row.predictors.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 5, 0, 1, 2, 6, 7, 8]
    (alone,) = batches.micro_batches(data[:1], LOSSES["cross_entropy"], 100)
    assert alone.row.left_out is None
    assert [len(each.data) for each in batches.micro_batches(data, LOSSES["ppo"], 6)] == [2, 1]


def test_a_saved_state_is_an_adapter_that_peft_loads(server, client, folder):
    training = lora_client(client)
    training.forward_backward([datum(b"the quick brown fox", weights=1.0)], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=0.1)).result()
    path = training.save_weights_external("exported").result().path
    _, place = server.service.states.find(path)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, place)
    tokens = list(b"hello there")
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
    expected = logits.log_softmax(-1)[torch.arange(len(tokens) - 1), tokens[1:]]
    (found,) = log_probs(training.forward([datum(tokens)], "cross_entropy").result())
    torch.testing.assert_close(torch.tensor(found), expected, atol=2e-4, rtol=0)  # float32, other orders of sums


def killed_while_saving(folder, output, draws):
    """A server process, killed at a random moment while a client trains and saves under changing names."""
    command = [sys.executable, "-m", "lockstep", "train-server", "--model", str(folder), "--model-name", NAME]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TINKER_API_KEY": ""}
    process = subprocess.Popen(
        [*command, "--port", "0", "--output", str(output)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
        text=True, env=environment,
    )  # fmt: skip
    url = next(line for line in process.stderr if "running on http" in line).partition("on ")[2].split()[0]
    client = tinker.ServiceClient(base_url=url, api_key=KEY)
    training = lora_client(client)
    for number in range(30):
        training.forward_backward([datum(b"abcdefgh", weights=1.0)], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=0.01))
        training.save_state(f"state-{number % 3}", overwrite=True)
    time.sleep(float(torch.rand((), generator=draws)) * 0.4)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stderr.close()


def whole_states(output):
    """The states that a new server has. Raises UserError for one that is damaged."""
    states = States(output, 1 << 30)
    left = [each.name for each in output.glob("*/*/.*")]
    assert not left, "a start removes what was left unfinished"
    return [states.find(each.path)[0] for each in states.all()]


def test_states_are_whole_after_a_server_was_killed(folder, tmp_path):
    killed_while_saving(folder, tmp_path, torch.Generator().manual_seed(1))
    assert all(0 < state.updates <= 30 for state in whole_states(tmp_path))


@pytest.mark.slow
def test_states_are_whole_after_many_kills(folder, tmp_path):
    draws = torch.Generator().manual_seed(2)
    for number in range(50):
        killed_while_saving(folder, tmp_path / str(number % 4), draws)
        whole_states(tmp_path / str(number % 4))
