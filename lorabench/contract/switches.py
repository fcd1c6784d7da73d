"""torch's documented switches that are one for the whole process and decide how exactly it computes: what a toggle that
has its processes to itself (`global_patch`) may set, where it declares that (`switches`).
"""

from __future__ import annotations

from collections.abc import Sequence

# By torch's name: what else of the process it sets, in the words of measure/fairness.py.
SWITCHES = {
    "torch.set_float32_matmul_precision": ("torch.set_float32_matmul_precision", "TF32 in matrix products"),
    "torch.backends.cuda.matmul.allow_tf32": ("torch.set_float32_matmul_precision", "TF32 in matrix products"),
    "torch.backends.cudnn.allow_tf32": ("TF32 in cuDNN",),
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": ("reduced precision in bfloat16's sums",),
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": ("reduced precision in float16's sums",),
    "torch.set_flush_denormal": ("flushing of denormals",),
}


def switch_fault(switches: Sequence[str], global_patch: bool) -> str | None:
    """Why a toggle cannot declare these, or None."""
    if unknown := next((name for name in switches if name not in SWITCHES), None):
        return f"declares the switch {unknown!r}; those that can be declared are {', '.join(SWITCHES)}"
    if switches and not global_patch:
        return f"declares {switches[0]}, which is one for the whole process, and not global_patch = True"
    return None
