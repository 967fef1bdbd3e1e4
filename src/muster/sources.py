"""What people already have (TF_CONFIG, a ClusterSpec in JSON, an MPI-style host file), read into a cluster. Pure."""

import json
import re
from dataclasses import dataclass, field
from typing import Any

from muster.addresses import is_loopback
from muster.errors import Refused, nearest

SPEC_JOBS = {"ps": "ps", "worker": "workers", "chief": "chief", "master": "master", "evaluator": "evaluator"}


@dataclass
class Found:
    """``raw`` has the shape of a parsed cluster file. ``task`` is the (type, index) that a TF_CONFIG names, if any."""

    raw: dict[str, Any]
    task: tuple[str, int] | None = None
    notes: list[str] = field(default_factory=list)


def from_tf_config(text: str, where: str = "TF_CONFIG") -> Found:
    """The cluster of a TF_CONFIG, or of a bare ClusterSpec. Raises Refused, with the position and the likely slip."""
    told = _json(text, where)
    if not isinstance(told, dict):
        raise Refused(
            f"{where} is not a table",
            at=where,
            because=f"it is {type(told).__name__}",
            try_='{"cluster": {"ps": [...], "worker": [...]}, "task": {"type": "worker", "index": 0}}',
        )
    whole = "cluster" in told or "task" in told
    cluster = told.get("cluster", {}) if whole else told
    if not isinstance(cluster, dict) or not cluster:
        raise Refused(
            f"{where} has no cluster",
            at=where,
            because=f"it has {', '.join(map(repr, told)) or 'nothing'}",
            try_='"cluster": {"ps": ["host:port", ...], "worker": [...]}',
        )
    run: dict[str, Any] = {}
    for job, seats in cluster.items():
        if job not in SPEC_JOBS:
            near = nearest(job.removesuffix("_hosts"), list(SPEC_JOBS))
            raise Refused(
                f"there is no job {job!r}",
                at=f"{where}: cluster.{job}",
                because="TensorFlow accepts any name and then never finds its tasks",
                try_=(f"did you mean {near!r}? " if near else "") + "one of: ps, worker, chief, evaluator",
            )
        run[SPEC_JOBS[job]] = _seats(job, seats, where)
    found = Found({"run": run})
    places = [str(seat).rpartition(":")[0].strip("[]") for row in run.values() for seat in row]
    if not all(is_loopback(place) for place in places):
        found.raw["launcher"] = "ssh"
        found.notes.append(
            "the addresses are not of this machine: launcher is ssh, with the hosts as your ssh knows them"
        )
    if whole:
        found.task = _task(told, cluster, where, found.notes)
        if found.task and found.task[0] == "evaluator":  # as TensorFlow has it, the cluster itself does not list it
            run.setdefault("evaluator", True)
    return found


def _seats(job: str, seats: Any, where: str) -> list[str]:
    if isinstance(seats, dict):  # sparse: JSON has made text of the indices
        try:
            rows = sorted((int(index), seat) for index, seat in seats.items())
        except ValueError:
            raise Refused(
                f"{job} has an index that is no number",
                at=f"{where}: cluster.{job}",
                because=", ".join(map(str, seats)),
            ) from None
        if [index for index, _ in rows] != list(range(len(rows))):
            raise Refused(
                f"{job} has gaps",
                at=f"{where}: cluster.{job}",
                because=f"indices {', '.join(str(i) for i, _ in rows)}",
                try_="list all tasks: Muster starts every one of them",
            )
        seats = [seat for _, seat in rows]
    if not isinstance(seats, list) or not all(isinstance(seat, str) for seat in seats):
        raise Refused(f"{job} is no list of host:port", at=f"{where}: cluster.{job}", because=json.dumps(seats)[:80])
    return seats


def _task(told: dict[str, Any], cluster: dict[str, Any], where: str, notes: list[str]) -> tuple[str, int] | None:
    if "task" not in told:
        notes.append(f"{where} has no task: TensorFlow would take that for a single machine, in silence")
        return None
    task = told["task"]
    if not isinstance(task, dict) or "type" not in task or "index" not in task:
        raise Refused(
            f"the task of {where} is not whole",
            at=f"{where}: task",
            because=json.dumps(task),
            try_='"task": {"type": "worker", "index": 0}',
        )
    kind, index = task["type"], task["index"]
    cluster = {**cluster, "evaluator": cluster.get("evaluator", ["beside the cluster"])}
    if not isinstance(kind, str) or kind not in cluster:
        near = nearest(str(kind), list(cluster))
        raise Refused(
            f"the task is of type {kind!r}, and the cluster has no such job",
            at=f"{where}: task.type",
            try_=f"did you mean {near!r}?" if near else "one of: " + ", ".join(cluster),
        )
    size = len(cluster[kind])
    if isinstance(index, str) and re.fullmatch(r"-?\d+", index):
        index = int(index)
    if isinstance(index, bool) or not isinstance(index, int):
        raise Refused(f"the index {index!r} is no whole number", at=f"{where}: task.index", try_=f"0 to {size - 1}")
    if not 0 <= index < size:
        raise Refused(
            f"there is no {kind}/{index}",
            at=f"{where}: task.index",
            because=f"{kind} has {size} task(s), 0 to {size - 1}: {', '.join(_seats(kind, cluster[kind], where))}",
        )
    return kind, index


def _json(text: str, where: str) -> Any:
    if not text.strip():
        raise Refused(f"{where} is empty", at=where, try_="unset it, or write the cluster into it")
    if text.startswith(("\ufeff", "\udcef\udcbb\udcbf")):
        raise Refused(
            f"{where} begins with a byte-order mark",
            at=f"{where}: character 1",
            because="an editor saved it as UTF-8 with BOM",
            try_="save it as plain UTF-8",
        )
    try:
        return json.loads(text, object_pairs_hook=lambda pairs: _no_twins(pairs, where))
    except json.JSONDecodeError as error:
        at = f"{where}: line {error.lineno}, character {error.colno}"
        raise Refused(
            f"{where} is not valid JSON", at=at, because=_slip(text, error), try_="python -m json.tool shows where"
        ) from None
    except RecursionError:
        raise Refused(f"{where} is nested too deeply", at=where) from None


def _slip(text: str, error: json.JSONDecodeError) -> str:
    if any(quote in text for quote in "\u201c\u201d\u2018\u2019"):
        return "it has typographic quotes; JSON wants plain double quotes"
    if "'" in text and '"' not in text:
        return "it has single quotes; JSON wants double quotes"
    if re.search(r",\s*[}\]]", text):
        return "there is a comma before a closing bracket"
    return f"{error.msg} near {text[max(0, error.pos - 10) : error.pos + 20]!r}"


def _no_twins(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twin = next(name for name in names if names.count(name) > 1)
        raise Refused(
            f"{where} has {twin!r} twice", at=where, because="JSON readers keep only the last one", try_="keep one"
        )
    return made


def from_host_file(text: str, where: str = "host file") -> Found:
    """Lines of ``name [slots=4] [# note]``. Blank lines, comments, tabs and CRLF are fine. Raises Refused."""
    hosts: list[dict[str, Any]] = []
    for number, line in enumerate(text.lstrip("\ufeff").splitlines(), 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        host: dict[str, Any] = {"name": words[0]}
        if user := re.fullmatch(r"([\w.-]+)@([\w.-]+)", words[0]):
            host = {"name": user[2], "ssh": words[0]}
        for word in words[1:]:
            setting = re.fullmatch(r"(slots|max_slots|max-slots|gpus)=(\d+)", word)
            if not setting:
                raise Refused(
                    f"{word!r} cannot stand in a host file",
                    at=f"{where}, line {number}",
                    because=line.strip()[:100],
                    try_="name slots=4",
                )
            host["slots" if "slots" in setting[1] else "gpus"] = int(setting[2])
        if any(host["name"] == other["name"] for other in hosts):
            raise Refused(
                f"{host['name']} is listed twice", at=f"{where}, line {number}", try_="one line a machine, with slots="
            )
        hosts.append(host)
    if not hosts:
        raise Refused("the host file names no host", at=where, try_="one line a machine: gpu1 slots=4")
    shares = _shares(hosts)
    return Found({"launcher": "ssh", "hosts": hosts, **({"run": shares} if shares else {})})


def _shares(hosts: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts that the slots have room for: about one ps for four workers, and one task a host where none are given."""
    if not all("slots" in host for host in hosts):
        return {}
    seats = sum(int(host["slots"]) for host in hosts)
    ps = max(1, seats // 5)
    return {"ps": ps, "workers": seats - ps} if seats > 1 else {}


def to_toml(raw: dict[str, Any]) -> str:
    """A cluster file of the same content, commented where a newcomer wants to know more."""
    rows = []
    hosts = raw.get("hosts", [])
    if name := raw.get("name"):
        rows.append(f"name = {json.dumps(name)}")
    rows.append(f"launcher = {json.dumps(raw.get('launcher', 'local'))}")
    for host in hosts:
        rows += ["", "[[hosts]]", *(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in host.items())]
    rows += ["", "[run]"]
    rows += [f"{key} = {json.dumps(value)}" for key, value in raw.get("run", {}).items()]
    return "\n".join(rows) + "\n"
