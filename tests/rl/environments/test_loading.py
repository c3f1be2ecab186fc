"""Loading an environment from a file: how it is made, what is refused and where the error points."""

import inspect

import pytest

import lockstep.rl as rl
from lockstep.errors import UserError
from lockstep.rl.environments.loading import load_environment
from lockstep.rl.rollouts.prompts import examples_of

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
    without = "class Task(rl.Environment):\n    def __init__(self): self.words = 3"
    assert _load(tmp_path, without).words == 3
    with pytest.raises(UserError, match=r"task.py: Task.__init__ takes no `data`"):
        _load(tmp_path, without, data="DIR")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        # The TypeError is the user's own: it must not be taken for an __init__ that has other parameters.
        ("def __init__(self, data=''): self.n = 1 + 'a'", r"task.py:3: Task cannot be created \(TypeError: unsupp"),
        ("def __init__(self, words): pass", r"task.py: Task.__init__ .*'words'.*defaults for anything else"),
    ],
)
def test_an_init_that_fails_is_named_with_its_line(tmp_path, body, message):
    with pytest.raises(UserError, match=message):
        _load(tmp_path, f"class Task(rl.Environment):\n    {body}")


def test_a_task_without_examples_or_reward_is_refused(tmp_path):
    for missing in ("examples", "reward"):
        methods = "".join(line + "\n" for line in METHODS.splitlines() if missing + "(" not in line)
        with pytest.raises(UserError, match=f"task.py: Task defines no `{missing}`"):
            _load(tmp_path, "class Task(rl.Environment):", methods=methods)
    with pytest.raises(UserError, match="task.py: Task defines no `reward`, `converse` or `grade`"):
        _load(tmp_path, "class Task(rl.ConversationEnvironment):", methods=methods)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("class Task:", r'"Task" is not an Environment\..*Found: none; subclass'),
        ("Task = 3\nclass Other(rl.Environment):", r'"Task" is not an Environment\..*Found: Other'),
        ("class Tusk(rl.Environment):", 'no Environment named "Task". Did you mean "Tusk"'),
        ("raise SystemExit('bye')\nclass Task:", r"task.py:2: does not import \(SystemExit: bye\)"),
        ("import nothing_there\nclass Task:", r"task.py:2: does not import \(ModuleNotFoundError"),
        ("x = 1\ndef f(:\nclass Task:", r"task.py:3: does not import \(SyntaxError"),
    ],
)
def test_a_file_that_has_no_environment_of_the_name_is_refused(tmp_path, body, message):
    with pytest.raises(UserError, match=message):
        _load(tmp_path, body)


def test_files_of_one_name_in_two_folders_are_two_tasks(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    first, second = (
        _load(tmp_path / name, f"class Task(rl.Environment):\n    own = '{name}'") for name in ("one", "two")
    )
    assert (first.own, second.own) == ("one", "two") and first.__module__ != second.__module__


def test_a_task_is_solved_by_the_reward_correct_where_it_is_named_and_else_by_the_sum():
    environment = rl.Environment()
    assert environment.is_correct({"correct": 1.0, "format": 0.0})
    assert not environment.is_correct({"correct": 0.0, "format": 1.0})
    assert environment.is_correct({"a": 0.5, "b": 0.5}) and not environment.is_correct({"reward": 0.9})


BROKEN = """
import lockstep.rl as rl

class Broken(rl.Environment):
    def examples(self, split):
        yield 1 / 0

    def reward(self, example, completion):
        return 0.0

class Odd(Broken):
    def examples(self, split):
        yield "text"

"""


def test_examples_that_fail_or_are_none_point_to_the_users_own_code(tmp_path):
    (tmp_path / "task.py").write_text(BROKEN)
    with pytest.raises(UserError, match=r'task.py:6: Broken.examples\("train"\) failed \(ZeroDivisionError'):
        examples_of(load_environment(f"{tmp_path}/task.py:Broken", "", False), "train")
    with pytest.raises(UserError, match=r"Odd.examples\(\"train\"\) yields 'text'; it must yield rl.Example"):
        examples_of(load_environment(f"{tmp_path}/task.py:Odd", "", False), "train")
    with pytest.raises(UserError, match="the environment is the class Environment; pass an instance"):
        inspect.unwrap(examples_of)(rl.Environment, "train")  # around the checking of types, which users do not have


TALK = """
def add(a: int) -> int: return a
class Task(rl.ConversationEnvironment):
    def examples(self, split): return [rl.Example("p", "a")]
    def reward(self, example, completion): return 0.0
"""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tools = add", r"Task.tools is <.*, not a tuple or list of functions; write `tools = \(f,\)`"),
        ("turns = 'five'", "Task.turns is 'five', not an integer of at least 1"),
        ("turns = True", "Task.turns is True, not"),
        ("async def converse(self, chat): return 1.0", r"converse .*write `async def converse\(self, example, chat\)`"),
        ("def converse(self, example, chat): return 1.0", "Task.converse is not a coroutine .*write `async def conv"),
        ("async def converse(self, example, chat, more): return 1.0", "converse cannot be called .*'more'"),
        ("async def grade(self, episodes): return []", r"grade cannot be .*write `async def grade\(self, example, epi"),
        ("def reward(self, completion): return 1.0", r"reward cannot be .*write `def reward\(self, example, comp"),
    ],
)
def test_what_a_run_could_not_call_or_use_is_refused_when_it_is_loaded(tmp_path, line, message):
    with pytest.raises(UserError, match=f"task.py: .*{message}"):
        _load(tmp_path, TALK, methods=f"    {line}\n")


def test_what_a_run_can_call_is_loaded(tmp_path):
    for line in (
        "tools, turns = [add], 1",
        "async def converse(self, example, chat, more=3): return 1.0",
        "async def converse(self, *others): return 1.0",
    ):
        assert type(_load(tmp_path, TALK, methods=f"    {line}\n")).__name__ == "Task"
    unrewarded = "class Task(rl.Environment):\n    has_rewards = False\n    def examples(self, split): return []\n"
    assert not _load(tmp_path, unrewarded, methods="").has_rewards


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.py:Task", "nowhere.py: no such file"),
        ("envs.py:", "envs.py: add the class: envs.py:Class"),
        ("mth", r'"mth". Did you mean "math"\?.*gymnasium:ID, verifiers:TASKSET; your own: FILE.py:Class'),
        ("gymnasium:", '"gymnasium:" is incomplete; write gymnasium:ID'),
        ("verifiers:", '"verifiers:" is incomplete; write verifiers:TASKSET'),
        ("object:my.Task", r"got its environment as an object \(my.Task\); pass it to lockstep.reinforce"),
        ("gsm8k", "the environment needs data; give --data a folder"),
    ],
)
def test_a_name_that_says_too_little_is_refused_with_what_to_write(name, message):
    with pytest.raises(UserError, match=message):
        list(load_environment(name).examples("train"))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"problem": "p", "answer": ["1"]}'], "one.jsonl:1: `answer` is a list, not a string; fix it"),
        (["[1]"], r"one.jsonl:1: not a JSON object \(a list\); fix it"),
        (['{"problem": "p", "answer": "1"}'] * 3, "one.jsonl has 3 problems; every tenth is for validation"),
    ],
)
def test_problems_that_cannot_be_asked_are_named(tmp_path, lines, message):
    (tmp_path / "one.jsonl").write_text("".join(f"{line}\n" for line in lines))
    environment = load_environment("math", str(tmp_path / "one.jsonl"))
    with pytest.raises(UserError, match=message):
        [list(environment.examples(split)) for split in ("train", "validation")]
