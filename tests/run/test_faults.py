"""Faults around the arms: killed sweeps, half-written lines, two sweeps at once, disks that refuse."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import MACHINE, cells, killed_sweep, sweep, workers_in

from lorabench import cli
from lorabench.contract.family import Family
from lorabench.measure.seat import Seating
from lorabench.record.schema import ArmRecord, Numerics
from lorabench.record.store import RecordError, Store, StoreError, read_arms, read_records
from lorabench.run import leftovers, worker
from lorabench.run.journal import JOURNAL
from lorabench.run.process import Workers, kill
from lorabench.run.session import scratch_prefix
from lorabench.sweep import check_output

ARGS = ("models=[tiny-llama]", "workload=2x16", "trials=2", "warmup=1", "ablations=[eager,sdpa_math,adamw,adamw_fused]")

PATIENCE_S = 600  # for what comes after seconds on an idle machine: a busy one is no fault


def record(key: str = "k", **fields) -> ArmRecord:
    named = {"family": key, "kind": "train", "session": "s", "model": "m", "workload": "w", "arm": "a"}
    shown = {"key": key, "design": "solo", "ablations": ["a"], "against": []}
    base = {**named, "role": "candidate", "toggles": ["a"], "shown": [shown]}
    return ArmRecord(**{**base, "status": "unsupported", "reason": "why", **fields})


def rounds_of(arms) -> dict[str, int]:
    """How many each arm has in all sessions."""
    found: dict[str, int] = {}
    for arm in arms:
        found[arm.arm] = found.get(arm.arm, 0) + len(arm.rounds)
    return found


def test_a_killed_sweep_continues_where_it_stopped(plugin, tmp_path):
    """In the middle of the rounds: those that were over are kept, and the next run measures the others."""
    args = [
        *ARGS[:2],
        "trials=8",
        "warmup=1",
        "dtype=float32",
        "ablations=[eager]",
        "report=false",
        f"output={tmp_path}",
    ]
    path, journal = tmp_path / "records.jsonl", tmp_path / JOURNAL

    def in_the_middle():
        return journal.exists() and journal.read_bytes().count(b'"round"') >= 3

    first = killed_sweep(*args, cwd=tmp_path, when=in_the_middle, timeout=PATIENCE_S, env=plugin)
    assert first.returncode == -signal.SIGKILL
    over = [json.loads(line) for line in journal.read_text().splitlines()[1:]]
    with open(path, "ab") as file:
        file.write(b'{"schema": 1, "key": "ha')
    again = sweep(*args, cwd=tmp_path, env=plugin)
    assert again.returncode == 0, again.stderr
    assert "half written" in again.stderr
    assert (tmp_path / "records.jsonl.fragment").read_bytes() == b'{"schema": 1, "key": "ha\n'
    assert f"the last sweep was ended after {len(over)} rounds of a family; they are kept" in again.stdout
    arms = read_arms(tmp_path)
    before, after = ([arm for arm in arms if arm.session == name] for name in dict.fromkeys(a.session for a in arms))
    assert {arm.arm for arm in before} == {arm.arm for arm in after} == {"reference", "reference again", "eager"}
    assert all(len(arm.rounds) == len(over) < 8 and arm.status == "ok" for arm in before)
    for arm in before:
        assert arm.phases["forward"] == [phases["forward"] for line in over for _, phases in line["turns"][arm.arm]]
    # What a busy machine disturbs is measured once more, beside rounds of the reference that no other arm has.
    with_twin = {(arm.session, arm.family) for arm in arms if arm.arm == "reference again"}
    shared = [arm for arm in arms if arm.arm != "reference" or (arm.session, arm.family) in with_twin]
    assert rounds_of(shared) == {"reference": 8, "reference again": 8, "eager": 8}
    environment = (tmp_path / "environment.json").read_bytes()
    nothing = sweep(*args, cwd=tmp_path, env=plugin)
    assert nothing.returncode == 0 and (tmp_path / "environment.json").read_bytes() == environment
    assert ": 2 cells, 2 already recorded" in nothing.stdout  # without «on» a machine: it was not even looked at
    anew = sweep(*args, "resume=false", cwd=tmp_path, env=plugin)
    assert anew.returncode == 2 and "already holds 2 records" in anew.stderr
    assert not journal.exists()


@pytest.mark.exhaustive
def test_a_toggle_that_kills_its_process_in_a_round_costs_the_others_nothing(plugin, tmp_path):
    """resume=true leaves its record alone, resume=failed measures it again."""
    args = [*ARGS[:2], "trials=20", "warmup=1", "ablations=[eager,killed_later]", "report=false", f"output={tmp_path}"]
    done = sweep(*args, cwd=tmp_path, env=plugin)
    assert done.returncode == 0, done.stderr
    found = {" + ".join(r.ablations): r for r in read_records(tmp_path)}
    assert found["killed_later"].status == "crash" and "killed by SIGKILL" in found["killed_later"].reason
    assert found["eager"].status == "ok"
    arms = {arm.arm: arm for arm in read_arms(tmp_path)}
    assert arms["eager"].rounds == arms["reference"].rounds == list(range(20))
    assert arms["eager"].seats[-1] > 0, "the process in which the others sit is another one now"
    before = (tmp_path / "records.jsonl").read_bytes()
    again = sweep(*args, "resume=failed", cwd=tmp_path, env=plugin)
    assert again.returncode == 0, again.stderr
    new = (tmp_path / "records.jsonl").read_bytes().removeprefix(before).splitlines()
    assert [ArmRecord.model_validate_json(line).arm for line in new] == ["reference", "killed_later"]


def test_the_last_session_says_where_it_measured_if_it_does(tmp_path):
    with Store(tmp_path) as store:
        assert store.last_device() is None
        for i, (machine, device) in enumerate(
            [({"device": "cuda"}, "cuda"), ({}, None), ({"device": "abacus"}, None), (None, None)]
        ):
            store.add_session({"id": str(i)} | ({} if machine is None else {"machine": machine}))
            assert store.last_device() == device


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        pytest.param(signal.SIGKILL, -signal.SIGKILL, "", marks=pytest.mark.exhaustive),
        pytest.param(  # raises what SIGINT raises: see the two tests below
            signal.SIGTERM, 128 + signal.SIGTERM, "lorabench: stopped; the same command continues where it stopped\n",
            marks=pytest.mark.exhaustive,
        ),
        (signal.SIGINT, 128 + signal.SIGINT, "lorabench: stopped; the same command continues where it stopped\n"),
    ],
)  # fmt: skip
def test_a_worker_and_every_temporary_folder_end_with_their_sweep(plugin, tmp_path, number, code, said):
    args = [*ARGS[:4], "ablations=[hang]", "reference=[sdpa,adamw_foreach,padding,hang]", f"output={tmp_path}"]
    temporary = Path(tempfile.mkdtemp())  # not below tmp_path, whose length is too much for a socket's name
    first = subprocess.Popen(
        [sys.executable, "-m", "lorabench.sweep", *args], cwd=tmp_path, env={**plugin, "TMPDIR": str(temporary)},
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + PATIENCE_S
    while not workers_in(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    (found,) = workers_in(tmp_path)
    assert has_signal(found, "SigBlk", signal.SIGINT)  # so the server of workers had it too, among its imports
    assert ours_in(temporary)
    if number == signal.SIGINT:
        os.killpg(first.pid, number)  # Ctrl-C goes to all processes of the terminal
    else:
        first.send_signal(number)
    assert first.wait(60) == code
    while (workers_in(tmp_path) or ours_in(temporary)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not workers_in(tmp_path) and not ours_in(temporary)
    assert first.stderr is not None and first.stderr.read() == said
    shutil.rmtree(temporary)


def ours_in(folder: Path) -> list[Path]:
    """The sweep's temporary folders, and multiprocessing's for the server of workers."""
    return [path for name in ("lorabench-*", "pymp-*") for path in folder.glob(name)]


def has_signal(process: int | str, which: str, number: int) -> bool:
    """Whether this set of the process's signals, as the kernel calls it, has the signal."""
    signals = Path(f"/proc/{process}/status").read_text().split(f"{which}:")[1].split()[0]
    return bool(int(signals, 16) & 1 << (number - 1))


class Interrupted(multiprocessing.get_context("fork").Process):
    """A worker at whose start, when it runs already, a signal comes."""

    number = signal.SIGINT

    def start(self):
        super().start()
        os.kill(os.getpid(), self.number)
        time.sleep(0.1)  # until it has come, to whichever thread


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("entry", ["main", "probe"])
def test_a_signal_at_a_workers_start_leaves_no_worker(monkeypatch, tmp_path, entry, number):
    """Python's exit would wait for it, and the sweep, which has said that it stopped, would never end."""
    monkeypatch.setattr(Workers, "__init__", lambda self: None)
    monkeypatch.setattr(worker, entry, lambda *arguments: time.sleep(1000))
    monkeypatch.setattr(Interrupted, "number", number)
    workers = Workers()
    workers.method, workers._context = "spawn", SimpleNamespace(Pipe=multiprocessing.Pipe, Process=Interrupted)
    seating = Seating(Family(tuple(cells("ablations=[eager]"))), MACHINE, False, None, str(tmp_path))
    try:
        with cli._terminated_like_interrupted(), pytest.raises(KeyboardInterrupt) as stop:
            workers.probe("auto") if entry == "probe" else workers.open(seating, 60, print, tmp_path / "log")
        assert cli.exit_code(stop.value) == 128 + number
        assert not multiprocessing.active_children()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        for process in multiprocessing.active_children():
            kill(process)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_among_the_imports_is_one_line(tmp_path, number):
    """Sent as soon as the entry has said how to take it (of both signals SIGTERM is the last)."""
    first = subprocess.Popen(
        [sys.executable, "-m", "lorabench.sweep", *ARGS, f"output={tmp_path / 'new'}"], cwd=tmp_path,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    while not has_signal(first.pid, "SigCgt", signal.SIGTERM):
        assert first.poll() is None
    os.killpg(first.pid, number)
    out, err = first.communicate(timeout=60)
    assert (first.returncode, out, err) == (128 + number, "", "lorabench: stopped before it began\n")
    assert not (tmp_path / "new").exists()


def test_two_sweeps_into_one_folder(tmp_path):
    with Store(tmp_path):
        second = sweep(*ARGS, f"output={tmp_path}", cwd=tmp_path)
    assert second.returncode == 1
    assert "another sweep is writing" in second.stderr
    assert len(second.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("command", [["sweep"], ["sweep", "dry_run=true"], ["recommend"]])
def test_an_output_that_cannot_be_written(command, tmp_path, capsys):
    """A dry run says what the start would, and neither leaves anything."""
    (tmp_path / "file").write_text("here first")
    (tmp_path / "records.jsonl").mkdir()
    for folder, why in (
        (tmp_path / "file" / "sub", "Not a directory"),
        (Path("/proc/x/y"), "No such file or directory"),
        (tmp_path, "Is a directory"),
    ):
        assert cli.main([*command, f"output={folder}"]) == 2
        said = f"lorabench: output {folder} cannot be written: {why}; name another folder\n"
        assert capsys.readouterr().err == said
    assert (tmp_path / "file").read_text() == "here first"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "records.jsonl"]


def test_an_output_is_looked_at_and_not_made(tmp_path):
    check_output(tmp_path / "new" / "sub")
    assert not list(tmp_path.iterdir())


def in_a_child(work) -> int:
    """Exit code of `work()` in a forked process: 0 unless it raises."""
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_worker_that_begins_after_its_sweep_has_ended_ends_too():
    """The server may still fork what it was asked for while it imported."""
    ended = subprocess.Popen(["true"])
    ended.wait()

    def work():
        os.setsid()
        worker._die_with(ended.pid, None)
        time.sleep(5)

    assert in_a_child(work) == -signal.SIGKILL


def test_the_fork_servers_own_end_leaves_a_living_sweeps_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(leftovers, "DYING_S", 0.0)
    scratch, server = tmp_path / f"{scratch_prefix(os.getpid())}x", tmp_path / "server"
    scratch.mkdir()
    server.mkdir()
    leftovers.remove(os.getpid(), str(server))
    assert scratch.exists() and server.exists()
    ended = subprocess.Popen(["true"])
    ended.wait()
    leftovers.remove(ended.pid, str(server))
    assert scratch.exists() and not server.exists()


KILLED_EARLY = """
from lorabench.run.process import Workers
workers = Workers()
workers._context.set_forkserver_preload(["takes_long"])
print("looking", flush=True)
workers.probe("auto")
"""
TAKES_LONG = """
import os, time
open("began", "w").write(str(os.getpid()))
time.sleep(60)
"""


def test_nothing_holds_the_output_of_a_sweep_that_is_killed_while_its_server_imports(tmp_path):
    (tmp_path / "takes_long.py").write_text(TAKES_LONG)
    began = tmp_path / "began"
    first = subprocess.Popen(
        [sys.executable, "-c", KILLED_EARLY], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
    )  # fmt: skip
    while not (began.exists() and began.read_text()):
        assert first.poll() is None
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    assert first.stdout is not None and first.stdout.read() == "looking\n"
    assert time.monotonic() - killed < 30
    first.wait()
    os.kill(int(began.read_text()), signal.SIGKILL)


def test_a_read_only_output(tmp_path):
    with Store(tmp_path) as store:
        store.append(record("kept"))
    before = (tmp_path / "records.jsonl").read_bytes()
    tmp_path.chmod(0o500)

    def work():
        if os.geteuid() == 0:
            os.setuid(65534)  # root writes everywhere, nobody does not
        with pytest.raises(StoreError, match="cannot be written"), Store(tmp_path):
            pass

    assert in_a_child(work) == 0
    tmp_path.chmod(0o700)
    assert (tmp_path / "records.jsonl").read_bytes() == before


def test_a_report_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "report.html").mkdir()
    done = sweep(*ARGS[:4], "ablations=[cuda_graph]", f"output={tmp_path}", cwd=tmp_path)
    assert done.returncode == 1
    assert "report.html" in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert len(read_records(tmp_path)) == 2


def test_a_full_disk_loses_nothing(tmp_path):
    """The file-size limit stands for the full disk: the write is cut short in the middle of a line just the same."""
    with Store(tmp_path) as store:
        store.append(record("first"))
    kept = (tmp_path / "records.jsonl").read_bytes()

    def work():  # in a process of its own, since the limit cannot be raised again
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(kept) + 20, len(kept) + 20))
        with Store(tmp_path) as store, pytest.raises(StoreError, match="1 records in it are safe"):
            store.append(record("second", reason="x" * 5000))

    assert in_a_child(work) == 0
    assert (tmp_path / "records.jsonl").read_bytes() == kept


def test_a_corrupt_record_is_one_line_and_nothing_changes(tmp_path):
    with Store(tmp_path) as store:
        store.append(record("one"))
        store.append(record("two"))
    path = tmp_path / "records.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b'{"schema": 1, "key": 5}\n' + lines[1])
    content = path.read_bytes()
    with pytest.raises(RecordError, match="line 2 is not a record"):
        read_records(tmp_path)
    done = sweep(*ARGS, f"output={tmp_path}", cwd=tmp_path)
    assert done.returncode == 2
    assert "line 2 is not a record" in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert path.read_bytes() == content


def test_a_record_of_a_newer_lorabench_says_which_ones_can_be_read(tmp_path):
    (tmp_path / "records.jsonl").write_text('{"schema": 4, "family": "f"}\n')
    with pytest.raises(RecordError, match="schema 4: this lorabench reads schemas 1 to 3"):
        read_records(tmp_path)


def test_no_record_replaces_another(tmp_path):
    named = {"schema": 2, "kind": "train", "session": "s", "model": "m", "workload": "w", "design": "solo"}
    base = {**named, "reference": [], "candidate": [], "ablations": ["a"], "status": "unsupported"}
    made = [base | {"key": key, "reason": why} for key, why in (("k", "first"), ("other", "why"), ("k", "second"))]
    (tmp_path / "records.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in made))
    found = [(r.key, r.reason) for r in read_records(tmp_path)]
    assert found == [("k", "first"), ("other", "why"), ("k", "second")]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"status": "ok", "reason": None}, "status ok needs"),
        ({"status": "crash", "reason": None}, "needs a reason"),
        ({"status": "wrong_numerics", "rounds": [1], "seats": [0], "phases": {"step": [1.0]}}, "must not carry times"),
        ({"status": "faster"}, "Input should be"),
        ({"speed": 2}, "Extra inputs"),
        ({"schema": 4}, "Input should be 3"),
        ({"kind": "trian"}, "no kind named 'trian'; did you mean train"),
        (
            {
                "status": "ok",
                "rounds": [1],
                "seats": [0],
                "phases": {"read": [1.0]},
                "applied": {},
                "tokens": {"real": 1, "trained": 1, "padded": 0},
                "numerics": {"passed": True, "worst": "", "tensors": 1},
                "reason": None,
            },
            "kind train has no phase 'read'",
        ),
        ({"status": "ok", "rounds": [1], "seats": [0], "phases": {"step": [float("nan")]}}, "finite"),
    ],
)
def test_the_status_decides_which_fields_exist(fields, says):
    with pytest.raises(ValueError, match=says):
        record(**fields)


def test_titles_name_what_is_compared():
    assert [c.title for c in cells("ablations=[eager]")] == [
        "tiny-llama @ 2x16: reference against itself", "tiny-llama @ 2x16: eager",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "notes",
    [{"x": object()}, {"x": b"\xff\xfe"}, {"x": "\ud800"}, {"x": {1, 2}}, {"x": torch.float32}],
    ids=["an object", "bytes", "a surrogate", "a set", "a dtype"],
)
def test_notes_that_json_cannot_hold_never_brick_the_folder(tmp_path, notes):
    with Store(tmp_path) as store:
        store.append(record("before"))
        store.append(record("odd", notes=notes))
        store.append(record("after"))
    found = {r.key: r for r in read_records(tmp_path)}
    assert list(found) == ["before", "odd", "after"]
    odd = found["odd"]
    assert odd.notes.keys() == notes.keys() or (odd.status == "crash" and "cannot be written as JSON" in odd.reason)


def test_numbers_that_are_not_finite_are_kept_as_what_they_are(tmp_path):
    errors = {"grad_error": float("inf"), "grad_allowed": 0.1, "loss_error": float("nan")}
    wrong = Numerics(passed=False, worst="w", tensors=1, **errors)
    with Store(tmp_path) as store:
        store.append(record("k", status="wrong_numerics", numerics=wrong))
    (found,) = read_records(tmp_path)
    assert found.numerics.grad_error == float("inf") and found.numerics.loss_error != found.numerics.loss_error
    assert json.loads((tmp_path / "records.jsonl").read_text())["numerics"]["loss_error"] == "NaN"
