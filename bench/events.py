"""1,000 fake workers through journal (one fsync a batch), state and policy: events per second.

    python -m bench.events

The workers report a step every half second of the fake clock; one in fifty dies once and comes back. What is timed is
the whole loop as a real run has it: the launcher only takes events from a queue.
"""

import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.record import Record
from muster.cluster import Cluster, Host, Run
from muster.events import Ready, Step
from muster.journal import Journal
from muster.launch.fake import FakeLauncher, What, says
from muster.plan import Script, Task, make_plan
from muster.supervise import supervise

WORKERS, SECONDS, RUNS = 1000, 60, 5


def script(task: Task, attempt: int) -> Iterator[tuple[float, What]]:
    """What one attempt of one task does."""
    dice = random.Random(f"{task.id} {attempt}")
    if task.role == "ps":
        return
    yield 0.5, says(Ready)
    dies = attempt == 1 and task.index and dice.random() < 0.02
    for n in range(2 * SECONDS):
        yield (
            1.0 + n / 2 + dice.randrange(10) / 20,
            says(Step, step=n * WORKERS + task.index, local=n, loss=1.0 / (n + 1)),
        )
        if dies and n == SECONDS:
            yield 1.3 + n / 2, 1
            return
    yield 2.0 + SECONDS, 0


def once(folder: Path, workers: int = WORKERS) -> dict[str, float]:
    """One run: events, seconds, events per second."""
    cluster = Cluster(
        hosts=[Host(name=f"h{n}", address=f"10.0.0.{n}") for n in range(20)],
        run=Run(ps=8, workers=workers, engine="tensorflow"),  # whose tasks need not join anything
    )
    plan = make_plan(cluster, Script("x.py"), "/")
    journal = Journal(folder / "journal.jsonl")
    launcher = FakeLauncher(script)
    began = time.perf_counter()
    state = supervise(plan, launcher, journal)
    seconds = time.perf_counter() - began
    events = sum(1 for _ in journal.path.open("rb"))
    assert state.ended is not None and state.ended.ok
    return {"events": events, "seconds": seconds, "events_per_s": events / seconds}


def main() -> None:
    record = Record("events", f"{WORKERS} fake workers through journal, state and policy")
    for _ in range(RUNS):
        with tempfile.TemporaryDirectory() as folder:
            record.add(once(Path(folder)))
    record.write("events_per_s")


if __name__ == "__main__":
    main()
