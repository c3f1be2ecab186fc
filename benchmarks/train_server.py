"""The training API: a step against the trainer's own, samples of many clients at once, start-up, memory of a client.

    python benchmarks/train_server.py [--work step|samples|start|memory] [--model qwen3:tiny] [--dtype float32]
        [--rank 16] [--rounds 20]

Fresh weights of the preset's shape, in a server process; the `tinker` client is in this one. The sides of a
comparison take turns in one run; seconds are wall-clock, since the client's, the server's and the way between them
count.

step: forward_backward with importance_sampling and optim_step, 8 groups of 4 samples of 56 tokens after prompts of 8,
against packing, `PolicyLoss` and `Trainer.step` on the same rollouts, as `lockstep rl` does it.
samples: 16 clients, each with an adapter, sample 64 tokens after a prompt of 32, all at once and one after the other.
start: from the process until /health answers, against `lockstep serve`.
memory: the growth of the server's resident size with each of 15 further clients that have trained, once it has been
idle for long enough to return freed memory, against the size of an adapter, its masters and moments.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from lora import processor

from lockstep.config import RLConfig, TrainConfig, algorithm_of
from lockstep.data import ByteTokenizer
from lockstep.generate.server.engine_loop import IDLE_SECONDS
from lockstep.model import (
    Decoder,
    ModelConfig,
    begin_adapter,
    build_model,
    lora_of,
    preset,
    read_config,
    resolve_dtype,
    save_model,
)
from lockstep.model.adapters import Adapter
from lockstep.rl.environments.protocol import Example
from lockstep.rl.rollouts.packing import packing_of, policy_batches
from lockstep.rl.rollouts.records import Rollout
from lockstep.rl.scoring.policy_loss import PolicyLoss
from lockstep.train import Trainer

NAME, ALPHA = "Qwen/Qwen3-8B", 32.0
"""What clients call the model (one whose name the cookbook knows), and the server's alpha."""
GROUPS, SAMPLES, PROMPT, SAMPLED = 8, 4, 8, 56
CLIENTS, SAMPLER_PROMPT, NEW_TOKENS = 16, 32, 64
LEARNING_RATE = 1e-5
WARM_STEPS = 3


@contextmanager
def serving(command: str, folder: Path, *options: str) -> Iterator[tuple[str, float, int]]:
    """URL, seconds until /health answered, and process id of a server in a process of its own."""
    began = time.perf_counter()
    arguments = [sys.executable, "-m", "lockstep", command, "--model", str(folder / "model"), "--port", "0", *options]
    with (folder / f"{command}.log").open("w") as log, (folder / f"{command}.log").open() as written:
        process = subprocess.Popen(arguments, stdout=log, stderr=log)
        try:
            text = ""
            while not (found := re.search(r"running on (http://\S+)", text)):
                assert process.poll() is None, text
                time.sleep(0.005)
                text += written.read()
            assert httpx.get(f"{found[1]}/health").status_code == 200
            yield found[1], time.perf_counter() - began, process.pid
        finally:
            process.terminate()
            process.wait()


@contextmanager
def train_server(options: argparse.Namespace, folder: Path) -> Iterator[tuple[Any, int]]:
    """A client of a server, and the server's process id."""
    import tinker

    settings = ("--output", str(folder / "states"), "--model-name", NAME, "--dtype", options.dtype)
    with (
        serving("train-server", folder, *settings) as (url, _, pid),
        tinker.ServiceClient(base_url=url, api_key="tml-none") as client,
    ):
        yield client, pid


def training_client(client: Any, rank: int, seed: int) -> Any:
    made = client.create_lora_training_client(base_model=NAME, rank=rank, seed=seed, train_unembed=False)
    return made.result()


def random_rollouts(vocab_size: int) -> list[Rollout]:
    """Groups of samples, half of each with the advantage 1 and half with -1."""
    draw = random.Random(0)
    rollouts = []
    for group in range(GROUPS):
        prompt = [draw.randrange(vocab_size) for _ in range(PROMPT)]
        for number in range(SAMPLES):
            tokens = [draw.randrange(vocab_size) for _ in range(SAMPLED)]
            log_probs = [-draw.uniform(7, 8) for _ in tokens]
            rollout = Rollout(Example(str(group)), group, prompt, tokens, log_probs, "length", "", 0)
            rollout.scores.advantage = 1.0 if number % 2 else -1.0
            rollouts.append(rollout)
    return rollouts


def data_of(rollouts: Sequence[Rollout]) -> list[Any]:
    """What a client sends for rollouts."""
    from tinker import types

    weight, data = 1.0 / sum(rollout.num_sampled for rollout in rollouts), []
    for rollout in rollouts:
        tokens, nothing = rollout.prompt_ids + rollout.token_ids, [0.0] * (len(rollout.prompt_ids) - 1)
        inputs: dict[str, Any] = {
            "target_tokens": tokens[1:],
            "logprobs": nothing + rollout.logprobs,
            "advantages": nothing + [weight * advantage for advantage in rollout.advantages_of_tokens()],
        }
        data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    return data


def adapted_shape(options: argparse.Namespace, folder: Path) -> ModelConfig:
    shape = read_config(folder / "model")
    return replace(shape, lora=lora_of(shape, options.rank, ALPHA, ("*_proj*",)))


def trainer_of(options: argparse.Namespace, folder: Path) -> Trainer:
    """The trainer of a run with the same adapter."""
    model = Decoder(adapted_shape(options, folder), resolve_dtype(options.dtype))
    begin_adapter(model, folder / "model", 0)
    train = TrainConfig(learning_rate=LEARNING_RATE, schedule="constant", warmup_steps=0, max_grad_norm=1.0)
    return Trainer(model, train, 1_000_000)


def compare_steps(options: argparse.Namespace, folder: Path) -> None:
    from tinker import types

    trainer, config = trainer_of(options, folder), RLConfig(max_new_tokens=SAMPLED)
    rollouts = random_rollouts(trainer.model.config.vocab_size)
    adam = types.AdamParams(learning_rate=LEARNING_RATE, eps=1e-8, grad_clip_norm=1.0)
    with train_server(options, folder) as (client, pid):
        training = training_client(client, options.rank, 0)

        def through_api() -> None:
            computed = training.forward_backward(data_of(rollouts), "importance_sampling")
            updated = training.optim_step(adam)
            computed.result()
            updated.result()

        def by_trainer() -> None:
            batches = policy_batches(rollouts, packing_of(config))
            trainer.step(batches, PolicyLoss(algorithm_of(config), 1.0, compare=True))

        sides = {"trainer": by_trainer, "API": through_api}
        clocks = {
            "wall-clock": time.perf_counter,
            "processor": lambda: time.process_time() + seconds_of_process(pid),
            "server's processor": lambda: seconds_of_process(pid),
        }
        seconds: dict[str, list[list[float]]] = {name: [] for name in sides}
        for number in range(options.rounds + WARM_STEPS):
            for name, step in sides.items():
                began = [clock() for clock in clocks.values()]
                step()
                if number >= WARM_STEPS:
                    seconds[name].append([clock() - start for clock, start in zip(clocks.values(), began)])
    for index, clock in enumerate(clocks):
        for summary in (min, statistics.median):
            ours, api = (1e3 * summary(each[index] for each in seconds[name]) for name in sides)
            ratio = f", {api / ours:.3f}" if ours > 1 else ""
            print(f"step, {clock} time, {summary.__name__}: trainer {ours:.1f} ms, API {api:.1f} ms{ratio}")


def compare_samples(options: argparse.Namespace, folder: Path) -> None:
    from tinker import types

    draw = random.Random(0)
    with train_server(options, folder) as (client, pid):
        samplers = []
        for number in range(CLIENTS):
            training = training_client(client, options.rank, number)
            samplers.append(training.save_weights_and_get_sampling_client().result())

        def sample(sampler: Any) -> Any:
            prompt = types.ModelInput.from_ints([draw.randrange(256) for _ in range(SAMPLER_PROMPT)])
            return sampler.sample(prompt, 1, types.SamplingParams(max_tokens=NEW_TOKENS, seed=1, stop=[]))

        least = {"one after the other": [math.inf] * 2, "at once": [math.inf] * 2}
        for _ in range(options.rounds):
            for name in least:
                began = time.perf_counter(), seconds_of_process(pid)
                if name == "at once":
                    answers = [future.result() for future in [sample(sampler) for sampler in samplers]]
                else:
                    answers = [sample(sampler).result() for sampler in samplers]
                took = time.perf_counter() - began[0], seconds_of_process(pid) - began[1]
                assert sum(len(each.tokens) for answer in answers for each in answer.sequences) == CLIENTS * NEW_TOKENS
                least[name] = [*map(min, least[name], took)]
    for name, (seconds, of_server) in least.items():
        speed = CLIENTS * NEW_TOKENS / seconds
        print(f"samples of {CLIENTS} clients {name}: {speed:,.0f} tokens/s, {of_server:.2f} processor seconds")
    ratios = [one / other for one, other in zip(*least.values())]
    print(f"at once: {ratios[0]:.2f} times the speed, {ratios[1]:.2f} in the server's processor time")


def compare_starts(options: argparse.Namespace, folder: Path) -> None:
    commands = {"serve": (), "train-server": ("--output", str(folder / "states"))}
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(min(options.rounds, 5)):
        for name, settings in commands.items():
            with serving(name, folder, *settings) as (_, until_health, _):
                seconds[name].append(until_health)
    for name, each in seconds.items():
        print(f"start of {name}: best {min(each):.2f} s, median {statistics.median(each):.2f} s until /health")


def measure_memory(options: argparse.Namespace, folder: Path) -> None:
    from tinker import types

    data = data_of(random_rollouts(256))
    with train_server(options, folder) as (client, pid):
        clients, resident = [], []
        for number in range(CLIENTS):
            training = training_client(client, options.rank, number)
            training.forward_backward(data, "importance_sampling").result()
            training.optim_step(types.AdamParams(learning_rate=LEARNING_RATE)).result()
            clients.append(training)
            if number in (0, CLIENTS - 1):
                time.sleep(1.5 * IDLE_SECONDS)
                resident.append(resident_bytes(pid))
    of_weights = Adapter(adapted_shape(options, folder), resolve_dtype(options.dtype), "meta").nbytes
    # Float32 weights are their own masters; two moments.
    of_state = 3 * of_weights if options.dtype == "float32" else 7 * of_weights
    each = (resident[-1] - resident[0]) / (CLIENTS - 1)
    print(f"a further client: {each / 2**20:.2f} MiB resident; adapter and optimizer have {of_state / 2**20:.2f} MiB")


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def seconds_of_process(pid: int) -> float:
    """Processor seconds that a process has taken."""
    return time.clock_gettime((~pid << 3) | 2)


WORK = {"step": compare_steps, "samples": compare_samples, "start": compare_starts, "memory": measure_memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=WORK, action="append")
    parser.add_argument("--model", default="qwen3:tiny")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    print(f"{options.model}, {options.dtype}, rank {options.rank}, all linear layers")
    print(f"{processor()}, OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'unset')}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(build_model(preset(options.model), options.dtype), folder / "model")
        ByteTokenizer().save(folder / "model")
        for work in options.work or WORK:
            WORK[work](options, folder)


if __name__ == "__main__":
    main()
