"""Several adapters of a PEFT model at once: each row has its own adapter's numbers and gradients, each adapter is
PEFT's own when it is saved, and what cannot be is refused in one line."""

from copy import deepcopy

import lorakernels
import pytest
import torch
from lorakernels.ops.job_rows import JobRows
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import LINEARS, batch, build
from torch.nn import functional as F

RANKS = {"first": 3, "second": 8, "third": 1}


def model(family="llama", dtype=torch.float32, dropout=0.0, **lora):
    """With three adapters of their own ranks, alphas and, of the third, targets."""
    base = build(family, dtype).unload()
    made = None
    for name, r in RANKS.items():
        targets = LINEARS if name != "third" else ["q_proj", "down_proj"]
        config = LoraConfig(
            r=r, lora_alpha=2 * r + 1, target_modules=targets, lora_dropout=dropout, task_type="CAUSAL_LM", **lora
        )
        if made is None:
            made = get_peft_model(base, config, adapter_name=name, autocast_adapter_dtype=False)
        else:
            made.add_adapter(name, config, autocast_adapter_dtype=False)
    torch.manual_seed(5)
    with torch.no_grad():
        for n, p in made.named_parameters():
            if "lora_B" in n:
                p.copy_(torch.randn(p.shape) * 0.1)
    return made.train()


def loss_of(made, ids):
    logits = made(input_ids=ids, use_cache=False).logits.float()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)


def gradients(made):
    return {n: p.grad.clone() for n, p in made.named_parameters() if p.grad is not None}


def alone(made, ids, job, name):
    made.set_adapter(name)
    made.zero_grad()
    own = loss_of(made, ids[torch.as_tensor(job)])
    own.sum().backward()
    return own.detach(), gradients(made)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_row_has_its_own_adapter(family, checkpointing):
    plain, ids = model(family), batch(4, 9)["input_ids"]
    ours = deepcopy(plain)
    if checkpointing:
        ours.gradient_checkpointing_enable({"use_reentrant": False})
    jobs = lorakernels.apply_multi(ours)
    assert jobs.linears == 14 and jobs.adapters == tuple(RANKS)
    jobs.set([0, 1, 1, 2])
    losses = loss_of(ours, ids)
    losses.sum().backward()
    found = gradients(ours)
    for name, where in (("first", [0]), ("second", [1, 2]), ("third", [3])):
        wanted, theirs = alone(plain, ids, where, name)
        torch.testing.assert_close(losses[where], wanted, rtol=1e-4, atol=1e-5)
        assert {n for n in found if f".{name}." in n} == set(theirs)
        for n, gradient in theirs.items():
            torch.testing.assert_close(found[n], gradient, rtol=1e-3, atol=1e-4 * gradient.abs().max().item())


def test_rows_may_be_said_for_each_position():
    ours, ids = model(), batch(2, 8)["input_ids"]
    jobs = lorakernels.apply_multi(ours)
    jobs.set([0, 1])
    wanted = ours(input_ids=ids).logits
    for said in (torch.tensor([[0] * 8, [1] * 8]), [0] * 8 + [1] * 8, JobRows([(0, 8), (1, 8)])):
        jobs.set(said)
        assert torch.equal(ours(input_ids=ids).logits, wanted)


def test_an_adapter_without_rows_gets_none():
    ours, ids = model(), batch(2, 8)["input_ids"]
    lorakernels.apply_multi(ours).set([2, 0])
    loss_of(ours, ids).sum().backward()
    assert {n.split(".")[-2] for n in gradients(ours)} == {"first", "third"}


def test_a_job_that_is_nan_leaves_the_others_bitwise_alone():
    def run(spoil):
        ours, ids = model(), batch(4, 9)["input_ids"]
        jobs = lorakernels.apply_multi(ours)
        if spoil:
            with torch.no_grad():
                for n, p in ours.named_parameters():
                    if ".second." in n:
                        p.fill_(float("nan"))
        jobs.set([0, 1, 1, 2])
        losses = loss_of(ours, ids)
        losses.sum().backward()
        return losses.detach(), gradients(ours)

    (usual, wanted), (losses, found) = run(False), run(True)
    assert losses[1].isnan().any() and torch.equal(losses[[0, 3]], usual[[0, 3]])
    assert all(torch.equal(found[n], g) for n, g in wanted.items() if ".second." not in n)


def test_dropout_is_on_in_training_and_off_in_evaluation():
    ours, ids = model(dropout=0.5), batch(2, 8)["input_ids"]
    jobs = lorakernels.apply_multi(ours)
    jobs.set([0, 1])
    assert not torch.equal(ours(input_ids=ids).logits, ours(input_ids=ids).logits)
    ours.eval()
    assert torch.equal(ours(input_ids=ids).logits, ours(input_ids=ids).logits)


def test_each_adapter_is_saved_alone_and_is_plain_peft_s_bit_for_bit(tmp_path):
    ours, ids = model(), batch(4, 9)["input_ids"]
    jobs = lorakernels.apply_multi(ours)
    owned = {name: [p for n, p in ours.named_parameters() if f".{name}." in n] for name in RANKS}
    optimizers = {name: torch.optim.AdamW(own, lr=1e-2) for name, own in owned.items()}
    jobs.set([0, 1, 1, 2])
    for _ in range(2):
        loss_of(ours, ids).sum().backward()
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
    ours.save_pretrained(tmp_path)
    for name in RANKS:
        again = PeftModel.from_pretrained(build("llama").unload(), tmp_path / name)
        loaded = {n.replace(".default.", f".{name}."): p for n, p in again.named_parameters() if "lora_" in n}
        mine = {n: p for n, p in ours.named_parameters() if f".{name}." in n}
        assert loaded.keys() == mine.keys() and len(mine) >= 8
        assert all(torch.equal(p, mine[n]) for n, p in loaded.items())
        jobs.set(None)
        ours.set_adapter(name)
        ours.eval(), again.eval()
        assert torch.equal(ours(input_ids=ids).logits, again(input_ids=ids).logits)


def test_remove_gives_peft_back():
    ours, plain, ids = model(), model(), batch(2, 8)["input_ids"]
    jobs = lorakernels.apply_multi(ours, ["second", "first"])
    assert all(p.requires_grad == (".third." not in n) for n, p in ours.named_parameters() if "lora_" in n)
    jobs.set([0, 1])
    assert not torch.equal(ours(input_ids=ids).logits, plain(input_ids=ids).logits)
    jobs.remove()
    assert torch.equal(ours(input_ids=ids).logits, plain(input_ids=ids).logits)
    trained = {n for n, p in plain.named_parameters() if p.requires_grad}
    assert {n for n, p in ours.named_parameters() if p.requires_grad} == trained


def test_what_cannot_be_is_refused_in_one_line():
    ours, ids = model(), batch(2, 8)["input_ids"]
    with pytest.raises(ValueError, match="adapters fourth: expected some of first, second, third, each once"):
        lorakernels.apply_multi(ours, ["fourth"])
    with pytest.raises(ValueError, match="q_proj: an adapter is a variant of LoRA"):
        lorakernels.apply_multi(model(use_dora=True))
    with pytest.raises(ValueError, match="no Linear without a bias"):
        lorakernels.apply_multi(model(lora_bias=True))
    jobs = lorakernels.apply_multi(ours)
    with pytest.raises(ValueError, match="replaced forward"):
        lorakernels.apply_multi(ours)
    with pytest.raises(ValueError, match="job 3: expected one of the 3 from 0"):
        jobs.set([0, 3])
    jobs.set([0, 1, 2])
    with pytest.raises(ValueError, match="the jobs were set for 3"):
        ours(input_ids=ids)
    jobs.set([0, 1])
    with ours.disable_adapter(), pytest.raises(RuntimeError, match=r"the adapters are disabled; expected set\(None\)"):
        ours(input_ids=ids)


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, True])
def test_on_a_gpu_in_bfloat16(checkpointing):
    """Each adapter's gradient is as far from float32's as plain PEFT's, at the most twice."""
    gold, low = model().cuda(), model(dtype=torch.bfloat16).cuda()
    ids = batch(4, 9)["input_ids"].cuda()
    ours = deepcopy(low)
    if checkpointing:
        ours.gradient_checkpointing_enable({"use_reentrant": False})
    jobs = lorakernels.apply_multi(ours)
    jobs.set([0, 1, 1, 2])
    loss_of(ours, ids).sum().backward()
    found = gradients(ours)
    for name, where in (("first", [0]), ("second", [1, 2]), ("third", [3])):
        _, wanted = alone(gold, ids, where, name)
        _, plain = alone(low, ids, where, name)
        for n, g in wanted.items():
            own, theirs = ((t[n].float() - g).norm() / g.norm() for t in (found, plain))
            assert own <= 2 * theirs + 0.02, n
