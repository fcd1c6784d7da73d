"""Causal attention alone, through transformers' own interface to it, so that whatever a model's attention can be, this
can be.

    python -m lorabench.sweep 'models=[attention-32x8x128@1x4096]' 'ablations=[sdpa_math,flash_attention_2]'
    python -m lorabench.sweep 'models=[attention-32x8x128@gsm8k]' 'ablations=[packing,[flash_attention_2,packing]]'

Q (B, S, H·D), K and V (B, S, Hk·D) come in as projections give them, so that each head's view of them is transposed and
not contiguous; the output goes out as the next projection takes it. A workload of one length is dense; one of unequal
lengths is right-padded, or packed where a toggle packs it. The mask is made once, outside the clock: a model makes it
once for all of its layers. Every token has numbers of its own, wherever a toggle puts it, and what comes back is
compared token by token. The gate's gold is the formula in float64, sample by sample and head by head.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lorabench.contract.batch import Batch, Sample
from lorabench.contract.job import Job
from lorabench.contract.model import ModelSpec
from lorabench.contract.step import Step
from lorabench.measure import flops
from lorabench.measure.build import named_generator, to_device
from lorabench.measure.feed import FIRST_MARKER
from lorabench.measure.kind import Request
from lorabench.measure.kinds.operations.operation import Operation

SIZES = ("num_attention_heads", "num_key_value_heads", "head_dim")
SLOTS = ("attention", "batching")
INPUTS = ("q", "k", "v")
COMPARED: tuple[str, ...] = ("the output O", "the gradient dQ", "the gradient dK", "the gradient dV")
OF_TOKENS = ("input_ids", "labels")  # what of a model's batch is none of its attention's
NOT_GIVEN = ("do", "token", "attention_mask")  # to the function, which has its own form of the mask


class Attention(Operation):
    family: ClassVar[str] = "attention"
    form: ClassVar[str] = (
        "attention-HEADSxKVHEADSxDIM with a multiple of the key-value heads as heads, such as attention-32x8x128"
    )
    adapts: ClassVar[bool] = False

    def config(self, name: str) -> dict[str, Any] | None:
        match = re.fullmatch(r"attention-([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", name)
        if not match or int(match[1]) % int(match[2]):
            return None
        return dict(zip(SIZES, map(int, match.groups()), strict=True))

    def takes(self, slot: str) -> bool:
        return slot in SLOTS

    def shape(self, model: ModelSpec) -> flops.Shape:
        """Of useful pairs only: of each sample's length, half its square."""
        width = model.config["num_attention_heads"] * model.config["head_dim"]
        return flops.Shape(attention=width, frozen=0, head=0, adapter=0)

    def bytes_per_token(self, model: ModelSpec) -> int:
        return 4 * 8 * sum(_widths(model).values())

    def configuration(self, model: ModelSpec) -> Any:
        from transformers import LlamaConfig

        width = _widths(model)["q"]
        sizes = {name: size for name, size in model.config.items() if name != "model_type"}
        return LlamaConfig(hidden_size=width, num_hidden_layers=1, use_cache=False, **sizes)

    def base(self, request: Request, load: dict[str, Any]) -> nn.Module:
        return OneAttention(self.configuration(request.model), load.get("attn_implementation", "sdpa"))

    def step(self, request: Request, *args: Any) -> Step:
        return (Exact if request.upcast else AttentionStep)(request, *args)

    def imports(self) -> None:
        import transformers.masking_utils
        import transformers.models.llama.modeling_llama  # noqa: F401


def _widths(model: ModelSpec) -> dict[str, int]:
    """Numbers that one token has in Q, K and V."""
    heads, others, dim = (model.config[size] for size in SIZES)
    return {"q": heads * dim, "k": others * dim, "v": others * dim}


class OneAttention(nn.Module):
    """The attention between a decoder layer's projections, without them: no weights."""

    def __init__(self, config: Any, implementation: str) -> None:
        super().__init__()
        config._attn_implementation = implementation
        self.config, self.layer_idx, self.is_causal = config, 0, True
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> Tensor:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
        from transformers.models.llama.modeling_llama import eager_attention_forward

        shape = (*q.shape[:2], -1, self.config.head_dim)
        heads = (x.view(shape).transpose(1, 2) for x in (q, k, v))
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        out, _ = attend(self, *heads, mask, dropout=0.0, scaling=self.scaling, **kwargs)
        return out.reshape(q.shape).contiguous()


class Data:
    """What a trial's tokens have: q, k, v and the output's gradient, (T, width) each, in the order of the samples,
    whatever a batch makes of it. Rounded to the compute dtype."""

    def __init__(self, request: Request, tokens: int) -> None:
        self.request, self.tokens = request, tokens
        widths = _widths(request.model)
        self.widths = {**widths, "do": widths["q"]}

    def __call__(self, number: int) -> dict[str, Tensor]:
        return {name: self._drawn(f"{name}/{number}", width) for name, width in self.widths.items()}

    def _drawn(self, name: str, width: int) -> Tensor:
        generator = named_generator(self.request.seed, name, self.request.device)
        drawn = torch.randn(self.tokens, width, generator=generator, device=self.request.device)
        return drawn.to(self.request.dtype)


@dataclass
class Done:
    """What became of one batch; `token`: which token each of its positions is, -1 for padding."""

    token: Tensor
    out: Tensor
    gradients: tuple[Tensor, ...]


class AttentionStep(Step):
    """Forward and backward of attention over the step's batches."""

    updates = False

    def __init__(
        self, request: Request, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch],
        job: Job, samples: Sequence[Sample],
    ) -> None:  # fmt: skip
        """`batches` of tokens that are markers: see measure/feed.py."""
        self.markers = torch.tensor([t for s in samples for t in s.tokens], device=request.device)  # in rising order
        self.data = Data(request, len(self.markers))
        fed = [self._fed(model.config, to_device(batch, request.device)) for batch in batches]
        super().__init__(model, optimizer, fed, job=job, samples=samples)
        self.done: list[Done] = []
        self.fill(0)

    def _fed(self, config: Any, batch: Batch) -> Batch:
        """A batch of what attention gets in place of what a model gets."""
        from transformers.masking_utils import create_causal_mask

        ids, padding = batch.inputs["input_ids"], batch.inputs.get("attention_mask")
        token = torch.where(ids >= FIRST_MARKER, torch.searchsorted(self.markers, ids), -1)
        empty = {
            name: torch.zeros(*ids.shape, width, dtype=self.data.request.dtype, device=ids.device)
            for name, width in self.data.widths.items()
        }
        leaves = {name: x.requires_grad_(name in INPUTS) for name, x in empty.items()}
        positions = batch.inputs.get("position_ids", torch.arange(ids.shape[1], device=ids.device)[None])
        mask = create_causal_mask(config, empty["do"], padding, None, position_ids=positions)  # None: without a cache
        more = {name: x for name, x in batch.inputs.items() if name not in OF_TOKENS}
        inputs = {**more, **leaves, "mask": mask, "position_ids": positions, "token": token}
        return Batch(inputs, real=batch.real, padded=batch.padded, trained=batch.real)

    def fill(self, number: int) -> None:
        """The numbers of a trial to where its tokens are, in place. Padding has those of the first token, as it has
        some in a model, and no gradient."""
        drawn = self.data(number)
        with torch.no_grad():
            for batch in self.batches:
                token = batch.inputs["token"]
                for name, values in drawn.items():
                    batch.inputs[name].copy_(values[token.clamp_min(0)])
                batch.inputs["do"][token < 0] = 0

    def cleared(self) -> None:
        self.done.clear()

    def forward(self, batch: Batch) -> Tensor:
        self.now = batch.inputs
        return self.model(**{name: x for name, x in batch.inputs.items() if name not in NOT_GIVEN})

    def backward(self, loss: Tensor) -> None:
        """`loss` is the output (B, S, H·D)."""
        gradients = torch.autograd.grad(loss, [self.now[name] for name in INPUTS], self.now["do"])
        self.done.append(Done(self.now["token"], loss.detach(), gradients))

    def loss_of(self, out: Tensor) -> float:
        """This batch's part in the mean square of the output over all real tokens."""
        token = next(done.token for done in self.done if done.out.data_ptr() == out.data_ptr())
        norm = torch.linalg.vector_norm(out[token >= 0], dtype=torch.float32)
        return float(norm) ** 2 / (self.data.tokens * out.shape[-1])

    def compared(self, out: Tensor) -> dict[str, Tensor]:
        """Token by token, once all batches are done."""
        if len(self.done) < len(self.batches) or out.data_ptr() != self.done[-1].out.data_ptr():
            return {}
        rows: dict[str, Tensor] = {}
        for done in self.done:
            real = done.token >= 0
            for name, tensor in zip(COMPARED, (done.out, *done.gradients), strict=True):
                into = rows.setdefault(name, tensor.new_zeros(self.data.tokens, tensor.shape[-1], dtype=torch.float32))
                into[done.token[real]] = tensor[real].float()
        return rows


class Exact(Step):
    """The gate's gold: one batch of all tokens in their order, no padding, nothing of a toggle's."""

    updates = False

    def __init__(
        self, request: Request, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Batch],
        job: Job, samples: Sequence[Sample],
    ) -> None:  # fmt: skip
        self.lengths = flops.lengths_of(samples)
        count = sum(self.lengths)
        super().__init__(model, optimizer, [Batch({}, real=count, padded=0, trained=count)], job=job, samples=samples)
        self.data = Data(request, count)

    def forward(self, batch: Batch) -> Tensor:
        self.found = exact(**self.data(0), lengths=self.lengths, dim=self.model.config.head_dim)
        return self.found[0]

    def backward(self, loss: Tensor) -> None:
        """Done in forward, where each head's probabilities are at hand."""

    def loss_of(self, out: Tensor) -> float:
        return float(out.double().square().mean())

    def compared(self, out: Tensor) -> dict[str, Tensor]:
        return dict(zip(COMPARED, (x.float() for x in self.found), strict=True))


def exact(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lengths: Sequence[int], dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """O, dQ, dK and dV of causal attention within each sample, all (T, heads·dim), in float64 throughout:

    P = softmax(QKᵀ/√dim), O = PV
    dP = dO·Vᵀ, dS = P∘(dP - rowsum(dP∘P)), dQ = dS·K/√dim, dK = dSᵀQ/√dim, dV = PᵀdO
    """
    o, dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float64, device=x.device) for x in (q, q, k, v))
    group = q.shape[1] // k.shape[1]
    for sample in zip(*(x.split(list(lengths)) for x in (q, do, o, dq, k, v, dk, dv)), strict=True):
        of_queries, of_keys = ([x.split(dim, dim=1) for x in half] for half in (sample[:4], sample[4:]))
        for h in range(q.shape[1] // dim):
            _add_head(*(x[h] for x in of_queries), *(x[h // group] for x in of_keys))
    return o, dq, dk, dv


def _add_head(*tensors: Tensor) -> None:
    """Of one head q, do, o, dq, k, v, dk and dv, all (S, dim): adds to the outputs among them."""
    q, do, o, dq, k, v, dk, dv = tensors
    q, do, k, v = (x.double() for x in (q, do, k, v))
    scale, later = q.shape[1] ** -0.5, torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu(1)
    p = (scale * q @ k.T).masked_fill_(later, float("-inf")).softmax(-1)
    dp = do @ v.T
    ds = p * (dp - (dp * p).sum(-1, keepdim=True))
    for into, part in ((o, p @ v), (dq, scale * ds @ k), (dk, scale * ds.T @ q), (dv, p.T @ do)):
        into += part
