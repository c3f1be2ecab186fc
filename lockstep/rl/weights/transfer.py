"""Weight sync from the trainer's layout to a generator's: shard by shard, never gathered in one place, and verified.

All ranks exchange once which slices of each tensor they have and need; from then on each knows what it sends and
receives. A tensor's checksum is the sum of its parts' (`checksum`), so it is the same in both layouts: the generators
use new weights only if every tensor's checksum is the trainer's. Tensors whose memory a generator shares with the
trainer (`in_place`) are not sent, but their copies on different ranks are still compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import RunStopped
from lockstep.model import Decoder
from lockstep.model.shard import local_values
from lockstep.observe import log
from lockstep.parallel import World
from lockstep.parallel.exchange import gather_rows
from lockstep.parallel.messages import from_all
from lockstep.rl.weights.checksum import checksum
from lockstep.rl.weights.in_place import same_memory
from lockstep.rl.weights.shard_slices import (
    Piece,
    differing,
    first_copies,
    intersection,
    owners_of,
    pieces_between,
    read_slices,
    shard_slice_of,
    view_at,
    volume,
)

BUCKET = 1 << 26
"""Bytes of full tensors that are sent together."""
TRIES = 3
"""Attempts before a damaged transfer ends the run."""


def buckets(model: Decoder, without: Collection[str]) -> Iterator[list[str]]:
    """The names of the model's tensors that are sent together, in order, `without` some."""
    names: list[str] = []
    size = 0
    for name, parameter in model.named_parameters():
        if name in without:
            continue
        nbytes = parameter.numel() * model.dtype.itemsize
        if names and size + nbytes > BUCKET:
            yield names
            names, size = [], 0
        names.append(name)
        size += nbytes
    if names:
        yield names


class WeightTransfer:
    """Copies tensors on the ranks of `world`, in any layout, to `model`, which is sharded over the same ranks.

    All ranks create it, and call its methods, together.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        model: Decoder,
        world: World,
        moved: Callable[[], None] = lambda: None,
        keep: bool = True,
        frozen: Collection[str] = (),
    ):
        """tensors: this rank's, by the model's names; parameters of `model` may share their memory. moved: called after
        each bucket. keep: whether the model keeps its old weights until the new ones have arrived intact. Otherwise new
        weights are received into the same memory, and `drop` may free it until then. frozen: tensors without updates;
        those that are kept are sent once, and from then on only compared."""
        assert world.mesh is not None
        self.tensors, self.model, self.world, self.moved = tensors, model, world, moved
        self.keep = keep
        self.rank = world.rank
        self._sources = {name: shard_slice_of(tensor) for name, tensor in tensors.items()}
        self._targets = {name: shard_slice_of(parameter) for name, parameter in model.named_parameters()}
        self._parts = {name: local_values(parameter.detach()) for name, parameter in model.named_parameters()}
        self._in_place = {n for n, tensor in tensors.items() if same_memory(local_values(tensor), self._parts[n])}
        frozen_here = sorted(tensors.keys() & frozen)
        per_rank = from_all([self._sources, self._targets, sorted(self._in_place), frozen_here])
        owners = owners_of([read_slices(of_rank[0]) for of_rank in per_rank])
        self.target_shards = [read_slices(of_rank[1]) for of_rank in per_rank]
        self.names = list(self._targets)
        self.pieces = {
            name: pieces_between(owners[name], [shards[name] for shards in self.target_shards]) for name in self.names
        }
        """What the ranks send of each tensor, to themselves too."""
        self.in_place_everywhere = set[str](self.names).intersection(*(of_rank[2] for of_rank in per_rank))
        """Tensors whose memory every rank's generator shares with its trainer."""
        frozen_anywhere = set[str]().union(*(of_rank[3] for of_rank in per_rank))
        self._frozen = frozen_anywhere - self.in_place_everywhere if keep else set[str]()
        self._skipped = set[str]()
        """Tensors that have arrived intact and are not sent again."""
        # Of replicated shards, only the first rank's counts in a checksum.
        self._sums_sent = {name for name, part in self._sources.items() if owners[name][part][0] == self.rank}

    def __call__(self, version: int) -> None:
        """Replaces the model's weights by the trainer's, once all new ones have arrived intact.

        Raises RunStopped, naming the tensors, if they have not after `TRIES`.
        """
        for attempt in range(1, TRIES + 1):
            arrived, damaged = self._transfer()
            if not damaged:
                self._copy_into_model(arrived)
                self._skipped = self._frozen
                return
            self._skipped = set()
            listed = f"{damaged[0]}{f' and {len(damaged) - 1} more' if damaged[1:] else ''}"
            log.warning("weights version %d: %s did not arrive intact (try %d of %d)", version, listed, attempt, TRIES)
        ending = "the generators keep their old weights, and the run ends here" if self.keep else "the run ends here"
        raise RunStopped(
            f"weights version {version} did not arrive intact, {TRIES} times in a row: {listed}; "
            f"{ending}. --resume continues from the newest checkpoint",
            exit_code=1,
        )

    def drop(self) -> None:
        """Frees the memory of the model's copied weights until the next call: nothing may read them before it.

        Memory shared with the trainer stays. Only without `keep`.
        """
        assert not self.keep
        for name in self._parts.keys() - self._in_place:
            self._parts[name].untyped_storage().resize_(0)

    def _transfer(self) -> tuple[dict[str, Tensor], list[str]]:
        """This rank's part of each new tensor, and the names of those that differ from the trainer's on any rank."""
        arrived: dict[str, Tensor] = {}
        expected, actual = torch.zeros(2, len(self.names), dtype=torch.int64, device=self.model.device)
        indices = {name: index for index, name in enumerate(self.names)}
        parameters = dict(self.model.named_parameters())

        def compare(name: str, sent: Tensor | None, received: Tensor) -> None:
            index, in_place = indices[name], name in self._in_place
            shape = parameters[name].shape
            actual[index] = checksum(received, self._targets[name], shape)
            if name in self._sums_sent:
                assert sent is not None
                expected[index] = actual[index] if in_place else checksum(sent, self._sources[name], shape)
            if in_place and not same_memory(local_values(self.tensors[name].detach()), received):
                actual[index] += 1  # the trainer has moved it: shows as damaged

        unsent = self.in_place_everywhere | self._skipped
        for name in unsent:
            compare(name, self._cast(name), self._parts[name])
        for names in buckets(self.model, unsent):
            sent = {name: self._cast(name) for name in names}
            received = {name: self._destination(self._parts[name]) for name in names if name not in self._in_place}
            self._send(sent, received)
            for name in names:
                compare(name, sent[name], received.get(name, self._parts[name]))
            arrived |= received
            self.moved()
        return arrived, self._damaged(expected, actual)

    def _cast(self, name: str) -> Tensor | None:
        """This rank's part of a tensor, in the dtype and on the device of the generator; None if it has none."""
        tensor = self.tensors.get(name)
        return None if tensor is None else local_values(tensor.detach()).to(self._parts[name])

    def _destination(self, part: Tensor) -> Tensor:
        """The memory that receives the new values of the model's `part`."""
        if self.keep:
            return torch.empty_like(part, memory_format=torch.contiguous_format)
        part.untyped_storage().resize_(part.nbytes)
        return part

    def _send(self, sent: Mapping[str, Tensor | None], received: Mapping[str, Tensor]) -> None:
        """Fills this rank's new parts of the tensors in one bucket."""
        outgoing: dict[int, list[Tensor]] = defaultdict(list)
        incoming: dict[int, list[Tensor]] = defaultdict(list)

        def add(name: str, piece: Piece) -> None:
            if piece.source == piece.target == self.rank and name in self._in_place:
                return
            if piece.source == self.rank:
                source = sent[name]
                assert source is not None
                outgoing[piece.target].append(view_at(source, piece.shard_slice, self._sources[name]))
            if piece.target == self.rank:
                incoming[piece.source].append(view_at(received[name], piece.shard_slice, self._targets[name]))

        for name in sent:
            for piece in self.pieces[name]:
                add(name, piece)
        # Pieces for this rank itself are copied; the rest goes in one message to each rank.
        for source, target in zip(outgoing.pop(self.rank, []), incoming.pop(self.rank, [])):
            target.copy_(source)
        self._exchange(outgoing, incoming)

    def _exchange(self, outgoing: Mapping[int, list[Tensor]], incoming: Mapping[int, list[Tensor]]) -> None:
        ranks = range(self.world.size)
        sizes = [[sum(part.nbytes for part in parts.get(rank, [])) for rank in ranks] for parts in (outgoing, incoming)]
        messages = [torch.empty(sum(of), dtype=torch.uint8, device=self.model.device) for of in sizes]
        for view, part in _message_views(messages[0], outgoing, ranks):
            view.copy_(part)
        dist.all_to_all_single(messages[1], messages[0], sizes[1], sizes[0])
        for view, part in _message_views(messages[1], incoming, ranks):
            part.copy_(view)

    def _damaged(self, expected: Tensor, actual: Tensor) -> list[str]:
        """The tensors whose checksum in any generator differs from the trainer's; the same list on every rank."""
        dist.all_reduce(expected)
        group = self.world.tensor_group
        per_rank = actual[None] if group is None else gather_rows(actual[None], group)
        firsts = first_copies([self.target_shards[rank] for rank in self.world.tensor_ranks], self.names)
        different = differing(per_rank, torch.tensor(firsts, device=self.model.device), expected)
        different = different.to(torch.uint8)
        dist.all_reduce(different, dist.ReduceOp.MAX)
        return [name for name, differs in zip(self.names, different.tolist()) if differs]

    @torch.no_grad()
    def _copy_into_model(self, arrived: Mapping[str, Tensor]) -> None:
        for name, part in arrived.items() if self.keep else ():  # else received into the model's memory
            self._parts[name].copy_(part)


def _message_views(message: Tensor, parts: Mapping[int, list[Tensor]], ranks: range) -> Iterator[tuple[Tensor, Tensor]]:
    """For each part, its view in the message, in the part's shape, and the part."""
    start = 0
    for part in (part for rank in ranks for part in parts.get(rank, [])):
        yield message[start : start + part.nbytes].view(part.dtype).view(part.shape), part
        start += part.nbytes


@dataclass
class TransferEstimate:
    """Bytes on a rank in one weight sync."""

    received: int
    """From other ranks; about as many are sent to them."""
    buffers: int
    """Peak memory beyond the weights themselves: copies received so far, and messages in flight."""


def estimate_transfer(tensors: Mapping[str, Tensor], model: Decoder, keep: bool) -> TransferEstimate:
    """What the first call of `WeightTransfer(tensors, model, world, keep=keep)` moves on this rank.

    Computed from the rank's own layout, without other ranks and without values.
    """
    parameters = dict(model.named_parameters())
    targets = {name: shard_slice_of(parameter) for name, parameter in parameters.items()}
    sources = {name: shard_slice_of(tensor) for name, tensor in tensors.items()}
    in_place = {n for n, tensor in tensors.items() if tensor.dtype == model.dtype and sources[n] == targets[n]}
    received = copies = buffers = 0
    for names in buckets(model, in_place):
        cast = message = 0
        for name in names:
            overlap = intersection(sources[name], targets[name]) if name in sources else None
            message += volume(targets[name]) - (volume(overlap) if overlap else 0)
            copies += volume(targets[name]) * keep
            if name in sources and tensors[name].dtype != model.dtype:
                cast += volume(sources[name])
        received, buffers = received + message, max(buffers, copies + cast + 2 * message)
    return TransferEstimate(received * model.dtype.itemsize, buffers * model.dtype.itemsize)
