"""Rotary tables: right, the same bits everywhere, and no larger than what was asked for."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lockstep.model import Yarn, preset
from lockstep.model.families import from_hugging_face, to_hugging_face
from lockstep.model.rotary import RotaryTables, rotary_frequencies, rotary_tables, stretched_by_yarn, table_factor

QWEN, LLAMA = preset("qwen3:micro"), preset("llama3:1b")


def test_cosines_and_sines_are_those_of_the_float32_angle():
    tables = RotaryTables(QWEN)
    positions = torch.tensor([0, 1, 2, 1000, 77_777])
    angles = np.float32(positions.numpy())[:, None] * rotary_frequencies(QWEN)
    ((cosines, sines),) = tables(positions)
    # Half an ulp of float32 below 1.
    assert np.abs(cosines.numpy() - np.cos(np.longdouble(angles))).max() <= 2.0**-25
    assert np.abs(sines.numpy() - np.sin(np.longdouble(angles))).max() <= 2.0**-25


@pytest.mark.parametrize("config", [QWEN, LLAMA], ids=["qwen3", "llama3"])
def test_frequencies_are_the_powers_that_others_take(config):
    exact = np.longdouble(config.rope_theta) ** -(
        np.arange(0, config.head_dim, 2, dtype=np.longdouble) / config.head_dim
    )
    plain = rotary_frequencies(replace(config, rope_scaling=None))
    # A power and a quotient, each rounded to float32.
    assert np.abs(plain / exact - 1).max() < 2.0**-23
    stretched = rotary_frequencies(config)
    if config.rope_scaling is None:
        assert np.array_equal(stretched, plain)
    else:
        ratio = plain / stretched
        assert ratio[0] == 1.0 and ratio[-1] == config.rope_scaling.factor
        assert (np.diff(ratio) >= -1e-6).all()


@pytest.mark.parametrize(
    ("scaling", "head_dim", "theta"),
    [
        (Yarn(8.0, 4096), 96, 10000.0),
        (Yarn(32.0, 4096, truncate=False), 64, 150000.0),
        (Yarn(40, 4096, 32, 1, mscale=1.0, mscale_all_dim=0.7), 64, 10000.0),
        (Yarn(40, 64, 16.5, 2.5, attention_factor=1.25, mscale=1.0, mscale_all_dim=1.0), 32, 150000.0),
        (Yarn(1.0, 32768, truncate=False), 96, 150000.0),
    ],
    ids=str,
)
def test_yarn_stretches_as_transformers_does(scaling, head_dim, theta):
    config = replace(QWEN, head_dim=head_dim, rope_theta=theta, rope_scaling=scaling, max_positions=8 * 4096)
    values = to_hugging_face(config, "float32")
    assert from_hugging_face(values, "config.json") == config
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](Qwen3Config(**values))
    # Of equal powers the very same frequencies. Their powers are a vectorised function's, which rounds some otherwise.
    powers = theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    assert np.array_equal(stretched_by_yarn(powers.numpy(), theta, scaling), frequencies.numpy())
    assert np.abs(rotary_frequencies(config) / frequencies.numpy() - 1).max() < 2.0**-21
    assert table_factor(config.rope_scaling) == pytest.approx(factor, rel=1e-15)


def test_cosines_and_sines_are_multiplied_by_the_attention_factor():
    config = replace(QWEN, rope_scaling=Yarn(40.0, 64))
    plain = rotary_tables(rotary_frequencies(config), 256)
    positions = torch.tensor([0, 3, 255])
    for table, own in zip(RotaryTables(config)(positions)[0], plain):
        assert torch.equal(table, own[positions] * np.float32(table_factor(config.rope_scaling)))
    assert table_factor(config.rope_scaling) > 1.3 and table_factor(QWEN.rope_scaling) == 1.0


def test_the_tables_bits_are_those_of_every_processor():
    tables = torch.stack(rotary_tables(rotary_frequencies(LLAMA), 3000))
    assert hashlib.sha256(tables.numpy().tobytes()).hexdigest() == DIGEST


DIGEST = "e8a6c26e3301067c4b3961a6db17d366f77efb48e06700d8193ca8277938ce2f"


def test_tables_grow_to_the_largest_position_met_and_stay_and_rows_do_not_depend_on_it():
    tables, cpu, positions = RotaryTables(QWEN), torch.device("cpu"), torch.tensor([3, 100, 255])
    (small,) = tables(positions)
    assert len(tables.reserve(0, cpu)[0][0]) == 256
    tables(torch.tensor([5, 256]))
    assert len(tables.reserve(0, cpu)[0][0]) == 512
    kept = tables.reserve(512, cpu)[0][0]
    assert tables.reserve(1, cpu)[0][0] is kept
    assert [len(t) for t in tables(torch.tensor([], dtype=torch.int64))[0]] == [0, 0]
    tables(torch.tensor([9_000]))
    assert all(map(torch.equal, small, tables(positions)[0]))
