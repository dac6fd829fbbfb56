"""The process that the workers of a pool share: one for all, replaced after its end, never left behind."""

import os
import resource
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from posttrain.process.shared import call_in_shared_process
from posttrain.process.workers import Failed, Returned, Workers

LOST = Failed("died", "the process that the workers share ended, for example out of memory")


def share(workers, *calls):
    """Outcomes of calls in the shared process, each asked for by a worker."""
    tickets = [workers.submit(call_in_shared_process, *call) for call in calls]
    return collect(workers, tickets)


def collect(workers, tickets):
    outcomes = {}
    while len(outcomes) < len(tickets):
        outcomes |= workers.poll(60.0)
    return [outcomes[ticket] for ticket in tickets]


def process_id(workers):
    [outcome] = share(workers, (os.getpid,))
    return outcome.value.value


def sleep(file: Path):
    """A call that writes the id of its process into a file and does not end."""
    code = f"import os, time; open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(1000)"
    return exec, code


def wait_for(file: Path) -> int:
    until = time.monotonic() + 60
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < until
        time.sleep(0.01)
    return int(file.read_text())


def test_all_workers_of_a_pool_share_one_process():
    others = psutil.Process().children()  # of other tests
    with Workers(3, deadline_s=60.0) as workers:
        naps = share(workers, *[(time.sleep, 0.02)] * 3)  # one after the other, so three workers wait
        pids = {outcome.value.value for outcome in share(workers, *[(os.getpid,)] * 9)}
        [nursery] = set(psutil.Process().children()) - set(others)
        children = {child.pid for child in nursery.children()}
        assert naps == [Returned(Returned(None))] * 3
    assert len(pids) == 1
    assert len(children - pids) == 3


def test_errors_of_a_shared_call_have_the_text_of_a_workers():
    with Workers(1, deadline_s=60.0) as workers:
        [shared] = share(workers, (int, "x"))
        [own] = collect(workers, [workers.submit(int, "x")])
    assert (shared.value.label, shared.value.reason) == (own.label, own.reason)
    assert own.reason.startswith("ValueError: invalid literal")


def test_shared_call_outside_of_workers_is_direct():
    assert call_in_shared_process(os.getpid) == Returned(os.getpid())
    with pytest.raises(ValueError, match="invalid literal"):
        call_in_shared_process(int, "x")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such limit")
def test_shared_process_has_no_memory_limit():
    with Workers(1, deadline_s=60.0, memory_mb=100) as workers:
        [own] = collect(workers, [workers.submit(resource.getrlimit, resource.RLIMIT_DATA)])
        [shared] = share(workers, (resource.getrlimit, resource.RLIMIT_DATA))
    assert own.value != shared.value.value == resource.getrlimit(resource.RLIMIT_DATA)


def test_shared_call_that_ends_its_process_fails_alone():
    with Workers(1, deadline_s=60.0) as workers:
        before = process_id(workers)
        assert share(workers, (os._exit, 3)) == [Returned(LOST)]
        assert process_id(workers) not in (before, os.getpid())


def test_waiting_call_outlives_a_killed_process(tmp_path):
    with Workers(2, deadline_s=60.0) as workers:
        first = workers.submit(call_in_shared_process, *sleep(tmp_path / "pid"))
        pid = wait_for(tmp_path / "pid")
        second = workers.submit(call_in_shared_process, os.getpid)
        while workers.poll(0.2):
            pass
        os.kill(pid, signal.SIGKILL)
        killed, waited = collect(workers, [first, second])
    assert killed == Returned(LOST)
    assert waited.value.value != pid


def test_shared_call_that_hangs_is_killed_at_the_deadline():
    with Workers(1, deadline_s=1.0) as workers:
        before = process_id(workers)
        assert share(workers, (time.sleep, 1000)) == [Failed("timeout", "nothing within 1 s", 1.0)]
        assert process_id(workers) != before
        assert not psutil.pid_exists(before)


def test_shared_process_outlives_workers_that_die():
    with Workers(2, deadline_s=60.0) as workers:
        before = process_id(workers)
        died = collect(workers, [workers.submit(os._exit, 3) for _ in range(4)])
        assert [outcome.label for outcome in died] == ["died"] * 4
        assert process_id(workers) == before


def test_closed_pool_leaves_no_shared_process(tmp_path):
    before = os.listdir("/proc/self/fd") if sys.platform == "linux" else []
    with Workers(2, deadline_s=60.0) as workers:
        workers.submit(call_in_shared_process, *sleep(tmp_path / "pid"))
        pid = wait_for(tmp_path / "pid")
    assert not psutil.pid_exists(pid)
    assert not before or os.listdir("/proc/self/fd") == before
