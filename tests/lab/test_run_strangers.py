"""Our own parameter servers between machines: TLS, who may connect, what a bad network does to them, what a stranger
can do: nothing. Workers are a NumPy loop; the Python of the hosts has NumPy and nothing of ours."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from standins import slack, until

from muster.events import Exited, HostLost, Joined, Said, Step
from muster.launch.authority import Authority

from .lab import SEED
from .remote import PS0, PS1, WORKER0, WORKER1, WORKER2, Launch, Site

LOOP = """\
import os, sys, time
import numpy as np
import muster
def say(*words): print(*words, flush=True)
def main(limit=10**9, rows=100):
    ps = muster.connect()
    params = ps.declare({"w": np.zeros((rows, 10), np.float32)}, "sgd", 0.1)
    own = 0
    while not os.path.exists("enough") and own < limit and not ps.stopping:
        ps.step({"w": np.ones((rows, 10), np.float32)}, samples=1)
        own += 1
        time.sleep(0.01)
    say("own", own)
    ps.finish()
    while muster.is_chief() and not os.path.exists("counted"): time.sleep(0.05)
    ps.pull()
    say("all", ps.step_now)
"""
MAIN = LOOP + "main()\n"
WORKERS = ("worker/0", "worker/1", "worker/2")


@pytest.fixture
def ours(site: Site) -> Iterator[Site]:
    """The cluster of the seed, engine muster."""
    site.cluster(run={"engine": "muster", "settle": 60})
    yield site
    for host in SEED:
        (site.lab.private(host) / "counted").unlink(missing_ok=True)


def training(site: Site, *options: str, code: str = MAIN, name: str = "train.py") -> Launch:
    launch = site.run(code, *options, name=name)
    for task in WORKERS:
        launch.saw(Step, task=task)
    return launch


def goes_on(launch: Launch, task: str = "worker/0", within: float = 20.0) -> None:
    at = launch.events(Step, task=task)[-1].step
    until(lambda: launch.events(Step, task=task)[-1].step > at + 5, within, f"{task} goes on\n{launch.text()}")


def finish(site: Site, launch: Launch) -> None:
    """Ends it well; each push of each worker was applied once, and nothing was started twice."""
    site.everywhere("enough", "")
    own = sum(int(launch.said(task, "own ").split("own ")[1].split()[0]) for task in WORKERS)
    site.everywhere("counted", "")
    assert launch.wait() == 0, launch.text()
    assert f"all {own}\n" in launch.log("worker/0") and set(launch.attempts().values()) == {1}


@pytest.mark.parametrize("how", ["--encrypt", "--no-encrypt"])
def test_training_between_machines(ours: Site, how: str):
    """With TLS, and with the challenge alone for a closed network."""
    example = Path(__file__).parents[2] / "examples" / "numpy_softmax.py"
    launch = ours.run(example.read_text(), how, "--json", args=["--steps", "200"], name="numpy_softmax.py")
    assert launch.wait() == 0, launch.text()
    assert launch.result()["metrics"]["accuracy"] > 0.8 and launch.result()["steps"] >= 200
    assert {event.task for event in launch.events(Joined)} == set(WORKERS)


def sockets(site: Site, host: str) -> set[str]:
    """What listens on TCP there, as 0A4D000B:08AE."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        rows = site.lab.run_in(host, ["cat", table]).stdout.splitlines()[1:]
        found |= {row.split()[1] for row in rows if row.split()[3] == "0A"}
    return found


def hexed(address: str, port: int) -> str:
    return "".join(f"{int(part):02X}" for part in reversed(address.split("."))) + f":{port:04X}"


DIAL = "import socket, sys; socket.create_connection((sys.argv[1], 2222), 3)"


def test_no_port_but_that_of_a_ps_and_on_the_address_of_the_plan_alone(ours: Site):
    """X1: agents and workers listen nowhere, the ps neither on loopback nor on another address of its machine."""
    launch = training(ours)
    for host in SEED:
        ssh = {hexed(ours.lab.address(host), 22)}
        assert sockets(ours, host) == ssh | ({hexed(ours.lab.address(host), 2222)} if host in (PS0, PS1) else set())
    ours.lab.run_in(PS0, ["ip", "addr", "add", "10.77.9.1/24", "dev", "eth0"])
    for address, refused in (("127.0.0.1", True), ("127.0.0.2", True), ("10.77.9.1", True), (PS0, False)):
        done = ours.lab.run_in(PS0, ["/usr/bin/python3", "-c", DIAL, address])
        assert ("ConnectionRefused" in done.stderr) is refused, done.stderr
    finish(ours, launch)


STRANGER = """
import os, pickle, socket, ssl, sys
def refused(said, wrap=None):
    with socket.create_connection((sys.argv[1], 2222), 5) as raw:
        raw.settimeout(10)
        try:
            sock = wrap(raw) if wrap else raw
            sock.sendall(said)
            got = sock.recv(4096)
        except OSError as error:
            return type(error).__name__
        return "nothing" if not got else "alert" if got[:1] == b"\\x15" else "ANSWER " + repr(got[:40])
def tls(papers=""):
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    if papers: made.load_cert_chain(papers)
    return lambda raw: made.wrap_socket(raw)
hello = b"MST1" + bytes(60)
tries = {
    "http": (b"GET / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n", None),
    "grpc": (b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n", None),
    "random": (os.urandom(4096), None), "ours, in the open": (hello, None), "pickle": (pickle.dumps({"a": 1}), None),
    "length": (b"\\x17\\x03\\x03\\xff\\xff" + bytes(70000), None),
    "half a hello": (b"\\x16\\x03\\x01\\x02\\x00\\x01", None),
    "no certificate": (hello, tls()), "foreign certificate": (hello, tls(sys.argv[2])),
}
for name, how in tries.items(): print(name, "|", refused(*how), flush=True)
"""
IDLE = """
import socket, sys, time
kept = []
for n in range(300):
    try:
        kept.append(socket.create_connection((sys.argv[1], 2222), 2))
        if n % 10 == 0: kept[-1].send(b"\\x16")
    except OSError: pass
print(len(kept), flush=True)
time.sleep(3)
"""


def test_a_stranger_gets_no_answer_and_disturbs_nobody(ours: Site, tmp_path: Path):
    """X2, X3, X5, X6, X7: other protocols, no certificate, one of another run's authority, hundreds of connections."""
    foreign = Authority("another run").papers("worker/0")
    (ours.lab.private(WORKER2) / "foreign").write_text(foreign["key"] + foreign["certificate"])
    launch = training(ours)
    argv = ["/usr/bin/python3", "-c", STRANGER, PS0, str(ours.lab.home / "foreign")]
    told = ours.lab.run_in(WORKER2, argv, timeout=90)
    (ours.lab.private(WORKER2) / "foreign").unlink()
    rows = dict(line.split(" | ") for line in told.stdout.splitlines())
    assert len(rows) == 9 and not [name for name, got in rows.items() if got.startswith("ANSWER")], told
    goes_on(launch)
    crowd = ours.lab.popen_in(WORKER2, ["/usr/bin/python3", "-c", IDLE, PS0])
    assert crowd.stdout is not None and int(crowd.stdout.readline()) > 0
    began = time.monotonic()
    goes_on(launch)
    assert time.monotonic() - began < slack(5.0)
    crowd.kill()
    crowd.communicate()
    finish(ours, launch)
    said = [row for row in launch.log("ps/0").splitlines() if ours.lab.address(WORKER2) in row]
    assert said and all("refused" in row for row in said) and len(said) == len(set(said)) <= len(rows), said


LISTEN = """
import socket, struct, sys
raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
print("ready", flush=True)
first, heard = None, {}
while True:
    frame = raw.recv(65536)
    ip = frame[14:]
    if len(frame) < 54 or ip[9] != 6 or socket.inet_ntoa(ip[12:16]) != sys.argv[1]: continue
    tcp = ip[(ip[0] & 15) * 4 : struct.unpack("!H", ip[2:4])[0]]
    source, port, seq = struct.unpack("!HHI", tcp[:8])
    if port != 2222 or first not in (None, source): continue
    data = tcp[(tcp[12] >> 4) * 4 :]
    if not data: continue  # a call before the ps was there is none to record
    first, heard[seq] = source, data
    if sum(map(len, heard.values())) > 20000: break
print(b"".join(heard[seq] for seq in sorted(heard)).hex(), flush=True)
"""
REPLAY = """
import socket, sys
with socket.create_connection((sys.argv[1], 2222), 5) as sock:
    sock.settimeout(10)
    try:
        sock.sendall(bytes.fromhex(sys.stdin.read()))
        said = b""
        while got := sock.recv(65536): said += got
    except OSError: pass
print("done")
"""


def test_a_recorded_connection_is_worth_nothing(ours: Site):
    """X4: all that a worker sent, from its handshake on, played back from its own machine."""
    ear = ours.lab.popen_in(PS0, ["/usr/bin/python3", "-c", LISTEN, ours.lab.address(WORKER0)])
    assert ear.stdout is not None and ear.stdout.readline() == b"ready\n"
    launch = training(ours)
    heard = ear.stdout.readline().decode().strip()
    ear.communicate()
    assert len(heard) > 40000
    done = ours.lab.run_in(WORKER0, ["/usr/bin/python3", "-c", REPLAY, PS0], stdin=heard)
    assert done.stdout == "done\n", done.stderr
    goes_on(launch)
    finish(ours, launch)  # which counts the steps


@pytest.mark.parametrize("how", ["--encrypt", "--no-encrypt"])
def test_a_worker_that_acts_for_another_is_refused(ours: Site, how: str):
    """X13: it has its own key and certificate, and says another's name."""
    code = LOOP + "if muster.task() == 'worker/1': os.environ['MUSTER_TASK'] = 'worker/2'\nmain(limit=200)\n"
    launch = ours.run(code, how, "--retries", "1")
    assert launch.wait() == 1
    failed = launch.events(Exited, task="worker/1")[0]
    assert failed.code == 1 and "refused" in (failed.error + failed.trace + failed.tail), launch.text()
    assert launch.attempts()["worker/2"] == 1 and "worker/1 on worker1" in launch.text()


# --- keys


SPY = """
import json, sys
from muster import run
from muster.cli import main
class Keys(run.Keys):
    def __call__(self, task):
        told = super().__call__(task)
        with open(place, "a") as file: file.write(json.dumps(told) + "\\n")
        return told
place = sys.argv.pop(1)
run.Keys = Keys
main(sys.argv[1:])
"""


def leaks(site: Site, secrets: set[bytes], since: float) -> list[str]:
    """Where any of ``secrets`` stands: argv or environment of any process of the lab, any file of any machine that was
    written ``since`` (those of earlier tests are many, and older than these secrets)."""
    found = []
    for processes in site.everything().values():
        for pid in processes:
            for part in ("cmdline", "environ"):
                try:
                    text = Path(f"/proc/{pid}/{part}").read_bytes()
                except OSError:
                    continue
                found += [f"{part} of {processes[pid]}"] if any(secret in text for secret in secrets) else []
    machines = [Path(f"/proc/{site.lab._machines[host].pid}/root") for host in SEED]
    for top in [site.lab.folder, *(root / name for root in machines for name in ("tmp", "run", "dev/shm"))]:
        for folder, _, names in os.walk(top):
            for name in names:
                path = Path(folder) / name
                try:
                    text = path.read_bytes() if path.is_file() and path.stat().st_mtime >= since else b""
                except OSError:
                    continue
                found += [str(path)] if any(secret in text for secret in secrets) else []
    return found


def test_no_key_stands_in_any_argv_environment_log_or_file(ours: Site, tmp_path: Path):
    """X8: looked for on all machines while the run is on and after it."""
    told, began = tmp_path / "told", time.time() - 1
    launch = ours.run(MAIN, through=("-c", SPY, str(told)))
    for task in WORKERS:
        launch.saw(Step, task=task)
    rows = [json.loads(line) for line in told.read_text().splitlines()]
    assert len(rows) == 5 and all("tls" in row for row in rows)
    words = {row[name] for row in rows for name in ("key", "secret") if name in row}
    raw = {bytes.fromhex(word) for word in words}
    lines = {line for row in rows for line in row["tls"]["key"].splitlines() if not line.startswith("-")}
    secrets = {word.encode() for word in words | lines} | raw
    assert len(words) == 4 and len(lines) >= 10
    for mark in (b"MUSTER_TASK=worker/1", b'"kind":"Spawned"'):  # it does find things
        assert leaks(ours, {mark}, began)
    assert leaks(ours, secrets, began) == []
    finish(ours, launch)
    assert leaks(ours, secrets, began) == []


# --- bad networks between workers and ps; the launcher's own connections are well


def test_resets_lose_no_step_and_start_nothing_anew(ours: Site):
    """N5: each push is applied once."""
    launch = training(ours)
    for _ in range(3):
        ours.lab.cut(WORKER0, PS0, reset=True)
        time.sleep(0.3)
        ours.lab.mend(WORKER0, PS0, reset=True)
        goes_on(launch)
    finish(ours, launch)


@pytest.mark.parametrize("seconds", [3.0, 8.0])
def test_a_worker_that_is_cut_off_from_a_ps_says_so_and_goes_on(ours: Site, seconds: float):
    """N1, N3, N4, NW-01: one direction only; the others are not held up."""
    launch = training(ours)
    ours.lab.cut(WORKER0, PS0)
    cut = time.monotonic()
    goes_on(launch, "worker/1")
    if seconds > 5:
        until(lambda: any("ps/0" in e.text for e in launch.events(Said, task="worker/0")), 20, launch.text())
    time.sleep(max(0.0, cut + seconds - time.monotonic()))
    ours.lab.mend(WORKER0, PS0)
    goes_on(launch, "worker/0", 40)
    finish(ours, launch)
    assert not launch.events(HostLost)


def test_a_slow_cable_slows_a_sync_run_and_starts_nothing_anew(ours: Site):
    """N6: 5 Mbit/s at one worker, 0.4 MB a step."""
    launch = training(ours, "--mode", "sync", code=LOOP + "main(rows=10_000)\n")
    ours.lab.rate(WORKER0, 5)
    goes_on(launch, "worker/0", 60)
    ours.lab.rate(WORKER0, None)
    ours.everywhere("enough", "")
    ours.everywhere("counted", "")
    assert launch.wait() == 0, launch.text()
    assert set(launch.attempts().values()) == {1} and not launch.events(HostLost)


def test_a_name_with_two_addresses_one_of_them_dead(ours: Site):
    """N9: whichever stands first, the ps listens at its own and the workers find it."""
    files = [ours.lab._machines[host].folder / "hosts" for host in SEED]
    before = [file.read_text() for file in files]
    dead = {PS0: "10.77.0.200", PS1: "fd00::77"}
    for file, text in zip(files, before, strict=True):
        file.write_text("".join(f"{address} {host}\n" for host, address in dead.items()) + text)
    try:
        launch = training(ours)
        finish(ours, launch)
    finally:
        for file, text in zip(files, before, strict=True):
            file.write_text(text)


def test_interfaces_have_another_name_on_each_machine(ours: Site):
    """NW-11: only addresses count, though every machine has the same one on a docker0 besides."""
    for n, host in enumerate((PS0, WORKER0)):
        ours.lab.rename_interface(host, "eth0", f"enp{n}s0")
    for host in SEED:
        ours.lab.run_in(host, ["sh", "-c", "ip link add docker0 type bridge && ip addr add 172.17.0.1/16 dev docker0"])
        ours.lab.run_in(host, ["ip", "link", "set", "docker0", "up"])
    try:
        launch = training(ours)
        finish(ours, launch)
    finally:
        for n, host in enumerate((PS0, WORKER0)):
            ours.lab.rename_interface(host, f"enp{n}s0", "eth0")
        for host in SEED:
            ours.lab.run_in(host, ["ip", "link", "del", "docker0"])


def test_a_certificate_is_made_for_each_task_of_each_run(ours: Site, tmp_path: Path):
    """The authority lives in the launcher: two runs share nothing."""
    launch = training(ours)
    argv = ["/usr/bin/python3", "-c", "import ssl, sys; print(ssl.get_server_certificate((sys.argv[1], 2222)))", PS0]
    (tmp_path / "pem").write_text(ours.lab.run_in(WORKER1, argv).stdout)
    text = subprocess.run(
        ["openssl", "x509", "-noout", "-subject", "-issuer", "-in", tmp_path / "pem"], capture_output=True, text=True
    ).stdout
    assert "ps/0" in text.splitlines()[0] and f"muster run {launch.run().id}" in text.splitlines()[1], text
    finish(ours, launch)


def numpy_only(site: Site, host: str) -> str:
    """An interpreter on ``host`` that has NumPy and neither TensorFlow nor anything of ours."""
    import numpy

    folder = site.lab.private(host) / "numpy-only"
    packages = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    packages.mkdir(parents=True, exist_ok=True)
    for path in Path(numpy.__file__).parents[1].glob("numpy*"):
        if not (packages / path.name).exists():
            (packages / path.name).symlink_to(path)
    (folder / "bin").mkdir(exist_ok=True)
    real = Path(sys.executable).resolve()
    if not (folder / "bin" / "python").exists():
        (folder / "bin" / "python").symlink_to(real)
    (folder / "pyvenv.cfg").write_text(f"home = {real.parent}\n")
    return str(site.lab.home / "numpy-only" / "bin" / "python")


def test_a_machine_of_a_ps_needs_no_tensorflow(site: Site):
    """EN-04: checked by role, and run so."""
    rows = {host: {"name": host.split(".")[0]} for host in SEED}
    for host in (PS0, PS1):
        rows[host]["python"] = numpy_only(site, host)
    seats = {"ps": [f"{h}:2222" for h in SEED[:2]], "workers": [f"{h}:2222" for h in SEED[2:]]}
    site.cluster(run={"engine": "muster", **seats}, hosts=rows)
    launch = site.run(LOOP + "open('counted', 'w').close()\nmain(limit=30)\n", check=True)
    assert launch.wait() == 0, launch.text()
    rows[WORKER1]["python"] = numpy_only(site, WORKER1)
    site.cluster(run={"engine": "tensorflow", **seats}, hosts=rows)
    launch = site.run(MAIN, check=True)
    assert launch.wait() == 1 and launch.text().count("no TensorFlow") == 3, launch.text()
    for host in SEED:
        (site.lab.private(host) / "counted").unlink(missing_ok=True)
