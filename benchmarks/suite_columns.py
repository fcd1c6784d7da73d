"""What the page of a suite's toggles shows of its published folder, by the folder's name: for readme_tables.py."""

from __future__ import annotations

from collections.abc import Sequence

from lorabench.report import cells

ALONE = (cells.TIME, cells.WHOLE, cells.BOUND)
STEPS = (cells.TIME, cells.WHOLE, cells.MEMORY)
GPUS = (*STEPS, cells.SENDING)
READ = (cells.times("read"), cells.TIME, cells.WHOLE, cells.BOUND)
JOBS = (cells.TIME, cells.WHOLE, cells.MEMORY, cells.THROUGHPUT, cells.PADDING)  # of suites that train several
# By the folder's name, with its GPU where that is no H200: columns beside the toggle and the verdict.
SUITES: dict[str, Sequence[str]] = {
    **dict.fromkeys(("attention", "attention_fa4"), ALONE),
    **{f"attention_packed{one}": ALONE for one in ("", "_fa4", "_segments", "_wikisum")},
    **dict.fromkeys(("auto_batch_size", "checkpointing", "h100/checkpointing"), STEPS),
    **dict.fromkeys(("packing", "packing_1_7b", "packed_captured", "packed_captured_8b"), STEPS),
    **dict.fromkeys(("guide_135m", "guide_loss", "h100/guide_loss", "guide_memory", "guide_time"), STEPS),
    **dict.fromkeys(("guide_fits", "guide_packing", "guide_rest", "guide_tiled", "compiled_layers"), STEPS),
    **dict.fromkeys(("attention_packed_steps", "attention_packed_steps_fa4"), STEPS),
    **dict.fromkeys(("guide_weights", "h100/guide_weights"), STEPS),
    **dict.fromkeys(("scaling", "scaling_four", "several_gpus", "several_gpus_ours", "several_gpus_ours_fsdp2"), GPUS),
    **{f"several_gpus_{one}": GPUS for one in ("copy_engine", "fsdp2", "fsdp2_layers_kept", "one_rank", "operands")},
    **{f"several_gpus_{one}": GPUS for one in ("four", "four_mixed", "four_strategies", "fsdp2_four_layers_kept")},
    **{f"several_gpus_{one}": GPUS for one in ("plain_one_rank", "tensor", "zero", "zero2", "zero3", "zero_one_rank")},
    **dict.fromkeys(("mlora", "mlora_strategies", "mlora_ways"), JOBS),
    **{f"multi_lora_{one}": JOBS for one in ("jobs8_captured", "scaling", "slots")},
    **{f"multi_lora_{one}": JOBS for one in ("16_one_adapter", "16_slots", "16_slots_captured", "captured")},
    **{f"lorafusion_pipeline{one}": JOBS for one in ("", "_70b", "_70b_ours", "_70b_setting", "_kernels")},
    **{f"lorafusion_pipeline_{one}": JOBS for one in ("ours", "short_rows", "three", "two_adapters", "one_adapter")},
    **{f"lorafusion_{one}": JOBS for one in ("jobs", "jobs_cnn", "jobs_large", "jobs_wikisum", "over_mlora")},
    **{f"lorafusion_jobs_{one}": JOBS for one in ("heterogeneous", "mixed", "wikisum_joint")},
    **{f"long_context_{one}": STEPS for one in ("8k", "8k_peers", "8k_unsloth", "32k", "64k", "128k")},
    "optimizers": (cells.times("step"), cells.TIME, cells.WHOLE),
    **dict.fromkeys(("prequantized_loading", "prequantized_loading_one_thread"), READ),
    **{f"peers_rounds_8b{one}": STEPS for one in ("", "_again", "_8192", "_512")},
    "text_metrics": (cells.TIME, cells.WHOLE),
}
