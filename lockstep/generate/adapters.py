"""The adapters that an engine's requests can name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from lockstep.errors import UserError
from lockstep.generate.pages import PageAllocator
from lockstep.generate.weight_writes import WeightWrites
from lockstep.model import Decoder
from lockstep.model.adapters import Adapter, refuse_adapters
from lockstep.model.decoder import Block
from lockstep.model.layers import adaptable


@dataclass(eq=False)
class LoadedAdapter:
    """An adapter, as long as an engine or one of its sequences has it."""

    adapter: Adapter
    root: int
    """The chain of its sequences without a full page: pages that other adapters, or other values, filled are not found
    from it."""
    writes: WeightWrites
    places: list[int]
    """Addresses of its matrices."""


class LoadedAdapters(Mapping[str, Adapter]):
    """Adapters by the names that requests use for them.

    Pages of the prefix cache are found by what precedes them: each adapter begins with a root of its own, and with a
    new one when its values change.
    """

    def __init__(self, model: Decoder, allocator: PageAllocator):
        self._model, self._allocator = model, allocator
        self._loaded: dict[str, LoadedAdapter] = {}
        self.unloaded: list[LoadedAdapter] = []
        """Those that unfinished sequences may have."""

    def __getitem__(self, name: str) -> Adapter:
        return self._loaded[name].adapter

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaded)

    def __len__(self) -> int:
        return len(self._loaded)

    def load(self, name: str, adapter: Adapter) -> None:
        """Raises UserError for a name that is taken, and for an adapter that does not fit the model."""
        if not name:
            raise UserError("an adapter needs a name; the empty one is the model's without adapter")
        if name in self._loaded:
            raise UserError(f"the adapter {name!r} has already been loaded; unload it first")
        refuse_adapters(self._model)
        if self._model.halves is not Block:
            raise UserError("adapters do not work with compiled layers yet; leave out compile.backend")
        if (adapter.dtype, adapter.device) != (self._model.dtype, self._model.device):
            raise UserError(
                f"the adapter {name!r} is {adapter.dtype} on {adapter.device}, but the model {self._model.dtype} on "
                f"{self._model.device}; they must be the same"
            )
        layers = {layer.name: layer.shape for _, layer in adaptable(self._model)}
        for layer, (a, b) in adapter.matrices.items():
            if layers.get(layer) != (b.weight.shape[0], a.weight.shape[1]):
                raise UserError(
                    f"the adapter {name!r} is for another base: {layer} is {b.weight.shape[0]} x {a.weight.shape[1]} "
                    f"there, but {layers.get(layer, 'missing')} in the model"
                )
        root = self._allocator.new_root()
        self._loaded[name] = LoadedAdapter(adapter, root, WeightWrites(adapter), _places(adapter))

    def unload(self, name: str) -> None:
        """Its unfinished sequences keep it. Raises UserError for an unknown name."""
        if (loaded := self.named(name)) is not None:
            self.unloaded.append(loaded)
            del self._loaded[name]

    def named(self, name: str) -> LoadedAdapter | None:
        """None for an empty name: no adapter. Raises UserError for an unknown one."""
        if name and name not in self._loaded:
            there = ", ".join(map(repr, self._loaded)) or "none is loaded"
            raise UserError(f"the adapter {name[:200]!r} is not loaded; there are: {there}")
        return self._loaded[name] if name else None

    def changed(self, loaded: LoadedAdapter) -> bool:
        """Its matrices have new values: pages that the old ones filled are not found again. Returns whether they are at
        other addresses."""
        before, loaded.places = loaded.places, _places(loaded.adapter)
        loaded.root, loaded.writes = self._allocator.new_root(), WeightWrites(loaded.adapter)
        return loaded.places != before


def _places(adapter: Adapter) -> list[int]:
    return [parameter.data_ptr() for parameter in adapter.parameters()]


def written(loaded: Iterable[LoadedAdapter | None]) -> list[LoadedAdapter]:
    """Those of them with values that `changed` has not been told of, as far as `WeightWrites` detects them."""
    return [each for each in dict.fromkeys(loaded) if each is not None and each.writes.are_new()]
