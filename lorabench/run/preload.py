"""What the forkserver imports once, so that no worker has to: seconds a cell. Nothing here may touch the GPU."""

import atexit
import gc
from importlib.util import find_spec

import rich.console
import rich.markup
import rich.table  # noqa: F401
import torch
import torch.profiler
import transformers  # noqa: F401

import lorabench.measure.build
import lorabench.measure.judging.gold_cache
import lorabench.measure.kinds.train
import lorabench.measure.seat
import lorabench.plan.compose  # with the next lines: what lorabench.sweep imports, which a worker imports anew
import lorabench.record.store
import lorabench.run.worker  # noqa: F401

# Two packages ask the driver for the GPU when they are imported, which spoils every fork, and are imported where they
# are installed: torchao by transformers' models (its kernels look for Triton), bitsandbytes by peft. What takes most of
# peft's time is torch's compiler (1.1 of 1.2 s), which asks nobody; the rest is left to each worker.
models = find_spec("torchao") is None
if models:
    from transformers import AutoModelForCausalLM  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401
if models and find_spec("bitsandbytes") is None:
    import peft  # noqa: F401
else:
    import torch._inductor.compile_fx  # noqa: F401

# What was imported stays: a worker that collects garbage need not walk it (0.15 s each time), and shares its pages.
gc.freeze()
atexit.register(gc.unfreeze)  # else triton's bindings report at the server's end that they leaked
