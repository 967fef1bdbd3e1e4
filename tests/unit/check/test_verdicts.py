"""From recorded facts to rows. The healthy cluster gives none; each test spoils one thing and reads what is said of
it."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from muster.check.findings import Finding, Job, Limit, Wanted, odd, usual
from muster.check.fitness import offset
from muster.check.verdicts import judge
from muster.check.view import listed, numbers

GIB = 1 << 30
TENSORFLOW = Job(engine="tensorflow")
HOSTS = ("gpu-a", "gpu-b", "gpu-c")
DEVICE = {
    "index": 0,
    "name": "NVIDIA H100",
    "uuid": "GPU-0",
    "total": 80 * GIB,
    "used": 0,
    "capability": "9.0",
    "users": [],
}

WANTED = tuple(
    Wanted(
        host,
        f"{host}.example.com",
        "/opt/venv/bin/python",
        cwd="/home/ml",
        script="train.py",
        checkpoints="/shared",
        ports={task: 2222},
        gpus=(0,) if task != "ps/0" else (),
        tasks=(task,),
    )
    for host, task in zip(HOSTS, ("ps/0", "worker/0", "worker/1"), strict=True)
)


def healthy(host: str) -> dict[str, Any]:
    place = {"path": "/shared", "exists": True, "writable": True, "free": 500 * GIB, "mount": "nas:/lab (nfs4)"}
    return {
        "python": {"version": "3.11.7", "executable": "/opt/venv/bin/python", "implementation": "CPython"},
        "packages": {
            "tensorflow": "2.21.0",
            "keras": "3.15.1",
            "numpy": "2.4.6",
            "protobuf": "7.36.2",
            "tf_keras": "2.21.0",
        },
        "build": {
            "is_cuda_build": True,
            "cuda_version": "12.5.1",
            "cudnn_version": "9",
            "cuda_compute_capabilities": ["sm_60", "sm_70", "sm_80", "sm_89", "compute_90"],
        },
        "libraries": {"libcudart.so.12": "/x/libcudart.so.12", "libcudnn.so.9": "/x/libcudnn.so.9"},
        "gpus": {"source": "nvml", "driver": "580.95.05", "cuda": "13.0", "devices": [copy.deepcopy(DEVICE)]},
        "clock": {"now": 1000.5},
        "asked": [1000.0, 1001.0],
        "machine": {"system": "Linux", "machine": "x86_64", "libc": "glibc 2.36", "kernel": "6.1", "cores": 64},
        "environment": {},
        "limits": {"files": 1024, "files_most": 1 << 20},
        "names": {
            "own": f"{host}.example.com",
            "found": {f"{h}.example.com": [f"10.0.0.{11 + index}"] for index, h in enumerate(HOSTS)},
        },
        "ports": {"2222": {"free": True, "error": "", "holder": None, "ephemeral": False}},
        "script": {"path": "/home/ml/train.py", "exists": True},
        "cwd": {**place, "path": "/home/ml", "mount": "/dev/sda1 (ext4)"},
        "checkpoints": place,
        "nonce": {"write": "", "read": dict.fromkeys(HOSTS, "")},
    }


def spoiled(spoil: Callable[[dict[str, Any]], object], host: str = "gpu-b", job: Job = TENSORFLOW) -> list[Finding]:
    """The rows of a healthy cluster after ``spoil`` changed the facts of ``host``."""
    facts = {h: healthy(h) for h in HOSTS}
    spoil(facts[host])
    return judge(WANTED, facts, None, job)


def one(findings: list[Finding], kind: str, severity: str = "error", host: str = "gpu-b") -> Finding:
    assert [(f.kind, f.severity, f.host) for f in findings] == [(kind, severity, host)], findings
    assert findings[0].what and findings[0].because and findings[0].try_
    return findings[0]


@pytest.mark.parametrize("job", [Job(), TENSORFLOW])
def test_a_healthy_cluster_gives_no_row(job: Job) -> None:
    assert spoiled(lambda facts: None, job=job) == []


def test_a_host_that_cannot_be_reached_is_one_error_and_the_rest_of_it_unknown() -> None:
    facts: dict[str, Any] = {h: healthy(h) for h in HOSTS}
    facts["gpu-b"] = {
        "failure": {"returncode": 255, "stderr": "ssh: connect to host gpu-b port 22: Connection refused\n"}
    }
    error, unknown = judge(WANTED, facts)
    assert (error.severity, error.host, error.kind) == ("error", "gpu-b", "ssh refused")
    assert (unknown.severity, unknown.host) == ("unknown", "gpu-b")
    del facts["gpu-b"]
    assert [f.severity for f in judge(WANTED, facts)] == ["unknown"]


# --- versions


def wrong_python(version: str) -> Callable[[dict[str, Any]], None]:
    def spoil(facts: dict[str, Any]) -> None:
        facts["python"] = {"version": version, "executable": "/usr/bin/python3"}
        facts["packages"] = {}
        facts["build"] = {}

    return spoil


def test_another_python_is_one_row_and_not_one_per_missing_package() -> None:
    finding = one(spoiled(wrong_python("3.12.1")), "python")
    assert "/usr/bin/python3 is 3.12.1 without TensorFlow" in finding.because
    assert "gpu-a and gpu-c: 3.11.7 with tensorflow 2.21.0" in finding.because
    assert "/opt/venv/bin/python" in finding.try_
    one(
        spoiled(lambda facts: (wrong_python("3.12.1")(facts), facts.update(packages={"tensorflow": "2.16.1"}))),
        "python",
    )


def test_a_python_that_is_too_old_answers_little_and_still_gives_its_row() -> None:
    def spoil(facts: dict[str, Any]) -> None:
        facts.clear()
        facts.update({"python": {"version": "2.7.18", "executable": "/usr/bin/python"}, "too_old": True})

    finding = one(spoiled(spoil), "python")
    assert "too old" in finding.what and "2.7.18" in finding.because


def test_all_pythons_too_old_are_not_excused_by_being_alike() -> None:
    facts = {h: healthy(h) for h in HOSTS}
    for told in facts.values():
        told["python"]["version"] = "3.9.2"
    assert {f.host for f in judge(WANTED, facts)} == set(HOSTS)


def test_other_tensorflow() -> None:
    finding = one(spoiled(lambda facts: facts["packages"].update(tensorflow="2.16.1", keras="3.3.0")), "tensorflow")
    assert "2.16.1" in finding.what and "2.21.0" in finding.what
    assert finding.try_ == "/opt/venv/bin/python -m pip install tensorflow==2.21.0"


def test_of_two_hosts_the_chief_is_the_reference() -> None:
    facts = {h: healthy(h) for h in HOSTS[1:]}
    facts["gpu-b"]["packages"]["tensorflow"] = "2.16.1"
    nonce = {"write": "", "read": {"gpu-b": "", "gpu-c": ""}}
    for told in facts.values():
        told["nonce"] = nonce
        del told["names"]
    assert [(f.host, f.kind) for f in judge(WANTED[1:], facts)] == [("gpu-c", "tensorflow")]


def test_no_tensorflow_matters_only_where_something_trains() -> None:
    def spoil(facts: dict[str, Any]) -> None:
        del facts["packages"]["tensorflow"]
        del facts["packages"]["keras"]
        facts["build"] = {}

    assert "pip install tensorflow==2.21.0" in one(spoiled(spoil), "tensorflow").try_
    assert spoiled(spoil, "gpu-a", Job()) == []
    one(spoiled(spoil, "gpu-a", TENSORFLOW), "tensorflow", host="gpu-a")
    one(spoiled(lambda facts: facts.update(packages={}, build={})), "tensorflow")
    one(spoiled(lambda facts: facts.update(packages={"late": True}, build={})), "late packages", "unknown")


def test_a_ps_of_ours_needs_numpy() -> None:
    one(spoiled(lambda facts: facts["packages"].pop("numpy"), "gpu-a", Job()), "numpy", host="gpu-a")
    one(spoiled(lambda facts: facts.update(packages={}, build={}), "gpu-a", Job()), "numpy", host="gpu-a")


@pytest.mark.parametrize(
    ("package", "version", "severity"),
    [("keras", "2.15.0", "error"), ("numpy", "1.26.4", "warning"), ("protobuf", "6.1.0", "warning")],
)
def test_packages_that_must_agree(package: str, version: str, severity: str) -> None:
    """EN-01, EN-06: one row, with both versions and the command."""
    finding = one(spoiled(lambda facts: facts["packages"].update({package: version})), package, severity)
    assert version in finding.what and healthy("gpu-a")["packages"][package] in finding.what
    assert f"/opt/venv/bin/python -m pip install {package}==" in finding.try_
    assert spoiled(lambda facts: facts["packages"].update(numpy="2.3.0")) == []


def test_grpcio_that_only_some_hosts_have() -> None:
    """EN-06."""
    finding = one(spoiled(lambda facts: facts["packages"].update(grpcio="1.62.0")), "grpcio", "warning")
    assert finding.try_ == "/opt/venv/bin/python -m pip uninstall grpcio"
    facts = {h: healthy(h) for h in HOSTS}
    for host, told in facts.items():
        told["packages"]["grpcio"] = "1.62.0" if host == "gpu-b" else "1.76.1"
    found = judge(WANTED, facts, None, TENSORFLOW)
    assert one(found, "grpcio", "warning").what == "grpcio 1.62.0, the others have 1.76.1"
    facts["gpu-b"]["packages"]["grpcio"] = "1.76.0"
    assert judge(WANTED, facts, None, TENSORFLOW) == []


ALIKE = tuple(replace(w, gpus=(0,)) for w in WANTED)  # as collectives want it
PSS, MWMS = Job(engine="tensorflow", kind="pss"), Job(engine="tensorflow", kind="mwms")


@pytest.mark.parametrize("job", [PSS, MWMS])
def test_keras_3_cannot_fit_with_these_kinds(job: Job) -> None:
    """EN-07: an error where the script is seen to do it, else a hint; with the variable and the package; one row."""

    def rows(**script: Any) -> list[Finding]:
        facts = {h: healthy(h) for h in HOSTS}
        for told in facts.values():
            told["script"].update(script)
            del told["packages"]["tf_keras"]
        return judge(ALIKE, facts, None, job)

    error = one(rows(fit=12), "legacy keras", host="gpu-a")
    assert "/home/ml/train.py, line 12 calls fit" in error.because and "so on gpu-b and gpu-c" in error.because
    assert "pip install tf_keras==2.21.*" in error.try_ and "TF_USE_LEGACY_KERAS" in error.try_
    assert "a loop of your own works" in one(rows(fit=0), "legacy keras", "warning", "gpu-a").because
    lacking = one(rows(fit=12, legacy=True), "legacy keras", host="gpu-a")
    assert "has no tf_keras" in lacking.because and "set env" not in lacking.try_


def test_keras_2_asked_for_by_the_script_or_the_environment_is_well() -> None:
    """EN-07."""
    facts = {h: healthy(h) for h in HOSTS}
    for told in facts.values():
        told["script"]["fit"] = 12
    assert "TF_USE_LEGACY_KERAS" in one(judge(WANTED, facts, None, PSS), "legacy keras", host="gpu-a").try_
    facts["gpu-a"]["script"]["legacy"] = True
    facts["gpu-b"]["environment"]["TF_USE_LEGACY_KERAS"] = "1"
    facts["gpu-c"]["packages"].update(keras="2.15.0")
    assert [f.kind for f in judge(WANTED, facts, None, PSS)] == ["keras"]
    assert [f.kind for f in judge(WANTED, {h: healthy(h) for h in HOSTS}, None, TENSORFLOW)] == []


@pytest.mark.parametrize(
    ("job", "version", "needs"),
    [(PSS, "2.1.0", "2.4+"), (PSS, "2.3.4", "2.4+"), (MWMS, "2.3.0", "2.4+"), (TENSORFLOW, "1.12.0", "1.13+"),
     (PSS, "2.4.0", ""), (TENSORFLOW, "2.1.0", ""), (Job(), "2.1.0", "")],
)  # fmt: skip
def test_a_tensorflow_that_is_too_old_for_the_kind(job: Job, version: str, needs: str) -> None:
    """EN-08: also where it is the same on all hosts, and once where it is not."""
    facts = {h: healthy(h) for h in HOSTS}
    for told in facts.values():
        told["packages"].update(tensorflow=version, keras="2.2.4")
    found = judge(ALIKE, facts, None, job)
    assert [(f.kind, f.host) for f in found] == ([("kind", h) for h in HOSTS] if needs else [])
    assert all(f"needs {needs}" in f.what and version in f.what and "pip install" in f.try_ for f in found)
    if needs:
        mixed = {**{h: healthy(h) for h in HOSTS}, "gpu-b": facts["gpu-b"]}
        assert [f.host for f in judge(ALIKE, mixed, None, job) if f.severity == "error"] == ["gpu-b"]


# --- GPUs


def test_planned_gpus_that_are_not_there() -> None:
    def none(facts: dict[str, Any]) -> None:
        facts["gpus"] = {"source": "none", "error": "no NVIDIA driver", "devices": []}

    assert one(spoiled(none), "gpus").because == "no NVIDIA driver"
    assert spoiled(none, "gpu-a") == [], "a ps needs none"

    def mismatch(facts: dict[str, Any]) -> None:
        facts["gpus"] = {"source": "nvml", "error": "driver/library version mismatch", "devices": []}

    assert "restart" in one(spoiled(mismatch), "gpus").try_
    one(spoiled(lambda facts: facts["gpus"]["devices"][0].update(index=1)), "gpus")
    one(spoiled(lambda facts: facts["gpus"]["devices"].__setitem__(0, {"index": 0, "error": "GPU is lost"})), "gpus")


def test_a_gpu_in_use_names_its_user() -> None:
    user = {"pid": 77, "user": "ana", "command": "python other.py"}
    finding = one(
        spoiled(lambda facts: facts["gpus"]["devices"][0].update(used=60 * GIB, users=[user])), "gpu busy", "warning"
    )
    assert "60.0 of 80 GiB used by ana (pid 77, python other.py)" in finding.because


def test_cuda_of_the_wheel_against_the_driver_and_the_libraries() -> None:
    assert (
        "CUDA 12.5.1"
        in one(spoiled(lambda facts: facts["gpus"].update(cuda="11.8", driver="520.61")), "driver").because
    )
    assert spoiled(lambda facts: facts["gpus"].update(cuda="12.2")) == [], "minor versions of one major fit"
    missing = one(spoiled(lambda facts: facts["libraries"].update({"libcudnn.so.9": None})), "cuda")
    assert "libcudnn.so.9" in missing.because
    cpu = one(spoiled(lambda facts: facts.update(build={"is_cuda_build": False})), "cuda")
    assert "without CUDA" in cpu.because
    newer = one(spoiled(lambda facts: facts["gpus"]["devices"][0].update(capability="12.0")), "capability", "warning")
    assert "sm_120" in newer.because and "sm_90" in newer.because


def test_collectives_want_the_same_number_of_gpus() -> None:
    facts = {h: healthy(h) for h in HOSTS}
    for told in facts.values():
        told["environment"]["TF_USE_LEGACY_KERAS"] = "1"
    wanted = [replace(w, gpus=(0,), tasks=(f"worker/{i}",), ports={f"worker/{i}": 2222}) for i, w in enumerate(WANTED)]
    wanted[2] = replace(wanted[2], gpus=())
    found = judge(wanted, facts, None, Job(engine="tensorflow", kind="mwms"))
    assert "gpus_per_worker = 0" in one(found, "gpu count", host="gpu-c").try_


# --- the machine


@pytest.mark.parametrize(("ahead", "severity"), [(300, "error"), (-300, "error"), (10, "warning")])
def test_a_wrong_clock(ahead: float, severity: str) -> None:
    finding = one(spoiled(lambda facts: facts.update(clock={"now": 1000.5 + ahead})), "clock", severity)
    assert ("ahead" if ahead > 0 else "behind") in finding.because


def test_when_all_hosts_differ_from_us_it_is_our_clock() -> None:
    facts = {h: healthy(h) for h in HOSTS}
    for told in facts.values():
        told["clock"]["now"] += 300
    one(judge(WANTED, facts), "clock", host="this machine")


def test_offset_is_what_is_sure() -> None:
    assert offset(10.5, 10.0, 11.0) == 0.0
    assert offset(9.0, 10.0, 11.0) == -1.0
    assert offset(14.0, 10.0, 11.0) == 3.0


def proxied(**environment: str) -> list[Finding]:
    return spoiled(lambda facts: facts.update(environment=environment))


def test_proxies_as_grpc_reads_them() -> None:
    finding = one(proxied(http_proxy="http://me:secret@proxy:3128"), "proxy")
    assert "secret" not in finding.because
    assert 'no_proxy = "gpu-a.example.com,gpu-b.example.com,gpu-c.example.com"' in finding.try_
    assert proxied(http_proxy="p", no_proxy="gpu-a.example.com,gpu-b.example.com,gpu-c.example.com") == []
    assert proxied(http_proxy="p", no_proxy=".example.com") == []
    assert proxied(HTTP_PROXY="p") == [], "upper case has no effect"
    assert "takes no patterns" in one(proxied(https_proxy="p", no_proxy="*.example.com"), "proxy").because
    assert "NO_PROXY is not read" in one(proxied(grpc_proxy="p", NO_PROXY=".example.com"), "proxy").because
    assert one(spoiled(lambda facts: facts.update(environment={"http_proxy": "p"}), job=Job()), "proxy", "warning")


def test_no_proxy_by_network_covers_plain_addresses_only() -> None:
    facts = {h: healthy(h) for h in HOSTS}
    facts["gpu-b"]["environment"] = {"http_proxy": "p", "no_proxy": "10.0.0.0/24"}
    assert {f.kind for f in judge(WANTED, facts, None, TENSORFLOW)} == {"proxy"}
    plain = [replace(w, address=f"10.0.0.{11 + index}") for index, w in enumerate(WANTED)]
    assert judge(plain, facts, None, TENSORFLOW) == []


def test_few_open_files_and_another_architecture() -> None:
    one(spoiled(lambda facts: facts["limits"].update(files=256)), "files", "warning")
    arm = one(spoiled(lambda facts: facts["machine"].update(machine="aarch64")), "machine", "warning")  # EN-09
    assert "Linux aarch64 glibc here, Linux x86_64 glibc on the others" in arm.because
    one(spoiled(lambda facts: facts["machine"].update(libc="")), "machine", "warning")
    assert spoiled(lambda facts: facts["machine"].update(libc="glibc 2.31", kernel="5.4")) == []


# --- ports


def held(holder: dict[str, Any], error: str = "EADDRINUSE") -> Callable[[dict[str, Any]], None]:
    return lambda facts: facts["ports"].update({"2222": {"free": False, "error": error, "holder": holder}})


@pytest.mark.parametrize(
    ("holder", "try_"),
    [
        ({"pid": 7, "user": "ml", "command": "python -m muster.ps", "run": "r7", "task": "ps/0"}, "muster stop r7"),
        ({"pid": 7, "user": "ml", "command": "nc -l 2222", "run": "", "task": ""}, "ssh gpu-b kill 7"),
        ({"pid": 0, "user": "ana", "command": ""}, "ask ana"),
    ],
)
def test_a_port_that_is_taken_names_its_holder(holder: dict[str, Any], try_: str) -> None:
    finding = one(spoiled(held(holder)), "port")
    assert "port 2222 of worker/0" in finding.what and try_ in finding.try_


def test_an_address_that_the_host_does_not_have_and_a_port_of_roots() -> None:
    assert "gpu-b.example.com" in one(spoiled(held({}, "EADDRNOTAVAIL")), "address").because
    one(spoiled(held({}, "EACCES")), "port")


def test_a_port_that_outgoing_connections_may_take() -> None:
    one(spoiled(lambda facts: facts["ports"]["2222"].update(ephemeral=True)), "ephemeral port", "warning")


# --- files


def test_script_and_folders() -> None:
    one(spoiled(lambda facts: facts.update(script={"path": "/home/ml/train.py", "exists": False})), "script")
    syntax = {"path": "/home/ml/train.py", "exists": True, "syntax": "invalid syntax", "line": 12}
    assert "/home/ml/train.py, line 12" in one(spoiled(lambda facts: facts.update(script=syntax)), "script").because
    one(spoiled(lambda facts: facts.update(cwd={"path": "/home/ml", "exists": False})), "cwd")
    one(spoiled(lambda facts: facts.update(script={"path": "/x/a.sh", "exists": True, "closed": True})), "script")
    one(spoiled(lambda facts: facts["cwd"].update(free=GIB)), "disk", "warning")
    one(spoiled(lambda facts: facts["checkpoints"].update(free=GIB // 100)), "disk", "error")
    one(spoiled(lambda facts: facts["checkpoints"].update(writable=False)), "checkpoints")


def test_a_folder_that_is_not_shared() -> None:
    facts = {h: healthy(h) for h in HOSTS}
    gone = "No such file or directory"
    for host, told in facts.items():
        told["nonce"]["read"] = {h: "" if (h == "gpu-b") == (host == "gpu-b") else gone for h in HOSTS}
    facts["gpu-b"]["checkpoints"]["mount"] = "/dev/sda1 (ext4)"
    finding = one(judge(WANTED, facts), "not shared")
    assert "written by gpu-a and gpu-c is not seen there" in finding.because
    assert "theirs on nas:/lab (nfs4)" in finding.because


def test_a_folder_where_we_may_not_write() -> None:
    facts = {h: healthy(h) for h in HOSTS}
    for told in facts.values():
        told["nonce"]["read"] = {"gpu-a": "", "gpu-b": "No such file or directory", "gpu-c": ""}
    facts["gpu-b"]["nonce"]["write"] = "Permission denied"
    one(judge(WANTED, facts), "checkpoints")


# --- names


def test_names_that_do_not_resolve_alike() -> None:
    def means(name: str, answer: Any) -> Callable[[dict[str, Any]], None]:
        return lambda facts: facts["names"]["found"].update({name: answer})

    own = one(spoiled(means("gpu-b.example.com", ["127.0.1.1"])), "loopback name")
    assert "127.0.1.1" in own.because and "10.0.0.12 gpu-b.example.com" in own.try_ and "its own name" in own.what
    one(spoiled(means("gpu-a.example.com", ["10.0.0.99"])), "name")
    one(spoiled(means("gpu-a.example.com", "Name or service not known")), "name")
    one(spoiled(means("gpu-a.example.com", {"late": True})), "late names", "unknown")


def test_a_loopback_address_is_never_what_a_name_should_mean() -> None:
    facts = {h: healthy(h) for h in HOSTS[:2]}
    for told in facts.values():
        told["nonce"]["read"] = dict.fromkeys(HOSTS[:2], "")
    facts["gpu-b"]["names"]["found"]["gpu-b.example.com"] = ["127.0.1.1"]  # of the chief, and one against one
    assert "10.0.0.12 gpu-b.example.com" in one(judge(WANTED[:2], facts), "loopback name").try_


def test_own_name_at_a_loopback_address_matters_to_scripts_that_ask_for_it() -> None:
    def spoil(facts: dict[str, Any]) -> None:
        facts["names"]["own"] = "gpu-b"
        facts["names"]["found"]["gpu-b"] = ["127.0.1.1"]

    one(spoiled(spoil), "loopback name", "warning")
    assert spoiled(spoil, job=Job()) == []


def test_what_hangs_is_unknown_and_says_what_to_look_at() -> None:
    finding = one(spoiled(lambda facts: facts.update(checkpoints={"late": True})), "late checkpoints", "unknown")
    assert "file server" in finding.because
    one(spoiled(lambda facts: facts.update(gpus={"broken": "OSError: x"})), "broken gpus", "unknown")


# --- small words


def test_usual_and_odd() -> None:
    assert usual({"a": 1, "b": 2, "c": 2}, "a") == 2
    assert usual({"a": 1, "b": 2}, "b") == 2
    assert usual({}, "a") is None
    assert list(odd({"a": 1, "b": 2, "c": 2}, "a")) == [("a", 1)]


def test_numbers_and_lists() -> None:
    assert numbers("2.21.0rc1") == (2, 21, 0)
    assert numbers("") == ()
    assert listed(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"


def test_limits_count_both_ways() -> None:
    assert Limit(2, 5).severity(5) == "error"
    assert Limit(2, 5).severity(1.9) is None
    assert Limit(200, 5, below=True).severity(100) == "warning"
    assert Limit(200, 5, below=True).severity(None) is None
