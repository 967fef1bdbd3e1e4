import fcntl
import os
import stat
from pathlib import Path

import pytest
from making import after, dies, make, started

from muster.errors import Refused, RunFailed
from muster.events import RunStarted, Started
from muster.journal import (
    Journal,
    Logs,
    RunFolder,
    born,
    create,
    find,
    planning_lock,
    ports_in_use,
    read,
    runs,
    runs_root,
)
from muster.watch.tail import Tail

PLAN = make(ps=1, workers=1)
EVENTS = [*started(PLAN), dies("worker/0", 1.0)]


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_RUNS", str(tmp_path / "runs"))
    with planning_lock() as made:
        return made


def alive(folder: RunFolder, pid: int = 0, start: float | None = None) -> None:
    pid = pid or os.getpid()
    journal = Journal(folder.journal)
    journal.append([RunStarted(0.0, folder.id, 1.0, pid, born(pid) if start is None else start)])
    journal.close()


def test_each_batch_is_written_and_synced_once_before_append_returns(tmp_path):
    path = tmp_path / "j"
    synced = []
    journal = Journal(path, sync=lambda fd: synced.append(list(read(path))))
    journal.append(EVENTS[:2])
    journal.append([])
    journal.append(EVENTS[2:])
    assert synced == [EVENTS[:2], EVENTS]
    assert list(journal.replay()) == EVENTS


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_torn_last_line_is_a_write_that_never_happened(tmp_path, cut):
    path = tmp_path / "j"
    Journal(path).append(EVENTS)
    os.truncate(path, path.stat().st_size - cut)
    assert list(read(path)) == EVENTS[:-1]


def test_a_line_that_is_whole_and_no_event_is_not_passed_over(tmp_path):
    path = tmp_path / "j"
    path.write_text(EVENTS[0].line() + "\nnonsense\n")
    with pytest.raises(ValueError):
        list(read(path))


def test_a_log_holds_exactly_what_was_printed(tmp_path):
    logs = Logs(tmp_path, PLAN)
    said = [b"one\n", b"\xff\x00\r", b"t" * 100_000]
    for data in said:
        logs.write("worker/0", 1, data)
    logs.write("ps/0", 1, b"mine")
    logs.close()
    assert (tmp_path / "worker-0.log").read_bytes() == b"".join(said)
    assert (tmp_path / "ps-0.log").read_bytes() == b"mine"


def test_a_restart_is_marked_in_the_log(tmp_path):
    logs = Logs(tmp_path, PLAN)
    logs.write("worker/0", 1, b"a\n")
    logs.write("worker/0", 2, b"b\n")
    assert (tmp_path / "worker-0.log").read_bytes() == b"a\n--- worker/0, attempt 2\nb\n"


def test_a_log_is_rotated_and_never_longer_than_twice_its_limit(tmp_path):
    """S14: at the end, the newest bytes are there."""
    logs = Logs(tmp_path, make(ps=1, workers=1, log_mb=1))
    block = b"x" * 65_000 + b"\n"
    for _ in range(80):
        logs.write("worker/0", 1, block)
    logs.write("worker/0", 1, b"the end\n")
    files = sorted(tmp_path.iterdir())
    assert [f.name for f in files] == ["worker-0.log", "worker-0.log.1"]
    assert sum(f.stat().st_size for f in files) <= 2 * ((1 << 20) + len(block))
    assert files[0].read_bytes().endswith(b"the end\n")
    assert not logs.trouble


@pytest.mark.parametrize("looks", [range(45), [20, 40], []], ids=["always", "on both sides of it", "only at the end"])
def test_a_log_is_read_whole_over_its_rotation(tmp_path, looks):
    """S14: whoever follows it gets each line once, also those between the last look and the rotation."""
    logs, tail = Logs(tmp_path, make(ps=1, workers=1, log_mb=1)), Tail(tmp_path / "worker-0.log")
    lines = [b"%02d " % n + b"x" * 30_000 + b"\n" for n in range(45)]
    seen = tail.more()
    for n, line in enumerate(lines):
        logs.write("worker/0", 1, line)
        seen += tail.more() if n in looks else b""
    seen += tail.more()
    assert (tmp_path / "worker-0.log.1").exists()
    assert seen == b"".join(lines) and tail.more() == b""


def test_a_journal_that_cannot_be_written_ends_the_run_in_words():
    with pytest.raises(RunFailed) as failed:
        Journal(Path("/dev/full"), sync=lambda fd: None).append([Started(0.0, "worker/0", 1)])
    assert failed.value.at == "/dev/full" and "No space left" in failed.value.because


def test_a_journal_on_a_disk_that_takes_a_part_at_a_time_is_whole(tmp_path):
    journal = Journal(tmp_path / "j", sync=lambda fd: None)
    whole = journal._file

    class Nearly:
        def write(self, data):
            return whole.write(data[:7])

        fileno = whole.fileno

    journal._file = Nearly()
    events = [Started(float(n), "worker/0", n) for n in range(3)]
    journal.append(events)
    assert list(journal.replay()) == events


def test_a_log_that_cannot_be_written_says_so_and_does_not_end_the_run(tmp_path):
    """S14."""
    (tmp_path / "worker-0.log").symlink_to("/dev/full")
    logs = Logs(tmp_path, PLAN)
    logs.write("worker/0", 1, b"lost\n")
    assert "worker/0 loses lines" in logs.trouble and "No space" in logs.trouble
    logs.write("ps/0", 1, b"kept")
    assert (tmp_path / "ps-0.log").read_bytes() == b"kept"


def test_a_run_is_a_folder_of_its_own_that_nobody_else_can_read(root):
    folder = create(root, PLAN)
    assert folder.id.startswith("train-")
    for path in (folder.path, folder.logs):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert folder.plan() == PLAN
    other = create(root, PLAN)
    assert other.id != folder.id and [run.id for run in runs()] == [other.id, folder.id]


@pytest.mark.parametrize("name", ["../../etc/x", "a b", "$(touch x)", "---", "", "训练", "x" * 300])
def test_the_name_of_a_run_never_leaves_its_folder(root, name):
    import msgspec

    folder = create(root, msgspec.structs.replace(PLAN, name=name))
    assert folder.path.parent == root and len(folder.id) < 60 and not folder.id.startswith((".", "-"))


def test_state_is_what_the_journal_says(root):
    folder = create(root, PLAN)
    assert folder.state(PLAN) == after(PLAN)
    Journal(folder.journal).append(EVENTS)
    assert folder.state(PLAN) == after(PLAN, EVENTS)


def test_a_run_is_found_by_its_name_a_beginning_its_path_or_as_the_newest(root):
    one, two = create(root, PLAN), create(root, PLAN)
    assert find().id == two.id
    assert find(one.id).id == one.id  # though the other's name begins alike
    assert find(str(one.path)).id == one.id
    assert find(two.id[:-1] if not two.id.startswith(one.id) else two.id).id == two.id


@pytest.mark.parametrize(
    ("name", "said"), [("train", "several runs begin"), ("nope", "no run begins"), ("/etc", "no run")]
)
def test_a_run_that_is_not_found_names_those_there_are(root, name, said):
    one, two = create(root, PLAN), create(root, PLAN)
    with pytest.raises(Refused, match=said) as refused:
        find(name)
    assert one.id in refused.value.try_ and two.id in refused.value.try_


def test_before_the_first_run_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_RUNS", str(tmp_path / "none"))
    with pytest.raises(Refused, match="there is no run yet"):
        find()
    assert runs_root() == tmp_path / "none" and not runs_root().exists()


def test_a_plan_that_cannot_be_read_is_named(root):
    folder = create(root, PLAN)
    (folder.path / "plan.json").write_text("{")
    with pytest.raises(Refused) as refused:
        folder.plan()
    assert str(folder.path) in refused.value.at


@pytest.mark.parametrize(
    ("pid", "start", "is_alive"), [(0, None, True), (0, 1.0, False), (2**22 + 1, 5.0, False), (1, 5.0, False)]
)
def test_a_launcher_is_its_pid_and_its_start_time(root, pid, start, is_alive):
    """SL-09: a pid that was given to another process is not taken for it."""
    folder = create(root, PLAN)
    assert folder.launcher() == 0
    alive(folder, pid, start)
    assert folder.launcher() == (os.getpid() if is_alive else 0)


def test_ports_of_living_runs_are_in_use(root):
    """NW-10: also of a run that has been planned and has not begun."""
    ports = {task.port for task in PLAN.tasks.values()}
    folder = create(root, PLAN)
    assert ports_in_use(root) == ports
    folder.journal.touch()
    assert ports_in_use(root) == ports  # its journal is made before its first event is written
    alive(folder)
    assert ports_in_use(root) == ports


def test_ports_of_dead_runs_are_free_again(root):
    """NW-10."""
    died, never = create(root, PLAN), create(root, PLAN)
    alive(died, start=1.0)
    os.utime(never.path / "plan.json", (1.0, 1.0))
    assert ports_in_use(root) == set()


@pytest.mark.parametrize(("mode", "refused"), [(0o700, False), (0o755, False), (0o777, True), (0o1777, False)])
def test_a_folder_of_runs_into_which_anybody_writes_is_refused(tmp_path, monkeypatch, mode, refused):
    """X11."""
    path = tmp_path / "runs"
    path.mkdir()
    path.chmod(mode)
    monkeypatch.setenv("MUSTER_RUNS", str(path))
    if refused:
        with pytest.raises(Refused, match="anybody may write"), planning_lock():
            pass
    else:
        with planning_lock() as root:
            assert root == path


def test_who_waits_for_another_plan_says_so(root):
    told = []

    def tell(text):
        told.append(text)
        fcntl.flock(other, fcntl.LOCK_UN)

    with (root / ".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with planning_lock(tell, patience=0.0):
            assert len(told) == 1 and str(root / ".lock") in told[0]
    with planning_lock(tell, patience=0.0):
        assert len(told) == 1  # nobody was waited for


def test_a_folder_of_runs_that_cannot_be_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "kept" / ".lock").mkdir(parents=True)
    for root, what in (("file", "cannot be made"), ("file/runs", "cannot be made"), ("kept", "cannot be written")):
        monkeypatch.setenv("MUSTER_RUNS", str(tmp_path / root))
        with pytest.raises(Refused, match=what) as refused, planning_lock():
            pass
        assert refused.value.at == str(tmp_path / root) and refused.value.because


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_runs_of_somebody_else_is_refused(tmp_path, monkeypatch):
    """X11."""
    os.chown(tmp_path, 12345, -1)
    monkeypatch.setenv("MUSTER_RUNS", str(tmp_path))
    try:
        with pytest.raises(Refused, match="belongs to somebody else"), planning_lock():
            pass
    finally:
        os.chown(tmp_path, 0, -1)


def test_the_newest_of_many_events_can_be_read_while_they_are_written(tmp_path):
    path = tmp_path / "j"
    journal = Journal(path, sync=lambda fd: None)
    for n in range(1, 50):
        journal.append([Started(float(n), "worker/0", n)])
        assert sum(1 for _ in read(path)) == n


def test_a_zombie_or_nobody_has_no_start_time():
    assert born(os.getpid()) > 0 and born(2**22 + 1) == 0
    assert Path("/proc/self").exists()
