"""Here belongs what makes LoRA fine-tuning faster under a PEFT model: kernels in Triton, each with a torch path for a
CPU, the autograd nodes made of them, `apply(model)` and `remove(model)`, which put them under a model and take them
away, `forget(model)`, which lets go of modules that have left it, `apply_multi(model)`, which trains several adapters
at once, `before_fully_shard(model)`, which prepares a model for FSDP2, and `status(model)`, which tells what ran. It
may import torch and triton, nothing else: PEFT and transformers are looked at through the model alone. `runtime.py` and
its neighbours are for all; the folders import those before them: `ops`, `tuning`, `nodes`, `model`, `capturing`.
"""

from .capturing.step import CapturedStep, capture
from .capturing.trainer import captured
from .model.forwards import Forwards
from .model.long_context import LongContext
from .model.multi import MultiAdapters, apply_multi
from .model.patching import Change, Left, Report, apply, before_fully_shard, forget, remove, status
from .tuning import tune

__version__ = "0.1.0"  # the one place: kernels/pyproject.toml reads it here

__all__ = [
    "CapturedStep", "Change", "Forwards", "Left", "LongContext", "MultiAdapters", "Report", "__version__", "apply",
    "apply_multi", "before_fully_shard", "capture", "captured", "forget", "remove", "status", "tune",
]  # fmt: skip
