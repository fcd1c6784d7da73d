"""How a model's weights come from their files to the device: which files, who reads them, and what arrives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a list of toggles does without torch
    import torch
    from torch import Tensor, nn


@dataclass(frozen=True)
class Checkpoint:
    """A folder of safetensors files that transformers can read too. `device`: where its weights are to come."""

    folder: Path
    device: torch.device
    load: Mapping[str, Any] = field(default_factory=dict)  # arguments of transformers' `from_pretrained`

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.glob("*.safetensors"))


class WeightsReader:
    """Reads a checkpoint in two phases. Subclass it and return it from `read`."""

    def read(self, checkpoint: Checkpoint) -> Any:
        """From the disk into memory, host or device; returns what `place` takes. It need not wait for copies that are
        on their way to the device."""
        raise NotImplementedError

    def place(self, held: Any, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """What `read` returned, tensor after tensor on the device, by their names. Whoever takes them need not hold all
        of them at once."""
        raise NotImplementedError


class WeightsForm:
    """In what form weights lie in the files and arrive: here, as the model has them. Subclass it and return it from
    `form`. An arm has one, and calls `checkpoint` before anything else."""

    holds: str = "plain weights"  # in words; two arms can be compared only where it is the same

    def checkpoint(self, plain: Checkpoint) -> Checkpoint:
        """What is read, for a model whose plain weights lie in `plain`; made once a sweep, and not timed. A form that
        holds plain weights has to read them there: the files have others in each trial."""
        return plain

    def reader(self) -> WeightsReader | None:
        """Who reads it where no toggle of its own does. None: safetensors, file after file."""
        return None

    def finish(self, placed: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """From what a reader places the weights, ready to compute with. A part of the phase place."""
        return dict(placed)

    def expected(self, plain: Checkpoint) -> Sequence[Path]:
        """The files that say, bit for bit, what has to arrive, by the names of its `parts`."""
        return plain.files

    def parts(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        """The plain tensors that a finished weight consists of, as files hold them."""
        return {name: weight}

    def nbytes(self, model: nn.Module) -> int:
        """Bytes that are read for a model (which may lie on the meta device)."""
        return sum(p.nbytes for p in model.parameters())
