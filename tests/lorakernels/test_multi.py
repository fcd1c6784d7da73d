"""Several adapters of a PEFT model at once: each row has its own adapter's numbers and gradients, each adapter is
PEFT's own when it is saved, and what cannot be is refused in one line."""

import gc
from copy import deepcopy

import lorakernels
import pytest
import torch
from kernel_checks import exhaustive
from lorakernels import tune
from lorakernels.nodes import multi_linear, operand, projection, tail
from lorakernels.ops import multi_lora, multi_product
from lorakernels.ops.job_rows import JobRows
from lorakernels.runtime import INTERPRET
from lorakernels.tuning import worth_trying
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import LINEARS, batch, build
from torch.nn import functional as F

RANKS = {"first": 3, "second": 8, "third": 1}
FORMS = pytest.mark.parametrize("fused", [False, True], ids=["linears", "fused"])
FAMILIES = ("llama", "qwen2", "gemma2", "qwen3")
TAILS = [(dropout, fused) for dropout in (0.0, 0.5) for fused in (False, True)]


def model(family="llama", dtype=torch.float32, dropout=0.0, ranks=RANKS, sizes=None, wide=False, **lora):
    """With three adapters of their own ranks, alphas and, of the third, targets. wide: the adapters in float32."""
    base = build(family, dtype, sizes=sizes).unload()
    made = None
    for name, r in ranks.items():
        targets = LINEARS if name != "third" else ["q_proj", "down_proj"]
        config = LoraConfig(
            r=r, lora_alpha=2 * r + 1, target_modules=targets, lora_dropout=dropout, task_type="CAUSAL_LM", **lora
        )
        if made is None:
            made = get_peft_model(base, config, adapter_name=name, autocast_adapter_dtype=wide)
        else:
            made.add_adapter(name, config, autocast_adapter_dtype=wide)
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


@FORMS
@pytest.mark.parametrize(
    ("family", "checkpointing"),  # layers that run again are one function's of all families
    [("llama", True), *((f, False) for f in FAMILIES), *(exhaustive(f, True) for f in FAMILIES[1:])],
)
def test_every_row_has_its_own_adapter(family, checkpointing, fused):
    plain, ids = model(family), batch(4, 9)["input_ids"]
    ours = deepcopy(plain)
    if checkpointing:
        ours.gradient_checkpointing_enable({"use_reentrant": False})
    jobs = lorakernels.apply_multi(ours, fused=fused)
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
    if fused:
        assert lorakernels.status(ours).fused["layer"] >= 2 and not left_of(ours)


@FORMS
def test_rows_may_be_said_for_each_position(fused):
    ours, ids = model(), batch(2, 8)["input_ids"]
    jobs = lorakernels.apply_multi(ours, fused=fused)
    jobs.set([0, 1])
    wanted = ours(input_ids=ids).logits
    for said in (torch.tensor([[0] * 8, [1] * 8]), [0] * 8 + [1] * 8, JobRows([(0, 8), (1, 8)])):
        jobs.set(said)
        assert torch.equal(ours(input_ids=ids).logits, wanted)


@FORMS
def test_an_adapter_without_rows_gets_none(fused):
    ours, ids = model(), batch(2, 8)["input_ids"]
    lorakernels.apply_multi(ours, fused=fused).set([2, 0])
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


@FORMS
def test_dropout_is_on_in_training_and_off_in_evaluation(fused):
    ours, ids = model(dropout=0.5), batch(2, 8)["input_ids"]
    jobs = lorakernels.apply_multi(ours, fused=fused)
    jobs.set([0, 1])
    assert not torch.equal(ours(input_ids=ids).logits, ours(input_ids=ids).logits)
    ours.eval()
    assert torch.equal(ours(input_ids=ids).logits, ours(input_ids=ids).logits)


@FORMS
def test_each_adapter_is_saved_alone_and_is_plain_peft_s_bit_for_bit(tmp_path, fused):
    ours, ids = model(), batch(4, 9)["input_ids"]
    jobs = lorakernels.apply_multi(ours, fused=fused)
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


@FORMS
def test_remove_gives_peft_back(fused):
    ours, plain, ids = model(), model(), batch(2, 8)["input_ids"]
    jobs = lorakernels.apply_multi(ours, ["second", "first"], fused=fused)
    assert all(p.requires_grad == (".third." not in n) for n, p in ours.named_parameters() if "lora_" in n)
    jobs.set([0, 1])
    assert not torch.equal(ours(input_ids=ids).logits, plain(input_ids=ids).logits)
    jobs.remove()
    assert torch.equal(ours(input_ids=ids).logits, plain(input_ids=ids).logits)
    trained = {n for n, p in plain.named_parameters() if p.requires_grad}
    assert {n for n, p in ours.named_parameters() if p.requires_grad} == trained


@FORMS
@pytest.mark.filterwarnings("ignore:lorakernels leaves forwards:UserWarning")
def test_what_cannot_be_is_refused_in_one_line(fused):
    ours, ids = model(), batch(2, 8)["input_ids"]
    with pytest.raises(ValueError, match="adapters fourth: expected some of first, second, third, each once"):
        lorakernels.apply_multi(ours, ["fourth"])
    with pytest.raises(ValueError, match="q_proj: an adapter is a variant of LoRA"):
        lorakernels.apply_multi(model(use_dora=True))
    with pytest.raises(ValueError, match="no Linear without a bias"):
        lorakernels.apply_multi(model(lora_bias=True))
    wholes = {"modules_to_save": (["lm_head"], "ModulesToSave"), "trainable_token_indices": ([1, 2], "TrainableTokens")}
    for name, (whole, wrapper) in wholes.items():
        with pytest.raises(
            ValueError, match=f"PEFT's {wrapper}Wrapper trains it for first, second, third, for all rows"
        ):
            lorakernels.apply_multi(model(**{name: whole}), fused=fused)
    jobs = lorakernels.apply_multi(ours, fused=fused)
    with pytest.raises(ValueError, match="replaced forward"):
        lorakernels.apply_multi(ours, fused=fused)
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


def left_of(ours):
    """What was left to the model's own code, but for the loss, which is this file's own."""
    left = lorakernels.status(ours).left
    return {reason: count for (part, reason), count in left.items() if part != "linear_cross_entropy"}


def losses_and_gradients(ours, jobs, ids, said, **more):
    ours.zero_grad()
    jobs.set(said, **more)
    losses = loss_of(ours, ids)
    losses.sum().backward()
    return losses.detach(), gradients(ours)


@pytest.mark.filterwarnings("ignore:lorakernels leaves forwards:UserWarning")
def test_what_a_node_cannot_serve_goes_linear_by_linear():
    """A hook inside: never another adapter's rows, and counted."""
    ids, said = batch(4, 9)["input_ids"], [0, 1, 1, 2]
    apart, ours = model(), model()
    wanted, theirs = losses_and_gradients(apart, lorakernels.apply_multi(apart), ids, said)
    jobs = lorakernels.apply_multi(ours, fused=True)
    seen = []
    layers = ours.get_base_model().model.layers
    hook = layers[0].self_attn.q_proj.register_forward_hook(lambda *_: seen.append(1))
    losses, found = losses_and_gradients(ours, jobs, ids, said)
    assert len(seen) == 1 and left_of(ours) == {"a linear has hooks or a replaced forward": 1}
    torch.testing.assert_close(losses, wanted, rtol=1e-4, atol=1e-5)
    assert found.keys() == theirs.keys()
    for n, gradient in theirs.items():
        torch.testing.assert_close(found[n], gradient, rtol=1e-3, atol=1e-5)
    hook.remove()
    losses_and_gradients(ours, jobs, ids, said)
    assert sum(left_of(ours).values()) == 1


@pytest.mark.parametrize("family", ["llama", exhaustive("qwen2"), exhaustive("gemma2")])
@pytest.mark.parametrize("said", [[0, 1, 1, 2], [2, 1, 0, 1], exhaustive([1, 1, 1, 1])], ids=str)
def test_dropout_in_slots_is_that_of_linear_by_linear(family, said, monkeypatch):
    """Under one seed everywhere both forms draw the same masks, of each job's own probability."""
    same = lambda device, count=1: torch.full((count,), 77, device=device)  # noqa: E731
    for module in (multi_linear, projection):
        monkeypatch.setattr(module, "draw_seed", same)
    ids, found = batch(4, 9)["input_ids"], []
    for fused in (False, True):
        ours = model(family, dropout=0.5)
        for n, module in ours.named_modules():
            if n.endswith("lora_dropout.second"):
                module.p = 0.1
            if n.endswith("lora_dropout.third"):
                module.p = 0.0
        jobs = lorakernels.apply_multi(ours, fused=fused)
        found.append(losses_and_gradients(ours, jobs, ids, said))
        assert not fused or not left_of(ours)
    (wanted, theirs), (losses, own) = found
    torch.testing.assert_close(losses, wanted, rtol=1e-4, atol=1e-5)
    assert own.keys() == theirs.keys() and own
    for n, gradient in theirs.items():
        torch.testing.assert_close(own[n], gradient, rtol=1e-3, atol=1e-4 * gradient.abs().max().item())
    monkeypatch.undo()
    without = losses_and_gradients(ours.eval(), jobs, ids, said)[0]
    assert not torch.allclose(without, wanted, rtol=1e-3)


@pytest.mark.parametrize(
    ("dropout", "fused"),  # each once; in Triton's interpreter all of those that are asked for
    [case if case in ((0.0, False), (0.5, True)) or INTERPRET else exhaustive(*case) for case in TAILS],
    ids=lambda value: ("linears", "fused")[value] if isinstance(value, bool) else None,
)
def test_a_step_of_many_adapters_by_a_tail(fused, dropout, monkeypatch):
    """All products of the frozen weights in the form that looks adapters up: as in the form that is first. Three jobs
    have no rows. On a CPU its torch path runs, which nothing but this test takes."""
    ranks = {"third": 1} | {f"adapter{i}": 1 + 5 * i % 8 for i in range(16)}
    said = [0, 5, 5, 9, 1, 2, 3, 4, 6, 7, 8, 10, 11, 12, 16]
    ids, calls, found = batch(len(said), 5)["input_ids"], [], []
    product = multi_product.multi_product

    def counted(*given, **more):
        calls.append(given[5] if len(given) > 5 else more.get("tile"))
        return product(*given, **more)

    monkeypatch.setattr(multi_product, "TILES", {"tail": (32, 32, 32, 4, 1)})  # a tile is most of a layer's rows
    monkeypatch.setattr(multi_product, "DROPPED", (32, 32, 32, 4, 1))
    for module in (tail, multi_linear):
        monkeypatch.setattr(module, "multi_product", counted)
    if not INTERPRET:
        monkeypatch.setattr(worth_trying, "takes", lambda *_: True)
    for form in ("no such", "tail"):
        torch.manual_seed(3)
        ours = model(dropout=dropout, ranks=ranks)
        jobs = lorakernels.apply_multi(ours, fused=fused)
        calls.clear()
        with tune.forced(form):
            torch.manual_seed(4)
            found.append(losses_and_gradients(ours, jobs, ids, said))
    products = 2 * 2 * 4 - 1 if fused else 2 * 2 * 7 - 3  # of two layers, forward and dX but into the embeddings
    assert calls == ["tail"] * products
    (wanted, theirs), (losses, own) = found
    torch.testing.assert_close(losses, wanted, rtol=1e-4, atol=1e-5)
    assert own.keys() == theirs.keys() and own
    for n, gradient in theirs.items():
        torch.testing.assert_close(own[n], gradient, rtol=1e-3, atol=1e-4 * gradient.abs().max().item())


@pytest.mark.parametrize(
    ("fused", "batches"), [(True, [([0, 0], ()), ([1, 2], ())]), (False, [([0, 1], [0]), ([0, 1], [1])])]
)
def test_batches_of_other_jobs_come_back_to_tables_that_a_captured_graph_may_read(fused, batches, monkeypatch):
    """Made anew for each set of jobs, the first one's would be freed, and the graph that reads it with it."""
    gc.collect()  # tables of other tests
    made, ids, plain = [], batch(2, 5)["input_ids"], multi_lora.AdapterTable
    monkeypatch.setattr(multi_lora, "AdapterTable", lambda adapters: made.append(plain(adapters)) or made[-1])
    jobs, counts = lorakernels.apply_multi(ours := model(dropout=0.5), fused=fused), []
    made.clear()  # each linear has been looked at once, with all adapters
    for captures in (False, True):
        monkeypatch.setattr(multi_lora, "capturing", lambda x, captures=captures: captures)
        for said, without in batches:
            losses_and_gradients(ours, jobs, ids, said, without=without)
        counts.append(len(made))
    assert counts[0] == counts[1] > 0
    kept = [o._captured for o in gc.get_objects() if isinstance(o, multi_lora.AdapterTables)]
    assert {id(table) for tables in kept for table in tables} == set(map(id, made))


def test_one_job_s_rows_may_go_through_the_frozen_model_alone():
    ids, said = batch(4, 9)["input_ids"], [0, 1, 1, 2]
    found = []
    for fused in (False, True):
        ours = model()
        jobs = lorakernels.apply_multi(ours, fused=fused)
        usual, wanted = losses_and_gradients(ours, jobs, ids, said)
        with torch.no_grad():
            for n, p in ours.named_parameters():
                if ".second." in n:
                    p.fill_(float("nan"))
        losses, own = losses_and_gradients(ours, jobs, ids, said, without=[1])
        others = [0, 3]
        assert torch.equal(losses[others], usual[others]) and losses.isfinite().all()
        assert own.keys() == {n for n in wanted if ".second." not in n}
        assert all(torch.equal(g, wanted[n]) for n, g in own.items())
        found.append(losses)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    with ours.disable_adapter():
        jobs.set(None)
        torch.testing.assert_close(loss_of(ours, ids)[[1, 2]], losses[[1, 2]], rtol=1e-4, atol=1e-5)


def test_adapters_that_are_finite_may_stay_in_their_slots(monkeypatch):
    """Batches of one job after another, each forward before the backward of the one before it: not a bit is another,
    an adapter without rows gets no gradient, and no slot is emptied, or filled for a backward."""
    ids, calls = batch(4, 9)["input_ids"], []
    for name in ("_clear_absent", "_load"):
        own = getattr(operand.OperandBuffer, name)
        monkeypatch.setattr(operand.OperandBuffer, name, lambda *a, n=name, o=own: (calls.append(n), o(*a))[1])

    def run(**resident):
        ours = model()
        jobs, found, emptied, filled = lorakernels.apply_multi(ours, fused=True), [], 0, 0
        jobs.set([0, 0], **resident)
        waits = loss_of(ours, ids[:2])
        for number, job in enumerate((1, 2, 0)):
            calls.clear()
            jobs.set([job, job], **resident)
            following = loss_of(ours, ids[number : number + 2])
            emptied += calls.count("_clear_absent")
            calls.clear()
            waits.sum().backward()
            emptied, filled = emptied + calls.count("_clear_absent"), filled + calls.count("_load")
            found.append((waits.detach(), gradients(ours)))
            ours.zero_grad()
            waits = following
        return found, emptied, filled

    (usual, *often), (kept, *never) = run(), run(resident=[0, 1, 2])
    assert all(often) and never == [0, 0]
    for (wanted, theirs), (losses, own) in zip(usual, kept, strict=True):
        assert torch.equal(losses, wanted) and own.keys() == theirs.keys() and own
        assert all(torch.equal(own[n], gradient) for n, gradient in theirs.items())


def test_the_slot_of_a_job_without_rows_is_empty_whoever_had_rows_before(monkeypatch):
    clear, empty, ids = operand.OperandBuffer._clear_absent, [], batch(2, 9)["input_ids"]

    def cleared(own, op):
        clear(own, op)
        slots = zip(own.members, op.places, strict=True)
        empty.append(not any(tensor.any() for m, at in slots if m.lying is None for tensor in at))

    monkeypatch.setattr(operand.OperandBuffer, "_clear_absent", cleared)
    ours = model()
    jobs = lorakernels.apply_multi(ours, fused=True)
    for job in (0, 1, 0, 2, 1, 0):
        jobs.set([job, job])
        loss_of(ours, ids).sum().backward()
    assert len(empty) > 20 and all(empty)


def test_batches_of_other_jobs_before_the_backward_of_the_first():
    """A backward has the rows and the adapters of its own forward."""
    ids = batch(4, 9)["input_ids"]
    ours, plain = model(), model()
    jobs, apart = lorakernels.apply_multi(ours, fused=True), lorakernels.apply_multi(plain)
    for who, made in ((jobs, ours), (apart, plain)):
        who.set([0, 1, 1, 2])
        one = loss_of(made, ids).sum()
        who.set([2, 2, 0, 2])
        (one + loss_of(made, ids).sum()).backward()
    found, wanted = gradients(ours), gradients(plain)
    assert found.keys() == wanted.keys()
    for n, gradient in wanted.items():
        torch.testing.assert_close(found[n], gradient, rtol=1e-3, atol=1e-4 * gradient.abs().max().item())


@FORMS
def test_a_layer_that_a_checkpoint_runs_again_has_the_adapters_of_its_own_forward(fused):
    """As in a pipeline: forwards of other jobs come before the backward of the first, which is told its rows again."""
    ids, rows = batch(4, 9)["input_ids"], ([0, 0, 0, 0], [1, 1, 1, 1])
    found = []
    for checkpointing in (False, True):
        made = model()
        if checkpointing:
            made.gradient_checkpointing_enable({"use_reentrant": False})
            made.enable_input_require_grads()
        jobs, losses = lorakernels.apply_multi(made, fused=fused), []
        for job in rows:
            jobs.set(job)
            losses.append(loss_of(made, ids).sum())
        for job, loss in zip(rows, losses, strict=True):
            jobs.set(job)
            loss.backward()
        found.append(gradients(made))
    wanted, own = found
    assert own.keys() == wanted.keys() and {n.split(".")[-2] for n in own} == {"first", "second"}
    for n, gradient in wanted.items():
        torch.testing.assert_close(own[n], gradient, rtol=1e-3, atol=1e-4 * gradient.abs().max().item())


def test_a_copy_has_jobs_of_its_own():
    ids = batch(2, 8)["input_ids"]
    ours = model()
    jobs = lorakernels.apply_multi(ours, fused=True)
    jobs.set([0, 1])
    other = deepcopy(ours)
    wanted = ours(input_ids=ids).logits
    jobs.set([1, 0])
    assert torch.equal(other(input_ids=ids).logits, wanted)
    assert not torch.equal(ours(input_ids=ids).logits, wanted)


def test_switches_belong_to_the_fused_form():
    with pytest.raises(ValueError, match="one_gemm: expected fused=True"):
        lorakernels.apply_multi(model(), one_gemm=False)
    with pytest.raises(ValueError, match="long_context makes layers again"):
        lorakernels.apply_multi(model(), fused=True, long_context=True)
    ours = model()
    jobs = lorakernels.apply_multi(ours, fused=True, merge_projections=False, mlp=False)
    assert "mlp" not in jobs.report.counts and jobs.report.counts["qkv"] == 2
    ids, plain = batch(2, 8)["input_ids"], model()
    other = lorakernels.apply_multi(plain)
    found, wanted = (losses_and_gradients(m, j, ids, [2, 1]) for m, j in ((ours, jobs), (plain, other)))
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=1e-5)
    for n, gradient in wanted[1].items():
        torch.testing.assert_close(found[1][n], gradient, rtol=1e-3, atol=1e-4 * gradient.abs().max().item())


@pytest.mark.parametrize("one_gemm", [True, False])
def test_adapters_of_one_rank(one_gemm):
    ids, said, ranks = batch(4, 9)["input_ids"], [2, 0, 0, 1], dict.fromkeys(RANKS, 4)
    ours, plain = model(ranks=ranks), model(ranks=ranks)
    fused, apart = lorakernels.apply_multi(ours, fused=True, one_gemm=one_gemm), lorakernels.apply_multi(plain)
    found, wanted = (losses_and_gradients(m, j, ids, said) for m, j in ((ours, fused), (plain, apart)))
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=1e-5)
    assert found[1].keys() == wanted[1].keys()
    for n, gradient in wanted[1].items():
        torch.testing.assert_close(found[1][n], gradient, rtol=1e-3, atol=1e-4 * gradient.abs().max().item())


@pytest.mark.parametrize(("dtype", "wide"), [(torch.float16, True), (torch.bfloat16, False)])
def test_in_half_precision(dtype, wide):
    """Each adapter's gradient is as far from float32's as plain PEFT's, at the most twice; in float16 of young
    adapters, whose s·B a backward raises."""
    ids, scale = batch(4, 9)["input_ids"], 1e-3 if wide else 1.0

    def made(dtype):
        one = model(dtype=dtype, wide=wide)
        with torch.no_grad():
            for n, p in one.named_parameters():
                if "lora_B" in n:
                    p.mul_(scale)
        return one

    gold, low, ours = made(torch.float32), made(dtype), made(dtype)
    _, found = losses_and_gradients(ours, lorakernels.apply_multi(ours, fused=True), ids, [0, 1, 1, 2])
    assert lorakernels.status(ours).fused["layer"] == 2
    for name, where in (("first", [0]), ("second", [1, 2]), ("third", [3])):
        _, wanted = alone(gold, ids, where, name)
        _, plain = alone(low, ids, where, name)
        for n, g in wanted.items():
            own, theirs = ((t[n].float() - g).norm() / g.norm() for t in (found, plain))
            assert own <= 2 * theirs + 0.02, n


def test_a_base_in_nf4():
    """Its weights are expanded once for all jobs, and each has the gradients that rows kept apart have."""
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    made = model(sizes={"hidden_size": 64, "intermediate_size": 128, "head_dim": 16})
    for module in list(made.modules()):
        if hasattr(module, "base_layer"):
            old = module.base_layer
            new = bitsandbytes.nn.Linear4bit(
                old.in_features, old.out_features, False, quant_type="nf4", compute_dtype=torch.float32
            )
            new.weight = bitsandbytes.nn.Params4bit(old.weight.detach(), False, quant_type="nf4", module=new)
            module.base_layer = new.to("cpu")
    ids, said = batch(4, 9)["input_ids"], [2, 0, 0, 2]
    apart = lorakernels.apply_multi(made)
    wanted, theirs = losses_and_gradients(made, apart, ids, said)
    apart.remove()
    losses, found = losses_and_gradients(made, lorakernels.apply_multi(made, fused=True), ids, said)
    assert lorakernels.status(made).fused["layer"] == 2 and found.keys() == theirs.keys()
    torch.testing.assert_close(losses, wanted, rtol=1e-4, atol=1e-4)
    for n, gradient in theirs.items():
        torch.testing.assert_close(found[n], gradient, rtol=1e-3, atol=1e-3 * gradient.abs().max().item())
