"""The contract of an ablation: one optimization as a toggle, one class with one name.

A class says its name, its slot, what it needs and what it excludes; its parameters are keyword-only dataclass fields;
and it overrides only the hooks it needs. The hooks are called in the order in which a training run lives:
load, adapt, prepare, build, patch, shard, batch, collate, optimize, join, schedule, step, size (or form and read, or
text_metrics and generate, in the kinds that load weights or evaluate a checkpoint); `audit` then proves that the toggle
engaged. docs/add-an-ablation.md walks through one.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from lorabench.contract.batch import Batch, Sample
from lorabench.contract.machine import Machine
from lorabench.contract.model import ModelSpec
from lorabench.contract.parameters import misfit
from lorabench.contract.ranks import Ranks
from lorabench.contract.reading import WeightsForm, WeightsReader
from lorabench.contract.rehearsal import Capacity, Rehearsal, Sizing
from lorabench.contract.settings import Settings, Worth
from lorabench.contract.text_metrics import TextMetrics
from lorabench.contract.work import Recomputed
from lorabench.contract.workload import Workload

if TYPE_CHECKING:  # these import torch, which a list of toggles can do without
    import torch

    from lorabench.contract.arm import Arm
    from lorabench.contract.joint import Place
    from lorabench.contract.step import Step


class Unsupported(Exception):
    """Raised by a hook: this machine, model or workload cannot have the toggle. The text is shown to the user."""


class NotApplied(Exception):
    """Raised by `audit`: the toggle did nothing here. The text says why."""


@dataclass(frozen=True, kw_only=True)
class Requires:
    """What a toggle needs. `packages` maps an import name to the command that installs it."""

    device: str | None = None  # "cuda" or "cpu"
    capability: tuple[int, int] | None = None  # least CUDA compute capability
    gpus: int = 1
    packages: Mapping[str, str] = field(default_factory=dict)
    dtypes: tuple[str, ...] | None = None  # compute dtypes, by torch's names
    families: frozenset[str] | None = None  # transformers' model_type

    def unmet(self, machine: Machine, model: ModelSpec | None = None) -> str | None:
        """The first requirement that is not met, in words, or None."""
        if self.device and self.device != machine.device:
            return f"needs a {self.device.upper()} device; this machine measures on its {machine.device.upper()}"
        if self.capability and (machine.capability or (0, 0)) < self.capability:
            need, have = (".".join(map(str, c)) for c in (self.capability, machine.capability or (0, 0)))
            return f"needs CUDA capability {need} or newer; this GPU has {have}"
        if self.gpus > max(1, machine.gpus):
            return f"needs {self.gpus} GPUs; this machine has {machine.gpus}"
        for package, command in self.packages.items():
            if not _importable(package):
                return f"needs the package {package}, which is not installed: {command}"
        if self.dtypes and model and (dtype := machine.dtype(model.dtype)) not in self.dtypes:
            return f"needs {' or '.join(self.dtypes)}; {model.name} is measured in {dtype}"
        return self.unmet_by(model) if model else None

    def unmet_by(self, model: ModelSpec) -> str | None:
        """What of the model is not as it has to be, whatever the machine, in words; or None."""
        if self.families and model.family not in self.families:
            return f"knows the families {', '.join(sorted(self.families))}; {model.name} is a {model.family}"
        return None


@dataclass(frozen=True, kw_only=True)
class Excluded(Requires):
    """Of a toggle that is a row without a measurement: `reason` is what the row says, once its packages are there."""

    reason: str

    def unmet(self, machine: Machine, model: ModelSpec | None = None) -> str:
        return super().unmet(machine, model) or self.reason


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a module inside a package: the package is not there
        return False


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """What a toggle that changes the mathematics on purpose may differ by, and the words for the table."""

    words: str
    grad: float = 0.0  # relative error allowed in any adapter gradient, if larger than the gate's own
    # Of the number format that it rounds to (`torch.finfo(…).eps`): a tensor may then be off by as many times plain
    # PEFT's own error as this is coarser than the compute dtype, and still by no more than `grad`.
    eps: float | None = None
    loss: float = 0.0
    update: float = 0.0  # of each of the optimizer's updates, in its worst tensor

    def fault(self, changes_weights: bool) -> str | None:
        """Why this cannot be declared, or None: it has to say what it is for, and to stay below what that can come to.
        `changes_weights`: the toggle that declares it rounds the frozen weights."""
        if not self.words.strip():
            return "declares a tolerance without saying what it is for"
        coarse = 0.1 if self.eps is None else min(0.5, 4 * self.eps)
        most = {"grad": 0.5 if changes_weights else coarse, "loss": 0.05, "update": 0.1}
        for name, ceiling in most.items():
            if not 0 <= getattr(self, name) <= ceiling:
                given = f"{name}={getattr(self, name):g}"
                return f"declares a tolerance of {given}; for what it says it is {ceiling:g} at most"
        return None


@dataclass(frozen=True)
class Blueprint:
    """What `build` makes a PEFT model from. `base()` makes transformers' model, on the arm's device."""

    config: Any  # transformers' configuration, of the depth that is wanted
    dtype: torch.dtype
    adapter: Mapping[str, Any]  # as `adapt` left it
    base: Callable[[], torch.nn.Module]  # weights drawn or read, and every toggle's `prepare` done


@dataclass(frozen=True)
class Evidence:
    """What `audit` may look at: the finished arm after one traced trial."""

    arm: Arm
    patched: int | None  # what `patch` returned
    ops: Counter[str]  # names of the operators that ran, e.g. "aten::_scaled_dot_product_flash_attention"
    handed: Mapping[str, int] = field(default_factory=dict)  # bytes that this rank gave to each kind of collective


def added(default: Any) -> Any:
    """A parameter that came to a toggle after records of it were published: at its default it leaves their keys as
    they were."""
    return field(default=default, metadata={"added": True})


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """Base of every toggle. Subclass it as a frozen, keyword-only dataclass and register it as an entry point."""

    name: ClassVar[str]
    slot: ClassVar[str]
    summary: ClassVar[str] = ""
    requires: ClassVar[Requires] = Requires()
    excludes: ClassVar[Mapping[str, str]] = {}  # name or slot of another toggle -> why both cannot be on
    decides: ClassVar[tuple[str, ...]] = ()  # slots in which it does as it sees fit, whatever the reference has there
    clears: ClassVar[bool] = False  # takes what the reference has in its slot away and puts nothing there
    kinds: ClassVar[tuple[str, ...]] = ("train",)  # the kinds of cell that know this toggle (measure/kinds)
    bounds: ClassVar[str | None] = None  # no way to train, but the least work of a cell of that kind
    changes_weights: ClassVar[bool] = False  # how frozen weights are held: in both arms alike it is part of the model
    # Multiplies with frozen weights that it rounds each time: `prepare` rounds them for good where it is to `upcast`.
    rounds_weights: ClassVar[bool] = False
    own_dropout_masks: ClassVar[bool] = False  # draws masks that the gate cannot share: gated at dropout 0
    recomputes: ClassVar[Recomputed | None] = None  # what backward computes again: counted apart from useful work
    global_patch: ClassVar[bool] = False  # changes more than its own model: measured in separate processes
    slow_start: ClassVar[bool] = False  # the host compiles for minutes before its first trial: prepared last
    switches: ClassVar[tuple[str, ...]] = ()  # torch's own that it sets for its process (contract/switches.py)
    parallel: ClassVar[bool] = False  # its arm steps on `world_size` processes, one a GPU
    one_rank: ClassVar[bool] = False  # with `parallel`: on one process it shows what its machinery costs
    keeps_weights: ClassVar[bool] = False  # `prepare`, `build` leave frozen weights as they are: arms may share them
    leaves_out: ClassVar[bool] = False  # `divide` leaves modules out and all else as it is: arms may share the rest
    process_a_job: ClassVar[bool] = False  # with `parallel`: on one process a job of the workload, all on the first GPU
    tolerance: ClassVar[Tolerance | None] = None
    rank: ClassVar[int] = 0  # `step` wrappers of a higher rank go further outside
    # Whether `lorabench recommend` tries it unasked: always ("time"), where memory asks for it ("memory"), no.
    worth_trying: ClassVar[Worth | None] = None

    def __post_init__(self) -> None:
        """Raises ValueError for a parameter that is not what its annotation says."""
        given = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not f.default}
        if wrong := misfit(type(self), given):
            raise ValueError(wrong)

    def load(self, kwargs: dict[str, Any]) -> None:
        """Change the keyword arguments of `AutoModelForCausalLM.from_config` / `from_pretrained`, in place."""

    def least_layers(self, ranks: int) -> int:
        """The fewest layers of a model in which it can engage on so many ranks: the gate's twins have them."""
        return 1

    def adapt(self, kwargs: dict[str, Any]) -> None:
        """Change the keyword arguments of `peft.get_peft_model` (`autocast_adapter_dtype`) and, under the key
        "config", those of `peft.LoraConfig`, in place."""

    def divide(self, base: torch.nn.Module) -> int | None:
        """Divide transformers' model among the ranks while it is on the meta device, so that none ever holds the whole:
        its weights are drawn afterwards, one after the other, of which each rank keeps its part. Return the number of
        modules that are divided or left out. None: leave it whole. Weights that are read come whole: not asked then."""
        return None

    def prepare(self, base: torch.nn.Module, *, upcast: bool) -> None:
        """Change transformers' model in place, its weights drawn or read, before an adapter is put on. `upcast`: it
        is for the gate's gold and will be turned to float32; leave it plain, with the numbers that it would have."""

    def build(self, blueprint: Blueprint) -> torch.nn.Module | None:
        """Make the PEFT model with a loader of one's own, its tensors under PEFT's names: the adapters are drawn
        afterwards, each by its name. None: leave it to another toggle or to `peft.get_peft_model`."""
        return None

    def patch(self, model: torch.nn.Module) -> int | None:
        """Change the PEFT model in place, on the instance; return the number of sites. None: nothing to patch."""
        return None

    def shard(self, samples: Sequence[Sample], ranks: Ranks) -> list[Sample] | None:
        """The samples of this rank, of those of the whole step. None: leave it to another toggle or to one rank."""
        return None

    def batch(self, samples: Sequence[Sample], workload: Workload) -> list[Batch] | None:
        """Samples -> the batches of one step. None: leave it to another toggle or to plain padding."""
        return None

    def collate(self, batch: Batch) -> Batch:
        """What else the model is given with a batch, on the host, once a batch: what a data loader's collator would
        compute. The tokens' places must stay."""
        return batch

    def optimize(self, params: list[torch.nn.Parameter], lr: float) -> torch.optim.Optimizer | None:
        """Adapter parameters -> optimizer. None: leave it to another toggle or to torch's AdamW."""
        return None

    def join(self, steps: Sequence[Step]) -> list[Step] | None:
        """Of several jobs the steps of a trial, in order: each a job's own, or a `Joint` (contract/joint.py) of some of
        them. None: leave it to another toggle, or one job after the other."""
        return None

    def schedule(
        self, lengths: Sequence[Sequence[int]], padded: bool, capacity: int | None
    ) -> list[list[Place]] | None:
        """Of the jobs that a `Joint` trains together: which of their samples go into which micro-batch, each sample in
        one. `lengths` are the tokens of each job's samples of one step; `padded`: samples of a micro-batch are as wide
        as the longest. `capacity`: the positions that `capacity` found, None before it was asked. It goes by lengths
        alone. None: leave it to another toggle, or to what the workload says."""
        return None

    def step(self, step: Step) -> Step:
        """Wrap forward, backward and update (autocast, compilation, capture, a context)."""
        return step

    def training(self, step: Step) -> Step:
        """The same for jobs that train to their end, whose batches are others in every step. Overridden by what `step`
        cannot wrap then."""
        return self.step(step)

    def size(self, rehearsal: Rehearsal) -> Sizing | None:
        """How many samples go into a micro-batch, found by running steps of the finished arm: `batch` is then asked
        again, with a workload of that `batch_size`. Not asked of the gate's shallow models. None: leave it to another
        toggle or to the workload."""
        return None

    def capacity(self, rehearsal: Rehearsal) -> Capacity | None:
        """The same of jobs that a `Joint` trains together: how many positions a micro-batch of theirs may hold. Their
        batches are then laid out anew. None: leave it to another toggle; nobody needs to know."""
        return None

    def read(self) -> WeightsReader | None:
        """How a checkpoint's files come to the device. None: leave it to another toggle or to safetensors."""
        return None

    def form(self) -> WeightsForm | None:
        """In what form a checkpoint's weights lie in the files and arrive. None: another toggle's, or plain."""
        return None

    def text_metrics(self) -> TextMetrics | None:
        """What a checkpoint's evaluation computes of generated text. None: leave it to another toggle or to the loss
        alone."""
        return None

    def generate(self, kwargs: dict[str, Any]) -> None:
        """Change the keyword arguments of `model.generate` and, under the key "batch_size", how many prompts are
        answered at a time, in place. Asked only where text is generated."""

    def audit(self, evidence: Evidence) -> int:
        """How many sites the toggle is at work in. Zero, or NotApplied with the reason, makes the record
        `not_applied`. A toggle that patches nothing must override this."""
        if evidence.patched is None:
            raise NotImplementedError(
                f"{type(self).__name__} patches nothing, so it must say in `audit` how it engaged"
            )
        return evidence.patched

    def notes(self, evidence: Evidence) -> dict[str, Any]:
        """Anything worth keeping in the record: the backend that ran, versions, graph breaks."""
        return {}

    def without_effect(self, reference: Sequence[Ablation], dtype: str) -> str | None:
        """Why this toggle cannot do anything beside that reference in that compute dtype, known beforehand; or None."""
        return None

    def settings(self) -> Settings | None:
        """What switches it on in a training of the user's own. None: the toggle does not say."""
        return None

    @property
    def content(self) -> dict[str, Any]:
        """The parameters that a cell's key is made of."""
        told = {f.name for f in fields(self) if not ("added" in f.metadata and getattr(self, f.name) == f.default)}
        return {name: value for name, value in asdict(self).items() if name in told}

    @property
    def label(self) -> str:
        """The name with every parameter that differs from its default: `torch_compile(mode=max-autotune)`."""
        changed = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"{self.name}({', '.join(changed)})" if changed else self.name


def conflict(ablations: Sequence[Ablation]) -> str | None:
    """Why these toggles cannot be on together, or None. The order of the list never matters."""
    ordered = sorted(ablations, key=lambda a: a.name)
    by_slot: dict[str, str] = {}
    for ablation in ordered:
        if ablation.slot in by_slot:
            return f"{by_slot[ablation.slot]} and {ablation.name} both fill the slot {ablation.slot}"
        by_slot[ablation.slot] = ablation.name
    for ablation in ordered:
        for other in ordered:
            of_slot = None if other.clears else ablation.excludes.get(other.slot)
            reason = ablation.excludes.get(other.name, of_slot)
            if other is not ablation and reason is not None:
                return f"{ablation.name} excludes {other.name}: {reason or 'it does not say why'}"
    return None


def combine(reference: Sequence[Ablation], toggles: Sequence[Ablation]) -> list[Ablation]:
    """The candidate: the reference with each toggle put into its slot in place of what the reference had there."""
    taken = {toggle.slot for toggle in toggles}
    return [a for a in reference if a.slot not in taken] + list(toggles)
