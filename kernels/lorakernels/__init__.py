"""Kernels for LoRA fine-tuning in torch and Triton. `apply(model)` puts them under a PEFT model, `remove(model)` takes
them away; each kernel is also a function of its own: `from lorakernels.swiglu import swiglu`. On a CPU everything
runs through torch, on a GPU through Triton.
"""

from .patching import Change, Left, Report, apply, remove

__all__ = ["Change", "Left", "Report", "apply", "remove"]
