"""Log-probabilities of preference examples under the reference model: computed once, and kept in the run's folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lockstep.checkpoint import weights_folder
from lockstep.config import DPOConfig
from lockstep.data import TokenizedCorpus
from lockstep.data.preferences import Example, read_example
from lockstep.errors import UserError
from lockstep.model import ScoringModel, base_folder
from lockstep.observe import log
from lockstep.progress import Progress
from lockstep.train.packing import split_by_tokens
from lockstep.train.preference_batches import PreferenceBatch, answer_log_probs, preference_batch, shares_prompts
from lockstep.train.trainer import Trainer

FILE = "reference.safetensors"
AT_ONCE = 64
"""Micro-batches between two updates of the progress bar."""

Reference = Callable[[Sequence[Example]], dict[int, tuple[float, float]]]
"""The log-probabilities of examples' two answers in nats, by example number; all ranks make the same calls."""


def model_reference(trainer: Trainer, config: DPOConfig) -> Reference:
    """A reference that uses the trainer's current model: its weights before the first step, or those of
    `config.reference`, in the run's layout."""
    world, budget = trainer.world, config.train.tokens_per_microbatch
    share = shares_prompts(config)

    def score(examples: Sequence[Example]) -> dict[int, tuple[float, float]]:
        sizes = [sum(len(sequence.tokens) for sequence in example.sequences) for example in examples]
        parts = [list(examples[part]) for part in split_by_tokens(sizes, budget)]
        # Every rank computes the same number.
        parts += [[]] * (-len(parts) % world.data_size)
        found: list[tuple[int, float, float]] = []

        def record(model: ScoringModel, batch: PreferenceBatch) -> Tensor:
            log_probs, counts = answer_log_probs(model, batch)
            if counts:
                pairs = log_probs.view(-1, 2).tolist()
                found.extend((example.number, *pair) for example, pair in zip(batch.examples, pairs))
            return log_probs.new_zeros(())

        own = parts[world.data_rank :: world.data_size]
        trainer.evaluate((preference_batch(part, world, share) for part in own), record)
        return {number: (first, second) for rank in world.gather(found) for number, first, second in rank}

    return score


def assign_reference(
    wanted: Iterable[tuple[TokenizedCorpus, int]], reference: Reference, config: DPOConfig, trainer: Trainer
) -> None:
    """Stores the reference's log-probabilities of the `wanted` examples (corpus, number) in their corpora.

    Those in the run's folder are reused if data, model and arithmetic are the same; the rest is computed and saved
    there. All ranks call it.
    """
    world = trainer.world
    numbers: dict[str, set[int]] = {}
    corpora: dict[str, list[TokenizedCorpus]] = {}
    digests: dict[int, str] = {}
    for corpus, number in wanted:
        if id(corpus) not in digests:
            digests[id(corpus)] = data_digest(corpus)
            corpora.setdefault(digests[id(corpus)], []).append(corpus)
        numbers.setdefault(digests[id(corpus)], set()).add(number)
    file, made_by = Path(config.output) / FILE, model_digest(config)
    # Rank 0's file decides for all.
    kept = world.from_main(lambda: {name: scores.tolist() for name, scores in _read(file, made_by).items()})
    scores: dict[str, np.ndarray] = {}
    missing: dict[str, list[int]] = {}
    for digest, (corpus, *_) in corpora.items():
        count = len(corpus.offsets) - 1
        before = np.array(kept.get(digest, []), dtype=np.float32).reshape(-1, 2)
        scores[digest] = before if len(before) == count else np.full((count, 2), np.nan, dtype=np.float32)
        missing[digest] = [n for n in sorted(numbers[digest]) if np.isnan(scores[digest][n]).any()]
    total = sum(map(len, missing.values()))
    if total:
        paired, longest = config.loss != "kto", config.sequence_length
        with Progress("reference", total, "example") if world.is_main else nullcontext() as bar:
            for digest, left in missing.items():
                most = AT_ONCE * world.data_size
                for start in range(0, len(left), most):
                    part = left[start : start + most]
                    examples = [read_example(corpora[digest][0], number, paired, longest) for number in part]
                    for number, pair in reference(examples).items():
                        scores[digest][number] = pair
                    if bar is not None:
                        bar.advance(len(part))
        world.on_main(lambda: _write(file, made_by, scores))
    for digest, same in corpora.items():
        for corpus in same:
            corpus.reference = scores[digest]


def data_digest(corpus: TokenizedCorpus) -> str:
    """A digest of all its tokens, and of which are scored."""
    digest = hashlib.sha256()
    for array in (corpus.tokens, corpus.offsets, corpus.scored):
        if array is not None:
            digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()


def model_digest(config: DPOConfig) -> str:
    """A digest of what determines the bits: the model's files by size and time, the arithmetic, and data settings."""
    described = []
    for given in (Path(name) for name in (config.model, config.reference) if Path(name).is_dir()):
        given = weights_folder(given)
        folders = sorted({given, base_folder(given)})
        files = [path for folder in folders for path in sorted(folder.iterdir())]
        described += [
            (str(path), path.stat().st_size, path.stat().st_mtime_ns)
            for path in files
            if path.suffix in (".safetensors", ".json")
        ]
    settings = [config.model, config.seed, config.dtype, config.arithmetic, config.compile.backend]
    settings += [config.parallel.reduction_chunks, config.loss == "kto"]
    return hashlib.sha256(json.dumps([described, *settings, config.sequence_length]).encode()).hexdigest()


def _read(file: Path, made_by: str) -> dict[str, np.ndarray]:
    """Scores by the data's digest; empty if there are none, or if they are of another model."""
    if not file.exists():
        return {}
    try:
        with safe_open(file, "np") as opened:
            described = opened.metadata() or {}
            if described.get("model") != made_by:
                return {}
            scores = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        if described.get("scores") != _digest(scores):
            raise ValueError("its checksum does not match")
    except (OSError, SafetensorError, ValueError) as error:
        log.warning("%s: cannot be read (%s); recomputing it", file, error)
        return {}
    return scores


def _write(file: Path, made_by: str, scores: dict[str, np.ndarray]) -> None:
    partial = file.with_name(file.name + ".partial")
    tensors = {name: torch.from_numpy(array) for name, array in scores.items()}
    try:
        save_file(tensors, partial, metadata={"model": made_by, "scores": _digest(scores)})
        partial.replace(file)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise UserError(
            f"{file}: cannot be written ({error}); free some space or move the existing file, then --resume"
        ) from error


def _digest(scores: dict[str, np.ndarray]) -> str:
    """A digest of names, types, shapes and values."""
    digest = hashlib.sha256()
    for name, array in sorted(scores.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
