"""A checkpoint knows no layout: saved on N ranks, it is the same on M."""

import math
import os
import resource
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import AutoModelForCausalLM

from lockstep import load_model
from lockstep.checkpoint.manifest import damage, write_manifest
from lockstep.checkpoint.part import Part
from lockstep.checkpoint.storage import StoredTensors, save_parts
from lockstep.config import ParallelConfig
from tests.checkpoint.runs import MODEL, equal, files_of_at_most, resumed, trained_and_saved
from tests.parallel.launch import launch

ALONE = (1, ParallelConfig())
FSDP = (2, ParallelConfig())
HSDP = (4, ParallelConfig(data_replicate=2))
PIPELINE = (2, ParallelConfig(pipeline=2))
TENSOR = (2, ParallelConfig(tensor=2))
FSDP_AND_TENSOR = (4, ParallelConfig(tensor=2))


EXPERT = (2, ParallelConfig(expert=2))
EXPERT_AND_TENSOR = (4, ParallelConfig(expert=2, tensor=2))
MIXTURE, GPT_OSS = "qwen3_moe:micro", "gpt_oss:micro"
"""The second's files have experts transposed."""
CASES = [
    (FSDP_AND_TENSOR, PIPELINE, "float32", MODEL),
    (EXPERT_AND_TENSOR, FSDP, "float32", MIXTURE),
]
MORE = [
    (ALONE, FSDP, "bfloat16", GPT_OSS),
    (FSDP, ALONE, "bfloat16", MODEL),
    (HSDP, FSDP, "bfloat16", MODEL),
    (PIPELINE, ALONE, "bfloat16", MODEL),
    (FSDP_AND_TENSOR, TENSOR, "bfloat16", MODEL),
    (ALONE, PIPELINE, "bfloat16", GPT_OSS),
    (EXPERT, ALONE, "bfloat16", MIXTURE),
    (FSDP, EXPERT_AND_TENSOR, "float32", MIXTURE),
]


@pytest.mark.parametrize(
    "saved, loaded, dtype, model", [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
)
def test_a_run_saved_under_one_layout_has_the_same_bits_under_another(tmp_path, saved, loaded, dtype, model):
    before = launch(saved[0], trained_and_saved, tmp_path, saved[1], dtype, model)
    after = launch(loaded[0], resumed, tmp_path, loaded[1], dtype, model)
    assert_resumes(before, after, dtype)
    held, _ = _together(before)
    folder = tmp_path / "checkpoints" / "step_00000002"
    loaded = load_model(folder)
    assert loaded.dtype == getattr(torch, dtype)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, held[f"master.{name}"].to(loaded.dtype)), name
    if model == MODEL:
        theirs = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=loaded.dtype).named_parameters())
        assert len(theirs) == len(list(loaded.parameters()))
        assert all(torch.equal(p, held["master." + n.removeprefix("model.")].to(p.dtype)) for n, p in theirs.items())


def assert_resumes(saved, resumed, dtype):
    """What all ranks held when they saved, and after resuming, bit for bit; and the losses of the next two steps."""
    (before, losses), (after, next_losses) = _together(saved), _together(resumed)
    names = before.keys() & after.keys() - {n for n in after if n.startswith("model.")}
    assert names == {n for n in after if not n.startswith("model.")}
    assert equal({n: before[n] for n in names}, {n: after[n] for n in names})
    # Sums over the ranks' data are in another order; in bfloat16 a weight is rounded to 8 bits after it.
    assert next_losses == pytest.approx(losses, rel=1e-5 if dtype == "float32" else 1e-3)


def _together(of_ranks):
    """All ranks' tensors, for the stages of a pipeline hold different ones, and the losses, the same on all."""
    assert all(losses == of_ranks[0][1] for _, losses in of_ranks)
    return {name: tensor for held, _ in of_ranks for name, tensor in held.items()}, of_ranks[0][1]


SHAPES = {"cut evenly": (8, 12), "cut unevenly": (7, 5), "fewer rows than ranks": (3, 4), "a vector": (9,), "one": ()}


def _manifest(folder):
    return lambda files, pieces: write_manifest(folder, pieces)


def _reshard(folder):
    """Saves tensors under every placement on 4 ranks and reads each back under every other."""
    dist.init_process_group("gloo")
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    line = init_device_mesh("cpu", (4,))
    layouts = {
        "rows": (line, [Shard(0)]),
        "columns": (line, [Shard(1)]),
        "rows and columns": (square, [Shard(0), Shard(1)]),
        "rows twice": (square, [Shard(0), Shard(0)]),
        "columns, copied": (square, [Replicate(), Shard(1)]),
        "copied": (line, [Replicate()]),
    }

    def spread(tensor, layout):
        mesh, placements = layouts[layout]
        fitting = [p if p.is_replicate() or p.dim < tensor.ndim else Replicate() for p in placements]
        return distribute_tensor(tensor, mesh, fitting)

    tensors = {n: torch.arange(math.prod(s), dtype=torch.float32).reshape(s) for n, s in SHAPES.items()}
    tensors |= {f"{n}, bfloat16": t.bfloat16() for n, t in tensors.items()}
    wrong = []
    for saved in layouts:
        parts = {f"trainer/{n}": Part.of(spread(t, saved)) for n, t in tensors.items()}
        path = folder / saved
        save_parts(parts, path, {"trainer": "t"}, _manifest(path), dist.group.WORLD, 400)
        wrong += [damage(path, rank=dist.get_rank(), ranks=4)]
        for loaded in layouts:
            held = {n: spread(torch.zeros_like(t), loaded) for n, t in tensors.items()}
            stored = StoredTensors({file: "trainer" for file in path.glob("*.safetensors")})
            stored.fill({f"trainer/{n}": Part.of(t) for n, t in held.items()})
            wrong += [f"{saved} {loaded} {n}" for n, t in tensors.items() if not torch.equal(held[n].full_tensor(), t)]
    dist.destroy_process_group()
    return [w for w in wrong if w]


@pytest.mark.slow
def test_every_cut_of_a_tensor_is_read_under_every_other(tmp_path):
    assert launch(4, _reshard, tmp_path) == [[]] * 4
    assert len(list((tmp_path / "rows").glob("t-*-of-*.safetensors"))) > 2


def _saves(folder):
    """How saves end on this rank, of two, where one of them cannot do its part."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def save(name, complete=lambda files, pieces: None, rows=2, begin=2 * rank, dtype=torch.float32):
        whole, place = torch.Size([4, 3]), (slice(begin, begin + rows), slice(0, 3))
        part = Part(torch.full((rows, 3), float(rank)).to(dtype), place, whole)
        try:
            save_parts({"model/w": part}, folder / name, {"model": "m"}, complete, dist.group.WORLD)
        except (OSError, RuntimeError, SystemExit) as error:
            return type(error).__name__, str(error)

    def leave(*_):
        raise SystemExit("bye")

    # On rank 0 a fault of ours, which no disk can be made to have.
    def refuse(*_):
        raise OSError(28, "No space left on device") if rank == 1 else KeyError("a fault")

    ends = {"whole": save("whole")}
    assert load_file(folder / "whole" / "m.safetensors")["w"].tolist() == [[0.0] * 3] * 2 + [[1.0] * 3] * 2
    with files_of_at_most(1 if rank == 1 else resource.RLIM_INFINITY):
        ends["one disk"] = save("one disk")
    with patch("os.pwrite", refuse):
        ends["a disk and a fault"] = save("a disk and a fault")
    (folder / "a file").touch()
    ends["no folder"] = save("a file/sub")
    ends["completion"] = save("completion", refuse)
    ends["a gap"] = save("a gap", rows=1)
    ends["an overlap"] = save("an overlap", rows=3 - rank)
    ends["a gap and an overlap"] = save("a gap and an overlap", begin=rank)
    ends["beyond the end"] = save("beyond the end", rows=2 + rank)
    ends["two dtypes"] = save("two dtypes", dtype=torch.float64 if rank else torch.float32)
    ends["no dtype of files"] = save("no dtype of files", dtype=torch.complex64 if rank else torch.float32)
    with patch("os.pwrite", leave if rank else os.pwrite):
        ends["an exit"] = save("an exit")
    ends["after all"] = save("after all")
    dist.destroy_process_group()
    return ends


def test_a_save_that_fails_on_one_rank_fails_on_all_and_says_which(tmp_path):
    first, second = launch(2, _saves, tmp_path, fresh=True)
    assert second.pop("an exit") == ("SystemExit", "bye")
    assert first.pop("an exit") == ("RuntimeError", "rank 1: bye")
    assert first == second
    assert first["whole"] is first["after all"] is None
    assert first["one disk"] == ("OSError", "rank 1: [Errno 27] File too large")
    full = "[Errno 28] No space left on device"
    assert first["a disk and a fault"] == ("RuntimeError", f"rank 0: 'a fault'; rank 1: {full}")
    assert first["no folder"] == ("OSError", f"rank 0: [Errno 20] Not a directory: '{tmp_path}/a file/sub'")
    assert first["completion"] == ("RuntimeError", "rank 0: 'a fault'")
    for name in ("a gap", "an overlap", "a gap and an overlap", "beyond the end"):
        assert first[name][1].startswith("the ranks do not hold each value of model/w ([4, 3]) once: "), name
    assert "model/w is ['F32', [4, 3]] on one rank and ['F64'" in first["two dtypes"][1]
    assert first["no dtype of files"] == ("RuntimeError", "rank 1: torch.complex64")
