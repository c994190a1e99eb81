"""Threads, cores and the parent of an engine process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from parent_harness import child_environment, has_ended, is_running
from parrot.engine.process import num_physical_cores, set_passive_waits

CHILD = """
import os, sys, time
from parrot.engine.process import signal_on_parent_death
signal_on_parent_death(os.getppid(), lambda: os._exit(9))
print("ready", flush=True)
time.sleep(600)
"""
# The thread that starts the child ends before the process does.
PARENT = """
import subprocess, sys, threading, time
def start():
    global child
    child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
    child.stdout.readline()
thread = threading.Thread(target=start)
thread.start(); thread.join(); time.sleep(0.2)
print(child.pid, child.poll(), flush=True)
time.sleep(600)
"""


def test_physical_cores_are_no_more_than_the_cpus_it_may_use() -> None:
    assert 1 <= num_physical_cores() <= len(os.sched_getaffinity(0))


def test_what_the_environment_says_about_waits_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.delenv("KMP_BLOCKTIME", raising=False)
    set_passive_waits()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
    assert os.environ["KMP_BLOCKTIME"] == "0"


@pytest.mark.system
def test_a_parent_that_died_before_it_was_watched_is_noticed() -> None:
    orphan = CHILD.replace("os.getppid()", "os.getppid() + 1")
    assert (
        subprocess.run([sys.executable, "-c", orphan], env=child_environment(), timeout=120).returncode == 9
    )


@pytest.mark.system
def test_the_death_of_the_parent_is_noticed_and_that_of_its_thread_is_not() -> None:
    command = [sys.executable, "-c", PARENT, CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=child_environment(), text=True) as parent:
        assert parent.stdout is not None
        pid, status = parent.stdout.readline().split()
        assert status == "None"
        assert is_running(int(pid))
        parent.kill()
    assert has_ended(int(pid))
