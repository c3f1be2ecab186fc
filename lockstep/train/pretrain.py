"""A next-token run on text, top to bottom."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from lockstep.config import PretrainConfig, to_toml, validate
from lockstep.data import (
    ByteTokenizer,
    TextSource,
    Tokenizer,
    TokenLoader,
    load_tokenizer,
    tokenize_documents,
    train_bpe,
)
from lockstep.errors import UserError
from lockstep.model import Decoder, build_model, load_model, preset
from lockstep.observe import MetricsWriter, Progress, open_run, write_report
from lockstep.parallel import apply_compile
from lockstep.train.packing import PackedRow, pack, split_by_tokens, target_log_probs
from lockstep.train.trainer import Trainer


def pretrain(config: PretrainConfig, documents: Iterable[str] | None = None, progress: Progress | None = None) -> Path:
    """Trains `config.model` on `config.data`, or on `documents` where given; returns the run's folder.

    Raises UserError for bad input.
    """
    validate(config)
    source = TextSource(config.data, config.template, config.skip_bad_lines) if documents is None else documents
    tokenizer = make_tokenizer(config, source)
    model = make_model(config, tokenizer)
    apply_compile(model, config.compile)
    corpus = tokenize_documents(source, tokenizer)
    loader = TokenLoader(corpus, config.sequence_length, config.tokens_per_step, config.seed)
    trainer = Trainer(model, config.train, config.steps)

    run = open_run(config.output, to_toml(config), resume=config.resume, overwrite=config.overwrite)
    start = 0
    if config.resume and (checkpoint := run.newest_checkpoint()):
        state = trainer.resume(checkpoint)
        start, loader.position = int(state["step"]), int(state["position"])
    if config.resume:
        run.truncate(start)

    began = time.perf_counter()
    loss = float("nan")
    with (
        MetricsWriter(run.path, config.tensorboard) as metrics_file,
        progress or Progress("pretrain", config.steps) as bar,
    ):
        bar.advance(start)
        for step in range(start + 1, config.steps + 1):
            step_began = time.perf_counter()
            sequences = loader.next()
            tokens = sum(map(len, sequences))
            parts = split_by_tokens([len(s) for s in sequences], config.train.tokens_per_microbatch)
            next_token_loss = NextTokenLoss(tokens - len(sequences))
            metrics = trainer.step([pack(sequences[part]) for part in parts], next_token_loss)
            seconds = time.perf_counter() - step_began
            loss = metrics["loss"]
            metrics |= {
                "tokens": tokens,
                "tokens_per_second": tokens / seconds,
                # 2 multiply-adds a weight forward, 4 backward; attention's own products are left out.
                "tflops": 6 * model.config.num_parameters * tokens / seconds / 1e12,
                "memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
                "epoch": loader.epoch,
                "time/step": seconds,
            }
            if config.skip_bad_lines and isinstance(source, TextSource):
                metrics["data/skipped_lines"] = source.skipped
            metrics_file.write(step, metrics)
            if step == config.steps or (config.checkpoint_every and step % config.checkpoint_every == 0):
                trainer.save(run.checkpoint_path(step), tokenizer, {"step": step, "position": loader.position})
            bar.advance(loss=loss, tokens_per_s=metrics["tokens_per_second"])

    summary = {"loss": loss, "seconds": {"pretrain": time.perf_counter() - began}}
    (run.path / "summary.json").write_text(json.dumps(summary, indent=1))
    write_report(run.path, f"Pretraining {config.model}")
    return run.path


class NextTokenLoss:
    """Mean cross-entropy over a step's targets, a micro-batch's share at a time."""

    def __init__(self, targets: int):
        self.targets = targets

    def __call__(self, model: Decoder, row: PackedRow) -> Tensor:
        log_probs, _ = target_log_probs(model, row)
        return -log_probs.sum() / self.targets


def make_tokenizer(config: PretrainConfig, source: Iterable[str]) -> Tokenizer:
    """`byte`, `bpe:VOCABULARY` trained on the source, or a folder's; a model folder brings its own by default."""
    if config.tokenizer == "byte":
        return load_tokenizer(config.model) if Path(config.model).is_dir() else ByteTokenizer()
    kind, _, size = config.tokenizer.partition(":")
    if kind == "bpe":
        if not size.isdigit():
            raise UserError(f'tokenizer "{config.tokenizer}": give the vocabulary as bpe:2048')
        return train_bpe(source, int(size))
    return load_tokenizer(config.tokenizer)


def make_model(config: PretrainConfig, tokenizer: Tokenizer) -> Decoder:
    """A preset with fresh weights and the tokenizer's vocabulary, or a folder's weights."""
    if Path(config.model).is_dir():
        model = load_model(config.model, dtype=config.dtype)
        if tokenizer.vocab_size > model.config.vocab_size:
            raise UserError(
                f"the tokenizer has {tokenizer.vocab_size} tokens, but {config.model} only {model.config.vocab_size}"
            )
        return model
    eos = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    return build_model(preset(config.model, tokenizer.vocab_size, eos), dtype=config.dtype, seed=config.seed)
