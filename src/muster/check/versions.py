"""Rules about what is installed: Python, TensorFlow, Keras and the rest, on each host and compared with one another.

A rule tells the first cause only. A host that runs the wrong interpreter lacks packages because of that, and hears
about the interpreter.
"""

from collections.abc import Iterator, Mapping

from muster.check.findings import OLDEST_PYTHON, Finding, Severity, odd, usual
from muster.check.view import TENSORFLOWS, Rule, View, listed, numbers


def python(view: View) -> Iterator[Finding]:
    best = usual({host: v for host, v in view.pythons.items() if host not in view.wrong_python}, view.chief)
    others = [host for host, version in view.pythons.items() if version == best]
    for host in sorted(view.wrong_python, key=view.answered.index):
        told = view.facts[host]["python"]
        because = f"{told['executable']} is {told['version']}{_carries(view, host)}"
        if others:
            theirs = view.facts[others[0]]["python"]
            because += f"; {listed(others)}: {theirs['version']}{_carries(view, others[0])}"
            try_ = (
                f"set python for {host} to the full path of such an interpreter; the others run {theirs['executable']}"
            )
        else:
            try_ = f"install Python {_dotted(OLDEST_PYTHON)} or newer there and set python for {host}"
        old = view.pythons[host] < OLDEST_PYTHON
        what = (
            f"Python is too old, it must be {_dotted(OLDEST_PYTHON)} or newer"
            if old
            else "Python differs from the others'"
        )
        yield Finding("error", host, what, because, try_, kind="python")


def _carries(view: View, host: str) -> str:
    if view.facts[host].get("too_old"):
        return ""
    return f" with {view.tensorflow(host)}" if view.tensorflow(host) else " without TensorFlow"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)


def tensorflow(view: View) -> Iterator[Finding]:
    hosts = [h for h in view.training if h not in view.wrong_python and view.packages(h) is not None]
    have = {host: view.tensorflow(host) for host in hosts}
    behind = {finding.host for finding in kinds(view)}
    versions = {host: text.partition(" ")[2] for host, text in have.items() if text and host not in behind}
    for host in hosts:
        if not have[host]:
            executable = view.facts[host]["python"]["executable"]
            theirs = [h for h in versions if view.facts[h]["python"]["executable"] != executable]
            hint = f"; {theirs[0]} has it in {view.facts[theirs[0]]['python']['executable']}" if theirs else ""
            try_ = f"{executable} -m pip install {_requirement(versions, view.chief)}, or set python for {host}"
            yield Finding("error", host, "no TensorFlow", f"{executable} has none{hint}", try_, kind="tensorflow")
    for host, version in odd(versions, view.chief):
        reference = usual(versions, view.chief)
        others = listed([h for h, v in versions.items() if v == reference])
        executable = view.facts[host]["python"]["executable"]
        distribution = have[host].partition(" ")[0]
        yield Finding(
            "error",
            host,
            f"TensorFlow {version}, the others have {reference}",
            f"{executable} has {have[host]}; {others}: {reference}",
            f"{executable} -m pip install {distribution}=={reference}",
            kind="tensorflow",
        )


# kind: the first TensorFlow in which it works, and why not before. v1 scripts need what every 2.x has.
FIRST = {
    "pss": ((2, 4), "before, ParameterServerStrategy trained nothing but Estimators and had no coordinator"),
    "mwms": ((2, 4), "before, MultiWorkerMirroredStrategy was experimental and had another name"),
    "v1": ((1, 13), "before, there was no tf.compat.v1"),
}


def kinds(view: View) -> Iterator[Finding]:
    """A TensorFlow that is too old for the kind of script, be it the same on all hosts."""
    if view.job.engine != "tensorflow":
        return
    first, why = FIRST[view.job.kind]
    for host in view.training:
        distribution, _, version = view.tensorflow(host).partition(" ")
        if version and host not in view.wrong_python and numbers(version)[:2] < first:
            executable, needs = view.facts[host]["python"]["executable"], _dotted(first)
            what = f"TensorFlow {version} is too old: kind {view.job.kind} needs {needs}+"
            try_ = f"{executable} -m pip install '{distribution}>={needs}'"
            yield Finding("error", host, what, f"{executable} has {distribution} {version}; {why}", try_, kind="kind")


def _requirement(versions: Mapping[str, str], chief: str) -> str:
    return f"tensorflow=={usual(versions, chief)}" if versions else "tensorflow"


# package: up to which part of the version hosts must agree, and how bad it is when they do not
AGREE = {
    "keras": (1, "error"),
    "numpy": (1, "warning"),
    "protobuf": (1, "warning"),
}


def packages(view: View) -> Iterator[Finding]:
    told = {host: p for host, p in view.section("packages", view.training).items() if host not in view.wrong_python}
    behind = {finding.host for rule in (tensorflow, kinds) for finding in rule(view)}
    told = {host: p for host, p in told.items() if host not in behind}
    for name in sorted({name for p in told.values() for name in p if name not in TENSORFLOWS}):
        versions = {host: p.get(name, "none") for host, p in told.items()}
        parts, severity = AGREE.get(name, (2, "warning"))
        coarse = {host: numbers(version)[:parts] for host, version in versions.items()}
        for host, _ in odd(coarse, view.chief):
            reference = usual({h: v for h, v in versions.items() if coarse[h] != coarse[host]}, view.chief)
            executable = view.facts[host]["python"]["executable"]
            verb = f"uninstall {name}" if reference == "none" else f"install {name}=={reference}"
            yield Finding(
                "error" if severity == "error" else "warning",
                host,
                f"{name} {versions[host]}, the others have {reference}",
                f"read with {executable}",
                f"{executable} -m pip {verb}",
                kind=name,
            )
    for host in view.answered:
        installed = view.packages(host)
        spared = host in view.training or host in view.wrong_python or installed is None
        if not spared and "numpy" not in (installed or {}):
            executable = view.facts[host]["python"]["executable"]
            yield Finding(
                "error", host, "no NumPy", f"{executable} has none", f"{executable} -m pip install numpy", kind="numpy"
            )


def keras(view: View) -> Iterator[Finding]:
    """Keras 3 cannot fit through TensorFlow's parameter servers or multi-worker strategy (seen on 2.21); a loop of
    one's own over its models can. So it is an error where the script is seen to call ``fit``, else a hint. One row for
    all hosts of which the same is to be said."""
    if view.job.engine != "tensorflow" or view.job.kind == "v1":
        return
    alike: dict[tuple[Severity, str, str], list[str]] = {}
    for host in view.section("packages", view.training):
        if row := _no_fit(view, host):
            alike.setdefault(row, []).append(host)
    what = f"Keras 3 does not train with kind {view.job.kind}"
    for (severity, because, try_), hosts in alike.items():
        because += f"; so on {listed(hosts[1:])}" if hosts[1:] else ""
        yield Finding(severity, hosts[0], what, because, try_, kind="legacy keras")


def _no_fit(view: View, host: str) -> tuple[Severity, str, str] | None:
    installed, told = view.packages(host) or {}, view.section("script", [host]).get(host, {})
    version, executable = installed.get("keras", "0"), view.facts[host]["python"]["executable"]
    switched = view.section("environment", [host]).get(host, {}).get("TF_USE_LEGACY_KERAS") in ("1", "true", "True")
    asked, there = switched or told.get("legacy", False), "tf_keras" in installed
    if numbers(version)[:1] < (3,) or (asked and there):
        return None
    if asked:
        because = f"Keras 2 is asked for (TF_USE_LEGACY_KERAS), and {executable} has no tf_keras"
    elif told.get("fit"):
        because = f"{told['path']}, line {told['fit']} calls fit, which fails there with Keras {version}"
    else:
        because = f"it has Keras {version}, whose fit fails there; a loop of your own works"
    release = _dotted(numbers(view.tensorflow(host).partition(" ")[2])[:2])
    steps = [] if there else [f"{executable} -m pip install tf_keras=={release}.*"]
    steps += [] if asked else ['set env = { TF_USE_LEGACY_KERAS = "1" } in [[hosts]]']
    return "error" if asked or told.get("fit") else "warning", because, " and ".join(steps) + ", or use muster.fit"


RULES: tuple[Rule, ...] = (python, tensorflow, kinds, packages, keras)
