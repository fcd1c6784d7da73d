"""Here belongs what makes LoRA fine-tuning faster under a PEFT model: kernels in Triton, each with a torch path for a
CPU, the autograd nodes made of them, and `apply(model)` and `remove(model)`, which put them under a model and take them
away. It may import torch and triton, nothing else: PEFT and transformers are looked at through the model alone.
"""

from .patching import Change, Left, Report, apply, remove

__all__ = ["Change", "Left", "Report", "apply", "remove"]
