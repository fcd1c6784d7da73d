"""Jobs that train as CUDA graphs, on a CPU with a recorder that keeps a graph's promises: each job's losses and adapter
are those of the training that is not captured."""

from __future__ import annotations

import pytest
import torch
from fake_graphs import FakeGraphs
from safetensors.torch import load_file
from train.test_jobs_training import BENT, QUICK, SLOW, file, texts, trained, trainer  # noqa: F401

from lorabench import jobs as command
from lorabench.contract.ablation import Unsupported
from lorabench.measure.machine import describe
from lorabench.train.setup import Setup
from lorabench_ablations import joint_kernels
from lorabench_ablations.captured_training import CapturedTraining

MANY = {"epochs": 6, "steps": 12}


@pytest.fixture
def steps(monkeypatch):
    """Every captured step that is made."""
    made, own = [], CapturedTraining.__init__

    def noted(self, inner):
        own(self, inner)
        made.append(self)
        if isinstance(self.captured.graphs, FakeGraphs):
            self.captured.graphs.params = list(self.model.parameters())

    monkeypatch.setattr(CapturedTraining, "__init__", noted)
    return made


@pytest.fixture
def graphs(monkeypatch, steps):
    """The recorder, and every captured step that is made."""
    made = FakeGraphs()
    monkeypatch.setattr("lorakernels.capturing.step.graphs_for", lambda device: made)
    return made, steps


def adapter(folder, name):
    return load_file(folder / "out" / "adapters" / name / "adapter_model.safetensors")


def both(texts, *entries, rtol=1e-3, **keys):  # noqa: F811
    """(captured losses, uncaptured ones, whether all adapters are alike)."""
    _, got = trained(file(texts, *entries, ablations=["cuda_graph"], **keys))
    ours = {entry["name"]: adapter(texts, entry["name"]) for entry in entries}
    (texts / "out").rename(texts / "captured")
    _, wanted = trained(file(texts, *entries, **keys))
    for name, tensors in ours.items():
        plain = adapter(texts, name)
        assert all(torch.allclose(tensors[n], plain[n], rtol=rtol, atol=rtol / 100) for n in plain), name
    return got, wanted


@pytest.mark.parametrize("way", ["fused_multi_lora", "batched_packed", "batched"])
def test_every_job_has_the_losses_of_the_training_that_is_not_captured(graphs, texts, way):  # noqa: F811
    """Of other batches, learning rates and schedules; one ends before the others, whose graphs are others then."""
    fake, steps = graphs
    got, wanted = both(texts, QUICK | MANY, BENT | MANY, SLOW | {"epochs": 3}, way=way)
    assert {name: len(losses) for name, losses in got.items()} == {"quick": 12, "bent": 12, "slow": 6}
    for name, losses in wanted.items():
        assert got[name] == pytest.approx(losses, rel=1e-4), name
    replays = [step.status.replays for step in steps]
    assert len(steps) >= 2 and sum(replays) >= 6 and fake.replays > sum(replays), [str(step.status) for step in steps]


def test_jobs_whose_batches_are_one_micro_batch_are_replayed_from_the_third_step_on(graphs, texts):  # noqa: F811
    _, steps = graphs
    got, wanted = both(texts, QUICK | MANY, SLOW | MANY)
    assert got["slow"] == pytest.approx(wanted["slow"], rel=1e-4)
    (step,) = steps
    assert step.status.replays == 10 and dict(step.status.eager) == {"a shape is warming up": 2}, str(step.status)
    assert step.status.updates["optimizer replayed"] >= 16


def test_a_step_whose_gradients_are_not_finite_is_made_again_uncaptured(graphs, texts, monkeypatch):  # noqa: F811
    """In the slots one job's gradients can get into the others': each job's are then taken alone."""
    own, said, apart = joint_kernels.KernelStep.gradients_finite, [], []

    def finite(self):
        said.append(len(said))
        return own(self) & (len(said) != 6)

    monkeypatch.setattr(joint_kernels.KernelStep, "gradients_finite", finite)
    make = joint_kernels.KernelStep.settle
    monkeypatch.setattr(joint_kernels.KernelStep, "settle", lambda self, *a: apart.append(make(self, *a)))
    got, wanted = both(texts, QUICK | MANY, SLOW | MANY)
    assert got["quick"] == pytest.approx(wanted["quick"], rel=1e-4) and len(said) > 6
    assert len(apart) == 1 + 12, "one step of the captured training, and each of the other"


def test_a_job_that_is_no_number_ends_and_the_others_go_on(graphs, texts):  # noqa: F811
    """As uncaptured, though in the slots all losses of its step are no numbers."""

    def spoil(trainer):
        if trainer.tick == 5:
            with torch.no_grad():
                trainer.jobs[0].parameters[1].fill_(float("nan"))

    told: list[str] = []
    _, got = trained(file(texts, QUICK | MANY, SLOW | MANY, ablations=["cuda_graph"]), spoil, told)
    _, wanted = trained(file(texts, QUICK | MANY, SLOW | MANY, output="plain"), spoil)
    assert "quick ends at step 6: its loss is no number; the others go on" in told
    assert len(got["quick"]) == 5 and got["slow"] == pytest.approx(wanted["slow"], rel=1e-4)
    assert graphs[1][0].status.replays >= 3


def test_what_is_not_captured_in_a_training(graphs, texts):  # noqa: F811
    with pytest.raises(Unsupported, match="cuda_graph trains jobs that share micro-batches; expected way: fused"):
        trainer(file(texts, QUICK, way="sequential", ablations=["cuda_graph"]))
    assert not (texts / "out").exists(), "said before anything starts"
    _, steps = graphs
    trained(file(texts, QUICK, SLOW, ablations=["cuda_graph"], output="other"))
    assert steps[0].rehearsed is steps[0].inner, "sizes are tried uncaptured"


def test_graphs_are_tried_first_on_a_gpu_where_the_file_leaves_it_to_us(texts):  # noqa: F811
    def tried(device, **keys):
        setup = Setup(file(texts, QUICK, SLOW, way="auto", **keys), describe())
        setup.machine = setup.machine.model_copy(update={"device": device})
        return [[toggle.name for toggle in toggles] for toggles in command._tries(setup)]

    on_a_gpu, on_a_cpu = tried("cuda"), tried("cpu")
    assert on_a_gpu[0] == [*on_a_cpu[0][:-1], "cuda_graph", "fast_fit"]
    assert [names for names in on_a_gpu if "cuda_graph" not in names] == on_a_cpu
    assert len(on_a_gpu) == 2 * len(on_a_cpu)
    assert tried("cuda", ablations=["sdpa", "adamw_foreach"]) == on_a_cpu


def test_what_was_replayed_is_said_when_jobs_end(graphs, texts):  # noqa: F811
    told: list[str] = []
    trained(file(texts, QUICK | MANY, SLOW | {"epochs": 3}, ablations=["cuda_graph"]), told=told)
    said = [line for line in told if line.startswith("cuda_graph, ")]
    assert said == [f"cuda_graph, {names}: 4 of 6 micro-batches replayed; 2 not: a shape is warming up"
                    for names in ("quick, slow", "quick")]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["fused_multi_lora", "batched"])
def test_on_a_gpu(steps, texts, way):  # noqa: F811
    got, wanted = both(texts, QUICK | MANY, SLOW | MANY, way=way, rtol=2e-2)
    assert all(got[name] == pytest.approx(losses, rel=2e-3) for name, losses in wanted.items())
    assert steps[0].status.replays == 10, str(steps[0].status)
