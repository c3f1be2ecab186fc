"""Generation in int8 and int4 against llama.cpp's Q8_0 and Q4_0, and against bfloat16: Qwen3-0.6B, random weights.

Head and all layers are quantized on both sides. llama.cpp is the package xllamacpp, whose server takes prompts as token
ids; on two cores two threads are its best. With other work on the machine its threads spin: measure it quiet.
Run: python benchmarks/low_precision.py [--work one|many|prefill] (all: a quarter of an hour)
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCAB, DIM, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INNER = 151936, 1024, 28, 16, 8, 128, 3072
SIDES = ["lockstep none", "lockstep int8", "lockstep int4", "lockstep int4_128", "llama.cpp Q8_0", "llama.cpp Q4_0"]
REPEATS, ROUNDS = 3, 2


@dataclass
class Work:
    prompts: int
    length: int
    new: int

    def tokens(self, seed: int) -> list[list[int]]:
        draw = random.Random(seed)
        return [[draw.randrange(1000, VOCAB - 1000) for _ in range(self.length)] for _ in range(self.prompts)]

    @property
    def counted(self) -> int:
        """Tokens of the rate: of the prompts if nothing else is sampled, else sampled ones."""
        return self.prompts * (self.length if self.new == 1 else self.new)


WORKS = {"one": Work(1, 8, 128), "many": Work(16, 128, 64), "prefill": Work(1, 2048, 1)}


def lockstep_side(folder: str, form: str, work: Work) -> float:
    """Seconds, the least of several repeats."""
    from lockstep import Engine, EngineConfig, SamplingParams
    from lockstep.checkpoint import open_model
    from lockstep.config import PrecisionConfig

    model = open_model(Path(folder), precision=PrecisionConfig(form, keep=()))  # type: ignore[arg-type]
    cache_tokens = work.prompts * (work.length + work.new + 16) + 64
    engine = Engine(model, EngineConfig(cache_tokens=cache_tokens, draft="none"))
    params = SamplingParams(max_tokens=work.new, ignore_eos=True, seed=0)
    times = []
    for repeat in range(REPEATS + 1):  # the first one packs weights and records steps
        began = time.perf_counter()
        engine.generate(work.tokens(repeat), params)
        times.append(time.perf_counter() - began)
    return min(times[1:])


def llama_side(folder: str, form: str, work: Work) -> float:
    import xllamacpp as llama

    params = llama.CommonParams()
    params.model.path = f"{folder}/{form}.gguf"
    params.n_parallel, params.n_ctx = work.prompts, work.prompts * (work.length + work.new + 64)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
    server = llama.Server(params)

    def complete(tokens: list[int]) -> None:
        settings = {"n_predict": work.new, "ignore_eos": True, "cache_prompt": False, "temperature": 1.0, "seed": 0}
        answer = server.handle_completions({"prompt": tokens, **settings})
        assert answer["usage"]["completion_tokens"] == work.new, answer

    times = []
    for repeat in range(REPEATS + 1):
        threads = [threading.Thread(target=complete, args=(tokens,)) for tokens in work.tokens(repeat)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        times.append(time.perf_counter() - began)
    return min(times[1:])


def write_gguf(folder: str, form: str) -> None:
    """A Qwen3-0.6B of random weights in one of llama.cpp's formats."""
    import gguf
    import numpy as np

    kind = gguf.GGMLQuantizationType[form]
    normal = np.random.default_rng(0).standard_normal
    writer = gguf.GGUFWriter(f"{folder}/{form}.gguf", "qwen3")
    for name, value in {
        "block_count": LAYERS, "context_length": 32768, "embedding_length": DIM, "feed_forward_length": INNER,
        "head_count": HEADS, "head_count_kv": KV_HEADS, "key_length": HEAD_DIM, "value_length": HEAD_DIM,
        "rope_freq_base": 1e6, "layer_norm_rms_eps": 1e-6, "vocab_size": VOCAB, "tokenizer_model": "gpt2",
        "tokenizer_pre": "qwen2", "token_list": [f"t{i}".encode() for i in range(VOCAB)], "token_types": [1] * VOCAB,
        "token_merges": ["t 1"], "eos_token_id": 0, "bos_token_id": 0,
    }.items():  # fmt: skip
        getattr(writer, f"add_{name}")(value)

    def matrix(name: str, rows: int, width: int) -> None:
        values = normal((rows, width), dtype=np.float32) * 0.02
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)

    def norm(name: str, width: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))

    matrix("token_embd", VOCAB, DIM)
    norm("output_norm", DIM)
    for layer in (f"blk.{i}." for i in range(LAYERS)):
        for name, width in (("attn", DIM), ("ffn", DIM), ("attn_q", HEAD_DIM), ("attn_k", HEAD_DIM)):
            norm(f"{layer}{name}_norm", width)
        matrix(f"{layer}attn_q", HEADS * HEAD_DIM, DIM)
        matrix(f"{layer}attn_k", KV_HEADS * HEAD_DIM, DIM)
        matrix(f"{layer}attn_v", KV_HEADS * HEAD_DIM, DIM)
        matrix(f"{layer}attn_output", DIM, HEADS * HEAD_DIM)
        matrix(f"{layer}ffn_gate", INNER, DIM)
        matrix(f"{layer}ffn_up", INNER, DIM)
        matrix(f"{layer}ffn_down", DIM, INNER)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()


def report(folder: str, name: str) -> None:
    from peers import best_of

    work = WORKS[name]
    best = best_of(__file__, ["--folder", folder, "--work", name], SIDES, ROUNDS)
    rates = {side: work.counted / result["seconds"] for side, result in best.items()}
    print(f"{name}: {work.prompts} x {work.length} tokens, {work.new} new; head and all layers quantized")
    for side, rate in rates.items():
        ratios = [f"{rate / rates[other]:.2f}x {other}" for other in (SIDES[0], SIDES[4], SIDES[5]) if other != side]
        print(f"  {side:18} {rate:8.1f} tokens/s  {', '.join(ratios)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", choices=WORKS)
    parser.add_argument("--side")
    parser.add_argument("--folder")
    options = parser.parse_args()
    if options.side:
        package, _, form = options.side.partition(" ")
        if not options.work:
            return write_gguf(options.folder, form)
        side: Any = lockstep_side if package == "lockstep" else llama_side
        print(json.dumps({"seconds": side(options.folder, form, WORKS[options.work])}))
        return None
    from peers import peer_python

    from lockstep import build_model, save_model
    from lockstep.model import preset

    with tempfile.TemporaryDirectory() as folder:
        save_model(build_model(preset("qwen3:0.6b", VOCAB), dtype="bfloat16"), folder)
        for side in SIDES[4:]:
            command = [peer_python("llama.cpp"), __file__, "--folder", folder, "--side", side]
            subprocess.run(command, check=True)
        for name in [options.work] if options.work else WORKS:
            report(folder, name)


if __name__ == "__main__":
    main()
