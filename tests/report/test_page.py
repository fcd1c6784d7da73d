"""The page: self-contained, escaped, the answer first, every arm once, and data that a browser reads."""

import base64
import hashlib
import itertools
import json
import math
import re
from pathlib import Path

import pytest
from record.arms import Simulated, written

from lorabench.report.analysis import Analysis
from lorabench.report.answers import fastest, published_answer
from lorabench.report.arms import LEAST, REFERENCE, TWIN, arms_of
from lorabench.report.cells import HOST, SENDING, text_groups
from lorabench.report.opening import reference_name, settings
from lorabench.report.page import page
from lorabench.report.page_data import families
from lorabench.report.shown import show

RESULTS = Path(__file__).resolve().parents[2] / "results"
EVIL = "</script><script>alert('x')</script><img src=x onerror=y>\u2028<!-- ]]> $\\frac{"


@pytest.fixture
def analysed(tmp_path, folder):
    """Records as a folder that is read: a page shows arms, which a folder has."""

    def make(records, sessions=None):
        return Analysis.read(folder(tmp_path / "run", records, sessions))

    return make


@pytest.fixture
def rounds(tmp_path):
    """A family of four arms that shared their rounds."""
    made = Simulated()
    arms = [made.arm(), made.twin(), made.arm(["a"], 1.5), made.arm(["b"], 1.2)]
    return Analysis.read(written(tmp_path / "rounds", arms))


def html_of(analysis):
    return page(analysis, show(analysis))


def named(family):
    return {arm["name"]: arm for arm in family["arms"]}


def ratio(family, arm, base, phase="total"):
    """As the page finds it: one half is there, the other is its inverse."""
    names = [a["name"] for a in family["arms"]]
    i, j = names.index(base), names.index(arm)
    three = family["ratios"][phase][min(i, j)][abs(j - i) - 1]
    return three if j > i else [1 / three[0], 1 / three[2], 1 / three[1]]


def test_nothing_that_is_shown_can_break_out(record, session, tags, cells_of, analysed):
    bad = record([EVIL], status="crash", reason=EVIL, log=EVIL, notes={EVIL: EVIL}, model=EVIL, workload=EVIL)
    html = html_of(analysed([bad, record([EVIL])], [session() | {"command": [EVIL], "commit": EVIL}]))
    found = tags(html)
    assert found.tags.count("script") == 3  # the data, Plot, and ours
    assert "img" not in found.tags
    assert not any("alert" in script for script in found.scripts[1:])
    shown = next(arm for family in cells_of(html) for arm in family["arms"] if arm["status"] == "crash")
    assert (shown["name"], shown["log"]) == (EVIL, EVIL)
    assert shown["facts"]["status"] == f"crash: {EVIL}"
    assert " ".join(EVIL.split()) in " ".join(found.text.split())  # and in the tables it stands as text


def test_the_policy_allows_the_pages_own_scripts_and_styles_and_nothing_else(rounds):
    html = html_of(rounds)
    (policy,) = re.findall(r'Content-Security-Policy" content="(.*?)"', html)
    own = re.findall(r"<script>(.*?)</script>", html, re.DOTALL) + re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    hashes = {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in own}
    allowed = set(re.findall(r"sha256-([\w+/=]+)", policy.replace("&#39;", "'")))
    assert len(own) == 3 and hashes < allowed and len(allowed - hashes) == 1  # the last is of Plot's own style sheet
    assert "default-src" in policy and "unsafe" not in policy
    body = html[html.index("<body>") : html.index("<script type=")]
    assert " style=" not in body and not re.search(r"<[^>]* on\w+=", body)  # the policy would block them


def test_nothing_is_fetched(rounds, tags):
    html = html_of(rounds)
    assert all(link.startswith("#") for link in tags(html).links)
    assert not re.search(r"url\((?!#)|@import", html[: html.index("<script")])


def test_the_script_makes_no_markup_of_text(rounds, tags):
    for script in tags(html_of(rounds)).scripts[2:]:
        assert not any(
            way in script for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(")
        )


# -- the data ---------------------------------------------------------------------------------------------------------


def test_every_arm_of_a_family_stands_once_and_the_reference_first(rounds):
    (family,) = families(rounds)
    assert [arm["name"] for arm in family["arms"]] == ["reference", "reference again", "a", "b"]
    assert [arm["role"] for arm in family["arms"]] == [REFERENCE, TWIN, "candidate", "candidate"]
    assert family["rounds"] and family["ladder"] == []
    (own,) = named(family)["a"]["trials"]
    assert len(own["rounds"]) == len(own["seats"]) == len(own["ms"]["total"]) == len(own["ms"]["forward"])
    sums = [sum(turn) for turn in zip(*(own["ms"][p] for p in family["phases"]), strict=True)]
    assert own["ms"]["total"] == pytest.approx(sums, rel=1e-3)


def test_any_two_arms_are_held_together_as_the_report_against_one_of_them_holds_them(tmp_path):
    made = Simulated()
    run = written(tmp_path / "f", [made.arm(), made.twin(), made.arm(["a"], 1.5), made.arm(["b"], 1.2)])
    (family,) = families(Analysis.read(run))
    against = Analysis.read(run, against="a")
    (row,) = [row for row in against.table.to_dict("records") if row["toggles"] == "b"]
    for phase in ("total", "backward"):
        expected = [row[f"{phase}_{end}"] for end in ("speedup", "low", "high")]
        assert ratio(family, "b", "a", phase) == pytest.approx(expected, rel=1e-3)
    names = [arm["name"] for arm in family["arms"]]
    assert family["verdicts"][names.index("a")][names.index("b")] == "slower"
    assert family["verdicts"][0][names.index("b")] == "faster"
    (over,) = families(against)
    assert [arm["name"] for arm in over["arms"]] == ["a", "b", "reference", "reference again"]
    assert over["arms"][0]["role"] == REFERENCE and over["arms"][0]["ms"] == named(family)["a"]["ms"]


@pytest.mark.parametrize("folder", ["h200/peers_rounds", "h200/peers", "h200/predibase_ladder", "cpu/first_sweep"])
def test_over_the_reference_the_page_says_what_the_table_says(folder):
    analysis = Analysis.read(RESULTS / folder)
    for group, family in zip(analysis.groups, families(analysis), strict=True):
        arms = arms_of(group, analysis)
        assert len(arms) == len(family["arms"]) and len({arm.name for arm in arms}) == len(arms)
        for n, arm in enumerate(arms[1:]):
            row = analysis.row(arm.record)
            three = family["ratios"]["total"][0][n]
            assert (three is None) == math.isnan(row["total_speedup"])
            if three and arm.role != TWIN:  # the twin has a row for every way to pair it
                expected = [row[f"total_{end}"] for end in ("speedup", "low", "high")]
                assert three == pytest.approx(expected, rel=1e-3), arm.name
            said = row["verdict"] if isinstance(row["verdict"], str) and arm.role not in (TWIN, LEAST) else ""
            assert family["verdicts"][0][n + 1] == said


def test_a_failed_arm_is_there_with_its_reason_and_without_times(sweep, analysed):
    (family,) = families(analysed(sweep()))
    failed = {name: arm for name, arm in named(family).items() if arm["status"] != "ok"}
    assert set(failed) >= {"toggle_crash", "toggle_timeout", "toggle_wrong_numerics"}
    assert all(arm["reason"] and not arm["ms"] and not arm["trials"] for arm in failed.values())
    alone = named(family)["packing"]  # its reference ran out of memory, and it has times
    assert alone["status"] == "ok" and alone["ms"]["total"] and "does not fit" in alone["said"]


def test_the_details_of_an_arm_are_all_there(record, session, analysed):
    checks = [{"name": "loss of trial 7", "found": 0.01, "allowed": 0.02, "where": "trial 7"}]
    made = record(["a"], speedup=1.4, notes={"backend": "triton", "a": {"left": ["x"]}})
    made = made.model_copy(
        update={"numerics": made.numerics.model_validate(made.numerics.model_dump() | {"checks": checks})}
    )
    telemetry = {"sm_clock_mhz": (1395.0, 1650.0, 1965.0), "throttle": ["power cap"], "disturbed_trials": [3]}
    made = type(made).model_validate(made.model_dump(by_alias=True) | {"telemetry": telemetry})
    command = ["python", "-m", "lorabench.sweep", "seed=3", "models=[other]", "output=elsewhere"]
    (family,) = families(analysed([made], [session() | {"command": command}]))
    facts = named(family)["a"]["facts"]
    assert list(facts)[:3] == ["sessions", "status", "kind"]  # what matters first, not by the alphabet
    assert facts["backward"].startswith("reference ") and "× 1." in facts["backward"]
    assert facts["memory, candidate"] == "peak 6.00 GiB, forward 3.00 GiB, backward 6.00 GiB, step 2.00 GiB"
    assert facts["roofline, candidate step"] == "label host-bound"
    assert facts["notes"] == "backend triton"
    assert facts["what was patched"] == [["toggle", "sites", "says"], ["a", "30", "left ['x']"]]
    assert ["adapter gradient", "0.00400", "0.0200", "layers.0.q_proj.lora_A.weight, of 56", "passed"] in facts[
        "numerics"
    ]
    assert ["loss of trial 7", "0.0100", "0.0200", "trial 7", "passed"] in facts["numerics"]
    assert ["SM clock, MHz", "1395", "1650", "1965"] in facts["telemetry"]
    assert ["disturbed trials", "3", "", ""] in facts["telemetry"]
    assert facts["measure it again"] == (
        "python -m lorabench.sweep seed=3 kind=train 'models=[smollm2-135m]' workload=alpaca "
        "'reference=[sdpa, adamw_fused]' 'ablations=[[a]]' design=solo output=output/rerun"
    )


def test_jobs_and_ranks_are_shown(several_jobs, analysed):
    (family,) = families(analysed([several_jobs]))
    facts = named(family)["a"]["facts"]
    headings, *rows = facts["jobs"]
    assert headings[:3] == ["job", "r", "real tokens"]
    assert [row[:3] for row in rows] == [["a", "8", "512"], ["b", "16", "1024"]]
    assert [row[5] for row in rows] == ["passed", "none"]
    assert facts["ranks, candidate"].startswith("2 ranks, slowest behind the fastest by 3.0 % (median)")


def test_an_arm_of_several_sessions_has_the_trials_of_each(tmp_path):
    arms = [arm for n in range(2) for made in [Simulated(session=f"s{n}", replicate=n, seed=n)]
            for arm in (made.arm(), made.twin(), made.arm(["a"], 1.3))]  # fmt: skip
    run = written(tmp_path / "f", arms)
    sessions = [{"id": f"s{n}", "commit": "c"} for n in range(2)]
    (run / "environment.json").write_text(json.dumps({"schema": 1, "sessions": sessions}))
    (family,) = families(Analysis.read(run))
    assert [trials["session"] for trials in named(family)["a"]["trials"]] == ["s0", "s1"]
    assert ratio(family, "a", "reference")[0] == pytest.approx(1.3, rel=0.02)


def test_data_is_json_that_a_browser_reads(record, analysed):
    """A NaN among the details once left the whole page without its scripts."""
    html = html_of(analysed([record(["a"]), record(["c"], status="crash"), record([], gpu=False)]))
    (data,) = re.findall(r'id="data">(.*?)</script>', html, re.DOTALL)
    json.loads(data, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_a_published_number_stands_with_its_row():
    (family, *_) = families(Analysis.read(RESULTS / "h200/predibase_ladder"))
    claims = [claim for arm in family["arms"] for claim in arm.get("claims", [])]
    assert claims and all(claim["said"] and claim["wording"] and claim["source"] for claim in claims)


def test_short_names_leave_out_what_most_have_and_stay_apart(tmp_path):
    made = Simulated()
    stacks = [["a", "low"], ["b", "low"], ["c", "low"], ["low"], ["d"]]
    arms = [made.arm(), made.twin(), *(made.arm(stack, 1.1 + n / 10) for n, stack in enumerate(stacks))]
    (family,) = families(Analysis.read(written(tmp_path / "f", arms)))
    short = {arm["name"]: arm["short"] for arm in family["arms"]}
    assert short["a + low"] == "a" and short["low"] == "low" and short["d"] == "d"
    assert len(set(short.values())) == len(short)


# -- the answer -------------------------------------------------------------------------------------------------------


def test_the_first_sentence_names_the_fastest_what_it_buys_and_what_it_costs(record, session, analysed):
    best, other = record(["lora_kernels"], speedup=1.5, peaks=(8.0, 2.0)), record(["b"], speedup=1.2)
    analysis = analysed([record([]), other, best], [session() | {"dirty": False}])
    html, (family,) = html_of(analysis), families(analysis)
    said = family["opening"]["sentence"]
    assert html.index(said.split(":")[0]) < html.index('id="race"')
    assert re.fullmatch(
        r"On this NVIDIA H200 the fastest way to run smollm2-135m at alpaca is lora_kernels: [\d.]+ ms for forward \+ "
        r"backward \+ step, 1\.\d+ × sdpa \+ adamw_fused, 2\.00 of 8\.00 GiB; nothing was lost but rounding\.", said,
    )  # fmt: skip
    assert family["arms"][family["opening"]["best"]]["name"] == "lora_kernels"
    assert family["opening"]["doubts"] == ["Measured in one session."]


def test_without_anything_faster_the_sentence_says_so(record, analysed):
    (family,) = families(analysed([record([]), record(["d"], speedup=0.8), record(["e"], status="crash")]))
    assert family["opening"]["best"] is None
    assert family["opening"]["sentence"].endswith("nothing that was tried is clearly faster than sdpa + adamw_fused.")
    assert family["opening"]["doubts"] == ["1 of 2 stacks were measured, 0 of them are unclear."]


def test_a_host_that_the_gpu_waits_for_is_said(record, analysed):
    waits = {"forward": {"device_busy_ms": 6.0, "label": "host-bound"}}
    made = record(["a"], speedup=1.3, roofline={"reference": waits, "candidate": waits})
    (family,) = families(analysed([record([]), made]))
    assert any("waits for its host" in doubt for doubt in family["opening"]["doubts"])
    assert named(family)["a"]["hostBound"]


def test_a_share_of_the_host_that_nobody_knows_is_left_out(record, analysed):
    """Of several processes on one GPU the device's waits are not measured."""
    waits = {"forward": {"device_busy_ms": 6.0, "label": "host-bound"}}
    made = record(["processes"], speedup=1.3, roofline={"reference": waits})
    (group,) = text_groups(analysed([record([]), made]))
    (said,) = [row[HOST] for row in group.rows if "processes" in row.values()]
    before, after = said.split(" → ")
    assert before.endswith(" %)") and "%" not in after


def test_what_ranks_send_is_shown_where_any_do(record, analysed):
    sends = {
        "forward": {"communication_ms": 12.0, "exposed_ms": 3.0},
        "backward": {"communication_ms": 8.0, "exposed_ms": 0.5},
    }
    (group,) = text_groups(analysed([record([]), record(["fsdp2"], speedup=1.6, roofline={"candidate": sends})]))
    assert [row[SENDING] for row in group.rows if "fsdp2" in row.values()] == ["none → 20.0 (3.50)"]
    (alone,) = text_groups(analysed([record([]), record(["a"], speedup=1.6)]))
    assert SENDING in group.columns and SENDING not in alone.columns


def test_the_settings_to_paste_are_those_of_the_stack():
    (_, _, python), *_ = settings(["sdpa", "adamw_fused", "adapters_in_compute_dtype", "lora_kernels"])
    assert "attn_implementation='sdpa'" in python and "autocast_adapter_dtype=False" in python
    assert "optim='adamw_torch_fused'" in python and "lorakernels.apply(model)" in python
    compile(python, "settings", "exec")
    assert "gradient_checkpointing=True" in settings(["gradient_checkpointing(every_n_layers=2)"])[0][2]
    assert settings(["no_such_toggle"]) == []


def test_a_named_baseline_has_its_name():
    assert reference_name(["sdpa", "adamw_foreach", "padding"]) == "peft"
    assert reference_name(["padding", "adapters_in_compute_dtype", "eager", "adamw_foreach"]) == "peft_low"
    assert reference_name(["sdpa"]) == "sdpa" and reference_name(["x", "y", "z"]) == "the reference"


def test_the_fastest_is_the_one_with_the_fewest_milliseconds_and_what_is_level_stands_beside_it(
    record, on_a_faster_host
):
    """A ladder's page named 343 ms the fastest, because 271 ms had an interval that met it and more toggles."""
    few, far = record(["a"], speedup=1.8, sd=0.001), record(["c"], speedup=1.5, sd=0.001)
    more = on_a_faster_host(few.model_copy(update={"key": "more", "ablations": ["a", "b"]}), 1.004)
    analysis = Analysis([record([], sd=0.001), more, few, far])
    assert fastest([few, more, far], analysis) == [more, few]


def test_the_page_counts_the_published_numbers_that_the_tables_show():
    analysis = Analysis.read(RESULTS / "h200/predibase_ladder")
    own, steps = re.findall(r"(\d+) above, (\d+) within, (\d+) below", published_answer(analysis))
    rows = [row for table in show(analysis).claims for row in table[2]]
    cells = [cell for group in show(analysis).groups for _, _, rungs in group.tables for rung in rungs for cell in rung]
    for word, over_the_start, over_the_rung_below in zip(("above", "within", "below"), own, steps, strict=True):
        assert int(over_the_start) == sum(row[4] == word for row in rows)
        assert int(over_the_rung_below) == sum(cell.count(f"(ours {word})") for cell in cells)


# -- size -------------------------------------------------------------------------------------------------------------


def test_without_scripts_the_tables_stand_there(rounds, tags):
    html = html_of(rounds)
    bare = html[html.index("<noscript>") : html.index("</noscript>")]
    assert all(
        name in bare
        for name in ("smollm2-135m @ alpaca", "total × [95 %]", '<th scope="row">a</th>', '<th scope="row">b</th>')
    )


def test_a_ladder_adds_up_to_its_end():
    (family, _) = families(Analysis.read(RESULTS / "h200/predibase_ladder"))
    applied = [rung for rung in family["ladder"] if rung["applied"]]
    for below, rung in itertools.pairwise(applied):
        assert rung["before"] == below["after"] and rung["low"] <= rung["high"]


@pytest.mark.parametrize("folder", ["peers", "first_sweep", "peers_rounds"])
def test_the_page_of_a_suite_is_below_a_megabyte_and_a_half(folder):
    analysis = Analysis.read(RESULTS / "h200" / folder)
    assert len(html_of(analysis).encode()) < 1_500_000
