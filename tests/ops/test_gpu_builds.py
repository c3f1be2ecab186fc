"""The Triton kernels compiled ahead of time for GPUs that are not here, at the shapes of real models."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is published for Linux on x86-64 alone")

from lockstep.ops.cuda import attention
from tests.ops.gpu_builds import INSTRUCTION, SHAPES, SHARED, Build, Launch, build, kernels, launches

PRODUCTS = {
    "attention.attend_kernel", "attention_backward.queries_kernel", "attention_backward.keys_kernel",
    "linear.linear_kernel", "linear.described_kernel", "linear.looped_kernel",
    "grouped_linear.grouped_kernel", "grouped_linear.described_kernel", "integer_linear.int4_kernel",
}  # fmt: skip
"""The kernels that multiply matrices."""
SPILLS = {
    torch.bfloat16: {
        "attention.attend_kernel": 8192, "attention_backward.keys_kernel": 128,
        "attention_backward.queries_kernel": 256, "delta.recurrence_kernel": 64, "delta_backward.chunks_kernel": 256,
        "delta_backward.updates_kernel": 64, "grouped_linear.grouped_kernel": 128, "linear.linear_kernel": 128,
        "rows.rms_norm_backward_kernel": 512,
    },
    torch.float32: {
        "attention.attend_kernel": 10240, "attention_backward.keys_kernel": 256,
        "attention_backward.queries_kernel": 1024, "delta.recurrence_kernel": 64, "delta_backward.chunks_kernel": 256,
        "delta_backward.updates_kernel": 64, "experts.combine_backward_kernel": 64,
        "rows.rms_norm_backward_kernel": 2048,
    },
}  # fmt: skip
"""The most bytes that a thread of each kernel may spill; docs/gpu.md says how many and why. The others spill none."""
ONE_SHAPE = {"Qwen3 0.6B": SHAPES["Qwen3 0.6B"]}


@pytest.fixture(scope="module", autouse=True)
def form():
    """The kernels have one form: the folder's own fixture would run everything several times."""


def wanted(launch: Launch, capability: int, dtype: torch.dtype) -> set[str]:
    """The instructions that multiply in this variant."""
    of_integers = launch.name == "integer_linear.int4_kernel"
    if launch.name not in PRODUCTS or (dtype == torch.float32 and not of_integers):
        return set()
    # Gradients of wide heads have tiles of 32 rows, decode in integers of 16, and the tensor cores of Hopper and later
    # multiply 64 or more.
    few_rows = launch.sizes.get("TILE", 64) < 64 and launch.sizes.get("STEP", 64) < 64
    few_rows |= of_integers and launch.sizes["BLOCK_M"] < 64
    return {"mma.sync" if few_rows else INSTRUCTION[capability]}


def may_not_fit(launch: Launch) -> bool:
    """Whether it is a high tile of attention, which is used only where it fits."""
    return bool(launch.sizes.get("ROWS", 0) > attention.ROWS[torch.bfloat16])


def faults(launch: Launch, built: Build, capability: int, dtype: torch.dtype = torch.bfloat16) -> list[str]:
    """What would make this variant inexact or impossible to run there."""
    found = []
    if built.shared > SHARED[capability] * 1024:
        if may_not_fit(launch):
            return []
        found.append(f"{built.shared / 1024:.0f} KiB of shared memory, of {SHARED[capability]}")
    if built.stack > SPILLS[dtype].get(launch.name, 0):
        found.append(f"{built.stack} bytes spilled")
    if built.instructions != (expected := wanted(launch, capability, dtype)):
        found.append(f"instructions {sorted(built.instructions)}, not {sorted(expected)}")
    return [f"{launch.name} {launch.sizes}: {fault}" for fault in found]


def test_every_kernel_is_launched():
    assert {each.name for each in launches(torch.bfloat16, 90)} == kernels()


def test_training_prefill_and_decode_launch_the_same_variants_of_the_delta_rule():
    """One compiled recurrence, so that no form can round differently."""
    found = [each for each in launches(torch.bfloat16, 90, ONE_SHAPE) if each.name.startswith("delta")]
    assert len({each.name for each in found}) == len(found) == 7


@pytest.mark.parametrize("capability", [90, pytest.param(86, marks=pytest.mark.slow)])
def test_products_and_attention_of_a_small_model_build(capability):
    chosen = {}
    for each in launches(torch.bfloat16, capability, ONE_SHAPE):
        chosen.setdefault(each.name, each)
    names = ["linear.linear_kernel", "attention.attend_kernel", "attention_backward.queries_kernel"]
    assert not [fault for name in names for fault in faults(chosen[name], build(chosen[name], capability), capability)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "dtype"),
    [*((capability, torch.bfloat16) for capability in SHARED), (86, torch.float32), (90, torch.float32)],
)
def test_every_kernel_builds_and_fits(capability, dtype):
    chosen = launches(dtype, capability)
    assert not [fault for each in chosen for fault in faults(each, build(each, capability), capability, dtype)]
