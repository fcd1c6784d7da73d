"""Here belongs what makes LoRA fine-tuning faster under a PEFT model: kernels in Triton, each with a torch path for a
CPU, the autograd nodes made of them, `apply(model)` and `remove(model)`, which put them under a model and take them
away, and `status(model)`, which tells what ran. It may import torch and triton, nothing else: PEFT and transformers are
looked at through the model alone.
"""

from .capture_step import CapturedStep, capture
from .capture_trainer import captured
from .forwards import Forwards
from .patching import Change, Left, Report, apply, remove, status

__version__ = "0.1.0"  # the one place: kernels/pyproject.toml reads it here

__all__ = [
    "CapturedStep", "Change", "Forwards", "Left", "Report", "__version__", "apply", "capture", "captured", "remove",
    "status",
]  # fmt: skip
