"""How a run went, on a screen: the line, the table, what stands below it, and the cause."""

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from muster.plan import Plan
from muster.summary import Summary


def clock(seconds: float) -> str:
    """Seconds as people say them: ``42 s``, ``3:05``, ``1:02:03``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


def gpu_cell(gpu: str, used: int | None) -> str:
    """``0 idle``, ``1 5.1 GiB``, or the GPU alone where nobody knows."""
    return gpu if used is None else f"{gpu} idle" if not used else f"{gpu} {used / (1 << 30):.1f} GiB"


WIDE = 96  # columns from which the table has room for log names


def headline(summary: Summary, plan: Plan) -> str:
    """How it went in one line: ``succeeded in 18 s, 480 steps, 95 steps/s, accuracy 0.968``."""
    rate = f", {summary.steps_per_s:,.0f} steps/s" if summary.steps_per_s else ""
    metrics = "".join(f", {name} {value:.4g}" for name, value in summary.metrics.items())
    served = {"ps"} if plan.run.kind != "pss" else {"ps", "worker"}  # they serve until they are told to go
    forced = sum(t.forced for t in summary.tasks if plan.tasks[t.task].role not in served)
    note = f" ({forced} task{'s' * (forced > 1)} had to be ended)" if summary.ok and forced else ""
    steps = f", {summary.steps:,} steps" if summary.steps else ""
    return f"{summary.result}{note} in {clock(summary.seconds)}{steps}{rate}{metrics}"


def footer(summary: Summary) -> list[str]:
    """What stands below the table: the batch in sync, samples, gradients that came too late, where the logs are."""
    told = []
    if summary.batches > 1 and summary.steps:
        told.append(
            f"sync: an update averages the batches of {summary.batches} workers, so the run's batch was "
            f"{summary.batches} times a worker's; the learning rate was left as set"
        )
    if summary.samples is not None:
        told.append(f"{summary.samples:,} samples trained on, {summary.samples_repeated:,} of them repeated")
    if dropped := sum(t.dropped for t in summary.tasks):
        told.append(f"{dropped:,} gradients came after their round was closed, and were dropped")
    for t in summary.tasks:
        if t.evaluations:
            many = f"{t.evaluations:,} checkpoint{'s' * (t.evaluations > 1)} evaluated"
            told.append(f"{t.task}: {many}, the last of them {Path(t.evaluated).name}")
    return told + ([f"logs: {summary.logs}/"] if summary.logs else [])


def end_table(summary: Summary, plan: Plan, width: int = 120) -> Table:
    """For each task its steps, restarts, exit, staleness and log; in ``width`` columns."""
    stale = any(t.staleness is not None for t in summary.tasks)
    gpus = any(t.gpus for t in summary.tasks)
    columns = ["task", "host", "state", "steps", "restarts", "exit"]
    columns += [*(["staleness"] if stale else []), *(["GPU"] if gpus else [])]
    columns += ["log"] if width >= WIDE else []
    table = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        right = column in ("steps", "restarts", "staleness")
        table.add_column(column, justify="right" if right else "left", no_wrap=column not in ("exit", "log"))
    for t in summary.tasks:
        cells = [t.task, t.host, t.phase, f"{t.steps:,}" if t.steps else "", str(t.restarts), t.exit]
        if stale:
            cells.append("" if t.staleness is None else f"{t.staleness:.1f} ({t.staleness_max})")
        if gpus:
            cells.append(", ".join(gpu_cell(gpu, used) for gpu, used in t.gpus.items()))
        table.add_row(
            *cells, *([Path(t.log).name] if width >= WIDE else []), style="red" if t.phase == "failed" else ""
        )
    return table


def tell(console: Console, summary: Summary, plan: Plan) -> None:
    """The user's own traceback first, then the table, then cause and remedy."""
    if summary.trace:
        console.print(summary.trace + "\n", markup=False, soft_wrap=True)
    console.print(headline(summary, plan), style="bold", soft_wrap=True)
    console.print(end_table(summary, plan, console.width))
    for text in footer(summary):
        console.print(text, style="dim", soft_wrap=True)
    for text in summary.warnings:
        console.print(f"warning: {text}", style="yellow", soft_wrap=True)
    if not summary.ok:
        rows = [("because", summary.because), ("try", summary.try_)]
        told = [summary.cause, *(f"  {label:<8}  {text}" for label, text in rows if text)]
        console.print("\n".join(told), markup=False, soft_wrap=True)
