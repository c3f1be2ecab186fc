"""What is counted as work, and against which peak."""

from dataclasses import replace

import torch

from lockstep.model import build_model, lora_of, preset
from lockstep.observe import peak_flops, training_flops
from lockstep.observe.start import start_line


def test_every_product_is_counted_attention_included():
    config = preset("qwen3:micro", 300)
    model = build_model(config, device="meta")
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    norms = sum(p.numel() for p in model.parameters() if p.ndim == 1)
    lengths = [5, 2]
    # Two products of head_dim multiply-adds for each head and each pair of a query and a key it may see.
    pairs = (1 + 2 + 3 + 4 + 5) + (1 + 2)
    attention = config.num_layers * config.num_heads * 2 * (2 * config.head_dim) * pairs
    forward = 2 * matrices * 7 + attention
    # Norms are no products, but by custom all parameters count.
    assert training_flops(config, lengths) == 3 * forward + 6 * norms * 7
    # The weights beside an adapter have no gradients.
    adapted = replace(config, lora=lora_of(config, 4, 8.0, "*"))
    assert training_flops(adapted, lengths) == 3 * forward + 6 * norms * 7 - 2 * (matrices + norms) * 7


def test_linear_attention_has_products_with_its_state_instead_of_pairs():
    hybrid = preset("qwen3_5:micro", 300)
    assert hybrid.num_delta == 3 and hybrid.num_layers == 4
    weights, pairs = 6 * hybrid.num_parameters * 50, 50 * 51 // 2
    attention = 12 * hybrid.num_heads * hybrid.head_dim * pairs
    # Forward, per token and value head: three products of a 32 x 32 state; backward twice as many.
    states = 3 * 50 * 3 * hybrid.delta.value_heads * 3 * 2 * 32 * 32
    assert training_flops(hybrid, [50]) == weights + attention + states


def test_a_window_has_fewer_pairs():
    whole = preset("gpt_oss:micro", 300)
    assert whole.windows == (20, 0) and whole.num_layers == 4
    seen = [min(n + 1, 20) for n in range(50)]
    fewer = 2 * (50 * 51 // 2 - sum(seen))
    factor = 12 * whole.num_heads * whole.head_dim
    assert training_flops(replace(whole, windows=()), [50]) - training_flops(whole, [50]) == factor * fewer


def test_the_best_measured_peak_is_cached_for_the_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("lockstep.observe.speed.MEASURED_SECONDS", 0.0)
    monkeypatch.setattr("lockstep.observe.speed.busy_neighbours", lambda: 2)
    assert peak_flops(torch.device("cpu"), torch.float32) == 0.0 and not list(tmp_path.glob("lockstep/peak-*.json"))
    monkeypatch.setattr("lockstep.observe.speed.busy_neighbours", lambda: 0)
    first = peak_flops(torch.device("cpu"), torch.float32)
    (path,) = tmp_path.glob("lockstep/peak-*.json")
    assert first > 1e8
    path.write_text('{"flops": 1e20}')
    assert peak_flops(torch.device("cpu"), torch.float32) == 1e20
    path.write_text('{"flops": 1e6}')  # measured at a bad moment
    assert peak_flops(torch.device("cpu"), torch.float32) > 1e8


def test_of_a_mixture_the_start_line_says_how_many_weights_a_token_meets():
    line = start_line("m", preset("qwen3_moe:30b-a3b"), torch.device("cpu"), torch.float32, "nothing to do")
    assert line.startswith("m, 30.5B parameters (3.35B active) | cpu")
    assert "active" not in start_line("m", preset("qwen3:0.6b"), torch.device("cpu"), torch.float32, "")
