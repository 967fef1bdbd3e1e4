import tracemalloc

import pytest
from making import read, written

from muster.cluster import Cluster, Run, port_range
from muster.clusterfile import load
from muster.errors import Refused

GOOD = """\
name = "lab"
launcher = "local"

[[hosts]]
name = "gpu-a"
address = "127.0.0.1"
gpus = 4
python = "/opt/venv/bin/python"
cwd = "/home/ml/project"
env = { NCCL_SOCKET_IFNAME = "eth0" }

[run]
ps = 2
workers = 3
gpus_per_worker = 1
chief = false
mode = "bounded"
max_staleness = 3
checkpoints = "/shared/lab"
ports = "20000-20999"
"""


def test_the_file_of_the_manual_is_read(tmp_path):
    cluster = load(written(tmp_path, GOOD))
    assert (cluster.name, cluster.launcher, cluster.warnings) == ("lab", "local", ())
    assert cluster.hosts[0].gpus == 4 and cluster.hosts[0].env == {"NCCL_SOCKET_IFNAME": "eth0"}
    assert cluster.run == Run(
        ps=2, workers=3, gpus_per_worker=1, chief=False, mode="bounded", max_staleness=3, checkpoints="/shared/lab"
    )


@pytest.mark.parametrize("text", ["", "\n# nothing but a comment\n", "\ufeff[run]\r\nworkers = 3\r\n"])
def test_an_empty_file_means_the_defaults(tmp_path, text):
    cluster = load(written(tmp_path, text))
    assert (cluster.run, list(cluster.hosts)) == (Run(), [])


# what the file says, where the error points, and what it must name
REFUSALS = [
    # B1
    ("hosts = []", "line 1: hosts", ["no hosts"]),
    ("[run]\nworkers = 0", "line 2: run.workers", ["no worker"]),
    ("[run]\nworkers = []", "line 2: run.workers", ["no worker"]),
    ("[run]\nworkers = -1", "line 2: run.workers", [">= 0"]),
    ("[run]\nworkers = 1000000", "line 2: run.workers", ["10000"]),
    ("[run]\n\nps = -2", "line 3: run.ps", [">= 0"]),
    ("[run]\nps = 0", "line 2: run.ps", ["no ps", "parameters"]),
    ("[run]\nworkers = 2.5", "line 2: run.workers", ["a whole number or a list"]),
    ('[run]\nworkers = "3"', "line 2: run.workers", ["a whole number or a list, got text"]),
    ("[run]\nworkers = true", "line 2: run.workers", ["got true or false"]),
    # CD-01, B6: unknown keys, with the nearest valid one
    ('[run]\nps_hosts = ["a:1"]', "line 2: run.ps_hosts", ["ps_hosts -> ps"]),
    ('[run]\nworker_hosts = ["a:1"]', "line 2: run.worker_hosts", ["worker_hosts -> workers"]),
    ("[run]\nWorkers = 3", "line 2: run.Workers", ["Workers -> workers"]),
    ("[run]\nWorker = 3\nPS = 1", "line 2: run.Worker", ["Worker -> workers", "PS -> ps"]),
    ("[run]\nretrys = 3", "line 2: run.retrys", ["retrys -> retries", "there may be: ps, workers, chief"]),
    ("[rum]\nps = 1", "line 1: rum", ["rum -> run"]),
    ('[[hosts]]\nname = "a"\ngpu = 2', "line 3: hosts[0].gpu", ["gpu -> gpus", "in [[hosts]]"]),
    ("[run]\nxyzzy = 1", "line 2: run.xyzzy", ["xyzzy"]),
    ('source = "x"', "line 1: source", ["unknown setting 'source'"]),
    # wrong kinds of values, with those that would do
    ('[run]\nkind = "pps"', "line 2: run.kind", ["one of: v1, pss, mwms"]),
    ('[run]\nmode = "asynch"', "line 2: run.mode", ["one of: async, sync, bounded"]),
    ('[run]\nwindow = "soon"', "line 2: run.window", ["a number"]),
    ("[run]\nwindow = 0", "line 2: run.window", ["> 0"]),
    ("[run]\ntf1 = 1", "line 2: run.tf1", ["true or false"]),
    ("run = 3", "line 1: run", ["a table"]),
    ('hosts = "a"', "line 1: hosts", ["[[hosts]]"]),
    ('launcher = "locl"', "line 1: launcher", ["did you mean 'local'"]),
    ("[[hosts]]\nenv = { A = 1 }", "line 2: hosts[0].env", ["text"]),
    ('[[hosts]]\nenv = { "A B" = "1" }', "line 2: hosts[0].env", ["'A B'"]),
    ("[[hosts]]\ngpus = [0, 0]", "line 2: hosts[0].gpus", ["[0, 0]", "gpus = 4"]),
    ("[[hosts]]\ngpus = [-1]", "line 2: hosts[0].gpus", ["different indices"]),
    ('[[hosts]]\nname = "a b"', "line 2: hosts[0].name", ["'a b'"]),
    ('[[hosts]]\nname = "-x"', "line 2: hosts[0].name", ["no dash"]),
    # B2: addresses
    ('[[hosts]]\naddress = "-oProxyCommand=touch x"', "line 2: hosts[0].address", ["is no host"]),
    ('[[hosts]]\naddress = "-oProxyCommand=x"', "line 2: hosts[0].address", ["dash"]),
    ('[[hosts]]\naddress = "a;touch"', "line 2: hosts[0].address", ["';'"]),
    ('[[hosts]]\naddress = "$(touch)"', "line 2: hosts[0].address", ["'$'"]),
    ('[[hosts]]\naddress = "a\\nb"', "line 2: hosts[0].address", ["blank"]),
    ('[[hosts]]\naddress = "a\\u0000b"', "line 2: hosts[0].address", ["x00"]),
    # CD-13, CD-14: seats
    ('[run]\nps = ["h1"]\nworkers = ["h2:1"]', "line 2: run.ps[0]", ["port is missing"]),
    ('[run]\nps = ["h1:1"]\nworkers = ["h2:1", "h3:70000"]', "line 3: run.workers[1]", ["4464"]),
    ('[run]\nps = [\n "h1:1",\n "::1:23005",\n]\nworkers = ["h2:1"]', "line 4: run.ps[1]", ["[::1]:23005"]),
    ('[run]\nps = ["h1:1"]\nworkers = [1]', "line 3: run.workers[0]", ["text"]),
    # CD-04, B10: one place twice
    (
        '[run]\nps = ["hostA:2222"]\nworkers = ["HOSTA:2222"]',
        "line 3: run.workers[0]",
        ["ps/0 and worker/0", "HOSTA:2222"],
    ),
    ('[run]\nps = ["a:1"]\nworkers = ["b:1", "b:1"]', "line 3: run.workers[1]", ["worker/0 and worker/1"]),
    ('[[hosts]]\nname = "a"\n\n[[hosts]]\nname = "a"', "line 4: hosts[1]", ["two hosts are called 'a'"]),
    (
        '[[hosts]]\nname = "a"\naddress = "127.0.0.1"\n[[hosts]]\nname = "b"\naddress = "localhost"',
        "line 4: hosts[1]",
        ["b and a are the same machine"],
    ),
    # CD-06, CD-08: chiefs
    ("[run]\nmaster = true\nchief = true", "line 2: run.master", ["same thing", "keep chief"]),
    ("[run]\nworker = 2\nworkers = 3", "line 2: run.worker", ["same thing", "keep workers"]),
    ('[run]\nchief = ["a:1", "b:1"]\nps = ["c:1"]\nworkers = ["d:1"]', "line 2: run.chief", ["two chiefs"]),
    ('[run]\nkind = "pss"\nchief = false', "line 3: run.chief", ["needs exactly one chief"]),
    ('[run]\nkind = "mwms"\nps = 1', "line 3: run.ps", ["mwms has no ps"]),
    # settings that do not go together
    ('[run]\nps = ["a:1"]\nworkers = 3', "line 3: run.workers", ["exact seats for ps, but a count for workers"]),
    ("[run]\nspare = 1", "line 2: run.spare", ["mode is async"]),
    ('[run]\nmode = "sync"\nworkers = 2\nspare = 2', "line 4: run.spare", ["workers are 2, spare is 2"]),
    ("[run]\nmax_staleness = 3", "line 2: run.max_staleness", ['mode = "bounded"']),
    ('[run]\nmode = "bounded"', "line 2: run.mode", ["max_staleness = 3"]),
    ('[run]\ntf1 = true\nkind = "pss"', "line 2: run.tf1", ["kind is pss"]),
    ('[run]\nports = "20000"', "line 2: run.ports", ["20000-20999"]),
    ('[run]\nports = "0-100"', "line 2: run.ports", ["1024 to 65535"]),
    ('[run]\nports = "30000-20000"', "line 2: run.ports", ["no range"]),
    # not TOML at all
    ("launcher = local", "cluster.toml", ["not valid TOML", "line 1", "double quotes"]),
    ("[run]\nps = 1\nps = 2\n", "cluster.toml", ["not valid TOML", "line 3"]),
    ("[run", "cluster.toml", ["not valid TOML"]),
]


@pytest.mark.parametrize(
    ("text", "at", "named"), REFUSALS, ids=[text.replace("\n", " ")[:60] for text, _, _ in REFUSALS]
)
def test_a_slip_in_the_file_is_refused_with_its_line(tmp_path, text, at, named):
    """B1, B2, B6, B10, CD-01, CD-04, CD-06, CD-08, CD-13, CD-14."""
    with pytest.raises(Refused) as refused:
        load(written(tmp_path, text))
    told = str(refused.value)
    assert str(tmp_path / "cluster.toml") in refused.value.at
    assert refused.value.at.endswith(at)
    for words in named:
        assert words in told
    assert refused.value.exit_code == 2


def test_a_list_of_what_would_have_been_valid_stands_in_the_error(tmp_path):
    """CD-01, B6: every name that [run] takes."""
    with pytest.raises(Refused) as refused:
        load(written(tmp_path, "[run]\nxyzzy = 1"))
    assert all(name in refused.value.try_ for name in Run.__struct_fields__)


@pytest.mark.parametrize(
    "text",
    [
        '[[hosts]]\nenv.NCCL_DEBUG = "INFO"\nname = "a"',
        '[run]\n"checkpoints" = "/x"',
        'run.ps = 2\nrun.checkpoints = "/shared"',
        'hosts = [\n  { name = "a" },\n]',
        '[run]\ncheckpoints = """\n/x"""',
        '[run]\nps = [ # two\n  "a:1", # "b:1"\n]\nworkers = ["c:1"]',
    ],
)
def test_any_way_to_write_toml_is_read(tmp_path, text):
    assert isinstance(load(written(tmp_path, text)), Cluster)


def test_master_is_the_old_name_of_the_chief(tmp_path):
    """CD-08."""
    cluster = load(written(tmp_path, "[run]\nmaster = true"))
    assert cluster.run.chief is True
    assert "line 2: run.master: master is the old name of the chief" in cluster.warnings[0]


def test_odd_host_names_are_warned_of_with_their_place(tmp_path):
    """CD-16."""
    text = '[run]\nps = ["dns:1"]\nworkers = ["gpu_box:1", "训练机:1"]'
    warnings = load(written(tmp_path, text)).warnings
    assert [w.split(": ")[1] for w in warnings] == ["run.ps[0]", "run.workers[0]", "run.workers[1]"]
    assert "URI" in warnings[0] and "underscore" in warnings[1] and "xn--" in warnings[2]


def test_two_sshd_behind_one_address_are_two_hosts():
    """SL-04."""
    host = {"address": "10.0.0.1"}
    cluster = read(
        {"hosts": [{**host, "name": "a", "ssh": "ssh://h:2201"}, {**host, "name": "b", "ssh": "ssh://h:2202"}]}
    )
    assert [host.name for host in cluster.hosts] == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "named"), [(None, "muster init"), (b"\xff\xfe\x00", "cannot be read"), (b"x" * 5_000_000, "too long")]
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, content, named):
    path = tmp_path / "cluster.toml" if content is None else written(tmp_path, content)
    with pytest.raises(Refused) as refused:
        load(path)
    assert named in str(refused.value) and refused.value.at.startswith(str(path))


def test_a_folder_is_no_cluster_file(tmp_path):
    with pytest.raises(Refused, match="cannot be read"):
        load(tmp_path)


@pytest.mark.parametrize(
    "text", ["a=" + "[" * 50_000, "[run]\nps = [" + '"a:1",' * 5_000 + "]", "a = {" * 20_000], ids=["[", "list", "{"]
)
def test_a_bomb_is_refused_before_it_fills_memory(tmp_path, text):
    """B6: < 100 MB."""
    path = written(tmp_path, text)
    tracemalloc.start()
    try:
        with pytest.raises(Refused):
            load(path)
        assert tracemalloc.get_traced_memory()[1] < 100_000_000
    finally:
        tracemalloc.stop()


def test_a_range_of_ports_holds_both_ends():
    assert list(port_range("20000-20002", "")) == [20000, 20001, 20002]
