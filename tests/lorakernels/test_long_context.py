"""Long context: layers that are made again in backward, but for attention and down, beside the form without."""

import itertools
import weakref
from collections import Counter
from copy import deepcopy

import lorakernels
import pytest
import torch
from lorakernels import LongContext
from lorakernels.model import long_context as module
from lorakernels.nodes import mlp_node
from lorakernels.nodes.projection import Projection
from tiny_models import FAMILIES, batch, build, step, worst
from torch.utils._python_dispatch import TorchDispatchMode

OPTIONS = {
    "tiles": LongContext(mlp_rows=3),
    "again": LongContext(mlp_rows=64, keep_attention=False),
    "parked": LongContext(mlp_rows=5, offload=True),
}
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
TOKENS, WIDTH, HEADS, BYTES = 24, 32, 4, 4  # of `long`: one row, attention as wide as the model, float32


class Operators(TorchDispatchMode):
    """Counts torch's operators."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def long(options=True, **kwargs):
    """(a model of 2 layers, a batch of one row without a mask)."""
    model = build("llama", **kwargs)
    lorakernels.apply(model, long_context=options)
    ids = torch.randint(3, 101, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    return model, {"input_ids": ids, "labels": ids}


def some_of(grid, fast):
    """The grid, all of it exhaustive but for what `fast` says of its values."""
    return [pytest.param(*values, marks=[] if fast(*values) else [pytest.mark.exhaustive]) for values in grid]


# The options decide what a layer keeps, the family what it computes: each family once, and each option.
@pytest.mark.parametrize(
    ("options", "family"),
    some_of(itertools.product(OPTIONS, FAMILIES), lambda options, family: options == "tiles" or family == "llama"),
)
def test_same_as_peft(family, options):
    model, data = build(family), batch()
    loss, grads = step(deepcopy(model), data)
    report = lorakernels.apply(model, long_context=OPTIONS[options])
    assert report.counts["long_context"] == 2
    for _ in range(2):
        got, got_grads = step(model, data)
        assert abs(got - loss) < 2e-5 * abs(loss)
        assert worst(got_grads, grads) < 1e-4
        model.zero_grad()


@pytest.mark.parametrize("options", ["tiles", "parked", "again"])
def test_long_rows_have_attention_by_groups_of_heads(options, monkeypatch):
    """As many groups as divide the heads of k and v, forward and backward; the same loss and gradients."""
    model, data = build("llama", sizes={"num_attention_heads": 4, "num_key_value_heads": 2}), batch()
    loss, grads = step(deepcopy(model), data)
    lorakernels.apply(model, long_context=OPTIONS[options])
    counts = []
    for long in (module.LONG, 1):
        monkeypatch.setattr(module, "LONG", long)
        model.zero_grad()
        with Operators() as seen:
            got, got_grads = step(model, data)
        assert abs(got - loss) < 2e-5 * abs(loss) and worst(got_grads, grads) < 1e-4
        own = {
            n: sum(c for op, c in seen.counts.items() if "attention" in op and ("backward" in op) == n) for n in (0, 1)
        }
        counts.append((own[0], own[1]))
    assert counts[1] == (2 * counts[0][0], 2 * counts[0][1]) and min(counts[0]) > 0


@pytest.mark.parametrize(
    ("sizes", "implementation"),
    [({"num_key_value_heads": 1}, "sdpa"), ({"attention_dropout": 0.3}, "sdpa"), ({}, "eager")],
)
def test_attention_that_is_not_alike_in_all_heads_stays_whole(sizes, implementation, monkeypatch):
    monkeypatch.setattr(module, "LONG", 1)
    model = build("llama", sizes=sizes)
    model.set_attn_implementation(implementation)
    lorakernels.apply(model, long_context=True)
    heads, own = [], module.attend
    monkeypatch.setattr(
        module, "attend", lambda plan, q, *rest, **kw: (heads.append(q.shape[1]), own(plan, q, *rest, **kw))[1]
    )
    step(model, batch())
    assert set(heads) == {model.config.num_attention_heads}


MASKS = {(0.0, "llama", "tiles"), (0.3, "llama", "again"), (0.3, "llama", "parked"), (0.3, "gemma2", "tiles")}
MASKS |= {(0.0, "gemma2", "again"), (0.3, "mixtral", "parked"), (0.0, "mixtral", "tiles")}  # each two of the three once


@pytest.mark.parametrize(
    ("attention_dropout", "family", "options"),
    some_of(itertools.product((0.0, 0.3), ("llama", "gemma2", "mixtral"), OPTIONS), lambda *case: case in MASKS),
)
def test_dropout_has_the_masks_of_the_form_without(family, options, attention_dropout):
    """The same state of the random numbers gives the same masks, tiles or not, and leaves the same state behind."""
    model, data = build(family, lora_dropout=0.3, sizes={"attention_dropout": attention_dropout}), batch()
    made, states = [], []
    for long_context in (False, OPTIONS[options]):
        copy = deepcopy(model)
        lorakernels.apply(copy, long_context=long_context)
        torch.manual_seed(7)
        made.append(step(copy, data))
        states.append(torch.get_rng_state())
    (loss, grads), (got, got_grads) = made
    assert abs(got - loss) < 2e-5 * abs(loss) and worst(got_grads, grads) < 1e-4
    assert torch.equal(*states)
    torch.manual_seed(8)
    assert worst(step(copy, data)[1], grads) > 1e-2, "no mask was drawn"


@pytest.mark.parametrize("name, adapters", [("bfloat16", "same"), ("float16", "float32")])
def test_not_less_exact_than_without(name, adapters):
    model, data = build("llama", getattr(torch, name), autocast_adapter_dtype=adapters == "float32"), batch(4, 16)
    _, grads = step(deepcopy(model).to(torch.float32), data)
    _, plain = step(deepcopy(model), data)
    lorakernels.apply(model, long_context=OPTIONS["tiles"])
    _, got = step(model, data)
    assert all(g.dtype == plain[n].dtype for n, g in got.items())
    assert worst(got, grads) <= 2 * worst(plain, grads) + torch.finfo(getattr(torch, name)).eps


@pytest.mark.parametrize("options, again", [("tiles", 0), ("parked", 0), ("again", 2)])
def test_attention_runs_again_only_where_it_is_not_kept(options, again):
    model, data = long(OPTIONS[options])
    loss = model(**data).loss
    with Operators() as seen:
        loss.backward()
    assert seen.counts[ATTENTION] == again
    assert seen.counts[f"{ATTENTION}_backward"] == 2


def test_down_runs_once(monkeypatch):
    calls, own = [], mlp_node._down
    monkeypatch.setattr(mlp_node, "_down", lambda *a: (calls.append(a[0].shape[0]), own(*a))[1])
    model, data = long(LongContext(mlp_rows=7))
    loss = model(**data).loss
    assert calls == [6] * 8  # of 24 rows tiles of at most 7
    loss.backward()
    assert len(calls) == 8


class Packed:
    """A tensor that a graph holds."""

    def __init__(self, tensor):
        self.tensor = tensor.detach()  # a saved output would hold its own graph


def saved_bytes(options):
    """Bytes that the layers of a model keep between forward and backward, without its parameters."""
    model, data = long(options)
    packed: weakref.WeakSet[Packed] = weakref.WeakSet()

    def pack(t):
        packed.add(made := Packed(t))
        return made

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda p: p.tensor):
        hidden = model.get_base_model().model(input_ids=data["input_ids"], use_cache=False).last_hidden_state
    assert hidden.requires_grad
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages = {p.tensor.untyped_storage().data_ptr(): p.tensor.untyped_storage().nbytes() for p in packed}
    return sum(size for at, size in storages.items() if at not in own)


def test_what_is_kept_is_what_the_arithmetic_says():
    """Of a layer: its input and attention's output, one hidden state each, and a float32 a token and head. The final
    norm keeps its input and 1/rms."""
    hidden, lse = TOKENS * WIDTH * BYTES, TOKENS * HEADS * 4
    norm = hidden + TOKENS * 4
    assert saved_bytes(LongContext(mlp_rows=5)) == 2 * (2 * hidden + lse) + norm
    assert saved_bytes(LongContext(mlp_rows=5, keep_attention=False)) == 2 * hidden + norm
    assert saved_bytes(LongContext(mlp_rows=5, offload=True)) == norm
    assert saved_bytes(False) > 3 * saved_bytes(LongContext())


def test_off_leaves_everything_as_it_was():
    plain, data = build("llama"), batch()
    ours, off = deepcopy(plain), deepcopy(plain)
    assert str(lorakernels.apply(ours)) == str(lorakernels.apply(off, long_context=False))
    (_, one), (_, two) = step(ours, data), step(off, data)
    assert all(torch.equal(one[n], two[n]) for n in one)
    with Operators() as seen, Operators() as other:
        pass
    for model, mode in ((ours, seen), (off, other)):
        with mode:
            step(model, data)
    assert seen.counts == other.counts


def test_remove_undoes_it():
    plain, data = build("llama"), batch()
    loss, grads = step(deepcopy(plain), data)
    lorakernels.apply(plain, long_context=True)
    step(plain, data)
    lorakernels.remove(plain)
    plain.zero_grad()
    got, got_grads = step(plain, data)
    assert got == loss and all(torch.equal(g, grads[n]) for n, g in got_grads.items())
    report = lorakernels.apply(plain)
    assert "long_context" not in report.counts


class Kept(TorchDispatchMode):
    """What attention returned in forward, by layer, is written down where nobody holds it any more."""

    def __init__(self, gone):
        super().__init__()
        self.gone, self.layers = gone, itertools.count()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.name() == ATTENTION:
            weakref.finalize(out[0].untyped_storage(), self.gone.append, next(self.layers))
        return out


def test_behind_attention_s_backward_nobody_holds_its_result_nor_the_hidden_states_of_the_logits(monkeypatch):
    """Each is a hidden state of a row that fills the device. The loss, which whoever trains has, holds neither."""
    from lorakernels.model import head
    from lorakernels.model.parked import Parked

    gone, behind, ahead, logits = [], [], Parked.ahead, head.lazy_logits

    def watched(hidden, *others):
        weakref.finalize(hidden.untyped_storage(), gone.append, "hidden")
        return logits(hidden, *others)

    monkeypatch.setattr(head, "lazy_logits", watched)
    monkeypatch.setattr(Parked, "ahead", lambda s: (behind.append(list(gone)), ahead(s))[1])
    model, data = long(LongContext(mlp_rows=5, offload=True))
    with Kept(gone):
        loss = model(**data).loss
    assert "hidden" not in gone and 1 not in gone
    loss.backward()
    assert {"hidden", 1} <= set(behind[0]), "behind attention's backward of the last of two layers"


def test_a_parked_layer_comes_back_behind_the_next_one_s_attention(monkeypatch):
    from lorakernels.model.parked import Parked

    order = []
    own_fetch, own_back = Parked._fetch, Parked.back

    def number(parked):
        return seen.setdefault(id(parked), len(seen))

    seen: dict[int, int] = {}

    def park(self, *arguments):
        number(self)
        return own_init(self, *arguments)

    own_init = Parked.__init__
    monkeypatch.setattr(Parked, "__init__", park)
    monkeypatch.setattr(
        Parked, "_fetch", lambda s: (order.append(("fetch", number(s))) if s._here is None else None, own_fetch(s))[1]
    )
    monkeypatch.setattr(Parked, "back", lambda s: (order.append(("back", number(s))), own_back(s))[1])
    model = build("llama", sizes={"num_hidden_layers": 4})
    lorakernels.apply(model, long_context=LongContext(offload=True))

    class Attention(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "attention" in func.name() and "backward" in func.name():
                order.append("attention")
            return func(*args, **(kwargs or {}))

    with Attention():
        step(model, batch())
    # The last layer is still there; each of the others begins to come when the one behind it needs least.
    at = [[("back", n), "attention", ("fetch", n - 1)] for n in (3, 2, 1)]
    assert order == [*at[0], *at[1], *at[2], ("back", 0), "attention"]


@pytest.mark.parametrize("options", OPTIONS)
def test_retained_graphs_accumulation_and_a_second_backward(options):
    model, data = long(OPTIONS[options])
    parameters = [p for p in model.parameters() if p.requires_grad]
    loss = model(**data).loss
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    again = torch.autograd.grad(loss, parameters)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    with pytest.raises(RuntimeError, match="second"):
        torch.autograd.grad(loss, parameters)
    one, two = model(**data).loss, model(**data).loss  # two graphs at a time
    for a, b, c in zip(*(torch.autograd.grad(t, parameters) for t in (two, one)), first, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_another_adapter_between_forward_and_backward():
    model, data = build("llama", lora_dropout=0.0), batch()
    model.add_adapter("other", model.peft_config["default"])
    _, grads = step(deepcopy(model), data)
    lorakernels.apply(model, long_context=True)
    loss = model(**data).loss
    model.set_adapter("other")
    with torch.no_grad():
        model(**data)
    model.set_adapter("default")
    loss.backward()
    got = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert worst({n: got[n] for n in grads}, grads) < 1e-4


def test_autocast_is_that_of_the_forward():
    model, data = build("llama", autocast_adapter_dtype=True), batch()
    made = []
    for options in (False, OPTIONS["tiles"]):
        copy = deepcopy(model)
        lorakernels.apply(copy, long_context=options)
        with torch.autocast("cpu", torch.bfloat16):
            loss = copy(**data).loss
        loss.backward()
        made.append({n: p.grad for n, p in copy.named_parameters() if p.grad is not None})
    assert worst(made[1], made[0]) < 2e-2
    assert all(g.dtype == made[0][n].dtype for n, g in made[1].items())


def test_evaluation_and_generation_are_as_without():
    model, data = build("llama"), batch(padded=False)
    plain = deepcopy(model)
    lorakernels.apply(plain)
    lorakernels.apply(model, long_context=True)
    plain.eval(), model.eval()
    with torch.no_grad():
        assert torch.equal(plain(**data).logits, model(**data).logits)
        made = [m.generate(data["input_ids"][:1, :4], max_new_tokens=3, do_sample=False) for m in (plain, model)]
    assert torch.equal(*made)


def test_a_layer_that_is_not_known_is_reported():
    model = build("llama")
    model.get_base_model().model.layers[1].mlp.register_forward_hook(lambda *_: None)
    report = lorakernels.apply(model, long_context=True)
    assert report.counts["long_context"] == 1
    assert [e.name for e in report.left if e.part == "long_context"] == ["base_model.model.model.layers.1"]


def test_bad_input_is_one_line():
    for rows in (0, -3, 2.5, True):
        with pytest.raises(ValueError, match="expected how many rows a tile has, 1 or more"):
            LongContext(mlp_rows=rows)
    model = build("llama")
    with pytest.raises(TypeError, match="long_context takes True, False or"):
        lorakernels.apply(model, long_context=4096)
    with pytest.raises(ValueError, match="so mlp, rms_norm must be on"):
        lorakernels.apply(model, long_context=True, mlp=False, rms_norm=False)
    model.get_base_model().gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="switch the model's gradient checkpointing off"):
        lorakernels.apply(model, long_context=True)
    model.get_base_model().gradient_checkpointing_disable()
    lorakernels.apply(model, long_context=True)
    for reentrant in (False, True):
        model.get_base_model().gradient_checkpointing_enable({"use_reentrant": reentrant})
        with pytest.raises(RuntimeError, match="switch the model's gradient checkpointing off"):
            step(model, batch())


def test_seeds_are_drawn_as_without(monkeypatch):
    """In the second pass the members' seeds are the first pass's."""
    drawn, own = [], Projection.seeds
    monkeypatch.setattr(Projection, "seeds", lambda self, device: (drawn.append(own(self, device)), drawn[-1])[1])
    model, data = long(LongContext(mlp_rows=7), lora_dropout=0.2)
    loss = model(**data).loss
    forward = [s.tolist() for s in drawn]
    drawn.clear()
    loss.backward()
    layers = [forward[i : i + len(forward) // 2] for i in (0, len(forward) // 2)]
    assert [s.tolist() for s in drawn] == [*layers[1], *layers[0]]


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("p", [0.0, 0.2])
def test_on_a_gpu(options, p):
    """Real streams and pinned memory, Philox masks, attention of the GPU's own backends, against the form without."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "max_position_embeddings": 2048}
    model = build("llama", torch.bfloat16, sizes={**sizes, "num_hidden_layers": 6}, lora_dropout=p).cuda()
    ids = torch.randint(3, 101, (1, 1500), device="cuda")
    data, made = {"input_ids": ids, "labels": ids}, []
    chosen = LongContext(**{**vars(OPTIONS[options]), "mlp_rows": 400})
    for long_context in (False, chosen):
        copy = deepcopy(model)
        lorakernels.apply(copy, long_context=long_context)
        for _ in range(3):
            copy.zero_grad()
            torch.manual_seed(7)
            made.append(step(copy, data))
    (loss, grads), (got, got_grads) = made[2], made[5]
    assert abs(got - loss) < 1e-2 * abs(loss) and worst(got_grads, grads) < 3e-2
