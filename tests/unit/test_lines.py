import io
import re

import pytest
from making import after, dies, make, started, stepping
from rich.console import Console

from muster.events import Exited, RunEnded, Said, Started, Step, Warned
from muster.journal import Journal, Logs
from muster.launch import Output
from muster.launch.fake import FakeLauncher
from muster.summary import summarise
from muster.supervise import supervise
from muster.watch.chatter import Chatter, is_chatter
from muster.watch.console import console
from muster.watch.ending import clock, end_table, footer, headline
from muster.watch.lines import MOST_SHOWN, Budget, Lines, show
from muster.watch.terminal import Screen, current, phases


@pytest.mark.parametrize(
    ("chunks", "lines", "rest"),
    [
        ([b"one\ntwo\n"], ["one", "two"], []),
        ([b"o", b"ne\nt", b"wo"], ["one"], ["two"]),
        ([b"caf\xc3", b"\xa9\n"], ["café"], []),
        ([b"10%\r20%\r30%\n"], ["30%"], []),
        ([b"10%\r20%\r"], [], ["20%"]),
        ([b"\r\n\r"], [""], []),
        ([b"\n\n"], ["", ""], []),
    ],
)
def test_bytes_become_whole_lines(chunks, lines, rest):
    """SL-12."""
    cut = Lines()
    assert [line for chunk in chunks for line in cut.feed(chunk)] == lines
    assert cut.rest() == rest and cut.rest() == []


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b"\x1b[31mred\x1b[0m", "red"),
        (b"\x1b]0;title\x07text", "text"),
        (b"\x1b]8;;http://x\x1b\\link", "link"),
        (b"bell\x07\x00\x08", "bell"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"a\tb", "a       b"),
        (b"crlf\r", "crlf"),
    ],
)
def test_a_line_cannot_paint_the_screen(line, shown):
    """X12."""
    assert show(line) == shown


def test_a_long_line_is_cut_and_says_so():
    """SL-12."""
    shown = show(b"x" * 200_000)
    assert shown == "x" * MOST_SHOWN + " ... (200,000 bytes; the log has all)"
    assert show(b"x" * MOST_SHOWN) == "x" * MOST_SHOWN


def test_a_line_that_never_ends_does_not_fill_memory():
    cut = Lines()
    shown = [line for _ in range(64) for line in cut.feed(b"x" * 65536)]
    assert len(shown) >= 3 and all(len(line) < MOST_SHOWN + 100 for line in shown)


def test_one_task_cannot_drown_the_others():
    budget = Budget(rate=10.0, burst=20.0)
    assert sum(budget.allow(0.0) for _ in range(100)) == 20
    assert sum(budget.allow(1.0) for _ in range(100)) == 10
    assert budget.take_hidden() == 0  # not while it still floods
    assert budget.allow(3.0) and budget.take_hidden() == 170
    assert budget.take_hidden() == 0


# --- the screen

EIGHT = make(ps=1, workers=7)


def screen(plan=EIGHT, **more):
    console = Console(file=io.StringIO(), width=100, highlight=False)
    return Screen(console, plan, **more), console.file


def test_eight_tasks_that_print_long_lines_and_bars_never_share_a_line(tmp_path):
    """SL-12: each file exact, the merged view line-clean."""
    letters = dict(zip(EIGHT.tasks, "abcdefgh", strict=True))
    printed = {
        name: b"".join(b"\r%d%% " % n + letter.encode() * 500 for n in range(101)) + b"\n" + letter.encode() * 200_000
        for name, letter in letters.items()
    }

    def script(task, attempt):
        data = printed[task.id]
        chunks = [(0.01 * n, data[at : at + 4096]) for n, at in enumerate(range(0, len(data), 4096))]
        return [*chunks, (10.0 if task.id == "worker/0" else 9.0 if task.role == "worker" else 1e6, 0)]

    watcher, file = screen()
    logs = Logs(tmp_path, EIGHT)
    supervise(EIGHT, FakeLauncher(script), Journal(tmp_path / "j"), logs=logs, watchers=[watcher])
    watcher.close()
    logs.close()
    for name, task in EIGHT.tasks.items():
        assert (tmp_path / task.log).read_bytes() == printed[name]
    shown = file.getvalue().splitlines()
    for line in shown:
        who, bar, text = line.partition(" | ")
        if bar and who.strip() in letters:
            assert set(re.sub(r"100% | \.\.\. .*", "", text)) <= {letters[who.strip()]}
    assert sum(line.endswith("(200,000 bytes; the log has all)") for line in shown) == 8
    assert sum("100% " in line for line in shown) == 8
    assert "\x1b" not in file.getvalue()


def test_hidden_lines_are_counted():
    watcher, file = screen()
    watcher.output(Output("worker/0", 1, b"x\n" * 5000))
    shown = file.getvalue().count("| x")
    assert 2000 <= shown < 5000
    watcher.close()
    assert f"... {5000 - shown:,} lines not shown; the log has them" in file.getvalue()


@pytest.mark.parametrize(
    ("lines", "shown"), [("some", ["hello"]), ("all", ["2026-01-01 10:00:00.1: I tensor", "hello"]), ("none", [])]
)
def test_tensorflows_own_notices_are_shown_where_they_are_asked_for(lines, shown):
    watcher, file = screen(lines=lines)
    watcher.output(Output("worker/0", 1, b"2026-01-01 10:00:00.1: I tensor\nhello\n"))
    assert [line.partition("| ")[2] for line in file.getvalue().splitlines()] == shown


@pytest.mark.parametrize(
    ("line", "chatter"),
    [
        ("2026-01-01 10:00:00.123456: W tensorflow/core", True),
        ("I0000 00:00:1720000000.1 123 cuda.cc:12] x", True),
        ("2026-01-01 10:00:00.123456: E tensorflow/core", False),
        ("E0000 00:00:1720000000.1 123 cuda.cc:12] x", False),
        ("To enable the following instructions: AVX2", True),
        ("Epoch 1/5", False),
    ],
)
def test_errors_are_no_chatter(line, chatter):
    """SL-13."""
    assert is_chatter(line) is chatter


def test_news_are_told_in_words():
    watcher, file = screen()
    state = after(EIGHT, started(EIGHT))
    for event in [
        dies("worker/1", 3.0, trace="T\nValueError: bad"),
        Started(4.0, "worker/1", 2),
        Warned(5.0, "careful"),
        Said(5.0, "worker/2", 1, "loss is nan"),
    ]:
        state.apply(event)
        watcher.event(event, state)
    told = file.getvalue()
    for words in [
        "worker/1 on here failed (exit 1): ValueError: bad",
        "worker/1 is started again (attempt 2)",
        "warning: careful",
        "worker/2: loss is nan",
    ]:
        assert words in told


def test_the_last_words_of_a_task_stand_before_its_failure():
    watcher, file = screen()
    state = after(EIGHT, started(EIGHT))
    watcher.output(Output("worker/1", 1, b"no newline at the end"))
    state.apply(dies("worker/1", 3.0))
    watcher.event(dies("worker/1", 3.0), state)
    assert file.getvalue().index("no newline") < file.getvalue().index("failed")


def test_markup_in_a_line_is_text():
    watcher, file = screen()
    watcher.output(Output("worker/0", 1, b"[bold]x[/bold] [/nope] :smile:\n"))
    assert "[bold]x[/bold] [/nope] :smile:" in file.getvalue()


def test_the_end_table_says_what_had_to_be_ended():
    """SD-02."""
    plan = make(ps=1, workers=2)
    from muster.events import Stopping

    ended = [Exited(5.0, "worker/0", 1, 0)]
    for name in ("worker/1", "ps/0"):
        ended += [Stopping(15.0, name, 1), Exited(15.0, name, 1, -15)]
    state = after(plan, started(plan), stepping(plan), ended, RunEnded(16.0, True))
    console = Console(file=io.StringIO(), width=120)
    summary = summarise(state, plan, 16.0, "/runs/x")
    console.print(end_table(summary, plan))
    assert headline(summary, plan).startswith("succeeded (1 task had to be ended) in 16 s")
    assert footer(summary) == ["logs: /runs/x/logs/"] and "worker-1.log" in console.file.getvalue()


@pytest.mark.parametrize(("spare", "times"), [(0, 3), (1, 2)])
def test_the_end_of_a_sync_run_tells_how_large_its_batch_was(spare, times):
    plan = make(engine="muster", mode="sync", workers=3, spare=spare)
    told = footer(summarise(after(plan, started(plan), stepping(plan), RunEnded(16.0, True)), plan, 16.0))
    assert f"the run's batch was {times} times a worker's; the learning rate was left as set" in told[0]


def test_the_end_table_fits_on_a_narrow_terminal():
    plan = make(ps=2, workers=3)
    state = after(plan, started(plan), stepping(plan), Exited(5.0, "worker/0", 1, 0), RunEnded(16.0, True))
    console = Console(file=io.StringIO(), width=80)
    console.print(end_table(summarise(state, plan, 16.0, "/runs/x"), plan, 80))
    rows = [line.split() for line in console.file.getvalue().splitlines()]
    assert [row[0] for row in rows if row and "/" in row[0]] == list(plan.tasks)


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.4, "0 s"), (42, "42 s"), (60, "1:00"), (185, "3:05"), (3723, "1:02:03")]
)
def test_seconds_as_people_say_them(seconds, said):
    assert clock(seconds) == said


def test_the_current_step_is_that_of_the_newest_reports():
    """FR-02: after a setback the screen shows where the run is, not where it was."""
    plan = make(ps=1, workers=2)
    state = after(plan, started(plan), stepping(plan, 1.0, 398), Step(50.0, "worker/0", 1, 66, 70))
    assert current(state) == 66
    assert phases(after(plan, started(plan)[:2])) == "ps/0 running; worker/0, worker/1 waiting"


def test_the_lines_that_belong_to_a_notice_go_with_it():
    notice = "I0000 00:00:1796047549.494633   11998 grpc_server_lib.cc:467] Server config: device_count {"
    lines = [
        notice,
        '  key: "CPU"',
        "  value: 1",
        "}",
        "gpu_options {",
        "  experimental {",
        "  }",
        "}",
        "",
        "loss: 0.3",
        "}",
    ]
    chatter = Chatter()
    assert [line for line in lines if not chatter.takes(line)] == ["loss: 0.3", "}"]


def test_what_is_printed_is_no_markup_and_no_emoji(capsys):
    """A folder of the user's, an error with a bracket in it."""
    out = console()
    for text in ("KeyError: '[/a]'", "/data/[old]/x", "fd00::100:1"):
        out.print(text, style="yellow", soft_wrap=True)
    assert capsys.readouterr().out == "KeyError: '[/a]'\n/data/[old]/x\nfd00::100:1\n"


def test_the_terminal_of_one_task_shows_a_character_that_comes_in_two_pieces():
    watcher, file = screen(only="worker/0")
    for piece in ("训".encode()[:1], "训".encode()[1:]):
        watcher.output(Output("worker/0", 1, piece))
    watcher.output(Output("worker/1", 1, b"nobody sees this"))
    assert file.getvalue() == "训"
