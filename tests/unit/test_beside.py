"""The evaluator, a task beside the training: where it is put, what it is told, how it ends; and nobody needs it."""

import io
import json

import pytest
from making import after, dies, make, read, started, stepping
from rich.console import Console

from muster.check.examine import job, wanted
from muster.check.findings import needs
from muster.cluster import Host
from muster.errors import Refused
from muster.events import (
    Conclude,
    Concluded,
    Evaluating,
    Exited,
    Finish,
    GpuUse,
    Listening,
    Mismatch,
    Ready,
    Release,
    RunEnded,
    Spawned,
    Start,
    Started,
    Step,
    Stop,
    StopAsked,
    Stopping,
    Total,
    Waiting,
    Warned,
)
from muster.idle import idle
from muster.journal import Journal
from muster.launch.fake import FakeLauncher, says
from muster.placement import Facts
from muster.policy import Verdict, decide, given_up, verdict, wake
from muster.sources import from_tf_config, to_toml
from muster.state import Phase
from muster.summary import summarise
from muster.supervise import supervise
from muster.waits import waits, what_it_evaluates
from muster.watch.ending import end_table, footer, headline
from muster.watch.terminal import Screen

PLAN = make(ps=1, workers=2, evaluator=True)
ME = "evaluator/0"


def act(state, now, plan=PLAN):
    return list(decide(state, now, plan))


# --- the cluster file


@pytest.mark.parametrize(
    ("run", "named"),
    [
        ({"evaluator": True, "engine": "muster"}, ["evaluator goes with the tensorflow engine", "the chief validates"]),
        ({"evaluator": ["a:1", "b:1"], "kind": "v1"}, ["there are 2 evaluators", "a:1, b:1"]),
        ({"evaluator": "a:70000", "kind": "v1"}, ["70000"]),
        ({"evaluator": "a:1", "kind": "v1", "ps": 1}, ["exact seats for evaluator, but a count for ps"]),
        ({"evaluator": "a:1", "ps": ["a:1"], "workers": ["b:1"]}, ["ps/0 and evaluator/0 have the same address"]),
        ({"evaluator_hosts": "a:1"}, ["evaluator_hosts -> evaluator"]),
    ],
)
def test_what_cannot_be_is_refused_by_name(run, named):
    with pytest.raises(Refused) as refused:
        read({"run": run})
    assert all(words in str(refused.value) for words in named), str(refused.value)


def test_an_engine_that_nobody_named_is_muster_and_refuses_it_in_the_plan():
    """Not in the file: --kind may still come on the command line."""
    assert read({"run": {"evaluator": True}}).run.evaluator is True
    with pytest.raises(Refused, match="goes with the tensorflow engine"):
        make(engine=None, evaluator=True)
    assert ME in make(engine=None, kind="v1", evaluator=True).tasks


SPEC = {"ps": ["a:1"], "worker": ["b:1", "c:1"]}


@pytest.mark.parametrize(
    ("cluster", "task", "evaluator"),
    [
        ({**SPEC, "evaluator": ["d:1"]}, {"type": "worker", "index": 0}, ["d:1"]),
        ({**SPEC, "evaluator": ["d:1"]}, {"type": "evaluator", "index": 0}, ["d:1"]),
        (SPEC, {"type": "evaluator", "index": 0}, True),  # as TensorFlow has it
        (SPEC, {"type": "worker", "index": 0}, None),
    ],
)
def test_an_evaluator_of_a_tf_config_is_taken(cluster, task, evaluator):
    found = from_tf_config(json.dumps({"cluster": cluster, "task": task}))
    assert found.raw["run"].get("evaluator") == evaluator and found.task == (task["type"], task["index"])
    read({**found.raw, "run": {**found.raw["run"], "kind": "v1"}})
    assert ("evaluator = " in to_toml(found.raw)) is (evaluator is not None)


def test_a_second_evaluator_of_a_tf_config_is_none():
    with pytest.raises(Refused, match="there is no evaluator/1"):
        from_tf_config(json.dumps({"cluster": SPEC, "task": {"type": "evaluator", "index": 1}}))


# --- the plan


def test_it_is_in_nobodys_cluster_and_has_no_port():
    """As TensorFlow documents it: the evaluator is no part of the training cluster."""
    for kind in ("v1", "pss", "mwms"):
        plan = make(kind=kind, evaluator=True, role_flags=True)
        for task in plan.tasks.values():
            told = json.loads(task.env["TF_CONFIG"])
            assert "evaluator" not in told["cluster"] and told["cluster"]["worker"]
        mine = plan.tasks[ME]
        assert json.loads(mine.env["TF_CONFIG"])["task"] == {"type": "evaluator", "index": 0}
        assert mine.argv[-2:] == ("--job_name=evaluator", "--task_index=0")
        assert (mine.listens, mine.port, mine.where) == (False, 0, "127.0.0.1")
        assert mine not in plan.workers and plan.chief != ME and list(plan.tasks)[-1] == ME
        assert json.loads(mine.env["MUSTER_CLUSTER"])["evaluator"] is True


ONE = [Host("a", "10.0.0.1")]
TWO = [Host("a", "10.0.0.1"), Host("b", "10.0.0.2")]


@pytest.mark.parametrize(
    ("hosts", "gpus", "run", "host", "gets", "why"),
    [
        (ONE, [()], {}, "a", (), "one host"),
        (ONE, [(0, 1, 2)], {"gpus_per_worker": 1}, "a", (2,), "a GPU that no worker has"),
        (ONE, [(0, 1, 2)], {}, "a", (2,), "a GPU that no worker has"),  # one each, and one is left over
        (ONE, [(0, 1, 2, 3)], {}, "a", (), "the workers have the GPUs, so it evaluates on the CPU"),
        (ONE, [(0, 1)], {"gpus_per_worker": 1}, "a", (), "the workers have the GPUs"),
        (ONE, [(0, 1)], {"gpus_per_worker": 0}, "a", (), "one host"),
        (ONE, [tuple(range(8))], {"gpus_per_worker": 2}, "a", (4, 5), "a GPU that no worker has"),
        (ONE, [tuple(range(5))], {"gpus_per_worker": 2}, "a", (4,), "a GPU that no worker has"),
        (TWO, [(0, 1), ()], {"gpus_per_worker": 1}, "b", (), "fewest tasks here; the workers have the GPUs"),
        (TWO, [(0, 1, 2), (0,)], {"gpus_per_worker": 1, "workers": 3}, "a", (2,), "a GPU that no worker has"),
        (TWO, [(), ()], {"ps": 1, "workers": 2}, "b", (), "fewest tasks here"),
        ([Host("a", "10.0.0.1", slots=9), Host("b", "10.0.0.2", slots=1)], [(), ()], {}, "a", (), "one host"),
    ],
)
def test_it_takes_what_is_left_and_never_a_workers_gpu(hosts, gpus, run, host, gets, why):
    facts = {h.name: Facts(gpus=found) for h, found in zip(hosts, gpus, strict=True)}
    plan = make(hosts, facts, "ssh", evaluator=True, **{"ps": 1, "workers": 2, **run})
    mine = plan.tasks[ME]
    assert (mine.host, mine.gpus) == (host, gets) and why in mine.why
    assert mine.env["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, gets))
    assert not [t for t in plan.workers if t.host == host and set(t.gpus) & set(gets)]


def test_names_of_one_machine_share_its_gpus():
    facts = {"a": Facts(gpus=(0,)), "b": Facts(gpus=(0,))}
    plan = make([Host("a", "127.0.0.1"), Host("b", "127.0.0.2")], facts, ps=1, workers=1, evaluator=True)
    assert (plan.tasks["worker/0"].gpus, plan.tasks[ME].gpus) == ((0,), ())


def test_a_host_that_has_no_gpu_left_is_not_made_to_have_one():
    """The file promises one, and the machine shows none."""
    hosts = [Host("a", "10.0.0.1"), Host("b", "10.0.0.2", gpus=[5])]
    seats = {"ps": ["a:1"], "workers": ["a:2"], "evaluator": True}
    assert make(hosts, {"b": Facts(gpus=())}, "ssh", **seats).tasks[ME].gpus == ()
    assert make(hosts, {"b": Facts(gpus=(5,))}, "ssh", **seats).tasks[ME].gpus == (5,)


def test_it_needs_a_slot_and_no_port():
    with pytest.raises(Refused) as refused:
        make([Host("a", "10.0.0.1", slots=3)], launcher="ssh", ps=1, workers=2, evaluator=True)
    assert "no host has room for the evaluator" in str(refused.value) and "a has 3" in refused.value.because
    assert ME in make(ps=1, workers=2, ports="20000-20002", evaluator=True).tasks


def test_exact_seats_name_its_host_and_only_that():
    plan = make(ps=["h0:2222"], workers=["h1:7"], evaluator=["h2:8"])
    assert [(t.id, t.where) for t in plan.tasks.values()] == [("ps/0", "h0:2222"), ("worker/0", "h1:7"), (ME, "h2")]
    assert plan.exact and plan.tasks[ME].why == "the file says so"
    assert [host.name for host in plan.hosts] == ["h0", "h1", "h2"]


def test_beside_exact_seats_it_goes_where_fewest_tasks_are():
    plan = make(ps=["h0:1"], workers=["h0:2", "h1:1"], evaluator=True)
    assert plan.tasks[ME].host == "h1"
    idle_host = make([*TWO, Host("c", "10.0.0.3")], None, "ssh", ps=["a:1"], workers=["b:1"], evaluator=True)
    assert idle_host.tasks[ME].host == "c" and [h.name for h in idle_host.hosts] == ["a", "b", "c"]


def test_on_another_host_than_the_chief_it_needs_a_folder_that_both_see():
    apart = make(TWO, None, "ssh", ps=1, workers=1, evaluator=True)
    assert apart.tasks[ME].host != apart.tasks["worker/0"].host
    said = f"{ME} on {apart.tasks[ME].host} reads what worker/0 on {apart.tasks['worker/0'].host} saves"
    assert any(said in note for note in apart.notes)
    quiet = make(TWO, None, "ssh", ps=1, workers=1, evaluator=True, checkpoints="/shared")
    assert not any("reads what" in note for note in (*quiet.notes, *PLAN.notes))


def test_it_leaves_the_workers_their_cores():
    facts = {"here": Facts(cores=8)}
    plan = make(facts=facts, ps=1, workers=3, evaluator=True)
    threads = {t.id: t.env.get("TF_NUM_INTRAOP_THREADS") for t in plan.tasks.values()}
    assert threads == {"ps/0": None, "worker/0": "2", "worker/1": "2", "worker/2": "2", ME: "2"}
    assert make(facts=facts, ps=1, workers=1, evaluator=True).tasks[ME].env["TF_NUM_INTRAOP_THREADS"] == "4"


# --- what is true


def evaluating(*checkpoints, at=1.0, attempt=1):
    return [Evaluating(at, ME, attempt, checkpoint) for checkpoint in checkpoints]


def test_its_failures_and_its_steps_are_its_own():
    """The first failure is the cause; this one caused nothing."""
    told = [Step(2.0, ME, 1, 9000, 4), Total(2.0, ME, 1, 9000), Mismatch(2.5, ME, 1, "worker/0"), dies(ME, 3.0)]
    state = after(PLAN, started(PLAN), stepping(PLAN), told)
    assert (state.cause, state.high, state.total, state.tasks[ME].steps) == (None, 5, 0, 0)
    state.apply(dies("worker/1", 4.0))
    assert state.cause.task == "worker/1"


def test_what_it_is_about_is_known_and_forgotten_with_the_attempt():
    state = after(PLAN, started(PLAN), evaluating("", "/x/model.ckpt-100"), Concluded(2.0, ME, 1, 300))
    mine = state.tasks[ME]
    assert (mine.checkpoint, mine.evaluations, mine.concluded) == ("/x/model.ckpt-100", 1, 300)
    for event in [dies(ME, 3.0), Started(4.0, ME, 2), Spawned(4.0, ME, 2, 1)]:
        state.apply(event)
    assert (mine.checkpoint, mine.evaluations, mine.evaluated, mine.concluded) == (None, 1, "/x/model.ckpt-100", None)


# --- what to do


def test_it_starts_with_the_others_and_comes_back_alone():
    assert Start(ME, 1) in act(after(PLAN), 0.0)
    state = after(PLAN, started(PLAN), dies(ME, 5.0))
    assert act(state, 5.0) == [] and wake(state, 5.0, PLAN) == 6.0 and act(state, 6.0) == [Start(ME, 2)]


def test_when_all_the_others_go_back_it_goes_on():
    state = after(PLAN, started(PLAN), stepping(PLAN), dies("ps/0", 5.0))
    assert {action.task for action in act(state, 5.0)} == {"worker/0", "worker/1"}
    for name in ("worker/0", "worker/1"):
        state.apply(Stopping(5.0, name, 1)), state.apply(Exited(6.0, name, 1, -15))
    assert act(state, 7.0) == [Start("ps/0", 2), Start("worker/0", 2), Start("worker/1", 2)]


def test_it_comes_back_while_the_others_are_on_their_way_out():
    state = after(PLAN, started(PLAN), dies(ME, 1.0), dies("ps/0", 5.0))
    assert Start(ME, 2) in act(state, 5.0)


def lost(times, first=1.0, gap=5.0, trace=False, code=1):
    told = []
    for attempt in range(1, times + 1):
        at = first + gap * attempt
        told += [dies(ME, at, attempt, code, f"E{'' if trace else attempt}")]
        told += [Started(at, ME, attempt + 1), Spawned(at, ME, attempt + 1, 1)] if attempt < times else []
    return told


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (lost(1), None),
        (lost(3), None),
        (lost(4), Verdict.SPENT),
        (lost(2, trace=True), Verdict.SAME),
        (lost(2, gap=1000.0, trace=True), None),
        (lost(1, code=2), Verdict.REFUSED),
        ([*evaluating("a"), *lost(1, code=2)], None),  # it has worked: not the bad request of a moment ago
    ],
)
def test_out_of_its_budget_it_is_given_up_and_training_goes_on(told, why):
    state = after(PLAN, started(PLAN), stepping(PLAN), told)
    assert given_up(state.tasks[ME], PLAN.run) is why
    assert verdict(state, PLAN) is None
    assert act(state, 1e5) == ([Start(ME, state.tasks[ME].attempt + 1)] if why is None else [])


def test_failures_without_progress_are_those_of_training():
    plan = make(ps=1, workers=2, evaluator=True, retries=9)
    state = after(plan, started(plan), stepping(plan), lost(5))
    assert state.tasks[ME].stuck >= 3 and verdict(state, plan) is None


def test_the_start_barrier_neither_counts_nor_holds_it():
    ready = [started(PLAN), Ready(1.0, "worker/0", 1), Ready(2.0, "worker/1", 1)]
    assert act(after(PLAN, *ready), 2.0) == [Release("worker/0"), Release("worker/1")]
    alone = after(PLAN, started(PLAN), Ready(1.0, ME, 1))
    assert act(alone, 1.0) == [Release(ME)]
    waiting = after(PLAN, started(PLAN), Ready(1.0, ME, 1), Ready(40.0, "worker/0", 1))
    assert Release("worker/0") not in act(waiting, 70.0)  # 60 s count from its own arrival


DONE = [started(PLAN), stepping(PLAN, step=300), Exited(5.0, "worker/0", 1, 0), Exited(5.0, "worker/1", 1, 0)]
PS_GONE = [Stopping(5.0, "ps/0", 1), Exited(5.5, "ps/0", 1, -15)]


def test_when_training_has_ended_it_is_told_once_and_the_ps_need_not_stay():
    """SD-03."""
    assert act(after(PLAN, *DONE), 5.0) == [Conclude(ME, 300), Stop("ps/0", "the run is done", 5.0)]
    told = after(PLAN, *DONE, PS_GONE, Concluded(5.0, ME, 1, 300))
    assert act(told, 6.0) == [] and wake(told, 20.0, PLAN) == 65.0
    told.apply(Exited(20.0, ME, 1, 0))
    assert act(told, 20.0) == [Finish(True)]


def test_one_that_does_not_end_is_ended_and_the_run_succeeds():
    """SD-02, SD-03."""
    told = [*DONE, PS_GONE, Concluded(5.0, ME, 1, 300)]
    said = "training ended 60 s ago, and it has not ended by itself"
    assert act(after(PLAN, *told), 64.9) == [] and act(after(PLAN, *told), 65.0) == [Stop(ME, said, 5.0)]
    told += [Stopping(65.0, ME, 1, said)]
    assert act(after(PLAN, *told), 66.0) == []
    assert act(after(PLAN, *told, Exited(67.0, ME, 1, -15)), 67.0) == [Finish(True)]


def test_it_is_not_told_while_the_chief_may_still_save():
    """SD-05: first-worker."""
    plan = make(ps=1, workers=2, evaluator=True, done="first-worker", settle=10.0)
    first = [started(plan), stepping(plan, step=300), Exited(5.0, "worker/1", 1, 0)]
    assert act(after(plan, *first), 6.0, plan) == []
    assert act(after(plan, *first), 15.0, plan) == [Stop("worker/0", "the run is done", 5.0)]
    gone = [Stopping(15.0, "worker/0", 1), Exited(16.0, "worker/0", 1, -15)]
    assert Conclude(ME, 300) in act(after(plan, *first, *gone), 16.0, plan)
    assert wake(after(plan, *first, *gone, PS_GONE, Concluded(16.0, ME, 1, 300)), 17.0, plan) == 76.0


def test_while_the_chief_exports_it_goes_on():
    from muster.events import Finished

    over = [Finished(6.0, name, 1) for name in ("worker/0", "worker/1")]
    assert act(after(PLAN, started(PLAN), stepping(PLAN), over), 7.0) == [Stop("ps/0", "training is finished", 5.0)]


def test_one_that_is_coming_back_when_training_ends_still_does_the_last_checkpoint():
    state = after(PLAN, *DONE, PS_GONE, dies(ME, 5.2))
    assert act(state, 5.3) == [] and act(state, 6.2) == [Start(ME, 2)]
    for event in (Started(6.2, ME, 2), Spawned(6.3, ME, 2, 1)):
        state.apply(event)
    assert act(state, 6.3) == [Conclude(ME, 300)]


@pytest.mark.parametrize(
    "end",
    [[Exited(4.0, ME, 1, 0)], lost(1, code=2, first=-4.0), [dies(ME, 60.0)]],
    ids=["ended by itself", "given up", "it would come back too late"],
)
def test_the_run_does_not_wait_for_one_that_will_not_come(end):
    told = sorted([*DONE[2:], *PS_GONE, *end], key=lambda e: e.at)
    assert act(after(PLAN, started(PLAN), stepping(PLAN, at=0.5), told), 65.0) == [Finish(True)]


@pytest.mark.parametrize(
    "why", [StopAsked(5.0, "ctrl-c"), dies("worker/1", 5.0, code=2)], ids=["stopped", "training failed"]
)
def test_a_run_that_does_not_end_well_does_not_wait_for_it(why):
    state = after(PLAN, started(PLAN), why)
    assert Stop(ME, verdict(state, PLAN).value, 5.0) in act(state, 5.0)


def test_a_second_stop_ends_it_at_once():
    state = after(PLAN, *DONE, StopAsked(6.0, "ctrl-c"), StopAsked(6.1, "ctrl-c", now=True))
    assert Stop(ME, "stopped by the user", 0.0) in act(state, 6.1)


# --- words


def test_nobody_waits_for_it_and_it_waits_for_nobody():
    up = [e for e in started(PLAN) if e.task == ME]
    assert waits(after(PLAN, up), 60.0, PLAN) == []
    assert waits(after(PLAN, up, evaluating("")), 60.0, PLAN) == []
    held = after(PLAN, up, Ready(1.0, ME, 1))  # by a script that asks for the barrier all the same
    assert waits(held, 60.0, PLAN) == []


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([], "it has not said yet what it evaluates"),
        (evaluating(""), "it waits for the first checkpoint"),
        (evaluating("", "/x/model.ckpt-100"), "it evaluates model.ckpt-100"),
        (evaluating("", "/x/model.ckpt-100", ""), "it waits for the next checkpoint"),
        ([dies(ME, 2.0)], "it ended (exit 1) and is started again in 1 s"),
    ],
)
def test_what_it_is_about_has_words(events, said):
    assert what_it_evaluates(after(PLAN, started(PLAN), events).tasks[ME], 1.0) == said


def test_while_the_run_waits_for_it_alone_that_is_said():
    told = after(PLAN, *DONE[:2], evaluating("", "/x/model.ckpt-300"), *DONE[2:], PS_GONE, Concluded(5.0, ME, 1, 300))
    assert waits(told, 9.0, PLAN) == []
    (wait,) = waits(told, 12.0, PLAN)
    assert wait.text(12.0) == (
        "the run waits for evaluator/0 (here, 127.0.0.1), 7 s so far: training has ended; "
        "it evaluates model.ckpt-300; it gets 60 s (last_evaluation)"
    )
    told.apply(Exited(13.0, ME, 1, 0))
    assert waits(told, 14.0, PLAN) == []


def end_of(*events, ok=True):
    return summarise(after(PLAN, *events, RunEnded(70.0, ok)), PLAN, 70.0)


def test_the_end_says_what_became_of_it():
    well = end_of(*DONE, PS_GONE, evaluating("", "/x/model.ckpt-300", ""), Exited(6.0, ME, 1, 0))
    assert well.warnings == [] and footer(well)[0] == f"{ME}: 1 checkpoint evaluated, the last of them model.ckpt-300"
    forced = end_of(*DONE, PS_GONE, Stopping(65.0, ME, 1), Exited(66.0, ME, 1, -15))
    assert forced.ok and "(1 task had to be ended)" in headline(forced, PLAN)
    (said,) = forced.warnings
    assert said.startswith(
        "evaluator/0 was ended 60 s after training (last_evaluation), since it had not ended by itself (a loop of"
    )
    (said,) = end_of(*DONE, PS_GONE, evaluating("/x/a"), Stopping(65.0, ME, 1), Exited(66.0, ME, 1, -15)).warnings
    assert said.endswith("; the last that it began: /x/a")
    spent = end_of(started(PLAN), stepping(PLAN), lost(2, trace=True, first=-9.0), DONE[2:], PS_GONE)
    assert spent.ok and spent.exit_code == 0
    assert spent.warnings == [
        "evaluator/0 is given up, and training goes on without it: the same error twice (E; evaluator-0.log)"
    ]
    blind = end_of(*DONE, PS_GONE, evaluating(""), Exited(6.0, ME, 1, 0))
    assert blind.warnings == ["evaluator/0 found no checkpoint to evaluate: does it look where worker/0 saves?"]
    failed = end_of(started(PLAN), dies("worker/1", 5.0), Stopping(5.0, ME, 1), Exited(6.0, ME, 1, -15), ok=False)
    assert failed.warnings == [] and failed.cause.startswith("worker/1")


def test_the_screen_shows_what_it_does():
    console = Console(file=io.StringIO(), width=120)
    screen = Screen(console, PLAN)
    state = after(PLAN, started(PLAN))
    for event in [*evaluating("", "/x/model.ckpt-100", ""), Concluded(2.0, ME, 1, 1200)]:
        state.apply(event)
        screen.event(event, state)
    console.print(end_table(summarise(state, PLAN, 3.0), PLAN))
    said = console.file.getvalue()
    assert said.count("evaluates") == 1 and "evaluator/0 evaluates model.ckpt-100" in said
    assert "training ended at step 1,200; evaluator/0 has 60 s for the last checkpoint" in said
    assert "waits for a checkpoint" in said


def test_a_gpu_is_not_missed_before_it_has_done_a_checkpoint():
    look = GpuUse(100.0, ME, 1, {"0": 0})
    assert not idle(after(PLAN, started(PLAN), look), 600.0, PLAN)
    assert not idle(after(PLAN, started(PLAN), evaluating("a"), look), 600.0, PLAN)
    assert idle(after(PLAN, started(PLAN), evaluating("a", ""), look), 600.0, PLAN)


# --- the loop, over a cluster in memory


def ran(folder, script, user=(), concludes=((0.5, 0),), **run):
    plan = make(**{"ps": 1, "workers": 2, "evaluator": True, "backoff": 1.0, **run})
    launcher, journal = FakeLauncher(script, 0.1, user, concludes), Journal(folder / "j", sync=lambda fd: None)
    state = supervise(plan, launcher, journal)
    return state, launcher, list(journal.replay()), summarise(state, plan, state.now)


def steady(task, attempt):
    """The workers are done after 100 s; a ps and an evaluator never end by themselves."""
    up = (0.1, says(Listening, port=task.port))
    if task.role == "worker":
        return [up, (1.0, says(Step, step=300, local=1)), (100.0, 0)]
    return [(1.0, says(Evaluating, checkpoint=""))] if task.id == ME else [up]


def test_it_is_told_does_the_last_one_and_the_run_ends(tmp_path):
    """SD-03."""
    last = [(0.1, says(Evaluating, checkpoint="model.ckpt-300")), (8.0, 0)]
    state, launcher, events, summary = ran(tmp_path, steady, concludes=last)
    assert launcher.concluded == [(100.0, ME, 300)] and state.tasks[ME].phase is Phase.DONE
    assert summary.ok and summary.exit_code == 0 and state.now == pytest.approx(108.0, abs=0.5)
    assert [e.step for e in events if isinstance(e, Concluded)] == [300]
    assert [e.whom for e in events if isinstance(e, Waiting)] == [ME]  # at the end, and never before
    assert {e.task for e in events if isinstance(e, Warned)} == {"worker/0", "worker/1"}  # they were quiet
    stopped = next(e.at for e in events if isinstance(e, Exited) and e.task == "ps/0")
    assert stopped < 102.0


def test_one_that_is_deaf_is_ended_after_its_time(tmp_path):
    state, launcher, _, summary = ran(tmp_path, steady, concludes=(), last_evaluation=20.0)
    assert summary.ok and state.now == pytest.approx(120.0, abs=0.5) and state.tasks[ME].phase is Phase.STOPPED
    assert [(name, grace) for _, name, grace in launcher.stops] == [("ps/0", 5.0), (ME, 5.0)]


def test_one_that_fails_all_the_time_costs_the_run_nothing_but_a_warning(tmp_path):
    def script(task, attempt):
        return [(1.0, 10 + attempt)] if task.id == ME else steady(task, attempt)

    state, launcher, events, summary = ran(tmp_path, script)
    assert summary.ok and state.tasks[ME].attempt == 4 and state.now == pytest.approx(100.0, abs=0.5)
    (warned,) = [e for e in events if isinstance(e, Warned) and e.task == ME]
    assert "given up" in warned.text and summary.warnings == [warned.text]
    assert [name for _, name, attempt in launcher.starts if attempt > 1] == [ME] * 3


def test_a_failed_training_ends_it_without_a_word(tmp_path):
    def script(task, attempt):
        return [(5.0, 7)] if task.id == "worker/1" else steady(task, attempt)

    state, launcher, _, summary = ran(tmp_path, script, retries=0)
    assert not summary.ok and not launcher.concluded and state.now < 7.0 and state.tasks[ME].phase is Phase.STOPPED


def test_a_host_that_only_evaluates_dials_nobody():
    """muster check: so it need not reach the others."""
    plan = make([*TWO, Host("c", "10.0.0.3")], None, "ssh", ps=["a:1"], workers=["b:1"], evaluator=["c:1"])
    rows = wanted(plan)
    assert [row.host for row in rows] == ["a", "b", "c"] and rows[2].script and not rows[2].ports
    assert {(need.src, need.dst) for need in needs(rows, job(plan))} == {("a", "b"), ("b", "a")}
