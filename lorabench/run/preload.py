"""What the forkserver imports once, so that no worker has to: seconds a cell. Nothing here may touch the GPU."""

import peft  # noqa: F401
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
