#!/usr/bin/env bash
# lm-eval's command line names a GPU where there is none.
#
# Expected: without --device a model's constructor gets device=None, as from lm_eval.simple_evaluate, and may choose.
# Seen, lm-eval 0.4.13 on a machine without CUDA: from the command line it gets device="cuda:0"; from simple_evaluate it
# gets None. The package's own `hf` model falls back to the CPU for "cuda:0"; a registered model has to do so itself.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv env
env/bin/pip install --quiet "torch==2.13.0" 2>/dev/null
env/bin/pip install --quiet "lm-eval[hf]==0.4.13" 2>/dev/null

cat > data.jsonl <<'DATA'
{"question": "one and one", "choices": ["two", "three"], "answer": 0}
DATA
cat > task.yaml <<TASK
task: tiny_choice
dataset_path: json
dataset_kwargs: {data_files: {test: $work/data.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}]
TASK
cat > probe.py <<'PROBE'
import sys

import lm_eval
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model


@register_model("probe")
class Probe(LM):
    """Answers nothing useful; prints the device that it is constructed with."""

    @classmethod
    def create_from_arg_obj(cls, arguments, additional_config=None):
        print("device:", (additional_config or {}).get("device"))
        return cls()

    @classmethod
    def create_from_arg_string(cls, arguments, additional_config=None):
        return cls.create_from_arg_obj({}, additional_config)

    def loglikelihood(self, requests, **_):
        return [(-1.0, False) for _ in requests]

    def loglikelihood_rolling(self, requests, **_):
        return [-1.0 for _ in requests]

    def generate_until(self, requests, **_):
        return ["" for _ in requests]


if sys.argv[1] == "library":
    from lm_eval.tasks import TaskManager

    tasks = TaskManager(include_path=sys.argv[2], include_defaults=False)
    lm_eval.simple_evaluate(model="probe", model_args="", tasks=["tiny_choice"], task_manager=tasks)
else:
    from lm_eval.__main__ import cli_evaluate

    sys.argv = ["lm_eval", "--model", "probe", "--model_args", "x=1", "--tasks", "tiny_choice", "--include_path", sys.argv[2]]
    cli_evaluate()
PROBE
export CUDA_VISIBLE_DEVICES=
library=$(env/bin/python probe.py library "$work" 2>/dev/null | grep "^device:")
command_line=$(env/bin/python probe.py command "$work" 2>/dev/null | grep "^device:")
env/bin/pip freeze 2>/dev/null | grep -iE "^(lm.eval|torch)=="
echo "simple_evaluate: $library"
echo "command line:    $command_line"
[ "$library" = "device: None" ] && [ "$command_line" = "device: cuda:0" ]
