"""The layouts that are compared with one process; docs/parallelism.md lists them."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.config import ParallelConfig


@dataclass(frozen=True)
class Layout:
    """A combination, and the run that tests it."""

    ranks: int
    parallel: ParallelConfig
    model: str = "qwen3:micro"
    dtype: str = "float32"
    steps: int = 20
    layers: int = 4
    quick: bool = False
    """Whether `make test` has it too, with few steps; it has others with train.deterministic_layout, bit for bit."""

    @property
    def tied(self) -> bool:
        """Whether embedding and head are one weight."""
        return self.model.startswith("qwen3")

    @property
    def vocab(self) -> int:
        """Of llama3 one that no degree divides."""
        return 258 if self.tied else 259

    @property
    def name(self) -> str:
        """Its degrees, as the table has them."""
        p = self.parallel
        shard = p.data_shard
        if shard == -1:
            shard = self.ranks // (p.data_replicate * p.context * p.tensor * p.pipeline)
        data = {(True, False): "DDP", (True, True): "HSDP", (False, True): "FSDP"}.get(
            (p.data_replicate > 1, shard > 1), ""
        )
        degrees = {
            data: f"{p.data_replicate} x {shard}" if data == "HSDP" else str(p.data_replicate * shard),
            "expert": str(p.expert),
            "context": str(p.context),
            "tensor": str(p.tensor),
            f"pipeline ({p.pipeline_schedule})": str(p.pipeline),
        }
        parts = [f"{kind} {degree}" for kind, degree in degrees.items() if kind and degree != "1"]
        return ("full DTensor: " if p.full_dtensor else "") + ", ".join(parts)


P = ParallelConfig
LAYOUTS = [
    Layout(2, P()),
    Layout(2, P(bucket_mib=0.0), dtype="bfloat16", quick=True),
    Layout(2, P(data_replicate=2, bucket_mib=1.6)),
    Layout(4, P(data_replicate=2), "llama3:micro"),
    Layout(2, P(tensor=2), "llama3:micro"),
    Layout(2, P(tensor=2), dtype="bfloat16", steps=5),
    Layout(4, P(tensor=2)),
    Layout(2, P(tensor=2, reduction_chunks=4), "llama3:micro", steps=5),
    # More ranks than key-value heads.
    Layout(4, P(tensor=4), steps=5),
    Layout(2, P(context=2)),
    Layout(4, P(context=2), "llama3:micro"),
    Layout(4, P(context=4), steps=5),
    Layout(4, P(context=2, data_replicate=2, bucket_mib=0.0), steps=5, quick=True),
    Layout(4, P(context=2, tensor=2), steps=5),
    Layout(2, P(pipeline=2, pipeline_schedule="gpipe"), "llama3:micro"),
    Layout(2, P(pipeline=2, pipeline_schedule="1f1b")),
    Layout(2, P(pipeline=2, pipeline_schedule="interleaved")),
    Layout(2, P(pipeline=2, pipeline_schedule="zbv")),
    Layout(2, P(pipeline=2, pipeline_schedule="zbv"), dtype="bfloat16", steps=5),
    Layout(2, P(pipeline=2, pipeline_schedule="dualpipev"), quick=True),
    Layout(4, P(pipeline=2, pipeline_schedule="1f1b")),
    Layout(4, P(pipeline=2, pipeline_schedule="interleaved"), "llama3:micro", steps=5),
    Layout(4, P(pipeline=2, tensor=2, pipeline_schedule="zbv"), steps=5, quick=True),
    Layout(4, P(pipeline=2, context=2, pipeline_schedule="dualpipev"), steps=5),
    Layout(4, P(context=2, tensor=2, full_dtensor=True), "llama3:micro", quick=True),
    Layout(4, P(data_replicate=2, data_shard=2, full_dtensor=True, reduction_chunks=4), "llama3:micro", steps=5),
    Layout(2, P(), "qwen3_moe:micro", steps=5),
    Layout(2, P(tensor=2), "qwen3_moe:micro", dtype="bfloat16", steps=5),
    Layout(2, P(context=2), "qwen3_moe:micro", steps=5),
    Layout(4, P(tensor=2, pipeline=2), "qwen3_moe:micro", steps=5),
    Layout(2, P(expert=2), "qwen3_moe:micro", dtype="bfloat16", steps=5),
    Layout(2, P(context=2, expert=2), "qwen3_moe:micro", steps=5),
    Layout(4, P(expert=2), "qwen3_moe:micro", steps=5),
    Layout(4, P(data_replicate=2, expert=2), "qwen3_moe:micro", steps=5),
    Layout(4, P(tensor=2, expert=2), "qwen3_moe:micro", steps=5, quick=True),
    Layout(4, P(pipeline=2, expert=2), "qwen3_moe:micro", steps=5),
    Layout(4, P(context=2, tensor=2, full_dtensor=True), "qwen3_moe:micro", steps=5),
]
