"""A model for lm-eval (EleutherAI's evaluation harness), with the trainer's log-probabilities and the engine.

Importing this module registers it as `lockstep`, and needs the package `lm-eval`:

    import lm_eval, lockstep.harness

    lm_eval.simple_evaluate(model="lockstep", model_args="pretrained=DIR", tasks=["arc_easy", "gsm8k"])

`python -m lockstep.harness` is lm-eval's command line with this model:

    python -m lockstep.harness --model lockstep --model_args pretrained=DIR --tasks arc_easy gsm8k
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from lockstep import ops
from lockstep.checkpoint import model_folder, open_model
from lockstep.commands.terminal import printable
from lockstep.config import EngineConfig
from lockstep.data import continuation, load_tokenizer, with_ends
from lockstep.data.chat import ChatTemplateError, load_chat_template
from lockstep.errors import UserError, closest
from lockstep.generate import Engine, SamplingParams
from lockstep.generate.draws import LOGITS_ELEMENTS
from lockstep.ops.logprobs import logits_log_probs, row_factors
from lockstep.shared_prefixes import Scored, packed_batches
from lockstep.train.packing import pack_scored, predicting_states

try:
    from lm_eval import utils
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
except ModuleNotFoundError as error:
    missing = f"{error.name} is not installed; pip install 'lm-eval[hf]>=0.4.13'"
    if __name__ == "__main__":
        print(f"lockstep: {missing}", file=sys.stderr)
        sys.exit(2)
    raise UserError(missing) from error

IGNORED = {"batch_size", "max_batch_size"}
DEFAULT_DEVICE = "cuda:0"
"""lm-eval's default for --device, even on a machine without CUDA."""
SAMPLING = {"temperature", "top_k", "top_p", "min_p", "seed"}
Request = tuple[Any, list[int], list[int]]
"""Cache key, tokens of the context, and tokens of the continuation."""


@register_model("lockstep")
class LockstepLM(TemplateLM):
    """`pretrained` is a Hugging Face folder, a run's folder or a model on the hub, as for every command.

    tokens_per_batch: per forward pass, with shared prefixes counted once. max_gen_toks: default limit of a generation.
    Arguments that lm-eval always passes, such as batch_size, have no effect. Raises UserError for a model that cannot
    be used, and for unknown arguments.
    """

    def __init__(
        self,
        pretrained: str,
        dtype: str = "auto",
        device: str | None = None,
        arithmetic: str = "auto",
        tokens_per_batch: int = 4096,
        max_gen_toks: int = 256,
        **others: Any,
    ):
        super().__init__()
        if unknown := sorted(others.keys() - IGNORED):
            known = ("dtype", "device", "arithmetic", "tokens_per_batch", "max_gen_toks")
            raise UserError(
                f"model_args: {unknown[0]} is not an argument of lockstep.{closest(unknown[0], known)} Known: "
                f"pretrained, {', '.join(known)}; give an adapter's folder as pretrained"
            )
        if device == DEFAULT_DEVICE and not torch.cuda.is_available():
            device = None
        folder = model_folder(pretrained)
        self.model = open_model(folder, dtype, device or "", arithmetic)
        self.tokenizer = load_tokenizer(folder, self.model.config.vocab_size)
        self.model.config = with_ends(self.model.config, self.tokenizer, load_chat_template(folder))
        self.max_length = self.model.config.max_positions
        self.tokens_per_batch, self.max_gen_toks = int(tokens_per_batch), int(max_gen_toks)
        self._folder = folder
        self._special = frozenset(self.tokenizer.special_tokens().values())
        self._before = self.tokenizer.added_before()

    @property
    def eot_token_id(self) -> int:
        """The end-of-text token, which also begins a text without context if there is no beginning-of-text token."""
        if self.tokenizer.eos_id is None:
            raise UserError(
                f"{self._folder}: its tokenizer has no end-of-text token; name one in tokenizer_config.json"
            )
        return int(self.tokenizer.eos_id)

    @property
    def prefix_token_id(self) -> int:
        """The token that a text without context begins with."""
        bos = self.tokenizer.bos_id
        return self.eot_token_id if bos is None else int(bos)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **others: Any) -> list[int]:
        """Encodes like transformers' tokenizer of the folder: with a beginning-of-text token if that one adds it."""
        tokens: list[int] = self.tokenizer.encode(string)
        if add_special_tokens is False or tokens[: len(self._before)] == self._before:
            return tokens
        return self._before + tokens

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, **others: Any
    ) -> list[tuple[float, bool]]:
        sequences = [self._scored(context, continuation) for _, context, continuation in requests]
        scores: dict[Scored, tuple[float, bool]] = {}
        for batch in packed_batches(sorted(set(sequences)), self.tokens_per_batch):
            scores |= self._score([sequence for sequence, _ in batch], [shared for _, shared in batch])
        answers = [scores[sequence] for sequence in sequences]
        for (name, _, _), answer in zip(requests, answers):
            if name is not None:
                self.cache_hook.add_partial("loglikelihood", name, answer)
        return answers

    def _scored(self, context: list[int], continuation: list[int]) -> Scored:
        """The last tokens that fit the context, plus one: the last token is only predicted."""
        tokens = (context + continuation)[-(self.max_length + 1) :]
        return Scored(tuple(tokens), max(1, len(tokens) - len(continuation)))

    @torch.no_grad()
    def _score(self, sequences: list[Scored], shared: list[int]) -> dict[Scored, tuple[float, bool]]:
        """For each sequence, the log-probability of its scored tokens, and whether all of them are the likeliest."""
        targets = [range(sequence.first, len(sequence.tokens)) for sequence in sequences]
        tokens = [sequence.tokens for sequence in sequences]
        row = pack_scored(tokens, targets, shared, self.model.device)
        states = predicting_states(self.model, row)
        log_probs: list[float] = []
        likeliest: list[bool] = []
        for part in torch.arange(len(states)).split(max(1, LOGITS_ELEMENTS // self.model.config.vocab_size)):
            logits, chosen = self.model.logits(states[part], row.predictors[part]), row.targets[part]
            log_probs += logits_log_probs(logits, chosen, row_factors(1.0, states[part]))[0].tolist()
            likeliest += (logits.argmax(-1) == chosen).tolist()
        scores: dict[Scored, tuple[float, bool]] = {}
        begin = 0
        for sequence, scored in zip(sequences, targets):
            part = slice(begin, begin + len(scored))
            scores[sequence] = math.fsum(log_probs[part]), all(likeliest[part])
            begin += len(scored)
        return scores

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of whole texts, in windows of the context that predict each token once."""
        windows, counts = list[Request](), []
        for request in requests:
            rolling = utils.get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, context_len=1
            )
            split = [utils.make_disjoint_window(window) for window in rolling]
            windows += [(None, context, continuation) for context, continuation in split]
            counts.append(len(split))
        scores = iter(self._loglikelihood_tokens(windows))
        totals = [math.fsum(next(scores)[0] for _ in range(count)) for count in counts]
        for request, total in zip(requests, totals):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts up to the first of a request's stop strings, with all requests in one call of the engine."""
        inputs = [self._engine_request(*request.args) for request in requests]
        groups = self._engine.generate([prompt for prompt, _ in inputs], [params for _, params in inputs])
        texts = []
        for request, (prompt, params), (completion,) in zip(requests, inputs, groups):
            sampled = [t for t in completion.token_ids if t not in self._special]
            text = continuation(self.tokenizer, prompt, sampled)
            for stop in params.stop:
                text = text.split(stop)[0]
            texts.append(text)
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _engine_request(self, context: str, arguments: dict[str, Any]) -> tuple[list[int], SamplingParams]:
        options: dict[str, Any] = dict(normalize_gen_kwargs(arguments, self.max_gen_toks))
        until, limit = options.pop("until", None) or [], int(options.pop("max_gen_toks"))
        options.pop("do_sample", None)
        if unknown := sorted(options.keys() - SAMPLING):
            raise UserError(f"the task needs {', '.join(unknown)}, which the engine does not support")
        room = self.max_length - limit
        if room < 1:
            raise UserError(
                f"the task generates up to {limit} tokens, but the model's context has {self.max_length}; lower "
                "max_gen_toks"
            )
        stops = tuple(stop for stop in ([until] if isinstance(until, str) else until) if stop)
        prompt = self.tok_encode(context)[-room:] or [self.prefix_token_id]
        return prompt, SamplingParams(max_tokens=limit, stop=stops, **options)

    @cached_property
    def _engine(self) -> Engine:
        cache = max(65536, self.max_length + ops.PAGE)
        return Engine(self.model, EngineConfig(cache_tokens=cache), self.tokenizer)

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name in lm-eval's cache."""
        return str(self._folder).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The source of the folder's template, for lm-eval's records."""
        template = load_chat_template(self._folder) if chat_template else None
        return template.source if template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text. Raises UserError if the model has no template, or it refuses the messages."""
        template = load_chat_template(self._folder)
        if template is None:
            raise UserError(f"{self._folder}: has no chat template; put a chat_template.jinja next to its weights")
        try:
            return template.render(chat_history, add_generation_prompt=add_generation_prompt)
        except ChatTemplateError as error:
            raise UserError(str(error)) from error


def main() -> int:
    """Runs lm-eval's command line, which has `lockstep` among its models; returns the exit code."""
    try:
        cli_evaluate()
    except UserError as error:
        print(f"lockstep: {printable(str(error))}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
