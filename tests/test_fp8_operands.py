"""benchmarks/fp8_operands.py: rounding nothing changes nothing, an operand changes what it should, and has a row."""

import torch
from helpers import benchmark


def test_an_operand_alone_is_rounded():
    with benchmark("fp8_operands") as script:
        model = script.build(2, 64, False)
        gold = script.gradients(model)
        loras = {n: m for n, m in model.named_modules() if n.endswith("proj") and hasattr(m, "base_layer")}
        with script.rounding(model, frozenset()):
            same = script.gradients(model)
        with script.rounding(model, frozenset({"dy"}), ("layers.1.mlp.down_proj",)):
            behind = script.gradients(model)
    assert len(loras) == 14 and all("forward" not in m.base_layer.__dict__ for m in loras.values())
    assert all(torch.allclose(same[n], gold[n], rtol=1e-4, atol=1e-7) for n in gold)
    changed = {n for n in gold if not torch.allclose(behind[n], gold[n], rtol=1e-4, atol=1e-7)}
    assert changed and not any("layers.1.mlp.down_proj" in n for n in changed), (
        "dY of a linear is none of its own gradient"
    )


def test_every_operand_has_a_row(capsys):
    with benchmark("fp8_operands") as script:
        script.main(1, 64)
    title, plain, *rows = capsys.readouterr().out.splitlines()
    names = [row.split(" | ")[0] for row in rows]
    assert title.startswith("rounded | worst | median") and plain.startswith("nothing, in bfloat16")
    assert names[:3] == ["all", "forward", "backward"] and {*script.OPERANDS} <= {*names} and len(rows) == 28
    worst = dict(zip(names, (float(row.split(" | ")[1]) for row in rows), strict=True))
    assert 0.01 < worst["backward"] < worst["all"] < 0.5
