"""Where weights lie when they are cut over ranks. Each table answers one question:

    WEIGHTS_ON_TENSOR      where does a weight lie on the `tensor` axis?
    WEIGHTS_ON_DATA        and on the axes of data and context, where no FSDP holds it?

The placements are DTensor's: `Shard(d)` cuts dimension d, `Replicate` copies, `Partial` is a sum that is still to be
made. Activations are plain tensors, which lie on the `tensor` axis by where in a block they are (arXiv 1909.08053, with
the sequence parallelism of arXiv 2205.05198):

    tokens ─ embedding ─> hidden, rows cut ─ norm ─> all rows ─ column ─> heads cut ─ row ─> hidden, rows cut

so between the blocks' halves each rank holds its share of the tokens, and within them its share of the heads and of the
feed-forward's features. Two collectives per half: the norm's result is gathered, the row product's sums are exchanged,
so that each rank has those of its tokens. On the axes of data and context a rank has its own tokens everywhere.

An operator reads a weight as it lies on the `tensor` axis, and whole on all others (`operators.own_part`). A norm's
weight `[dim]` as an example, with `full_dtensor` on the axes (context, tensor):

    at rest     (Shard(0), Replicate)     WEIGHTS_ON_DATA[COPY], WEIGHTS_ON_TENSOR[family]["norm.weight"]
    read as     (Replicate, Replicate)    redistributing it gathers over context
    gradient    (Partial, Partial)        each rank has seen its own tokens only
    comes back  (Shard(0), Replicate)     redistributing backwards: reduce-scatter over context, all-reduce over tensor

Under FSDP the context axis is FSDP's, which gathers the weight and reduce-scatters its gradient; what is left is
(Replicate) at rest and as read. Redistributing that moves nothing, but its backward is what turns the gradient's
(Partial) into (Replicate), so it is made all the same.
"""

from __future__ import annotations

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from lockstep.model import ModelConfig

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
# the dimension that the tensor axis leaves whole, and gathered by the operators.
WEIGHTS_ON_DATA: dict[Placement, Placement] = {ROWS: COLUMNS, COLUMNS: ROWS, COPY: ROWS}


def parameter_placement(shape: ModelConfig, name: str, ranks: int) -> Placement:
    """Of the parameter `name`, such as `layers.3.mlp.up_proj.weight`, on a tensor axis. KeyError if not declared.

    Fewer key-value heads than ranks are not cut: all compute them all, and attend with one (`tensor.OneKeyValueHead`).
    """
    parts = name.split(".")
    kind = ".".join(parts[2:] if parts[0] == "layers" else parts)
    if ranks > shape.num_kv_heads and kind in ("self_attn.k_proj.weight", "self_attn.v_proj.weight"):
        return COPY
    return WEIGHTS_ON_TENSOR[shape.family][kind]
