"""Every toggle that is here passes the referee where it can run: on a CPU, and with `-m gpu` on a GPU.

A referee that refuses what is right is found nowhere else: the tests of a toggle do not run a sweep, and those of the
referee have toggles of their own. What a machine lacks is `unsupported` there, with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from helpers import sweep

from lorabench.plan import registry
from lorabench.record.schema import Record
from lorabench.record.store import read_records

MODEL = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 512, "max_position_embeddings": 512,
}  # fmt: skip
LENGTHS = "workload={glue:{samples:8,batch_size:2}}"  # micro-batches of samples of different lengths
TEXT = "{text_metrics:{max_new_tokens:4,samples:2}}"

# By sweep: its command line, and its toggles as they are written there, by the name of the toggle that is meant.
Toggles = dict[str, str]


def plain(*names: str) -> Toggles:
    return {name: name for name in names}


SWEEPS: dict[str, tuple[list[str], Toggles]] = {
    "steps": (["workload=4x64"], plain(
        "activation_offloading", "adamw", "adamw_8bit", "adamw_fused", "axolotl", "axolotl_liger", "cuda_graph",
        "eager", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention", "fp8_base",
        "frozen_limit", "fused_linear_cross_entropy", "fused_rms_norm", "fused_rope", "gradient_checkpointing",
        "liger", "lora_addmm", "lora_kernels", "lora_mlp_kernel", "lora_o_kernel", "lora_qkv_kernel", "nf4_base",
        "paged_adamw_32bit", "paged_adamw_8bit", "save_on_cpu", "sdpa_cudnn", "sdpa_efficient", "sdpa_flash",
        "sdpa_math", "selective_checkpointing", "torch_compile", "torch_compile_layers", "unsloth", "varlen",
        "varlen_cudnn", "xformers",
        "cut_cross_entropy", "disk_offloading", "float8_training", "gradient_accumulation", "hqq", "layer_offloading",
        "liger_fused_linear_cross_entropy",
        "load_in_8bit", "loraplus", "qat", "tf32", "torchao_adamw_8bit", "torchao_fp8", "torchao_int8",
        "trl_fused_lm_head", "unsloth_checkpointing",
    ) | {
        "neftune": "{neftune:{neftune_noise_alpha:0.02}}",
        "tiled_loss": "{tiled_loss:{rows:32}}",
        "tiled_mlp": "{tiled_mlp:{shards:4}}",
        "long_context": "{long_context:{mlp_rows:24}}",
        "adapters_in_compute_dtype": "[adapters_in_compute_dtype,adamw]",
        "lora_addmm": "[adapters_in_compute_dtype,lora_addmm]" if torch.cuda.is_available() else "lora_addmm",
    }),
    "without checkpointing": (
        ["workload=4x64", "reference=[sdpa,adamw_fused,padding,gradient_checkpointing]"],
        plain("adamw_foreach", "no_gradient_checkpointing"),
    ),
    "without tiles": (
        ["workload=4x64", "reference=[sdpa,adamw_fused,padding,{tiled_loss:{rows:32}}]"], plain("transformers_loss"),
    ),
    "batches": ([LENGTHS], plain("group_by_length", "packing", "padding_free", "token_budget")),
    "sizes": (["workload={gsm8k_singly:{samples:4}}"], {
        name: f"{{{name}:{{budget_gib:1}}}}"
        for name in ("auto_batch_size", "doubling_batch_size", "find_executable_batch_size")
    }),
    "padding": ([LENGTHS, "reference=[eager,adamw_fused,packing]"], plain("padding", "sdpa")),
    "jobs": (["workload=two_jobs"], plain("batched", "batched_packed", "fused_multi_lora", "processes")),
    "schedulers": (["workload=two_jobs", "reference=[sdpa,adamw_fused,padding,batched_packed]"], {
        name: f"{{{name}:{{tokens:64}}}}"
        for name in ("fifo", "fast_fit", "optimal_fit", "residual_capacity", "lorafusion")
    }),
    "jobs one by one": (
        ["workload=two_jobs", "reference=[sdpa,adamw_fused,padding,batched]"], plain("sequential"),
    ),
    "loading": (["kind=load", "workload=warm_cache", "reference=[quantize_at_load]"], {
        **plain("prequantized_loading", "parallel_reading", "transformers_loading"),
        "fastsafetensors": "[prequantized_loading,fastsafetensors]",
    }),
    "quantizing": (
        ["kind=load", "workload=warm_cache", "reference=[prequantized_loading]"], plain("quantize_at_load"),
    ),
    "evaluation": (["kind=evaluate", "workload=8x64"], {
        "text_metrics": TEXT, "no_kv_cache": f"[{TEXT},no_kv_cache]",
        "batched_generation": f"[{TEXT},batched_generation]",
    }),
    "loss alone": (
        ["kind=evaluate", "workload=8x64", f"reference=[sdpa,{TEXT}]"], plain("no_text_metrics"),
    ),
    "linears": (["kind=op", "models=[linear-256x256]"], plain("bare_linear")),
}  # fmt: skip
# What steps on several GPUs wants a process each (tests/ablations/test_parallel.py, tests/run/test_pipeline_ranks.py);
# `no_optimizer` is for references; gptq and awq are only rows with a reason (tests/ablations).
PIPELINES = {"pipeline_gpipe", "pipeline_1f1b", "pipeline_interleaved", "pipeline_multi_adapter"}
SHARDED = {"ddp", "fsdp2", "ulysses", "context_parallel", "tensor_parallel", "deepspeed_zero"}
ELSEWHERE = {"no_optimizer", "gptq", "awq"} | SHARDED | PIPELINES
DTYPE = [] if torch.cuda.is_available() else ["dtype=float32"]  # some CPUs would compute in bfloat16, and some not
ON_A_CPU = {"adapters_in_compute_dtype": "not_applied"}  # float32, which adapters are in anyway
# bitsandbytes pages states of 100 000 elements and more, which no adapter here has; and this attention is grouped.
ON_A_GPU = {"paged_adamw_32bit": "not_applied", "paged_adamw_8bit": "not_applied", "sdpa_efficient": "unsupported"}
# Ludwig's search ends where the rate falls, which it may from one sample to two beside other work on the machine.
BY_ITS_CLOCK = {"doubling_batch_size": "it found 1 samples a micro-batch, which the workload has already"}
CASES = [(title, name) for title, (_, toggles) in SWEEPS.items() for name in toggles]


def test_every_registered_toggle_is_here():
    here = [name for _, name in CASES]
    assert sorted(here) == sorted(set(here)) and {*here} | ELSEWHERE == {*registry.registered()}


@pytest.fixture(scope="module")
def record_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Record]:
    """The record of a toggle in one of the sweeps, each of which runs when it is first asked for."""
    known: dict[str, list[Record]] = {}

    def look_up(title: str, name: str) -> Record:
        command, toggles = SWEEPS[title]
        if title not in known:
            folder = tmp_path_factory.mktemp("sweep")
            (folder / "config.json").write_text(json.dumps(MODEL))
            model = [] if any(word.startswith("models=") for word in command) else [f"models=[{folder}]"]
            measured = sweep(
                *model, *command, *DTYPE, f"ablations=[{','.join(toggles.values())}]", "weights=random", "trials=6",
                "warmup=1", "report=false", "timeout_s=200", "output=out", cwd=folder, timeout=900,
            )  # fmt: skip
            assert measured.returncode == 0, measured.stderr
            known[title] = read_records(folder / "out")
        named = [r for r in known[title] if any(label.partition("(")[0] == name for label in r.ablations)]
        return min(named, key=lambda record: len(record.ablations))  # by itself, where another row has it as well

    return look_up


def check(record: Record, name: str, expected: str = "ok") -> None:
    lacking = ("which is not installed", "needs a CUDA device", "needs compute capability", "lies in memory")
    if record.status == "unsupported" and any(words in (record.reason or "") for words in lacking):
        pytest.skip(str(record.reason))
    if record.status == "not_applied" and record.reason == BY_ITS_CLOCK.get(name):
        return
    assert record.status == expected, f"{name} is {record.status}: {record.reason}"


@pytest.mark.exhaustive
@pytest.mark.skipif(torch.cuda.is_available(), reason="the same sweeps run on the GPU, with -m gpu")
@pytest.mark.parametrize(("title", "name"), CASES)
def test_it_is_measured_or_says_what_it_lacks(record_of, title, name):
    check(record_of(title, name), name, ON_A_CPU.get(name, "ok"))


@pytest.mark.gpu
@pytest.mark.parametrize(("title", "name"), CASES)
def test_on_a_gpu_it_is_measured_or_says_what_it_lacks(record_of, title, name):
    check(record_of(title, name), name, ON_A_GPU.get(name, "ok"))
