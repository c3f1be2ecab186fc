"""What each request does, from its body to the promise of its result."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.generate.server.api_error import too_busy
from lockstep.train_server.batches import Datum, LossOfData, datum_of, losses_of, micro_batches
from lockstep.train_server.loss_graph import GraphLoss
from lockstep.train_server.losses import LOSSES, Loss, loss_named, options_of
from lockstep.train_server.promises import Promise, Result, failure, message, plain
from lockstep.train_server.protocol import (
    AdamParams,
    CopyWeights,
    CreateLoss,
    CreateModel,
    CreateSampler,
    LoadWeights,
    Lora,
    Numbered,
    OfModel,
    OptimStep,
    Sample,
    SavedUnder,
    SaveExternal,
    SaveForSampler,
    SaveWeights,
)
from lockstep.train_server.sampling import sample
from lockstep.train_server.service import Model, Sampler, Service, Session, summed
from lockstep.train_server.states import SavedState
from lockstep.train_server.wire import MESSAGES, batched, parsed

Work = Callable[[], Awaitable[Result]]
MOST_NUMBERS = 1 << 24
"""Of a request's targets and other inputs: sparse ones can be many in few bytes."""
CLONE = 1_000_000_000
"""Sequence numbers of each clone of a sampling client begin at a multiple of it."""


def _once(service: Service, request_id: str, session_id: str, work: Work) -> Promise:
    """The promise of a request that is not one of a model's: made when it is sent first."""
    if (promise := service.promises.find(request_id)) is None:
        promise = service.promises.make(request_id, session_id)
        service.promises.begin(promise, work)
    return promise


def _in_turn(service: Service, model: Model, number: int, work: Work) -> Promise:
    """The promise of a model's request, which runs after those with lower numbers, once."""
    if (request_id := model.turns.promised(number)) is not None:
        return service.promises.named(request_id)
    promise = service.promises.make(f"{model.model_id}:{number}", model.session_id)
    model.turns.add(number, promise, work)
    return promise


def refused(service: Service, body: Numbered, problem: str) -> Promise:
    """The promise of a model's request whose body is wrong: its number counts, and later ones do not wait for it."""
    model = service.model(body.model_id)

    async def work() -> Result:
        return failure(problem)

    return _in_turn(service, model, body.seq_id, work)


def create_model(service: Service, body: CreateModel) -> Promise:
    session = service.session(body.session_id)

    async def work() -> Result:
        service.base_name(body.base_model)
        body.optimizer_config.check()
        if body.lora_config is None:
            raise UserError("this server trains adapters; send lora_config, as create_lora_training_client does")
        model = await service.create_model(session, body.model_seq_id, body.lora_config, body.user_metadata)
        return plain({"type": "create_model", "model_id": model.model_id})

    return _once(service, f"{body.session_id}:create:{body.model_seq_id}", body.session_id, work)


def unload_model(service: Service, body: OfModel) -> Promise:
    model = service.model(body.model_id)

    async def work() -> Result:
        service.sessions[model.session_id].models.pop(model.model_id, None)
        model.turns.end()
        for sampler in model.snapshots:
            await service.close_sampler(sampler)
        return plain({"type": "unload_model", "model_id": model.model_id})

    return _once(service, f"{model.model_id}:unload", model.session_id, work)


async def forward_backward(service: Service, data: bytes) -> Promise:
    """A request in protobuf. One that names its model and number is answered by a promise, whatever else it has: later
    requests of the model wait for its number."""
    request = await asyncio.to_thread(parsed, "ForwardBackwardRequest", data)
    model = service.model(request.model_id)

    async def work() -> Result:
        try:
            batches, loss_of = await asyncio.to_thread(_prepared, service, model, request)
        except UserError as error:
            if not request.forward_only:
                model.trained.spoil(str(error))
            raise
        outputs = await service.compute(model, batches, loss_of, not request.forward_only)
        return _output(outputs.log_probs, outputs.losses, outputs.metrics)

    return _in_turn(service, model, request.seq_id, work)


def _prepared(service: Service, model: Model, request: Any) -> tuple[list[Any], LossOfData]:
    """The request's micro-batches and its loss. Raises UserError for bad input."""
    given: dict[str, float] = dict(request.loss_fn_config)
    texts = {key: value.text for key, value in request.loss_fn_config_v2.items() if value.text}
    if request.loss_fn == "custom":
        loss, loss_of = _custom(service.sessions[model.session_id], texts.pop("loss_id", ""))
    else:
        loss = loss_named(request.loss_fn)
        loss_of = losses_of(loss, options_of(request.loss_fn, loss, given))
    if texts:
        raise UserError(f"the option {sorted(texts)[0][:60]!r} must be a number")
    if not request.data:
        raise UserError("the request has no data")
    data: list[Datum] = []
    size = 0
    for number, each in enumerate(request.data):
        data.append(datum_of(each, number, loss, service.base.config))
        size += data[-1].size
        if size > MOST_NUMBERS:
            raise UserError(f"the request has more than {MOST_NUMBERS} targets and other inputs; send less in one call")
    return list(micro_batches(data, loss, service.config.tokens_per_microbatch)), loss_of


def _custom(session: Session, loss_id: str) -> tuple[Loss, LossOfData]:
    if loss_id not in session.losses:
        raise UserError(f"the loss {loss_id[:80]!r} is not one of this session; create it with create_custom_loss")
    graph = session.losses[loss_id]
    names = [each.name for each in graph.inputs[1:]]

    def of_data(data: Sequence[Datum], log_probs: Tensor) -> tuple[Tensor, list[Any]]:
        sizes = [datum.targets.numel() for datum in data]
        losses, metrics = [], []
        for number, (datum, own) in enumerate(zip(data, log_probs.split(sizes))):
            for each in graph.inputs:
                rank = (datum.targets if each.name == "logprobs" else datum.inputs[each.name]).ndim
                if rank != each.rank:
                    raise UserError(f"datum {number}: {each.name} has rank {rank}, but the loss declares {each.rank}")
            loss, own_metrics = graph(own.view(datum.targets.shape), [datum.inputs[name] for name in names])
            losses.append(loss)
            metrics.append(own_metrics)
        return torch.stack(losses), metrics

    return Loss(LOSSES["cross_entropy"].compute, required=(), optional=(), of_graph=tuple(names)), of_data


def _output(log_probs: Sequence[Tensor], losses: Sequence[float], metrics: Sequence[Any]) -> Result:
    answer = MESSAGES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    # A record is rectangular but for its first size: data with other numbers of targets a token come in another one.
    start = 0
    while start < len(log_probs):
        stop = start
        while stop < len(log_probs) and log_probs[stop].shape[1:] == log_probs[start].shape[1:]:
            stop += 1
        record = answer.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=stop - start)
        record.fields["logprobs"].CopyFrom(batched(list(log_probs[start:stop])))
        start = stop
    answer.metrics["loss:sum"] = math.fsum(losses)
    for name, value in summed(metrics).items():
        answer.metrics[name] = value
    return message(answer)


def optim_step(service: Service, body: OptimStep) -> Promise:
    model = service.model(body.model_id)

    async def work() -> Result:
        if body.optimizer_params is not None:
            body.optimizer_params.check()
            raise UserError("optimizer_params are not AdamW's; send adam_params")
        return plain({"metrics": await service.update(model, body.adam_params or AdamParams())})

    return _in_turn(service, model, body.seq_id, work)


def _named(body: SavedUnder) -> str:
    return body.path or f"state-{body.seq_id}"


def save_weights(service: Service, body: SaveWeights) -> Promise:
    model = service.model(body.model_id)

    async def work() -> Result:
        state = await service.save(model, "weights", _named(body), body.ttl_seconds, body.user_metadata, body.overwrite)
        return plain({"type": "save_weights", "path": state.path})

    return _in_turn(service, model, body.seq_id, work)


def save_for_sampler(service: Service, body: SaveForSampler) -> Promise:
    model = service.model(body.model_id)

    async def work() -> Result:
        if body.path is not None:
            state = await service.save(model, "sampler_weights", body.path, body.ttl_seconds, body.user_metadata)
            return plain({"type": "save_weights_for_sampler", "path": state.path})
        number = body.sampling_session_seq_id or 0
        make = service.publish if body.kind == "inflight" else service.snapshot
        sampler = await make(model, number)
        return plain({"type": "save_weights_for_sampler", "sampling_session_id": sampler.sampler_id})

    return _in_turn(service, model, body.seq_id, work)


def save_external(service: Service, body: SaveExternal) -> Promise:
    model = service.model(body.model_id)

    async def work() -> Result:
        if body.age_encryption_recipients:
            raise UserError("states are not encrypted here; leave age_encryption_recipients out")
        state = await service.save(model, "external_weights", _named(body), body.ttl_seconds)
        return plain({"type": "save_weights_external", "path": state.path})

    return _in_turn(service, model, body.seq_id, work)


def load_weights(service: Service, body: LoadWeights) -> Promise:
    if body.session_id is None:
        if body.model_id is None or body.seq_id is None:
            raise UserError("load_weights needs model_id and seq_id, or session_id and model_seq_id")
        model = service.model(body.model_id)
        return _in_turn(service, model, body.seq_id, lambda: _load_into(service, model, body))
    session = service.session(body.session_id)

    async def work() -> Result:
        state, _ = service.states.find(body.path)
        if body.base_model is not None:
            service.base_name(body.base_model)
        _check_load(body)
        lora = lora_of_state(state)
        # Creating it was its first request.
        model = await service.create_model(session, body.model_seq_id or 0, lora, body.user_metadata)
        try:
            return await _load_into(service, model, body)
        except UserError:
            session.models.pop(model.model_id)
            raise

    return _once(service, f"{body.session_id}:create:{body.model_seq_id}", body.session_id, work)


def lora_of_state(state: SavedState) -> Lora:
    return Lora(
        rank=state.rank,
        seed=state.seed,
        train_unembed=state.train_unembed,
        train_mlp=state.train_mlp,
        train_attn=state.train_attn,
    )


async def _load_into(service: Service, model: Model, body: LoadWeights) -> Result:
    _check_load(body)
    await service.load(model, body.path, body.optimizer)
    return plain({"type": "load_weights", "path": body.path, "model_id": model.model_id})


def _check_load(body: LoadWeights) -> None:
    if body.weights_access_token is not None:
        raise UserError("this server has no accounts; leave weights_access_token out")
    if body.optimizer_config is not None:
        body.optimizer_config.check()


async def copy_weights(service: Service, body: CopyWeights) -> str:
    """The path of the copy. Raises UserError."""
    if body.weights_access_token is not None:
        raise UserError("this server has no accounts; leave weights_access_token out")
    session_id = body.session_id or service.open_session(None, None).session_id
    expires = None if body.ttl_seconds is None else time.time() + body.ttl_seconds
    run = f"{session_id}:train:{body.model_seq_id or 0}"
    state, _ = service.states.find(body.source_path)
    copied = await asyncio.to_thread(service.states.copy, body.source_path, run, state.name, expires)
    return copied.path


def create_custom_loss(service: Service, body: CreateLoss) -> Promise:
    session = service.session(body.session_id)

    async def work() -> Result:
        loss_id = f"{body.session_id}:loss:{body.custom_loss_seq_id}"
        session.losses[loss_id] = GraphLoss(body.name, body.inputs, body.graph)
        return plain({"type": "create_custom_loss", "loss_id": loss_id})

    return _once(service, f"{body.session_id}:create_loss:{body.custom_loss_seq_id}", body.session_id, work)


async def create_sampler(service: Service, body: CreateSampler) -> Sampler:
    """Raises UserError for another base, and for a path without a state."""
    session = service.session(body.session_id)
    if body.base_model is not None:
        service.base_name(body.base_model)
    elif body.model_path is None:
        raise UserError("create_sampling_session needs base_model or model_path")
    sampler_id = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
    if sampler_id in session.samplers:
        return session.samplers[sampler_id]
    return await service.open_sampler(session, body.sampling_session_seq_id, body.model_path)


async def sample_later(service: Service, body: Sample) -> Promise:
    """The promise of samples. Raises ApiError (429) if too many wait."""
    if body.sampling_session_id is None or body.seq_id is None:
        raise UserError("asample needs sampling_session_id and seq_id, as sampling clients send them")
    sampler = service.sampler(body.sampling_session_id)
    request_id = f"{sampler.sampler_id}:{body.seq_id}"
    if (promise := service.promises.find(request_id)) is not None:
        return promise
    most = service.limits.max_sequences
    if body.num_samples > most:
        raise UserError(f"num_samples is {body.num_samples}; this server runs at most {most} (--max-waiting)")
    if service.limits.sequences + body.num_samples > service.limits.max_sequences:
        raise too_busy(f"{service.limits.sequences} samples are running or waiting; the client sends this one again")
    promise = service.promises.make(request_id, sampler.session_id, (sampler.sampler_id, body.seq_id // CLONE))
    service.promises.begin(promise, lambda: sample(service, sampler, body))
    return promise
