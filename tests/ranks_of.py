"""Several processes that build arms and take steps together: one start for all cases of a test module. On a CPU in
float32, on GPUs in bfloat16."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers import deep_arm, module
from several_ranks import on_ranks

from lorabench.contract.ablation import Ablation, Evidence
from lorabench.contract.arm import Arm
from lorabench.contract.batch import Sample
from lorabench.contract.hooks import asked, noted
from lorabench.contract.ranks import ONE, Ranks, whole
from lorabench.measure import profile
from lorabench.measure.judging import numerics

STEPS = 3


def samples() -> list[Sample]:
    """Eight of unequal lengths, so that a mean of the ranks' means is another loss."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (48, 16, 33, 7, 64, 21, 5, 40)]
    return [Sample(tokens, list(tokens)) for tokens in drawn]


def made_of(names: tuple[Any, ...], device: str = "cpu", model: str = "tiny-llama", **kwargs: Any) -> Arm:
    kwargs |= {"device": device, "model": model, "dtype": torch.bfloat16 if device == "cuda" else torch.float32}
    return deep_arm("sdpa", "adamw_foreach", "padding", *names, samples=samples(), **kwargs)


def steps_of(names: tuple[Any, ...], ranks: Ranks = ONE, folder: str = "", **of: str) -> dict[str, Any]:
    """Of an arm on a device and of a model (`of`): the first step's outcome, what its toggle says, its adapters after
    STEPS steps, the loss then, and the adapter in `folder` as PEFT saves it."""
    made = made_of(names, ranks=ranks, **of)
    run = lambda: numerics.one_step(made)  # noqa: E731
    first, ops, handed = profile.collectives(run)
    found: dict[str, Any] = {"loss": first.loss, "gradients": first.gradients}
    products = [ops[f"aten::{name}"] for name in ("mm", "addmm", "addmm_")]
    found |= {"update_error": first.update_error, "audits": {}, "notes": {}, "products": products}
    for toggle in made.ablations:
        evidence = Evidence(made, made.patched[toggle.name], ops, handed)
        if toggle.slot in ("parallel", "fused_kernels", "checkpointing"):
            found["audits"][toggle.name] = asked(toggle, Ablation.audit, evidence)
            found["notes"] |= noted(toggle, evidence)
    for _ in range(STEPS - 1):
        numerics.one_pass(made, made.step)
        made.step.update()
    if "lorakernels" in found["notes"]:
        import lorakernels

        found["left"] = [f"{part}: {why}" for part, why in lorakernels.status(made.model).left]
    after = {name: whole(p.detach()).clone() for name, p in made.adapters()}
    found |= {"differs": _differs(after, ranks), "last_loss": numerics.one_pass(made, made.step)[0]}
    if folder:
        _save(made, ranks, folder)
    return found


def loss_of_saved(folder: str, *base: Any, **of: str) -> float:
    """The loss of plain PEFT with the adapter in `folder`, on the weights of the toggles `base`."""
    plain = made_of(base, **of)
    model: Any = plain.model
    model.load_adapter(folder, "saved")
    model.set_adapter("saved")
    return sum(float(plain.step.forward(batch).detach()) for batch in plain.step.batches)


def _save(made: Arm, ranks: Ranks, folder: str) -> None:
    state = {n: whole(t.detach()) for n, t in made.model.state_dict().items() if "lora_" in n}
    if not ranks.rank:
        made.model.save_pretrained(folder, state_dict=state)  # pyright: ignore[reportCallIssue]


def _differs(after: dict[str, torch.Tensor], ranks: Ranks) -> int:
    """How many numbers are not bit for bit the same on all ranks."""
    if ranks.size == 1:
        return 0
    mine = torch.cat([p.flatten() for p in after.values()])
    others = [torch.empty_like(mine) for _ in range(ranks.size)]
    dist.all_gather(others, mine)
    return max(int((other != mine).sum()) for other in others)


def together(size: int, cases: dict[str, tuple[Any, ...]], folder: Path, **of: str) -> dict[str, Any]:
    """What `steps_of` finds on rank 0 for each case; of one that raises its words. The adapters go to folders of the
    cases' names. The ranks are forks of a process in which no test has run: one of a process that had run 2,800 ended
    with a damaged heap (2026-11-27)."""
    (folder / "cases.json").write_text(json.dumps([cases, of]))
    done = module("ranks_of", str(size), str(folder), cwd=Path(__file__).parent, timeout=600)
    assert not done.returncode, done.stderr[-2000:]
    return torch.load(folder / "found.pt", map_location="cpu", weights_only=True)


def _found(ranks: Ranks, cases: dict[str, list[Any]], folder: Path, of: dict[str, str]) -> None:
    found: dict[str, Any] = {}
    for name, case in cases.items():
        try:
            found[name] = steps_of(tuple(case), ranks, str(folder / name), **of)
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            found[name] = f"{type(error).__name__}: {error}"
    if not ranks.rank:
        torch.save(found, folder / "found.pt")


if __name__ == "__main__":
    at = Path(sys.argv[2])
    wanted, kinds = json.loads((at / "cases.json").read_text())
    on_ranks(int(sys.argv[1]), at, _found, wanted, at, kinds, timeout_s=600, device=kinds.get("device", "cpu"))
