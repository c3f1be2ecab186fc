"""What ranks tell each other is JSON: values of any size arrive whole, and never a pickle."""

import ast
from pathlib import Path

import lockstep
from lockstep.config import ParallelConfig
from lockstep.errors import UserError
from lockstep.parallel import close_world, open_world
from tests.parallel.launch import launch


def _exchanged():
    world = open_world(ParallelConfig(), "cpu")

    def refuse():
        raise UserError("no such ☃")

    try:
        gathered = world.gather({"rank": world.rank, "text": "ä" * 1000 * world.rank})
        chosen = world.from_main(lambda: [world.rank, None, 0.5, "☃"])
        try:
            world.from_main(refuse)
            problem = ""
        except UserError as error:
            problem = str(error)
        return gathered, chosen, problem
    finally:
        close_world(world)


def test_values_of_different_lengths_arrive_whole_on_every_rank():
    expected = [{"rank": rank, "text": "ä" * 1000 * rank} for rank in range(3)], [0, None, 0.5, "☃"], "no such ☃"
    assert launch(3, _exchanged) == [expected] * 3
    assert launch(1, _exchanged) == [([{"rank": 0, "text": ""}], *expected[1:])]


def test_no_collective_of_the_package_unpickles():
    package = Path(lockstep.__file__).parent
    called = {
        (path.name, node.attr)
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("dist", "c10d")
    }
    assert ("messages.py", "all_gather") in called
    assert not [name for name in called if "object" in name[1]]
