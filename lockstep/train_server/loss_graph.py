"""A loss that a client has traced with torch.fx, rebuilt from a list of allowed operations and never run as code."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lockstep.errors import UserError
from lockstep.train_server.protocol import LossGraph, LossInput

ELEMENTWISE = (
    "abs add sub mul div neg exp expm1 log log1p log2 log10 sqrt rsqrt square pow reciprocal sign sigmoid tanh sin cos "
    "relu clamp clamp_min clamp_max clip minimum maximum where masked_fill nan_to_num floor ceil round eq ne lt le gt "
    "ge logical_and logical_or logical_not isfinite isnan isinf lerp logaddexp erf true_divide"
)
OTHERS = (
    "sum mean prod amax amin max min std var logsumexp softmax log_softmax cumsum cumprod any all norm median reshape "
    "flatten squeeze unsqueeze cat stack index_select gather transpose diff flip roll matmul dot"
)
MAKERS = "zeros_like ones_like full_like"
OF_METHODS = "view expand_as detach float double long int bool to type_as size dim numel contiguous clone"
OF_FUNCTIONAL = "relu softplus logsigmoid sigmoid tanh silu gelu huber_loss smooth_l1_loss mse_loss softmax log_softmax"
OF_OPERATOR = (
    "add sub mul truediv floordiv mod pow neg pos eq ne lt le gt ge and_ or_ xor invert getitem abs matmul iadd isub "
    "imul itruediv"
)
OF_MATH = "exp log sqrt floor ceil pow"


def _from(module: Any, name: str, functions: str) -> dict[str, Callable[..., Any]]:
    return {f"{name}.{each}": getattr(module, each) for each in functions.split() if hasattr(module, each)}


FUNCTIONS = {
    **_from(torch, "torch", f"{ELEMENTWISE} {OTHERS} {MAKERS}"),
    **_from(functional, "torch.nn.functional", OF_FUNCTIONAL),
    **_from(operator, "operator", OF_OPERATOR),
    **_from(math, "math", OF_MATH),
}
METHODS = {name for name in f"{ELEMENTWISE} {OTHERS} {OF_METHODS}".split() if hasattr(Tensor, name)}
ATTRIBUTES = {"shape", "ndim", "dtype"}
DTYPES = {
    name: getattr(torch, name) for name in ("float32", "float64", "int64", "int32", "bool", "bfloat16", "float16")
}
METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
MOST_ELEMENTS, MOST_ARGUMENTS = 1 << 22, 64
"""Numbers in all values of one datum together, and entries of a list."""


class GraphLoss:
    """A client's loss of one datum: from log-probabilities and other inputs to a scalar and metrics."""

    def __init__(self, name: str, inputs: Sequence[LossInput], graph: LossGraph):
        """Raises UserError, naming the node, for anything that is not allowed."""
        self.name, self.inputs, self._nodes = name[:60], list(inputs), graph.nodes
        if self.inputs[0].name != "logprobs" or self.inputs[0].rank == 0:
            raise UserError(f"the loss {self.name}: its first input must be logprobs, of rank 1 or 2")
        if len({each.name for each in self.inputs}) != len(self.inputs):
            raise UserError(f"the loss {self.name} has two inputs of one name")
        self._check()

    def _check(self) -> None:
        known: set[str] = set()
        places = [node.target for node in self._nodes if node.op == "placeholder"]
        if places != [each.name for each in self.inputs]:
            raise UserError(f"the loss {self.name}: its graph reads {places!s:.200}, not the declared inputs in order")
        if [node.op for node in self._nodes if node.op == "output"] != ["output"] or self._nodes[-1].op != "output":
            raise UserError(f"the loss {self.name}: its graph must end with its one output")
        for node in self._nodes:
            allowed = {
                "placeholder": True,
                "output": True,
                "call_function": node.target in FUNCTIONS or self._reads_attribute(node),
                "call_method": node.target in METHODS,
            }
            if not allowed.get(node.op, False):
                raise UserError(f"the loss {self.name} uses {node.target[:80]} ({node.op[:20]}), which is not allowed")
            if node.name in known:
                raise UserError(f"the loss {self.name} has two nodes {node.name[:60]}")
            if missing := sorted(_references([node.args, node.kwargs]) - known):
                raise UserError(
                    f"the loss {self.name}: node {node.name[:60]} reads {missing[0][:60]}, which is not before it"
                )
            known.add(node.name)

    @staticmethod
    def _reads_attribute(node: Any) -> bool:
        return node.target == "getattr" and len(node.args) == 2 and node.args[1] in ATTRIBUTES

    def __call__(self, log_probs: Tensor, others: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
        """Raises UserError if it fails, or returns anything but a finite scalar and metrics."""
        values: dict[str, Any] = {}
        given, size = iter((log_probs, *others)), 0
        try:
            for node in self._nodes[:-1]:
                if node.op == "placeholder":
                    values[node.name] = next(given)
                    continue
                args = _decoded(node.args, values)
                _refuse_large(node.target, args)
                kwargs = {key: _decoded(value, values) for key, value in node.kwargs.items()}
                if node.op == "call_method":
                    if not isinstance(args[0], Tensor):
                        raise UserError(f"node {node.name}: {node.target} is called on what is no tensor")
                    values[node.name] = getattr(args[0], node.target)(*args[1:], **kwargs)
                elif node.target == "getattr":
                    values[node.name] = getattr(args[0], args[1])
                elif node.target.startswith(("operator.", "math.")) and all(map(_is_number, args)):
                    values[node.name] = _of_numbers(FUNCTIONS[node.target], args)
                else:
                    values[node.name] = FUNCTIONS[node.target](*args, **kwargs)
                size += _size(values[node.name])
                if size > MOST_ELEMENTS:
                    raise UserError(f"its values have {size} numbers up to node {node.name}; at most {MOST_ELEMENTS}")
            loss, metrics = _decoded(self._nodes[-1].args[0], values)
            return self._scalar(loss), self._numbers(metrics)
        except UserError as error:
            raise UserError(f"the loss {self.name}: {error}") from error
        except Exception as error:  # a client's graph may fail in any way
            raise UserError(f"the loss {self.name} fails: {type(error).__name__}: {error!s:.300}") from error

    def _scalar(self, loss: Any) -> Tensor:
        if not isinstance(loss, Tensor) or loss.ndim != 0 or not loss.is_floating_point() or not loss.isfinite():
            form = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise UserError(f"it must return a finite scalar tensor; it returned {form}")
        return loss.float()

    def _numbers(self, metrics: Any) -> dict[str, float]:
        if not isinstance(metrics, Mapping) or not all(METRIC.fullmatch(str(key)) for key in metrics):
            raise UserError("its metrics must be named custom/NAME:sum or custom/NAME:mean")
        return {key: float(value.detach() if isinstance(value, Tensor) else value) for key, value in metrics.items()}


def _references(value: Any) -> set[str]:
    if isinstance(value, dict):
        if set(value) == {"ref"}:
            return {str(value["ref"])}
        return set().union(*map(_references, value.values()))
    return set().union(*map(_references, value)) if isinstance(value, list) else set()


def _decoded(value: Any, values: Mapping[str, Any]) -> Any:
    """The argument that the client has encoded."""
    if isinstance(value, list):
        return [_decoded(each, values) for each in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        return {key: _decoded(each, values) for key, each in value.items()}
    ((kind, inner),) = value.items()
    match kind:
        case "ref":
            return values[inner]
        case "tuple":
            return tuple(_decoded(inner, values))
        case "dict":
            return {key: _decoded(each, values) for key, each in inner.items()}
        case "slice":
            return slice(*_decoded(inner, values))
        case "ellipsis":
            return Ellipsis
        case "float":
            return float(inner)
        case "dtype":
            if inner not in DTYPES:
                raise UserError(f"the data type {inner!r:.40} is not allowed")
            return DTYPES[inner]
        case "device" if inner == "cpu":
            return torch.device("cpu")
        case _:
            return {kind: _decoded(inner, values)}


def _refuse_large(target: str, args: Sequence[Any]) -> None:
    """Raises UserError for arguments whose result could be large, or is no number, before it is computed."""
    plain = target.startswith(("operator.", "math.")) and target != "operator.getitem"
    if plain and not all(isinstance(each, Tensor) or _is_number(each) for each in args):
        raise UserError(f"{target} is called on what is neither a tensor nor a number")
    if any(isinstance(each, list | tuple) and len(each) > MOST_ARGUMENTS for each in args):
        raise UserError(f"{target} has a list of more than {MOST_ARGUMENTS} arguments")
    tensors = [each for each in args if isinstance(each, Tensor)]
    with suppress(RuntimeError):  # of shapes that do not match: the call itself says so
        if math.prod(torch.broadcast_shapes(*(each.shape for each in tensors))) > MOST_ELEMENTS:
            raise UserError(f"{target} would have more than {MOST_ELEMENTS} numbers")
    if "matmul" in target and math.prod(each.shape[0] for each in tensors if each.ndim) > MOST_ELEMENTS:
        raise UserError(f"{target} would have more than {MOST_ELEMENTS} numbers")


def _size(value: Any) -> int:
    if isinstance(value, str):
        raise UserError("a node's value is a text")
    return (
        value.numel() if isinstance(value, Tensor) else sum(map(_size, value)) if isinstance(value, list | tuple) else 1
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float)


def _of_numbers(function: Callable[..., Any], numbers: Sequence[float]) -> Any:
    """The result for plain numbers, in float64: Python's whole numbers could grow without bound."""
    result = function(*map(float, numbers))
    whole = not any(isinstance(number, float) for number in numbers) and isinstance(result, float)
    return int(result) if whole and result.is_integer() else result
