"""Rules about hosts: is each fit for what the plan puts on it, and do they agree with one another?

A rule tells the first cause only; what could not be asked is "unknown", never "fine" and never "wrong". What is
installed has a file of its own, ``versions``.
"""

import ipaddress
import re
from collections.abc import Iterator, Mapping
from typing import Any

from muster.check import versions
from muster.check.bridge import not_its_own
from muster.check.findings import (
    LIMITS,
    Finding,
    Wanted,
    dialled,
    is_address,
    is_loopback,
    odd,
    usual,
)
from muster.check.unreachable import Failure, ssh_verdict
from muster.check.view import Rule, View, listed, numbers

GIB = 1 << 30


def reachable(view: View) -> Iterator[Finding]:
    for w in view.wanted:
        told = view.facts.get(w.host)
        if told is None:
            yield _unasked(w.host, "nobody asked it")
        elif "failure" in told:
            failure: Mapping[str, Any] = told["failure"]
            verdict = ssh_verdict(
                failure.get("stderr", ""), failure.get("returncode"), failure.get("destination") or w.host
            )
            yield _with_path(verdict, w).finding(w.host)
            yield _unasked(w.host, verdict.what)


def _with_path(verdict: Failure, w: Wanted) -> Failure:
    if verdict.kind != "no python":
        return verdict
    return Failure(verdict.kind, f"its Python does not start: {w.python}", verdict.because, verdict.try_)


def _unasked(host: str, why: str) -> Finding:
    return Finding(
        "unknown",
        host,
        "its versions, GPUs, ports, folders and links",
        f"not asked: {why}",
        "correct that first, then check again",
        kind="not asked",
    )


def late(view: View) -> Iterator[Finding]:
    """Sections that hung or broke on the host."""
    for host in view.answered:
        for name, told in view.facts[host].items():
            if isinstance(told, dict) and told.get("late"):
                yield Finding("unknown", host, f"its {name}", *LATE.get(name, _LATE), kind=f"late {name}")
            elif isinstance(told, dict) and told.get("broken"):
                yield Finding("unknown", host, f"its {name}", told["broken"], "report this", kind=f"broken {name}")


_LATE = ("no answer in time", "is the host overloaded? check again")
_STUCK = ("no answer in time: a file server that hangs?", "run df and ls on that host; mount the folder again")
LATE = {
    "names": ("no answer in time from its name service", "correct /etc/resolv.conf on that host, or use addresses"),
    "cwd": _STUCK,
    "checkpoints": _STUCK,
    "script": _STUCK,
    "gpus": ("no answer in time from the driver", "run nvidia-smi on that host; a GPU that hangs needs a restart"),
}


# --- GPUs


def gpus(view: View) -> Iterator[Finding]:
    for host, told in view.section("gpus").items():
        planned = view.hosts[host].gpus
        if not planned:
            continue
        devices = {device["index"]: device for device in told.get("devices", [])}
        if not devices:
            because = told.get("error") or f"{told['source']} lists none"
            yield Finding(
                "error", host, f"{len(planned)} GPUs planned, none there", because, _driver_try(because), kind="gpus"
            )
            continue
        for index in planned:
            yield from _gpu(host, index, devices)
        yield from _cuda(view, host, [devices[index] for index in planned if index in devices])


def _driver_try(because: str) -> str:
    if "mismatch" in because:
        return "restart that host: its driver was updated under the running kernel"
    return "set gpus = 0 for it, or install the NVIDIA driver (nvidia-smi must list the GPUs)"


def _gpu(host: str, index: int, devices: Mapping[int, Mapping[str, Any]]) -> Iterator[Finding]:
    device = devices.get(index)
    if device is None:
        because = f"the driver lists {listed([str(i) for i in sorted(devices)])}"
        yield Finding("error", host, f"no GPU {index}", because, f"set gpus = {len(devices)} for {host}", kind="gpus")
    elif device.get("error"):
        try_ = f"take GPU {index} out of the plan or restart {host}"
        yield Finding("error", host, f"GPU {index} does not work", device["error"], try_, kind="gpus")
    else:
        share = device["used"] / device["total"] if device.get("total") else 0.0
        severity = LIMITS["gpu memory used"].severity(share)
        if severity:
            users = [f"{u['user']} (pid {u['pid']}, {u['command'][:60]})" for u in device.get("users", [])]
            because = (
                f"{device['used'] / GIB:.1f} of {device['total'] / GIB:.0f} GiB used by {listed(users) or 'somebody'}"
            )
            try_ = "wait for it, end it, or take this GPU out of the plan"
            yield Finding(severity, host, f"GPU {index} ({device['name']}) is in use", because, try_, kind="gpu busy")


def _cuda(view: View, host: str, devices: list[Mapping[str, Any]]) -> Iterator[Finding]:
    build = view.section("build", [host]).get(host, {})
    if not build or host in view.wrong_python:
        return
    if not build.get("is_cuda_build"):
        because = f"{view.tensorflow(host)} is built without CUDA"
        yield Finding(
            "error", host, "TensorFlow cannot use the GPUs", because, "pip install 'tensorflow[and-cuda]'", kind="cuda"
        )
        return
    wants, driver = str(build.get("cuda_version", "")), str(view.facts[host]["gpus"].get("cuda", ""))
    if driver and numbers(driver)[:1] < numbers(wants)[:1]:
        because = f"TensorFlow wants CUDA {wants}; driver {view.facts[host]['gpus'].get('driver')} can do {driver}"
        yield Finding(
            "error", host, "the NVIDIA driver is too old", because, "install a newer driver there", kind="driver"
        )
    missing = [name for name, place in (view.section("libraries", [host]).get(host) or {}).items() if not place]
    if missing:
        because = f"the loader does not find {listed(missing)}; TensorFlow would quietly use the CPU"
        try_ = "pip install 'tensorflow[and-cuda]', or add their folder to LD_LIBRARY_PATH in env for this host"
        yield Finding("error", host, "CUDA libraries are missing", because, try_, kind="cuda")
    newest = max((numbers(c.rpartition("_")[2]) for c in build.get("cuda_compute_capabilities", [])), default=())
    for device in devices:
        capability = str(device.get("capability", "")).replace(".", "")
        if newest and capability and (int(capability),) > newest:
            because = f"GPU {device['index']} is sm_{capability}; this TensorFlow is compiled up to sm_{newest[0]}"
            try_ = "be patient once, keep ~/.nv, or install a newer TensorFlow"
            yield Finding("warning", host, "the first start compiles for minutes", because, try_, kind="capability")
            return


def alike(view: View) -> Iterator[Finding]:
    """Collectives want the same GPUs everywhere; other engines only run at the pace of the slowest."""
    if view.job.engine == "tensorflow" and view.job.kind == "mwms":
        counts = {host: len(view.hosts[host].gpus) for host in view.training}
        for host, count in odd(counts, view.chief):
            because = f"{count} here, {usual(counts, view.chief)} on the others; collectives need the same number"
            try_ = f"gpus_per_worker = {min(counts.values())}"
            yield Finding("error", host, "another number of GPUs", because, try_, kind="gpu count")
    machines = {host: _platform(told) for host, told in view.section("machine").items()}
    for host, machine in odd(machines, view.chief):
        because = f"{machine} here, {usual(machines, view.chief)} on the others"
        yield Finding(
            "warning",
            host,
            "another kind of machine",
            because,
            "speed and rounding will differ; use like hosts",
            kind="machine",
        )


def _platform(told: Mapping[str, Any]) -> str:
    """System, architecture, and which C library it is: its version may differ, its kind decides which wheels fit."""
    return " ".join(filter(None, (told["system"], told["machine"], str(told.get("libc", "")).partition(" ")[0])))


# --- the machine


def clock(view: View) -> Iterator[Finding]:
    offsets = {
        host: offset(told["now"], *view.facts[host]["asked"])
        for host, told in view.section("clock").items()
        if view.facts[host].get("asked") and "now" in told
    }
    reference = _median([0.0, *offsets.values()])
    for host, value in [*offsets.items(), ("this machine", 0.0)]:
        off = value - reference
        severity = LIMITS["clock s"].severity(abs(off))
        if severity and (host in offsets or len(offsets) > 2):
            because = f"{_span(off)} {'ahead of' if off > 0 else 'behind'} the others"
            try_ = "timedatectl set-ntp true (or chronyc makestep) there"
            yield Finding(severity, host, "its clock is wrong", because, try_, kind="clock")


def offset(now: float, sent: float, received: float) -> float:
    """Seconds that a clock is surely ahead, if it said ``now`` at some moment between ``sent`` and ``received``."""
    return min(0.0, now - sent) + max(0.0, now - received)


def _median(values: list[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]


def _span(seconds: float) -> str:
    seconds = abs(seconds)
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} minutes"


PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")


def proxies(view: View) -> Iterator[Finding]:
    """TensorFlow's channels obey these (lower case only) even towards the next machine; no_proxy by exact name, by
    suffix, and by CIDR for plain addresses; not by pattern, and not in upper case."""
    addresses = [w.address for w in view.wanted]
    for host, told in view.section("environment").items():
        name = next((name for name in PROXIES if told.get(name)), "")
        allowed = told.get("no_grpc_proxy") or told.get("no_proxy") or ""
        caught = [address for address in addresses if not _excepted(address, allowed)]
        if not name or not caught:
            continue
        lack = "no_proxy does not name" if allowed else "no no_proxy for"
        because = f"{name}={_bare(told[name])}, and {lack} {listed(caught)}"
        because += "; upper-case NO_PROXY is not read" if told.get("NO_PROXY") and not allowed else ""
        because += "; it takes no patterns" if "*" in allowed else ""
        try_ = f'env = {{ no_proxy = "{",".join(addresses)}" }} for {host}, or unset {name} there'
        severe = view.job.engine == "tensorflow"
        what = (
            "a proxy would get the traffic between tasks"
            if severe
            else "a proxy is set (it stops TensorFlow's engine only)"
        )
        yield Finding("error" if severe else "warning", host, what, because, try_, kind="proxy")


def _excepted(address: str, allowed: str) -> bool:
    words = [word.strip() for word in allowed.split(",") if word.strip()]
    if is_address(address):
        return any(word == address or ("/" in word and _within(address, word)) for word in words)
    return any(address.lower().endswith(word.lower()) for word in words)


def _within(address: str, network: str) -> bool:
    try:
        return ipaddress.ip_address(address) in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False


def _bare(url: str) -> str:
    """A proxy's address without the password that some carry."""
    return re.sub(r"//[^/@]*@", "//...@", url)


def limits(view: View) -> Iterator[Finding]:
    for host, told in view.section("limits").items():
        severity = LIMITS["open files"].severity(told["files"]) if told["files"] >= 0 else None
        if severity:
            because = f"ulimit -n is {told['files']}"
            yield Finding(
                severity, host, "few open files allowed", because, "raise nofile in limits.conf there", kind="files"
            )


def ports(view: View) -> Iterator[Finding]:
    for host, told in view.section("ports").items():
        if any(entry.get("error") == "EADDRNOTAVAIL" for entry in told.values()) and (row := not_its_own(view, host)):
            yield row
            continue
        for task, _, port in view.hosts[host].listens():
            entry = told.get(str(port))
            if entry and not entry["free"]:
                yield _taken(view, host, task, port, entry)
            elif entry and entry.get("ephemeral"):
                because = "any outgoing connection may be given it between now and the start"
                try_ = 'ports = "20000-20999", or what lies below the first number of net.ipv4.ip_local_port_range'
                what = f"port {port} of {task} is free by luck"
                yield Finding("warning", host, what, because, try_, kind="ephemeral port")


def _taken(view: View, host: str, task: str, port: int, entry: Mapping[str, Any]) -> Finding:
    where = f"port {port} of {task}"
    if entry["error"] == "EADDRNOTAVAIL":
        because = f"no interface of that host has {view.hosts[host].bind or view.hosts[host].address}"
        try_ = 'set address to one that `ip addr` shows there; where something forwards to it: bind = "0.0.0.0"'
        return Finding("error", host, f"{where} cannot be opened at the plan's address", because, try_, kind="address")
    if entry["error"] == "EACCES":
        because, try_ = "ports below 1024 are root's", 'ports = "20000-20999"'
        return Finding("error", host, f"{where} may not be opened", because, try_, kind="port")
    holder = entry.get("holder") or {}
    pid, user, run = holder.get("pid", 0), holder.get("user", ""), holder.get("run", "")
    if run:
        because = f"{holder.get('task') or 'a task'} of run {run} has it (pid {pid})"
        try_ = f"muster stop {run}"
    elif pid:
        because = f"held by pid {pid} of {user}: {holder.get('command', '')[:100]}"
        try_ = f"end it (ssh {host} kill {pid}) or choose other ports"
    else:
        because = f"held by a process of {user or 'another user'}"
        try_ = f"ask {user or 'its owner'}, or choose other ports"
    return Finding("error", host, f"{where} is taken", because, try_, kind="port")


# --- files


def script(view: View) -> Iterator[Finding]:
    for host, told in view.section("script", view.training).items():
        if host in view.wrong_python:
            continue
        if not told.get("exists"):
            because, try_ = f"no file {told['path']}", f"copy it there, or set cwd for {host}"
            yield Finding("error", host, "the script is not there", because, try_, kind="script")
        elif told.get("unreadable"):
            yield Finding(
                "error",
                host,
                "the script cannot be read",
                told["unreadable"],
                f"chmod a+r {told['path']}",
                kind="script",
            )
        elif told.get("closed"):
            because, try_ = f"{told['path']} is neither a .py file nor executable", f"chmod +x {told['path']}"
            yield Finding("error", host, "the script cannot be started", because, try_, kind="script")
        elif told.get("syntax"):
            because = f"{told['path']}, line {told['line']}: {told['syntax']}"
            yield Finding("error", host, "the script has a syntax error", because, "correct that line", kind="script")


def folders(view: View) -> Iterator[Finding]:
    for name, said in (("cwd", "working folder"), ("checkpoints", "checkpoint folder")):
        for host, told in view.section(name).items():
            if not told["exists"]:
                try_ = f"mkdir -p {told['path']} there, mount it, or set {name}"
                yield Finding("error", host, f"no {said}", f"no folder {told['path']}", try_, kind=name)
            elif name == "checkpoints" and not told["writable"]:
                try_ = "chown or chmod it, or choose another folder"
                yield Finding(
                    "error", host, f"{said} is read-only for us", f"{told['path']} on {told['mount']}", try_, kind=name
                )
            elif severity := LIMITS["disk GiB"].severity(told["free"] / GIB):
                because = f"{told['free'] / GIB:.2f} GiB free at {told['path']} ({told['mount']})"
                yield Finding(severity, host, f"{said} is nearly full", because, "make room there", kind="disk")


def shared(view: View) -> Iterator[Finding]:
    """Who sees whose file? Hosts with the same answer share a folder; the usual group is right, the others are
    apart."""
    told = view.section("nonce")
    for host, marks in told.items():
        if marks.get("write"):
            because, try_ = f"writing a file: {marks['write']}", "give us the right to write there"
            yield Finding("error", host, "cannot write to the checkpoint folder", because, try_, kind="checkpoints")
    writers = [host for host, marks in told.items() if not marks.get("write")]
    sees = {
        host: tuple(w for w in writers if told[host]["read"].get(w) == "") for host in told if told[host].get("read")
    }
    whole = {host: group for host, group in sees.items() if host in writers}
    for host, group in odd(whole, view.chief):
        place = view.section("checkpoints").get(host, {})
        others = [other for other in writers if other != host and other not in group]
        theirs = view.section("checkpoints").get(others[0] if others else "", {}).get("mount", "")
        because = (
            f"a file written by {listed(others)} is not seen there; {place.get('path')} is on {place.get('mount')}"
        )
        because += f", theirs on {theirs}" if theirs and theirs != place.get("mount") else ""
        try_ = f"mount the folder that {listed(others)} have on {host}, or choose one that all share"
        yield Finding("error", host, "the checkpoint folder is not shared", because, try_, kind="not shared")


# --- names


def names(view: View) -> Iterator[Finding]:
    told = view.section("names")
    if len(view.wanted) > 1:
        for name in dialled(view.wanted):
            yield from _name(view, name, {host: t["found"][name] for host, t in told.items() if name in t["found"]})


def _name(view: View, name: str, answers: Mapping[str, Any]) -> Iterator[Finding]:
    good = {host: tuple(a) for host, a in answers.items() if _resolved(a) and not any(map(is_loopback, a))}
    reference = usual(good, view.chief)
    meaning = listed(reference) if reference else "its address"
    line = f"{reference[0]} {name}" if reference else f"ADDRESS {name}"
    for host, answer in answers.items():
        owner = view.hosts[host].address == name
        if isinstance(answer, str):
            because = f"{answer}; the others get {meaning}" if reference else answer
            yield Finding(
                "error", host, f"does not know the name {name}", because, f"add '{line}' to its /etc/hosts", kind="name"
            )
        elif isinstance(answer, dict):
            yield Finding("unknown", host, f"what {name} means there", *LATE["names"], kind="late names")
        elif any(map(is_loopback, answer)):
            what = f"{'its own name' if owner else 'the name'} {name} is a loopback address"
            because = f"{name} is {listed(answer)} there; the others get {meaning}"
            try_ = f"in its /etc/hosts replace '{answer[0]} {name}' by '{line}'"
            yield Finding("error", host, what, because, try_, kind="loopback name")
        elif host in good and good[host] != reference:
            because = f"{listed(answer)} there, {meaning} on the others"
            try_ = f"make it the same: '{line}' in its /etc/hosts"
            yield Finding("error", host, f"{name} means another machine", because, try_, kind="name")


def _resolved(answer: Any) -> bool:
    return isinstance(answer, list) and bool(answer)


def own_name(view: View) -> Iterator[Finding]:
    """Scripts that make their own ClusterSpec from gethostname() are TensorFlow's; nothing of ours asks for it."""
    if view.job.engine != "tensorflow" or len(view.wanted) < 2:
        return
    known = set(dialled(view.wanted))
    for host, told in view.section("names").items():
        answer = told["found"].get(told["own"])
        if told["own"] not in known and _resolved(answer) and all(map(is_loopback, answer)):
            because = f"/etc/hosts there has '{answer[0]} {told['own']}'"
            try_ = (
                f"put {told['own']} on the line of {view.hosts[host].address}, if the script asks for its own host name"
            )
            yield Finding("warning", host, "its own name is a loopback address", because, try_, kind="loopback name")


RULES: tuple[Rule, ...] = (
    reachable,
    *versions.RULES,
    gpus,
    alike,
    clock,
    proxies,
    limits,
    names,
    own_name,
    ports,
    script,
    folders,
    shared,
    late,
)
