"""The promises on a real GPU. Run: make gpu-test PYTHON=python3. Needs neither a network nor files."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from lockstep import Engine, EngineConfig, SamplingParams, build_model, ops, score
from lockstep.config import TrainConfig
from lockstep.model import preset
from lockstep.ops import cuda
from lockstep.train import Trainer, pack, target_log_probs
from lockstep.train.gradient_norm import local_squares
from tests.ops.attention_checks import assert_pieces_add_up

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = [torch.float32, torch.bfloat16]
# One rounding to bfloat16 of values up to a few units; float32 sums of up to 4096 terms in another order.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
COUNTS = [1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 200, 255, 256, 257, 384, 511, 512]
SHAPES = [(1024, 1024), (1024, 2048), (2048, 1024), (1024, 3072), (3072, 1024), (4096, 512), (200, 259), (1024, 9000)]


def _randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def _close(ours: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    error = (ours.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error < TOLERANCE[dtype], float(error)


def _model(dtype: str, device: str = "cuda"):
    sizes = dict(num_layers=3, num_heads=8, num_kv_heads=4, intermediate_size=512, max_positions=1024)
    return build_model(replace(preset("qwen3:tiny", 1000), **sizes), dtype, device=device, seed=2)


def _exact_attention(lengths: list[int], *qkv: torch.Tensor) -> torch.Tensor:
    sequences = zip(*(x.split(lengths) for x in qkv))
    rows = ([x.transpose(0, 1)[None] for x in sequence] for sequence in sequences)
    outs = (F.scaled_dot_product_attention(*each, is_causal=True, enable_gqa=True) for each in rows)
    return torch.cat([out[0].transpose(0, 1) for out in outs])


def test_the_triton_forms_serve_this_gpu():
    assert cuda.usable(_randn(1)), "triton is missing, or LOCKSTEP_NATIVE=0"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_of_a_product_is_the_same_for_every_number_of_rows(dtype, shape):
    x, weight = _randn(700, shape[0], dtype=dtype), _randn(shape[1], shape[0], dtype=dtype, seed=1) * shape[0] ** -0.5
    expected = ops.linear(x, weight)
    _close(expected, x.double() @ weight.double().T, dtype)
    for count in COUNTS:
        for start in (0, 700 - count):
            rows = slice(start, start + count)
            assert torch.equal(ops.linear(x[rows], weight), expected[rows]), (count, start)


def test_split_products_meet_in_the_same_bits_every_time():
    """A thousand runs at full load: a piece that is read before it is stored would show."""
    x, weight = _randn(5, 2048, dtype=torch.bfloat16), _randn(1024, 2048, dtype=torch.bfloat16, seed=1)
    expected = ops.linear(x, weight)
    assert torch.equal(torch.stack([ops.linear(x, weight) for _ in range(1000)]), expected.expand(1000, -1, -1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [128, 250, 1024, 4096])
def test_a_row_of_norm_activation_and_rotation_is_the_same_in_any_company(dtype, dim):
    x, up, weight = _randn(600, dim, dtype=dtype), _randn(600, dim, dtype=dtype, seed=1), _randn(dim, dtype=dtype)
    heads, angles = _randn(600, 4, 64, dtype=dtype), _randn(600, 32)
    normed, gated = ops.rms_norm(x, weight, 1e-6), ops.silu_mul(x, up)
    offset, by_gelu = ops.rms_norm(x, weight, 1e-6, offset=True), ops.gelu_mul(x, up)
    rotated = ops.rotary(heads, angles.cos(), angles.sin())
    _close(gated, F.silu(x.double()) * up.double(), dtype)
    _close(by_gelu, F.gelu(x.double(), approximate="tanh") * up.double(), dtype)
    _close(normed, F.rms_norm(x.double(), (dim,), weight.double(), 1e-6), dtype)
    _close(offset, F.rms_norm(x.double(), (dim,), 1 + weight.double(), 1e-6), dtype)
    assert torch.equal(ops.relu_squared(x), F.relu(x.float()).square().to(dtype))
    cos, sin = angles[:, :12].cos(), angles[:, :12].sin()
    turned = torch.view_as_complex(heads[..., :24].double().unflatten(-1, (12, 2))) * torch.complex(cos, sin)[:, None]
    turned = torch.cat((torch.view_as_real(turned).flatten(-2), heads[..., 24:].double()), -1)
    _close(ops.rotary(heads, cos, sin, interleaved=True), turned, dtype)
    for rows in (slice(0, 1), slice(3, 40), slice(599, 600), slice(0, 257)):
        assert torch.equal(ops.rms_norm(x[rows], weight, 1e-6), normed[rows])
        assert torch.equal(ops.rms_norm(x[rows], weight, 1e-6, offset=True), offset[rows])
        assert torch.equal(ops.silu_mul(x[rows], up[rows]), gated[rows])
        assert torch.equal(ops.gelu_mul(x[rows], up[rows]), by_gelu[rows])
        assert torch.equal(ops.rotary(heads[rows], angles[rows].cos(), angles[rows].sin()), rotated[rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 8, 128), (4, 4, 64), (6, 2, 96)])
def test_attention_is_the_same_in_training_chunks_and_decode_wherever_its_pages_are(dtype, heads, kv_heads, head_dim):
    lengths = [1, 130, 700, 64]
    total = sum(lengths)
    q = _randn(total, heads, head_dim, dtype=dtype)
    k, v = (_randn(total, kv_heads, head_dim, dtype=dtype, seed=s) for s in (1, 2))
    expected = ops.PackedAttention(lengths, "cuda")(0, q, k, v)
    _close(expected, _exact_attention(lengths, *(x.double() for x in (q, k, v))), dtype)
    pages = [-(-n // ops.PAGE) for n in lengths]
    order = torch.randperm(100, generator=torch.Generator().manual_seed(3))
    table = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
    for i, count in enumerate(pages):
        table[i, :count] = order[sum(pages[:i]) : sum(pages[: i + 1])]
    table = table.cuda()
    starts = [0, 1, 131, 831]
    for chunk in (1, 5, 64, 300):
        cache = ops.KVCache(1, 100, kv_heads, head_dim, dtype, "cuda")
        done = [0] * len(lengths)
        # One token a sequence is slow from the start: the long sequence's first part comes in one chunk.
        first = 640 if chunk == 1 else chunk
        while unfinished := [i for i in range(len(lengths)) if done[i] < lengths[i]]:
            counts = [min(first if not done[i] else chunk, lengths[i] - done[i]) for i in unfinished]
            rows = [starts[i] + done[i] + t for i, n in zip(unfinished, counts) for t in range(n)]
            contexts = torch.tensor([done[i] + n for i, n in zip(unfinished, counts)], dtype=torch.int32).cuda()
            lengths_now = torch.tensor(counts, dtype=torch.int32).cuda()
            padded = rows + [0] * 3
            attention = ops.PagedAttention(cache, table[unfinished], lengths_now, contexts)
            out = attention(0, q[padded], k[padded], v[padded])
            assert torch.equal(out[: len(rows)], expected[rows]), (chunk, done)
            assert not out[len(rows) :].any()
            for i, n in zip(unfinished, counts):
                done[i] += n


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 8, 128), (8, 2, 64)])
@pytest.mark.parametrize("window", [0, 1500])
def test_a_long_context_is_the_same_in_chunks_with_programs_of_their_own(dtype, heads, kv_heads, head_dim, window):
    from lockstep.ops.cuda import attention

    lengths, steps = [3 * attention.CHUNK + 77, 5, attention.CHUNK + 1], 3
    total = sum(lengths)
    q = _randn(total, heads, head_dim, dtype=dtype)
    k, v = (_randn(total, kv_heads, head_dim, dtype=dtype, seed=s) for s in (1, 2))
    # Neighbors have the same key and opposite values: what is left of their sums is how each was rounded.
    half = total // 2
    k[1 : 2 * half : 2], v[1 : 2 * half : 2] = k[: 2 * half : 2], -v[: 2 * half : 2]
    terms = ops.Terms(window=window, sinks=torch.linspace(-2, 2, heads, device="cuda") if window else None)
    expected = ops.PackedAttention(lengths, "cuda")(0, q, k, v, terms)
    pages = -(-max(lengths) // ops.PAGE)
    table = torch.randperm(3 * pages).view(3, pages).int().cuda()
    cache = ops.KVCache(1, 3 * pages, kv_heads, head_dim, dtype, "cuda")
    ends = [sum(lengths[: i + 1]) for i in range(3)]
    # All but the last rows at once, then one by one.
    for left in range(steps, -1, -1):
        counts = [1 if left < steps else n - steps for n in lengths]
        rows = [end - left - n + i for end, n in zip(ends, counts) for i in range(n)]
        contexts = torch.tensor([n - left for n in lengths], dtype=torch.int32).cuda()
        paged = ops.PagedAttention(cache, table, torch.tensor(counts, dtype=torch.int32).cuda(), contexts)
        assert torch.equal(paged(0, q[rows], k[rows], v[rows], terms), expected[rows]), left


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_attention(dtype):
    lengths = [5, 130, 64, 1, 257]
    total = sum(lengths)
    leaves = [_randn(total, h, 128, dtype=dtype, seed=h).requires_grad_() for h in (8, 4, 4)]
    grad = _randn(total, 8, 128, dtype=dtype, seed=9)
    out = ops.PackedAttention(lengths, "cuda")(0, *leaves)
    ours = torch.autograd.grad(out, leaves, grad)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected = _exact_attention(lengths, *exact)
    for mine, theirs in zip(ours, torch.autograd.grad(expected, exact, grad.double())):
        _close(mine, theirs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pieces_of_sequences_attend_as_the_whole_and_their_gradients_add_up_to_its(dtype):
    assert_pieces_add_up(dtype, 8, 4, 128, TOLERANCE[dtype], "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [258, 151936])
def test_log_probabilities_and_draws_of_a_row_are_the_same_in_any_company(dtype, vocab):
    logits, targets = _randn(70, vocab, dtype=dtype) * 3, torch.arange(70, device="cuda") * 3 % vocab
    temperature = torch.linspace(0, 2, 70, device="cuda")
    uniform = torch.rand(70, generator=torch.Generator().manual_seed(1), dtype=torch.float64).cuda()
    inverse = torch.where(temperature == 0, 1.0, 1 / temperature)
    results = [*ops.logits_log_probs(logits, targets, inverse), *ops.draw(logits, temperature, uniform)]
    exact = torch.log_softmax(logits.double() * inverse.double()[:, None], -1)
    _close(results[0], exact.gather(1, targets[:, None])[:, 0], torch.float32)
    for rows in (slice(0, 1), slice(69, 70), slice(5, 38)):
        alone = [
            *ops.logits_log_probs(logits[rows], targets[rows], inverse[rows]),
            *ops.draw(logits[rows], temperature[rows], uniform[rows]),
        ]
        assert all(torch.equal(a, r[rows]) for a, r in zip(alone, results))
    drawn = ops.draw(logits[:1].expand(4000, -1), temperature.new_ones(4000), torch.rand(4000, device="cuda").double())
    likeliest = int(logits[0].argmax())
    share, p = float((drawn[0] == likeliest).float().mean()), float(logits[0].float().softmax(-1)[likeliest])
    assert abs(share - p) < 4 * (p * (1 - p) / 4000) ** 0.5 + 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("graphs", ["none", "full"])
def test_the_generator_reports_the_trainers_bits_with_and_without_graphs(dtype, graphs):
    model = _model(dtype)
    prompts = [[(7 * i + j) % 1000 for j in range(3 + 17 * i)] for i in range(9)]
    params = SamplingParams(max_tokens=20, temperature=0.9, n=2, seed=5, ignore_eos=True)
    eager = Engine(
        model, EngineConfig(max_tokens_per_step=500, max_sequences=64, cache_tokens=8192, cuda_graphs="none")
    )
    config = EngineConfig(max_tokens_per_step=90, max_sequences=13, cache_tokens=2048, cuda_graphs=graphs)
    groups, expected = Engine(model, config).generate(prompts, params), eager.generate(prompts, params)
    for prompt, group, plain in zip(prompts, groups, expected):
        scores = score(model, [prompt + c.token_ids for c in group], 0.9)
        for completion, other, trainer in zip(group, plain, scores):
            assert completion.token_ids == other.token_ids and completion.logprobs == other.logprobs
            assert torch.equal(torch.tensor(completion.logprobs), trainer[len(prompt) - 1 :].cpu())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_steps_lower_the_loss_and_graphs_follow_the_weights(dtype):
    model = _model(dtype)
    config = EngineConfig(max_sequences=8, cache_tokens=2048, cuda_graphs="full")
    engine = Engine(model, config)
    trainer = Trainer(model, TrainConfig(learning_rate=1e-3, warmup_steps=0, schedule="constant"), 20)
    sequences = [[(3 * i + j) % 50 for j in range(40 + 30 * i)] for i in range(4)]
    losses = []
    for step in range(6):
        row = pack(sequences, device="cuda")
        metrics = trainer.step([row], lambda m, r: -target_log_probs(m, r)[0].mean())
        assert torch.isfinite(torch.tensor([metrics["loss"], metrics["grad_norm"]])).all()
        losses.append(metrics["loss"])
        engine.weights_changed(step + 1)
        completion = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=10, seed=step, ignore_eos=True))[0][0]
        trainer_scores = score(model, [[1, 2, 3, *completion.token_ids]])[0][2:]
        assert torch.equal(torch.tensor(completion.logprobs), trainer_scores.cpu())
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_an_update_has_the_bits_of_the_cpus(moments, kind):
    def stepped(device: str) -> list[torch.Tensor]:
        draw = torch.Generator().manual_seed(0)
        master, grad, mean = (torch.randn(100_003, generator=draw) for _ in range(3))
        square = torch.rand(100_003, generator=draw) * 1e-3
        tensors = [master, grad.to(kind), (mean * 0.01).to(moments), square.to(moments)]
        weight = torch.zeros(100_003, dtype=kind, device=device)
        tensors = [t.to(device) for t in tensors]
        for step in range(1, 4):
            ops.adamw_step(*tensors, ops.adamw_factors(step, 1e-2, 0.1, 0.9, 0.95, 1e-8), 0.3, weight)
        return [t.cpu() for t in (*tensors, weight)]

    for ours, theirs in zip(stepped("cuda"), stepped("cpu"), strict=True):
        assert torch.equal(ours, theirs)


def test_squares_of_a_large_gradient_add_up_however_it_is_cut():
    gradient = torch.full((1 << 27,), 0.1, device="cuda")
    for pieces in (1, 2, 5):
        parts = {f"part {index}": part for index, part in enumerate(gradient.chunk(pieces))}
        total = sum(float(square) for square in local_squares(parts).values())
        assert total == pytest.approx((1 << 27) * float(torch.tensor(0.1)) ** 2, rel=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gpu_computes_what_the_cpu_computes(dtype):
    """Not bit for bit: other sums. 3 layers of bfloat16 roundings on logits of a few units."""
    sequence = [list(range(60))]
    on_gpu, on_cpu = (score(_model(dtype, device), sequence)[0].cpu() for device in ("cuda", "cpu"))
    assert (on_gpu - on_cpu).abs().max() < {"float32": 1e-4, "bfloat16": 5e-2}[dtype]
