"""Weights that are not read from the disk, or not brought to the device, in the kind `load`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from lorabench.contract.reading import Checkpoint, WeightsForm, WeightsReader
from lorabench.measure.plain_reader import PlainReader
from zoo.cheat import Cheat, Honest

LOAD = ("kind=load", "workload=warm_cache")


class KeepsWhatItLoaded(PlainReader):
    """Reads once."""

    loaded: dict[str, Tensor] | None = None

    def read(self, checkpoint: Checkpoint) -> Any:
        return [] if self.loaded else super().read(checkpoint)

    def place(self, held: Any, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        self.loaded = self.loaded or dict(super().place(held, device))
        yield from self.loaded.items()


class KeepsCopies(KeepsWhatItLoaded):
    def place(self, held: Any, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in super().place(held, device):
            yield name, tensor.clone()


class Loads(Cheat):
    slot = "reading"
    kinds = ("load",)
    command = LOAD
    caught = "are not those of the files"
    Reader: ClassVar[type[WeightsReader]] = PlainReader

    def read(self) -> WeightsReader:
        return self.Reader()


class WeightsOfAnEarlierTrial(Loads):
    name = "weights_of_an_earlier_trial"
    summary = "reads once, and gives the same tensors from then on"
    Reader = KeepsWhatItLoaded


class CopiesOfAnEarlierTrial(Loads):
    name = "copies_of_an_earlier_trial"
    summary = "reads once, and gives copies of it from then on"
    Reader = KeepsCopies


class ReadsWhenAsked(Loads):
    name = "reads_when_asked"
    summary = "has read all when the arm is built, before any clock runs"

    class Reader(PlainReader):
        def read(self, checkpoint: Checkpoint) -> Any:
            self.kept = getattr(self, "kept", None) or super().read(checkpoint)
            return [dict(file) for file in self.kept]


class Late(torch.Tensor):
    """Is read when somebody first looks at it."""

    read: Any

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = [x.read() if isinstance(x, Late) else x for x in args]
        return func(*read, **(kwargs or {})) if func is not torch.Tensor.__repr__ else "Late"


class LazyWeights(Loads):
    name = "lazy_weights"
    summary = "gives tensors that are read when they are first looked at, after the clock"

    class Reader(PlainReader):
        def read(self, checkpoint: Checkpoint) -> Any:
            from lorabench.measure.safetensors_file import entries

            return [(file, entry) for file in checkpoint.files for entry in entries(file)]

        def place(self, held: Any, device: torch.device) -> Iterator[tuple[str, Tensor]]:
            from safetensors import safe_open

            def later(file: Path, name: str) -> Any:
                with safe_open(file, framework="pt") as opened:
                    return opened.get_tensor(name).to(device)

            for file, entry in held:
                late: Any = torch.empty(entry.shape, dtype=entry.dtype, device="meta").as_subclass(Late)
                late.read = lambda file=file, name=entry.name: later(file, name)
                yield entry.name, late


class NeverPlaced(Loads):
    name = "never_placed"
    summary = "leaves the weights where no device is"
    caught = "on the device meta"

    class Reader(PlainReader):
        def place(self, held: Any, device: torch.device) -> Iterator[tuple[str, Tensor]]:
            for shard in held:
                yield from ((name, tensor.to("meta")) for name, tensor in shard.items())


class FewFiles(Loads):
    name = "few_files"
    summary = "leaves the last file out after the first trial"

    class Reader(PlainReader):
        trials = 0

        def read(self, checkpoint: Checkpoint) -> Any:
            self.trials += 1
            return super().read(checkpoint)[: None if self.trials == 1 else -1]


class FormOfItsOwn(Loads):
    name = "form_of_its_own"
    summary = "a form that expects nothing, and brings nothing"

    class Form(WeightsForm):
        def finish(self, placed: Any) -> dict[str, Tensor]:
            return {}

        def expected(self, plain: Checkpoint) -> list[Path]:
            return []

    def form(self) -> WeightsForm:
        return self.Form()


class OtherFiles(Loads):
    name = "other_files"
    summary = "a form that lays the weights down elsewhere, under a name that a cold cache does not forget"
    caught = "are not those of the files"
    command = (*LOAD[:-1], "workload=cold_cache")

    class Form(WeightsForm):
        def checkpoint(self, plain: Checkpoint) -> Checkpoint:
            self.plain = plain
            folder = plain.folder.with_name("elsewhere")
            folder.mkdir(exist_ok=True)
            for file in plain.files:
                (folder / file.name).with_suffix(".weights").write_bytes(file.read_bytes())
            return replace(plain, folder=folder)

        def reader(self) -> WeightsReader:
            return Elsewhere()

    def form(self) -> WeightsForm:
        return self.Form()

    def read(self) -> None:
        return None


class Elsewhere(PlainReader):
    def read(self, checkpoint: Checkpoint) -> Any:
        from lorabench.measure.plain_reader import read_file

        return [read_file(file) for file in sorted(checkpoint.folder.glob("*.weights"))]


class ReadsPlainly(Honest):
    name = "reads_plainly"
    summary = "reads the files itself, as the reference does"
    slot = "reading"
    kinds = ("load",)
    command = LOAD

    def read(self) -> WeightsReader:
        return PlainReader()
