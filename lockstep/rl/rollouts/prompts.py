"""The order in which a run uses its examples, and its position in it."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from lockstep.data.encode import surrogate_problem
from lockstep.errors import UserError
from lockstep.observe import log
from lockstep.parallel import World
from lockstep.python_file import user_line
from lockstep.rl.conversations.message_prompts import prompt_messages
from lockstep.rl.environments.protocol import Environment, Example, source_file

MOST_EXAMPLES = 1_000_000
"""Most examples per split: an iterator that yields more is considered endless."""


class PromptLoader:
    """Examples in a new order every epoch, each order a function of (seed, epoch) alone.

    No step has an example twice, unless it requests more than there are: examples left at the end of an epoch that are
    too few for a step are skipped, and the next epoch begins, in another order.
    """

    def __init__(self, examples: Sequence[Example], seed: int):
        self.examples = list(examples)
        self.seed = seed
        self.position = 0
        self.left_out = 0
        """Number of places before `position` that were skipped at the ends of epochs."""

    def shared(self, others: Sequence[Example]) -> int:
        """How many of `others` have the same prompt and answer as one of the examples."""
        questions = {_question(example) for example in self.examples}
        return sum(bool(example.prompt) and _question(example) in questions for example in others)

    def next(self, count: int) -> list[Example]:
        """The next `count` examples: from one epoch, or from several if there are fewer examples."""
        return [self.at(place) for place in self.next_places(count)]

    def next_places(self, count: int) -> list[int]:
        """As `next`, but the positions of those examples in the order of the whole run."""
        left = len(self.examples) - self.position % len(self.examples)
        if left < count <= len(self.examples):
            self.position += left
            self.left_out += left
        self.position += count
        return list(range(self.position - count, self.position))

    def at(self, place: int) -> Example:
        """The example at a position in the order of the whole run."""
        epoch, index = divmod(place, len(self.examples))
        return self.examples[self._order(epoch)[index]]

    def state(self) -> dict[str, Any]:
        """The run's position, for `restore`."""
        return {"position": self.position, "left_out": self.left_out, "examples": fingerprint(self.examples)}

    def restore(self, state: Any) -> None:
        """Continues from `state`. Raises UserError if the examples differ from those with which it was saved."""
        if (now := fingerprint(self.examples)) != (then := state["examples"]):
            raise UserError(
                f"the environment's training examples differ from those when the run was saved (number and digest were "
                f"{then}, now {now}); resume with the same examples, or start a new run"
            )
        self.position, self.left_out = state["position"], state["left_out"]

    def _order(self, epoch: int) -> np.ndarray:
        if getattr(self, "_epoch", None) != epoch:
            self._epoch = epoch
            self._permutation = np.random.default_rng([self.seed, epoch]).permutation(len(self.examples))
        return self._permutation


def fingerprint(examples: Sequence[Example], whole: bool = False) -> str:
    """The number of examples, and a digest of their prompts and answers in order, or of all that JSON can express."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(_question(example).encode())
        if whole:
            digest.update(_in_json((example.id, dict(example.metadata))).encode())
    return f"{len(examples)} {digest.hexdigest()[:16]}"


def _in_json(value: Any) -> str:
    """JSON, with only the type of objects that it cannot express: their repr may contain a memory address."""
    try:
        return json.dumps(value, sort_keys=True, default=lambda value: type(value).__name__)
    except (TypeError, ValueError, RecursionError):
        return type(value).__name__


def refuse_other_examples(split: str, examples: Sequence[Example], world: World) -> None:
    """Raises UserError if ranks have read other examples than the first: they would treat them as the same."""
    first, *others = world.gather(fingerprint(examples, whole=True))
    different = [rank for rank, digest in enumerate(others, 1) if digest != first]
    if different:
        raise UserError(
            f'the environment\'s "{split}" examples on rank {different[0]} differ from those on rank 0 '
            f"(number and digest: {others[different[0] - 1]}, not {first}); make `examples` yield the same on every "
            "rank: seed its random draws, and sort its listings"
        )


def examples_of(environment: Environment, split: str) -> list[Example]:
    """All examples of a split. A warning counts duplicates, which are used as often as they occur.

    Raises UserError if there are none or endlessly many, or if the environment's code fails.
    """
    kind = type(environment)
    if not isinstance(environment, Environment):
        kind_name = f"the class {environment.__name__}" if isinstance(environment, type) else f"a {kind.__name__}"
        raise UserError(
            f"the environment is {kind_name}; pass an instance of a subclass of rl.Environment, e.g. MyTask()"
        )
    try:
        yielded = environment.examples(split)
        if yielded is None:
            raise UserError(f'{kind.__name__}.examples("{split}") returns None; it must yield rl.Example')
        examples = list(itertools.islice(yielded, MOST_EXAMPLES + 1))
    except UserError:
        raise
    except Exception as error:  # the user's code may raise anything
        call = f'{user_line(error, source_file(kind))}: {kind.__name__}.examples("{split}")'
        raise UserError(f"{call} failed ({type(error).__name__}: {error})") from error
    if len(examples) > MOST_EXAMPLES:
        raise UserError(
            f'{kind.__name__}.examples("{split}") yields more than {MOST_EXAMPLES:,} examples, or never ends; yield '
            "fewer, for example with itertools.islice: every epoch uses all of them"
        )
    if not examples:
        without = "; validation_examples = 0 trains without validation" if split == "validation" else ""
        raise UserError(f'{kind.__name__}.examples("{split}") yields nothing; it must yield rl.Example{without}')
    if strange := next((e for e in examples if not isinstance(e, Example)), None):
        raise UserError(f'{kind.__name__}.examples("{split}") yields {strange!r:.60}; it must yield rl.Example')
    examples = [_checked(example, f'{kind.__name__}.examples("{split}")') for example in examples]
    if problem := _repeated(examples):
        log.warning('%s.examples("%s") yields %s', kind.__name__, split, problem)
    return examples


def _checked(example: Example, where: str) -> Example:
    """With the messages of its prompt as chat templates expect them. Raises UserError for a prompt that is none."""
    prompt, values = example.prompt, example.chat_template_kwargs
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{where}, {example.name!r:.80}: {surrogate_problem(prompt)}") from error
    elif isinstance(prompt, list):
        try:
            example = dataclasses.replace(example, prompt=prompt_messages(prompt))
        except ValueError as error:
            raise UserError(f"{where} yields the prompt {prompt!r:.80}, which {error}") from error
    else:
        raise UserError(
            f"{where} yields a prompt of type {type(prompt).__name__}; it must be a string, which the model's chat "
            "template renders as a user message, or a list of messages"
        )
    if not values:
        return example
    try:
        json.dumps(dict(values))
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"{where}, {example.name!r:.80}: its chat_template_kwargs are not an object of JSON values ({error})"
        ) from error
    return example


def _repeated(examples: Sequence[Example]) -> str:
    """What occurs more than once, in words; empty if nothing does."""
    contents = Counter(map(_question, examples))
    ids = Counter(e.id for e in examples if e.id)
    problems = []
    if repeated := len(examples) - len(contents):
        first = next(e for e in examples if contents[_question(e)] > 1)
        times = "example" if repeated == 1 else "examples"
        problems.append(f"{repeated} of {len(examples)} {times} again, such as {first.name}")
    if several := [name for name, count in ids.items() if count > 1]:
        named = ", ".join(map(repr, several[:3])) + (", …" if several[3:] else "")
        problems.append(f"the same id for several examples: {named}")
    return ", and ".join(problems)


def _question(example: Example) -> str:
    values = (dict(example.chat_template_kwargs),) if example.chat_template_kwargs else ()
    return repr((example.prompt, example.answer, *values))  # an environment can make them of anything
