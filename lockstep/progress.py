"""A progress bar with the remaining time, or a line every few seconds if the output is not a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """Counts up to `total`, in percent or in `unit`s, with a few metrics next to the bar. A context manager."""

    def __init__(self, title: str, total: float, unit: str = ""):
        self.title, self.unit = title, unit
        self.total = total
        self.done = 0.0
        self._bar: Any = None
        self._ended = False
        self._began = self._last_line = time.monotonic()

    def __enter__(self) -> Progress:
        self._began = time.monotonic()
        if sys.stdout.isatty():
            from rich import progress

            self._bar = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.TaskProgressColumn(),
                progress.TimeRemainingColumn(),
                progress.TextColumn("{task.fields[metrics]}"),
            )
            self._bar.start()
            self._task = self._bar.add_task(self.title, total=self.total, metrics="")
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, amount: float = 1.0, title: str = "", **metrics: float) -> None:
        """Adds `amount` to what is done."""
        self.done += amount
        text = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        if self._bar is not None:
            metrics_text = "  ".join(filter(None, (self._place(), text)))
            self._bar.update(self._task, completed=self.done, description=title or self.title, metrics=metrics_text)
            return
        now = time.monotonic()
        ended_before, self._ended = self._ended, self.done >= self.total
        if now - self._last_line >= SECONDS_BETWEEN_LINES or (self._ended and not ended_before):
            self._last_line = now
            share = self.done / self.total if self.total else 1.0
            left = (now - self._began) * (1 - share) / share if share > 0 else 0.0
            print(f"{title or self.title}: {self._place() or f'{share:4.0%}'}, {left:.0f} s left  {text}", flush=True)

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints the validation after `step`, or before step 1, on a separate line, on every kind of output."""
        when = f"after step {step}" if step else "before step 1"
        self._print(f"{self.title}: validation {when}: {_validation_text(metrics)}")

    def _print(self, line: str) -> None:
        line = line.encode(sys.stdout.encoding or "utf-8", "backslashreplace").decode(sys.stdout.encoding or "utf-8")
        if self._bar is None:
            print(line, flush=True)
        else:  # above the bar, unwrapped and without markup
            self._bar.console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def _place(self) -> str:
        """`step 12 of 200`, if steps are counted."""
        return f"{self.unit} {self.done:.0f} of {self.total:.0f}" if self.unit else ""

    def reach(self, done: float, title: str = "", **metrics: float) -> None:
        """Sets the progress to `done`, which may be less than before."""
        self.advance(done - self.done, title, **metrics)

    def stage(self, title: str, steps: int, share: float) -> Stage:
        """A part of this bar with separate progress: its `steps` make up `share` of the total."""
        return Stage(self, title, share / steps)


class Stage(Progress):
    """A loop's progress within a longer one; leaving it does not end the bar."""

    def __init__(self, whole: Progress, title: str, amount: float):
        super().__init__(title, 1)
        self._whole, self._amount = whole, amount

    def __enter__(self) -> Stage:
        return self

    def advance(self, amount: float = 1.0, title: str = "", **metrics: float) -> None:
        self.done += amount
        self._whole.advance(amount * self._amount, title or self.title, **metrics)

    def _print(self, line: str) -> None:
        self._whole._print(line)


def _validation_text(metrics: Mapping[str, float]) -> str:
    """`validation/…` metrics as `reward 0.5  accuracy 0.25 (stderr 0.1)`."""
    values = {name.removeprefix("validation/"): value for name, value in metrics.items()}
    shown = [
        f"{name} {value:.4g}" + (f" (stderr {values[error]:.4g})" if (error := f"{name}_stderr") in values else "")
        for name, value in values.items()
        if not (name.endswith("_stderr") and name.removesuffix("_stderr") in values)
    ]
    return "  ".join(shown)
