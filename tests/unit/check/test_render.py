"""What people and programs get to see."""

import json

from muster.check import render
from muster.check.findings import Finding, Link, Pairs, Wanted
from muster.check.network import Slowest

LINK = Link("a", "b", 50.0, 60.0, 49.0, 200, 0.01, 0.0, 1200, 12.0, 900.0)
WANTED = [Wanted("a", "10.0.0.1", "python"), Wanted("b", "10.0.0.2", "python")]
ERROR = Finding("error", "a", "port 2222 of ps/0 is taken", "held by pid 7 [sic]", "muster stop r7", kind="port")
WARNING = Finding("warning", "b", "few open files allowed", "ulimit -n is 256", "raise it", kind="files")


def test_rows_are_plain_words_in_the_order_of_the_findings() -> None:
    text = render.text(render.table(WANTED, [ERROR, WARNING], Slowest(LINK, 2.7, 0.01, 1_000_000), 3.21))
    lines = [line.strip() for line in text.splitlines()]
    assert lines[0] == "error   a  port 2222 of ps/0 is taken"
    assert lines[1] == "because  held by pid 7 [sic]"
    assert lines[2] == "try      muster stop r7"
    assert "slowest link  a - b: 50 ms round trip" in text
    assert lines[-1] == "2 hosts: 1 error, 1 warning (3.2 s)"


def test_nothing_found_says_so() -> None:
    assert render.text(render.table(WANTED, [], None, 1.0)).strip() == "2 hosts are fit (1.0 s)"


def test_json_has_the_rows_the_links_and_the_slowest() -> None:
    told = json.loads(render.as_json([WARNING], Pairs((), (LINK,)), Slowest(LINK, 2.7, 0.01, 1_000_000)))
    assert told["ok"] is True
    assert set(told["findings"][0]) == {"severity", "host", "what", "because", "try", "kind", "peer"}
    assert told["links"][0]["verdict"] == "warning"
    assert told["slowest"]["a"] == "a"
    assert json.loads(render.as_json([ERROR]))["ok"] is False


HEARD = {
    host: {
        "python": {"version": "3.11.7", "executable": "/opt/python"},
        "machine": {"system": "Linux", "machine": machine, "libc": "glibc 2.36", "kernel": "6.1", "cores": 8},
        "packages": {"tensorflow": "2.21.0", "protobuf": "7.36.2", "grpcio": "1.76.0"},
        "gpus": {"devices": [{"name": "H100"}] if host == "a" else []},
    }
    for host, machine in [("a", "x86_64"), ("b", "aarch64"), ("c", "aarch64")]
}


def test_what_each_host_is_stands_above_the_rows_and_in_json() -> None:
    """EN-06, EN-09: system, architecture, Python, libc and versions; hosts that are alike share a line."""
    heard = {**HEARD, "d": {"failure": {"returncode": 255, "stderr": ""}}, "e": {"gpus": {"late": True}}}
    first, second, third = render.text(render.hosts(heard), 200).splitlines()
    versions = "/opt/python 3.11.7 with tensorflow 2.21.0, protobuf 7.36.2, grpcio 1.76.0"
    assert first.strip() == f"a        Linux x86_64, glibc 2.36, 8 cores, 1 GPU; {versions}"
    assert second.strip() == f"b and c  Linux aarch64, glibc 2.36, 8 cores; {versions}"
    assert third.strip() == "e"
    told = json.loads(render.as_json([], heard=heard))["hosts"]
    assert set(told) == {"a", "b", "c", "e"} and told["a"]["gpus"] == ["H100"]
    assert [told["b"][name] for name in ("system", "machine", "libc", "python")] == [
        "Linux", "aarch64", "glibc 2.36", "3.11.7"
    ]  # fmt: skip
    assert "x86_64" in render.text(render.table(WANTED, [ERROR], heard=HEARD))


def test_exit_code_is_1_on_an_error_only() -> None:
    assert [render.exit_code(f) for f in ([], [WARNING], [WARNING, ERROR])] == [0, 0, 1]


def test_links_table_has_every_pair() -> None:
    text = render.text(render.links(Pairs((), (LINK, Link("b", "a", error="time was up")))))
    assert "1.0% lost from a to b" in text and "unknown" in text and "warning" in text
