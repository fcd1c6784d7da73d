"""What the forkserver imports once, so that no worker has to: seconds a cell. Nothing here may touch the GPU."""

from importlib.util import find_spec

import torch
import torch.profiler  # noqa: F401
import transformers  # noqa: F401
from transformers import AutoModelForCausalLM  # noqa: F401
from transformers.models.llama import modeling_llama  # noqa: F401

import lorabench.measure.arm
import lorabench.measure.memory
import lorabench.measure.numerics
import lorabench.measure.profile
import lorabench.measure.roofline
import lorabench.measure.telemetry
import lorabench.measure.trial
import lorabench.run.worker  # noqa: F401

if (
    find_spec("bitsandbytes") is None
):  # else peft imports it, and it asks the driver for the GPU: that spoils every fork
    import peft  # noqa: F401
