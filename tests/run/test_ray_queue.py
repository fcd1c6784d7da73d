"""The queue over a Ray cluster: what it makes of news from a pretended one, the station without Ray, and a real cluster
of three nodes of which one dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import cells, config
from rich.console import Console

from lorabench import sweep
from lorabench.contract.family import Family, families
from lorabench.contract.machine import Machine
from lorabench.record.store import RECORDS, Store, read_records
from lorabench.run import links, ray_node, ray_queue
from lorabench.run.agenda import Agenda
from lorabench.run.process import ProbeError
from lorabench.run.queue import QueueError
from lorabench.run.runner import record_of

MACHINE = Machine(
    device="cpu", name="pretended", cpu="pretended", cores=1, memory_bytes=1, os="", python="", packages={},
    native_bfloat16=False,
)  # fmt: skip
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install 'lorabench[ray]'")


def chosen(name, folder):
    """The queue of this name, as a sweep makes it."""
    return sweep._queue(config(f"queue={name}", f"output={folder}", "timeout_s=300"))


def key_of(family):
    return family.cells[0].key


def apart(*overrides):
    """A family for each cell."""
    return families(cells(*overrides), together=False)


class Watched:
    """A display that keeps what it was shown."""

    def __init__(self):
        self.started, self.phases = [], []

    def start(self, family):
        self.started.append(key_of(family))

    def phase(self, text):
        self.phases.append(text)


class Pretended:
    """A cluster whose tasks answer what `script` says of (family or None, how often it was sent): a list of events. The
    last task sent answers first."""

    version = "0"

    def __init__(self, script):
        self.script, self.answers, self.sent, self.calls = script, {}, {}, []

    def start(self):
        self.calls.append("start")

    def size(self):
        return 3

    def send(self, request, sweep, ranks):
        _, family = ForkingPickler.loads(request)
        key = key_of(family) if family else None
        self.sent[key] = self.sent.get(key, 0) + 1
        task = (key, self.sent[key])
        self.answers[task] = list(self.script(family, self.sent[key]))
        return task

    def news(self, tasks):
        task = next((t for t in reversed(tasks) if self.answers[t]), None)
        return [(task, *self.answers[task].pop(0))] if task else []

    def lacking(self, tasks):
        return dict.fromkeys(tasks, "4 GPUs")

    def cancel(self, tasks):
        self.calls.append(("cancel", len(tasks)))

    def stop(self):
        self.calls.append("stop")


def node(number):
    return "node", {"host": f"host{number}", "address": f"10.0.0.{number}", "id": f"{number}" * 56}


def session(number, device="cpu"):
    return "session", {"id": f"s{number}", "machine": {**MACHINE.model_dump(mode="json"), "device": device}}


def measured(family, number):
    made = [record_of(family, stack, f"s{number}", status="unsupported", reason="pretended") for stack in family.stacks]
    return "records", [record.model_dump_json(by_alias=True, exclude_none=True) for record in made]


def fine(family, attempt):
    """A node of its own for every family, and the first for the look."""
    keys = [cell.key for cell in cells("ablations=[eager,sdpa_math]")]
    number = 1 if family is None else keys.index(key_of(family)) + 1
    last = ("seen", None) if family is None else measured(family, number)
    return [node(number), session(number), ("phase", "timing"), last]


def pretended(script):
    made = ray_queue.RayQueue(Pretended(script), "auto", 60.0)
    assert made.look(["python"]).name == "pretended"
    return made


def test_records_come_in_any_order_each_after_its_node_s_session():
    todo, watch = apart("ablations=[eager,sdpa_math]"), Watched()
    with pretended(fine) as asked:
        seen = []
        for family, records in asked.run(todo, watch):
            assert {record.session for record in records} < set(asked.sessions)
            assert [shown.key for record in records for shown in record.shown] == [key_of(family)]
            seen.append(key_of(family))
    assert seen == [key_of(family) for family in reversed(todo)] == watch.started
    assert {"s1", "s2", "s3"} < set(asked.sessions) and len(asked.sessions) == 4  # and the sweep's own
    assert asked.cluster.calls == ["start", ("cancel", 0), "stop"]
    assert watch.phases[-1] == "timing" and watch.phases[0] == f"{todo[0].title}: timing"


def test_each_look_is_a_session_of_its_own_so_that_no_station_serves_two():
    with pretended(fine) as asked:
        first = asked.sweep["id"]
        asked.look(["python"])
        assert first != asked.sweep["id"] and {first, asked.sweep["id"]} < set(asked.sessions)


def test_the_sweep_stores_a_session_before_the_record_that_names_it(tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr(Store, "add_session", lambda self, s: order.append(s["id"]))
    monkeypatch.setattr(Store, "append", lambda self, r: order.append((r.session, r.arm)))
    own = ("models=[tiny-llama]", "trials=3", "workload=2x16", "ablations=[eager,sdpa_math]", "isolate=true")
    agenda = Agenda(config(*own), [])
    agenda.plan_for("cpu")
    with Store(tmp_path) as store, pretended(fine) as asked:
        sweep._drain(asked, agenda, store, Console(quiet=True))
    named = [entry for entry in order if isinstance(entry, tuple)]
    assert len(named) == 6  # the reference beside each
    assert all(order.index(own) < order.index((own, key)) for own, key in named)


def test_a_family_whose_nodes_die_is_tried_three_times_and_then_a_crash():
    def dies(family, attempt):
        lost = [node(attempt), session(attempt), ("phase", "timing"), ("lost", "died")]
        return fine(None, 1) if family is None else lost

    todo = apart("ablations=[eager]")[:1]
    with pretended(dies) as asked:
        [(family, records)] = asked.run(todo, Watched())
    assert family == todo[0] and {(r.status, r.session) for r in records} == {("crash", "s3")}
    assert {key for r in records for key in [s.key for s in r.shown]} == {key_of(family)}
    (reason,) = {record.reason for record in records}
    assert reason == (
        "the node host3 (10.0.0.3, node 33333333) died while timing (tried 3 times; before that the node host1 "
        "(10.0.0.1, node 11111111) died while timing, the node host2 (10.0.0.2, node 22222222) died while timing)"
    )


def test_a_node_s_death_is_one_more_try():
    def dies_once(family, attempt):
        return [node(2), ("lost", "died")] if family and attempt == 1 else fine(family, attempt)

    todo = apart("ablations=[eager,sdpa_math]")
    with pretended(dies_once) as asked:
        found = list(asked.run(todo, Watched()))
    assert sorted(map(key_of, todo)) == sorted(key_of(family) for family, _ in found)
    assert {record.status for _, records in found for record in records} == {"unsupported"}


def test_a_family_that_was_lost_on_its_way_names_the_sweep_s_own_session():
    lost = lambda family, attempt: [("lost", "failed (no lorabench)")] if family else fine(None, 1)  # noqa: E731
    with pretended(lost) as asked:
        [(_, (record, *_))] = asked.run(apart("ablations=[eager]")[:1], Watched())
    assert record.reason.startswith("a node failed (no lorabench) while starting (tried 3 times")
    assert asked.sessions[record.session]["machine"]["name"] == "pretended"


def test_a_family_that_no_living_node_could_hold_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(ray_queue, "PATIENCE_S", 0.0)
    with pretended(lambda family, attempt: [] if family else fine(None, attempt)) as asked:
        [(_, (record, *_))] = asked.run(apart("ablations=[eager]")[:1], Watched())
    assert record.status == "crash"
    assert record.reason == "no living node of the cluster has 4 GPUs for it (tried once)"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([node(1), session(1, "cuda")], "planned for cpu, and lorabench finds only cuda on host1"),
        ([node(1), session(1), measured(apart("ablations=[sdpa_math]")[-1], 1)], "another version of lorabench"),
    ],
)
def test_a_node_that_does_not_fit_the_plan_stops_the_sweep(answer, said):
    script = lambda family, attempt: list(answer) if family else fine(None, 1)  # noqa: E731
    with pretended(script) as asked, pytest.raises(QueueError, match=said):
        list(asked.run(apart("ablations=[eager]")[:1], Watched()))
    assert asked.cluster.calls[1:] == [("cancel", 1), "stop"]


def test_a_cluster_that_cannot_be_looked_at_is_one_line():
    asked = ray_queue.RayQueue(Pretended(lambda family, attempt: [node(1), ("lost", "failed (why)")]), "auto", 60.0)
    with pytest.raises(ProbeError, match=r"a node of the Ray cluster failed \(why\) \(every node needs"):
        asked.look(["python"])


def test_without_ray_one_line_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    code = sweep.main(["models=[tiny-llama]", "ablations=[eager]", "queue=ray", f"output={tmp_path / 'out'}"])
    assert code == 2
    assert capsys.readouterr().err == ("lorabench: queue=ray needs the package ray: pip install 'lorabench[ray]'\n")
    assert not (tmp_path / "out").exists()


def test_a_budget_that_no_node_would_know_of_is_refused(tmp_path, capsys):
    assert sweep.main(["models=[tiny-llama]", "queue=ray", "budget_minutes=1", f"output={tmp_path / 'out'}"]) == 2
    assert "budget_minutes= ends what is measured on this machine" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_no_queue_needs_ray_unless_it_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert chosen("local", tmp_path).sessions == {}


def request(family):
    asked = {"id": "sweep", "dtype": "auto", "timeout_s": 120.0, "ray": "0", "command": ["python"]}
    return bytes(ForkingPickler.dumps((asked, family)))


@pytest.fixture
def station():
    """What runs on a node, here: one station for all requests of a test. Gives a function: family → its events."""
    where, alone = {"host": "h", "address": "a", "id": "0123456789"}, {"OMP_NUM_THREADS": "1"}
    yield lambda family: list(ray_node.serve(request(family), "sweep", where, alone))
    ray_node._forget()


@pytest.mark.exhaustive
def test_a_station_looks_once_and_serves_one_family_after_the_other(station):
    refused = [
        f for f in apart("ablations=[eager,sdpa]") if [t.name for t in f.cells[0].toggles] == ["sdpa"]
    ]  # at once
    look, first, second = (station(family) for family in (None, *refused, *refused))
    assert [what for what, _ in look] == ["session", "seen"]
    own = look[0][1]
    assert own["node"]["host"] == "h" and own["ceilings"]["gemm_tflops"] and own["id"].startswith("sweep-01234567-")
    assert first[0] == second[0] == ("session", own)
    assert [what for what, _ in first] == ["session", "records"]
    (record,) = first[1][1]
    assert f'"session":"{own["id"]}"' in record and '"not_applied"' in record


def test_a_station_that_has_timed_its_links_tells_its_session_once_more(tmp_path, monkeypatch):
    told = []
    one = ray_node.Station(SimpleNamespace(send=told.append), tmp_path)  # type: ignore[arg-type]
    runner = {"machine": MACHINE, "workers": SimpleNamespace(method=""), "family": lambda *_: []}
    one.runner, one.session = SimpleNamespace(**runner), {"ceilings": {}}
    point = links.Link(collective="send", ranks=2, bytes=4096, ms=1.0, gbs=0.1)
    monkeypatch.setattr(links, "curve", lambda *_: [point])
    for toggle in ("ddp", "fsdp2"):
        family = Family((cells("world_size=2", f"ablations=[{toggle}]")[1],))
        one.answer(bytes(ForkingPickler.dumps(({}, family))), {})
    before, after = {"ceilings": {}}, {"ceilings": {"links": [point.model_dump()]}}
    assert told == [("session", before), ("session", after), ("records", []), ("session", after), ("records", [])]


def test_a_request_that_cannot_be_read_fails_in_one_line(station):
    with pytest.raises(ray_node.NodeError, match=r"^UnpicklingError: "):
        list(ray_node.serve(b"nonsense", "sweep", {}, {}))
    assert not ray_node._now  # and the next request gets a new station


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture
def short():
    """A folder with a short path: sockets are put into it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_ray_worker_leaves_neither_a_process_nor_a_file(tmp_path, short):
    """The task's process, here a pretended Ray worker, is killed by SIGKILL while its family is measured."""
    script = tmp_path / "worker.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom lorabench.run import ray_node\n"
        "for event in ray_node.serve(Path(sys.argv[1]).read_bytes(), 'sweep', {'id': '01234567'}, {}):\n"
        "    print(event[0], flush=True)\n"
    )
    (tmp_path / "request").write_bytes(request(apart("ablations=[eager]", "trials=100000")[0]))
    own = {**os.environ, "TMPDIR": str(short), "LORABENCH_TEST": str(tmp_path)}
    worker = subprocess.Popen(
        [sys.executable, script, tmp_path / "request"], stdout=subprocess.PIPE, text=True, env=own
    )
    assert worker.stdout is not None
    for line in worker.stdout:
        if line == "phase\n":
            break
    assert ours(tmp_path) > {worker.pid}
    worker.kill()
    worker.wait()
    wait_until(lambda: not ours(tmp_path))
    wait_until(lambda: not [*short.glob("pymp-*"), *short.glob("lorabench-*")])


def ours(folder):
    """The ids of living processes with this folder in their environment."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if f"LORABENCH_TEST={folder}".encode() in file.read().split(b"\0"):
                    found.add(int(pid))
        except OSError:  # ended, or another user's
            continue
    return found


@pytest.fixture
def three_nodes(monkeypatch):
    """A cluster of three nodes on this machine, which RAY_ADDRESS names; the sweep's own is the first."""
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    nodes = [cluster.add_node(num_cpus=1, object_store_memory=80_000_000) for _ in range(3)]
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster, nodes
    cluster.shutdown()


class Killing(Watched):
    """Kills a node as soon as a family is being measured on it."""

    def __init__(self, asked, cluster, node):
        super().__init__()
        self.asked, self.cluster, self.node, self.victims = asked, cluster, node, []

    def phase(self, text):
        super().phase(text)
        there = [key_of(s.family) for s in self.asked.tasks.values() if f"node {self.node.node_id[:8]}" in s.node]
        if there and not self.victims:
            self.victims = there
            self.cluster.remove_node(self.node, allow_graceful=False)


@needs_ray
@pytest.mark.exhaustive
def test_three_nodes_of_which_one_dies_in_the_middle(three_nodes, tmp_path, capfd):
    cluster, nodes = three_nodes
    todo = apart("ablations=[eager,sdpa_math,gradient_checkpointing,adamw]")
    capfd.readouterr()
    with Store(tmp_path) as store, chosen("ray", tmp_path) as asked:
        asked.look(["python"])
        watch = Killing(asked, cluster, nodes[1])
        for _, records in asked.run(todo, watch):
            store.add_session(asked.sessions[records[0].session])
            for record in records:
                store.append(record)
    assert capfd.readouterr() == ("", "")  # of what Ray has to say, nothing
    assert len(watch.victims) == 1
    assert len((tmp_path / RECORDS).read_text().splitlines()) == 2 * len(todo)
    records = {r.key: r for r in read_records(tmp_path)}
    assert set(records) == {key_of(family) for family in todo}
    assert {r.status for r in records.values()} == {"ok"}
    sessions = {s["id"]: s for s in Store(tmp_path).sessions()}
    where = {key: sessions[r.session]["node"]["id"] for key, r in records.items()}
    assert set(where.values()) <= {n.node_id for n in nodes}
    assert where[watch.victims[0]] != nodes[1].node_id  # measured anew, on another one
    assert all(sessions[r.session]["ceilings"] and sessions[r.session]["ray"] for r in records.values())


COMMAND = ("models=[tiny-llama]", "trials=3", "workload=2x16", "ablations=[eager]", "queue=ray", "isolate=true")


def started(folder, *overrides, **environment):
    """The sweep's command, in a process group of its own."""
    command = [sys.executable, "-m", "lorabench.sweep", *COMMAND, *overrides, f"output={folder / 'out'}"]
    own = {**os.environ, "LORABENCH_TEST": str(folder), **environment}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=own, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


@needs_ray
@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_from_the_command_line_without_a_cluster_interrupted_and_continued(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    first = started(tmp_path, "ablations=[eager,sdpa_math]")
    assert first.stdout is not None
    assert any(line.startswith("[1/3]") for line in first.stdout)  # and the second is on its way
    os.killpg(first.pid, signal.SIGINT)
    _, said = first.communicate()
    assert first.returncode == 130
    assert said == "lorabench: stopped; the same command continues where it stopped\n"
    wait_until(lambda: not ours(tmp_path))
    before = (tmp_path / "out" / RECORDS).read_text()

    second = started(tmp_path, "ablations=[eager,sdpa_math]")
    out, said = second.communicate()
    assert (second.returncode, said) == (0, ""), out
    assert f"3 cells, {len(before.splitlines()) // 2} already recorded" in out
    assert (tmp_path / "out" / RECORDS).read_text().startswith(before)
    records = read_records(tmp_path / "out")
    sessions = {s["id"]: s for s in Store(tmp_path / "out").sessions()}
    assert len(records) == 3 and {r.status for r in records} == {"ok"}
    assert all(sessions[r.session]["node"]["host"] for r in records)
    wait_until(lambda: not ours(tmp_path))


@needs_ray
@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("ray://10.0.0.1:10001", "RAY_ADDRESS=ray://10.0.0.1:10001: a sweep runs on a node of its cluster"),
        ("127.0.0.1:1", "no Ray cluster answers at RAY_ADDRESS=127.0.0.1:1: Connection refused"),
    ],
)
def test_a_cluster_that_cannot_be_joined_is_one_line(address, said, monkeypatch):
    from lorabench.run.ray_cluster import RayCluster

    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(QueueError, match=f"^{said}[^\n]*$"):
        RayCluster().start()
