"""Getting to the machines and starting there: what travels, byte for byte, and what it needs at the far end."""

import glob
import json
import os
import sys
from pathlib import Path

import pytest
from standins import FOREVER, PRELUDE, SERVE, STEPS, WORDS, slack

from muster.events import HostUp, Spawned

from .lab import SEED
from .remote import PS0, WORKER0, WORKER1, WORKER2, Launch, Site

SHOW = SERVE + "print(json.dumps([os.fsencode(a).hex() for a in sys.argv])); print(__file__)\nmuster.ready()\n"
ENVIRON = SERVE + "say(json.dumps(dict(os.environ)))\nmuster.ready()\n"


def test_a_run_on_five_machines_over_one_connection_each(site: Site):
    """SL-08, SL-12: it ends well, leaves nothing on any machine, and can be asked about afterwards."""
    before = {host: site.logins(host) for host in SEED}
    launch = site.run(SERVE + STEPS + "say('hello from', me)", "--json")
    assert launch.wait() == 0, launch.text()
    told = launch.result()
    assert (told["ok"], told["steps"], {t["exit"] for t in told["tasks"] if t["task"] != "ps/0"}) == (
        True, 10, {"exit 0", "ended"},
    )  # fmt: skip
    assert [t["host"] for t in told["tasks"]] == ["ps0", "ps1", "worker0", "worker1", "worker2"]
    assert "| hello from worker/2\n" in launch.text()
    assert {host: site.logins(host) - before[host] for host in SEED} == dict.fromkeys(SEED, 1)
    for host in SEED:  # nothing of ours stays there, the task-side code included
        assert list((site.lab._machines[host].folder / "tmp").glob("muster*")) == []
    code, said = site.ask("status", "--json")
    assert code == 0 and json.loads(said)["state"] == "ended"
    assert site.ask("logs", "worker/1") == (0, "hello from worker/1\n")
    assert site.ask("stop") == (0, f"run {launch.run().id} was over; nothing of it was alive\n")


PYENV = os.path.expanduser("~/.pyenv/versions")


def bare_pythons() -> list[str]:
    """Interpreters that have nothing but their standard library."""
    return glob.glob(f"{PYENV}/3.10.*/bin/python3") + glob.glob("/usr/bin/python3.1[0-9]")


@pytest.mark.skipif(not bare_pythons(), reason="no other Python here")
def test_a_machine_needs_python_3_10_and_nothing_of_ours(site: Site):
    site.cluster(every={"python": bare_pythons()[0]})
    launch = site.run(SERVE + STEPS + "say(sys.executable, muster.__file__)")
    assert launch.wait() == 0, launch.text()
    executable, where = launch.log("worker/0").split()
    assert os.path.samefile(executable, bare_pythons()[0]) and where.startswith("/proc/")  # the agent's file


def test_arguments_are_byte_equal_at_the_worker(site: Site):
    """B4: whatever a shell here or there would make of them."""
    launch = site.run(SHOW, args=WORDS)
    assert launch.wait() == 0, launch.text()
    for task in ("worker/0", "worker/2"):
        got = [bytes.fromhex(arg) for arg in json.loads(launch.log(task).splitlines()[0])]
        assert got[1:] == [os.fsencode(arg) for arg in WORDS]


@pytest.mark.parametrize("name", ['it\'s a "q" 训练.py', "./-dash $(touch x).py"])
def test_a_script_of_any_name_runs_and_knows_it(site: Site, name: str):
    """B3."""
    launch = site.run(SHOW, name=name)
    assert launch.wait() == 0, launch.text()
    argv = json.loads(launch.log("worker/0").splitlines()[0])
    assert bytes.fromhex(argv[0]) == os.fsencode(name)
    assert not any((site.lab.private(host) / "x").exists() for host in (*SEED, "ctl"))


def test_only_env_of_the_file_and_variables_named_by_pass_travel(site: Site):
    """NW-13: env reaches every task; what the shell here, or an old run there, had set does not."""
    site.env |= {"MINE": "stays", "TOKEN": "tr avels'\n\"$x", "TF_CONFIG": "{'half': ", "MUSTER_TASK": "ps/7"}
    site.cluster(every={"env": {"GRPC_POLL_STRATEGY": "poll", "ODD": "a\n'b\" $HOME"}})
    site.lab.environ(WORKER1, TF_CONFIG="{'there': ", MUSTER_CLUSTER="x", THEIRS="kept")
    try:
        launch = site.run(ENVIRON, "--pass", "TOKEN")
        assert launch.wait() == 0, launch.text()
    finally:
        site.lab._machines[WORKER1].environ.clear()
        site.lab.sshd(WORKER1)
        for name in ("MINE", "TOKEN", "TF_CONFIG", "MUSTER_TASK"):
            del site.env[name]
    told = json.loads(launch.log("worker/1"))
    assert (told["TOKEN"], told["ODD"], told["GRPC_POLL_STRATEGY"]) == ("tr avels'\n\"$x", "a\n'b\" $HOME", "poll")
    assert "MINE" not in told and told["THEIRS"] == "kept" and told["MUSTER_TASK"] == "worker/1"
    assert json.loads(told["TF_CONFIG"])["task"] == {"type": "worker", "index": 1}
    assert told["CUDA_VISIBLE_DEVICES"] == ""


def test_gpus_of_a_host_are_dealt_out_and_a_ps_gets_none(site: Site):
    """GP-01, GP-02, GP-06: in the tasks' real environment."""
    site.cluster(
        run={"ps": 1, "workers": 2}, hosts={WORKER0: {"gpus": 2, "env": {"NCCL_SOCKET_IFNAME": "eth7"}}},
    )  # fmt: skip
    say = PRELUDE + "say(os.environ['CUDA_VISIBLE_DEVICES'] or 'none', os.environ['NCCL_SOCKET_IFNAME'])\n"
    launch = site.run(say + "if role == 'ps': serve()\nserver = listen()\n" + STEPS)
    assert launch.wait() == 0, launch.text()
    assert [launch.log(t) for t in ("ps/0", "worker/0", "worker/1")] == ["none eth7\n", "0 eth7\n", "1 eth7\n"]


def test_gpus_that_a_host_does_not_have_are_refused_before_anything_starts(site: Site):
    """EN-03, B9."""
    site.cluster(run={"ps": 1, "workers": 2}, hosts={WORKER0: {"gpus": 2}})
    launch = site.run(SERVE + STEPS, check=True)
    assert launch.wait() in (1, 2)
    assert "worker0" in launch.text() and "2 GPUs planned" in launch.text() and "worker/0 |" not in launch.text()


def test_collectives_want_the_same_number_of_gpus_everywhere(site: Site):
    """GP-04: told with both counts, and what would do."""
    site.cluster(
        run={"ps": None, "workers": 2, "kind": "mwms"},
        hosts={WORKER0: {"gpus": 2}, WORKER1: {"gpus": 4}},
    )
    launch = site.run(SERVE + STEPS, check=True)
    assert launch.wait() == 1
    text = " ".join(launch.text().split())
    assert "another number of GPUs" in text and "gpus_per_worker = 2" in text, launch.text()


NOISE = "printf 'no newline'; head -c 100000 /dev/zero | tr '\\0' '\\377'; echo; echo to stderr >&2\n"


def test_what_a_login_shell_prints_does_not_matter(site: Site):
    """SL-01: 100 kB of bytes that are no text included."""
    for host in SEED:
        site.write(host, ".bashrc", NOISE)
    launch = site.run(SERVE + STEPS, check=True)
    assert launch.wait() == 0, launch.text()


def test_a_login_shell_that_returns_early_does_not_matter(site: Site):
    """SL-01."""
    for host in SEED:
        site.write(host, ".bashrc", '[ -z "$PS1" ] && return\nexport PATH=/nowhere\n')
    assert site.run(SERVE + STEPS).wait() == 0


@pytest.mark.parametrize("check", [True, False])
def test_a_login_shell_that_ends_is_named_with_what_it_said(site: Site, check: bool):
    """SL-13."""
    site.write(WORKER1, ".bashrc", "echo this account is closed; exit 3\n")
    launch = site.run(SERVE + STEPS, check=check)
    assert launch.wait() == 1
    assert "worker1" in launch.text() and "this account is closed" in launch.text(), launch.text()


# --- who we are there


def test_another_user_port_and_alias_for_each_host(site: Site, tmp_path: Path):
    """SL-03: ssh://user@host:port, user@host, and an alias with a jump host of ~/.ssh/config."""
    lab = site.lab
    for user, host, number in (("ana", PS0, 2001), ("bo", WORKER0, 2002)):
        home = lab.private(host) / user
        home.mkdir(exist_ok=True)
        os.chown(home, number, number)
        with (lab._machines[host].folder / "passwd").open("a") as file:
            file.write(f"{user}:*:{number}:{number}::{lab.home / user}:/bin/sh\n")
        (home / "train.py").write_text(SERVE + STEPS + "say(os.getuid())")
        lab.private(host).chmod(0o755)
    lab.sshd(PS0, Port="2200")
    rows = lab.ssh_config.read_text().splitlines()[2:]  # of the one Host block, without its User
    rows = [f"  UserKnownHostsFile {lab.folder}/known_here" if "UserKnown" in row else row for row in rows]
    jump = f"Host third\n  HostName {WORKER1}\n  ProxyJump {WORKER2}\n  User root\nHost {WORKER2}\n  User root\n"
    mine = site.write("ctl", ".ssh/config", jump + "Host *\n" + "\n".join(rows) + "\n")
    known = lab.known_hosts.read_text()
    key = next(line for line in known.splitlines() if line.startswith(PS0)).split(" ", 1)[1]
    (lab.folder / "known_here").write_text(known + f"[{PS0}]:2200 {key}\n")
    jumps = site.logins(WORKER2)
    python = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable
    try:
        site.cluster(
            run={"ps": 1, "workers": 2}, ssh_config=None, every=None,
            hosts={
                PS0: {"ssh": f"ssh://ana@{PS0}:2200", "python": python, "cwd": "~"},
                WORKER0: {"ssh": f"bo@{WORKER0}", "python": python, "cwd": "~"},
                WORKER1: {"ssh": "third", "python": python},
            },
        )  # fmt: skip
        launch = site.run(SERVE + STEPS + "say(os.getuid())")
        assert launch.wait() == 0, launch.text()
        assert launch.log("worker/0") == "2002\n" and launch.log("worker/1") == "0\n"
        assert site.logins(WORKER2) == jumps + 1
    finally:
        lab.sshd(PS0, Port="22")
        mine.unlink()


def test_two_sshd_at_one_address_are_two_hosts(site: Site):
    """SL-04: as with two containers that share an address; their tasks get different ports."""
    config = (site.lab._machines[PS0].folder / "sshd_config").read_text().replace("Port 22\n", "Port 2201\n")
    site.write(PS0, "second", config + 'SetEnv "SECOND=yes"\n')
    key = site.lab.known_hosts.read_text().splitlines()[1].split(" ", 1)[1]
    known = site.lab.known_hosts.read_text()
    site.lab.known_hosts.write_text(known + f"[{PS0}]:2201 {key}\n")
    sshd = site.lab.popen_in(PS0, ["/usr/sbin/sshd", "-D", "-e", "-f", str(site.lab.home / "second")])
    try:
        assert sshd.stderr is not None and b"listening" in sshd.stderr.readline()
        site.cluster(
            run={"ps": 1, "workers": 3},
            hosts={PS0: {"name": "one"}, "two": {"address": PS0, "ssh": f"ssh://root@{PS0}:2201"}},
        )
        launch = site.run(SERVE + STEPS + "say(host, port, os.environ.get('SECOND'))")
        assert launch.wait() == 0, launch.text()
    finally:
        sshd.kill()
        sshd.communicate()
        site.lab.known_hosts.write_text(known)
    told = {task.host: set() for task in launch.run().plan().tasks.values()}
    for task in launch.run().plan().tasks.values():
        told[task.host].add(task.port)
    assert set(told) == {"one", "two"} and not told["one"] & told["two"]
    assert {launch.log(f"worker/{n}").split()[2] for n in range(3)} == {"None", "yes"}


def test_sixteen_tasks_on_one_host_over_one_connection(site: Site):
    """N11."""
    site.lab.sshd(WORKER0, MaxStartups="2:100:2", MaxSessions="1")
    try:
        before = site.logins(WORKER0)
        site.cluster(run={"ps": 4, "workers": 12, "done": "all-workers"}, hosts={WORKER0: {}})
        launch = site.run(SERVE + STEPS)
        assert launch.wait() == 0, launch.text()
        assert site.logins(WORKER0) == before + 1 and len(launch.codes()) == 16
    finally:
        site.lab.sshd(WORKER0, MaxStartups="100:30:200", MaxSessions="100")


@pytest.mark.parametrize("check", [False, True])
def test_thirty_hosts_behind_one_sshd_that_takes_three_logins(site: Site, check: bool):
    """SL-14: few logins at one moment, and again where the sshd hung up."""
    names = [f"a{n}" for n in range(30)]
    lab, config = site.lab, site.lab.ssh_config.read_text()
    lab.sshd(WORKER0, MaxStartups="3")
    lab.ssh_config.write_text(f"Host a*\n  HostName {WORKER0}\n  HostKeyAlias {WORKER0}\n" + config.replace(
        "Host ", "Host a* ", 1))  # fmt: skip
    addresses = {name: f"{name}.example.com" for name in names}
    for host in (*SEED, "ctl"):
        file = lab._machines[host].folder / "hosts"
        file.write_text(file.read_text() + "".join(f"{lab.address(WORKER0)} {a}\n" for a in addresses.values()))
    try:
        site.cluster(
            run={"ps": 1, "workers": 29, "done": "all-workers", "ports": "20000-20999"},
            hosts={n: {"address": a, "ssh": n} for n, a in addresses.items()},
        )
        code = PRELUDE + "muster.ready()\nif role == 'ps': time.sleep(600)\n"
        launch = site.run(code, check=check)
        assert launch.wait(120) == 0, launch.text()
        assert len(launch.events(HostUp)) == 30
    finally:
        lab.ssh_config.write_text(config)
        lab.sshd(WORKER0, MaxStartups="100:30:200")


def test_a_jump_host_that_takes_few_logins_refuses_none(site: Site):
    """SL-14: twelve hosts behind it; the check, the copy and the run each go through it a few at a time."""
    names = [f"a{n}" for n in range(12)]
    lab, config, log = site.lab, site.lab.ssh_config.read_text(), site.lab._machines[WORKER2].log
    lab.sshd(WORKER2, MaxStartups="5:100:5")
    lab.ssh_config.write_text(
        f"Host a*\n  HostName {WORKER0}\n  HostKeyAlias {WORKER0}\n  ProxyJump {WORKER2}\n"
        + config.replace("Host ", "Host a* ", 1)
    )
    for host in (*SEED, "ctl"):
        file = lab._machines[host].folder / "hosts"
        file.write_text(file.read_text() + "".join(f"{lab.address(WORKER0)} {a}.example.com\n" for a in names))
    try:
        site.cluster(run={"ps": 1, "workers": 11}, hosts={n: {"address": f"{n}.example.com", "ssh": n} for n in names})
        before, said = site.logins(WORKER2), log.read_text()
        site.write("ctl", "code/train.py", PRELUDE + "muster.ready()\nif role == 'ps': time.sleep(600)\n")
        launch = site.start("--sync", "code", "code/train.py")
        assert launch.wait(120) == 0, launch.text()
        assert "MaxStartups" not in log.read_text()[len(said) :]
        assert site.logins(WORKER2) == before + 3 * 12
    finally:
        lab.ssh_config.write_text(config)
        lab.sshd(WORKER2, MaxStartups="100:30:200")


# --- what is not as it should be, told before anything starts


def nothing_started(launch: Launch) -> None:
    for journal in launch.site.runs.glob("*/journal.jsonl"):
        if f'"pid":{launch.process.pid},' in journal.read_text():
            assert '"Spawned"' not in journal.read_text()


def test_a_script_that_is_not_there_or_broken_is_named_before_anything_starts(site: Site):
    """B5."""
    site.everywhere("train.py", SERVE + STEPS)
    (site.lab.private(WORKER1) / "train.py").unlink()
    site.write(WORKER2, "train.py", "import os\nprint 'x'\n")
    launch = site.start("train.py")
    assert launch.wait() == 1
    assert "the script is not there" in launch.text() and "line 2" in launch.text()
    assert "worker1" in launch.text() and "worker2" in launch.text() and "worker0 " not in launch.text()
    nothing_started(launch)


@pytest.mark.parametrize("check", [True, False])
def test_an_interpreter_that_does_not_exist_is_named(site: Site, check: bool):
    """SL-01."""
    rows = {h: {"name": h.split(".")[0]} for h in SEED}
    rows[WORKER1]["python"] = "/opt/nowhere/python"
    site.cluster(run={"ps": 2, "workers": 3}, hosts=rows)
    launch = site.run(SERVE + STEPS, check=check)
    assert launch.wait() == 1
    assert "/opt/nowhere/python" in launch.text() and "worker1" in launch.text(), launch.text()
    nothing_started(launch)


def ancient() -> list[str]:
    return glob.glob(f"{PYENV}/2.7.*/bin/python") + glob.glob(f"{PYENV}/3.[67].*/bin/python")


@pytest.mark.skipif(not ancient(), reason="no old Python here")
@pytest.mark.parametrize("check", [True, False])
def test_an_interpreter_that_is_too_old_is_named(site: Site, check: bool):
    """EN-01."""
    rows = {h: {"name": h.split(".")[0]} for h in SEED}
    rows[WORKER1]["python"] = ancient()[0]
    site.cluster(run={"ps": 2, "workers": 3}, hosts=rows)
    launch = site.run(SERVE + STEPS, check=check)
    assert launch.wait() == 1
    assert "worker1" in launch.text() and ("too old" in launch.text() or not check), launch.text()
    nothing_started(launch)


def test_an_interpreter_without_tensorflow_is_named_by_its_path(site: Site):
    """SL-01, EN-01."""
    rows = {h: {"name": h.split(".")[0]} for h in SEED}
    rows[WORKER1]["python"] = "/usr/bin/python3"
    site.cluster(run={"ps": 2, "workers": 3}, hosts=rows)
    launch = site.run(SERVE + STEPS, check=True)
    assert launch.wait() == 1
    assert "/usr/bin/python3" in launch.text() and "worker1" in launch.text(), launch.text()
    nothing_started(launch)


def test_a_host_with_another_tensorflow_is_refused_with_both_versions(site: Site):
    """B8, EN-01."""
    from .faults import OTHER_TENSORFLOW, other_tensorflow

    rows = {h: {"name": h.split(".")[0]} for h in SEED}
    rows[WORKER1]["python"] = other_tensorflow(site.lab, WORKER1)
    site.cluster(run={"ps": 2, "workers": 3}, hosts=rows)
    launch = site.run(SERVE + STEPS, check=True)
    assert launch.wait() == 1
    assert f"TensorFlow {OTHER_TENSORFLOW}, the others have 2." in launch.text(), launch.text()
    nothing_started(launch)


def test_keras_3_with_a_strategy_is_refused_with_the_variable(site: Site):
    """EN-07: the short check of a run reads the script where it lies, on the hosts."""
    site.cluster(run={"ps": None, "workers": 2, "kind": "mwms"}, hosts={WORKER0: {}, WORKER1: {}})
    launch = site.run("from tensorflow import keras\nkeras.Sequential().fit([0])\n", check=True)
    assert launch.wait() == 1
    assert "line 2 calls fit" in launch.text() and "TF_USE_LEGACY_KERAS" in launch.text(), launch.text()
    nothing_started(launch)


@pytest.mark.parametrize(
    "host", ["-oProxyCommand=touch {x}", "a;touch {x}", "$(touch {x})", "a\ntouch {x}", "a\0b", "a" * 300]
)
@pytest.mark.parametrize("field", ["address", "ssh", "name"])
def test_hostile_host_names_run_nothing(site: Site, host: str, field: str):
    """B2: the file never appears, here or there."""
    mark = site.lab.shared / "x"
    site.cluster(run={"ps": 1, "workers": 1}, hosts={PS0: {field: host.format(x=mark)}})
    launch = site.run(SERVE + STEPS)
    assert launch.wait() in ((1, 2) if field == "ssh" else (2,)), launch.text()
    assert not mark.exists() and not launch.text().startswith("Traceback")
    assert launch.seconds < slack(10)


def test_a_run_that_is_asked_to_end_while_it_connects_ends_at_once(site: Site):
    """SL-08, P8: one host does not answer, and Ctrl-C does not wait for it."""
    import signal
    import time

    site.lab.freeze(WORKER2)
    launch = site.run(SERVE + FOREVER)
    time.sleep(2.0)  # the others are connected: nothing tells of that, and it matters little
    launch.signal(signal.SIGINT)
    asked = time.monotonic()
    site.broken.add(WORKER2)
    assert launch.wait(20) in (130, 1)
    assert time.monotonic() - asked < slack(4)


def test_the_pid_of_a_task_is_that_of_its_machine(site: Site):
    launch = site.run(SERVE + STEPS + "say(os.getpid())")
    assert launch.wait() == 0
    assert int(launch.log("worker/1")) == launch.events(Spawned, task="worker/1")[0].pid


# --- why ssh does not let us in


def in_words(launch: Launch, *words: str) -> None:
    """It ended soon, by itself, with these words and the host, and started nothing."""
    assert launch.wait() == 1 and launch.seconds < slack(10.0)
    text = " ".join(launch.text().split())
    assert all(word in text for word in ("worker1", *words)), launch.text()
    nothing_started(launch)


@pytest.mark.parametrize("check", [False, True])
def test_each_way_of_not_being_let_in_is_told_apart(site: Site, check: bool):
    """SL-05, SL-06, X10: in batch mode, so nothing asks; a changed key is shown and nothing is run."""
    lab = site.lab
    known, config = lab.known_hosts.read_text(), lab.ssh_config.read_text()
    try:
        lab.known_hosts.write_text("".join(row + "\n" for row in known.splitlines() if WORKER1 not in row))
        in_words(site.run(SERVE + STEPS, check=check), "its host key has never been confirmed")
        stranger = known.splitlines()[1].split(" ", 1)[1]
        rows = [row if WORKER1 not in row else f"{row.split(' ', 1)[0]} {stranger}" for row in known.splitlines()]
        lab.known_hosts.write_text("\n".join(rows) + "\n")
        in_words(site.run(SERVE + STEPS, check=check), "its host key is not the one that is known", "SHA256:")
        lab.known_hosts.write_text(known)
        lab.sshd(WORKER1, PubkeyAuthentication="no", PasswordAuthentication="yes")
        in_words(site.run(SERVE + STEPS, check=check), "does not let us in without a password", "Permission denied")
        lab.sshd(WORKER1, PubkeyAuthentication="yes", PasswordAuthentication="no")
        lab.ssh_config.write_text(f"Host {WORKER1}\n  HostName nowhere.example.com\n" + config)
        in_words(site.run(SERVE + STEPS, check=check), "its name is not known here", "nowhere.example.com")
        lab.ssh_config.write_text(f"Host {WORKER1}\n  Port 2299\n" + config)
        in_words(site.run(SERVE + STEPS, check=check), "nothing listens at its ssh port")
        lab.ssh_config.write_text(f"Host {WORKER1}\n  NoSuchOption yes\n" + config)
        in_words(site.run(SERVE + STEPS, check=check), "nosuchoption", "line 2")
        lab.ssh_config.write_text(f"Host {WORKER1}\n  IdentityFile {lab.folder}/open\n" + config)
        (lab.folder / "open").write_bytes(lab.key.read_bytes())
        (lab.folder / "open").chmod(0o644)
        lab.key.rename(lab.folder / "aside")
        in_words(site.run(SERVE + STEPS, check=check), "private key that others can read", "0644")
    finally:
        if (lab.folder / "aside").exists():
            (lab.folder / "aside").rename(lab.key)
        lab.known_hosts.write_text(known)
        lab.ssh_config.write_text(config)
        lab.sshd(WORKER1, PubkeyAuthentication="yes", PasswordAuthentication="no")


def test_new_keys_are_taken_where_the_file_says_so_and_changed_ones_never(site: Site):
    """X10: accept-new."""
    lab, known, config = site.lab, site.lab.known_hosts.read_text(), site.lab.ssh_config.read_text()
    lab.ssh_config.write_text(config.replace("StrictHostKeyChecking yes", "CheckHostIP no"))
    try:
        lab.known_hosts.write_text("")
        site.cluster(accept_new_keys=True)
        assert site.run(SERVE + STEPS).wait() == 0
        assert {row.split()[0] for row in lab.known_hosts.read_text().splitlines()} == set(SEED)
        rows = [f"{row.split(' ', 1)[0]} {known.splitlines()[1].split(' ', 1)[1]}" for row in known.splitlines()]
        lab.known_hosts.write_text("\n".join(rows) + "\n")
        in_words(site.run(SERVE + STEPS), "its host key is not the one that is known")
    finally:
        lab.known_hosts.write_text(known)
        lab.ssh_config.write_text(config)


# --- ports, proxies, names and folders of the hosts


def test_a_port_that_is_taken_is_gone_round_where_the_file_names_none(site: Site):
    """N8, NW-10: held by a stranger on one of two hosts."""
    code = "import socket; s = socket.create_server(('', 20000)); print(flush=True); s.accept()"
    stranger = site.lab.popen_in(WORKER0, ["/usr/bin/python3", "-c", code])
    try:
        assert stranger.stdout is not None and stranger.stdout.readline() == b"\n"
        site.cluster(run={"ps": 1, "workers": 2}, hosts={WORKER0: {}, WORKER1: {}})
        for check in (True, False):
            launch = site.run(SERVE + STEPS, check=check)
            assert launch.process.wait(60) == 0, launch.text()
            assert 20000 not in {t.port for t in launch.run().plan().tasks.values() if t.host == "worker0"}
    finally:
        stranger.kill()
        stranger.communicate()
    site.clean(slack(2.0))


def test_four_runs_at_once_on_one_host_do_not_meet(site: Site):
    """NW-10: each has its own ports; who answers is of one's own run."""
    site.cluster(run={"ps": 1, "workers": 2, "done": "all-workers"}, hosts={WORKER0: {}})
    peer = "ask = socket.create_connection(told['ps'][0].rsplit(':', 1)); got = ask.makefile().readline().strip()\n"
    serve = PRELUDE + (
        "if role == 'ps':\n    server = listen()\n"
        "    while True: server.accept()[0].sendall(os.environ['MUSTER_RUN'].encode() + b'\\n')\n"
        "server = listen()\nmuster.ready()\n" + peer + "assert got == os.environ['MUSTER_RUN'], got\n"
    )
    launches = [site.run(serve) for _ in range(4)]
    assert [launch.process.wait(60) for launch in launches] == [0] * 4, [launch.text() for launch in launches]
    assert all(set(launch.attempts().values()) == {1} for launch in launches)
    site.clean(slack(2.0))


def test_a_proxy_on_a_host_is_kept_from_the_cluster_and_said(site: Site):
    """NW-05, NW-06: exact names, in the environment of the tasks there."""
    site.lab.environ(WORKER1, http_proxy="http://127.0.0.1:9", no_proxy="corp.example.com")
    try:
        launch = site.run(SERVE + "say(os.environ.get('no_proxy', ''))\n" + STEPS, check=True)
        assert launch.wait() == 0, launch.text()
    finally:
        site.lab._machines[WORKER1].environ.clear()
        site.lab.sshd(WORKER1)
    assert {"corp.example.com", *SEED} <= set(launch.log("worker/1").strip().split(","))
    assert launch.log("worker/0").strip() == "" and "http_proxy is set on worker1" in launch.text()


@pytest.mark.parametrize("fault", ["one way", "loopback name", "no name", "not shared", "no folder"])
def test_what_would_hang_later_is_refused_before_anything_starts(site: Site, fault: str):
    """NW-01, N4, NW-07, NW-08, FR-14: naming hosts, peer and port, and the folder."""
    lab, places = site.lab, {"not shared": str(site.lab.home / "ck"), "no folder": "/nowhere/ck"}
    site.cluster(run={"checkpoints": places.get(fault, "")})
    before = {host: (lab._machines[host].folder / "hosts").read_text() for host in SEED}
    for host in SEED:
        (lab.private(host) / "ck").mkdir(exist_ok=True)
    if fault == "one way":
        lab.cut(WORKER1, PS0)
    elif fault == "loopback name":
        lab.set_name(WORKER1, WORKER1, "127.0.1.1")
    elif fault == "no name":
        lab.set_name(WORKER1, PS0, None)
    launch = site.run(SERVE + STEPS, check=True)
    assert launch.wait() == 1 and launch.seconds < slack(15.0)
    for host, text in before.items():
        (lab._machines[host].folder / "hosts").write_text(text)
    said = {
        "one way": ("nothing that worker1 sends reaches ps0", "port 2222 (ps/0) timed out"),
        "loopback name": ("worker1", "127.0.1.1", "/etc/hosts"),
        "no name": ("worker1", "does not know the name ps0.example.com"),
        "not shared": ("the checkpoint folder is not shared", str(lab.home / "ck"), "ps1", "worker2"),
        "no folder": ("/nowhere/ck", "ps0", "ps1", "worker0", "worker1", "worker2"),
    }
    text = " ".join(launch.text().split())
    assert all(word in text for word in said[fault]), launch.text()
    nothing_started(launch)


def test_a_shared_checkpoint_folder_is_taken(site: Site):
    """FR-14: written by one, seen by all, and clean afterwards."""
    site.cluster(run={"checkpoints": str(site.lab.shared)})
    launch = site.run(SERVE + STEPS, check=True)
    assert launch.wait() == 0, launch.text()
    assert list(site.lab.shared.iterdir()) == []
