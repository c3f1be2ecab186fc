"""Log-probabilities of preference examples under the reference model: computed once, and saved in the run's folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
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
from lockstep.hub import is_local, named_path
from lockstep.model import ScoringModel, base_folder
from lockstep.observe import log
from lockstep.progress import Progress
from lockstep.train.packing import split_by_tokens
from lockstep.train.preferences import PreferenceBatch, answer_log_probs, preference_batch, shares_prompts
from lockstep.train.trainer import Trainer

FILE = "reference.safetensors"
AT_ONCE = 64
"""Micro-batches between two updates of the progress bar."""


def reference_log_probs(trainer: Trainer, config: DPOConfig, examples: Sequence[Example]) -> list[tuple[float, float]]:
    """The log-probabilities in nats of each example's two answers under the trainer's current model. All ranks make the
    same calls."""
    world, share = trainer.world, shares_prompts(config)
    places = {id(example): place for place, example in enumerate(examples)}
    sizes = [sum(len(sequence.tokens) for sequence in example.sequences) for example in examples]
    parts = [list(examples[part]) for part in split_by_tokens(sizes, config.train.tokens_per_microbatch)]
    # Every rank computes the same number.
    parts += [[]] * (-len(parts) % world.data_size)
    local: list[tuple[int, float, float]] = []

    def record(model: ScoringModel, batch: PreferenceBatch) -> Tensor:
        log_probs, counts = answer_log_probs(model, batch)
        if counts:
            pairs = log_probs.view(-1, 2).tolist()
            local.extend((places[id(example)], *pair) for example, pair in zip(batch.examples, pairs))
        return log_probs.new_zeros(())

    trainer.evaluate(
        (preference_batch(part, world, share) for part in parts[world.data_rank :: world.data_size]), record
    )
    found = {place: (first, second) for rank in world.gather(local) for place, first, second in rank}
    return [found[place] for place in range(len(examples))]


def assign_reference(wanted: Iterable[tuple[TokenizedCorpus, int]], config: DPOConfig, trainer: Trainer) -> None:
    """Stores the log-probabilities of the `wanted` examples (corpus, number) under the trainer's current model in their
    corpora.

    Those in the run's folder are reused if data, model and arithmetic are the same; the rest is computed and saved
    there. All ranks call it.
    """
    world = trainer.world
    numbers: dict[int, set[int]] = {}
    by_id: dict[int, TokenizedCorpus] = {}
    for corpus, number in wanted:
        by_id[id(corpus)] = corpus
        numbers.setdefault(id(corpus), set()).add(number)
    corpora = list(by_id.values())
    file, made_by = Path(config.output) / FILE, _made_by(config, corpora)
    # Only rank 0 reads the file, so that all ranks compute the same examples.
    saved = world.from_main(lambda: [scores.tolist() for scores in _read(file, made_by)])
    for place, corpus in enumerate(corpora):
        count = len(corpus.offsets) - 1
        corpus.reference = np.array(saved[place] if saved else [[np.nan, np.nan]] * count, dtype=np.float32)
    missing = [
        (corpus, number)
        for key, corpus in by_id.items()
        for number in sorted(numbers[key])
        if np.isnan(_scores(corpus)[number]).any()
    ]
    if not missing:
        return
    paired, longest, size = config.loss != "kto", config.sequence_length, AT_ONCE * world.data_size
    with Progress("reference", len(missing), "example") if world.is_main else nullcontext() as bar:
        for start in range(0, len(missing), size):
            part = missing[start : start + size]
            examples = [read_example(corpus, number, paired, longest) for corpus, number in part]
            for (corpus, number), pair in zip(part, reference_log_probs(trainer, config, examples), strict=True):
                _scores(corpus)[number] = pair
            if bar is not None:
                bar.advance(len(part))
    world.on_main(lambda: _write(file, made_by, [_scores(corpus) for corpus in corpora]))


def _scores(corpus: TokenizedCorpus) -> np.ndarray:
    assert corpus.reference is not None
    return corpus.reference


def _made_by(config: DPOConfig, corpora: Sequence[TokenizedCorpus]) -> str:
    """A digest of what determines the bits: the model's files by size and time, the arithmetic, the data."""
    described = []
    for model in (named_path(name) for name in (config.model, config.reference) if is_local(name)):
        weights = weights_folder(model)
        folders = sorted({weights, base_folder(weights)})
        files = [path for folder in folders for path in (sorted(folder.iterdir()) if folder.is_dir() else [folder])]
        described += [
            (str(path), path.stat().st_size, path.stat().st_mtime_ns)
            for path in files
            if path.suffix in (".safetensors", ".json")
        ]
    settings = [config.model, config.seed, config.dtype, config.arithmetic, config.compile.backend]
    settings += [config.parallel.reduction_chunks, config.loss == "kto", config.sequence_length]
    settings += [config.precision.linear, *config.precision.keep, config.precision.cache]
    data = [_digest([corpus.tokens, corpus.offsets, corpus.scored]) for corpus in corpora]
    return hashlib.sha256(json.dumps([described, settings, data]).encode()).hexdigest()


def _read(file: Path, made_by: str) -> list[np.ndarray]:
    """The scores of each corpus; empty if there are none, or if they are of other data or another model."""
    if not file.exists():
        return []
    try:
        with safe_open(file, "np") as opened:
            described = opened.metadata() or {}
            if described.get("made_by") != made_by:
                return []
            scores = [opened.get_tensor(str(place)) for place in range(len(opened.keys()))]
        if described.get("scores") != _digest(scores):
            raise ValueError("its checksum does not match")
    except (OSError, SafetensorError, ValueError) as error:
        log.warning("%s: cannot be read (%s); recomputing it", file, error)
        return []
    return scores


def _write(file: Path, made_by: str, scores: list[np.ndarray]) -> None:
    partial = file.with_name(file.name + ".partial")
    tensors = {str(place): torch.from_numpy(array) for place, array in enumerate(scores)}
    try:
        save_file(tensors, partial, metadata={"made_by": made_by, "scores": _digest(scores)})
        partial.replace(file)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise UserError(
            f"{file}: cannot be written ({error}); free some space or move the existing file, then --resume"
        ) from error


def _digest(arrays: Iterable[np.ndarray | None]) -> str:
    """A digest of types, shapes and values."""
    digest = hashlib.sha256()
    for array in arrays:
        if array is not None:
            digest.update(f"{array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()
