"""Copying code to hosts: what travels, and to whom it may not."""

import sys

import pytest

from muster.cluster import Cluster, Host
from muster.errors import RunFailed
from muster.launch.sync import files_of, sync_host

HOSTILE = f"""#!{sys.executable} -SI
import json, sys
sys.stdin.readline()
print(json.dumps({{"mark": "--muster-sync--", "root": "/x", "wanted": ["NAME"]}}), flush=True)
print(json.dumps({{"mark": "--muster-sync--", "got": sys.stdin.read(1000)}}), flush=True)
"""


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "other.py"])
def test_a_host_gets_no_file_that_it_was_not_offered(tmp_path, monkeypatch, name):
    """One that was broken into must not read the files of whoever trains on it."""
    (tmp_path / "bin").mkdir()
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text(HOSTILE.replace("NAME", name))
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "code").mkdir()
    for path in ("secret", "code/train.py", "code/other.py"):
        (tmp_path / path).write_text("x")
    cluster = Cluster(launcher="ssh", hosts=[Host(name="far", address="10.0.0.1")])
    with pytest.raises(RunFailed) as failed:
        sync_host(cluster, cluster.hosts[0], tmp_path / "code", [("train.py", 1, "0" * 64, 0o644)])
    assert failed.value.at == "far" and name in str(failed.value) and "not offered" in str(failed.value)


def test_what_travels(tmp_path):
    """Links to files travel as files; hidden folders, bytecode and virtual environments of any name stay at home."""
    for name in (
        "train.py",
        "venvironment/part.py",
        ".git/config",
        "__pycache__/x.pyc",
        "env3/pyvenv.cfg",
        "env3/lib.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "link.py").symlink_to(tmp_path / "train.py")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    assert [name for name, *_ in files_of(tmp_path)] == ["link.py", "train.py", "venvironment/part.py"]
