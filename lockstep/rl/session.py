"""The parts of a reinforcement run for a loop of one's own, in one process: a notebook's, say.

What a run of `lockstep rl` has around its steps is another class, `lockstep.run.session.Session`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.checkpoint import load_model, model_folder
from lockstep.config import ALGORITHMS, Algorithm, CompileConfig, EngineConfig, ParallelConfig, TrainConfig
from lockstep.config.bounds import bound_problems
from lockstep.config.train import train_problems
from lockstep.data import Tokenizer, load_tokenizer, with_ends
from lockstep.data.chat import load_chat_template
from lockstep.errors import UserError, closest
from lockstep.generate import Engine, SamplingParams
from lockstep.model import Decoder, open_device, save_model
from lockstep.parallel import World
from lockstep.rl.algorithms import LossFunction
from lockstep.rl.algorithms.own import advantages_of_groups, own_loss
from lockstep.rl.conversations.rendering import Rendering
from lockstep.rl.environments.protocol import Example
from lockstep.rl.generators.models import sampling_model
from lockstep.rl.rollouts.collect import complete
from lockstep.rl.rollouts.packing import Packing, policy_batches
from lockstep.rl.rollouts.records import Rollout
from lockstep.rl.scoring.policy_loss import PolicyLoss
from lockstep.train import Trainer, score

Groups = Sequence[Sequence[Rollout]]
"""`groups[i][j]` is completion j of prompt i."""


class Session:
    """A policy that a loop of one's own samples from and trains. Trainer and engine read the same tensors.

    ```
    session = rl.Session("Qwen/Qwen3-0.6B", params=lockstep.SamplingParams(max_tokens=64))
    groups = session.sample(["2+2="], n=8)
    metrics = session.update(groups, [[float("4" in rollout.completion) - 0.5 for rollout in groups[0]]])
    ```
    """

    def __init__(
        self,
        model: Decoder | str | Path,
        tokenizer: Tokenizer | None = None,
        params: SamplingParams | None = None,
        train: TrainConfig | None = None,
        engine: EngineConfig | None = None,
        dtype: str = "auto",
        device: str = "",
        seed: int = 0,
    ):
        """model: one in memory, with its `tokenizer`, or a folder or a name on the hub, loaded in `dtype` on `device`
        with its own tokenizer and chat template. params: how `sample` samples, apart from `n` and `seed`; log-
        probabilities are computed at its temperature. train: optimizer, by default AdamW at a constant 1e-5. seed: of
        all draws.

        Raises UserError for a model that cannot be loaded or trained, and for settings that need the number of updates.
        """
        self.params = params or SamplingParams()
        self.train = train or TrainConfig(learning_rate=1e-5, schedule="constant")
        self.seed, self.draws = seed, 0
        _refuse(self.params, self.train)
        template = None
        if not isinstance(model, Decoder):
            folder = model_folder(model)
            model = load_model(folder, dtype, open_device(device))
            tokenizer = tokenizer or load_tokenizer(folder, model.config.vocab_size)
            template = load_chat_template(folder)
        if tokenizer is None:
            raise UserError("a model in memory has no tokenizer; give the session both: Session(model, tokenizer)")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise UserError("all weights of the model are frozen; load it with lockstep.load_model")
        model.config = with_ends(model.config, tokenizer, template)
        world = World(model.device)
        self.model = sampling_model(model, world, dtype, ParallelConfig(), CompileConfig())
        self.tokenizer = tokenizer
        self.trainer = Trainer(self.model, self.train, total_updates=0, world=world)
        self.engine = Engine(self.model, engine, tokenizer)
        self._rendering = Rendering(tokenizer, template, model.config.eos_token_ids)
        ends = (*self.params.stop_token_ids, *self._rendering.end_ids)
        self.params = replace(self.params, stop_token_ids=tuple(dict.fromkeys(ends)))

    def sample(self, prompts: Sequence[str | Example], n: int = 8, **changes: Any) -> list[list[Rollout]]:
        """`n` completions of each prompt: `result[i][j]` is completion j of prompt i, with its text, tokens and
        log-probabilities.

        A prompt is a text, which a chat template renders as a user message, or an `Example`. changes: fields of
        `SamplingParams` for this call, such as `stop` or `max_tokens`. Raises UserError for prompts that do not fit.
        """
        params = replace(self.params, n=n, **changes)
        if params.temperature != self.params.temperature:
            raise UserError(
                f"temperature is {params.temperature}, but this session trains at {self.params.temperature}; give it "
                "to the Session, or sample with session.engine what is not trained on"
            )
        examples = [prompt if isinstance(prompt, Example) else Example(prompt) for prompt in prompts]
        seed = [self.seed, self.draws, 0]
        self.draws += 1
        rollouts = iter(complete(dict(enumerate(examples)), params, seed, self.engine, self._rendering))
        return [[next(rollouts) for _ in range(n)] for _ in examples]

    def score(self, sequences: Sequence[Rollout | Sequence[int]]) -> list[Tensor]:
        """The trainer's log-probabilities, float32, without a gradient.

        Of a rollout, one per sampled token: bit for bit its `logprobs`, while the weights are those that sampled it.
        Of a list of token ids, as `lockstep.score`. Both at the session's temperature. Raises UserError as that does.
        """
        tokens = [s.prompt_ids + s.token_ids if isinstance(s, Rollout) else s for s in sequences]
        scores = score(self.model, tokens, self.params.temperature, self.train.tokens_per_microbatch)
        firsts = [len(s.prompt_ids) - 1 if isinstance(s, Rollout) else 0 for s in sequences]
        return [each[first:] for each, first in zip(scores, firsts)]

    def update(
        self,
        groups: Groups,
        advantages: Any,
        algorithm: str | Algorithm = "grpo",
        loss: LossFunction | None = None,
    ) -> dict[str, float]:
        """One optimizer step on completions of `sample`; returns its metrics, named as in `metrics.jsonl`.

        advantages: for each group a tensor or a list, with one number per completion, or one per token of each. Loss,
        averaging, clipping, KL divergence and entropy bonus are those of `algorithm`; `loss` replaces its loss. A KL
        divergence needs `rollout.scores.reference_logprobs`.

        From the second update on the same completions on, their ratios leave 1. Log-probabilities of completions of the
        current weights are compared with the trainer's: raises ParityError if any differs, and UserError for unfitting
        advantages or losses.
        """
        algorithm = _algorithm(algorithm)
        lengths = [[rollout.num_sampled for rollout in group] for group in groups]
        for rollout, advantage in zip(_flat(groups), _flat(advantages_of_groups(advantages, lengths, "update gets"))):
            if algorithm.kl_coefficient and not rollout.scores.reference_logprobs:
                raise UserError("kl_coefficient needs rollout.scores.reference_logprobs of every completion; set them")
            rollout.scores.token_advantages = advantage if isinstance(advantage, list) else []
            rollout.scores.advantage = 0.0 if isinstance(advantage, list) else advantage
        packing = Packing(
            self.train.tokens_per_microbatch,
            self.params.max_tokens,
            algorithm.loss_average,
            mask_truncated=False,
            share_prompts=not self.train.deterministic_layout,
            deterministic_layout=self.train.deterministic_layout,
        )
        version = self.engine.weights_version
        batches = policy_batches(list(_flat(groups)), packing, self.model.device, version=version)
        policy_loss = PolicyLoss(algorithm, self.params.temperature, compare=True, own=own_loss(loss))
        metrics = self.trainer.step(batches, policy_loss) | policy_loss.metrics()
        self.engine.weights_changed(version + 1)
        policy_loss.parity.require_equal(version + 1, "stop", self.model)
        return metrics | policy_loss.parity.metrics()

    def save(self, folder: str | Path) -> None:
        """Writes a Hugging Face folder with model and tokenizer. The optimizer's state is not saved."""
        save_model(self.model, folder)
        self.tokenizer.save(Path(folder))


def _flat(groups: Sequence[Sequence[Any]]) -> Iterator[Any]:
    return (each for group in groups for each in group)


def _algorithm(algorithm: str | Algorithm) -> Algorithm:
    if isinstance(algorithm, Algorithm):
        return algorithm
    if algorithm not in ALGORITHMS:
        raise UserError(
            f'there is no algorithm "{algorithm}".{closest(algorithm, ALGORITHMS)} Known: {", ".join(ALGORITHMS)}'
        )
    return ALGORITHMS[algorithm]


def _refuse(params: SamplingParams, train: TrainConfig) -> None:
    """Raises UserError for settings with which a session cannot sample or train."""
    problems = [*bound_problems(train, "train."), *train_problems(train)]
    if params.temperature < 0.01:
        problems.append(f"temperature is {params.temperature}; give 0.01 or more to the session's params")
    if train.schedule not in ("constant", "csv"):
        problems.append(
            f'train.schedule is "{train.schedule}", which needs the number of updates; set it to "constant" or "csv"'
        )
    if problems:
        raise UserError("this session cannot train:\n" + "\n".join(f"  - {problem}" for problem in problems))
