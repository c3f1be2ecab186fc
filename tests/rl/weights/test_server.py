"""Replicas load the trainer's weights, rounded, from every layout through a weight server; damage is detected."""

import copy
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from lockstep.config import CompileConfig, ParallelConfig, TrainConfig
from lockstep.errors import UserError
from lockstep.model import build_model, initialize, preset
from lockstep.model.shard import local_part
from lockstep.parallel import World, close_world, generator_model, open_world, parallel_model
from lockstep.rl.weights import reader as reader_module
from lockstep.rl.weights import server as server_module
from lockstep.rl.weights.reader import WeightReader
from lockstep.rl.weights.server import WeightServer
from lockstep.train import Trainer, pack
from lockstep.train.objective import NextTokenLoss
from tests.parallel.launch import CONTEXT, launch
from tests.rl.weights.test_transfer import LAYOUTS, SHAPE

KEY = bytes(range(32))
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
ALONE = World(torch.device("cpu"))
PATIENCE = 60.0


def _trained():
    model = build_model(SHAPE, dtype=torch.float32, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0001)  # so that rounding to the generator's dtype shows
    return dict(model.named_parameters())


def _model(dtype=torch.bfloat16, shape=SHAPE):
    return build_model(shape, dtype=dtype, seed=2)


def _different(model, dtype, trained):
    """The tensors of which this rank's part is not the trainer's, rounded."""
    return [
        name
        for name, parameter in model.named_parameters()
        for part, place in [local_part(parameter.detach())]
        if not torch.equal(part, trained[name].detach().to(dtype)[place])
    ]


def _through_json(manifest):
    return json.loads(json.dumps(manifest))


def _by_tcp(manifest):
    """As it looks to a reader on another host."""
    manifest = copy.deepcopy(manifest)
    for rank in manifest["server"]["ranks"]:
        rank["handle"] = None
    return manifest


def _wait_for(file):
    end = time.monotonic() + PATIENCE
    while not file.exists():
        assert time.monotonic() < end, file
        time.sleep(0.01)
    return file


def trainer(ranks, folder):
    """Publishes from every layout of so many ranks, and closes when the replicas are done."""
    weight_servers = []
    for name, parallel in ((name, parallel) for name, (size, parallel) in LAYOUTS.items() if size == ranks):
        world = open_world(parallel, "cpu")
        shape, fill = replace(SHAPE, reduction_chunks=4), partial(initialize, seed=1)
        trained = parallel_model(shape, torch.float32, world, parallel, CompileConfig(), fill)
        with torch.no_grad():
            for parameter in trained.parameters():
                local_part(parameter)[0].mul_(1.0001)
        for kind, dtype in DTYPES.items():
            weight_servers.append(WeightServer(dict(trained.named_parameters()), dtype, world, KEY))
            weight_servers[-1].publish(1)
            manifest = weight_servers[-1].publish(2)
            if world.is_main:
                (folder / "writing").write_text(json.dumps(manifest))
                (folder / "writing").rename(folder / f"{name} {kind}")
    if world.is_main:
        _wait_for(folder / "done")
    world.barrier()
    for weight_server in weight_servers:
        weight_server.close()
    close_world(world)


def replica(ranks, folder):
    """Takes what the trainer publishes, as one of two processes and alone; what was wrong."""
    parallel = ParallelConfig(tensor=2, data_shard=1)
    pair = open_world(parallel, "cpu")
    trained, wrong = _trained(), []
    for name in (f"{name} {kind}" for name, (size, _) in LAYOUTS.items() if size == ranks for kind in DTYPES):
        manifest, dtype = json.loads(_wait_for(folder / name).read_text()), DTYPES[name.split()[-1]]
        for way, found in (("memory", manifest), ("TCP", _by_tcp(manifest))):
            for degree, world, degrees in ((1, ALONE, ParallelConfig()), (2, pair, parallel)):
                shape = replace(SHAPE, reduction_chunks=4)
                model = generator_model(shape, dtype, world, degrees, partial(initialize, seed=2))
                reader = WeightReader(model, world, KEY)
                result = reader.load(found)
                if result.outcome != "loaded" or _different(model, dtype, trained):
                    wrong.append((name, way, degree, result, _different(model, dtype, trained)))
                reader.close()
    pair.barrier()
    if pair.is_main:
        (folder / "done").touch()
    close_world(pair)
    return wrong


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_replicas_of_one_and_two_processes_have_the_bits_of_the_trainers_weights_rounded(ranks, tmp_path):
    with ThreadPoolExecutor() as pool:
        training = pool.submit(launch, ranks, trainer, ranks, tmp_path)
        assert launch(2, replica, ranks, tmp_path) == [[], []]
        training.result()


@pytest.fixture
def pair():
    """A trainer's weight server and a replica's reader, in this process."""
    weight_server, reader = WeightServer(_trained(), torch.bfloat16, ALONE, KEY), WeightReader(_model(), ALONE, KEY)
    yield weight_server, reader
    reader.close()
    weight_server.close()


def _stayed(reader):
    return not _different(reader._model, torch.bfloat16, dict(_model(torch.bfloat16).named_parameters()))


def test_each_version_is_that_of_its_publication(pair):
    weight_server, reader = pair
    manifests = []
    for version in (3, 7, 8):  # some may be left out
        with torch.no_grad():
            for parameter in weight_server._tensors.values():
                parameter.add_(1)
        trained = {name: parameter.clone() for name, parameter in weight_server._tensors.items()}
        manifests.append((_through_json(weight_server.publish(version)), trained))
        if manifests[1:]:
            for manifest, expected in manifests[-2:]:  # the newest, and the one before it
                assert reader.load(manifest) == reader_module.LoadResult(manifest["version"], "loaded")
                assert not _different(reader._model, torch.bfloat16, expected)
    assert reader.load(manifests[0][0]).outcome == "late"
    assert not _different(reader._model, torch.bfloat16, manifests[-1][1])


def every_bit(parallel):
    """For each tensor whether a flipped bit of it in any rank's memory is noticed, as the only one."""
    world = open_world(parallel, "cpu")
    shape, fill = replace(SHAPE, reduction_chunks=4), partial(initialize, seed=1)
    trained = parallel_model(shape, torch.float32, world, parallel, CompileConfig(), fill)
    weight_server = WeightServer(dict(trained.named_parameters()), torch.bfloat16, world, KEY)
    model = generator_model(shape, torch.bfloat16, world, parallel, partial(initialize, seed=2))
    before = {name: local_part(parameter.detach())[0].clone() for name, parameter in model.named_parameters()}
    reader, noticed = WeightReader(model, world, KEY), {}
    reader_module.TRIES = 1
    for rank in range(world.size):
        for name in reader._names:
            manifest = weight_server.publish(1)
            there = name in [part[0] for part in manifest["server"]["ranks"][rank]["parts"]]
            if world.rank == rank and there:
                held = weight_server._shards[name]
                view = weight_server._memory.view(
                    manifest["slot"], weight_server._offsets[name], held.shard_slice, torch.bfloat16
                )
                view.reshape(-1)[-1:].view(torch.uint8)[-1] ^= 128
            world.barrier()
            if there:
                expected = reader_module.LoadResult(1, "damaged", f"{name} did not arrive intact")
                noticed[rank, name] = reader.load(manifest) == expected
            world.barrier()
    stayed = all(
        torch.equal(local_part(parameter.detach())[0], before[name]) for name, parameter in model.named_parameters()
    )
    world.barrier()
    reader.close()
    weight_server.close()
    close_world(world)
    return noticed, stayed


@pytest.mark.parametrize(
    "parallel",
    [pytest.param(ParallelConfig(), marks=pytest.mark.slow), ParallelConfig(tensor=2)],
    ids=["FSDP 2", "TP 2"],
)
def test_a_flipped_sign_in_any_tensor_on_any_rank_is_noticed(parallel):
    for noticed, stayed in launch(2, every_bit, parallel):
        assert len(noticed) > 20 and all(noticed.values()), [key for key, seen in noticed.items() if not seen]
        assert stayed


def _leave_one_out(weight_server, manifest):
    held = weight_server._shards["norm.weight"]
    weight_server._memory.view(
        manifest["slot"], weight_server._offsets["norm.weight"], held.shard_slice, torch.bfloat16
    ).zero_()


def _swap(one, other):
    def swap(weight_server, manifest):
        parts = {part[0]: part for part in manifest["server"]["ranks"][0]["parts"]}
        parts[one][2], parts[other][2] = parts[other][2], parts[one][2]

    return swap


DAMAGES = {
    "one left out": (_leave_one_out, "norm.weight"),
    "two swapped": (
        _swap("layers.0.mlp.up_proj.weight", "layers.0.mlp.gate_proj.weight"),
        "layers.0.mlp.gate_proj.weight and 1 more",
    ),
    "two layers swapped": (
        _swap("layers.0.self_attn.q_proj.weight", "layers.1.self_attn.q_proj.weight"),
        "layers.0.self_attn.q_proj.weight and 1 more",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_weights_are_named_and_the_replica_keeps_its_own(damage, pair, caplog):
    weight_server, reader = pair
    manifest = _through_json(weight_server.publish(7))
    change, named = DAMAGES[damage]
    change(weight_server, manifest)
    result = reader.load(manifest)
    assert result.outcome == "damaged" and result.problem == f"{named} did not arrive intact"
    assert _stayed(reader)
    assert f"weights version 7: {named} did not arrive intact (try 3 of 3)" in caplog.text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("shape", "layers.0.mlp.up_proj.weight is [3, 5] in the trainer, but [256, 64] in the generator"),
        ("missing", "layers.0.mlp.up_proj.weight is missing in the trainer, but [256, 64] in the generator"),
        ("more", "extra is [3, 5] in the trainer, but missing in the generator"),
        ("dtype", "they are bfloat16, but the generator is float32"),
        ("a part", "have 0 elements of layers.0.mlp.up_proj.weight"),
    ],
)
def test_weights_of_another_model_are_refused_at_once(change, said):
    tensors, name = _trained(), "layers.0.mlp.up_proj.weight"
    said = said.replace("[256, 64]", str(list(tensors[name].shape)))
    if change == "missing":
        del tensors[name]
    elif change in ("shape", "more"):
        tensors[name if change == "shape" else "extra"] = torch.zeros(3, 5)
    weight_server = WeightServer(tensors, torch.bfloat16, ALONE, KEY)
    reader = WeightReader(_model(torch.float32 if change == "dtype" else torch.bfloat16), ALONE, KEY)
    manifest = _through_json(weight_server.publish(1))
    if change == "a part":
        rank = manifest["server"]["ranks"][0]
        rank["parts"] = [part for part in rank["parts"] if part[0] != name]
    with pytest.raises(UserError, match="do not fit this generator") as error:
        reader.load(manifest)
    assert said in str(error.value)
    weight_server.close()


@pytest.mark.parametrize("way", ["memory", "TCP"])
def test_what_is_overwritten_while_it_is_read_is_late_and_not_taken(way, pair, monkeypatch, caplog):
    weight_server, reader = pair
    manifest = _through_json(weight_server.publish(1))
    manifest = manifest if way == "memory" else _by_tcp(manifest)
    monkeypatch.setattr(reader_module, "MESSAGE", 4096)
    pieces, source = [0], reader_module.view_at

    def overtaken(part, shard_slice, of):
        pieces[0] += 1
        if pieces[0] == 20:
            weight_server.publish(2)
            with torch.no_grad():
                for parameter in weight_server._tensors.values():
                    parameter.add_(1)
            weight_server.publish(3)
        return source(part, shard_slice, of)

    monkeypatch.setattr(reader_module, "view_at", overtaken)
    result = reader.load(manifest)
    assert result.outcome == "late" and "rank 0" in result.problem and _stayed(reader)
    assert "(try 1 of 3)" in caplog.text and "did not arrive" not in caplog.text


@pytest.mark.parametrize("way", ["memory", "TCP"])
def test_what_no_gradient_trains_is_read_where_it_has_changed(way, monkeypatch):
    tensors, model = _trained(), _model()
    trained, moving = {name for name in tensors if "mlp" in name}, "norm.weight"  # as a router's choice bias moves
    for name, tensor in tensors.items():
        tensor.requires_grad_(name in trained)
    weight_server, reader = WeightServer(tensors, torch.bfloat16, ALONE, KEY), WeightReader(model, ALONE, KEY)
    read, read_source = set(), reader_module._Source.read

    def noting_read(source, manifest, arrived, wanted):
        read.update(arrived)
        read_source(source, manifest, arrived, wanted)

    monkeypatch.setattr(reader_module._Source, "read", noting_read)

    def load(manifest):
        read.clear()
        manifest = _through_json(manifest)
        assert reader.load(manifest if way == "memory" else _by_tcp(manifest)).outcome == "loaded"
        assert not _different(model, torch.bfloat16, tensors)

    changes = {1: 1.0, 4: 0.0, 5: -0.0, 9: 2.0}  # of one element: 5 and 9 by its sign, or after slots were written over
    for turn in range(1, 12):
        with torch.no_grad():
            for name in trained:
                tensors[name].add_(turn)
            if turn in changes:
                tensors[moving][0] = changes[turn]
        load(weight_server.publish(turn))
        assert read == (set(tensors) if turn == 1 else trained | {moving} if turn in changes else trained)
        assert str(model.norm.weight[0].item()) == str(tensors[moving][0].item())
    for _ in range(2):  # not loaded: the next has all that has changed meanwhile
        with torch.no_grad():
            tensors[moving][0] += 1
        manifest = weight_server.publish(12)
    load(manifest)
    assert read == trained | {moving}
    # In the generator: what it has already is looked at all the same, and all is read again.
    with torch.no_grad():
        model.norm.weight[1] += 1
    load(weight_server.publish(13))
    assert read == set(tensors)
    weight_server.close()
    again = WeightServer(tensors, torch.bfloat16, ALONE, KEY)
    load(again.publish(1))
    assert read == set(tensors)
    reader.close()
    again.close()


def test_a_choice_bias_that_balancing_moves_reaches_the_generator():
    policy, generator = (build_model(preset("deepseek_v3:micro", 258), "float32", seed=seed) for seed in (1, 2))
    trainer = Trainer(policy, TrainConfig(router_bias_rate=0.1, learning_rate=1e-3, warmup_steps=0), 10)
    weight_server = WeightServer(dict(policy.named_parameters()), torch.float32, ALONE, KEY)
    reader = WeightReader(generator, ALONE, KEY)
    (bias, *_) = (p for name, p in generator.named_parameters() if name.endswith("e_score_correction_bias"))
    seen = []
    for step in range(4):
        trainer.step([pack([list(range(40))])], NextTokenLoss(39))
        assert reader.load(_through_json(weight_server.publish(step))).outcome == "loaded"
        assert not _different(generator, torch.float32, dict(policy.named_parameters()))
        seen.append(bias.detach().clone())
    assert not any(torch.equal(one, other) for one, other in zip(seen, seen[1:]))
    reader.close()
    weight_server.close()


@pytest.mark.parametrize("times", [1, 3])
def test_a_connection_that_is_cut_in_the_middle_is_tried_three_times(times, pair, monkeypatch):
    weight_server, reader = pair
    monkeypatch.setattr(reader_module, "MESSAGE", 4096)
    served, serve = [0], weight_server.serve

    def cut(request):
        served[0] += 1
        if served[0] % 5 == 0 and served[0] <= 5 * times:
            for caller in list(weight_server._server._callers.values()):
                caller.close()
        return serve(request)

    monkeypatch.setattr(weight_server, "serve", cut)
    result = reader.load(_by_tcp(weight_server.publish(1)))
    if times == 1:
        assert result.outcome == "loaded" and not _different(reader._model, torch.bfloat16, weight_server._tensors)
    else:
        assert result.outcome == "unreachable" and "rank 0 of the trainer" in result.problem and _stayed(reader)


def test_who_does_not_know_the_key_gets_nothing(pair):
    weight_server, _ = pair
    stranger = WeightReader(_model(), ALONE, KEY[::-1])
    result = stranger.load(_by_tcp(weight_server.publish(1)))
    assert result.outcome == "unreachable" and _stayed(stranger)


def killed_while_writing(folder):
    """Publishes twice, and is killed in the middle of the third time."""
    weight_server = WeightServer(_trained(), torch.bfloat16, ALONE, KEY)
    (folder / "first").write_text(json.dumps(weight_server.publish(1)))
    (folder / "writing").write_text(json.dumps(weight_server.publish(2)))
    (folder / "writing").rename(folder / "second")
    _wait_for(folder / "opened")
    write, parts = weight_server._write, iter(range(10))

    def die(name, slot):
        if next(parts) == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return write(name, slot)

    weight_server._write = die
    weight_server.publish(3)


def test_of_a_trainer_that_is_killed_while_it_writes_nothing_torn_is_taken_and_nothing_is_left(tmp_path):
    before = _open_files()
    process = CONTEXT.Process(target=killed_while_writing, args=(tmp_path,), daemon=True)
    process.start()
    second = json.loads(_wait_for(tmp_path / "second").read_text())
    first = json.loads((tmp_path / "first").read_text())
    reader = WeightReader(_model(), ALONE, KEY)
    assert reader.load(second).outcome == "loaded"
    (tmp_path / "opened").touch()
    process.join(PATIENCE)
    assert process.exitcode == -signal.SIGKILL
    assert reader.load(second).outcome == "loaded"  # which the reader still sees, whole
    assert reader.load(first).outcome == "late"
    assert reader.load(first | {"sequence": 3}).outcome == "torn"
    assert not _different(reader._model, torch.bfloat16, _trained())
    reader.close()
    result = WeightReader(_model(), ALONE, KEY).load(second)
    assert result.outcome == "unreachable" and "rank 0" in result.problem
    assert _left_since(before) == (set(), [], [], [])


def _memory_files():
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:lockstep" in line]


def _open_files():
    """What a weight server could leave behind: sockets and files of memory, threads, mappings, entries in /dev/shm."""
    files = {_target(n) for n in os.listdir("/proc/self/fd")}
    files = {file for file in files if file.startswith("socket:") or "lockstep" in file}
    threads = [thread for thread in threading.enumerate() if thread.name == "weight server"]
    return files, threads, _memory_files(), _entries()


def test_who_asks_for_what_is_not_there_is_turned_away_and_others_are_not(monkeypatch, caplog):
    failed = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    weight_server = WeightServer(_trained(), torch.bfloat16, ALONE, KEY)
    manifest = weight_server.publish(1)
    slot, address = manifest["slot"], manifest["server"]["ranks"][0]["address"]
    name, shard_slice, _ = manifest["server"]["ranks"][0]["parts"][0]
    wrong = [
        {"slot": 99, "pieces": [[name, shard_slice]]},
        {"slot": -1, "pieces": []},
        {"slot": [1], "pieces": []},
        {"slot": slot, "pieces": [["\x1b[31m" * 1000, shard_slice]]},
        {"slot": slot, "pieces": [[name, [[-5, 10**9], *shard_slice[1:]]]]},
        {"slot": slot, "pieces": [[name, shard_slice[:1]]]},
        {"slot": slot, "pieces": [[name, [[0.0, 1.0], *shard_slice[1:]]]]},
        {"slot": slot, "pieces": [[name, shard_slice]] * 1000},
        [1],
        None,
    ]
    for request in wrong:
        channel = reader_module.call(*address, KEY)
        channel.send(request)
        with pytest.raises(reader_module.Closed):
            channel.receive(PATIENCE)
    # They may have had their end before their thread has said why.
    end = time.monotonic() + PATIENCE
    while len(caplog.messages) < len(wrong):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert all(line.isprintable() and len(line) < 400 for line in caplog.messages)
    reader = WeightReader(_model(), ALONE, KEY)
    assert reader.load(_by_tcp(manifest)).outcome == "loaded"
    reader.close()
    weight_server.close()
    assert not failed


def test_a_reader_that_neither_asks_nor_takes_is_let_go(monkeypatch):
    monkeypatch.setattr(server_module, "READER_SECONDS", 1)
    large = {"a": torch.zeros(2**24)}
    weight_server = WeightServer(large, torch.float32, ALONE, KEY)
    manifest = weight_server.publish(1)
    address = manifest["server"]["ranks"][0]["address"]
    silent, greedy = (reader_module.call(*address, KEY) for _ in range(2))
    greedy.send({"slot": manifest["slot"], "pieces": [["a", [[0, 2**24]]]]})  # more than the connection holds
    end = time.monotonic() + PATIENCE
    while weight_server._server._callers:
        assert time.monotonic() < end
        time.sleep(0.05)
    for channel in (silent, greedy):
        channel.close()
    weight_server.close()


def _left_since(before):
    """What is held now and was not; sockets of earlier tests may be closed in the meantime."""
    files, *others = _open_files()
    return files - before[0], *([x for x in now if x not in then] for now, then in zip(others, before[1:]))


def _target(number):
    return os.readlink(f"/proc/self/fd/{number}") if os.path.lexists(f"/proc/self/fd/{number}") else ""


def _entries():
    return sorted(name for name in os.listdir("/dev/shm") if "lockstep" in name)


def test_nothing_is_left_when_weight_server_and_readers_are_closed():
    before = _open_files()
    weight_server = WeightServer(_trained(), torch.bfloat16, ALONE, KEY)
    readers = [WeightReader(_model(), ALONE, KEY) for _ in range(2)]
    manifest = weight_server.publish(1)
    assert [reader.load(found).outcome for reader, found in zip(readers, (manifest, _by_tcp(manifest)))] == 2 * [
        "loaded"
    ]
    idle = reader_module.call(*manifest["server"]["ranks"][0]["address"], KEY)  # who stays on the line
    assert any("memfd:lockstep" in file for file in _open_files()[0]) and len(_memory_files()) == 2
    weight_server.close()
    with pytest.raises(reader_module.Closed):
        idle.receive(PATIENCE)
    idle.close()
    for reader in readers:
        reader.close()
    assert _left_since(before) == (set(), [], [], [])
