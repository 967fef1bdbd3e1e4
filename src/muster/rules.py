"""Which settings of [run] go together. What a type says already stands beside the setting, in ``cluster``.

What TensorFlow swallows (two tasks at one address, two chiefs, a ps that a kind does not have) is refused here, before
anything has started.
"""

from typing import Any

import msgspec

from muster.addresses import odd_name, parse_address
from muster.cluster import JOBS, ROLES, Run, listed, port_range, settled
from muster.errors import Refused
from muster.written import Source


def overruled(run: Run, given: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What of ``run``, as the file has it, gives way to what flags ask for (``given``), and a sentence on each.

    A flag wins over the file, so also over what in the file contradicts that flag. Two flags that contradict each other
    are left for ``check_run`` to refuse.
    """
    kind = given.get("kind") or ("v1" if given.get("tf1") else None)
    asks = given.get("kind") is not None or given.get("tf1") or given.get("role_flags")
    engine = given.get("engine") or ("tensorflow" if asks else None)
    # setting of the file: what it becomes, whether it stands in the way, and of what
    rows: list[tuple[str, Any, bool, str]] = [
        ("engine", "tensorflow", run.engine == "muster" and engine == "tensorflow", "the tensorflow engine"),
        ("kind", None, run.kind is not None and engine == "muster", "the muster engine"),
        ("tf1", False, run.tf1 and engine == "muster", "the muster engine"),
        ("role_flags", False, run.role_flags and engine == "muster", "the muster engine"),
        ("evaluator", False, bool(run.evaluator) and engine == "muster", "the muster engine"),
        ("kind", kind, run.kind not in (None, kind) and bool(given.get("tf1")), "tf1"),
        ("tf1", False, run.tf1 and kind in ("pss", "mwms"), f"kind {kind}"),
        ("ps", None, run.ps not in (None, 0, []) and kind == "mwms", "kind mwms, which has no ps"),
        ("chief", None, run.chief is False and kind == "pss", "kind pss, which has a chief"),
        ("spare", 0, run.spare > 0 and given.get("mode", "sync") != "sync", f"mode {given.get('mode')}"),
        ("max_staleness", None, run.max_staleness is not None and given.get("mode", "bounded") != "bounded",
         f"mode {given.get('mode')}"),
    ]  # fmt: skip
    found = [row for row in rows if row[2] and row[0] not in given]
    said = [f"{name} = {msgspec.json.encode(getattr(run, name)).decode()} of the file gives way to {whom}"
            for name, _, _, whom in found]  # fmt: skip
    return {name: value for name, value, _, _ in found}, said


def check_run(given: Run, source: Source) -> list[str]:
    """What a type cannot say about [run]. Raises Refused; returns warnings."""
    run = settled(given)
    if run.engine == "muster" and given.kind is not None:
        raise Refused(
            f"kind {given.kind} goes with the tensorflow engine", at=source.at("run.kind"),
            because="over Muster's own parameter servers there is one kind of script: muster.fit or muster.connect",
            try_="drop engine, or drop kind",
        )  # fmt: skip
    if run.engine == "muster" and given.role_flags:
        raise Refused(
            "role_flags goes with the tensorflow engine", at=source.at("run.role_flags"),
            because="over Muster's own parameter servers only workers run the script, and muster.worker_index() tells",
            try_="drop engine, or drop role_flags",
        )  # fmt: skip
    warnings: list[str] = []
    port_range(run.ports, source.at("run.ports"))
    if isinstance(run.chief, list) and len(run.chief) > 1:
        raise Refused(
            "there are two chiefs",
            at=source.at("run.chief"),
            because=", ".join(run.chief),
            try_="a cluster has one chief; the others are workers",
        )
    _check_evaluator(given, source)
    if run.workers in (0, []) and run.kind != "pss":
        raise Refused(
            "there is no worker",
            at=source.at("run.workers"),
            because="nobody would compute",
            try_="workers = 1 or more",
        )
    if run.workers in (0, []):
        raise Refused(
            "there is no worker",
            at=source.at("run.workers"),
            because="the chief of a ParameterServerStrategy only coordinates",
            try_="workers = 1 or more",
        )
    _check_kind(run, source)
    _check_seats(run, source, warnings)
    return warnings


def _check_seats(run: Run, source: Source, warnings: list[str]) -> None:
    """Where the file names seats: each a place of its own, and for all roles."""
    seen: dict[str, str] = {}
    for role, job in ROLES:
        for n, seat in enumerate(listed(getattr(run, job))):
            where = source.at(f"run.{job}[{n}]")
            address = parse_address(seat, where)
            if odd := odd_name(address.host):
                warnings.append(f"{where}: {odd}")
            task = f"{role}/{n}"
            if (other := seen.setdefault(address.key, task)) != task:
                raise Refused(
                    f"{other} and {task} have the same address {seat}",
                    at=where,
                    because="TensorFlow takes it and both then fight for one port",
                    try_="a port for each task",
                )
    counted = [job for job in (*JOBS, "evaluator") if listed(getattr(run, job))]
    plain = [job for job in JOBS if isinstance(getattr(run, job), int) and getattr(run, job)]
    if counted and plain:
        raise Refused(
            f"exact seats for {' and '.join(counted)}, but a count for {' and '.join(plain)}",
            at=source.at(f"run.{plain[0]}"),
            because="ports could collide",
            try_="seats for all, or counts for all",
        )


def _check_evaluator(given: Run, source: Source) -> None:
    """An engine that nobody has named yet may still be named by a flag: the plan refuses that one."""
    if given.evaluator and given.engine == "muster":
        raise no_evaluator(source.at("run.evaluator"))
    if len(seats := listed(given.evaluator)) > 1:
        raise Refused(
            f"there are {len(seats)} evaluators",
            at=source.at("run.evaluator"),
            because=", ".join(seats),
            try_="TensorFlow knows one: keep one seat, or evaluator = true",
        )


def no_evaluator(at: str) -> Refused:
    """What is asked for stands beside TensorFlow's training, and Muster's own needs none."""
    return Refused(
        "evaluator goes with the tensorflow engine",
        at=at,
        because="over Muster's own parameter servers the chief validates, after each epoch, on the values of then",
        try_="validation_data in muster.fit(...); or --kind v1 | pss | mwms for a TensorFlow script with checkpoints",
    )


def _check_kind(run: Run, source: Source) -> None:
    if run.kind == "pss" and run.chief is False:
        raise Refused(
            "kind pss needs exactly one chief",
            at=source.at("run.chief"),
            because="the chief runs the ClusterCoordinator; workers and ps only serve",
            try_="chief = true",
        )
    if run.kind == "mwms" and run.ps not in (None, 0, []):
        raise Refused(
            "kind mwms has no ps",
            at=source.at("run.ps"),
            because="its workers exchange gradients among themselves",
            try_="drop ps, or use kind v1 or pss",
        )
    if run.ps in (0, []) and not (run.kind == "mwms" and run.engine == "tensorflow"):
        raise Refused(
            "there is no ps", at=source.at("run.ps"), because="the parameters live on the ps", try_="ps = 1 or more"
        )
    if run.tf1 and (run.engine != "tensorflow" or run.kind != "v1"):
        raise Refused(
            "tf1 goes with the tensorflow engine and kind v1",
            at=source.at("run.tf1"),
            because=f"engine is {run.engine}, kind is {run.kind}",
            try_="drop the other setting",
        )
    workers = len(run.workers) if isinstance(run.workers, list) else run.workers
    if run.spare and (run.mode != "sync" or run.spare >= workers):
        raise Refused(
            "spare goes with sync, and is less than the workers",
            at=source.at("run.spare"),
            because=f"mode is {run.mode}, workers are {workers}, spare is {run.spare}",
        )
    if (run.max_staleness is not None) != (run.mode == "bounded"):
        raise Refused(
            "max_staleness goes with mode bounded",
            at=source.at("run.max_staleness" if run.max_staleness is not None else "run.mode"),
            because=f"mode is {run.mode}, max_staleness is {run.max_staleness or 'missing'}",
            try_='mode = "bounded", max_staleness = 3',
        )
