"""Latent attention: all heads attend to one compressed key per token (arXiv 2405.04434, section 2.1).

A token's latent c gives head h the key `U_h c` and the value `V_h c`. Neither is computed: a query is multiplied with
the latent as `U_hᵀ q`, and the values of an attended latent are `V_h` times it. The trainer uses this absorbed form
too, so its bits are the generator's. Per token, the cache has the latent and one rotated key for all heads; both
together are the key, and the latent is the value.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lockstep import ops
from lockstep.model.config import ModelConfig
from lockstep.model.layers import Projection, Weight
from lockstep.model.rotary import softmax_scale

LATENT_EPS = 1e-6
"""Epsilon of the norms of compressed values, independent of the other norms'."""


class LatentAttention(nn.Module):
    """Projections to queries over the latent and to the latent, and the output projection of the attended values."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str | torch.device):
        super().__init__()
        assert config.latent is not None
        self.latent = latent = config.latent
        self.scale = softmax_scale(config)
        heads = config.num_heads
        queries = heads * (latent.nope_dim + latent.rope_dim)
        if latent.q_rank:
            self.q_a_proj = Projection(latent.q_rank, config.dim, dtype=dtype, device=device)
            self.q_a_layernorm = Weight(latent.q_rank, dtype=dtype, device=device)
            self.q_b_proj = Projection(queries, latent.q_rank, dtype=dtype, device=device)
        else:
            self.q_proj = Projection(queries, config.dim, dtype=dtype, device=device)
        self.kv_a_proj_with_mqa = Projection(latent.key_dim, config.dim, dtype=dtype, device=device)
        self.kv_a_layernorm = Weight(latent.kv_rank, dtype=dtype, device=device)
        rows = heads * (latent.nope_dim + latent.value_dim)
        self.kv_b_proj = Weight(rows, latent.kv_rank, dtype=dtype, device=device)
        self.o_proj = Projection(config.dim, heads * latent.value_dim, dtype=dtype, device=device)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Queries `[tokens, heads, key_dim]`, and the one key `[tokens, 1, key_dim]`, which is also the value; no
        gate."""
        latent = self.latent
        queries = self._queries(x).view(x.shape[0], -1, latent.nope_dim + latent.rope_dim)
        absorbed = ops.head_linear(
            queries[..., : latent.nope_dim], self.kv_b_proj.weight, 0, latent.nope_dim, across=True
        )
        compressed = self.kv_a_proj_with_mqa.project(x)[:, None]
        key = _normed(compressed[..., : latent.kv_rank], self.kv_a_layernorm.weight)
        rotated = self._rotated(queries[..., latent.nope_dim :], cos, sin)
        rotated_key = self._rotated(compressed[..., latent.kv_rank :], cos, sin)
        return torch.cat((absorbed, rotated), -1), torch.cat((key, rotated_key), -1), None, None

    def terms(self) -> ops.Terms:
        """The scale of the scores, since the width of queries and keys is not that of the heads they represent."""
        return ops.Terms(scale=self.scale)

    def values(self, attended: Tensor, gate: Tensor | None) -> Tensor:
        """Each head's attended values, `[tokens, heads · value_dim]`."""
        latent = self.latent
        attended = attended[..., : latent.kv_rank]
        stop = latent.nope_dim + latent.value_dim
        return ops.head_linear(attended, self.kv_b_proj.weight, latent.nope_dim, stop).flatten(1)

    def _queries(self, x: Tensor) -> Tensor:
        if not self.latent.q_rank:
            return self.q_proj.project(x)
        compressed = self.q_a_proj.project(x)[:, None]
        return self.q_b_proj.project(_normed(compressed, self.q_a_layernorm.weight)[:, 0])

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # Scores do not depend on the order of features if queries and keys have the same.
        if self.latent.interleaved:
            x = torch.cat((x[..., 0::2], x[..., 1::2]), -1)
        return ops.rotary(x, cos, sin)


def _normed(compressed: Tensor, weight: Tensor) -> Tensor:
    """Norm of `[tokens, 1, features]`: a single head, so that tensor ranks, which have all tokens, do not split it."""
    return ops.rms_norm(compressed, weight, LATENT_EPS)
