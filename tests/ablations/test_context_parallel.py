"""torch's context parallel: batches are cut where torch cuts, and what a CPU cannot do is said before a start."""

from __future__ import annotations

import pytest
import torch
from helpers import MACHINE, sweep
from ranks_of import loss_of_saved, steps_of, together
from several_ranks import on_ranks

from lorabench.contract.batch import IGNORE, Batch
from lorabench.plan.registry import ablation
from lorabench.record.store import read_records
from lorabench_ablations.parallel import mesh
from lorabench_ablations.sequence import ContextParallel, ring

LENGTHS = (13, 9)


def batch() -> Batch:
    ids = torch.zeros(2, 13, dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        ids[row, :length] = torch.arange(1, length + 1) + 100 * row
    labels = ids.masked_fill(ids == 0, IGNORE)
    inputs = {"input_ids": ids, "labels": labels, "attention_mask": (ids > 0).long()}
    return Batch(inputs, real=sum(LENGTHS), padded=4, trained=sum(LENGTHS) - 2)


def cut(ranks):
    """(this rank's places as torch cuts a row, as the toggle does; its part of a batch; what SDPA says)."""
    pieces = mesh(2, "sequence")["sequence"]
    row = torch.arange(16)
    with ring(pieces, row):
        places = row.tolist()
    mine = ContextParallel().collate(batch())
    q = torch.ones(1, 1, 8, 4)
    with ring(pieces), pytest.raises(NotImplementedError) as said:
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    inputs = {name: part.tolist() for name, part in mine.inputs.items()}
    return places, inputs, (mine.real, mine.padded, mine.trained), str(said.value)


def test_each_rank_has_the_pieces_that_torch_s_ring_takes_it_to_have(tmp_path):
    found = on_ranks(2, tmp_path, cut)
    assert [places for places, *_ in found] == [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]
    for places, inputs, _, said in found:
        assert inputs["position_ids"] == [places, places]
        for row, length in enumerate(LENGTHS):  # each token is held against the one that follows it in the whole row
            token = [at + 1 + 100 * row if at < length else 0 for at in places]
            following = [at + 2 + 100 * row if at + 1 < length else IGNORE for at in places]
            assert inputs["input_ids"][row] == token and inputs["shift_labels"][row] == following
        assert "flash_attention_for_cpu" in said  # the reason that the toggle gives for refusing a CPU
    totals = [sum(counts) for counts in zip(*(counts for *_, counts, _ in found), strict=True)]
    assert totals == [sum(LENGTHS), 2 * 16 - sum(LENGTHS), sum(LENGTHS) - 2]


def test_a_cpu_is_refused_with_the_reason():
    assert ablation("context_parallel").requires.unmet(MACHINE) == (
        "needs a GPU, for torch's ring has CUDA's operators alone; this machine measures on its CPU"
    )


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_two_gpus_it_passes_the_gate_and_is_at_work(tmp_path):
    common = ("models=[smollm2-135m]", "weights=random", "workload=4x512", "world_size=2", "trials=3", "warmup=1")
    done = sweep(*common, "ablations=[context_parallel]", f"output={tmp_path}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    record = next(r for r in read_records(tmp_path) if r.ablations)
    assert record.status == "ok", record.reason
    assert record.applied["context_parallel"] == 30  # layers
    said = record.notes["context_parallel"]
    assert all(sent >= least for sent, least in zip(said["sent_bytes"], said["least_bytes"], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(("number", "case"), [(2, "context_parallel"), (4, {"context_parallel": {"ranks": 2}})])
def test_five_steps_are_as_in_one_process_and_alike_on_all_ranks(number, case, tmp_path):
    if torch.cuda.device_count() < number:
        pytest.skip(f"needs {number} GPUs")
    plain = steps_of((), device="cuda")
    found = together(number, {"case": (case,)}, tmp_path, device="cuda")["case"]
    assert isinstance(found, dict), found
    assert found["audits"]["context_parallel"] == 3  # layers
    assert found["loss"] == pytest.approx(plain["loss"], rel=0.01)
    assert found["gradients"].keys() == plain["gradients"].keys()
    for name, wanted in plain["gradients"].items():  # in bfloat16
        assert torch.dist(found["gradients"][name].cpu(), wanted.cpu()) <= 0.1 * wanted.norm().cpu() + 1e-6, name
    assert found["differs"] == 0  # after five steps, of all adapters, on all ranks
    assert found["last_loss"] == pytest.approx(plain["last_loss"], rel=0.01) and found["last_loss"] < found["loss"]
    assert loss_of_saved(str(tmp_path / "case"), device="cuda") == pytest.approx(found["last_loss"], rel=0.01)
