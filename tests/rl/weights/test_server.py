"""Replicas load the trainer's weights, rounded, from every layout through a weight server; damage is detected."""

import contextlib
import json
import os
import socket
import threading
import time
from dataclasses import replace
from functools import partial

import pytest
import torch

from lockstep.config import ParallelConfig
from lockstep.model import build_model, initialize
from lockstep.parallel import World, close_world, generator_model, open_world
from lockstep.rl.generators.channel import Closed, call
from lockstep.rl.weights import server as server_module
from lockstep.rl.weights.reader import LoadResult, WeightReader
from lockstep.rl.weights.server import WeightServer
from tests.parallel.launch import launch
from tests.rl.weights.test_transfer import LAYOUTS, SHAPE, different, expected_weights, trained_model

KEY = bytes(range(32))
ALONE = World(torch.device("cpu"))
PATIENCE = 60.0


def through_json(manifest):
    return json.loads(json.dumps(manifest))


def published(ranks):
    """Publishes from every layout of so many ranks; rank 0 reads alone, and all read as pairs of tensor ranks."""
    expected, pair = expected_weights(), ParallelConfig(tensor=2 - ranks % 2)
    pair_world = open_world(pair, "cpu")
    for name in (name for name, (size, _) in LAYOUTS.items() if size == ranks):
        dtype = torch.float32 if "FSDP" in name else torch.bfloat16
        world, trained = trained_model(LAYOUTS[name][1])
        weight_server = WeightServer(dict(trained.named_parameters()), dtype, world, KEY)
        weight_server.publish(1)
        manifest = through_json(weight_server.publish(2))
        for of_reader, degrees in ((ALONE, ParallelConfig()), (pair_world, pair))[world.rank > 0 :]:
            shape = replace(SHAPE, reduction_chunks=4)
            model = generator_model(shape, dtype, of_reader, degrees, partial(initialize, seed=2))
            reader = WeightReader(model, of_reader, KEY)
            assert reader.load(manifest) == LoadResult(2, "loaded"), name
            assert not different(model, expected), name
        world.barrier()
        weight_server.close()
    close_world(world)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_replicas_of_one_and_two_processes_have_the_bits_of_the_trainers_weights_rounded(ranks):
    launch(ranks, published, ranks, fresh=True)  # several worlds


def damage(weight_server, sequence, name):
    """Flips the lowest bit of a number in what this rank has published of a tensor."""
    if (copy := weight_server._published[sequence].get(name)) is not None:
        copy.view(-1)[-1:].view(torch.uint8)[0] ^= 1


@pytest.fixture
def trained():
    return {name: torch.nn.Parameter(tensor) for name, tensor in expected_weights().items()}


@pytest.fixture
def weight_server(trained):
    weight_server = WeightServer(trained, torch.bfloat16, ALONE, KEY)
    yield weight_server
    weight_server.close()


@pytest.fixture
def model():
    return build_model(SHAPE, dtype=torch.bfloat16, seed=2)


@pytest.fixture
def reader(model):
    return WeightReader(model, ALONE, KEY)


@pytest.fixture
def untouched(model):
    """Says whether the model still has its first weights."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return lambda: not different(model, before)


class Wire:
    """Stands between a reader and a server, and counts the bytes that the server sends.

    After 100,000 bytes of a connection it calls `halfway`, and cuts the connection if that returns True.
    """

    def __init__(self, manifest, halfway=lambda: False):
        (rank,) = manifest["ranks"]
        self._server, self._halfway, self.nbytes = tuple(rank["address"]), halfway, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.manifest = manifest | {"ranks": [rank | {"address": self._listener.getsockname()}]}
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            caller, server = self._listener.accept()[0], socket.create_connection(self._server)
            for ends in ((caller, server), (server, caller)):
                threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source, target):
        passed, from_server = 0, source.getpeername() == self._server
        while content := source.recv(2**16):
            passed += len(content)
            self.nbytes += len(content) * from_server
            if passed - len(content) < 100_000 <= passed and self._halfway():
                break
            target.sendall(content)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def test_each_version_is_that_of_its_publication(weight_server, reader, model, trained):
    manifests = []
    for version in (3, 7, 8):  # some may be left out
        with torch.no_grad():
            for parameter in trained.values():
                parameter.add_(1)
        weights = {name: parameter.detach().clone() for name, parameter in trained.items()}
        manifests.append((through_json(weight_server.publish(version)), weights))
        for manifest, expected in manifests[-2:]:  # the newest, and the one before it
            assert reader.load(manifest) == LoadResult(manifest["version"], "loaded")
            assert not different(model, expected)
    late = reader.load(manifests[0][0])
    assert late.outcome == "late" and "rank 0" in late.problem
    assert not different(model, manifests[-1][1])


def test_a_flipped_bit_of_any_tensor_is_named_and_the_replica_keeps_its_weights(
    weight_server, reader, untouched, trained, caplog
):
    manifest = through_json(weight_server.publish(7))
    for name in list(trained)[::4]:
        damage(weight_server, 1, name)
        assert reader.load(manifest) == LoadResult(7, "damaged", f"{name} did not arrive intact") and untouched()
        damage(weight_server, 1, name)
    assert f"weights version 7: {name} did not arrive intact (try 3 of 3)" in caplog.text
    two = "layers.0.self_attn.q_proj.weight", "layers.1.self_attn.q_proj.weight"
    manifest["sums"] |= dict(zip(two, (manifest["sums"][name] for name in reversed(two))))
    assert reader.load(manifest).problem == f"{two[0]} and 1 more did not arrive intact" and untouched()


def test_only_tensors_that_have_changed_are_read_again(weight_server, reader, model, trained):
    sizes = {name: 2 * tensor.numel() for name, tensor in trained.items()}
    moving = "norm.weight"

    def load(names, manifest=None):
        """Loads the newest weights, and checks that only these are read, give or take the messages' headers."""
        wire = Wire(through_json(manifest or weight_server.publish(1)))
        assert reader.load(wire.manifest).outcome == "loaded"
        assert not different(model, trained)
        expected = sum(sizes[name] for name in names)
        assert expected <= wire.nbytes < expected + 200 * (len(names) + 5)

    @torch.no_grad()
    def set_first(value):
        trained[moving][0] = value

    load(trained)
    load([])
    for value in (0.0, -0.0, 2.0):
        set_first(value)
        load([moving])
        assert str(model.norm.weight[0].item()) == str(value)
    for value in (3.0, 4.0):  # one is not loaded: the next has all that has changed meanwhile
        set_first(value)
        manifest = weight_server.publish(2)
    load([moving], manifest)
    with torch.no_grad():  # in the generator: what it has already is compared all the same, and all is read again
        model.norm.weight[1] += 1
    load(trained)


def test_a_connection_that_is_cut_in_the_middle_is_tried_three_times(weight_server, reader, model, untouched, trained):
    manifest, cuts = through_json(weight_server.publish(1)), [True] * 4
    result = reader.load(Wire(manifest, lambda: bool(cuts) and cuts.pop()).manifest)
    assert result.outcome == "unreachable" and "rank 0 of the trainer" in result.problem
    assert len(cuts) == 1 and untouched()
    assert reader.load(Wire(manifest, lambda: bool(cuts) and cuts.pop()).manifest) == LoadResult(1, "loaded")
    assert not cuts and not different(model, trained)


def test_a_version_that_is_being_read_arrives_whole_though_newer_ones_are_published(
    weight_server, reader, model, trained
):
    expected = {name: parameter.detach().clone() for name, parameter in trained.items()}

    @torch.no_grad()
    def overtake():
        for version in (2, 3):
            for parameter in trained.values():
                parameter.add_(1)
            weight_server.publish(version)

    manifest = through_json(weight_server.publish(1))
    assert reader.load(Wire(manifest, overtake).manifest) == LoadResult(1, "loaded")
    assert not different(model, expected)
    assert WeightReader(model, ALONE, KEY).load(manifest).outcome == "late"


def test_an_invalid_request_ends_its_connection_and_no_other(weight_server, reader, caplog):
    manifest = weight_server.publish(1)
    address, (name, bounds) = manifest["ranks"][0]["address"], manifest["ranks"][0]["parts"][0]
    wrong = [
        {"sequence": [1], "pieces": []},
        {"sequence": 1, "pieces": [["\x1b[31m" * 1000, bounds]]},
        {"sequence": 1, "pieces": [[name, [[-5, 10**9], *bounds[1:]]]]},
        {"sequence": 1, "pieces": [[name, bounds[:1]]]},
        {"sequence": 1, "pieces": [[name, [[0.0, 1.0], *bounds[1:]]]]},
        {"pieces": []},
        None,
    ]
    for request in wrong:
        channel = call(*address, KEY)
        channel.send(request)
        with pytest.raises(Closed):
            channel.receive(PATIENCE)
    wait_until(lambda: len(caplog.messages) == len(wrong))
    assert all(line.isprintable() and len(line) < 400 for line in caplog.messages)
    assert reader.load(manifest).outcome == "loaded"


def wait_until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "weight server"]


def open_sockets():
    numbers = [number for number in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{number}")]
    return {target for n in numbers if (target := os.readlink(f"/proc/self/fd/{n}")).startswith("socket:")}


def test_a_reader_that_neither_asks_nor_takes_is_let_go(monkeypatch):
    monkeypatch.setattr(server_module, "READER_SECONDS", 1)
    weight_server = WeightServer({"a": torch.zeros(2**23)}, torch.float32, ALONE, KEY)
    address, before = weight_server.publish(1)["ranks"][0]["address"], len(threads())
    silent, greedy = (call(*address, KEY) for _ in range(2))
    greedy.send({"sequence": 1, "pieces": [["a", [[0, 2**23]]]]})  # more than the connection holds
    wait_until(lambda: len(threads()) == before)
    for channel in (silent, greedy):
        channel.close()
    weight_server.close()


def test_nothing_is_left_when_the_weight_server_is_closed(model, untouched):
    before = open_sockets()
    weight_server = WeightServer(expected_weights(), torch.bfloat16, ALONE, KEY)
    manifest = weight_server.publish(1)
    idle = call(*manifest["ranks"][0]["address"], KEY)  # which stays connected
    weight_server.close()
    with pytest.raises(Closed):
        idle.receive(PATIENCE)
    idle.close()
    assert not threads() and open_sockets() <= before
    result = WeightReader(model, ALONE, KEY).load(manifest)
    assert result.outcome == "unreachable" and "rank 0" in result.problem and untouched()
