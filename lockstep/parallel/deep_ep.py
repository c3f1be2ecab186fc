"""DeepEP instead of the all-to-all for sending rows between the ranks that share experts: an option on GPUs.

https://github.com/deepseek-ai/DeepEP, 1.2 or later: `dispatch` of the normal mode, within one host, in both directions.

The bits are those of the all-to-all. `dispatch` copies rows; they arrive ordered by source rank, and within a rank in
the order they were sent: a receiver's offsets are sums of counts, and each channel takes consecutive rows (DeepEP's
csrc/kernels/intranode.cu). Its `combine` is not used: it adds a token's rows in the order of ranks, not of the token's
experts, and adds even a single row to 0.0, which turns -0.0 into 0.0. So rows also return by `dispatch`, and
`ops.experts.combine` weights and adds them. The first exchange of each width is made both ways and compared.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import UserError
from lockstep.ops import native
from lockstep.parallel.exchange import InFlight, begin_all_to_all
from lockstep.parallel.messages import from_all

PATIENCE = timedelta(seconds=60)
"""Timeout of DeepEP's exchange of addresses, if a rank fails to create its buffer."""
WIDEST = 16 * 1024 - 16
"""The most bytes per row: its kernels pass a row through 16 KiB of shared memory; more is a trap, which cannot be
caught."""

Result = TypeVar("Result")

_requested = False
_buffers: dict[tuple[str, int], Any] = {}
"""Buffers by a group's name and the bytes per row."""


def use_deep_ep(requested: bool) -> None:
    """Sets whether this process sends rows with DeepEP from now on; see `ParallelConfig.expert_dispatcher`."""
    global _requested
    _requested = requested


def close_buffers() -> None:
    """Drops all buffers; call before their groups are destroyed. Their GPU memory is freed when the process ends."""
    _buffers.clear()


def begin_exchange(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> InFlight:
    """As `begin_all_to_all`, but with DeepEP if requested.

    Raises UserError on all ranks of `group` if one of them cannot use it, and RuntimeError on one where an exchange
    fails.
    """
    if not _requested or native.is_pretending():
        return begin_all_to_all(rows, sent, received, group)
    key = group.group_name, rows.shape[1] * rows.element_size()
    if key in _buffers:
        return _dispatch(_buffers[key], rows, sent, received)
    _buffers[key] = _open(key[1], group)
    in_flight = _dispatch(_buffers[key], rows, sent, received)
    expected = begin_all_to_all(rows, sent, received, group).wait()
    if not torch.equal(in_flight.wait().view(torch.int16), expected.view(torch.int16)):
        raise RuntimeError('DeepEP\'s rows differ from those of parallel.expert_dispatcher "all_to_all"; use that')
    return in_flight


def _open(width: int, group: dist.ProcessGroup) -> Any:
    """A DeepEP buffer for rows of `width` bytes."""
    module = _on_all_ranks(lambda: _load(width), group)
    # A separate group for DeepEP's messages: a rank that fails before them sends other messages next.
    ranks = dist.get_process_group_ranks(group)
    local = dist.new_group(ranks, timeout=PATIENCE, backend="gloo", use_local_synchronization=True)
    return _on_all_ranks(lambda: _buffer(module, width, local), group)


def _load(width: int) -> Any:
    if width > WIDEST:
        raise ValueError(f"rows of {width} bytes are wider than the {WIDEST} that its kernels support")
    return importlib.import_module("deep_ep")


def _buffer(module: Any, width: int, group: Any) -> Any:
    nbytes = module.Buffer.get_dispatch_config(group.size()).get_nvl_buffer_size_hint(width, group.size())
    # explicitly_destroy: otherwise the destructor waits for the other ranks, which may have no buffer.
    return module.Buffer(group, nbytes, explicitly_destroy=True)


def _dispatch(buffer: Any, rows: Tensor, sent: list[int], received: list[int]) -> InFlight:
    counts = torch.tensor(sent, dtype=torch.int32, device=rows.device)
    destinations = torch.eye(len(sent), dtype=torch.bool, device=rows.device)
    destinations = destinations.repeat_interleave(counts, 0, output_size=len(rows))
    words = rows.contiguous().view(torch.bfloat16)  # the dtype that DeepEP supports; it copies bytes
    arrived, *_, event = buffer.dispatch(
        words,
        num_tokens_per_rank=counts,
        is_token_in_rank=destinations,
        num_tokens_per_expert=counts,  # one expert per rank, as far as DeepEP is concerned
        async_finish=True,
    )
    if len(arrived) != sum(received):
        raise RuntimeError(f"DeepEP brought {len(arrived)} of {sum(received)} rows")
    return InFlight(arrived.view(rows.dtype), words, event.current_stream_wait)


def _on_all_ranks(attempt: Callable[[], Result], group: dist.ProcessGroup) -> Result:
    """The result of `attempt` if it succeeds on all ranks of `group`; else raises UserError on all of them."""
    result, problem = None, ""
    try:
        result = attempt()
    except Exception as error:  # of whatever the package raises
        problem = f"{type(error).__name__}: {error}"
    ranks_of: dict[str, list[int]] = {}
    for rank, each in zip(dist.get_process_group_ranks(group), from_all(problem, group)):
        ranks_of.setdefault(each, []).append(rank)
    if causes := "; ".join(f"on ranks {ranks}: {each}" for each, ranks in ranks_of.items() if each):
        raise UserError(f'parallel.expert_dispatcher "deep_ep" cannot be used ({causes}); give "all_to_all"')
    assert result is not None
    return result
