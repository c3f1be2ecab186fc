"""Placements of sharded weights. Each table answers one question:

    WEIGHTS_ON_TENSOR      how is a weight placed on the `tensor` axis?
    WEIGHTS_ON_DATA        and on the data and context axes, without FSDP?

The placements are DTensor's: `Shard(d)` splits dimension d, `Replicate` copies, `Partial` is a pending sum. Activations
are plain tensors, whose placement on the `tensor` axis follows from their position in a block (arXiv 1909.08053, with
the sequence parallelism of arXiv 2205.05198). Between the halves of a block each rank has its share of the tokens; a
norm's result is all-gathered, and within a half each rank has its share of the heads or of the feed-forward features;
the row product's sums are reduce-scattered. On the data and context axes, a rank has its tokens everywhere.

A mixture's experts are never split. Each rank of the tensor axis has some of them, and sends the rows of its share of
the tokens to the ranks that have their experts (`experts`). With `parallel.expert`, these include ranks with other
tokens, and the experts are on a separate mesh (`World.expert_mesh`).

An operator reads a weight as placed on the `tensor` axis, and replicated on all others (`operators.own_part`). Where
FSDP has not gathered it, redistributing it does; the redistribution's backward reduce-scatters the gradient over ranks
with other tokens, and sums that of a replicated weight, such as a norm's, over the tensor axis.
"""

from __future__ import annotations

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from lockstep.model import ModelConfig

ROWS, COLUMNS, COPY, SUM = Shard(0), Shard(1), Replicate(), Partial()

# A parameter's placement on the tensor axis, by its name without the layer. A weight is [out, in]: a column product
# splits its outputs (ROWS), a row product its inputs (COLUMNS).
WEIGHTS_ON_TENSOR: dict[str, Placement] = {
    "embed_tokens.weight": ROWS,
    "lm_head.weight": ROWS,
    "score.weight": COPY,
    "self_attn.q_proj.weight": ROWS,
    "self_attn.k_proj.weight": ROWS,
    "self_attn.v_proj.weight": ROWS,
    "self_attn.o_proj.weight": COLUMNS,
    "mlp.gate_proj.weight": ROWS,
    "mlp.up_proj.weight": ROWS,
    "mlp.down_proj.weight": COLUMNS,
    # Biases, if any, are placed like the outputs they are added to; a row product's bias is added once, to the sum.
    "self_attn.q_proj.bias": ROWS,
    "self_attn.k_proj.bias": ROWS,
    "self_attn.v_proj.bias": ROWS,
    "self_attn.o_proj.bias": COPY,
    "self_attn.sinks": ROWS,
    "mlp.gate_proj.bias": ROWS,
    "mlp.up_proj.bias": ROWS,
    "mlp.down_proj.bias": COPY,
    # Several projections in one weight: a rank computes its outputs of each.
    "self_attn.qkv_proj.weight": COPY,
    "mlp.gate_up_proj.weight": COPY,
    # Latent attention: the compressed states, and the shared key made from them, are replicated; heads are split.
    "self_attn.q_a_proj.weight": COPY,
    "self_attn.q_b_proj.weight": ROWS,
    "self_attn.kv_a_proj_with_mqa.weight": COPY,
    "self_attn.kv_b_proj.weight": ROWS,
    # Linear attention: key heads are split, and with them their value heads. The convolution's channels are queries,
    # keys and values, of each of which a rank has some.
    "linear_attn.in_proj_qkv.weight": COPY,
    "linear_attn.in_proj_z.weight": ROWS,
    "linear_attn.in_proj_b.weight": ROWS,
    "linear_attn.in_proj_a.weight": ROWS,
    "linear_attn.in_proj_qkvz.weight": ROWS,
    "linear_attn.in_proj_ba.weight": ROWS,
    "linear_attn.conv1d.weight": COPY,
    "linear_attn.A_log": ROWS,
    "linear_attn.dt_bias": ROWS,
    "linear_attn.out_proj.weight": COLUMNS,
    # A mixture's experts, [experts, out, in], are each on one rank.
    "mlp.gate.weight": COPY,
    "mlp.gate.e_score_correction_bias": COPY,
    "mlp.experts.gate_proj.weight": ROWS,
    "mlp.experts.up_proj.weight": ROWS,
    "mlp.experts.down_proj.weight": ROWS,
    "mlp.shared_experts.gate_proj.weight": ROWS,
    "mlp.shared_experts.up_proj.weight": ROWS,
    "mlp.shared_experts.down_proj.weight": COLUMNS,
    "mlp.shared_expert.gate_proj.weight": ROWS,
    "mlp.shared_expert.up_proj.weight": ROWS,
    "mlp.shared_expert.down_proj.weight": COLUMNS,
    "mlp.shared_expert_gate.weight": COPY,
    # gpt-oss's.
    "mlp.router.weight": COPY,
    "mlp.router.bias": COPY,
    "mlp.experts.gate_up_proj": ROWS,
    "mlp.experts.gate_up_proj_bias": ROWS,
    "mlp.experts.down_proj": ROWS,
    "mlp.experts.down_proj_bias": ROWS,
}


# Additional placements without FSDP (`full_dtensor`): sharded over the ranks that see different tokens, along the
# dimension that the tensor axis does not split, and gathered by the operators.
WEIGHTS_ON_DATA: dict[Placement, Placement] = {ROWS: COLUMNS, COLUMNS: ROWS, COPY: ROWS}


def parameter_placement(shape: ModelConfig, name: str, ranks: int) -> Placement:
    """Placement on the tensor axis of a parameter such as `layers.3.mlp.up_proj.weight`; norms are replicated. Raises
    KeyError for an unknown name.

    Fewer key-value heads than ranks are replicated: each rank computes all, and attends with one.
    """
    parts = name.split(".")
    kind = ".".join(parts[2:] if parts[0] == "layers" else parts)
    if ranks > shape.num_kv_heads and kind.startswith(("self_attn.k_proj.", "self_attn.v_proj.")):
        return COPY
    if kind.endswith("norm.weight") or kind.removesuffix(".weight") in shape.norms:
        return COPY
    return WEIGHTS_ON_TENSOR[kind]
