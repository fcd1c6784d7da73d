"""Head to head: how sides are named, which cells they become, and what their keys are."""

from types import SimpleNamespace

import pytest
from helpers import PEFT, cells

from lorabench.plan.compose import ConfigError
from lorabench.plan.design import refusal

CPU = SimpleNamespace(device="cpu", capability=None, gpus=0, dtype=lambda wanted: "float32")


def names(toggles):
    return {a.name for a in toggles}


def test_two_sides_are_one_row_and_the_noise_floor_of_the_one_that_it_is_against():
    floor, row = cells("versus=[lora_kernels+packing,eager]")
    assert names(row.candidate) == {"sdpa", "adamw_foreach", "lora_kernels", "packing"}
    assert names(row.reference) == {"eager", "adamw_foreach", "padding"}
    assert floor.reference == floor.candidate == row.reference and not floor.toggles
    assert row.title.endswith(": lora_kernels + packing versus eager")
    assert floor.title.endswith(": eager against itself")
    assert refusal(row, CPU) is None and refusal(floor, CPU) is None


@pytest.mark.parametrize(
    "side",
    ["lora_kernels+packing", "'packing + lora_kernels'", "[lora_kernels,packing]", "[packing,{lora_kernels:{}}]"],
)
def test_a_side_is_named_in_any_of_these_ways(side):
    keys = [cell.key for cell in cells("versus=[lora_kernels+packing,eager]")]
    assert [cell.key for cell in cells(f"versus=[{side},eager]")] == keys


def test_parameters_are_part_of_a_side():
    row = cells("versus=[[{lora_kernels:{one_gemm:false}},packing],lora_kernels]")[1]
    assert row.tested == "lora_kernels(one_gemm=False) + packing versus lora_kernels"
    assert row.key != cells("versus=[lora_kernels+packing,lora_kernels]")[1].key


def test_of_several_sides_every_pair_is_measured():
    found = [cell.tested for cell in cells("versus=[lora_kernels,eager,packing]")]
    assert found == [
        "eager against itself", "lora_kernels versus eager",
        "packing against itself", "lora_kernels versus packing", "eager versus packing",
    ]  # fmt: skip


def test_a_noise_floor_is_paired_as_its_rows_are():
    """liger patches classes: its cells are measured in separate processes."""
    apart = {cell.tested: cell.separate for cell in cells("versus=[eager,packing,liger]")}
    assert apart == {
        "packing against itself": False, "eager versus packing": False, "liger against itself": True,
        "eager versus liger": True, "packing versus liger": True,
    }  # fmt: skip
    alone = [cell.tested for cell in cells("versus=[liger,eager]")]
    assert alone == ["eager against itself, separate processes", "liger versus eager"]
    both = [cell.tested for cell in cells("versus=[liger,packing,eager]")]
    assert "eager against itself" in both and "eager against itself, separate processes" in both


def test_beside_it_only_what_is_asked_for_is_measured():
    alone = cells("versus=[eager,packing]")
    both = cells("versus=[eager,packing]", "ablations=[eager]")
    assert [c.key for c in both] == [c.key for c in (*cells("ablations=[eager]"), *alone)]


def test_a_key_is_of_both_sides_as_they_are_named():
    one, other = (cells(f"versus=[{pair}]")[1] for pair in ("eager,packing", "packing,eager"))
    solo = cells("reference=[adamw_foreach,sdpa,packing]", "ablations=[eager]")[1]
    again = cells("versus=[eager+padding,packing]")[1]
    assert len({one.key, other.key, solo.key, again.key}) == 4
    assert one.key == cells("versus=[eager,packing]", "ablations=[adamw]")[-1].key


def test_several_references_are_each_under_both_sides():
    found = cells("versus=[eager,packing]", "reference=[peft,peft_low]")
    assert [names(c.reference) - {*PEFT} for c in found] == [{"packing"}] * 2 + [
        {"packing", "adapters_in_compute_dtype"}
    ] * 2
    low = "adapters_in_compute_dtype"
    same = cells(f"versus=[eager+{low},packing+{low}]", "reference=[peft,peft_low]")
    assert len(same) == len({c.key for c in same}) == 2


def test_what_both_sides_name_is_no_difference_and_no_fault():
    row = cells("versus=[eager+packing,sdpa_math+packing]")[1]
    assert refusal(row, CPU) is None


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("versus=lora_kernels", "two sides or more"),
        ("versus=[]", "two sides or more"),
        ("versus=[lora_kernel,eager]", "did you mean lora_kernels?"),
        ("versus=[lora_kernels+,eager]", "no ablation named ''"),
        ("versus=[eager,eager]", "eager and eager of versus= come to the same stack"),
        ("versus=[sdpa,padding]", "sdpa and padding of versus= come to the same stack"),
        ("versus=[lora_kernels+liger,eager]", "the side lora_kernels + liger of versus= cannot be built"),
        ("versus=[lora_kernels,frozen_limit]", "frozen_limit is no way to do the work"),
        ("versus=[{lora_kernels:{one:1}},eager]", "one_gemm"),
        ("versus=[[],eager]", "an ablation is a name"),
    ],
)
def test_wrong_sides_are_one_line(override, words):
    with pytest.raises(ConfigError) as error:
        cells(override)
    assert words in str(error.value) and "\n" not in str(error.value)
