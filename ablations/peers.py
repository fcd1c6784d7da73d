"""Slot `fused_kernels`: what a user could pick today instead of ours, each as its own users get it.

    pip install 'lorabench[gpu,unsloth]'
    pip install --no-deps 'axolotl>=0.21' addict
    python -m lorabench.sweep suite=peers output=results/h200/peers

All of them patch classes and modules of transformers or PEFT, so each is measured in processes of its own.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from unittest.mock import patch

from lorabench.contract.ablation import Ablation, Blueprint, Evidence, NotApplied, Requires, Unsupported
from lorabench.contract.settings import Settings, Worth
from lorabench_ablations.attention import backends
from lorabench_ablations.flash_attention import FlashAttention2
from lorabench_ablations.liger import AXOLOTL as LIGER_KEYS
from lorabench_ablations.liger import NO_CAPTURE, apply_liger
from lorabench_ablations.lora_kernels import SLOTS

if TYPE_CHECKING:
    from torch import nn

GPU_EXTRA = "pip install 'lorabench[gpu]'"
UNSLOTH_EXTRA = "pip install 'lorabench[unsloth]'"
# Axolotl pins one version each of fifty packages, among them transformers and PEFT in versions that Unsloth excludes.
# Its kernels need none of them but what is here anyway.
AXOLOTL = "pip install --no-deps 'axolotl>=0.21' addict (Python 3.12 or newer)"
INSTALL = {
    "axolotl": AXOLOTL,
    "addict": AXOLOTL,
    "bitsandbytes": GPU_EXTRA,
    "liger_kernel": GPU_EXTRA,
    "unsloth": UNSLOTH_EXTRA,
    "unsloth_zoo": UNSLOTH_EXTRA,
}
SAME_SITES = "both patch the same sites"
ATTENTION = (  # every one but SDPA, which is the reference's
    "eager", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention", "sdpa_cudnn",
    "sdpa_efficient", "sdpa_flash", "sdpa_math", "varlen", "varlen_cudnn", "xformers",
)  # fmt: skip
AXOLOTL_FAMILIES = frozenset(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2"))
UNSLOTH_FAMILIES = frozenset(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2"))


def _needs(families: frozenset[str], *packages: str) -> Requires:
    return Requires(device="cuda", packages={p: INSTALL[p] for p in packages}, families=families)


@dataclass(frozen=True, kw_only=True)
class Peer(Ablation):
    """Base: global, versions in the notes, and a word on what was found if it left everything to PEFT."""

    slot: ClassVar[str] = "fused_kernels"
    global_patch: ClassVar[bool] = True
    worth_trying: ClassVar[Worth | None] = "time"
    distributions: ClassVar[tuple[str, ...]]

    def audit(self, evidence: Evidence) -> int:
        if not evidence.patched:
            raise NotApplied(f"{self.name} left every layer of this model to PEFT")
        return evidence.patched

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        return {self.name: {name: version(name) for name in self.distributions}}


def sites(model: nn.Module) -> int:
    """How many of a peer's functions stand on instances: both peers call them `apply_lora_…`, in the same places."""
    held = (vars(m).get(a) for m in model.modules() for a in ("forward", "apply_qkv", "apply_o"))
    return sum(getattr(getattr(h, "__func__", h), "__name__", "").startswith("apply_lora_") for h in held)


# -- Axolotl ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Axolotl(Peer):
    """`lora_mlp_kernel`, `lora_qkv_kernel` and `lora_o_kernel`: an autograd function a block over library GEMMs.

    They cast the adapters, not the activations, so float32 adapters cost next to nothing there. Under dropout q, k and
    v share one mask, gate and up another, and down has none: not PEFT's gradient, and the gate says so.
    """

    name: ClassVar[str] = "axolotl"
    summary: ClassVar[str] = "Axolotl's LoRA kernels: MLP, QKV and O"
    requires: ClassVar[Requires] = _needs(AXOLOTL_FAMILIES, "axolotl", "addict", "bitsandbytes")
    excludes: ClassVar[dict[str, str]] = dict.fromkeys(("mlp", "qkv", "o"), SAME_SITES)
    distributions: ClassVar[tuple[str, ...]] = ("axolotl",)
    keys: ClassVar[dict[str, Any]] = dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), True)

    def patch(self, model: nn.Module) -> int:
        _only_models_of_the_callbacks()
        from axolotl.monkeypatch import lora_kernels
        from axolotl.utils.dict import DictDefault

        config: Any = model.config
        with tempfile.TemporaryDirectory() as folder:  # Axolotl reads the architecture from a folder
            config.save_pretrained(folder)
            cfg = DictDefault({"base_model": folder, **Axolotl.keys})
            try:
                lora_kernels.patch_self_attn_lora(cfg)
                lora_kernels.apply_lora_kernel_patches(model, cfg)
            except (ValueError, NotImplementedError) as error:  # a layout or an activation that it does not know
                raise Unsupported(f"{self.name}: {error}") from error
        return sites(model)

    def settings(self) -> Settings:
        return Settings(axolotl=self.keys, note="only Axolotl's own trainer has these kernels: use its keys below")


@dataclass(frozen=True, kw_only=True)
class AxolotlLiger(Axolotl):
    """Axolotl with its Liger plugin, as its documentation puts the two together: Liger does all but the projections."""

    name: ClassVar[str] = "axolotl_liger"
    summary: ClassVar[str] = "Axolotl's LoRA kernels with Liger's norm, RoPE and fused linear cross-entropy"
    requires: ClassVar[Requires] = _needs(AXOLOTL_FAMILIES, "axolotl", "addict", "bitsandbytes", "liger_kernel")
    excludes: ClassVar[dict[str, str]] = {
        **dict.fromkeys(SLOTS, SAME_SITES),
        "cuda_graph": NO_CAPTURE,
    }
    distributions: ClassVar[tuple[str, ...]] = ("axolotl", "liger-kernel")
    keys: ClassVar[dict[str, Any]] = Axolotl.keys | LIGER_KEYS

    def patch(self, model: nn.Module) -> int:
        # Liger first: Axolotl compiles the attention's source against the names that its module holds at that moment.
        return apply_liger(model, activation=False) + super().patch(model)


def _only_models_of_the_callbacks() -> None:
    """Let `axolotl.utils.callbacks.models` be imported without the package around it.

    The kernels want one function of that module, which needs transformers alone; the package's `__init__` imports
    Axolotl's whole trainer (wandb, evaluate, TRL, pandas, …). An empty package in its place, in this worker only.
    """
    name = "axolotl.utils.callbacks"
    if name in sys.modules:
        return
    spec = importlib.util.find_spec("axolotl.utils")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    package = types.ModuleType(name)
    package.__path__ = [str(Path(folder, "callbacks")) for folder in folders]
    sys.modules[name] = package


# -- Unsloth ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Unsloth(Peer):
    """`FastLanguageModel.from_pretrained` and `.get_peft_model`, without its gradient checkpointing.

    It has its own loader, attention, norms, RoPE and chunked loss, compiles blocks where it sees fit, and keeps the
    adapters in float32. Its loader gets the model from us instead of from a file, so that nothing is written but a
    configuration and a tokenizer. With `nf4_base` that model is in 4 bits already: its loader is not asked to quantize
    (`load_in_4bit` decides nothing else), and its kernels go by the weights.
    """

    name: ClassVar[str] = "unsloth"
    summary: ClassVar[str] = "Unsloth's FastLanguageModel, without its gradient checkpointing"
    requires: ClassVar[Requires] = _needs(UNSLOTH_FAMILIES, "unsloth", "unsloth_zoo", "bitsandbytes")
    excludes: ClassVar[dict[str, str]] = {
        **dict.fromkeys(SLOTS, SAME_SITES),
        "adapter_dtype": "Unsloth keeps its adapters in float32; measure it with reference=peft",
        "compilation": "Unsloth compiles its blocks itself",
        "checkpointing": "Unsloth has its own, which is left off here",
        **dict.fromkeys(ATTENTION, "Unsloth picks its attention itself"),
    }
    keeps_weights: ClassVar[bool] = True  # but for the embedding's, of which it gets a copy
    decides: ClassVar[tuple[str, ...]] = ("attention",)  # flash-attn's, else xformers', else SDPA: what is installed
    distributions: ClassVar[tuple[str, ...]] = ("unsloth", "unsloth_zoo")

    def build(self, blueprint: Blueprint) -> nn.Module:
        silence_unsloth()
        from unsloth import FastLanguageModel

        config: Any = blueprint.config
        with tempfile.TemporaryDirectory() as folder, _instead_of_reading(blueprint.base):
            config.save_pretrained(folder)
            _tokenizer().save_pretrained(folder)
            model, _ = FastLanguageModel.from_pretrained(
                folder, max_seq_length=config.max_position_embeddings,  # it cuts longer samples
                dtype=blueprint.dtype, load_in_4bit=False, use_gradient_checkpointing=False, offload_embedding=False,
                use_exact_model_name=True, local_files_only=True,
            )  # fmt: skip
        adapter = {k: v for k, v in blueprint.adapter["config"].items() if k != "task_type"}  # which it sets itself
        return FastLanguageModel.get_peft_model(model, use_gradient_checkpointing=False, **adapter)

    def patch(self, model: nn.Module) -> int:
        return sites(model)

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        """With the attention that it picked."""
        flash = {name: evidence.ops[name] for name in FlashAttention2.operators if evidence.ops[name]}
        return super().notes(evidence) | {"attention_backend": backends(evidence.ops) | flash}

    def settings(self) -> Settings:
        ours = "AutoModelForCausalLM.from_pretrained and get_peft_model"
        theirs = "FastLanguageModel.from_pretrained and FastLanguageModel.get_peft_model"
        return Settings(note=f"in place of {ours} call unsloth's {theirs}, use_gradient_checkpointing=False")


def silence_unsloth() -> None:
    """Before the import, which reads these: no report to its makers, and no folder of its own where the user works."""
    from huggingface_hub.constants import HF_HOME

    os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")
    os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", str(Path(HF_HOME, "lorabench", "unsloth_compiled_cache")))


@contextmanager
def _instead_of_reading(base: Callable[[], nn.Module]) -> Iterator[None]:
    """Within, `AutoModelForCausalLM.from_pretrained` gives `base()`: all that Unsloth does around it stays its own. The
    embedding is a copy, because Unsloth zeroes the padding token's row, and other arms share the weights."""
    from transformers import AutoModelForCausalLM

    def give(*args: Any, **kwargs: Any) -> nn.Module:
        replaced.stop()  # `base` may read real weights
        model: Any = base()
        embedding = model.get_input_embeddings().weight
        embedding.data = embedding.data.clone()
        return model

    replaced = patch.object(AutoModelForCausalLM, "from_pretrained", give)
    replaced.start()
    try:
        yield
    finally:
        replaced.stop()


def _tokenizer() -> Any:
    """The smallest that its loader takes; nothing is ever tokenized with it."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    special = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    words = models.WordLevel({token: i for i, token in enumerate([*special.values(), "a"])}, unk_token="<unk>")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), **special)
