"""A batch as one row of segments, and attention that goes by them: what varlen kernels want in place of a mask.

    cu_seq_lens (N + 1,), int32: where the N segments begin in the batch's B·S positions, and where the last one ends;
    transformers hands it from the model's keyword arguments down to every layer's attention.

A module of its own because it is torch throughout: a list of toggles is to be had without importing torch.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.nn import functional as F

from lorabench.contract.ablation import Unsupported
from lorabench.contract.batch import IGNORE, Batch

# From this torch on cuDNN's backward over segments is given their longest length (pytorch#186142); before, it took a
# head's width for that, and the gradients of longer segments were wrong on a GPU.
LENGTHS_READ = Version("2.14")
ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def segments(rows: int, width: int, mask: Tensor | None, positions: Tensor | None) -> Tensor:
    """`cu_seq_lens` of a batch, on the device of its mask or positions.

    A segment ends with its row, where positions do not go on by one, and where tokens turn into padding or back.
    Padding so is a segment of its own: no token attends to it, and nothing has to be gathered and scattered.
    """
    given = next((t for t in (mask, positions) if t is not None), None)
    begins = torch.zeros(rows, width, dtype=torch.bool, device=None if given is None else given.device)
    begins[:, 0] = True
    if mask is not None:
        begins[:, 1:] |= mask[:, 1:] != mask[:, :-1]
    if positions is not None:
        begins[:, 1:] |= positions[:, 1:] != positions[:, :-1] + 1
    starts = begins.flatten().nonzero().flatten()
    return torch.cat([starts, starts.new_tensor([rows * width])]).to(torch.int32)


def with_segments(batch: Batch) -> Batch:
    """The batch with the keyword arguments of transformers' varlen attention, so that no layer has to find them out
    from a mask or from positions: that would make the host wait for the device in every layer."""
    ids, inputs = batch.inputs["input_ids"], batch.inputs
    rows, width = ids.shape
    found = segments(rows, width, inputs.get("attention_mask"), inputs.get("position_ids"))
    return replace(batch, inputs=inputs | by_segments(found, int(found.diff().max())))


def by_segments(begins: Tensor, longest: int) -> dict[str, Any]:
    """Those keyword arguments."""
    return dict(zip(ARGUMENTS, (begins, begins, longest, longest), strict=True))


def alike(batches: Sequence[Batch]) -> tuple[Tensor, int] | None:
    """((batches, N + 1) `cu_seq_lens` of each, as many as the one with the most has: a segment that is added is empty;
    the longest segment). None where no batch has any: attention does not go by segments."""
    begins, _, longest, _ = ([b.inputs[name] for b in batches if name in b.inputs] for name in ARGUMENTS)
    if not begins:
        return None
    most = max(map(len, begins))
    ends = [batch.inputs["input_ids"].numel() for batch in batches]
    rows = [F.pad(x, (0, most - len(x)), value=end) for x, end in zip(begins, ends, strict=True)]
    return torch.stack(rows), max(longest)


def filled(batch: Batch, rows: int, width: int, masked: bool = False) -> Batch:
    """The batch padded to a shape. Rows that are added have no labels; what is added to a packed row is a sample of its
    own. `masked`: with a mask of the padding."""
    ids, labels = batch.inputs["input_ids"], batch.inputs["labels"]
    more = (0, width - ids.shape[1], 0, rows - ids.shape[0])
    inputs = batch.inputs | {"input_ids": F.pad(ids, more), "labels": F.pad(labels, more, value=IGNORE)}
    if (positions := batch.inputs.get("position_ids")) is not None:
        tail = torch.arange(more[1]).expand(len(positions), -1)
        inputs["position_ids"] = torch.cat([positions, tail], 1)
    if masked:
        mask = F.pad(batch.inputs.get("attention_mask", torch.ones_like(ids)), more)
        mask[ids.shape[0] :, 0] = 1  # attention of a row without any token would be a division by zero
        inputs["attention_mask"] = mask
    return Batch(inputs, batch.real, batch.padded + rows * width - ids.numel(), batch.trained)


def for_graphs(batch: Batch, width: int) -> Batch:
    """A batch of one packed row as a graph can take any other of its size: padded to `width` positions, of which those
    that were added are a segment of their own. Where attention goes by segments, as many as the next power of two,
    those that were added empty; and as the longest one the whole row, for a graph keeps what it was captured with."""
    from lorakernels.runtime import next_power_of_2  # only here: arms without our kernels do not import them

    made = filled(batch, 1, width)
    if (begins := batch.inputs.get(ARGUMENTS[0])) is None:
        return made
    count = len(begins) - (made.padded == batch.padded)  # of segments, the added one among them
    begins = F.pad(begins, (0, next_power_of_2(count) + 1 - len(begins)), value=width)
    return replace(made, inputs=made.inputs | by_segments(begins, width))


Kernel = Callable[..., Tensor]  # (q, k, v of (T, heads, D), cu_seq_lens, longest, scale, window, keyword arguments)


def through(kernel: Kernel) -> Callable[..., tuple[Tensor, None]]:
    """A kernel over segments as an attention function of transformers'."""

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
        scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
        softcap: float | None = None, s_aux: Tensor | None = None, position_ids: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None, max_length_q: int | None = None, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """query (B, H, S, D), key and value (B, Hk, S, D), attention_mask (B, S) → (B, S, H, D)."""
        if dropout or softcap is not None or s_aux is not None or not getattr(module, "is_causal", True):
            raise Unsupported("varlen attention is causal, without dropout, cap or sink; this model's is not")
        (rows, heads, width, dim), others = query.shape, key.shape[2]
        if others != width:
            raise Unsupported("varlen attention is for training; this is a query over a cache of keys")
        if cu_seq_lens_q is None or max_length_q is None:  # nobody has collated this batch: found out from its mask
            positions = position_ids if position_ids is not None and position_ids.dim() == 2 else None
            cu_seq_lens_q = segments(rows, width, attention_mask, positions).to(query.device)
            max_length_q = int(cu_seq_lens_q.diff().max())
        q, k, v = (x.transpose(1, 2).reshape(rows * width, -1, dim) for x in (query, key, value))
        window = -1 if sliding_window is None else sliding_window - 1
        out = kernel(q, k, v, cu_seq_lens_q, max_length_q, scaling, window, **kwargs)
        return out.view(rows, width, heads, dim), None

    return attention


def repeated(x: Tensor, heads: int) -> Tensor:
    """(T, Hk, D) → (T, heads, D), for a kernel without grouped-query attention."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def torch_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int, scale: float | None, window: int, **kwargs: Any
) -> Tensor:
    """torch's own. Its releases differ: `is_causal` became a window, and grouped queries came later."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    given: dict[str, Any] = {"window_size": (window, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:
        given["enable_gqa"] = k.shape[1] != q.shape[1]
    else:
        k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
    if window >= 0 and "window_size" not in known:
        raise Unsupported("varlen_attn of this torch has no sliding window; take a newer one")
    out: Any = varlen_attn(q, k, v, cu, cu, longest, longest, scale=scale, **given)
    return out


def cudnn_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int, scale: float | None, window: int, **kwargs: Any
) -> Tensor:
    """cuDNN's, which takes grouped queries as they are and knows no window. Nobody says that it takes rows which do not
    follow one another, as those of q in merged projections and of gradients with spare columns."""
    if 0 <= window < longest - 1:
        raise Unsupported("cuDNN's attention over segments has no sliding window; take varlen")
    if longest > q.shape[-1] and Version(torch.__version__) < LENGTHS_READ:
        wrong = f"torch before {LENGTHS_READ} has wrong gradients in cuDNN's attention over segments longer than a head"
        raise Unsupported(f"{wrong} is wide; take varlen")
    attend = torch.ops.aten._cudnn_attention_forward
    q, k, v = (x.contiguous() for x in (q, k, v))
    try:
        out = attend(q, k, v, None, cu, cu, longest, longest, True, 0.0, True, False, scale=scale)[0]
    except RuntimeError as error:
        if not re.search("cudnn|mha_graph", str(error).lower()):
            raise
        raise Unsupported(f"cuDNN's attention over segments refuses this: {str(error).splitlines()[0]}") from error
    if out.requires_grad:
        out.register_hook(torch.Tensor.contiguous)
    return out


def xformers_mask(batch: Batch) -> Batch:
    """The batch with xformers' own mask, which wants the lengths on the host."""
    from xformers.ops.fmha.attn_bias import BlockDiagonalCausalMask

    lengths = batch.inputs["cu_seq_lens_q"].diff().tolist()
    mask = BlockDiagonalCausalMask.from_seqlens(lengths, device=torch.device("cpu"))
    return replace(batch, inputs=batch.inputs | {"block_diagonal": mask})


def xformers_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int, scale: float | None, window: int,
    block_diagonal: Any = None, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """xformers' operator, which has a backward for as many heads of keys as of queries only."""
    from xformers.ops import memory_efficient_attention
    from xformers.ops.fmha.attn_bias import BlockDiagonalCausalMask

    if block_diagonal is None:
        block_diagonal = BlockDiagonalCausalMask.from_seqlens(cu.diff().tolist(), device=q.device)
    if window >= 0:
        block_diagonal = block_diagonal.make_local_attention(window + 1)
    k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
    try:
        return memory_efficient_attention(q[None], k[None], v[None], attn_bias=block_diagonal, scale=scale)[0]
    except NotImplementedError as error:  # its build fits neither this torch nor this CUDA, or no kernel takes this
        why = str(error).splitlines()[-1].strip()
        raise Unsupported(f"xformers has no operator for this here: {why}") from error


KERNELS: dict[str, Kernel] = {"varlen": torch_varlen, "varlen_cudnn": cudnn_varlen, "xformers": xformers_varlen}


def register(name: str) -> str:
    """Make a kernel known to transformers, and return its name there. Its mask function is flash attention's: a name
    without one gets no mask, and would attend to padding."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    full = f"lorabench_{name}"
    if full not in AttentionInterface._global_mapping:
        AttentionInterface.register(full, through(KERNELS[name]))
        AttentionMaskInterface.register(full, flash_attention_mask)
    return full
