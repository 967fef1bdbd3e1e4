"""The text that is sent, run by a real interpreter over a real pipe; and a survey of hosts that are this computer."""

import ast
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from muster.check import serve
from muster.check.channel import ChannelBroken, Pipe, local_argv, ssh_argv
from muster.check.findings import Wanted
from muster.check.survey import survey
from muster.check.verdicts import judge


def test_the_boot_text_passes_every_shell() -> None:
    (*_, boot) = serve.command("python")
    assert "\n" not in boot and "'" not in boot and "!" not in boot


def test_ssh_gets_words_and_never_options() -> None:
    argv = ssh_argv("-oProxyCommand=touch x", "/opt/my venv/bin/python", ["-F", "config"])
    assert argv[argv.index("--") + 1] == "-oProxyCommand=touch x"
    assert "exec '/opt/my venv/bin/python' -u -c " in argv[-1]


def test_requests_are_answered_and_noise_is_passed_over() -> None:
    noisy = ["sh", "-c", 'echo "Welcome!"; exec "$@"', "sh", *local_argv(sys.executable)]
    pipe = Pipe(noisy)
    try:
        assert "now" in pipe.ask({"ask": "clock"}, 20)
        assert "KeyError" in pipe.ask({"ask": "nonsense"}, 20)["broken"]
        assert pipe.ask({"ask": "facts"}, 20)["python"]["executable"] == sys.executable
    finally:
        pipe.close()


def test_a_pipe_that_ends_or_hangs_says_so_in_time() -> None:
    ended = Pipe(["sh", "-c", "echo gone wrong >&2; exit 3"])
    with pytest.raises(ChannelBroken) as caught:
        ended.ask({"ask": "clock"}, 5)
    assert (caught.value.returncode, caught.value.stderr) == (3, "gone wrong\n")
    ended.close()
    began, hung = time.monotonic(), Pipe(["sleep", "30"])
    with pytest.raises(ChannelBroken) as caught:
        hung.ask({"ask": "clock"}, 0.1)
    assert caught.value.returncode is None
    hung.close()
    assert time.monotonic() - began < 5


def test_survey_of_one_computer(tmp_path: Path) -> None:
    wanted = [
        Wanted(name, "127.0.0.1", sys.executable, checkpoints=str(tmp_path), tasks=("worker/0",)) for name in ("a", "b")
    ]
    heard = survey(wanted, lambda w: Pipe(local_argv(w.python)), within=30)
    assert judge(wanted, heard.facts, heard.pairs) == []
    assert heard.facts["a"]["nonce"]["read"] == {"a": "", "b": ""}
    assert not list(tmp_path.iterdir())
    assert '"pairs"' in heard.json()


class Deaf:
    """A host that never answers."""

    def ask(self, request: Mapping[str, Any], within: float) -> dict[str, Any]:
        raise ChannelBroken(None, "", within)

    def close(self) -> None:
        pass


def test_a_host_that_hangs_costs_its_own_answers_only() -> None:
    good = Wanted("a", "127.0.0.1", sys.executable)
    wanted = [good, replace(good, host="b")]
    heard = survey(wanted, lambda w: Deaf() if w.host == "b" else Pipe(local_argv(w.python)), within=30)
    assert [(f.severity, f.host, f.kind) for f in judge(wanted, heard.facts)] == [
        ("error", "b", "ssh silent"),
        ("unknown", "b", "not asked"),
    ]


def test_what_is_sent_is_written_for_python_3_8() -> None:
    for name in ("probe", "pairs", "serve"):
        source = Path(serve.__file__).with_name(f"{name}.py").read_text()
        ast.parse(source, feature_version=(3, 8))
        imported = {
            alias.name.partition(".")[0]
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in ([ast.alias(node.module or "")] if isinstance(node, ast.ImportFrom) else node.names)
        }
        assert imported <= set(sys.stdlib_module_names) | {"muster"}


INTERRUPTED = """
import sys
from muster.check.channel import Pipe
from muster.check.findings import Wanted
from muster.check.survey import survey
print("asking", flush=True)
survey([Wanted(h, "127.0.0.1", "python") for h in "ab"], lambda w: Pipe(["sleep", "61"]))
"""


def children(pid: int) -> list[str]:
    """Of all its threads."""
    return [told for file in Path(f"/proc/{pid}/task").glob("*/children") for told in file.read_text().split()]


def test_ctrl_c_does_not_wait_for_hosts_that_hang() -> None:
    child = subprocess.Popen([sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"asking\n"
    until = time.monotonic() + 5
    while len(hosts := children(child.pid)) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=15)  # less than a host may take
    assert child.returncode == -signal.SIGINT
    assert hosts and not [pid for pid in hosts if Path(f"/proc/{pid}").exists()]
