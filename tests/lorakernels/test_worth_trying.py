"""Forms that are not tried: the rules beside every choice that the published results have recorded on an H200."""

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from lorakernels.ops.lora_grad import A_TILES, DS_DB_TILES
from lorakernels.runtime import MAX_FUSED_RANK
from lorakernels.tuning import worth_trying as worth

RESULTS = Path(__file__).resolve().parents[2] / "results/h200"
H200 = 132  # multiprocessors
LIBRARY = ("plain", "apart")
GONE = ("whole_small",)  # a tile that later kernels have no more
# The first names stand in the older records.
RULES = {
    "norm": lambda k: worth.norm_tiles(k[1]),
    "pack": lambda k: worth.s_tiles(copied=True),
    "concat operand": lambda k: worth.s_tiles(copied=True),
    "S": lambda k: worth.s_tiles(copied=False),
    "dropped product": lambda k: worth.dropped_s_tiles(),
    "glu": lambda k: worth.glu_tiles(k[0]),
    "tail and b": lambda k: worth.ds_and_db_tiles(tuple(DS_DB_TILES), k[0], k[1], H200),
    "dS and dB": lambda k: worth.ds_and_db_tiles(tuple(DS_DB_TILES), k[0], k[1], H200),
    "a gradient": lambda k: worth.a_gradient_tiles(k[0], k[1], len(k) > 5 and k[5], H200),
    "gate and up backward": lambda k: worth.glu_backward_tiles(k[0], k[1], H200),
}


@pytest.fixture(scope="module")
def recorded() -> dict[tuple, Counter]:
    """(what was chosen, shapes and dtypes …) -> how often each form was the fastest."""
    found: dict[tuple, Counter] = defaultdict(Counter)
    for file in RESULTS.rglob("records.jsonl"):
        for text in re.findall(r'"picked": ?"(\{.*?\})"', file.read_text()):
            choices = ast.literal_eval(re.sub(r"torch\.(\w+)", r"'\1'", text))
            for key, form in choices.items():
                found[key[:-1]][form] += 1
    return found


def lost(recorded, names):
    return {
        key: (forms, tried)
        for key, forms in recorded.items()
        if key[0] in names
        and (tried := RULES[key[0]](key[1:])) is not None
        and any(form not in (*tried, *LIBRARY, *GONE) for form in forms)
        and not (key[0] in ("pack", "S") and key[3] > MAX_FUSED_RANK)  # there every form is the library's
    }


def test_the_rules_leave_out_what_hardly_ever_won(recorded):
    choices = sum(sum(forms.values()) for key, forms in recorded.items() if key[0] in RULES)
    assert choices > 1000, "the records are there"
    missed = lost(recorded, RULES)
    wins = sum(forms[f] for forms, tried in missed.values() for f in forms if f not in (*tried, *LIBRARY, *GONE))
    assert wins <= choices / 200
    for forms, tried in missed.values():
        assert set(forms) & {*tried, *LIBRARY}, "another process chose one that is tried, at the same shape"


def test_the_rules_save_half_of_the_compiling(recorded):
    of_all = {"norm": 3, "pack": 3, "S": 3, "dropped product": 3, "glu": 3, "tail and b": 4, "a gradient": 3}
    keys = [key for key in recorded if key[0] in of_all]
    tried = sum(len(RULES[key[0]](key[1:])) for key in keys)
    assert tried <= 0.53 * sum(of_all[key[0]] for key in keys)


def test_something_is_tried_at_every_shape():
    for rows in (1, 2, 64, 4096, 1 << 20):
        for columns in (16, 576, 28672):
            for sms in (2, 46, H200):
                assert worth.a_gradient_tiles(rows, columns, False, sms)
                assert worth.glu_backward_tiles(rows, columns, sms)
                assert worth.ds_and_db_tiles(tuple(DS_DB_TILES), rows, columns, sms)
    assert worth.ds_and_db_tiles((), 8192, 4096, H200) == []


def test_dropout_takes_the_finest_tile_and_a_smaller_gpu_coarser_ones():
    assert worth.a_gradient_tiles(8192, 4096, True, H200) == ["one_read_narrow"]
    assert set(worth.a_gradient_tiles(8192, 4096, False, H200)) == set(A_TILES)
    assert worth.glu_backward_tiles(1024, 2048, H200) == ["whole_short"]
    assert worth.glu_backward_tiles(1024, 2048, 46) == ["whole", "whole_short"]
