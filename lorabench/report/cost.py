"""What training tokens cost at a given price of the GPU."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Rate = TypeVar("Rate", float, NDArray[np.float64])
MILLION, HOUR_S = 1e6, 3600.0


def usd_per_million_tokens(tokens_s: Rate, usd_per_gpu_hour: float, gpus: int = 1) -> Rate:
    """US dollars that a million real tokens cost at `tokens_s` tokens per second, on `gpus` GPUs that are paid by the
    hour. Steps alone: no loading, evaluation or waiting. Takes a number or an array; NaN stays NaN.

    Raises ValueError for a price that is negative or not a number, and for less than one GPU.
    """
    if not usd_per_gpu_hour >= 0 or gpus < 1:
        raise ValueError(f"expected a price of 0 or more and at least one GPU, got {usd_per_gpu_hour} and {gpus}")
    return MILLION / tokens_s * (usd_per_gpu_hour * gpus / HOUR_S)
