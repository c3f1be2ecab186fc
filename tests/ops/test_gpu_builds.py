"""The Triton kernels compiled ahead of time for GPUs that are not here, at the shapes of real models."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is published for Linux on x86-64 alone")

from lockstep.ops.cuda import attention
from tests.ops.gpu_builds import INSTRUCTION, SHAPES, SHARED, Build, Launch, build, kernels, launches

PRODUCTS = {
    "attention.attend_kernel", "attention_backward.queries_kernel", "attention_backward.keys_kernel",
    "linear.linear_kernel", "linear.described_kernel", "linear.looped_kernel",
    "grouped_linear.grouped_kernel", "grouped_linear.described_kernel",
}  # fmt: skip
"""The kernels that multiply matrices."""
ONE_SHAPE = {"Qwen3 0.6B": SHAPES["Qwen3 0.6B"]}


@pytest.fixture(scope="module", autouse=True)
def form():
    """The kernels have one form: the folder's own fixture would run everything several times."""


def wanted(launch: Launch, capability: int) -> set[str]:
    """The instructions that multiply in this variant."""
    if launch.name not in PRODUCTS or launch.arguments[0].dtype == torch.float32:
        return set()
    # Gradients of wide heads have tiles of 32 rows, and the tensor cores of Hopper and later multiply 64 or more.
    few_rows = launch.sizes.get("TILE", 64) < 64 and launch.sizes.get("STEP", 64) < 64
    return {"mma.sync" if few_rows else INSTRUCTION[capability]}


def faults(launch: Launch, built: Build, capability: int) -> list[str]:
    """What would make this variant inexact or impossible to run there."""
    found = []
    is_high = launch.sizes.get("ROWS", 0) > attention.ROWS[torch.bfloat16]
    if (
        built.shared > SHARED[capability] * 1024 and not is_high
    ):  # a high tile of attention that does not fit is not used
        found.append(f"{built.shared / 1024:.0f} KiB of shared memory, of {SHARED[capability]}")
    if built.instructions != wanted(launch, capability):
        found.append(f"instructions {sorted(built.instructions)}, not {sorted(wanted(launch, capability))}")
    return [f"{launch.name} {launch.sizes}: {fault}" for fault in found]


def test_every_kernel_is_launched():
    assert {each.name for each in launches(torch.bfloat16, 90)} == kernels()


@pytest.mark.parametrize("capability", [90, pytest.param(86, marks=pytest.mark.slow)])
def test_products_and_attention_of_a_small_model_build(capability):
    chosen = {}
    for each in launches(torch.bfloat16, capability, ONE_SHAPE):
        chosen.setdefault(each.name, each)
    names = ["linear.linear_kernel", "attention.attend_kernel", "attention_backward.queries_kernel"]
    assert not [fault for name in names for fault in faults(chosen[name], build(chosen[name], capability), capability)]


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 86, 90])
def test_every_kernel_builds_and_fits(capability):
    chosen = launches(torch.bfloat16, capability)
    assert not [fault for each in chosen for fault in faults(each, build(each, capability), capability)]
