"""Where everything lies when matrices are cut over ranks. Each table answers one question:

    WEIGHTS_ON_TENSOR      where does a weight lie on the `tensor` axis?
    WEIGHTS_ON_DATA        and on the axes of data and context, where no FSDP holds it?
    OPERATORS              where does an operator want its inputs, and leave its result and the inputs' gradients?
    PLAIN_TENSORS          how does a tensor lie that is no DTensor, as it comes from outside of the model?

The placements are DTensor's: `Shard(d)` cuts dimension d, `Replicate` copies, `Partial` is a sum that is still to be
made. On the `tensor` axis (arXiv 1909.08053, with the sequence parallelism of arXiv 2205.05198):

    tokens ─ embedding ─> hidden Shard(0) ─ norm ─> Replicate ─ column ─> heads Shard(1) ─ row ─> hidden Shard(0)

so between the blocks' halves each rank holds its share of the tokens, and within them its share of the heads and of the
feed-forward's features. Two collectives per half: the norm's result is gathered, the row product's
sums are exchanged, so that each rank has those of its tokens.

A norm's weight `[dim]` as an example, with `full_dtensor` on the axes (context, tensor):

    at rest     (Shard(0), Replicate)     WEIGHTS_ON_DATA[COPY], WEIGHTS_ON_TENSOR[family]["norm.weight"]
    read as     (Replicate, Replicate)    the rules' `inputs`: redistributing it gathers over context
    gradient    (Partial, Partial)        the rules' `gradients`: each rank has seen its own tokens only
    comes back  (Shard(0), Replicate)     redistributing backwards: reduce-scatter over context, all-reduce over tensor

Under FSDP the context axis is FSDP's, which gathers the weight and reduce-scatters its gradient; what is left is
(Replicate) at rest and as read. Redistributing that moves nothing, but its backward is what turns the gradient's
(Partial) into (Replicate), so it is made all the same (`operators.summed_in_backward`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

ROWS, COLUMNS, COPY, SUM = Shard(0), Shard(1), Replicate(), Partial()

# A parameter's place on the tensor axis, by its name without the layer. A weight is [out, in]: a column product cuts
# its outputs (ROWS), a row product its inputs (COLUMNS).
LLAMA3: dict[str, Placement] = {
    "embed_tokens.weight": ROWS,
    "input_layernorm.weight": COPY,
    "self_attn.q_proj.weight": ROWS,
    "self_attn.k_proj.weight": ROWS,
    "self_attn.v_proj.weight": ROWS,
    "self_attn.o_proj.weight": COLUMNS,
    "post_attention_layernorm.weight": COPY,
    "mlp.gate_proj.weight": ROWS,
    "mlp.up_proj.weight": ROWS,
    "mlp.down_proj.weight": COLUMNS,
    "norm.weight": COPY,
    "lm_head.weight": ROWS,
}
QWEN3: dict[str, Placement] = LLAMA3 | {"self_attn.q_norm.weight": COPY, "self_attn.k_norm.weight": COPY}
WEIGHTS_ON_TENSOR = {"llama3": LLAMA3, "qwen3": QWEN3}


# Where weights also lie when no FSDP holds them (`full_dtensor`): cut over the ranks that see different tokens, along
# the dimension that the tensor axis leaves whole, and gathered by the operators, whose rules ask for copies.
WEIGHTS_ON_DATA: dict[Placement, Placement] = {ROWS: COLUMNS, COLUMNS: ROWS, COPY: ROWS}


@dataclass(frozen=True)
class Rule:
    """An operator on one axis of the mesh, in the manner of DTensor's `local_map`."""

    inputs: tuple[Placement, ...]
    """Of its tensors, as the operator reads them; they are redistributed where they lie otherwise."""
    gradients: tuple[Placement, ...]
    """Of the inputs' gradients, as the operator's own backward makes them from one rank's part."""
    output: Placement
    """Of the result, as the operator makes it."""
    then: Placement | None = None
    """Where the result is brought at once; None: it stays."""

    @property
    def result(self) -> Placement:
        return self.then or self.output


TENSOR = {
    "embedding": Rule((COPY, ROWS), (COPY, ROWS), SUM, then=ROWS),
    # Three products read what a norm makes: it is gathered once for all of them, and so are their gradients summed.
    "norm of tokens": Rule((ROWS, COPY), (ROWS, SUM), ROWS, then=COPY),
    "norm of heads": Rule((COLUMNS, COPY), (COLUMNS, SUM), COLUMNS),
    "column product": Rule((COPY, ROWS), (SUM, ROWS), COLUMNS),
    # Its sum is made within the operator, in a tree (`row_product`).
    "row product": Rule((COLUMNS, COLUMNS), (COLUMNS, COLUMNS), ROWS),
    "rotary": Rule((COLUMNS, COPY, COPY), (COLUMNS, COPY, COPY), COLUMNS),
    "silu_mul": Rule((COLUMNS, COLUMNS), (COLUMNS, COLUMNS), COLUMNS),
    "attend": Rule((COLUMNS, COLUMNS, COLUMNS), (COLUMNS, COLUMNS, COLUMNS), COLUMNS),
}
_WEIGHTED = Rule((ROWS, COPY), (ROWS, SUM), ROWS)
# Where ranks hold different tokens, every operator works on its own, and weights are gathered for it.
TOKENS = {
    "embedding": _WEIGHTED,
    "norm of tokens": _WEIGHTED,
    "norm of heads": _WEIGHTED,
    "column product": _WEIGHTED,
    "row product": _WEIGHTED,
    "rotary": Rule((ROWS, ROWS, ROWS), (ROWS, ROWS, ROWS), ROWS),
    "silu_mul": Rule((ROWS, ROWS), (ROWS, ROWS), ROWS),
    # An attention over the context axis fetches the other ranks' keys and values by itself.
    "attend": Rule((ROWS, ROWS, ROWS), (ROWS, ROWS, ROWS), ROWS),
}
OPERATORS = {"data_replicate": TOKENS, "data_shard": TOKENS, "context": TOKENS, "tensor": TENSOR}
"""An operator's rule on each axis of the mesh."""
PLAIN_TENSORS = {"data_replicate": ROWS, "data_shard": ROWS, "context": ROWS, "tensor": COPY}
"""How plain tensors come from outside of the model: tokens, and the tables of rotary angles."""


def parameter_placement(family: str, name: str) -> Placement:
    """Of the parameter `name`, such as `layers.3.mlp.up_proj.weight`, on the tensor axis. KeyError if not declared."""
    parts = name.split(".")
    return WEIGHTS_ON_TENSOR[family][".".join(parts[2:] if parts[0] == "layers" else parts)]
