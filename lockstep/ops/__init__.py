"""The row-invariant operators: the bits of a row never depend on the other rows.

Each has a plain PyTorch form, which defines it, a compiled CPU form, and a Triton form for NVIDIA GPUs. This package
only imports torch and numpy, and triton for CUDA tensors.
"""

from lockstep.ops.activation import clamped_swiglu, gelu_mul, relu_squared, sigmoid_mul, silu_mul
from lockstep.ops.attention import BLOCK, PAGE, Attention, KVCache, PagedAttention
from lockstep.ops.attention_reference import Terms
from lockstep.ops.bias import add_bias, add_grouped_bias
from lockstep.ops.branches import branch_norm, every_row, fused_linear, parts_of
from lockstep.ops.cache_codes import cache_rounded
from lockstep.ops.delta_cache import NO_STATE, DeltaCache, DeltaSizes, DeltaStep
from lockstep.ops.delta_reference import CHUNK, DeltaTerms
from lockstep.ops.elementary import exp, log, log_sigmoid, sigmoid
from lockstep.ops.embedding import embedding
from lockstep.ops.expert_load import ExpertLoad, counted_rows
from lockstep.ops.experts import clamped_experts, combine, dispatch, experts, order_by_expert
from lockstep.ops.first_calls import call_once
from lockstep.ops.float8_products import float8_linear
from lockstep.ops.formats import FORMATS, NONE, Format, formatted_linear
from lockstep.ops.forms import FORMS, own_part, own_rows
from lockstep.ops.grouped_linear import grouped_linear
from lockstep.ops.head_terms import HeadTerms
from lockstep.ops.heads import head_linear
from lockstep.ops.heads_norm import heads_norm
from lockstep.ops.integer_linear import int4_linear, int8_linear
from lockstep.ops.linear import linear, text_scores
from lockstep.ops.logprobs import inverse_temperature, log_prob_sum, logits_log_probs, token_log_probs
from lockstep.ops.low_rank import LowRank, add_low_rank
from lockstep.ops.native import ARITHMETICS, arithmetic, instruction_set, is_emulated, set_arithmetic
from lockstep.ops.norm import rms_norm
from lockstep.ops.optimizer import adamw_factors, adamw_step
from lockstep.ops.packed_attention import PackedAttention, PieceAttention
from lockstep.ops.packed_weights import FEW_ROWS, PackedWeight, PackedWeights
from lockstep.ops.rotary import rotary
from lockstep.ops.routes import ReplayedRoutes, note_routes, recorded_routes, replayed_routes
from lockstep.ops.routing import Routing, route, router_logits
from lockstep.ops.row_gate import row_gate
from lockstep.ops.sampling import draw, draw_scaled, drawing, ranked_log_probs, sample, top_log_probs, uniforms
from lockstep.ops.shared_attention import SharedPrefixAttention
from lockstep.ops.softcap import softcap
from lockstep.ops.step_graph import Arena, StepGraph, Unrecordable, unrecorded
from lockstep.ops.sums import EXACT_BITS, integer_squares, sum_of_squares, total

__all__ = [
    "ARITHMETICS", "BLOCK", "CHUNK", "EXACT_BITS", "FEW_ROWS", "FORMATS", "FORMS", "NONE", "NO_STATE", "PAGE", "Arena",
    "Attention", "DeltaCache", "DeltaSizes", "DeltaStep", "DeltaTerms", "ExpertLoad", "Format", "HeadTerms", "KVCache",
    "LowRank", "PackedAttention", "PackedWeight", "PackedWeights", "PagedAttention", "PieceAttention", "ReplayedRoutes",
    "Routing", "SharedPrefixAttention", "StepGraph", "Terms", "Unrecordable", "adamw_factors", "adamw_step", "add_bias",
    "add_grouped_bias", "add_low_rank", "arithmetic", "branch_norm", "cache_rounded", "clamped_experts",
    "clamped_swiglu", "combine", "counted_rows", "dispatch", "draw", "draw_scaled", "drawing", "embedding", "every_row",
    "exp", "experts", "float8_linear", "formatted_linear", "fused_linear", "gelu_mul", "grouped_linear", "head_linear",
    "heads_norm", "instruction_set", "int4_linear", "int8_linear", "integer_squares", "inverse_temperature",
    "is_emulated", "linear", "log", "log_prob_sum", "log_sigmoid", "logits_log_probs", "note_routes", "order_by_expert",
    "own_part", "own_rows", "parts_of", "ranked_log_probs", "recorded_routes", "relu_squared", "replayed_routes",
    "rms_norm", "rotary", "route", "router_logits", "row_gate", "sample", "set_arithmetic", "sigmoid", "sigmoid_mul",
    "silu_mul", "softcap", "sum_of_squares", "text_scores", "token_log_probs", "top_log_probs", "total", "uniforms",
    "unrecorded",
]  # fmt: skip

call_once()
