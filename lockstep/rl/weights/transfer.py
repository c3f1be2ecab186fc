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

from lockstep.errors import RunStopped, UserError
from lockstep.model import Decoder
from lockstep.model.shard import local_values
from lockstep.observe import log
from lockstep.parallel import World
from lockstep.parallel.exchange import gather_rows
from lockstep.parallel.messages import from_all
from lockstep.rl.weights.in_place import same_memory
from lockstep.rl.weights.shard_slices import (
    ShardSlice,
    checksum_of,
    differing,
    first_copies,
    intersection,
    local_shard_of,
    offsets,
    owners_of,
    plain_parts,
    read_parts,
    view_at,
    volume,
)
from lockstep.rl.weights.shared_parts import SharedParts, share_parts

BUCKET = 1 << 26
"""Bytes of full tensors that are sent together."""
TRIES = 3
"""Attempts before a damaged transfer ends the run."""


@dataclass(frozen=True)
class Piece:
    """What one rank sends to another of one tensor."""

    name: str
    shard_slice: ShardSlice
    source: int
    target: int


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
        those that are kept are sent once, and from then on only compared. Raises UserError if these are not the tensors
        of `model`."""
        assert world.mesh is not None
        self.tensors, self.model, self.world, self.moved = tensors, model, world, moved
        self.keep = keep
        self.rank = world.rank
        sources = {name: local_shard_of(tensor) for name, tensor in tensors.items()}
        targets = {name: local_shard_of(parameter) for name, parameter in model.named_parameters()}
        self._parts = {name: local_values(parameter.detach()) for name, parameter in model.named_parameters()}
        self._in_place = {name for name in sources if same_memory(local_values(tensors[name]), self._parts[name])}
        local = [plain_parts(sources), plain_parts(targets), sorted(self._in_place), sorted(sources.keys() & frozen)]
        per_rank = from_all(local)
        self.source_shards = [read_parts(of_rank[0]) for of_rank in per_rank]
        self.target_shards = [read_parts(of_rank[1]) for of_rank in per_rank]
        self._owners = owners_of(self.source_shards)
        self.names = list(self.target_shards[0])
        self.in_place_everywhere = set[str](self.names).intersection(*(of_rank[2] for of_rank in per_rank))
        """Tensors whose memory every rank's generator shares with its trainer."""
        frozen_anywhere = set[str]().union(*(of_rank[3] for of_rank in per_rank))
        self._frozen = frozen_anywhere - self.in_place_everywhere if keep else set[str]()
        self._skipped = set[str]()
        self.pieces = {name: self._pieces(name) for name in self.names}
        # Of replicated shards, only the first rank's counts in a checksum.
        self._sums_sent = {n for n, part in sources.items() if self._owners[n][part.shard_slice][0] == self.rank}
        self._sources, self._targets = sources, targets
        self._copies = {name: part for name, part in self._parts.items() if name not in self._in_place}
        self._arrived: dict[str, Tensor] = {}
        self._buffers: dict[str, Tensor] = {}
        self._make_buckets()

    def _make_buckets(self) -> None:
        """Divides what is sent into buckets. All ranks call it."""
        dtype, on_cpu = self.model.dtype, self.model.device.type == "cpu"
        self._buckets = list(buckets(self.model, self.in_place_everywhere | self._skipped))
        self._shared = None
        if self._buckets:
            self._shared = share_parts(self.source_shards, self._buckets, dtype, self.rank, on_cpu)
        self._arrived = {}

    def _pieces(self, name: str) -> list[Piece]:
        shape = self.target_shards[0][name].shape
        shapes = {shards[name].shape for shards in self.source_shards if name in shards}
        if shapes != {shape}:
            listed = " and ".join(str(list(other)) for other in sorted(shapes)) or "missing"
            raise UserError(
                f"weights cannot be synced: {name} is {listed} in the trainer, but {list(shape)} in the generator"
            )
        pieces, size = [], len(self.target_shards)
        for target, shards in enumerate(self.target_shards):
            shard_slice, covered = shards[name].shard_slice, 0
            for source_slice, ranks in self._owners[name].items():
                if (overlap := intersection(source_slice, shard_slice)) is not None:
                    # Among replicas, the one nearest to the target, so that every rank sends to equally many.
                    source = target if target in ranks else ranks[target * len(ranks) // size]
                    pieces.append(Piece(name, overlap, source, target))
                    covered += volume(overlap)
            assert covered == volume(shard_slice), (
                f"{name}: the ranks have {covered} of {volume(shard_slice)} elements, or some twice"
            )
        return pieces

    def __call__(self, version: int) -> None:
        """Replaces the model's weights by the trainer's, once all new ones have arrived intact.

        Raises RunStopped, naming the tensors, if they have not after `TRIES`.
        """
        for attempt in range(1, TRIES + 1):
            arrived, damaged = self._transfer()
            if not damaged:
                self._copy_into_model(arrived)
                self._skip(self._frozen)
                return
            self._skip(set())
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
        self._arrived = {}
        for copy in self._copies.values():
            copy.untyped_storage().resize_(0)

    def _skip(self, names: set[str]) -> None:
        """From now on sends all but these, which have arrived intact."""
        if names != self._skipped:
            self._skipped = names
            self._make_buckets()

    def _transfer(self) -> tuple[dict[str, Tensor], list[str]]:
        """This rank's part of each new tensor, and the names of those that differ from the trainer's on any rank."""
        arrived: dict[str, Tensor] = {}
        expected, actual = torch.zeros(2, len(self.names), dtype=torch.int64, device=self.model.device)
        indices = {name: index for index, name in enumerate(self.names)}

        def compare(name: str, sent: Tensor | None, received: Tensor) -> None:
            index, in_place = indices[name], name in self._in_place
            actual[index] = checksum_of(received, self._targets[name])
            if name in self._sums_sent:
                assert sent is not None
                expected[index] = actual[index] if in_place else checksum_of(sent, self._sources[name])
            if in_place and not same_memory(local_values(self.tensors[name].detach()), received):
                actual[index] += 1  # the trainer has moved it: shows as damaged

        for name in self.names:
            if name in self.in_place_everywhere:
                compare(name, local_values(self.tensors[name].detach()), self._parts[name])
            elif name in self._skipped:
                tensor = self.tensors.get(name)
                sent_before = None if tensor is None else local_values(tensor.detach()).to(self._parts[name])
                compare(name, sent_before, self._parts[name])
        for names in self._buckets:
            sent = self._cast(names)
            received = self._send(names, sent)
            for name in names:
                compare(name, sent.get(name), received.get(name, self._parts[name]))
            arrived |= received
            if self._shared is not None:
                self._shared.next_bucket()
            self.moved()
        return arrived, self._damaged(expected, actual)

    def _cast(self, names: list[str]) -> dict[str, Tensor]:
        """This rank's parts of the tensors, in the dtype and on the device of the generator."""
        parts = {name: local_values(self.tensors[name].detach()) for name in names if name in self.tensors}
        if self._shared is not None:
            return {name: self._shared.view(self.rank, name).copy_(part) for name, part in parts.items()}
        dtype = self.model.dtype
        starts, size = offsets({name: part.numel() * dtype.itemsize for name, part in parts.items()})
        buffer = self._buffer("cast", size)
        cast = {}
        for name, part in parts.items():
            if part.dtype == dtype and part.device == self.model.device:
                cast[name] = part
                continue
            start, stop = starts[name], starts[name] + part.numel() * dtype.itemsize
            cast[name] = buffer[start:stop].view(dtype).view(part.shape).copy_(part)
        return cast

    def _send(self, names: list[str], sent: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's new parts of the tensors in one bucket."""
        if not self._arrived:
            in_buckets = {name for names in self._buckets for name in names}
            self._arrived = {n: self._destination(copy) for n, copy in self._copies.items() if n in in_buckets}
        arrived = {name: self._arrived[name] for name in names if name not in self._in_place}
        if self._shared is not None:
            self._copy_shared(arrived, self._shared)
            return arrived
        outgoing: dict[int, list[Tensor]] = defaultdict(list)
        incoming: dict[int, list[Tensor]] = defaultdict(list)
        for piece in (piece for name in names for piece in self.pieces[name]):
            if piece.source == piece.target == self.rank and piece.name in self._in_place:
                continue
            if piece.source == self.rank:
                source_slice = self._sources[piece.name].shard_slice
                outgoing[piece.target].append(view_at(sent[piece.name], piece.shard_slice, source_slice))
            if piece.target == self.rank:
                target_slice = self._targets[piece.name].shard_slice
                incoming[piece.source].append(view_at(arrived[piece.name], piece.shard_slice, target_slice))
        # Pieces for this rank itself are copied; the rest goes in one message to each rank.
        for source, target in zip(outgoing.pop(self.rank, []), incoming.pop(self.rank, [])):
            target.copy_(source)
        self._exchange(outgoing, incoming)
        return arrived

    def _destination(self, copy: Tensor) -> Tensor:
        """The memory that receives the new values of `copy`."""
        if self.keep:
            return torch.empty_like(copy, memory_format=torch.contiguous_format)
        copy.untyped_storage().resize_(copy.nbytes)
        return copy

    def _copy_shared(self, arrived: Mapping[str, Tensor], shared: SharedParts) -> None:
        shared.wait_for_all()
        for piece in (piece for name in arrived for piece in self.pieces[name] if piece.target == self.rank):
            source_slice = self.source_shards[piece.source][piece.name].shard_slice
            source = view_at(shared.view(piece.source, piece.name), piece.shard_slice, source_slice)
            target_slice = self._targets[piece.name].shard_slice
            view_at(arrived[piece.name], piece.shard_slice, target_slice).copy_(source)

    def _exchange(self, outgoing: Mapping[int, list[Tensor]], incoming: Mapping[int, list[Tensor]]) -> None:
        ranks = range(self.world.size)
        sizes = [[sum(part.nbytes for part in parts.get(rank, [])) for rank in ranks] for parts in (outgoing, incoming)]
        send_buffer, receive_buffer = self._buffer("send", sum(sizes[0])), self._buffer("receive", sum(sizes[1]))
        for view, part in _message_views(send_buffer, outgoing, ranks):
            view.copy_(part)
        dist.all_to_all_single(receive_buffer, send_buffer, sizes[1], sizes[0])
        for view, part in _message_views(receive_buffer, incoming, ranks):
            part.copy_(view)

    def _buffer(self, purpose: str, size: int) -> Tensor:
        """A buffer of this many bytes, reused: the system clears every page that it newly allocates."""
        buffer = self._buffers.get(purpose)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[purpose] = torch.empty(size, dtype=torch.uint8, device=self.model.device)
        return buffer[:size]

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
        if not self.keep:
            self._buffers = {}
            return  # received into the model's memory
        for name, part in arrived.items():
            self._parts[name].copy_(part)
        if self.model.device.type != "cpu":
            # An accelerator's allocator returns the same memory later without clearing it, and can use it meanwhile.
            self._arrived, self._buffers = {}, {}


def _message_views(message: Tensor, parts: Mapping[int, list[Tensor]], ranks: range) -> Iterator[tuple[Tensor, Tensor]]:
    """For each part, its view in the message, in the part's shape, and the part."""
    start = 0
    for part in (part for rank in ranks for part in parts.get(rank, [])):
        yield message[start : start + part.nbytes].view(part.dtype).view(part.shape), part
        start += part.nbytes
