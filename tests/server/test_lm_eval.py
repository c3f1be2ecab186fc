"""lm-eval's own clients against a server as a user starts it: the numbers of `lockstep.harness`."""

import pytest

pytest.importorskip("lm_eval", reason="needs lm-eval (pip install lm-eval)")

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from tests.server.conftest import server_process
from tests.test_harness import DOCUMENTS, tasks  # noqa: F401


@pytest.fixture(scope="module")
def url(chat_folder):
    with server_process(chat_folder, "--model-name", "small") as (_, url):
        yield url


def _answers(model, folder, names, **arguments):
    """What a model answered to each request, by task."""
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = simple_evaluate(model, tasks=names, task_manager=manager, bootstrap_iters=0, log_samples=True, **arguments)
    samples = {name: [sample["resps"] for sample in found["samples"][name]] for name in names}
    values = {name: {k: v for k, v in found["results"][name].items() if isinstance(v, float)} for name in names}
    return samples, values


@pytest.mark.parametrize("batch", [1, 4])
def test_local_completions_give_the_harnesss_numbers(url, tasks, chat_folder, batch):  # noqa: F811
    names = ["local_choice", "local_few_shot", "local_perplexity", "local_generation"]
    expected, values = _answers("lockstep", tasks, names, model_args=f"pretrained={chat_folder}")
    arguments = f"model=small,base_url={url}/v1/completions,tokenizer={chat_folder},max_length=511,max_retries=1"
    found, found_values = _answers("local-completions", tasks, names, model_args=arguments, batch_size=batch)
    assert found == expected and found_values == values
    assert sum(len(sample) for sample in expected["local_choice"]) == 4 * DOCUMENTS


def test_local_chat_completions_give_the_harnesss_texts(url, tasks, chat_folder):  # noqa: F811
    names = ["local_generation"]
    expected, values = _answers(
        "lockstep", tasks, names, model_args=f"pretrained={chat_folder}", apply_chat_template=True
    )
    arguments = f"model=small,base_url={url}/v1/chat/completions,max_retries=1"
    found, found_values = _answers(
        "local-chat-completions", tasks, names, model_args=arguments, apply_chat_template=True
    )
    assert found == expected and found_values == values and any(text for ((text,),) in expected["local_generation"])
