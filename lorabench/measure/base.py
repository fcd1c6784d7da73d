"""A seat's frozen weights: one copy, over which every arm that changes none of them has parameters of its own.

The first arm is built as if it were alone, and the Base keeps its weights. A later one of the same recipe is built on
the meta device, where nothing is allocated, and gets the kept storages, where it leaves layers out those of the others.
Another process gets them by CUDA IPC, on a CPU by a file that it maps. Whatever replaces a parameter's data (a merged
projection, a cast) changes its own arm alone; what writes into it is noticed by the checksum.
"""

from __future__ import annotations

import copy
import hashlib
import json
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lorabench.contract.ablation import Ablation
from lorabench.contract.arm import inside
from lorabench.contract.model import ModelSpec
from lorabench.contract.ranks import local
from lorabench.measure.safetensors_file import DTYPES, LENGTH, entries

WITHOUT_WEIGHTS = torch.device("meta")
ALIGNED = 64  # bytes: a CPU's libraries round otherwise where tensors lie otherwise; torch allocates so
WORDS = 1 << 22  # words of 32 bits that are summed at a time: what is made of them still fits a GPU's L2 cache
HARMLESS = {"dtype", "attn_implementation"}  # arguments of the loader that leave it the loader of plain weights


def recipe(spec: ModelSpec, seed: int, dtype: torch.dtype, load: Mapping[str, Any]) -> str | None:
    """What decides a base's numbers, as a text that is the same in every process. `load`: the arguments of the loader,
    as the toggles left them. None: they ask for more than plain weights."""
    if not set(load) <= HARMLESS or not isinstance(load["dtype"], torch.dtype):
        return None
    content = {name: value for name, value in spec.content().items() if name != "lora"}
    return json.dumps([content, seed, str(dtype), str(load["dtype"])], sort_keys=True)


def replaces_weights(ablation: Ablation) -> bool:
    """Whether a toggle may make other frozen weights than those of the recipe before the adapters are put on."""
    own = type(ablation)
    makes = own.prepare is not Ablation.prepare or own.build is not Ablation.build
    return ablation.changes_weights or (makes and not own.keeps_weights)


class Base:
    """Empty until the first arm was built with it; then it stays what it is.

    `weights`: by the first of a parameter's names, never trained. `names`: of every name of a parameter that first one;
    tied parameters have several. `buffers`: as the first arm had them when they were new; each arm gets copies.
    `generation_config`: the model's, which with real weights comes out of their folder. `sum`: the checksum of when it
    was last known to be right, in every process that has it. `elsewhere`: what is written into it, other processes see.
    """

    def __init__(self, folder: Path) -> None:
        """`folder`: where a Base on a CPU puts the file that it offers."""
        self.folder = folder
        self.recipe: str | None = None
        self.weights: dict[str, Tensor] = {}
        self.names: dict[str, str] = {}
        self.buffers: dict[str, Tensor] = {}
        self.generation_config: Any = None
        self.sum, self.elsewhere = "", False
        self._remove: Callable[[], Any] | None = None  # removes the file, the first time that it is called
        self._file = ""

    @property
    def nbytes(self) -> int:
        """Bytes that the Base holds, whatever its arms have left of them; 0 while it is empty."""
        return sum(tensor.nbytes for tensor in (*self.weights.values(), *self.buffers.values()))

    def keep(self, recipe: str, model: nn.Module) -> None:
        """Keep the weights of an arm's model before its adapters. Nothing, where the Base is not empty, or where the
        model is one whose weights cannot be given to another model by their names alone."""
        if self.recipe is not None or not _plain(model):
            return
        first: dict[Tensor, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.names[name] = first.setdefault(parameter, name)
        self.weights = {name: parameter.data for parameter, name in first.items()}
        self.buffers = {name: buffer.clone() for name, buffer in model.named_buffers(remove_duplicate=False)}
        self.generation_config = copy.deepcopy(getattr(model, "generation_config", None))
        self.recipe = recipe

    def lent(
        self, recipe: str, make: Callable[[torch.device], nn.Module], device: torch.device
    ) -> nn.Module | None:  # fmt: skip
        """A model over the kept weights. `make` builds it on a device, here on the meta device. None where the Base has
        no weights of this recipe on this device, or not all that were made."""
        if recipe != self.recipe or not self._is_on(device):
            return None
        model = make(WITHOUT_WEIGHTS)
        if not self._fits(model):
            return None
        parameters: dict[str, nn.Parameter] = {}
        for name, made in list(model.named_parameters(remove_duplicate=False)):
            first = self.names[name]
            if first not in parameters:
                # `data`: a counter of versions of its own, so that no arm's backward asks what another one has written.
                parameters[first] = nn.Parameter(self.weights[first].data, made.requires_grad)
            module, leaf = _place(model, name)
            module._parameters[leaf] = parameters[first]
        for name, _ in list(model.named_buffers(remove_duplicate=False)):
            module, leaf = _place(model, name)
            module._buffers[leaf] = self.buffers[name].clone()
        if self.generation_config is not None:
            model.generation_config = copy.deepcopy(self.generation_config)
        return model

    def part(self, model: nn.Module) -> None:
        """Give every parameter that is trained, such as a bias, data of its own: nobody trains what is kept."""
        ours = self._storages()
        for parameter in model.parameters():
            if parameter.requires_grad and _storage(parameter) in ours:
                parameter.data = parameter.data.clone()

    def bytes_of(self, model: nn.Module) -> int:
        """Bytes of the model's parameters and buffers that lie in the kept weights; what begins at one place counts
        once. Weights that an arm has replaced are none of them."""
        ours = self._storages()
        held = (tensor for tensor in (*model.parameters(), *model.buffers()) if _storage(tensor) in ours)
        return sum({local(tensor).data_ptr(): tensor.nbytes for tensor in held}.values())

    def changed(self) -> bool:
        """Whether the weights are others than when this was last asked, here or in the process that offered them."""
        found = self.checksum() if self.nbytes else ""  # the next arm may fill an empty one
        if self.sum and found != self.sum:
            return True
        self.sum = found
        return False

    def checksum(self) -> str:
        """A hash of all bytes of the weights, computed where they lie; the same in every process and on every device.

        Words of 32 bits are multiplied by odd numbers of their places and summed modulo 2⁶⁴. So one changed word always
        changes the sum, and several do but for a chance of about 2⁻³². Takes some 100 MB for a moment.
        """
        said = [(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in self.weights.items()]
        digest = hashlib.sha256(json.dumps(said).encode())
        if tensors := list(self.weights.values()):
            longest = max(tensor.nbytes for tensor in tensors) // 4 + 4
            factors = _factors(tensors[0].device, min(longest, WORDS))
            sums = [part for tensor in tensors for part in _sums(tensor, factors)]
            digest.update(torch.stack(sums).cpu().numpy().tobytes())
        return digest.hexdigest()

    def offered(self) -> bytes:
        """What `opened` makes the same Base of in one other process, while this one lives. An empty Base offers an
        empty one.

        On a GPU the bytes hold handles of its memory and are for one process, once: ask again for the next. They may
        pass through other processes, which must not unpickle them. What was opened cannot be offered on.
        """
        import torch.multiprocessing  # it teaches ForkingPickler how tensors are shared

        said: dict[str, Any] = {"folder": self.folder, "recipe": self.recipe, "names": self.names, "sum": self.sum}
        said |= {"buffers": list(self.buffers), "generation_config": self.generation_config}
        if any(tensor.is_cuda for tensor in self.weights.values()):
            torch.cuda.synchronize()
            said["tensors"] = self.weights | self.buffers
            self.elsewhere = True
        elif self.weights:
            said["file"] = self._written()
        return bytes(ForkingPickler.dumps(said))

    @classmethod
    def opened(cls, content: bytes) -> Base:
        """The Base that another process offers. On a CPU its pages are that process's file's: who writes into them gets
        pages of his own. Raises OSError where the file is gone, RuntimeError where the GPU's memory is."""
        said = ForkingPickler.loads(content)  # pyright: ignore[reportAttributeAccessIssue]  # typeshed: a method
        made = cls(said["folder"])
        tensors = said.get("tensors") or (_mapped(Path(said["file"])) if "file" in said else {})
        made.buffers = {name: tensors.pop(name).clone() for name in said["buffers"]}
        made.weights = {name: tensors[name] for name in dict.fromkeys(said["names"].values())}
        made.recipe, made.names, made.generation_config = said["recipe"], said["names"], said["generation_config"]
        made._file, made.sum, made.elsewhere = said.get("file", ""), said["sum"], "tensors" in said
        return made

    def close(self) -> None:
        """Remove the file that was offered. Who has opened it keeps what he has."""
        if self._remove is not None:
            self._remove()

    def _written(self) -> str:
        """The file with all tensors, written when it is first asked for."""
        if not self._file:
            file = self.folder / f"base-{os.getpid()}-{id(self):x}.safetensors"
            self._remove = weakref.finalize(self, file.unlink, missing_ok=True)
            _write(file, self.weights | self.buffers)
            self._file = str(file)
        return self._file

    def _is_on(self, device: torch.device) -> bool:
        here = torch.empty(0, device=device).device  # with its number, where `device` leaves that open
        return all(tensor.device == here for tensor in self.weights.values())

    def _fits(self, model: nn.Module) -> bool:
        shapes = {name: p.shape for name, p in model.named_parameters(remove_duplicate=False)}
        kept = {name: self.weights[first].shape for name, first in self.names.items()}
        buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        return shapes.items() <= kept.items() and buffers <= set(self.buffers)

    def _storages(self) -> set[int]:
        return {_storage(tensor) for tensor in self.weights.values()}


def _plain(model: nn.Module) -> bool:
    """Whether a model is its configuration and its tensors by name: ordinary dense ones, on one device, none of them
    hidden in an attribute, and none of which a quantizer has made something else."""
    tensors = [*model.parameters(), *model.buffers()]
    hidden = any(isinstance(value, Tensor) for module in model.modules() for value in vars(module).values())
    config = getattr(model, "config", None)
    quantized = getattr(config, "quantization_config", None) or getattr(model, "hf_quantizer", None)
    return (
        any(True for _ in model.parameters())
        and not hidden
        and quantized is None
        and all(type(parameter) is nn.Parameter for parameter in model.parameters())
        and all(t.layout == torch.strided and t.is_contiguous() and t.numel() for t in tensors)
        and {t.dtype for t in tensors} <= set(DTYPES.values())
        and len({t.device for t in tensors}) == 1
    )


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has the tensor of this name, and how the tensor is called there."""
    module, _, leaf = name.rpartition(".")
    return model.get_submodule(module), leaf


def _storage(tensor: Tensor) -> int:
    return next(inside(tensor)).untyped_storage().data_ptr()


def _factors(device: torch.device, count: int) -> Tensor:
    """Odd numbers of 64 bits, one for each place, that have nothing to do with one another."""
    places = torch.arange(1, count + 1, device=device) * 0x1E3779B97F4A7C15
    mixed = (places ^ (places >> 31)) * 0x3F58476D1CE4E5B9
    return (mixed ^ (mixed >> 29)) | 1


def _sums(tensor: Tensor, factors: Tensor) -> Iterator[Tensor]:
    """Of each WORDS words of a tensor's bytes the weighted sum, an integer of 64 bits on the tensor's device."""
    raw = tensor.detach().reshape(-1).view(torch.uint8)
    if raw.data_ptr() % 4 or raw.storage_offset() % 4:
        raw = raw.clone()
    whole = len(raw) - len(raw) % 4
    for words in (*raw[:whole].view(torch.int32).split(WORDS), raw[whole:].int()):
        if len(words):
            yield (words * factors[: len(words)]).sum()


def _write(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file whose tensors begin at multiples of ALIGNED, as far as their sizes let them: those of odd
    sizes come last."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    ordered = sorted(tensors.items(), key=lambda item: (item[1].nbytes % ALIGNED > 0, -item[1].itemsize))
    header, end = {}, 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(LENGTH + len(text)) % ALIGNED)
    with open(file, "xb") as opened:
        opened.write(len(text).to_bytes(LENGTH, "little") + text)
        for _, tensor in ordered:
            opened.write(tensor.reshape(-1).view(torch.uint8).numpy().data)


def _mapped(file: Path) -> dict[str, Tensor]:
    """The file's tensors, each a storage of its own over the file's pages, which are copied when they are written."""
    with open(file, "rb") as opened:
        pages = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    return {
        entry.name: entry.of(torch.frombuffer(pages, dtype=torch.uint8, offset=entry.offset, count=entry.size), 0)
        for entry in entries(file)
    }
