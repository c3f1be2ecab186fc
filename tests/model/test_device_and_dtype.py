"""Where a model computes, in which dtype and arithmetic: as asked, and as chosen where nothing is."""

import re
import shutil
from functools import partial

import pytest
import torch

from lockstep import build_model, load_model, score
from lockstep.checkpoint import open_model
from lockstep.errors import UserError
from lockstep.model import arithmetic_of, choose_dtype, instruction_set, open_device, preset, set_arithmetic
from lockstep.ops.native import instruction_sets
from lockstep.rl.scoring.parity_check import check_parity
from lockstep.train import pack
from tests.ops.conftest import forget_forms, use

CPU = torch.device("cpu")


def test_a_device_that_is_not_there_is_refused_with_those_that_are(model_folder):
    assert open_device("").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert load_model(model_folder, device="cpu:0").device == open_device("cpu") == CPU
    refused = {name: partial(open_device, name) for name in ("gpu", "cpu:1", "cuda:x", "meta", "cuda:99")}
    refused["cuda:98"] = partial(build_model, preset("qwen3:micro"), device="cuda:98")
    refused |= {name: partial(load_model, model_folder, device=name) for name in ("", "cpu:zero", "cuda:97")}
    for name, make in refused.items():
        with pytest.raises(UserError, match=f'device is "{name}".*(this machine has cpu|no CUDA device)'):
            make()


def test_a_folder_keeps_its_dtype(model_folder):
    for wanted in ("auto", ""):
        assert choose_dtype(wanted, str(model_folder), CPU) == ("bfloat16", "the folder's own")
    assert choose_dtype("float32", str(model_folder), CPU) == ("float32", "")
    assert choose_dtype("auto", "qwen3:micro", torch.device("cuda"))[0] == "bfloat16"
    with pytest.raises(UserError, match='dtype "float16" is not supported'):
        choose_dtype("float16", "qwen3:micro", CPU)


def test_fresh_weights_get_the_dtype_that_the_arithmetic_has_instructions_for():
    before = arithmetic_of(CPU)
    try:
        for arithmetic in {each.arithmetic for each in instruction_sets.supported() if not each.emulated}:
            expected = "float32" if set_arithmetic(arithmetic, CPU) == "portable" else "bfloat16"
            assert choose_dtype("auto", "qwen3:micro", CPU)[0] == expected
    finally:
        set_arithmetic(before, CPU)


def test_another_arithmetic_is_taken_or_refused_by_name():
    before = arithmetic_of(CPU)
    assert set_arithmetic("portable", CPU) == arithmetic_of(CPU) == "portable"
    try:
        assert set_arithmetic("bf16_pairs", CPU) == arithmetic_of(CPU) == "bf16_pairs"
        assert set_arithmetic("auto", CPU, recorded="portable") == "portable", "a resumed run keeps its own"
    except UserError as error:
        assert "arithmetic bf16_pairs needs AVX512-BF16" in str(error)
        with pytest.raises(UserError, match="give --arithmetic portable$"):
            set_arithmetic("bf16_pairs", CPU)
        with pytest.raises(UserError, match="computed so far in bf16_pairs arithmetic.*--arithmetic portable"):
            set_arithmetic("auto", CPU, recorded="bf16_pairs")
    finally:
        set_arithmetic(before, CPU)
    with pytest.raises(UserError, match="arithmetic portable is for CPUs, but the device is cuda:0"):
        set_arithmetic("portable", torch.device("cuda:0"))
    assert set_arithmetic("auto", torch.device("cuda:0")) == "auto"


BEST, *_, LOWEST = (each.name for each in instruction_sets.supported())


@pytest.mark.parametrize(
    ("form", "wanted", "message"),
    [
        ("pytorch", "portable", "compiled operators, which LOCKSTEP_NATIVE=0 switches off; give --arithmetic pytorch"),
        (BEST, "pytorch", "plain operators, which need LOCKSTEP_NATIVE=0; give --arithmetic portable"),
        (LOWEST, "bf16_pairs", f"LOCKSTEP_ISA rules out (instruction sets here: {LOWEST}); give --arithmetic portable"),
    ],
)  # fmt: skip
def test_an_arithmetic_that_cannot_be_had_is_refused_with_one_that_can(monkeypatch, form, wanted, message):
    use(monkeypatch, form)
    try:
        with pytest.raises(UserError, match=f"arithmetic {wanted} (needs|is that of the) .*{re.escape(message)}$"):
            set_arithmetic(wanted, CPU)
    finally:
        monkeypatch.undo()
        forget_forms()


def test_a_checkpoint_of_another_arithmetic_is_named_where_it_is_opened(tmp_path, model_folder, caplog):
    shutil.copytree(model_folder, tmp_path / "model")
    (tmp_path / "model" / "state.json").write_text('{"arithmetic": "cuda sm_90"}')
    model = open_model(tmp_path / "model", device="cpu")
    assert model.dtype == torch.bfloat16
    assert f"was trained in cuda sm_90 arithmetic and is computed in {arithmetic_of(CPU)} here" in caplog.text


@pytest.fixture
def without_a_matrix_unit(monkeypatch):
    """This processor, or as much of it as has none."""
    before = arithmetic_of(CPU)
    first = next(each for each in instruction_sets.supported() if each.arithmetic != "bf16_tiles")
    monkeypatch.setenv("LOCKSTEP_ISA", first.name)
    instruction_sets.supported.cache_clear()
    set_arithmetic("auto", CPU)
    yield first
    monkeypatch.undo()
    instruction_sets.supported.cache_clear()
    set_arithmetic(before, CPU)


@pytest.mark.slow
def test_tiles_are_emulated_for_a_run_that_began_in_them_and_for_whoever_asks(
    without_a_matrix_unit, tmp_path, model_folder, caplog
):
    own = without_a_matrix_unit.arithmetic
    assert arithmetic_of(CPU) == own and instruction_set() == without_a_matrix_unit.name, "never by itself"
    shutil.copytree(model_folder, tmp_path / "model")
    (tmp_path / "model" / "state.json").write_text('{"arithmetic": "bf16_tiles"}')
    tokens = [list(range(3, 60))]
    fast = score(open_model(tmp_path / "model", device="cpu"), tokens)[0]
    assert f"trained in bf16_tiles arithmetic and is computed in {own} here" in caplog.text
    assert "--arithmetic bf16_tiles gives the same bits, many times slower" in caplog.text
    caplog.clear()
    with pytest.warns(UserWarning, match="bf16_tiles is emulated on this processor.*--arithmetic portable is faster"):
        model = open_model(tmp_path / "model", device="cpu", arithmetic="bf16_tiles")
    assert arithmetic_of(CPU) == "bf16_tiles" and instruction_set() == "plain_tiles" and not caplog.text
    exact = score(model, tokens)[0]
    assert not torch.equal(exact, fast)
    assert torch.allclose(exact, fast, atol=0.05), "as near as bfloat16's rounding of hidden states lets them be"
    assert check_parity(model, tokens=200)[0].tokens_different == 0
    set_arithmetic("auto", CPU)
    with pytest.warns(UserWarning, match="emulated"):
        assert set_arithmetic("auto", CPU, recorded="bf16_tiles") == "bf16_tiles", "a resumed run keeps its own"


def test_model_and_batch_are_made_where_they_are_asked_to_be(model_folder):
    """The meta device stands for one that is not there: nothing of the model or the row stays on the CPU."""
    model = load_model(model_folder, device="meta")
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert {table.device.type for table in model.rotary(torch.arange(4, device="meta"))[0]} == {"meta"}
    row = pack([[1, 2, 3], [4, 5]], device="meta")
    assert {getattr(row, n).device.type for n in ("tokens", "positions", "predictors", "targets")} == {"meta"}
