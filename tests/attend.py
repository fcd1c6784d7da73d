"""Attention over segments on a CPU, in the place of kernels that only a GPU has."""

from __future__ import annotations

import torch


def attend(name, q, k, v, cu, scale):
    """Causal attention within each segment, (T, heads, D), by matrix products; `name` is left in the trace."""
    with torch.profiler.record_function(name):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        rows = []
        for begin, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
            q_, k_, v_ = (x[begin:end].transpose(0, 1) for x in (q, k, v))
            later = torch.ones(end - begin, end - begin, dtype=torch.bool).triu(1)
            scores = (q_ @ k_.mT * (scale or q.shape[-1] ** -0.5)).masked_fill(later, float("-inf"))
            rows.append((scores.softmax(-1) @ v_).transpose(0, 1))
        return torch.cat(rows)


def varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    """In the place of `torch.nn.attention.varlen.varlen_attn`."""
    assert window_size == (-1, 0) and enable_gqa == (q.shape[1] != k.shape[1]) and cu_seq_q.dtype == torch.int32
    return attend("torch_attn::_varlen_attn", q, k, v, cu_seq_q, scale)
