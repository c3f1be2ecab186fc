"""What a JSON schema costs: the mask of a step at a large vocabulary, and seconds per sampled token with and without.

Run: python benchmarks/structured.py [--preset qwen3:0.6b --sequences 16 --tokens 64 --rounds 3]   (about five minutes)
     python benchmarks/structured.py --mask-only   (the first table: one minute, little memory)

The tokenizer is a byte-level BPE of nearly Qwen3's size, trained on the Python files of this environment; the weights
are random. The schema is compiled before, as a server does for every request after the first with it. It holds more
than is sampled, so that no sample ends early. Rounds with and without it take turns; the best of each counts.
"""

from __future__ import annotations

import argparse
import re
import sysconfig
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import torch

from lockstep import Engine, EngineConfig, SamplingParams, build_model
from lockstep.data import train_bpe
from lockstep.data.tokenizer import Tokenizer
from lockstep.generate.adjustments import Adjustment, adjusted_logits
from lockstep.generate.grammars import Grammars, json_grammar
from lockstep.model import preset
from lockstep.ops.vocabulary import Whole

VOCAB = 151936
TOKENS = 151669
"""Of Qwen3's tokenizer; fewer if the texts have no more."""
CHARACTERS = 2**25
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "kind": {"enum": ["call", "answer", "note"]},
            "count": {"type": "integer", "minimum": 0, "maximum": 1000},
        },
        "required": ["name", "kind", "count"],
        "additionalProperties": False,
    },
    "minItems": 1000,
}


def texts() -> Iterator[str]:
    """Python files, up to CHARACTERS."""
    left = CHARACTERS
    for folder in ("stdlib", "purelib"):
        for path in sorted(Path(sysconfig.get_paths()[folder]).rglob("*.py")):
            # llguidance takes no tokens of hundreds of characters, as long rules and encoded data would become.
            text = re.sub(r"\S{48,}|(.)\1{8,}", " ", path.read_text(errors="replace"))
            yield text[:left]
            left -= len(text)
            if left <= 0:
                return


def best(work: Callable[[], object], rounds: int) -> float:
    """Milliseconds of the fastest of some runs."""
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return 1000 * min(seconds)


def measure_mask(tokenizer: Tokenizer, rows: int) -> None:
    """`adjusted_logits` after each of some texts, which allow few or nearly all tokens next."""
    grammars, end = Grammars(tokenizer, VOCAB, [tokenizer.eos_id or 0]), (tokenizer.eos_id or 0,)
    grammar = json_grammar(SCHEMA)
    grammars.compile(grammar)
    print(f"the mask of {rows} rows, {VOCAB} tokens, ms:")
    for state, text in (("few tokens allowed", '[{"na'), ("within a string", '[{"name": "ab')):
        for dtype in (torch.bfloat16, torch.float32):
            logits = torch.randn(rows, VOCAB).to(dtype)
            parameters = SamplingParams(grammar=grammar)
            adjustments = [Adjustment(parameters, [], end, grammars.matcher(grammar)) for _ in range(rows)]
            for adjustment in adjustments:
                for token in tokenizer.encode(text):
                    adjustment.accept(token, False)
                assert not adjustment.problem, adjustment.problem
            whole = best(partial(adjusted_logits, logits, adjustments, Whole(VOCAB)), 20)
            print(f"  {state:20} {str(dtype).removeprefix('torch.'):9} {whole:6.2f}")


def measure_steps(tokenizer: Tokenizer, name: str, sequences: int, tokens: int, rounds: int) -> None:
    """Seconds per sampled token of `generate`, by turns without and with the schema."""
    model = build_model(preset(name, VOCAB, (tokenizer.eos_id or 0,)), "bfloat16")
    engine = Engine(model, EngineConfig(max_sequences=sequences, cache_tokens=16384, draft="none"), tokenizer)
    prompts = [tokenizer.encode(text)[:64] for text in islice(texts(), 3 * sequences)]
    prompts = [prompt for prompt in prompts if prompt][:sequences]
    kinds = {
        "free": SamplingParams(max_tokens=tokens, seed=1, ignore_eos=True),
        "schema": SamplingParams(max_tokens=tokens, seed=1, grammar=json_grammar(SCHEMA)),
    }
    engine.grammars.compile(kinds["schema"].grammar)
    each: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds + 1):  # the first one packs the weights
        for kind, parameters in kinds.items():
            began = time.perf_counter()
            groups = engine.generate(prompts, parameters)
            count = sum(len(sample.token_ids) for group in groups for sample in group)
            assert count == tokens * len(prompts), f"{kind}: {count} tokens"
            each[kind].append((time.perf_counter() - began) / count)
    lowest = {kind: min(values[1:]) for kind, values in each.items()}
    for kind, value in lowest.items():
        print(f"{name}, {len(prompts)} sequences, {kind:7} {1000 * value:8.3f} ms a token")
    print(f"schema / free: {lowest['schema'] / lowest['free']:.3f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="qwen3:0.6b")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mask-only", action="store_true")
    arguments = parser.parse_args()
    began = time.perf_counter()
    tokenizer = train_bpe(texts(), TOKENS)
    print(f"tokenizer of {tokenizer.vocab_size} tokens in {time.perf_counter() - began:.0f} s")
    measure_mask(tokenizer, arguments.sequences)
    if not arguments.mask_only:
        measure_steps(tokenizer, arguments.preset, arguments.sequences, arguments.tokens, arguments.rounds)


if __name__ == "__main__":
    main()
