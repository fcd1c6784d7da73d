"""Loading: what a trial has to bring is what is in the files just now, on the device, and nothing that was kept."""

from __future__ import annotations

from dataclasses import replace

import torch
from helpers import cells
from torch import nn

from lorabench.contract.kind import kind
from lorabench.measure.kind import request_of
from lorabench.measure.kinds.load import differences, elsewhere, parts_of
from lorabench.measure.safetensors_file import entries
from lorabench.measure.trial import run_trial

CPU = torch.device("cpu")


def loading(tmp_path):
    cell = cells("kind=load", "workload=warm_cache")[0]
    request = request_of(replace(cell, candidate=()), "candidate", torch.bfloat16, CPU, tmp_path)
    return kind("load").build(request)


def test_every_tensor_has_other_bytes_in_each_trial_and_lies_where_it_lay(tmp_path):
    arm = loading(tmp_path)
    before = [entries(file) for file in arm.expected]
    arm.kind.feed(arm, 1)
    run_trial(arm)
    kept = {name: tensor.clone() for name, tensor in parts_of(arm).items()}
    assert not list(differences(arm.expected, kept))
    arm.kind.feed(arm, 2)
    assert sorted(differences(arm.expected, kept)) == sorted(kept)
    run_trial(arm)
    assert not list(differences(arm.expected, parts_of(arm)))
    assert [entries(file) for file in arm.expected] == before


def test_both_arms_are_fed_the_same_whoever_comes_first(tmp_path):
    one, other = loading(tmp_path), loading(tmp_path)
    one.kind.feed(one, 1)
    run_trial(one)
    other.kind.feed(other, 1)
    assert one.expected == other.expected
    assert not list(differences(other.expected, parts_of(one)))


def test_what_is_no_tensor_or_on_another_device_has_not_arrived():
    class Lazy(torch.Tensor):
        pass

    here = torch.zeros(2)
    loaded = {"a": here, "b": nn.Parameter(here), "c": here.as_subclass(Lazy), "d": here.to("meta")}
    assert list(elsewhere(loaded, CPU)) == ["c, a Lazy", "d, which is on the device meta"]
