"""A declared tolerance says what it is for, and stays below what that can come to."""

import pytest

from lorabench.contract.ablation import Tolerance
from lorabench.contract.switches import switch_fault
from lorabench.plan import registry

E4M3 = 2**-3


@pytest.mark.parametrize(
    ("declared", "changes_weights", "says"),
    [
        (Tolerance(words=" "), False, "without saying what it is for"),
        (Tolerance(words="w", grad=0.2), False, "grad=0.2; for what it says it is 0.1 at most"),
        (Tolerance(words="w", grad=0.6, eps=E4M3), False, "grad=0.6; for what it says it is 0.5 at most"),
        (Tolerance(words="w", grad=0.1, eps=2**-7), False, "0.03125 at most"),
        (Tolerance(words="w", grad=float("inf")), True, "0.5 at most"),
        (Tolerance(words="w", grad=float("nan")), True, "0.5 at most"),
        (Tolerance(words="w", loss=0.06), False, "loss=0.06"),
        (Tolerance(words="w", update=0.2), False, "update=0.2"),
        (Tolerance(words="w", grad=-0.1), False, "grad=-0.1"),
    ],
)
def test_what_cannot_be_declared_is_named(declared, changes_weights, says):
    assert says in declared.fault(changes_weights)


def test_our_own_toggles_stay_below_their_ceilings():
    ours = [registry.ablation(name) for name in registry.registered()]
    declared = [a for a in ours if a.tolerance]
    assert len(declared) >= 4 and not [
        a.tolerance.fault(a.changes_weights) for a in declared if a.tolerance.fault(a.changes_weights)
    ]


@pytest.mark.parametrize(
    ("switches", "global_patch", "says"),
    [
        (("torch.set_num_thread",), True, "declares the switch 'torch.set_num_thread'; those that can be declared are"),
        (("torch.set_default_dtype",), True, "those that can be declared are torch.set_float32_matmul_precision, "),
        (("torch.set_flush_denormal",), False, "one for the whole process, and not global_patch = True"),
    ],
)
def test_a_switch_that_cannot_be_declared_is_named(switches, global_patch, says):
    assert says in switch_fault(switches, global_patch)


def test_a_switch_that_can_be_declared_is_no_fault():
    assert switch_fault(("torch.set_flush_denormal",), True) is None and switch_fault((), False) is None
