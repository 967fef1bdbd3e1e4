"""The screen of a run: every task's lines as they come, and a bar with steps/s, loss and time left.

On a terminal the bar stands below the lines. Anywhere else (a file, CI) it is a plain line every few seconds, and there
are no colours.
"""

import codecs
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from muster.events import Concluded, Evaluating, Event, Exited, HostLost, Said, Started, Stopping, Warned
from muster.launch import Output
from muster.plan import Plan
from muster.state import Phase, State
from muster.summary import said_code
from muster.waits import Wait, what_it_evaluates
from muster.watch.chatter import Chatter
from muster.watch.ending import clock
from muster.watch.lines import Budget, Lines

COLOURS = ("cyan", "green", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta", "bright_blue")
PS_COLOURS = ("yellow", "bright_yellow")
PLAIN_EVERY = 5.0
RATE_WINDOW = 10.0


class Screen:
    """A Watcher. ``only``: show just this task's lines, raw, since it has the terminal."""

    def __init__(self, console: Console, plan: Plan, only: str = "", lines: str = "some") -> None:
        self._console, self._plan, self._only, self._show_lines = console, plan, only, lines
        self._raw = codecs.getincrementaldecoder("utf-8")("replace")  # a character may come in two pieces
        self.chatter = 0
        self._lines = {name: Lines() for name in plan.tasks}
        self._chatter = {name: Chatter() for name in plan.tasks}
        self._budgets = {name: Budget() for name in plan.tasks}
        self._width = max(map(len, self._names().values()))
        self._rates: deque[tuple[float, int]] = deque()
        self._drawn = -1.0
        self._setback_count = 0
        self._waits_due = 0.0
        self._live: Live | None = None
        if console.is_terminal and not only:
            self._live = Live(
                console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
            )
            self._live.start()

    def _names(self) -> dict[str, str]:
        many = len(self._plan.hosts) > 1
        return {t.id: f"{t.id}@{t.host}" if many else t.id for t in self._plan.tasks.values()}

    # --- lines

    def output(self, output: Output) -> None:
        if self._only:
            if output.task == self._only:
                self._console.file.write(self._raw.decode(output.data))
                self._console.file.flush()
        elif self._show_lines != "none":
            for line in self._lines[output.task].feed(output.data):
                self._line(output.task, line)

    def _line(self, task: str, line: str) -> None:
        if self._show_lines == "some" and self._chatter[task].takes(line):
            self.chatter += 1
        elif self._budgets[task].allow(time.monotonic()):
            self._print(task, line)

    def _print(self, task: str, line: str, style: str = "") -> None:
        told = Text(
            f"{self._names()[task]:<{self._width}} | ",
            style=self._colour(task),
            no_wrap=True,
            overflow="ignore",
            end="",
        )
        told.append(line, style=style or "default")
        self._console.print(told, soft_wrap=True, highlight=False)

    def _colour(self, task: str) -> str:
        t = self._plan.tasks[task]
        colours = PS_COLOURS if t.role == "ps" else COLOURS
        return colours[t.index % len(colours)]

    def note(self, text: str, style: str = "bold") -> None:
        """A line of Muster's own."""
        self._console.print(Text(f"{'muster':<{self._width}} | {text}", style=style), soft_wrap=True, highlight=False)

    # --- events

    def event(self, event: Event, state: State) -> None:
        match event:
            case Started(_, task, attempt) if attempt > 1:
                self.note(f"{task} is started again (attempt {attempt})")
            case Exited():
                self._exited(event, state)
            case Stopping(_, task, _, why) if why not in ("the run is done",):
                self.note(f"ending {task}: {why}", "dim")
            case Warned(_, text):
                self.note(f"warning: {text}", "bold yellow")
            case Said(_, task, _, text):
                self.note(f"{task}: {text}", "dim")
            case Evaluating(_, task, _, checkpoint) if checkpoint:
                self.note(f"{task} evaluates {Path(checkpoint).name}", "dim")
            case Concluded(_, task, _, step):
                ended = f"training ended at step {step:,}" if step else "training has ended"
                self.note(f"{ended}; {task} has {self._plan.run.last_evaluation:g} s for the last checkpoint", "dim")
            case HostLost(_, host, why):
                self.note(f"{host} is lost: {why}", "bold red")

    def _exited(self, event: Exited, state: State) -> None:
        for line in self._lines[event.task].rest():
            self._line(event.task, line)
        if event.code != 0 and not state.tasks[event.task].forced:
            said = f": {event.error}" if event.error else ""
            self.note(
                f"{event.task} on {self._plan.tasks[event.task].host} failed ({said_code(event.code)}){said}",
                "bold red",
            )
        if event.swept:
            self.note(f"{event.task} had left {event.swept} process(es) behind; they are ended", "dim")

    def tick(self, state: State, now: float, waiting: Sequence[Wait]) -> None:
        for task, budget in self._budgets.items():
            if hidden := budget.take_hidden():
                self._print(task, f"... {hidden:,} lines not shown; the log has them", "dim")
        self._rate(state, now)
        if self._live and now - self._drawn >= 0.1:
            self._drawn = now
            self._live.update(self._bar(state, now, waiting), refresh=True)
        elif not self._live and not self._only:
            self._plain(state, now, waiting)

    def _plain(self, state: State, now: float, waiting: Sequence[Wait]) -> None:
        if waiting and now >= self._waits_due:
            self._waits_due = now + PLAIN_EVERY
            for wait in waiting[:3]:
                self.note(wait.text(now))
        if state.low >= 0 and now - self._drawn >= PLAIN_EVERY:
            self._drawn = now
            self.note("   ".join(self._figures(state, now)))

    # --- the bar

    def _rate(self, state: State, now: float) -> None:
        if len(state.setbacks) > self._setback_count:
            self._setback_count = len(state.setbacks)
            self._rates.clear()
        if state.low >= 0:
            self._rates.append((now, current(state)))
            while now - self._rates[0][0] > RATE_WINDOW:
                self._rates.popleft()

    def _speed(self) -> float | None:
        if len(self._rates) < 2:
            return None
        (t0, s0), (t1, s1) = self._rates[0], self._rates[-1]
        return (s1 - s0) / (t1 - t0) if t1 - t0 > 0.5 and s1 > s0 else None

    def _figures(self, state: State, now: float) -> list[str]:
        step, speed = current(state), self._speed()
        told = [f"step {step:,}" + (f" of {state.total:,}" if state.total else "")]
        if speed:
            told.append(f"{speed:,.0f} steps/s" if speed >= 10 else f"{speed:.2f} steps/s")
        losses = [(t.stepped, t.loss) for t in state.tasks.values() if t.loss is not None]
        if losses:  # of those that reported just now: an older one tells of older parameters
            fresh = [loss for at, loss in losses if at >= max(losses)[0] - 1.0]
            told.append(f"loss {sum(fresh) / len(fresh):.4f}")
        if speed and state.total > step:
            told.append(f"{clock((state.total - step) / speed)} left")
        return told

    def _bar(self, state: State, now: float, waiting: Sequence[Wait]) -> Table:
        grid = Table.grid(padding=(0, 1))
        if state.low < 0:
            grid.add_row(Text(f"{clock(now)}  starting: {phases(state)}", style="bold"))
        else:
            bar = ProgressBar(
                total=max(1, state.total or 1),
                completed=current(state),
                width=30,
                pulse=not state.total,
                animation_time=now,
            )
            row = Table.grid(padding=(0, 2))
            row.add_row(bar, *(Text(figure) for figure in self._figures(state, now)))
            grid.add_row(row)
        for task in self._plan.of("evaluator"):
            t = state.tasks[task.id]
            if t.phase is Phase.RUNNING and t.checkpoint is not None:
                grid.add_row(Text(f"{task.id} {what_it_evaluates(t).removeprefix('it ')}", style="dim"))
        for wait in waiting[:4]:
            grid.add_row(Text(wait.text(now), style="yellow"))
        return grid

    def close(self) -> None:
        if self._live:
            self._live.stop()
            self._live = None
        for task, lines in self._lines.items():
            for line in lines.rest():
                self._line(task, line)
        for task, budget in self._budgets.items():
            if budget.hidden:
                self._print(task, f"... {budget.hidden:,} lines not shown; the log has them", "dim")


def current(state: State) -> int:
    """The global step now: the newest report of any living task, or the highest ever."""
    steps = [(t.stepped, t.step) for t in state.tasks.values() if t.step >= 0]
    return max(step for at, step in steps if at >= max(steps)[0] - 1.0) if steps else max(state.high, 0)


def phases(state: State) -> str:
    counts: dict[str, list[str]] = {}
    for name, t in state.tasks.items():
        counts.setdefault(t.phase.value, []).append(name)
    return "; ".join(f"{', '.join(names) if len(names) < 6 else len(names)} {phase}" for phase, names in counts.items())
