"""Muster's parameter servers beside what else there is: steps per second, and time to a fixed loss.

    python -m bench engines [--quick] [--only W1]        about 20 minutes; 4 with --quick
    BENCH_TORCH=/path/to/python python -m bench engines  with PyTorch DDP, from an environment of its own

A *block* is one model with one number of ps and workers. All its sides are started once; then windows go round in turn,
so that whatever else the machine does meets all alike, and a ratio is taken within a round. Every window begins with
the start weights (where a script allows that) and is checked against the losses of one process: see ``figures``.
Raw values go to bench/results/engines.json; ``python -m bench.table`` makes the table from them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.measure import crews, figures, meter
from bench.measure.crews import Crew, Driven, Held, Window
from bench.measure.figures import Reference
from bench.measure.tasks import Died
from bench.measure.workloads import WORKLOADS, Workload
from bench.record import RESULTS

OUT = RESULTS / "engines.json"
ROUNDS, FEWER = 4, 2  # windows of the sides that floors bind, and of the others
LIMIT = 420  # seconds for one block, times the tries of a window
QUIET = 0.25  # cores: a window in which others take more is repeated where --patient allows it
COMPARED = ("plain", "unix", "shm", "tcp")  # the target of time to a fixed loss is one that all of these reach


@dataclass(frozen=True)
class Block:
    """``often`` are the sides of every round, in the order of their windows; ``seldom`` come in the first rounds."""

    workload: str
    ps: int
    workers: int
    often: tuple[str, ...]
    seldom: tuple[str, ...] = ()
    sync: bool = False

    @property
    def name(self) -> str:
        return f"{self.workload} {'sync ' if self.sync else ''}{self.ps}+{self.workers}"


def blocks(quick: bool) -> list[Block]:
    variants = () if quick else ("tls", "zmq", "grpc", "t0")
    found = []
    for name in WORKLOADS:
        fit = ("fit",)
        often = ("plain", "unix", "shm", *(() if quick else ("tcp",)))
        more = (*variants, *(() if quick else ("pss",)), *(("t0 v1", "t0 fit") if name == "W1" and not quick else ()))
        found.append(Block(name, 2, 3, (*often, *(fit if name == "W1" or not quick else ())), more))
        if not quick:
            threads = ("plain threads", "shm threads") if name == "W4" else ()
            found.append(Block(name, 1, 1, (*often, *fit), (*variants, *threads)))
    found.append(Block("W1", 2, 3, ("SyncReplicas", "sync", "mwms"), () if quick else ("fit sync", "ddp", "t0"), True))
    if not quick:
        found.append(Block("W4", 2, 3, ("sync", "mwms"), ("ddp", "t0"), True))
    return found


# --- one block


def start(block: Block, folder: Path, say: Callable[[str], None]) -> list[Crew]:
    """All crews of a block, on their way up. What cannot be had here is left out, in words."""
    work, ps, workers, sides = WORKLOADS[block.workload], block.ps, block.workers, {*block.often, *block.seldom}
    python = crews.torch_python()
    if "ddp" in sides and not python:
        say("PyTorch DDP is left out: BENCH_TORCH names no Python that has it")
        sides.discard("ddp")
    for side, module in (("zmq", "zmq"), ("grpc", "grpc")):
        if side in sides and importlib.util.find_spec(module) is None:
            say(f"the exchange over {side} is left out: there is no module {module} (dependency group bench)")
            sides.discard(side)
    ways = [side for side in ("unix", "shm", "tcp", "tls", "zmq", "grpc", "sync") if side in sides]
    known: dict[str, Callable[[Path], Crew]] = {
        "plain": lambda at: crews.plain(work, at, ps, workers),
        "plain threads": lambda at: crews.plain(work, at, ps, workers, ["--default-threads"]),
        "shm threads": lambda at: crews.ours(work, at, ps, workers, ["shm threads"], ["--default-threads"]),
        "fit": lambda at: crews.fit(work, at, ps, workers),
        "fit sync": lambda at: crews.fit(work, at, ps, workers, "sync"),
        "SyncReplicas": lambda at: crews.sync_replicas(work, at, ps, workers),
        "mwms": lambda at: crews.mwms(work, at, workers),
        "ddp": lambda at: crews.ddp(work, at, workers, python),
        "pss": lambda at: crews.pss(work, at, ps, workers),
        "t0": lambda at: crews.alone(work, at),
        "t0 v1": lambda at: crews.plain_alone(work, at),
        "t0 fit": lambda at: crews.keras(work, at),
    }
    makers = [("ours", lambda at: crews.ours(work, at, ps, workers, ways)), *known.items()]
    made: list[Crew] = []
    for name, make in makers:
        if name not in sides and not (name == "ours" and ways):
            continue
        place = folder / name.replace(" ", "-")
        place.mkdir()
        try:
            made.append(make(place))
        except Died as error:
            say(f"{name} did not start: {error}")
    return made


@contextlib.contextmanager
def up(block: Block, folder: Path, say: Callable[[str], None]) -> Iterator[dict[str, Crew]]:
    """Crews by side, ready to step; ended at the end, whatever happens."""
    made = start(block, folder, say)
    try:
        found: dict[str, Crew] = {}
        for crew in made:
            try:
                crew.ready()
                found |= dict.fromkeys(crew.sides, crew)
            except Died as error:
                say(f"a crew of {block.name} is left out: {error}")
        yield found
    finally:
        for crew in made:
            crew.end()


def measure(
    block: Block, sides: dict[str, Crew], rounds: int, scale: float, tries: int, say: Callable[[str], None]
) -> Iterator[tuple[int, float, Window]]:
    """Windows of all sides, round by round: (round, load, window)."""
    seconds = WORKLOADS[block.workload].seconds * scale
    order = [side for side in (*block.often, *block.seldom) if side in sides]
    for side in order:  # the first steps of all build functions, touch memory and fill caches
        sides[side].window(side, min(0.7, seconds))
    for number in range(rounds):
        turn = [s for s in order if s in block.often or number < min(FEWER, rounds)]
        for side in turn if number % 2 == 0 else turn[::-1]:
            load = os.getloadavg()[0]
            window = undisturbed(sides[side], side, seconds, tries)
            cost = f"{1000 * window.cpu:7.2f} ms"
            say(f"{block.name:12} {number}  {side:13}{window.rate:9.1f}/s  {cost}  others {window.others:.2f} cores")
            yield number, load, window


def undisturbed(crew: Crew, side: str, seconds: float, tries: int) -> Window:
    """The first window in which something else took less than ``QUIET`` cores, else the quietest of ``tries``."""
    seen: list[Window] = []
    while len(seen) < tries and (not seen or seen[-1].others > QUIET):
        if tries > 1:
            wait_for_quiet()
        seen.append(crew.window(side, seconds))
    return min(seen, key=lambda window: window.others)


def wait_for_quiet(patience: float = 8.0) -> None:
    """Until a second has passed in which next to nothing ran here, or patience ends."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        before, began = meter.all_work(), time.monotonic()
        time.sleep(0.7)
        if (meter.all_work() - before) / (time.monotonic() - began) < QUIET:
            return


def rows(block: Block, found: Any, sides: dict[str, Crew], reference: Reference) -> list[dict[str, Any]]:
    """What is kept: one row a window, with its band and its time to the block's target."""
    work = WORKLOADS[block.workload]
    aim = figures.target((w.curve for _, _, w in found if w.side in COMPARED), work.smooth)
    return [_row(block, number, load, window, sides[window.side], reference, aim) for number, load, window in found]


def _row(
    block: Block, number: int, load: float, window: Window, crew: Crew, reference: Reference, aim: float | None
) -> dict[str, Any]:
    work = WORKLOADS[block.workload]
    held = isinstance(crew, Held)
    seen = crew.history() if isinstance(crew, Held) else window.curve
    band = figures.band(seen, reference)
    took = None
    if aim is not None and not held:
        took = figures.time_to(window.curve, aim, work.smooth)
    elif aim is not None and window.rate:
        steps = figures.steps_to(seen, aim, min(work.smooth, 12))
        took = None if steps is None else steps / window.rate
    return {
        "block": block.name,
        "round": number,
        "side": window.side,
        "load": round(load, 2),
        "others": round(window.others, 3),
        "rate": round(window.rate, 2),
        "steps": window.steps,
        "cpu_ms": round(1000 * window.cpu, 4),
        "busy_ms": {name: round(1000 * value, 4) for name, value in window.busy.items()},
        "tcp_bytes": None if window.bytes is None else round(window.bytes),
        "phases_ms": {name: round(value, 4) for name, value in window.phases.items()},
        "band": None if not band.compared else {**vars(band), "inside": band.inside},
        "target": aim,
        "time_to_target": None if took is None else round(took, 4),
        "curve": figures.thinned(window.curve, 30),
    }


def reference(work: Workload, folder: Path, share: float) -> Reference:
    """One process, every step on fresh values."""
    place = folder / f"reference-{work.name}"
    place.mkdir()
    crew = crews.alone(work, place)
    try:
        crew.ready()
        assert isinstance(crew, Driven)
        return Reference(crew.rounds("t0", int(work.reference * share)).curve)
    finally:
        crew.end()


# --- all


def main(words: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(prog="bench engines")
    options.add_argument("--quick", action="store_true", help="2 ps and 3 workers, short windows, fewer sides")
    options.add_argument("--only", default="", help="blocks whose name begins so: W1, 'W1 2+3', 'W1 sync'")
    options.add_argument("--patient", action="store_true", help="wait for quiet, repeat a window that was disturbed")
    options.add_argument("--rounds", type=int, default=0)
    options.add_argument("--scale", type=float, default=0.0, help="windows so many times as long")
    options.add_argument("--keep", type=Path, help="keep the tasks' logs in this folder")
    options.add_argument("--out", type=Path, default=OUT)
    args = options.parse_args(words)
    rounds, scale = args.rounds or (2 if args.quick else ROUNDS), args.scale or (0.6 if args.quick else 1.0)
    kept = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    folder = args.keep or Path(tempfile.mkdtemp(prefix="muster-bench-"))
    folder.mkdir(exist_ok=True, parents=True)
    references: dict[str, Reference] = {}
    signal.signal(signal.SIGALRM, _too_long)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started here is ended
    try:
        for number, block in enumerate(b for b in blocks(args.quick) if b.name.startswith(args.only)):
            place = folder / f"block-{number}"
            place.mkdir()
            signal.alarm(LIMIT * (2 if args.patient else 1))
            try:
                fresh = _one(block, place, references, rounds, scale, 3 if args.patient else 1)
            except (Died, TimeoutError) as error:
                _say(f"{block.name} was given up: {error}")
                continue
            finally:
                signal.alarm(0)
            kept = [row for row in kept if row["block"] != block.name] + fresh
            _write(args.out, kept, scale)
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)


def _one(
    block: Block, folder: Path, references: dict[str, Reference], rounds: int, scale: float, tries: int
) -> list[dict[str, Any]]:
    work = WORKLOADS[block.workload]
    if work.name not in references:
        references[work.name] = reference(work, folder, min(1.0, scale))
    with up(block, folder, _say) as sides:
        found: list[tuple[int, float, Window]] = []
        try:
            for window in measure(block, sides, rounds, scale, tries, _say):
                found.append(window)
        except TimeoutError:
            _say(f"{block.name} is cut short: it took too long")
        made = rows(block, found, sides, references[work.name])
    _summary(block, made)
    return made


def _summary(block: Block, made: list[dict[str, Any]]) -> None:
    """A line a side: rate, ratio to the first side, time to the target, and windows out of the band."""
    first = block.often[0]
    by = {side: {r["round"]: r for r in made if r["side"] == side} for side in (*block.often, *block.seldom)}
    for side, own in by.items():
        if not own:
            continue
        pairs = [(r["rate"], by[first].get(n, {}).get("rate")) for n, r in own.items()]
        took = figures.middle(r["time_to_target"] for r in own.values())
        out = sum(1 for r in own.values() if r["band"] and not r["band"]["inside"])
        times = figures.middle(figures.ratios([a for a, _ in pairs], [b for _, b in pairs]))
        _say(
            f"  {side:13}{figures.middle(r['rate'] for r in own.values()):9.1f}/s"
            f"  x {times or float('nan'):6.2f} {first}   to the target {took or float('nan'):6.2f} s"
            f"{f'   {out} of {len(own)} out of the band' if out else ''}"
        )


def _write(out: Path, kept: list[dict[str, Any]], scale: float) -> None:
    machine = {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "when": time.strftime("%Y-%m-%d"),
        "tensorflow": _version("tensorflow-cpu") or _version("tensorflow"),
        "numpy": _version("numpy"),
        "pyzmq": _version("pyzmq"),
        "grpcio": _version("grpcio"),
    }
    told = {"what": "engines side by side, steps per second and time to a fixed loss", "machine": machine}
    out.parent.mkdir(exist_ok=True)
    out.write_text(_compact({**told, "scale": scale, "rows": kept}))


def _compact(told: dict[str, Any]) -> str:
    """JSON with one row a line: thousands of numbers, still readable as a diff."""
    lines = ",\n  ".join(json.dumps(row, separators=(",", ":")) for row in told["rows"])
    head = json.dumps({key: value for key, value in told.items() if key != "rows"}, indent=1)
    return f'{head[:-2]},\n "rows": [\n  {lines}\n ]\n}}\n'


def _version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _too_long(*_: Any) -> None:
    raise TimeoutError("it took too long")


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
