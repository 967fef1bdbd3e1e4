"""This machine: the agent is a child process, in a session of its own so that Ctrl-C reaches the launcher alone."""

import subprocess
import sys
from pathlib import Path

from muster.cluster import Host
from muster.launch import agent
from muster.launch.pipe import Connection


def connect(host: Host) -> Connection:
    """An agent on this machine. Its stderr is ours: it says something only when it is broken."""
    process = subprocess.Popen(
        [sys.executable, "-I", str(Path(agent.__file__))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    return Connection(process)
