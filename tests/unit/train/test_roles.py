import pytest

from muster.errors import MusterError
from muster.train.context import Context
from muster.train.roles import _difference, mismatch, replaced, too_few
from muster.train.tf1 import adoptable, device_filters, no_keras

PLAN = {"ps": ("10.0.0.1:20000",), "worker": ("10.0.0.1:20001", "10.0.0.2:20001")}


def test_a_cluster_of_the_same_tasks_gets_the_plans_addresses():
    written = {"ps": {0: "ps0.example.com:2222"}, "worker": {0: "w0:1", 1: "w1:1"}}
    planned = replaced(written, PLAN)
    assert planned == {"ps": {0: "10.0.0.1:20000"}, "worker": {0: "10.0.0.1:20001", 1: "10.0.0.2:20001"}}
    assert "ps/0 ps0.example.com:2222 -> 10.0.0.1:20000" in _difference(written, planned)


def test_a_sparse_job_names_some_of_its_tasks():
    assert replaced({"ps": {0: "x:1"}, "worker": {1: "y:1"}}, PLAN)["worker"] == {1: "10.0.0.2:20001"}


@pytest.mark.parametrize(
    "written",
    [
        {"ps": {0: "a:1"}, "worker": {0: "b:1"}},
        {"ps": {0: "a:1"}, "worker": {0: "b:1", 1: "c:1", 2: "d:1"}},
        {"ps": {0: "a:1"}},
        {"ps": {0: "a:1"}, "worker": {0: "b:1", 1: "c:1"}, "master": {0: "d:1"}},
        {"ps": {}, "worker": {0: "b:1", 1: "c:1"}},
    ],
)
def test_a_cluster_of_other_tasks_is_refused_naming_both(written):
    with pytest.raises(MusterError) as caught:
        replaced(written, PLAN, "script.py:3")
    assert "plan: ps 1, worker 2" in caught.value.because and caught.value.at == "script.py:3"


@pytest.mark.parametrize("job", ["local", "localhost"])
def test_a_server_of_its_own_is_left_alone(job):
    assert replaced({job: {0: "localhost:0"}}, PLAN) is None


@pytest.mark.parametrize(
    "task, roles, filters",
    [
        ("worker/1", ("ps", "worker"), ["/job:ps", "/job:worker/task:1"]),
        ("worker/1", ("ps", "worker", "chief"), ["/job:ps", "/job:worker/task:1", "/job:chief"]),
        ("chief/0", ("ps", "worker", "chief"), ["/job:ps", "/job:chief/task:0"]),
        ("worker/0", ("worker",), ["/job:worker/task:0"]),
    ],
)
def test_a_session_sees_the_ps_itself_and_the_chief(task, roles, filters):
    """NW-03: where a chief holds state, it is seen too; a ps has no session and filters nobody."""
    assert device_filters(Context(task=task, cluster=dict.fromkeys(roles, ("a:1",)))) == filters


def test_the_errors_name_both_sides():
    assert "worker/1" in mismatch("worker/1", "worker/0").what and "worker/0" in mismatch("worker/1", "worker/0").what
    assert too_few(3, 1).what == "expected 3 workers, the strategy sees 1"
    assert "tf_keras" in no_keras("tensorflow.keras").try_


class Step:
    def __init__(self, integer=True, rank=0, graph="graph"):
        self.dtype = type("D", (), {"base_dtype": type("B", (), {"is_integer": integer})})
        self.shape = type("S", (), {"rank": rank})
        self.graph = graph


@pytest.mark.parametrize(
    "step, fit",
    [(Step(), True), (None, False), (Step(integer=False), False), (Step(rank=1), False), (Step(graph=None), False)],
)
def test_only_a_whole_scalar_of_a_graph_is_taken_as_the_global_step(step, fit):
    assert adoptable(step) is fit
