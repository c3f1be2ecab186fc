"""Weight sync from the trainer's layout to a generator's: part by part, never gathered in one place, and verified.

Every rank says once what it holds of each tensor and what it wants; from then on each knows which parts it sends and
receives. A tensor's checksum is the sum of its parts' (`checksum`), so it is the same in both layouts: the generators
use new weights only if every tensor's checksum is the trainer's. What a generator reads in place from the trainer
(`own_weights`) is not sent, but still compared, between ranks that have the same part.
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
    LocalShard,
    ShardSlice,
    at,
    checksum_of,
    common,
    differing,
    first_copies,
    holders_of,
    local_shard_of,
    offsets,
    plain_parts,
    read_parts,
    volume,
)
from lockstep.rl.weights.shared_parts import SharedParts, share_parts

BUCKET = 1 << 26
"""Bytes of full tensors that are sent together."""
TRIES = 3
"""How often weights are sent before a damaged transfer ends the run."""


@dataclass(frozen=True)
class Piece:
    """What one rank sends to another of one tensor."""

    name: str
    shard_slice: ShardSlice
    source: int
    target: int


def buckets(model: Decoder, staying: Collection[str]) -> Iterator[list[str]]:
    """The names of the model's tensors that are sent together, in order; without those in `staying`."""
    names: list[str] = []
    size = 0
    for name, parameter in model.named_parameters():
        if name in staying:
            continue
        bytes_of_tensor = parameter.numel() * model.dtype.itemsize
        if names and size + bytes_of_tensor > BUCKET:
            yield names
            names, size = [], 0
        names.append(name)
        size += bytes_of_tensor
    if names:
        yield names


class WeightTransfer:
    """From tensors on the ranks of `world`, in any layout, to `model`, of which each rank has a part.

    All ranks create it, and call its methods, together. `tensors`: by the model's names; a rank leaves out those of
    which it has no part. Parameters of `model` may be these very tensors. It calls `moved` after each bucket that has
    arrived. Raises UserError if they are not the tensors of `model`.
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
        """keep: whether the model's old weights stay until the new ones have arrived intact. Otherwise new weights are
        received into the same memory, and `drop` may free it until then. frozen: tensors that no update changes; those
        that stay are sent once, and from then on only compared."""
        assert world.mesh is not None
        self.tensors, self.model, self.world, self.moved = tensors, model, world, moved
        self.keep = keep
        self.rank = world.rank
        own = {name: local_shard_of(tensor) for name, tensor in tensors.items()}
        wanted = {name: local_shard_of(parameter) for name, parameter in model.named_parameters()}
        self._parts = {name: local_values(parameter.detach()) for name, parameter in model.named_parameters()}
        self._in_place = {name for name in own if same_memory(local_values(tensors[name]), self._parts[name])}
        of_this_rank = plain_parts(own), plain_parts(wanted), sorted(self._in_place), sorted(own.keys() & frozen)
        everyone = from_all([*of_this_rank])
        self.held = held = [read_parts(of_rank[0]) for of_rank in everyone]
        self.wanted = [read_parts(of_rank[1]) for of_rank in everyone]
        self._holders = holders_of(held)
        self.names = list(self.wanted[0])
        self.staying = set[str](self.names).intersection(*(of_rank[2] for of_rank in everyone))
        """Tensors that every rank's generator reads in place from its trainer."""
        fixed = set[str]().union(*(of_rank[3] for of_rank in everyone))
        self._fixed = fixed - self.staying if keep else set[str]()
        self._spared = set[str]()
        self.pieces = {name: self._pieces(name, held) for name in self.names}
        # A part held by several ranks counts once in a checksum: for the first of them.
        self._sums_sent = {n for n, part in own.items() if self._holders[n][part.shard_slice][0] == self.rank}
        self._own = own
        self._copies = {name: part for name, part in self._parts.items() if name not in self._in_place}
        self._arrived: dict[str, Tensor] = {}
        self._memory: dict[str, Tensor] = {}
        self._lay_out()

    def _lay_out(self) -> None:
        """Divides what is sent into buckets. All ranks call it."""
        model = self.model
        on_cpu = model.device.type == "cpu"
        self._buckets = list(buckets(model, self.staying | self._spared))
        self._shared = share_parts(self.held, self._buckets, model.dtype, self.rank, on_cpu) if self._buckets else None
        self._arrived = {}

    def _pieces(self, name: str, held: list[dict[str, LocalShard]]) -> list[Piece]:
        shapes = {part[name].shape for part in held if name in part}
        if shapes != {self.wanted[0][name].shape}:
            found = " and ".join(str(list(shape)) for shape in sorted(shapes)) or "missing"
            raise UserError(
                f"weights cannot be synced: {name} is {found} in the trainer, but {list(self.wanted[0][name].shape)} "
                "in the generator"
            )
        pieces = []
        for target, wants in enumerate(self.wanted):
            shard_slice, covered = wants[name].shard_slice, 0
            for part, ranks in self._holders[name].items():
                if (shared := common(part, shard_slice)) is not None:
                    # Among copies, the one nearest to the target, so that every rank sends to equally many.
                    source = target if target in ranks else ranks[target * len(ranks) // len(self.wanted)]
                    pieces.append(Piece(name, shared, source, target))
                    covered += volume(shared)
            assert covered == volume(shard_slice), (
                f"{name}: the ranks hold {covered} of {volume(shard_slice)} elements, or some twice"
            )
        return pieces

    def __call__(self, version: int) -> None:
        """Replaces the model's weights by the trainer's, once all new ones have arrived intact.

        Raises RunStopped, naming the tensors, if they have not after `TRIES`.
        """
        kept = "the generators keep their old weights, and the run ends here" if self.keep else "the run ends here"
        for attempt in range(1, TRIES + 1):
            arrived, damaged = self._exchange()
            if not damaged:
                self._take(arrived)
                self._spare(self._fixed)
                return
            self._spare(set())
            said = f"{damaged[0]}{f' and {len(damaged) - 1} more' if damaged[1:] else ''}"
            log.warning("weights version %d: %s did not arrive intact (try %d of %d)", version, said, attempt, TRIES)
        raise RunStopped(
            f"weights version {version} did not arrive intact, {TRIES} times in a row: {said}; "
            f"{kept}. --resume continues from the newest checkpoint",
            exit_code=1,
        )

    def _spare(self, names: set[str]) -> None:
        """From now on sends all but these, which have arrived intact."""
        if names != self._spared:
            self._spared = names
            self._lay_out()

    def _exchange(self) -> tuple[dict[str, Tensor], list[str]]:
        """This rank's part of each new tensor, and the names of those that differ from the trainer's on any rank."""
        arrived: dict[str, Tensor] = {}
        expected, found = torch.zeros(2, len(self.names), dtype=torch.int64, device=self.model.device)
        places = {name: index for index, name in enumerate(self.names)}

        def compare(name: str, sent: Tensor | None, got: Tensor) -> None:
            index, in_place = places[name], name in self._in_place
            found[index] = checksum_of(got, self.wanted[self.rank][name])
            if name in self._sums_sent:
                assert sent is not None
                expected[index] = found[index] if in_place else checksum_of(sent, self._own[name])
            if in_place and not same_memory(local_values(self.tensors[name].detach()), got):
                found[index] += 1  # the trainer has moved it: shows as damaged

        for name in self.names:
            if name in self.staying:
                compare(name, local_values(self.tensors[name].detach()), self._parts[name])
            elif name in self._spared:
                own = self.tensors.get(name)
                sent_before = None if own is None else local_values(own.detach()).to(self._parts[name])
                compare(name, sent_before, self._parts[name])
        for names in self._buckets:
            sent = self._rounded(names)
            arrived_now = self._send(names, sent)
            for name in names:
                compare(name, sent.get(name), arrived_now.get(name, self._parts[name]))
            arrived |= arrived_now
            if self._shared is not None:
                self._shared.next_bucket()
            self.moved()
        return arrived, self._damaged(expected, found)

    def _rounded(self, names: list[str]) -> dict[str, Tensor]:
        """What this rank holds of the tensors, in the dtype and on the device of the generator."""
        parts = {name: local_values(self.tensors[name].detach()) for name in names if name in self.tensors}
        if self._shared is not None:
            return {name: self._shared.room(self.rank, name).copy_(part) for name, part in parts.items()}
        places, size = offsets({name: part.numel() * self.model.dtype.itemsize for name, part in parts.items()})
        memory = self._kept("rounded", size)
        rounded = {}
        for name, part in parts.items():
            if part.dtype == self.model.dtype and part.device == self.model.device:
                rounded[name] = part
                continue
            start, stop = places[name], places[name] + part.numel() * self.model.dtype.itemsize
            rounded[name] = memory[start:stop].view(self.model.dtype).view(part.shape).copy_(part)
        return rounded

    def _send(self, names: list[str], sent: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not self._arrived:
            sent_now = {name for names in self._buckets for name in names}
            self._arrived = {n: self._room_for(copy) for n, copy in self._copies.items() if n in sent_now}
        arrived = {name: self._arrived[name] for name in names if name not in self._in_place}
        if self._shared is not None:
            self._copy(arrived, self._shared)
            return arrived
        going: dict[int, list[Tensor]] = defaultdict(list)
        coming: dict[int, list[Tensor]] = defaultdict(list)
        for piece in (piece for name in names for piece in self.pieces[name]):
            if piece.source == piece.target == self.rank and piece.name in self._in_place:
                continue
            if piece.source == self.rank:
                going[piece.target].append(at(sent[piece.name], piece.shard_slice, self._own[piece.name].shard_slice))
            if piece.target == self.rank:
                coming[piece.source].append(
                    at(arrived[piece.name], piece.shard_slice, self.wanted[self.rank][piece.name].shard_slice)
                )
        # What stays here is copied; the rest goes in one message to each rank.
        for from_here, to_here in zip(going.pop(self.rank, []), coming.pop(self.rank, [])):
            to_here.copy_(from_here)
        self._travel(going, coming)
        return arrived

    def _room_for(self, copy: Tensor) -> Tensor:
        """The memory that receives what `copy` is to hold."""
        if self.keep:
            return torch.empty_like(copy, memory_format=torch.contiguous_format)
        copy.untyped_storage().resize_(copy.nbytes)
        return copy

    def drop(self) -> None:
        """Frees the memory of the model's copied weights until the next call: nothing may read them before it.

        What the model reads in place from the trainer stays. Only without `keep`.
        """
        assert not self.keep
        self._arrived = {}
        for copy in self._copies.values():
            copy.untyped_storage().resize_(0)

    def _copy(self, arrived: Mapping[str, Tensor], shared: SharedParts) -> None:
        shared.wait_for_all()
        for piece in (piece for name in arrived for piece in self.pieces[name] if piece.target == self.rank):
            content = at(
                shared.room(piece.source, piece.name),
                piece.shard_slice,
                self.held[piece.source][piece.name].shard_slice,
            )
            at(arrived[piece.name], piece.shard_slice, self.wanted[self.rank][piece.name].shard_slice).copy_(content)

    def _travel(self, going: Mapping[int, list[Tensor]], coming: Mapping[int, list[Tensor]]) -> None:
        ranks = range(self.world.size)
        sizes = [[sum(part.nbytes for part in parts.get(rank, [])) for rank in ranks] for parts in (going, coming)]
        leaving, entering = self._kept("leaving", sum(sizes[0])), self._kept("entering", sum(sizes[1]))
        for room, part in _rooms(leaving, going, ranks):
            room.copy_(part)
        dist.all_to_all_single(entering, leaving, sizes[1], sizes[0])
        for room, part in _rooms(entering, coming, ranks):
            part.copy_(room)

    def _kept(self, purpose: str, size: int) -> Tensor:
        """A buffer of this many bytes, reused: the system clears every page that it newly allocates."""
        kept = self._memory.get(purpose)
        if kept is None or len(kept) < size:
            kept = self._memory[purpose] = torch.empty(size, dtype=torch.uint8, device=self.model.device)
        return kept[:size]

    def _damaged(self, expected: Tensor, found: Tensor) -> list[str]:
        """The tensors whose checksum in some generator differs from the trainer's; the same list on every rank."""
        dist.all_reduce(expected)
        group = self.world.tensor_group
        of_ranks = found[None] if group is None else gather_rows(found[None], group)
        firsts = first_copies([self.wanted[rank] for rank in self.world.tensor_ranks], self.names)
        different = differing(of_ranks, torch.tensor(firsts, device=self.model.device), expected)
        different = different.to(torch.uint8)
        dist.all_reduce(different, dist.ReduceOp.MAX)
        return [name for name, other in zip(self.names, different.tolist()) if other]

    @torch.no_grad()
    def _take(self, arrived: Mapping[str, Tensor]) -> None:
        if not self.keep:
            self._memory = {}
            return  # they have arrived where they are read
        for name, part in arrived.items():
            self._parts[name].copy_(part)
        if self.model.device.type != "cpu":
            # An accelerator's allocator returns the same memory later without clearing it, and can use it meanwhile.
            self._arrived, self._memory = {}, {}


def _rooms(message: Tensor, parts: Mapping[int, list[Tensor]], ranks: range) -> Iterator[tuple[Tensor, Tensor]]:
    """Each part with its place in a message, in the part's shape."""
    start = 0
    for part in (part for rank in ranks for part in parts.get(rank, [])):
        yield message[start : start + part.nbytes].view(part.dtype).view(part.shape), part
        start += part.nbytes
