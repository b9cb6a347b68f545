"""Worlds of the simulated machine: the product unchanged passes them, and each planted bug is found."""

import os
from argparse import Namespace
from pathlib import Path

import pytest

from tests.world.disk import ROOT, Disk
from tests.world.machine import LawBroken, Process, World
from tests.world.planted import ALL, LISTED, OURS, planted
from tests.world.seams import simulated
from tests.world.swarm import campaign, main, run_world, schedule, shrunk

REGRESSIONS = [
    (int(line.split(maxsplit=1)[0]), line.split(maxsplit=1)[1])
    for line in (Path(__file__).parent / "regressions.txt").read_text().splitlines()
    if line[0] != "#"
]
FOUND_AT = 100


def test_no_law_is_broken():
    found = campaign(20, events=6000, seconds=10)
    assert found.broken is None, found.broken
    assert found.events > 0


@pytest.mark.slow
def test_no_law_is_broken_in_a_minute():
    found = campaign(21, events=10**9, seconds=60)
    assert found.broken is None, found.broken


@pytest.mark.parametrize("number", [3, 4])
def test_a_world_is_a_function_of_its_number(number, monkeypatch):
    logs = []
    for process in (7, 7_000_000):
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        logs.append("".join(run_world(number, keeps_log=True)[0].world.log))
    assert logs[0] == logs[1]
    assert len(logs[0]) > 1000


@pytest.mark.parametrize("number", sorted({number for number, _ in REGRESSIONS}))
def test_what_broke_a_law_once_does_not_again(number):
    assert run_world(number)[1] == ""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "name"), REGRESSIONS)
def test_the_world_of_a_bug_that_we_had_finds_it_again(number, name):
    with planted(next(bug for bug in OURS if bug.name == name)):
        assert run_world(number)[1]


def test_every_planted_bug_fits_the_code():
    assert len(LISTED) == 15
    for bug in ALL:
        with planted(bug):
            pass


@pytest.mark.nightly
@pytest.mark.slow
def test_many_processes_count_the_same_worlds():
    one, two = (campaign(5, events=3000, jobs=jobs) for jobs in (1, 2))
    assert (one.worlds, one.events, one.kinds, one.broken) == (two.worlds, two.events, two.kinds, None)


def test_a_search_for_planted_bugs_goes_on_where_its_file_ends(tmp_path, capsys):
    bug = "a publish before the sync"
    arguments = Namespace(
        to=tmp_path / "tries", seed=FOUND_AT, planted=1, events=20_000, seconds=60.0, only=bug, world=None, jobs=1
    )
    assert main(arguments) == 0
    found = arguments.to.read_text()
    assert main(arguments) == 0
    assert arguments.to.read_text() == found
    assert capsys.readouterr().out.count(f"{bug:70}    1 of 1") == 2


def test_a_planted_bug_is_found_and_shrunk():
    bug = next(each for each in LISTED if each.name == "a publish before the sync")
    with planted(bug):
        found = campaign(FOUND_AT, events=20_000)
        assert found.broken is not None
        world, broken = shrunk(found.broken[0])
    assert broken
    said = schedule(found.broken[0], world, broken)
    assert "its last events:" in said
    assert "is trained on" in said


@pytest.mark.nightly
@pytest.mark.parametrize("bug", ALL, ids=lambda each: each.name)
def test_each_planted_bug_is_found(bug):
    with planted(bug):
        assert campaign(FOUND_AT).broken is not None


def in_a_world(body):
    """Run a function in a process of a world with an empty disk."""
    world = World(1)
    disk = Disk(world)
    LawBroken.first.clear()
    with simulated(world, disk):
        process = Process("one")
        world.join(world.start("main", lambda: body(disk), process))
        if process.error is not None:
            raise process.error
    return disk


def test_a_folder_is_not_lost_with_what_was_synced_in_it():
    from skyrl_train.system.files import AppendLog

    def body(disk):
        log = AppendLog(Path(ROOT) / "run" / "journal" / "lines.jsonl", length=0, num_writes=0)
        assert log.append({"line": 1}).result(10) == 0
        log.close()
        disk.lose_power(disk.world.random("loss"))
        assert disk.find(f"{ROOT}/run/journal/lines.jsonl").content.startswith(b'{"line": 1')

    for _ in range(5):
        in_a_world(body)


def test_a_log_whose_disk_is_full_can_be_closed():
    from skyrl_train.system.files import AppendLog

    def body(disk):
        log = AppendLog(Path(ROOT) / "run" / "lines.jsonl", length=0, num_writes=0)
        disk.room = 5
        with pytest.raises(OSError, match="No space left"):
            log.append({"line": 1}).result(10)
        log.close()
        assert log.failed is not None

    in_a_world(body)
