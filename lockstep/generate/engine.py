"""The generator: continuous batching of requests over the model that is being trained."""

from __future__ import annotations

import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListLike
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist

from lockstep import ops
from lockstep.config import EngineConfig
from lockstep.data import StreamDecoder, Tokenizer, decoding_context
from lockstep.errors import UserError
from lockstep.generate.adapters import LoadedAdapter, LoadedAdapters, written
from lockstep.generate.adjustments import Adjustment
from lockstep.generate.batch import BatchArrays
from lockstep.generate.chunk import Chunk
from lockstep.generate.drafts import Draft, DraftLengths, Speculation, free_rows, make_draft, margin
from lockstep.generate.draws import Draw, draw
from lockstep.generate.grammars import Grammars
from lockstep.generate.graphs import GraphRunner, graphs_of
from lockstep.generate.pages import PageAllocator
from lockstep.generate.runner import Runner, make_cache, make_delta_cache
from lockstep.generate.sampling_params import Completion, PromptScores, SamplingParams, TokenEvent, raise_broken
from lockstep.generate.scheduler import Scheduler
from lockstep.generate.sequence import Sequence
from lockstep.generate.states import States
from lockstep.generate.statistics import Statistics
from lockstep.generate.step_graphs import StepGraphRunner
from lockstep.generate.stragglers import stragglers
from lockstep.generate.weight_writes import WeightWrites
from lockstep.model import Decoder, check_token_ids
from lockstep.model.adapters import Adapter
from lockstep.model.checkpoint import copy_weights, refuse_score_head, sources_of_weights
from lockstep.parallel.exchange import whole_rows
from lockstep.parallel.messages import from_all
from lockstep.parallel.tensor_group import sharded_over_data, tensor_group_of


class Engine:
    """Samples from `model`, whose weights it reads in place: nothing is copied after a trainer's update.

    If a model is sharded over a tensor axis, every rank has an engine and makes the same calls as the other ranks. All
    get the same results, which are those of a single process.

    Call `weights_changed` after an update: it drops cached keys and packed weights. In-place writes that PyTorch's
    version counters record are detected without it, at the next step; writes through `.data`, NumPy or collectives, and
    replaced parameters, are not.
    """

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig | None = None,
        tokenizer: Tokenizer | None = None,
        draft: Draft | None = None,
    ):
        if not isinstance(model, Decoder):
            raise UserError(f"an Engine samples from a Decoder, not from {model!r:.60}; load it with load_model")
        refuse_score_head(model.config, "the model")
        if sharded_over_data(model):
            raise UserError(
                "an Engine reads weights in place, but these are sharded over data ranks, which gather them only for a "
                "forward pass; make a model to sample from with lockstep.parallel.generator_model"
            )
        self.model = model
        self.config = config or EngineConfig()
        self.tokenizer = tokenizer
        self.weights_version = 0
        self.statistics = Statistics()
        self.tensor_group = tensor_group_of(model)
        """The ranks that share the model with this one; None: this rank has the whole model."""
        _check_config(self.config, self.tensor_group)
        num_pages = self.config.cache_tokens // ops.PAGE
        self.allocator = PageAllocator(num_pages)
        self.adapters = LoadedAdapters(model, self.allocator)
        """By the names that `SamplingParams.adapter` uses."""
        draft = draft or make_draft(self.config, model)
        self.cache = make_cache(model, num_pages)
        drafts = self.config.draft_tokens if draft else 0
        self.delta_cache, kept = make_delta_cache(model, self.config, self.cache, drafts)
        states = States(self.delta_cache.entries, kept) if self.delta_cache else States()
        self.scheduler = Scheduler(self.config, self.allocator, ops.PAGE, states)
        self._weights = ops.PackedWeights()
        self._writes = WeightWrites(model)
        self._arrays = BatchArrays(self.config.max_sequences)
        self.runner = self._make_runner()
        self._speculation = self._speculate(draft) if draft else None
        self._requests: dict[int, list[Sequence]] = {}
        # Each event goes to the stream or `generate` call of its request, whichever call ran the step; all others go to
        # the caller of `step`.
        self._inboxes: dict[int, deque[TokenEvent]] = {}
        self._unowned: list[TokenEvent] = []
        self._next_id = 0
        self._in_flight = False
        """A step has begun and not finished; true between calls only if the step was interrupted."""
        self._released = False
        self.before_step: Callable[[], None] = lambda: None
        """Called before each step of `generate`; an exception from it ends `generate`."""

    def _make_runner(self) -> Runner:
        if (mode := graphs_of(self.config, self.model)) != "none":
            config = replace(self.config, cuda_graphs=mode)
            return GraphRunner(self.model, self.cache, config, self._weights, delta_cache=self.delta_cache)
        if self.tensor_group is None and StepGraphRunner.can_run(self.model):
            return StepGraphRunner(self.model, self.cache, self._weights, self.delta_cache)
        return Runner(self.model, self.cache, self.delta_cache)

    def _speculate(self, draft: Draft) -> Speculation:
        free = free_rows(self.model.device)
        if self.tensor_group is not None:  # hosts may differ, but all ranks must choose the same lengths
            free = from_all(free, self.tensor_group)[0]
        lengths = DraftLengths(
            self.config.draft_tokens, free, margin(self.model.device), draft.cost, self.runner.padded
        )
        most_rows = min(self.config.max_tokens_per_step, self.runner.most_rows)
        return Speculation(draft, lengths, self.runner, most_rows, self.scheduler, self.statistics)

    def generate(
        self,
        prompts: ListLike[list[int]],
        params: SamplingParams | ListLike[SamplingParams] | None = None,
        first: int | None = None,
    ) -> list[list[Completion]]:
        """Samples the prompts; `result[i][j]` is sample j of prompt i.

        params: for all prompts, or one per prompt; None: the defaults. first: return only this many prompts, those
        whose longest sample is shortest; the others are aborted as soon as they cannot be among them, and their
        `result[i]` is empty; None: all.

        Raises UserError for a prompt that cannot be computed here, or whose logits are not finite.
        """
        if params is None:
            params = SamplingParams()
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise UserError(f"{len(prompts)} prompts but {len(each)} sampling parameters; give one, or one per prompt")
        # Weights may have changed since the last call in ways that cannot be detected.
        self._weights.forget()
        begin = self._next_id  # before the first `add`, for the cleanup after an interrupt
        groups: list[list[Sequence]] = []
        try:
            for prompt, param in zip(prompts, each):
                request_id = self.add(prompt, param)
                groups.append(self._requests[request_id])
                self._inboxes[request_id] = deque(maxlen=1)  # only the last event is needed
            remaining = dict(enumerate(groups))
            unfinished = set(range(begin, self._next_id))
            while unfinished:
                self.before_step()
                self._step()
                for request_id in [i for i in unfinished if i not in self._requests]:
                    unfinished.remove(request_id)
                    raise_broken(self._inboxes[request_id][-1], f"prompt {request_id - begin}")
                for number in stragglers(remaining, first) if first is not None else ():
                    del remaining[number]
                    unfinished.discard(begin + number)
                    self.abort(begin + number)
        finally:
            for request_id in range(begin, self._next_id):
                self.abort(request_id)
        return [[s.completion() for s in group] if number in remaining else [] for number, group in enumerate(groups)]

    def stream(self, prompt: list[int], params: SamplingParams) -> Iterator[TokenEvent]:
        """Yields the events of one request as they come; closing the iterator aborts the request.

        Several streams can be read in turn. Raises UserError as `generate` does.
        """
        request_id = self._next_id
        inbox: deque[TokenEvent] = deque()
        try:
            self._inboxes[request_id] = inbox
            self.add(prompt, params)
            while inbox or request_id in self._requests:
                if not inbox:
                    self._step()
                while inbox:
                    event = inbox.popleft()
                    raise_broken(event, f"request {request_id}")
                    yield event
        finally:
            self.abort(request_id)

    def add(self, prompt: list[int], params: SamplingParams, begun: ListLike[Completion] = ()) -> int:
        """Queues a request; returns its id. Raises UserError for a prompt that can never be computed.

        begun: what another engine has already sampled of it; the samples continue from there, with the same draws. At
        least one of them must be unfinished.
        """
        self._check(prompt, params)
        request_id, self._next_id = self._next_id, self._next_id + 1
        seed = self._fresh_seed() if params.seed is None else params.seed
        stop_ids, now = params.ending_ids(self.model.config.eos_token_ids), time.perf_counter()
        decodes = self.tokenizer if params.stop else None
        context = decoding_context(decodes, prompt) if decodes else []
        scores = None if params.prompt_logprobs is None else PromptScores(list(prompt), params.prompt_logprobs)
        sequences = [
            Sequence(
                request_id=request_id,
                index=index,
                params=params,
                seed=(seed + index * 0x9E3779B97F4A7C15) % 2**63,
                tokens=list(prompt),
                prompt_length=len(prompt),
                stop_ids=stop_ids,
                decoder=StreamDecoder(decodes, context) if decodes else None,
                adjustment=self._adjustment(params, prompt, stop_ids) if params.adjusts else None,
                prompt_scores=scores,
                adapter=self.adapters.named(params.adapter),
                requested_at=now,
            )
            for index in range(params.n)
        ]
        for sequence, completion in zip(sequences, begun):
            sequence.resume(completion)
        self._requests[request_id] = sequences
        self.scheduler.waiting.extend(sequence for sequence in sequences if sequence.finish_reason is None)
        return request_id

    @cached_property
    def grammars(self) -> Grammars:
        """The grammars of samples. A server compiles one before it adds the request, outside of the engine's thread."""
        if self.tokenizer is None:
            raise UserError("a grammar needs a tokenizer; pass one to Engine")
        return Grammars(self.tokenizer, self.model.config.vocab_size, self.model.config.eos_token_ids)

    def _adjustment(self, params: SamplingParams, prompt: list[int], stop_ids: frozenset[int]) -> Adjustment:
        matcher = self.grammars.matcher(params.grammar) if params.grammar else None
        return Adjustment(params, prompt, stop_ids, matcher)

    def samples(self, request_id: int) -> ListLike[Sequence]:
        """The samples of an unfinished request. They grow as the engine steps, until they have a `finish_reason`."""
        return self._requests[request_id]

    def slow_grammars(self, seconds: float, per_token: float) -> list[int]:
        """The requests with an unfinished sample whose grammar has taken more processor time than `seconds`, and
        `per_token` for each of its tokens, in this process."""
        return [
            number
            for number, group in self._requests.items()
            if group[0].params.grammar and any(s.grammar_seconds > seconds + per_token * s.sampled for s in group)
        ]

    def _fresh_seed(self) -> int:
        seed = torch.tensor(secrets.randbits(62))
        if self.tensor_group is not None:
            dist.broadcast(seed, group=self.tensor_group, group_src=0)
        return int(seed)

    @property
    def max_positions(self) -> int:
        """The most tokens of prompt and completion together that the model supports."""
        return self.model.config.max_positions

    @property
    def cache_tokens(self) -> int:
        """The capacity of the cache in tokens, for one sequence or many."""
        return self.allocator.num_pages * ops.PAGE

    def abort(self, request_id: int) -> None:
        """Ends a request and frees its pages at once; ignored if the request has already ended."""
        self._inboxes.pop(request_id, None)
        self._unowned = [e for e in self._unowned if e.request_id != request_id]
        unfinished = [s for s in self._requests.pop(request_id, []) if s.finish_reason is None]
        for sequence in unfinished:
            sequence.finish_reason = "abort"
        if unfinished and not self._in_flight:
            self.scheduler.remove(unfinished)
        self._end_drafts(unfinished)

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._unowned)

    def load_weights(self, folder: Path) -> None:
        """Replaces the model's weights by those of another folder of the same model; call `weights_changed` afterwards.

        Raises UserError, leaving the old weights untouched, for a folder that does not fit: on all ranks if on any.
        """
        sources, problem = None, ""
        try:
            sources = sources_of_weights(self.model, folder)
        except UserError as error:
            problem = str(error)
        problems = [problem] if self.tensor_group is None else from_all(problem, self.tensor_group)
        for rank, each in enumerate(problems):
            if each:
                raise UserError(f"rank {rank}: {each}" if rank else each)
        assert sources is not None
        copy_weights(sources)

    def release_weights(self) -> None:
        """Frees the packed weights, for a caller that releases the memory of the model's weights.

        A step raises RuntimeError until `weights_changed` is called.
        """
        self._released = True
        self.runner.release()
        self._weights.release()

    def load_adapter(self, name: str, adapter: Adapter) -> None:
        """Requests can name the adapter from now on. Raises UserError for a name that is taken, for an adapter that
        does not fit the model, and for a sharded model."""
        if self.tensor_group is not None:
            raise UserError("adapters do not work with parallel.tensor yet; leave it out")
        self.adapters.load(name, adapter)

    def unload_adapter(self, name: str) -> None:
        """New requests cannot name it any more; unfinished ones finish with it. Raises UserError for an unknown
        name."""
        self.adapters.unload(name)
        self._free_unloaded()

    def _free_unloaded(self) -> None:
        """Frees the packed matrices of unloaded adapters that no sequence has any more."""
        if self.adapters.unloaded:
            used = {s.adapter for group in self._requests.values() for s in group}
            for loaded in [each for each in self.adapters.unloaded if each not in used]:
                self._weights.release_some(loaded.adapter.parameters())
                self.runner.adapter_gone(loaded.adapter)
                self.adapters.unloaded.remove(loaded)

    def weights_changed(self, version: int | None = None, adapter: str = "") -> None:
        """Drops every cached key. In-flight sequences continue with the new weights; their keys are recomputed.

        version: the new `weights_version`; None: one more. adapter: only this adapter has changed, and only its keys
        are dropped; `weights_version` remains. Raises UserError if the dtype or the format of the cache has changed,
        and for an unknown adapter.
        """
        if (loaded := self.adapters.named(adapter)) is not None:
            return self._use_new_adapter(loaded)
        self._use_new_weights(version)

    def _use_new_adapter(self, loaded: LoadedAdapter) -> None:
        if self.adapters.changed(loaded):
            self.runner.adapter_gone(loaded.adapter)
        self._weights.forget_some(loaded.adapter.parameters())
        self.scheduler.recompute(s for group in self._requests.values() for s in group if s.adapter is loaded)

    def _use_new_weights(self, version: int | None = None) -> None:
        dtype, form = self.model.dtype, self.model.config.precision.cache
        if (dtype, form) != (self.cache.dtype, self.cache.format):
            raise UserError(
                f"the model is {dtype} now, but the engine's cache is {self.cache.dtype} (precision.cache {form} and "
                f"{self.cache.format}); create a new Engine"
            )
        self._released = False
        self.weights_version = self.weights_version + 1 if version is None else version
        self._writes = WeightWrites(self.model)
        self._weights.forget()
        self.runner.weights_changed()
        if self._speculation:
            self._speculation.draft.weights_changed()
        self._start_over()

    def step(self) -> list[TokenEvent]:
        """Runs one forward pass over this step's tokens; returns an event for each token it sampled.

        Events of requests of `generate` or `stream` go there. Events that `generate` or `stream` computed for other
        requests are returned by the next call of `step`. A request whose logits are not finite ends with one event of
        finish reason `error`.
        """
        self._step()
        events, self._unowned = self._unowned, []
        return events

    @torch.no_grad()
    def _step(self) -> None:
        if self._released:
            raise RuntimeError("the engine's weights were released; call weights_changed once the model has new ones")
        if self._writes.are_new():
            self._use_new_weights()
        if self._in_flight:
            self._start_over()
        for loaded in written(s.adapter for group in self._requests.values() for s in group):
            self._use_new_adapter(loaded)
        self._in_flight = True
        began = time.perf_counter()
        try:
            if chunks := self.scheduler.schedule():
                with self._weights.in_use(), whole_rows():
                    draws = self._compute(chunks)
                self.statistics.count_step(chunks, began)
                self.statistics.prompt_tokens_reused = self.scheduler.reused_tokens
                self.statistics.preemptions = self.scheduler.preemptions
                for event in self._append(chunks, draws):
                    self._inboxes.get(event.request_id, self._unowned).append(event)
                self._free_unloaded()
        except BaseException:
            # The pages of this step are already registered, but were not filled.
            self._start_over()
            raise
        self._in_flight = False
        self.statistics.sampling_seconds += time.perf_counter() - began
        self.statistics.packing_seconds = self._weights.packing_seconds

    def _start_over(self) -> None:
        unfinished = {number: [s for s in group if s.finish_reason is None] for number, group in self._requests.items()}
        # Requests that ended in the failed step stay ended, although no event reported it.
        self._requests = {number: group for number, group in self._requests.items() if unfinished[number]}
        self.scheduler.restart(s for group in unfinished.values() for s in group)
        self._in_flight = False

    def _compute(self, chunks: list[Chunk]) -> list[Draw]:
        """Drafts, runs the model, and draws after each chunk that reaches its sequence's end and after its drafts."""
        if self._speculation is None:
            return draw(self._arrays.prepare(chunks), self.runner)
        began = time.perf_counter()
        self._speculation.extend(chunks)
        draws = draw(self._arrays.prepare(chunks), self.runner)
        self._speculation.timed(chunks, time.perf_counter() - began)
        return draws

    def _append(self, chunks: list[Chunk], draws: list[Draw]) -> list[TokenEvent]:
        """Appends the drawn tokens to their sequences: those after drafts only as far as the drafts are right."""
        events: list[TokenEvent] = []
        finished: list[Sequence] = []
        remaining = iter(draws)
        for chunk in [chunk for chunk in chunks if chunk.is_sampled]:
            drawn, sequence, accepted = list(islice(remaining, 1 + len(chunk.draft_tokens))), chunk.sequence, 0
            if sequence.finish_reason is not None:  # with another sample of its request
                continue
            for each, draft_token in zip(drawn, (*chunk.draft_tokens, None)):
                events.append(self._append_draw(sequence, each))
                if each.token != draft_token:
                    break
                accepted += 1
                if sequence.finish_reason is not None:
                    break
            if self._speculation and chunk.draft_tokens:
                self._speculation.verified(chunk, accepted)
            if sequence.finish_reason is not None:
                finished += self._broken(sequence) if sequence.finish_reason == "error" else [sequence]
        self.statistics.tokens_sampled += len(events)
        if finished:
            self.statistics.count_ended(finished)
            self.scheduler.remove(finished)
            for request_id in {s.request_id for s in finished}:
                if all(s.finish_reason is not None for s in self._requests[request_id]):
                    del self._requests[request_id]
            self._end_drafts(finished)
        return events

    def _append_draw(self, sequence: Sequence, draw: Draw) -> TokenEvent:
        problem = ""
        if math.isfinite(draw.log_prob):
            sequence.append(draw.token, draw.log_prob, draw.truncated_log_prob, draw.route)
            problem = sequence.adjustment.problem if sequence.adjustment else ""
        if problem or not math.isfinite(draw.log_prob):
            sequence.finish_reason = "error"
        return TokenEvent(
            request_id=sequence.request_id,
            index=sequence.index,
            token_id=draw.token,
            logprob=draw.log_prob,
            finish_reason=sequence.finish_reason,
            weights_version=self.weights_version,
            top_logprobs=draw.top,
            truncated_logprob=draw.truncated_log_prob if sequence.params.truncates else None,
            prompt_scores=sequence.prompt_scores,
            route=draw.route,
            problem=problem,
        )

    def _broken(self, sequence: Sequence) -> list[Sequence]:
        """Ends the request of a sequence whose logits are not finite, and returns its samples that end.

        Their pages are not reused: their contents may not be finite.
        """
        ending = [s for s in self._requests[sequence.request_id] if s.finish_reason is None or s is sequence]
        for each in ending:
            each.finish_reason = "error"
        self.scheduler.unregister_pages(ending)
        return ending

    def _end_drafts(self, finished: list[Sequence]) -> None:
        if self._speculation:
            for sequence in finished:
                self._speculation.draft.ended(sequence)

    def check_length(self, prompt: int, max_tokens: int) -> None:
        """prompt, max_tokens: in tokens. Raises UserError if they exceed the context or the cache."""
        limit, total = self.model.config.max_positions, prompt + max_tokens
        if total > limit:
            raise UserError(
                f"a prompt of {prompt} tokens and max_tokens {max_tokens} exceed the context of {limit}; "
                "shorten the prompt or lower max_tokens"
            )
        if -(-total // ops.PAGE) > self.allocator.num_pages:
            raise UserError(
                f"a prompt of {prompt} tokens and max_tokens {max_tokens} do not fit in the cache of "
                f"{self.allocator.num_pages * ops.PAGE} tokens; raise engine.cache_tokens"
            )

    def _check(self, prompt: list[int], params: SamplingParams) -> None:
        check_token_ids(prompt, self.model.config.vocab_size, "the prompt")
        self.adapters.named(params.adapter)
        self.check_length(len(prompt), params.max_tokens)
        vocab = self.model.config.vocab_size
        if wrong := next((token for token, _ in params.logit_bias if token >= vocab), None):
            raise UserError(f"logit_bias has the token {wrong}, but the model's vocabulary has {vocab}")
        if params.grammar and params.ignore_eos:
            raise UserError("a grammar ends a sample with an end-of-text token, which ignore_eos would ignore; use one")
        if params.stop and self.tokenizer is None:
            raise UserError("stop strings need a tokenizer; pass one to Engine, or use stop_token_ids")


def _check_config(config: EngineConfig, tensor_group: dist.ProcessGroup | None) -> None:
    if tensor_group is not None and config.cuda_graphs not in ("none", "auto"):
        raise UserError("engine.cuda_graphs do not work with parallel.tensor yet; leave them out")
    if config.cache_tokens < ops.PAGE or config.max_tokens_per_step < 1 or config.max_sequences < 1:
        raise UserError(
            f"engine: cache_tokens {config.cache_tokens} (at least {ops.PAGE}), max_tokens_per_step "
            f"{config.max_tokens_per_step} and max_sequences {config.max_sequences} must be positive"
        )
