"""Models of many adapters whose products are made in the form in which each row makes its own adapter's columns."""

from copy import deepcopy

import lorakernels
import pytest
import torch
from lorakernels import tune
from lorakernels.nodes import mlp_activation, mlp_node, own_rows, projection
from lorakernels.ops import glu
from lorakernels.runtime import INTERPRET
from lorakernels.tuning import worth_trying
from test_multi import alone, loss_of, losses_and_gradients, model
from tiny_models import batch


def by_own_columns(monkeypatch):
    """From here on each product is made in the form in which a row makes its own adapter's columns, where there is one:
    the kernels' alone, which a CPU has in the interpreter."""
    pick = tune.pick
    monkeypatch.setattr(
        tune, "pick", lambda *given, **more: next((f for f in given[2] if f.startswith("own")), pick(*given, **more))
    )


in_the_interpreter = pytest.mark.skipif(not INTERPRET, reason="its kernels run in test_interpreter.py and on a GPU")


@in_the_interpreter
@pytest.mark.parametrize("third", [False, True], ids=["alike", "of several numbers of columns"])
def test_a_step_of_many_adapters_by_their_own_columns(third, monkeypatch):
    """S, dS, dA and dB, and the activation with them, in the form in which a row makes its own adapter's columns: as in
    the form that is first elsewhere. Some jobs have no rows. A captured step behind that finds its tables."""
    ranks = {f"adapter{i}": 1 + 5 * i % 8 for i in range(16)} | ({"third": 1} if third else {})
    said, calls, found = [0, 5, 5, 9, 1, 2, 3, 4, 6, 7, 8, 10, 11, 15, 15], [], []
    ids = batch(len(said), 5)["input_ids"]

    def counted(function):
        def run(*given, **more):
            if function.__name__ != "forward_lora_into" or given[-1] is not None:
                calls.append(function.__name__)
            return function(*given, **more)

        return run

    named = [(own_rows, "own_s"), (own_rows, "ds_and_db"), (own_rows, "own_a_gradients")]
    named += [(glu, "forward_lora_into"), (glu, "backward_whole_into")]
    for module, name in named:
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    if not third:
        monkeypatch.setattr(worth_trying, "GLU_ROWS", 0)
    for own in (False, True):
        torch.manual_seed(3)
        ours = model(ranks=ranks)
        jobs = lorakernels.apply_multi(ours, fused=True)
        calls.clear()
        with monkeypatch.context() as patched, tune.forced("all"):
            patched.setattr(own_rows, "own_of", (lambda *_: None) if not own else own_rows.own_of)
            patched.setattr(mlp_activation, "own_of", own_rows.own_of)
            patched.setattr(mlp_node, "own_of", own_rows.own_of)
            if own:
                by_own_columns(patched)
            found.append(losses_and_gradients(ours, jobs, ids, said))
    ran = [calls.count(name) for _, name in named]
    monkeypatch.setattr(projection, "table", None)
    with tune.forced("no such"):
        losses_and_gradients(ours, jobs, ids, said)
    layers = 2
    # S is made with its input where that is a norm's or somebody else's: down's alone is left, and the activation makes
    # it where rows are many, as it makes dS of gate and up and dA of down. q, k and v are too narrow for tiles of dS.
    of_s = [layers, 0] if third else [0, layers]
    assert ran == [of_s[0], 2 * layers, 3 * layers, of_s[1], layers]
    (wanted, theirs), (losses, own) = found
    torch.testing.assert_close(losses, wanted, rtol=1e-4, atol=1e-5)
    assert own.keys() == theirs.keys() and own
    for n, gradient in theirs.items():
        torch.testing.assert_close(own[n], gradient, rtol=1e-3, atol=1e-4 * gradient.abs().max().item())


@in_the_interpreter
@pytest.mark.parametrize("without", [[3], range(16)], ids=["one", "all"])
def test_rows_without_their_adapter_are_the_frozen_model_s_in_own_columns_too(without, monkeypatch):
    """Also where an adapter that is no number lay in their columns before, and where no row has one."""
    ranks = {f"adapter{i}": 1 + 5 * i % 8 for i in range(16)}
    said, found = list(range(16)), []
    ids = batch(16, 5)["input_ids"]
    for own in (False, True):
        if own:
            by_own_columns(monkeypatch)
        ours = model(ranks=ranks)
        jobs = lorakernels.apply_multi(ours, fused=True)
        with tune.forced("all"), torch.no_grad():
            for spoil in (False, True):
                for n, p in ours.named_parameters():
                    if spoil and "lora_" in n and any(f".adapter{job}." in n for job in without):
                        p.fill_(float("nan"))
                jobs.set(said, without=without if spoil else ())
                losses = loss_of(ours, ids)
            found.append(losses)
    assert found[0].isfinite().all()
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_on_a_gpu_in_bfloat16_by_own_columns(monkeypatch):
    """Each adapter's gradient is as far from float32's as plain PEFT's, at the most twice."""
    by_own_columns(monkeypatch)
    monkeypatch.setattr(worth_trying, "GLU_ROWS", 0)
    ranks = {f"adapter{i}": 8 for i in range(4)}
    gold, low = model(ranks=ranks).cuda(), model(dtype=torch.bfloat16, ranks=ranks).cuda()
    ids = batch(6, 300)["input_ids"].cuda()
    ours = deepcopy(low)
    _, found = losses_and_gradients(ours, lorakernels.apply_multi(ours, fused=True), ids, [2, 0, 0, 1, 0, 2])
    for name, where in (("adapter0", [1, 2, 4]), ("adapter1", [3]), ("adapter2", [0, 5])):
        _, wanted = alone(gold, ids, where, name)
        _, plain = alone(low, ids, where, name)
        for n, g in wanted.items():
            own, theirs = ((t[n].float() - g).norm() / g.norm() for t in (found, plain))
            assert own <= 2 * theirs + 0.02, n
