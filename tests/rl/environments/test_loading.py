"""Loading an environment from a file: how it is made, what is refused and where the error points."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lockstep.rl as rl
from lockstep.errors import UserError
from lockstep.rl.environments.gsm8k import FINAL, GSM8K
from lockstep.rl.environments.loading import check_environment, load_environment

METHODS = """
    def examples(self, split): return [rl.Example("p", "a")]
    def reward(self, example, completion): return 0.0
"""


def _load(folder, body, data="", methods=METHODS):
    (folder / "task.py").write_text(f"import lockstep.rl as rl\n{body}{methods}")
    return load_environment(f"{folder / 'task.py'}:Task", data, skip_bad_lines=True)


@pytest.mark.parametrize(
    ("init", "got"),
    [
        ("", ("DIR", True)),
        ("def __init__(self, data): self.got = (data,)", ("DIR",)),
        ("def __init__(self, *, data='', words=5): self.got = (data, words)", ("DIR", 5)),
        ("def __init__(self, **options): self.got = tuple(options.values())", ("DIR", True)),
    ],
)
def test_an_init_is_given_the_options_it_names(tmp_path, init, got):
    environment = _load(tmp_path, f"class Task(rl.Environment):\n    {init}", data="DIR")
    assert (environment.got if init else (environment.data, environment.skip_bad_lines)) == got


def test_an_init_without_parameters_is_called_without(tmp_path):
    assert _load(tmp_path, "class Task(rl.Environment):\n    def __init__(self): self.words = 3").words == 3


@pytest.mark.parametrize(
    ("body", "message"),
    [
        # The TypeError is the user's own: it must not be taken for an __init__ that has other parameters.
        (
            "def __init__(self, data=''): self.n = 1 + 'a'",
            r"task.py:3: Task cannot be created \(TypeError: unsupported",
        ),
        (
            "def __init__(self, data=''): raise ValueError('boo')",
            r"task.py:3: Task cannot be created \(ValueError: boo",
        ),
        ("def __init__(self, words): pass", r"task.py: Task.__init__ .*'words'.*defaults for anything else"),
    ],
)
def test_an_init_that_fails_is_named_with_its_line(tmp_path, body, message):
    with pytest.raises(UserError, match=message):
        _load(tmp_path, f"class Task(rl.Environment):\n    {body}")


def test_data_that_an_init_would_ignore_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"task.py: Task.__init__ takes no `data`"):
        _load(tmp_path, "class Task(rl.Environment):\n    def __init__(self): pass", data="DIR")


@pytest.mark.parametrize("missing", ["examples", "reward"])
def test_a_task_without_examples_or_reward_is_refused(tmp_path, missing):
    methods = "".join(line + "\n" for line in METHODS.splitlines() if missing + "(" not in line)
    with pytest.raises(UserError, match=f"task.py: Task defines no `{missing}`"):
        _load(tmp_path, "class Task(rl.Environment):", methods=methods)


@pytest.mark.parametrize(
    ("body", "there"), [("class Task:", "none; subclass"), ("Task = 3\nclass Other(rl.Environment):", "Other")]
)
def test_a_name_that_is_no_environment_is_refused(tmp_path, body, there):
    with pytest.raises(UserError, match=rf'task.py: "Task" is not an Environment\..*Found: {there}'):
        _load(tmp_path, body)


def test_a_file_that_exits_is_refused_with_its_line(tmp_path):
    with pytest.raises(UserError, match=r"task.py:2: does not import \(SystemExit: bye\)"):
        _load(tmp_path, "raise SystemExit('bye')\n", methods="")


def test_files_of_one_name_in_two_folders_are_two_tasks(tmp_path):
    tasks = []
    for answer in ("one", "two"):
        (tmp_path / answer).mkdir()
        tasks.append(
            _load(tmp_path / answer, f"NAME = '{answer}'\nclass Task(rl.Environment):\n    def name(self): return NAME")
        )
    assert [t.name() for t in tasks] == ["one", "two"]
    assert tasks[0].__module__ != tasks[1].__module__


def test_an_example_carries_metadata_and_can_be_a_key():
    example = rl.Example("p", "a", metadata={"level": 3})
    assert example.metadata["level"] == 3 and rl.Example("p").metadata == {}
    assert {example: 1}[rl.Example("p", "a", metadata={"level": 3})] == 1


def test_a_task_is_solved_by_the_reward_correct_where_it_is_named_and_else_by_the_sum():
    environment = rl.Environment()
    assert environment.is_correct({"correct": 1.0, "format": 0.0})
    assert not environment.is_correct({"correct": 0.0, "format": 1.0})
    assert environment.is_correct({"a": 0.5, "b": 0.5}) and not environment.is_correct({"reward": 0.9})


@pytest.mark.parametrize(
    ("completion", "number"),
    [
        ("#### 1,234,567.50 \n", "1,234,567.50"),
        ("#### -$5", "-$5"),
        ("#### $-5", "$-5"),
        ("####.5", ".5"),
        ("##### 5", None),  # five signs
        ("#### ,5", None),
        ("#### 5,,5", None),
        ("#### 12,34", None),
        ("#### ٥", None),  # a digit to Unicode, not to a reader of the data
        ("#### 5 ####", None),
    ],
)
def test_a_final_number_is_written_as_a_number(completion, number):
    found = FINAL.search(completion)
    assert (found and found.group(1)) == number
    assert GSM8K().reward(rl.Example("q", "5"), completion)["format"] == float(number is not None)


@pytest.mark.parametrize(("answer", "completion"), [("-5", "#### $-5"), ("1,234", "#### 1234.00"), ("0.5", "#### .5")])
def test_one_number_in_two_spellings_is_right(answer, completion):
    assert GSM8K().reward(rl.Example("q", answer), completion) == {"correct": 1.0, "format": 1.0}


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(st.text(max_size=40), st.text("#### 0123456789,.$-\n٥\\", max_size=40)),
    st.text("0123456789,.$-", max_size=30),
)
def test_no_completion_raises(beginning, number):
    for completion in (beginning, f"{beginning}#### {number}"):
        rewards = GSM8K().reward(rl.Example("q", "5"), completion)
        assert set(rewards) == {"correct", "format"} and set(rewards.values()) <= {0.0, 1.0}


def test_a_long_run_of_digits_is_read_in_linear_time():
    began = time.perf_counter()
    assert FINAL.search("#### " + "1" * 200_000 + "x") is None
    # Milliseconds where the time is linear; a quadratic pattern needs a quarter of an hour.
    assert time.perf_counter() - began < 10


TALK = """
def add(a: int) -> int: return a
class Task(rl.ConversationEnvironment):
    def examples(self, split): return [rl.Example("p", "a")]
    def reward(self, example, completion): return 0.0
"""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tools = add", r"Task.tools is <.*, not a tuple or list of functions; write `tools = \(add,\)`"),
        ("tools = 'add'", "Task.tools is 'add', not a tuple or list"),
        ("tools = ('add',)", "Task.tools contains 'add', which is not a function"),
        ("tools = [{'type': 'function'}]", "Task.tools contains {'type': 'function'}, which is not a function"),
        ("turns = 'five'", "Task.turns is 'five', not an integer of at least 1"),
        ("turns = 0", "Task.turns is 0, not"),
        ("turns = True", "Task.turns is True, not"),
        (
            "async def converse(self, chat): return 1.0",
            r"converse cannot be called \(too many .*write `async def converse\(self, example, chat\)`",
        ),
        ("async def converse(self, example, chat, more): return 1.0", "converse cannot be called .*'more'"),
        ("async def grade(self, episodes): return []", r"grade cannot be .*write `async def grade\(self, example, epi"),
        (
            "def reward(self, completion): return 1.0",
            r"reward cannot be .*write `def reward\(self, example, comp",
        ),
        ("def examples(self): return []", r"examples cannot be called .*write `def examples\(self, split\)`"),
    ],
)
def test_what_a_run_could_not_call_or_use_is_refused_when_it_is_loaded(tmp_path, line, message):
    with pytest.raises(UserError, match=f"task.py: .*{message}"):
        _load(tmp_path, TALK, methods=f"    {line}\n")


@pytest.mark.parametrize(
    "line",
    [
        "tools, turns = [add], 1",
        "async def converse(self, example, chat, more=3): return 1.0",
        "async def converse(self, *others): return 1.0",
    ],
)
def test_what_a_run_can_call_is_loaded(tmp_path, line):
    assert type(_load(tmp_path, TALK, methods=f"    {line}\n")).__name__ == "Task"


def test_an_environment_that_is_an_object_is_checked_as_one_from_a_file_is():
    class Task(rl.ConversationEnvironment):
        turns = 0

    with pytest.raises(UserError, match="Task.turns is 0"):
        check_environment(Task())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("envs.py", "envs.py: add the class: envs.py:Class"),
        ("envs.py:", "envs.py: add the class: envs.py:Class"),
        ("mth", r'"mth". Did you mean "math"\?.*gymnasium:ID, verifiers:TASKSET; your own: FILE.py:Class'),
        ("gymnasium:", '"gymnasium:" is incomplete; write gymnasium:ID'),
        ("verifiers:", '"verifiers:" is incomplete; write verifiers:TASKSET'),
        ("object:my.Task", r"got its environment as an object \(my.Task\); pass it to lockstep.reinforce"),
        ("gsm8k", "the environment needs data; give --data a folder"),
        ("math", "the environment needs data; give --data a folder"),
    ],
)
def test_a_name_that_says_too_little_is_refused_with_what_to_write(name, message):
    with pytest.raises(UserError, match=message):
        list(load_environment(name).examples("train"))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"problem": "p", "answer": ["1"]}'], "one.jsonl:1: `answer` is a list, not a string; fix it"),
        (['{"problem": "p", "answer": null}'], "one.jsonl:1: `answer` is null, not a string"),
        (['{"problem": "p", "answer": " "}'], "one.jsonl:1: `answer` is empty"),
        (["[1]"], r"one.jsonl:1: not a JSON object \(a list\); fix it"),
        (
            ['{"problem": "p", "answer": "1"}'] * 3,
            "one.jsonl has 3 problems; every tenth is for validation, so give at least 10",
        ),
        (['{"problem": "p", "answer": "1"}'], "one.jsonl has 1 problem; every"),
    ],
)
def test_problems_that_cannot_be_asked_are_named(tmp_path, lines, message):
    (tmp_path / "one.jsonl").write_text("".join(f"{line}\n" for line in lines))
    environment = load_environment("math", str(tmp_path / "one.jsonl"))
    with pytest.raises(UserError, match=message):
        [list(environment.examples(split)) for split in ("train", "validation")]
