"""Generators of vLLM: what is asked of it and what is refused, and a run with the real one where it is installed."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import torch

from lockstep.config import ActorsConfig, CompileConfig, EngineConfig, RewardConfig, RLConfig, TrainConfig
from lockstep.errors import UserError
from lockstep.generate import Completion, SamplingParams
from lockstep.model import build_model, load_model, preset, save_model
from lockstep.observe import read_metrics
from lockstep.parallel import World
from lockstep.rl.generators.http_remote import ServerSupervisor
from lockstep.rl.generators.open import resolve_generator_settings
from lockstep.rl.generators.pool import GeneratorPool
from lockstep.rl.generators.spec import GeneratorSpec
from lockstep.rl.weights.folders import WeightFolders
from tests.parallel.launch import free_port
from tests.rl.generators.peers import wait_until
from tests.rl.generators.test_colocated import TASK

PYTHON = Path(__file__).parents[3] / "benchmarks" / ".peers" / "vllm" / "bin" / "python"
WORLD = World(torch.device("cpu"))


class StandIn(ThreadingHTTPServer):
    """Answers as vLLM 0.32 does, as far as a run asks; samples the tokens 1, 2, 3 …, of log-probability -0.5."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.asked = []
        self.info = {
            "model_config": {"logprobs_mode": "processed_logprobs", "hf_overrides": {"tie_word_embeddings": False}},
            "scheduler_config": {"max_num_seqs": 8},
            "device_config": {"device": "cpu"},
            "load_config": {"load_format": "dummy"},
        }
        self.may_end = threading.Event()
        self.may_end.set()


class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self._answer(
            {
                "/v1/models": {"data": [{"id": "served", "owned_by": "vllm", "max_model_len": 512}]},
                "/server_info?config_format=json": self.server.info and {"vllm_config": self.server.info},
                "/health": {},
            }[self.path]
        )

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])) or "null")
        self.server.asked.append((self.path, body))
        if self.path != "/v1/completions":
            self._answer({"success": True})
            return
        self.send_response(200)
        self.end_headers()
        for number in range(body["max_tokens"]):
            last = number == body["max_tokens"] - 1
            if last:
                self.server.may_end.wait(10)
            for index in range(body["n"]):
                choice = {"index": index, "token_ids": [number + 1], "logprobs": {"token_logprobs": [-0.5]}}
                self._event({"choices": [choice | {"finish_reason": "length" if last else None}]})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event):
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def _answer(self, answer):
        content = json.dumps(answer).encode()
        self.send_response(200 if answer is not None else 404)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def vllm():
    with StandIn() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def spec_of(**changes):
    params = SamplingParams(n=2, temperature=0.9, max_tokens=4, seed=5)
    shape = dataclasses.replace(preset("qwen3:micro", 512, (0,)), max_positions=512)
    spec = GeneratorSpec("served", shape, "float32", "portable", EngineConfig(), CompileConfig(), params)
    return dataclasses.replace(spec, **changes)


@contextlib.contextmanager
def pool_of(vllm, **changes):
    pool = GeneratorPool(512, 16384, 20.0)
    pool.load_weights({"version": 3, "folder": "/weights/3"})
    with ServerSupervisor([vllm.url], spec_of(**changes), pool):
        yield pool


def test_vllm_is_asked_for_tokens_and_given_weights_between_requests(vllm):
    with pool_of(vllm) as pool:
        pool.wait_for_weights()
        vllm.may_end.clear()
        request = pool.begin([7, 8], spec_of().params)
        wait_until(lambda: min(len(sample.token_ids) for sample in request.samples) == 3)
        pool.load_weights({"version": 4, "folder": "/weights/4"})
        later = pool.begin([9], spec_of().params)
        vllm.may_end.set()
        wait_until(lambda: not request.unfinished and not later.unfinished)
    assert [sample.token_ids for sample in request.samples] == [[1, 2, 3, 4]] * 2
    assert [sample.logprobs for sample in request.samples] == [[-0.5] * 4] * 2
    assert [of.samples[0].versions for of in (request, later)] == [[3] * 4, [4] * 4]
    asked = [(path, body and body.get("kwargs", {}).get("weights_path")) for path, body in vllm.asked]
    load = [("/collective_rpc", None), ("/collective_rpc", "/weights/3"), ("/reset_prefix_cache", None)]
    assert asked[:4] == [*load, ("/v1/completions", None)]
    assert asked[4:] == [load[0], ("/collective_rpc", "/weights/4"), load[2], ("/v1/completions", None)]
    body = vllm.asked[3][1]
    # Otherwise the defaults of the model's generation_config.json apply.
    expected = dict(prompt=[7, 8], n=2, seed=5, temperature=0.9, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)
    assert body.items() >= expected.items()


def test_samples_that_another_has_begun_are_completed_by_vllm(vllm):
    begun = [Completion([40, 41], [-1.0] * 2, "abort", [], [3] * 2), Completion([42], [-1.0], "stop", [], [3])]
    with pool_of(vllm) as pool:
        request = pool.begin([7], spec_of().params, begun)
        wait_until(lambda: not request.unfinished)
    assert [sample.token_ids for sample in request.samples] == [[40, 41, 1, 2], [42]]
    ((_, body),) = [asked for asked in vllm.asked if asked[0] == "/v1/completions"]
    assert (body["prompt"], body["n"], body["max_tokens"]) == ([7, 40, 41], 1, 2)


def test_a_vllm_that_would_give_other_numbers_or_old_weights_is_refused_by_name(vllm):
    def refusal(**changes):
        with pytest.raises(UserError) as error, pool_of(vllm, **changes):
            pass
        assert str(error.value).startswith(vllm.url)
        return str(error.value)

    params = spec_of().params
    assert "remove top_k, top_p and min_p" in refusal(params=dataclasses.replace(params, top_p=0.9))
    assert "does not stream them; remove it" in refusal(params=dataclasses.replace(params, routes="whole"))
    assert "--max-model-len" in refusal(shape=dataclasses.replace(spec_of().shape, max_positions=600))
    vllm.info["model_config"]["logprobs_mode"] = "raw_logprobs"
    assert "--logprobs-mode processed_logprobs" in refusal()
    vllm.info["model_config"]["hf_overrides"] = {}
    at_one = dataclasses.replace(params, temperature=1.0)
    assert "tie_word_embeddings" in refusal(params=at_one)
    vllm.info["device_config"]["device"] = "cuda"
    with pool_of(vllm, params=at_one) as pool:
        pool.wait_for_weights()
    vllm.info = None
    assert "VLLM_SERVER_DEV_MODE=1" in refusal()


def test_the_correction_is_on_with_vllm_unless_the_run_says_otherwise(vllm, caplog):
    config = RLConfig(model="m", actors=ActorsConfig(urls=(vllm.url,)))
    suited = resolve_generator_settings(config, WORLD)
    assert (suited.off_policy, suited.on_parity_error) == ("truncate", "measure")
    assert resolve_generator_settings(dataclasses.replace(config, off_policy="mask"), WORLD).off_policy == "mask"
    assert not caplog.text
    assert resolve_generator_settings(dataclasses.replace(config, off_policy="none"), WORLD).off_policy == "none"
    assert "biases the gradient" in caplog.text
    assert resolve_generator_settings(RLConfig(model="m"), WORLD) == RLConfig(model="m")
    processes = dataclasses.replace(config, actors=ActorsConfig(urls=(vllm.url,), generators=1))
    with pytest.raises(UserError, match="use one kind"):
        resolve_generator_settings(processes, WORLD)


def test_folders_for_vllm_have_a_head_of_its_own(tmp_path, model_folder):
    model = load_model(model_folder)
    folder = WeightFolders(tmp_path / "weights", model, torch.bfloat16, WORLD, untie_head=True).write(1)
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    assert torch.equal(load_model(folder).embed_tokens.weight, model.embed_tokens.weight)


# The real one.


@contextlib.contextmanager
def _real_vllm(folder, log):
    port = free_port()
    settings = dict(
        VLLM_SERVER_DEV_MODE="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_NUM_OF_RESERVED_CPU="0", HF_HUB_OFFLINE="1",
        VLLM_CPU_OMP_THREADS_BIND=f"0-{len(os.sched_getaffinity(0)) - 1}", VLLM_NO_USAGE_STATS="1",
    )  # fmt: skip
    command = [
        str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--host", "127.0.0.1",
        "--port", str(port), "--dtype", "float32", "--max-model-len", "512", "--enforce-eager",
        "--logprobs-mode", "processed_logprobs", "--load-format", "dummy",
        "--hf-overrides", json.dumps({"tie_word_embeddings": False}),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | settings, start_new_session=True)
    try:
        until = time.monotonic() + 300
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
            assert process.poll() is None and time.monotonic() < until, Path(log.name).read_text()[-3000:]
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        # It has processes of its own.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.skipif(not PYTHON.exists(), reason="vLLM is not installed: benchmarks/generation.py installs it")
def test_three_grpo_steps_with_vllm(tmp_path, bpe_tokenizer):
    from lockstep.rl.reinforce import reinforce

    config = dataclasses.replace(preset("qwen3:micro", bpe_tokenizer.vocab_size, (0,)), max_positions=512)
    save_model(build_model(config, dtype="float32", seed=1), tmp_path / "model")
    bpe_tokenizer.save(tmp_path / "model")
    (tmp_path / "task.py").write_text(TASK)
    with (tmp_path / "vllm.log").open("w") as log, _real_vllm(tmp_path / "model", log) as url:
        run = reinforce(
            RLConfig(
                output=str(tmp_path / "run"), model=str(tmp_path / "model"),
                environment=f"{tmp_path / 'task.py'}:Vowels", steps=3, prompts_per_step=5, samples_per_prompt=4,
                max_new_tokens=24, temperature=0.9, validation_examples=3, rewards=RewardConfig(isolate="never"),
                train=TrainConfig(learning_rate=1e-3, warmup_steps=0, schedule="constant"),
                actors=ActorsConfig(urls=(url,)),
            )
        )  # fmt: skip
    steps = [m for m in read_metrics(run / "metrics.jsonl") if m["step"]]
    assert [m["step"] for m in steps] == [1, 2, 3]
    for metrics in steps:
        assert metrics["parity/tokens_different"] > 0, "vLLM sums in another order"
        # Float32 on both sides; weights of the step before are off by some 0.05.
        assert 0 < metrics["parity/mean_delta"] <= metrics["parity/max_delta"] < 1e-4
        assert metrics["off_policy/ratio_max"] == pytest.approx(1, abs=1e-4)
        assert metrics["rollout/tokens"] == metrics["parity/tokens_checked"]
        assert metrics["grad_norm"] > 0
