"""docs/reference/performance.md, from what the measurements have left in bench/results: no figure is typed by hand.

python -m bench.table
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.measure import figures
from bench.measure.workloads import BATCH, WORKLOADS
from bench.record import RESULTS
from muster.ps.client import SHARE_FROM

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "performance.md"
NAMES = {
    "plain": "TF v1 script",
    "plain threads": "TF v1 script, as many threads as cores",
    "unix": "**Muster**, Unix sockets",
    "shm": "**Muster**, shared memory",
    "shm threads": "**Muster**, shared memory, as many threads as cores",
    "tcp": "**Muster**, TCP",
    "tls": "**Muster**, TLS",
    "fit": "**`muster.fit`**",
    "sync": "**Muster**, sync",
    "fit sync": "**`muster.fit`**, sync",
    "zmq": "our exchange over ZeroMQ",
    "grpc": "our exchange over gRPC",
    "pss": "ParameterServerStrategy",
    "SyncReplicas": "SyncReplicasOptimizer",
    "mwms": "MultiWorkerMirrored (ring)",
    "ddp": "PyTorch DDP (gloo)",
    "t0": "T0: one process, no ps",
    "t0 v1": "T0: the TF v1 script alone",
    "t0 fit": "T0: Keras' own fit",
}
CLOSE = 1.3  # a variant of the exchange that comes as near as this on all four replaces ours (design, section 2)

DISTURBED = 0.5  # cores that something else took during a window


@dataclass(frozen=True)
class Floor:
    """``side`` over ``base`` in ``block``, as steps per second or (``time``) as time to the fixed loss."""

    what: str
    block: str
    side: str
    base: str
    least: float
    goal: float | None
    time: bool = False


def floors() -> list[Floor]:
    found = [
        Floor("W1 `connect`, Unix sockets", "W1 2+3", "unix", "plain", 6.0, 12.0),
        Floor("W1 `connect`, TCP", "W1 2+3", "tcp", "plain", 6.0, 12.0),
        Floor("W1 `fit`, accuracy, bar and reports", "W1 2+3", "fit", "plain", 3.0, 6.0),
        Floor("W2, Unix sockets", "W2 2+3", "unix", "plain", 3.5, 5.0),
        Floor("W2, TCP", "W2 2+3", "tcp", "plain", 3.5, 5.0),
        Floor("W3, Unix sockets", "W3 2+3", "unix", "plain", 2.0, 4.0),
        Floor("W3, TCP", "W3 2+3", "tcp", "plain", 2.0, 4.0),
        Floor("W3, one host (shared memory)", "W3 2+3", "shm", "plain", 2.0, 4.0),
        Floor("W4, Unix sockets", "W4 2+3", "unix", "plain", 1.2, 2.0),
        Floor("W4, TCP", "W4 2+3", "tcp", "plain", 1.2, 2.0),
        Floor("W4, one host (shared memory)", "W4 2+3", "shm", "plain", 1.5, 2.0),
        Floor("W1 sync, over SyncReplicas", "W1 sync 2+3", "sync", "SyncReplicas", 6.0, 10.0),
        Floor("W1 sync, over MultiWorkerMirrored", "W1 sync 2+3", "sync", "mwms", 2.0, 4.0),
    ]
    for name in WORKLOADS:
        for side in ("unix", "tcp", "shm"):
            if side != "shm" or usual(name) == "shm":
                way = {"unix": "Unix sockets", "tcp": "TCP", "shm": "shared memory"}[side]
                what = f"{name} time to a fixed loss, {way}"
                found.append(Floor(what, f"{name} 2+3", side, "plain", 1.0, None, True))
    return found


class Results:
    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows = list(rows)
        self.blocks = sorted({row["block"] for row in rows}, key=lambda name: (" sync" in name, name))

    def sides(self, block: str) -> list[str]:
        there = {row["side"] for row in self.rows if row["block"] == block}
        return [side for side in NAMES if side in there]

    def of(self, block: str, side: str) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["block"] == block and row["side"] == side]

    def median(self, block: str, side: str, read: Callable[[dict[str, Any]], float | None]) -> float | None:
        rows = self.of(block, side)
        return figures.middle(read(row) for row in [row for row in rows if quiet(row)] or rows)

    def ratio(self, block: str, side: str, base: str, time: bool = False) -> list[float]:
        """Round by round; windows of ``side`` that left the band do not count, nor rounds that were disturbed."""
        other = {row["round"]: row for row in self.of(block, base)}
        pairs = [(row, other[row["round"]]) for row in self.of(block, side) if row["round"] in other and counts(row)]
        pairs = [pair for pair in pairs if all(quiet(row) for row in pair)] or pairs
        if time:
            return figures.ratios([b["time_to_target"] for _, b in pairs], [a["time_to_target"] for a, _ in pairs])
        return figures.ratios([a["rate"] or None for a, _ in pairs], [b["rate"] for _, b in pairs])

    def inside(self, block: str, side: str) -> tuple[int, int]:
        """Windows in the band, and windows that could be compared with it."""
        rows = [row for row in self.of(block, side) if row["band"]]
        return sum(1 for row in rows if row["band"]["inside"]), len(rows)


def quiet(row: dict[str, Any]) -> bool:
    return float(row["others"]) <= DISTURBED


def counts(row: dict[str, Any]) -> bool:
    return row["band"] is None or bool(row["band"]["inside"])


def verdict(ratio: float | None, least: float, inside: int, windows: int) -> str:
    if not windows:
        return "not measured"
    if 2 * inside <= windows:
        return "out of the band"
    if ratio is None:
        return "not measured"
    return "reached" if ratio >= least else "missed"


# --- tables


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [head, ["---", *["---:"] * (len(head) - 1)], *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def number(value: float | None, unit: str = "") -> str:
    if value is None:
        return "-"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}{unit}"


def spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return f"**{number(figures.middle(values))}** ({number(min(values))} to {number(max(values))})"


def bytes_of(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 1e6:,.1f} MB" if value >= 1e6 else f"{value / 1e3:,.1f} kB" if value >= 100 else "0"


def floor_table(results: Results) -> str:
    lines = []
    for floor in floors():
        found = results.ratio(floor.block, floor.side, floor.base, floor.time)
        inside, windows = results.inside(floor.block, floor.side)
        said = verdict(figures.middle(found), floor.least, inside, windows)
        goal = "as the rates" if floor.goal is None else f"{floor.goal:g}x"
        lines.append([floor.what, f"{floor.least:g}x", goal, spread(found), said])
    return table(["2 ps and 3 workers", "at least", "goal", "measured: median (lowest to highest)", ""], lines)


def block_table(results: Results, block: str) -> str:
    base = "SyncReplicas" if "sync" in block and results.of(block, "SyncReplicas") else "plain"
    if not results.of(block, base):
        base = "mwms"
    lines = []
    for side in results.sides(block):
        median = results.median
        inside, windows = results.inside(block, side)
        lines.append(
            [
                NAMES[side],
                number(median(block, side, lambda r: r["rate"] or None)),
                number(figures.middle(results.ratio(block, side, base)), "x"),
                number(median(block, side, lambda r: r["cpu_ms"])),
                bytes_of(median(block, side, lambda r: r["tcp_bytes"])),
                number(median(block, side, lambda r: r["time_to_target"])),
                number(figures.middle(results.ratio(block, side, base, True)), "x"),
                f"{inside}/{windows}" if windows else "-",
            ]
        )
    head = ["", "updates/s", f"over {NAMES[base].strip('*')}", "CPU ms/update", "TCP bytes/update", "s to the loss"]
    return table([*head, "faster there", "in the band"], lines)


def phase_table(results: Results) -> str:
    lines = []
    for block in results.blocks:
        for side in ("unix", "shm", "tcp", "tls", "zmq", "grpc", "sync"):
            rows = [row for row in results.of(block, side) if row["phases_ms"]]
            if not rows or (side not in ("unix", "shm", "sync") and not block.endswith("2+3")):
                continue
            batch, compute, exchange = (
                figures.middle(row["phases_ms"][name] for row in rows) or 0.0
                for name in ("batch", "compute", "exchange")
            )
            ps = figures.middle(row["busy_ms"]["ps"] for row in rows)
            own = figures.middle(row["busy_ms"]["workers"] for row in rows)
            busy = figures.middle(row["rate"] * row["cpu_ms"] / 1000 for row in rows)
            lines.append([f"{block} {side}", *(number(v) for v in (batch, compute, exchange, own, ps, busy))])
    head = ["ms", "batch", "compute", "exchange", "CPU of the workers, per update", "CPU of all ps, per update"]
    head.append("cores busy")
    return table(head, lines)


def left_table(results: Results) -> str:
    """What an update costs, and what it would be worth to be rid of all but the computing."""
    lines = []
    for name in WORKLOADS:
        block, side = f"{name} 2+3", usual(name)
        whole, alone = (results.median(block, s, lambda r: r["cpu_ms"]) for s in (side, "t0"))
        ps = results.median(block, side, lambda r: r["busy_ms"]["ps"])
        ratio = figures.middle(results.ratio(block, side, "plain"))
        if whole is None or alone is None or ps is None or ratio is None:
            continue
        plain = results.median(block, "plain", lambda r: r["cpu_ms"])
        most = ratio * whole / alone
        cells = [number(plain), number(whole), number(alone), number(ps), number(max(0.0, whole - alone - ps))]
        lines.append([f"{name}, {NAMES[side]}", *cells, number(ratio, "x"), number(most, "x")])
    head = ["processor ms per update", "TF v1", "Muster", "of it computing (T0)", "the ps", "the rest of the workers"]
    return table([*head, "measured", "with computing alone"], lines)


def usual(name: str) -> str:
    """How Muster itself carries the bytes of this model within a host, with two ps."""
    return "shm" if WORKLOADS[name].floats * 4 / 2 >= SHARE_FROM else "unix"


def variant_table(results: Results) -> str:
    lines = []
    for name in WORKLOADS:
        block = f"{name} 2+3"
        cells = [spread(results.ratio(block, ours, side)) for side in ("zmq", "grpc") for ours in ("shm", "unix")]
        lines.append([name, *cells])
    ways = ("shared memory", "Unix sockets")
    head = ["ours over", *(f"{other}; ours with {way}" for other in ("ZeroMQ", "gRPC") for way in ways)]
    return table(head, lines)


def link_table(told: dict[str, Any]) -> str:
    rows = told["rows"]
    lines = []
    for size in dict.fromkeys(row["size"] for row in rows):
        for way in dict.fromkeys(row["way"] for row in rows if row["size"] == size):
            own = [row for row in rows if row["size"] == size and row["way"] == way]
            trip, rate = (figures.middle(r[k] for r in own) for k in ("round_trip_us", "gb_per_s"))
            connecting = figures.middle(r["connect_ms"] for r in own)
            cells = [number(trip, " µs"), number(rate, " GB/s") if "MB" in size else "-", number(connecting, " ms")]
            lines.append([f"{size}, {way}", *cells])
    return table(["a step of one worker with one ps", "round trip", "both ways together", "connect and prove"], lines)


# --- the page


def page(results: Results, told: dict[str, Any], links: dict[str, Any] | None) -> str:
    machine = told["machine"]
    others = sorted(row["others"] for row in results.rows)
    disturbed = sum(1 for row in results.rows if not quiet(row))
    dense = "W4 sync 2+3"

    def rate(block: str, side: str) -> str:
        return number(results.median(block, side, lambda r: r["rate"] or None))

    models = table(
        ["", "units", "floats", "learning rate"],
        [[w.name, w.what, f"{w.floats:,}", f"{w.rate:g}"] for w in WORKLOADS.values()],
    )
    parts = [
        "# Performance",
        "<!-- Made by `python -m bench.table` from bench/results. Change that, not this. -->",
        INTRO,
        "## What has to hold",
        floor_table(results),
        LEFT,
        left_table(results),
        "## How it was measured",
        f"{machine['cores']} cores, Python {machine['python']}, TensorFlow {machine['tensorflow']} (CPU), NumPy "
        f"{machine['numpy']}, pyzmq {machine['pyzmq'] or '-'}, grpcio {machine['grpcio'] or '-'}; {machine['when']}. "
        f"The machine was shared. During a window other work took {figures.middle(others):.2f} cores in the median, "
        f"{others[0]:.2f} to {others[-1]:.2f}; rounds in which it took more than {DISTURBED:g} do not count for a "
        f"ratio while there are others ({disturbed} windows of {len(results.rows)} were so disturbed).",
        CONDITIONS,
        models,
        "## All sides",
        *(part for block in results.blocks for part in (f"### {block}", block_table(results, block))),
        "## Where a step goes",
        PHASES,
        phase_table(results),
        "## What carries the bytes",
        VARIANTS,
        variant_table(results),
        *(["### Unix sockets, TCP, TLS", LINKS, link_table(links)] if links else []),
        "## What we lose, and why",
        LOSE.format(
            t0=rate("W1 2+3", "t0"),
            unix=rate("W1 2+3", "unix"),
            alone=rate("W1 1+1", "unix"),
            w4=rate("W4 2+3", "shm"),
            w4t0=rate("W4 2+3", "t0"),
            sync4=rate(dense, "sync"),
            mwms4=rate(dense, "mwms"),
            ddp4=rate(dense, "ddp"),
            ddp1=rate("W1 sync 2+3", "ddp"),
            mwms1=rate("W1 sync 2+3", "mwms"),
            sync1=rate("W1 sync 2+3", "sync"),
        ),
        "## Again, on your machine",
        AGAIN,
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


INTRO = """
Training over Muster's parameter servers beside what else there is for TensorFlow, on one machine. Read ratios, not
rates: two sides are measured in turn within a minute, a ratio is taken within such a round, and the median of the
rounds is printed with the lowest and the highest. The machine drifts; differences below a quarter are noise.

Steps per second are half of the truth. In async training a worker's gradient belongs to values that are some updates
old, so an engine can buy steps with loss. Two guards: a window counts only if its loss, step by step, is that of one
process that takes each step on fresh values (the *band*), and beside the rate stands the time to a fixed loss.
"""

CONDITIONS = f"""
Every worker takes a fresh batch of {BATCH} digits each step (drawn from 4,000 real ones), plain SGD, the same start
weights, one thread within an operation and one between, on all sides. An update is a gradient that was applied (in
sync: a round). Workers start at one moment behind a barrier; a window is 3.5 s (5 s for W4), and begins with the start
weights. Plain TF v1 is between-graph replication with device filters and a recovery wait of 1 s, loss and global step
fetched each step. CPU is that of all processes of a side; bytes are those that its TCP sockets sent (Unix sockets and
shared memory send none: what goes over them is what Muster sends over TCP). TCP and TLS are between processes of this
machine, so that its cores pay for both ends; there Muster has its sockets use `reno`, whatever the system uses. W3
over TCP is close to its floor: before the last savings, three runs on one day came out at 2.04, 1.97 and 1.93.

Muster's own loops and T0 call their step as one operation, as `fit` does (`tf.raw_ops.StatefulPartitionedCall`), not
as a Python function, which costs more than W1's step itself. A v1 session makes no such call.

The band: at step n the loss must lie between the reference's at steps 0.9 n - {figures.LAG:g} and 1.1 n +
{figures.LAG:g}, within three standard errors. The target of the time to a fixed loss is what the slowest of TF v1 and
Muster reaches within 85 % of its window. Scripts that cannot pause (SyncReplicas, `fit`) are stopped and continued by
signals, train on from window to window, and their time to the loss is steps to it over their rate.
"""

LEFT = f"""
What is left towards the goals: with three workers on two cores the processors are nearly always busy (*cores busy*,
[below](#where-a-step-goes)), so an update becomes faster only where it costs less processor time. The table says where
that goes. Computing is what one process needs for the same step without any ps (T0); the ps receive, apply and send;
the rest is the workers' part of the exchange, and caches that five processes on two cores take from each other.
The last column is what the ratio would be if all but the computing were free: a goal above it cannot be reached.
Muster shares memory within a host for slabs of {SHARE_FROM / 1024:,.0f} kB and more.
"""

PHASES = """
Per step of a worker: gathering the batch, TensorFlow's call with the loss read, and the exchange with all ps. These are
times on the clock, with three workers and two ps on the cores that there are; the processor time beside them is what
was worked.
"""

VARIANTS = f"""
The same workers, slabs and updates over three ways to carry bytes within a host; the variants have no keys, no modes
and no recovery. The rule (design, section 2): one that comes within {CLOSE:g}x of ours on W1 to W4 replaces it.
"""

LINKS = """
One worker, one ps, a gradient there and values back, the update applied; nothing is computed.
"""

LOSE = """
- **A small model in one process.** T0 does {t0} W1 steps a second without any ps; one worker and one ps do {alone},
  three workers and two ps {unix}. Every step that leaves the process pays a round trip. Parameter servers are for more
  machines than one, for workers that come and go, and for data that do not fit one process: not for a softmax.
- **A dense model on few cores.** W4 moves 81 MB a step. T0 does {w4t0} steps a second on one core, three workers and
  two ps {w4} on both. On machines of their own, workers scale until the links of the ps are full.
- **Dense models on many GPUs belong on all-reduce**, which sends each gradient once around, while a ps takes one from
  every worker and sends the values to every worker: `--engine tensorflow --kind mwms`. There is no such machine behind
  this page. On one host without GPUs it is the other way round, since slabs in shared memory do not travel. Rounds a
  second with three workers, W4: Muster {sync4}, MultiWorkerMirrored {mwms4}, PyTorch DDP {ddp4}; W1: Muster {sync1},
  MultiWorkerMirrored {mwms1}, DDP {ddp1}.
- **TLS** costs every request and, above all, every byte: see the table above. `encrypt = false` is for closed networks.
"""

AGAIN = """
```
make bench                                    everything, about 25 minutes
python -m bench engines --quick               4 minutes
python -m bench engines --only "W1 2+3"       one block
BENCH_TORCH=/opt/torch/bin/python make bench  with PyTorch DDP, from an environment of its own
python -m bench.table                         this page
```

Raw values: `bench/results/engines.json` (a row a window, with its losses), `bench/results/ps_links.json`.
"""


def main() -> None:
    told = json.loads((RESULTS / "engines.json").read_text())
    links = RESULTS / "ps_links.json"
    results = Results(told["rows"])
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page(results, told, json.loads(links.read_text()) if links.exists() else None))
    print(floor_table(results))
    print(PAGE)


if __name__ == "__main__":
    main()
