"""Who waits for whom, and who is named for it."""

from dataclasses import replace

from lockstep.observe.actors import Actor, held_up_by, read_actors, table
from lockstep.observe.heartbeat import BYTES, Heartbeat
from lockstep.observe.timeline import Timeline


def actor(name, progress=0, waits_for="", process="running", **more):
    return Actor(name=name, progress=progress, waits_for=waits_for, process=process, interval=5.0, **more)


def named(*actors):
    return [found.name for found in held_up_by(actors, actors)]


def test_a_chain_is_followed_to_its_end():
    ranks = actor("rank_0", 5, "rollouts of generator_1"), actor("rank_1", 6, "the other ranks")
    generators = actor("generator_0", 9, "requests of rank_0"), actor("generator_1", 90)
    assert named(*ranks, *generators) == ["generator_1"]
    # Of two that wait for nobody the one in the earlier step, or else that is stopped.
    other = actor("generator_2", step=3)
    assert named(*ranks, *generators, other) == ["generator_1"]
    assert named(*ranks, *generators, replace(other, process="stopped")) == ["generator_2"]


def test_those_that_wait_for_each_other_are_all_named():
    ring = actor("rank_0", 1, "rollouts of generator_0"), actor("generator_0", 7, "weights of rank_0")
    assert sorted(named(*ring, actor("generator_1", 3, "requests of rank_0"))) == ["generator_0", "rank_0"]


def test_a_rank_that_has_begun_fewer_collectives_is_waited_for_though_its_phase_is_later():
    def rank(number, progress, begun, group="0", ranks=(0, 1)):
        return actor(f"rank_{number}", progress, collectives={group: [begun, list(ranks)]})

    assert named(rank(0, 4, 8), rank(1, 5, 7)) == ["rank_1"]
    # Groups of other ranks that have the same name are not compared.
    assert named(rank(0, 4, 8, ranks=(0, 2)), rank(1, 5, 7, ranks=(1, 3))) == ["rank_0"]


def test_of_those_that_have_ended_the_cause_is_named():
    lost = actor("rank_0", process="ended", ended="RuntimeError: Connection closed by peer [127.0.0.1]", time=1.0)
    failed = actor("rank_1", process="ended", ended="ValueError: nothing", time=2.0)
    gone = actor("rank_2", process="gone")
    assert named(lost, failed, gone) == ["rank_1"]
    assert named(lost, gone) == ["rank_2"]
    assert named(lost) == ["rank_0"]
    # Generators end with their trainer: killed, if it had started them, else with an error of their connection.
    generators = actor("generator_0", process="gone"), actor("generator_1", process="ended", ended="Closed: it is gone")
    assert named(*generators, gone) == ["rank_2"]
    assert named(*generators) == ["generator_0"]


def test_a_heartbeat_that_is_only_partly_written_is_left_out(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "heartbeat_0.json").write_text('{"pid": 5, "na')
    assert read_actors(tmp_path) == {}


def test_a_heartbeat_stays_on_its_page_and_a_line_of_the_table(tmp_path):
    timeline = Timeline()
    with Heartbeat(tmp_path, "rank_0", timeline):
        timeline.message = "é\n\x1b" * 10_000
        timeline.begin(7)
        (path,) = (tmp_path / "logs").glob("heartbeat*")
        assert path.stat().st_size == BYTES
        found = read_actors(tmp_path)["rank_0"]
        assert found.step == 7 and len(table([found]).splitlines()) == 2
