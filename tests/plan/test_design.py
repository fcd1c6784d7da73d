"""Designs: which cells a list of ablations becomes, and what is refused before a process is started."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers import PEFT, cells

from lorabench.contract.ablation import combine, conflict
from lorabench.contract.family import families
from lorabench.plan import registry
from lorabench.plan.compose import ConfigError
from lorabench.plan.design import DesignError, check_design, refusal

CPU = SimpleNamespace(device="cpu", capability=None, gpus=0, dtype=lambda wanted: "float32")


def rows(design, *names):
    made = cells(f"design={design}", f"ablations=[{','.join(names)}]")
    return [(sorted(a.name for a in c.reference), [t.name for t in c.toggles]) for c in made]


def test_every_design_begins_with_the_reference_against_itself():
    for design in ("solo", "ladder", "leave_one_out", "pairwise", "factorial"):
        assert rows(design, "eager", "packing")[0] == (sorted(PEFT), [])


def over_the_start(*names):
    """The rungs of a ladder that are held against its start."""
    return [t for base, t in rows("ladder", *names)[1:] if base == sorted(PEFT)]


def test_solo_ladder_pairwise_and_factorial():
    three = ("eager", "packing", "adamw_fused")
    assert [t for _, t in rows("solo", *three)[1:]] == [["eager"], ["packing"], ["adamw_fused"]]
    assert over_the_start(*three) == [["eager"], ["eager", "packing"], list(three)]
    assert len(rows("pairwise", *three)) == 1 + 3 + 3
    assert len(rows("factorial", *three)) == 2**3


def test_in_a_ladder_and_leave_one_out_a_toggle_takes_the_place_of_an_earlier_one_in_its_slot():
    names = ("adamw", "adamw_fused", "packing")
    assert over_the_start(*names) == [["adamw"], ["adamw_fused"], ["adamw_fused", "packing"]]
    assert [c.rung for c in cells("design=ladder", f"ablations=[{','.join(names)}]")] == [None, 1, 2, 2, 3, 3]
    assert rows("leave_one_out", *names)[1:] == [
        (sorted(["sdpa", "adamw_foreach", "packing"]), ["adamw_fused"]),
        (sorted(["sdpa", "adamw_fused", "padding"]), ["packing"]),
    ]


def test_a_rung_is_held_against_the_start_and_against_the_rung_below():
    names = ("adamw", "adamw_fused", "packing")
    assert rows("ladder", *names)[1:] == [
        (sorted(["sdpa", "adamw_foreach", "padding"]), ["adamw"]),
        (sorted(["sdpa", "adamw_foreach", "padding"]), ["adamw_fused"]),
        (sorted(["sdpa", "adamw", "padding"]), ["adamw_fused"]),
        (sorted(["sdpa", "adamw_foreach", "padding"]), ["adamw_fused", "packing"]),
        (sorted(["sdpa", "adamw_fused", "padding"]), ["packing"]),
    ]
    made = cells("design=ladder", f"ablations=[{','.join(names)}]")
    assert [c.design for c in made] == ["ladder", "ladder", "ladder", "steps", "ladder", "steps"]
    (family,) = families(made)
    assert [stack.name for stack in family.stacks] == [
        "reference", "reference again", "adamw", "adamw_fused", "adamw_fused + packing",
    ]  # fmt: skip
    assert [len(stack.cells) for stack in family.stacks] == [0, 1, 1, 2, 2]


def test_several_designs_in_one_sweep_measure_what_they_share_once():
    made = cells("design=[solo,leave_one_out,ladder,factorial]", "ablations=[eager,packing]")
    assert [(c.design, [t.name for t in c.toggles]) for c in made] == [
        ("ladder", []), ("ladder", ["eager"]), ("ladder", ["eager", "packing"]), ("steps", ["packing"]),
        ("leave_one_out", ["eager"]), ("factorial", ["packing"]),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="did you mean ladder"):
        cells("design=[solo,lader]", "ablations=[eager]")


def test_where_a_cell_stands_in_a_ladder_is_no_part_of_its_content():
    rung = cells("design=ladder", "ablations=[eager,packing]")[2]
    assert replace(rung, rung=7).key == rung.key


def test_toggles_listed_together_are_one_candidate_of_the_solo_design():
    made = cells("ablations=[eager,[packing,adamw_fused]]")
    assert [[t.name for t in c.toggles] for c in made] == [[], ["eager"], ["packing", "adamw_fused"]]
    assert {a.name for a in made[2].candidate} == {"sdpa", "packing", "adamw_fused"}
    with pytest.raises(ConfigError, match="design=solo"):
        cells("design=ladder", "ablations=[eager,[packing,adamw_fused]]")
    with pytest.raises(ConfigError, match="stands twice"):
        cells("ablations=[[packing,eager],[eager,packing]]")


def test_leave_one_out_puts_the_others_into_the_reference():
    made = rows("leave_one_out", "eager", "packing")[1:]
    assert made == [
        (sorted(["sdpa", "adamw_foreach", "packing"]), ["eager"]),
        (sorted(["eager", "adamw_foreach", "padding"]), ["packing"]),
    ]


def test_the_candidate_replaces_what_the_reference_has_in_the_slot():
    reference = [registry.ablation(n) for n in PEFT]
    names = {a.name for a in combine(reference, [registry.ablation("eager")])}
    assert names == {"eager", "adamw_foreach", "padding"}


def test_conflicts_do_not_depend_on_the_order():
    pair = [registry.ablation(n) for n in ("group_by_length", "cuda_graph")]
    assert conflict(pair) == conflict(pair[::-1])
    assert "group_by_length excludes cuda_graph" in conflict(pair)
    two = [registry.ablation(n) for n in ("eager", "sdpa")]
    assert conflict(two) == conflict(two[::-1]) == "eager and sdpa both fill the slot attention"


def test_refusals_name_status_and_reason():
    by_name = {c.toggles[0].name: c for c in cells("ablations=[cuda_graph,adamw_8bit,sdpa]")[1:]}
    assert refusal(by_name["cuda_graph"], CPU)[0] == "unsupported"
    assert "needs a CUDA device" in refusal(by_name["adamw_8bit"], CPU)[1]
    assert refusal(by_name["sdpa"], CPU) == ("not_applied", "sdpa is already part of the reference")
    pair = cells("ablations=[[eager,sdpa_math]]")[1]
    assert refusal(pair, CPU) == ("conflict", "eager and sdpa_math both fill the slot attention")
    gpu = SimpleNamespace(device="cuda", capability=(7, 5), gpus=1)
    flash = cells("ablations=[sdpa_flash]")[1]
    assert "needs CUDA capability 8.0 or newer; this GPU has 7.5" in refusal(flash, gpu)[1]


def test_adapters_in_compute_dtype_needs_another_dtype_than_float32():
    cell = cells("ablations=[adapters_in_compute_dtype]")[1]
    assert refusal(cell, CPU)[0] == "not_applied"
    low = SimpleNamespace(device="cpu", capability=None, gpus=0, dtype=lambda wanted: "bfloat16")
    assert refusal(cell, low) is None


def test_the_named_baselines_have_the_attention_that_transformers_has_for_the_family():
    for baseline, names in (("peft", {"eager", "adamw_foreach", "padding"}), ("peft_low", None)):
        own, *_ = cells("models=[tiny-gemma2]", "ablations=[sdpa_math]", f"reference={baseline}")
        assert {a.name for a in own.reference} == (names or {*PEFT} - {"sdpa"} | {"eager", "adapters_in_compute_dtype"})
    own, pinned = cells("models=[tiny-gemma2]", "ablations=[sdpa_math]")
    assert refusal(own, CPU) is None
    assert "transformers does not have for the family gemma2" in refusal(pinned, CPU)[1]
    asked_for = cells("models=[tiny-gemma2]", "ablations=[]", "reference=[sdpa,padding]")[0]
    assert refusal(asked_for, CPU)[0] == "unsupported"
    assert {a.name for a in cells("ablations=[]")[0].reference} == {*PEFT}


def test_an_absent_package_comes_with_its_install_command():
    gpu = SimpleNamespace(device="cuda", capability=(9, 0), gpus=1)
    status, reason = refusal(cells("ablations=[liger]")[1], gpu)
    assert status == "unsupported"
    assert "pip install" in reason


def test_the_key_is_the_content():
    base = cells("ablations=[eager]")[1]
    assert base.key == cells("ablations=[eager]", "timeout_s=5", "output=elsewhere")[1].key
    changed = [
        cells("ablations=[eager]", override)[1].key
        for override in ("seed=1", "trials=4", "lora.r=8", "dtype=float32", "workload=2x17", "reference=peft_low")
    ]
    assert len({base.key, *changed}) == len(changed) + 1
    mode = [cells(f"ablations=[{{torch_compile:{{mode:{m}}}}}]")[1].key for m in ("default", "max-autotune")]
    assert mode[0] != mode[1]


def test_a_factorial_of_six_is_refused():
    six = [registry.ablation(n) for n in ("eager", "packing", "adamw", "cuda_graph", "liger", "torch_compile")]
    with pytest.raises(DesignError, match="64 arms"):
        check_design("factorial", [(a,) for a in six])
