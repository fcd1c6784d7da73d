"""Builds a training arm: the model with its adapters, what the toggles change, batches, optimizers, steps.

The hooks are called in the order of a training run. Same seed, same weights, whatever the toggles: every tensor is
drawn from its own name.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lorabench.contract.ablation import Ablation, Blueprint, Unsupported
from lorabench.contract.arm import Arm, own_name
from lorabench.contract.batch import Batch, Sample, pad
from lorabench.contract.hooks import first_line
from lorabench.contract.job import ADAPTER, Job
from lorabench.contract.joint import Joint, Share
from lorabench.contract.model import ModelSpec
from lorabench.contract.ranks import put
from lorabench.contract.rehearsal import Capacity, Sizing
from lorabench.contract.step import Step
from lorabench.measure import memory, parted_weights
from lorabench.measure.base import WITHOUT_WEIGHTS, recipe, replaces_weights
from lorabench.measure.feed import Feed, marked
from lorabench.measure.hooks import Hooks
from lorabench.measure.kind import Kind, Request
from lorabench.measure.rehearsal import Rehearsing, configuration
from lorabench.plan import architecture, registry
from lorabench.plan.weights import WeightsError, check_sizes, dense, named, reading, source_arguments

LORA_B_STD = 0.02  # at its usual zero the gradient of lora_A is zero and half of the mathematics is untested

# (arguments of the loader, device) → the base model there; on the meta device one without weights
MakeBase = Callable[[dict[str, Any], torch.device], nn.Module]
MakeStep = Callable[[nn.Module, torch.optim.Optimizer, list[Batch], Job, list[Sample]], Step]


def build(request: Request, kind: Kind, make_base: MakeBase, make_step: MakeStep, config: Any) -> Arm:
    """Build an arm of one base model and an adapter a job, for a kind. `config`: the base model's, as `Blueprint` has
    it.

    Raises what the hooks raise, WeightsError, and out-of-memory errors.
    """
    hooks = Hooks(request.ablations)
    held, room = memory.allocated(request.device), memory.free(request.device)
    model = _model(request, kind, hooks, make_base, config)
    for job in request.jobs:
        fill_weights(model, request.dtype, job.seed, job.adapter)
    if request.upcast:
        model.float()
    model.train()
    _part(request, model)  # PEFT trains the biases where it is asked to
    patched = {} if request.unpatched else hooks.each(Ablation.patch, model)
    _part(request, model)
    own = [
        _step(request, hooks, model, job, samples, make_step)
        for job, samples in zip(request.jobs, request.samples, strict=True)
    ]
    steps, turns = _turns(request, hooks, own)
    arm = Arm(
        request.name, request.ablations, model, steps, request.dtype, request.device, kind, patched, hooks.touched,
        request.ranks, sizings=[None] * len(steps), turns=turns,
    )  # fmt: skip
    if request.layers is None:  # the memory of a shallow model says nothing of the whole one's
        for index in range(len(steps)):
            _size(request, hooks, arm, index, held, room)
        for turn in turns:
            if isinstance(turn.innermost, Joint):
                find_capacity(hooks, turn, *_members(request, hooks, turn.innermost), request.scratch, held, room)
    return arm


def feeds(request: Request, arm: Arm, vocabulary: int) -> list[Feed]:
    """Of each job what puts a trial's fresh tokens into its batches. Raises Unsupported where they cannot take any."""
    layouts = [
        laid_out(request, Hooks(request.ablations), job, marked(samples), sizing)
        for job, samples, sizing in zip(request.jobs, request.samples, arm.sizings, strict=True)
    ]
    for joint in joints(arm.turns):
        _lay_out_together(joint, [step.name for step in arm.steps], layouts)
    return [
        Feed(step.batches, layout, samples, vocabulary, job.workload.kind != "text", job.seed)
        for job, samples, step, layout in zip(request.jobs, request.samples, arm.steps, layouts, strict=True)
    ]


def laid_out(
    request: Request, hooks: Hooks, job: Job, samples: Sequence[Sample], sizing: Sizing | None = None,
    collate: bool = True,
) -> list[Batch]:  # fmt: skip
    """This rank's batches of a job's samples, as the toggles make them, on the host. `sizing`: the micro-batches that a
    toggle found for the job; not `collate`: what is added to each batch is left to the joint ones. Raises what the
    hooks raise, and Unsupported where the samples' tokens are not all there."""
    workload = job.workload
    if sizing is not None:
        workload = workload.model_copy(update={"batch_size": sizing.batch_size})
    samples = list(samples)
    share = hooks.first(Ablation.shard, samples, request.ranks)
    mine = samples if share is None else share
    made = hooks.first(Ablation.batch, mine, workload)
    batches = pad(mine, workload.batch_size) if made is None else made
    if collate:
        batches = [hooks.through(Ablation.collate, batch) for batch in batches]
    if request.ranks.size == 1:  # of several, each may have its part of a sample
        _check_real(batches, sum(len(s.tokens) for s in mine))
    return batches


def _check_real(batches: Sequence[Batch], there: int) -> None:
    if (said := sum(b.real for b in batches)) != there:
        raise Unsupported(f"its batches count {said} real tokens; the samples have {there}")


def _size(request: Request, hooks: Hooks, arm: Arm, index: int, held: int, room: int) -> None:
    """Let a toggle try steps of a job, and lay its batches out anew as it then says."""
    job, samples, step = request.jobs[index], request.samples[index], arm.steps[index]

    def lay_out(some: Sequence[Sample], batch_size: int) -> list[Batch]:
        batches = laid_out(request, hooks, job, some, Sizing(batch_size))
        return [to_device(b, request.device) for b in batches]

    with Rehearsing(
        step, samples, job.workload, lay_out, held=held, room=room, configuration=configuration(request, job),
        folder=request.scratch, device=request.device,
    ) as rehearsal:  # fmt: skip
        arm.sizings[index] = sizing = hooks.first(Ablation.size, rehearsal)
    if sizing is not None:
        step.innermost.batches[:] = lay_out(samples, sizing.batch_size)  # the list that every wrapper holds too


def _model(request: Request, kind: Kind, hooks: Hooks, make_base: MakeBase, config: Any) -> nn.Module:
    """The base model with every job's adapter on it; weights drawn or read, adapters not yet drawn."""
    load: dict[str, Any] = {"dtype": request.dtype}  # attention as transformers picks it, unless a toggle says
    hooks.each(Ablation.load, load)

    def base() -> nn.Module:
        made = _base(request, hooks, partial(make_base, load), _recipe(request, load))
        hooks.each(Ablation.prepare, made, upcast=request.unpatched)
        return made

    if not kind.adapts(request.model):
        return base()
    adapters = [_adapter(request, kind, hooks, job) for job in request.jobs]
    blueprint = Blueprint(config, request.dtype, adapters[0], base)
    built = hooks.first(Ablation.build, blueprint)
    if built is not None and len(request.jobs) > 1:
        raise Unsupported("a loader of its own knows one adapter; this workload has several jobs")
    return built if built is not None else _with_adapters(base(), request.jobs, adapters)


def _recipe(request: Request, load: dict[str, Any]) -> str | None:
    """Of the base that the arm may share with others. None: its weights are its own. Of several ranks each has a base
    on its own device."""
    shallow_or_gold = request.layers is not None or request.unpatched
    parted = any(not ablation.leaves_out for ablation in _dividing(request))
    if request.base is None or shallow_or_gold or parted or any(map(replaces_weights, request.ablations)):
        return None
    return recipe(request.model, request.seed, request.dtype, load)


def _dividing(request: Request) -> list[Ablation]:
    """The toggles that are asked to divide the base before it has weights. Other libraries' patches walk over the
    decoder layers and expect each of them: beside these none is left out."""
    dividing = [a for a in request.ablations if type(a).divide is not Ablation.divide]
    if not dividing or request.upcast:
        return []
    if request.model.weights != "random" and not parted_weights.files_of(request.model):
        return []
    walked = any(ablation.global_patch for ablation in request.ablations)
    return [ablation for ablation in dividing if not (walked and ablation.leaves_out)]


def _divided(request: Request, hooks: Hooks, make: Callable[[torch.device], nn.Module]) -> tuple[Any, bool]:
    """(the base model on the meta device, whether it is divided among the ranks)"""
    made = make(WITHOUT_WEIGHTS)
    return made, hooks.first(Ablation.divide, made, among=_dividing(request)) is not None


def _parted(request: Request, hooks: Hooks, make: Callable[[torch.device], nn.Module]) -> nn.Module | None:
    """The divided base model on its device, its weights read or not yet drawn; None where it stays whole."""
    made, divided = _divided(request, hooks, make) if _dividing(request) else (None, False)
    if made is None or not divided:
        return None
    files = parted_weights.files_of(request.model) or {}
    if files and not files.keys() >= {name for name, _ in made.named_parameters()}:
        return None  # names that transformers knows how to translate
    made.to_empty(device=request.device)
    made.tie_weights()
    _start(made, buffers=True)
    if files:
        parted_weights.read_parts(made, request.model, files)
    return made


def _base(
    request: Request, hooks: Hooks, make: Callable[[torch.device], nn.Module], recipe: str | None
) -> nn.Module:  # fmt: skip
    """The base model, its weights drawn or read, or those that another arm of this recipe has drawn or read before."""
    shared = request.base
    if shared is not None and recipe is not None:
        lent = shared.lent(recipe, lambda _: _divided(request, hooks, make)[0], request.device)
        if lent is not None:
            return lent
    made = _parted(request, hooks, make) or make(request.device)
    if request.model.weights == "random":
        fill_weights(made, request.dtype, request.seed)
    if shared is not None and recipe is not None:
        shared.keep(recipe, made)
    return made


def _part(request: Request, model: nn.Module) -> None:
    """What is trained is the arm's own from here on."""
    if request.base is not None:
        request.base.part(model)


def _adapter(request: Request, kind: Kind, hooks: Hooks, job: Job) -> dict[str, Any]:
    """Keyword arguments of `get_peft_model` for a job, as the toggles leave them."""
    kwargs: dict[str, Any] = {"config": kind.adapter(request.model.with_lora(job.lora))}
    hooks.each(Ablation.adapt, kwargs)
    return kwargs


def _with_adapters(base: Any, jobs: Sequence[Job], adapters: Sequence[dict[str, Any]]) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    made: Any = None
    for job, kwargs in zip(jobs, adapters, strict=True):
        rest = {k: v for k, v in kwargs.items() if k != "config"}
        config = LoraConfig(**kwargs["config"])
        if made is None:
            made = get_peft_model(base, config, adapter_name=job.adapter, **rest)
        else:
            made.add_adapter(job.adapter, config, **rest)
    return made


def _step(
    request: Request, hooks: Hooks, model: nn.Module, job: Job, samples: list[Sample], make_step: MakeStep,
) -> Step:  # fmt: skip
    """One job's step: its batches and its optimizer."""
    batches = laid_out(request, hooks, job, samples)
    params = [p for n, p in model.named_parameters() if (p.requires_grad if not job.name else f".{job.adapter}." in n)]
    own = [registry.ablation(job.optimizer)] if job.optimizer else []
    optimizer = hooks.first(Ablation.optimize, params, job.learning_rate, among=[*own, *hooks.ordered])
    if optimizer is None:
        optimizer = torch.optim.AdamW([{"params": params}], lr=job.learning_rate)  # of which there may be none
    return make_step(model, optimizer, batches, job, samples)


def _turns(request: Request, hooks: Hooks, own: list[Step]) -> tuple[list[Step], list[Step]]:
    """(the step of each job, what a trial steps, in order), with what the toggles wrap around them."""
    turns = hooks.first(Ablation.join, own) or own
    for joint in joints(turns):
        put_together(hooks, joint, *_members(request, hooks, joint), request.device)
    wrapped = [hooks.wrapped(Ablation.step, turn) for turn in turns]
    steps = {}
    for turn, outer in zip(turns, wrapped, strict=True):
        members = turn.steps if isinstance(turn, Joint) else []
        steps |= {s.name: Share(s, outer) for s in members} or {turn.name: outer}
    if sorted(steps) != sorted(step.name for step in own):
        raise Unsupported(f"its trial steps the jobs {', '.join(steps)}; expected each of them once")
    return [steps[step.name] for step in own], wrapped


def joints(turns: Sequence[Step]) -> list[Joint]:
    return [inner for turn in turns if isinstance(inner := turn.innermost, Joint)]


def _members(request: Request, hooks: Hooks, joint: Joint) -> tuple[list[str], list[list[Batch]]]:
    """(names of a joint step's jobs, of each its batches on the host as it would have them alone)"""
    names = [step.name for step in joint.steps]
    members = [(job, own) for job, own in zip(request.jobs, request.samples, strict=True) if job.name in names]
    return [job.name for job, _ in members], [laid_out(request, hooks, *member, collate=False) for member in members]


def find_capacity(
    hooks: Hooks, turn: Step, names: Sequence[str], layouts: Sequence[list[Batch]], scratch: Path, held: int, room: int
) -> None:
    """Let a toggle try micro-batches of a joint step, and lay its jobs' batches out anew as it then says."""
    joint: Any = turn.innermost
    samples = [sample for step in joint.steps for sample in step.samples]
    longest = max(len(sample.tokens) for sample in samples)
    device = next(joint.model.parameters()).device

    def lay_out(some: Sequence[Sample], tokens: int) -> list[Batch]:
        joint.capacity = Capacity(max(tokens, longest))
        put_together(hooks, joint, names, list(layouts), device)
        return [joint.micro_batch(number) for number in range(joint.count)]

    job = joint.steps[0].job
    with Rehearsing(
        turn, samples, job.workload, lay_out, held=held, room=room, configuration={}, folder=scratch,
        device=device,
    ) as rehearsal:  # fmt: skip
        found = hooks.first(Ablation.capacity, rehearsal)
    if found or joint.capacity:
        joint.capacity = found
        put_together(hooks, joint, names, list(layouts), device)


def put_together(
    hooks: Hooks, joint: Joint, names: Sequence[str], layouts: list[list[Batch]], device: torch.device
) -> None:
    """Lay the batches of the jobs of these names out as the joint step wants them, with what the toggles' `collate`
    adds to the joint ones: where samples begin is known of a whole row only."""
    joint.schedule, joint.collated, joint.places = partial(hooks.first, Ablation.schedule), [], []
    _lay_out_together(joint, names, layouts)
    layout = dict(zip(names, layouts, strict=True))
    for step in joint.steps:
        step.batches[:] = layout[step.name]
    for plain in map(joint.micro_batch, range(joint.count)):
        inputs = hooks.through(Ablation.collate, plain).inputs
        added = replace(plain, inputs={name: x for name, x in inputs.items() if name not in plain.inputs})
        joint.collated.append(to_device(added, device).inputs)
    for step in joint.steps:
        step.batches[:] = [to_device(batch, device) for batch in step.batches]


def _lay_out_together(joint: Joint, names: Sequence[str], layouts: list[list[Batch]]) -> None:
    """Replace in `layouts`, each of the job of that name, those of a joint step's jobs."""
    places = [names.index(step.name) for step in joint.steps]
    together = joint.lay_out([layouts[place] for place in places])
    for place, batches in zip(places, together, strict=True):
        _check_real(batches, sum(b.real for b in layouts[place]))
        layouts[place] = batches


def float16_scale(trained: int) -> float:
    """The largest power of two not above the step's trained tokens: backward starts from about the summed loss. The
    gradients of a mean over thousands of tokens are subnormal in float16: over 8192 tokens 40 % of them are lost, for
    PEFT as for anybody. Nobody trains so; a GradScaler's job is done here by a constant, the same for every arm."""
    return float(2 ** (max(1, trained).bit_length() - 1))


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Whatever of the inputs can be moved: beside tensors a library's own mask, and no plain numbers."""
    return replace(batch, inputs={k: v.to(device) if hasattr(v, "to") else v for k, v in batch.inputs.items()})


def causal_lm(spec: ModelSpec, load: dict[str, Any], device: torch.device, layers: int | None) -> nn.Module:
    """transformers' model on its device: without its own draw of the weights, or read from where `weights` says. On the
    meta device nothing is read."""
    from transformers import AutoModelForCausalLM

    model: Any
    if spec.weights == "random" or device == WITHOUT_WEIGHTS:
        from transformers.initialization import no_init_weights

        # Every weight is drawn in `fill_weights`; the library's own draw would be wasted.
        with device, no_init_weights():
            model = _refusing(lambda: AutoModelForCausalLM.from_config(spec.hf_config(layers), **load), spec)
        model.tie_weights()  # what no_init_weights leaves out
        if device != WITHOUT_WEIGHTS:
            _start(model)
        return model
    return _read(spec, load, layers).to(device)


def _start(model: Any, buffers: bool = False) -> None:
    """transformers' own start for the vectors that `fill_weights` leaves as they are: some (attention sinks, the decay
    of a state space) are nothing before it. `buffers`: for these as well (frequencies), where the model was on the meta
    device."""
    for module in model.modules():
        own = [*module.named_parameters(recurse=False)]
        if any(_std(name, tensor) is None for name, tensor in own) or (buffers and module._buffers and not own):
            model._init_weights(module)


def _read(spec: ModelSpec, load: dict[str, Any], layers: int | None) -> Any:
    """The model with its weights read, only those of so many layers. Raises WeightsError."""
    from transformers import AutoConfig, AutoModelForCausalLM

    where, kwargs = source_arguments(spec.weights)
    config = spec.hf_config(layers)
    try:
        with reading(spec.weights):
            own = AutoConfig.from_pretrained(where, trust_remote_code=False, **kwargs)
        check_sizes(spec, own)
        if (quantized := getattr(own, "quantization_config", None)) is not None:
            config.quantization_config = quantized
        safe = {} if "gguf_file" in kwargs else {"use_safetensors": True}  # nothing is unpickled
        read = partial(AutoModelForCausalLM.from_pretrained, where, config=config, trust_remote_code=False, **safe)
        with reading(spec.weights), architecture.quiet():  # quiet about the layers that are left out
            model, info = _refusing(lambda: read(**kwargs, **load, output_loading_info=True), spec)
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, WeightsError | torch.OutOfMemoryError):
            raise
        raise WeightsError(f"weights {spec.weights!r} cannot be read: {first_line(error)}") from None
    if missing := info["missing_keys"]:  # which the loader would leave as they were drawn
        raise WeightsError(f"weights {spec.weights!r} lack {named(missing)} of the model {spec.name}")
    return dense(model)


def _refusing(make: Callable[[], Any], spec: ModelSpec) -> Any:
    """transformers refuses an attention that the architecture has not: that is the user's business, not a crash."""
    try:
        return make()
    except ValueError as error:
        if "attention implementation" not in str(error):
            raise
        message = f"transformers has not this attention for the family {spec.family}; try eager in reference="
        raise Unsupported(message) from error


def named_generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    """A generator of its own for whatever bears this name: the same draw in every arm, whatever else is drawn."""
    return torch.Generator(device).manual_seed(zlib.crc32(f"{seed}/{name}".encode()))


def fill_weights(model: nn.Module, dtype: torch.dtype, seed: int, adapter: str | None = None) -> None:
    """Draw one job's adapter, or (None) everything else, each tensor from a generator seeded by its own name.

    An adapter's tensors bear the names that they would have alone, so a job starts alike alone and beside others.
    Values are rounded to the compute dtype first, so that float32 and bfloat16 adapters, and the gate's float32 gold,
    start from the very same numbers. Norm weights stay as the model made them.
    """
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            std = _std(name, tensor)
            of_adapter = "lora_" in name
            if std is None or of_adapter != (adapter is not None) or (of_adapter and f".{adapter}." not in name):
                continue
            generator = named_generator(seed, own_name(name, adapter or ADAPTER), tensor.device)
            drawn = torch.empty(tensor.shape, device=tensor.device, dtype=torch.float32)
            put(tensor, drawn.normal_(0.0, std, generator=generator).to(dtype).to(tensor.dtype))


def _std(name: str, tensor: Tensor) -> float | None:
    if "lora_A" in name:
        return (3 * tensor.shape[-1]) ** -0.5  # as PEFT's kaiming_uniform(a=sqrt(5)) spreads it
    if "lora_B" in name:
        return LORA_B_STD
    if tensor.dim() >= 2 or name.endswith("bias"):
        return 0.02
    return None
