"""How every published number stands, over all folders of results/: answered, unclear, open, or no question at all.

The tables of README.md and docs/claims.md and the notebook about published numbers ask here, so that they agree.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fnmatch import filter as filter_names
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from lorabench.record.contrast import Speedup
from lorabench.record.schema import TOTAL
from lorabench.record.stats import without_figure
from lorabench.report.analysis import Analysis
from lorabench.report.attribution_tables import claimed_of, increment, increment_is_clear
from lorabench.report.claim_tables import claims_frame, judged, ours
from lorabench.report.claims import FIT, Claim, Match, answers, load_claims, measured
from lorabench.report.folders import sweeps
from lorabench.report.ladder_summary import ladders
from lorabench.report.words import interval, number, ratio

ANSWERED, ELSEWHERE = "answered", "answered over another baseline"
UNCLEAR, REPEATED, OPEN, ONE = "unclear", "the same as another", "open", "1 by definition"
SAME = "the same"  # baseline
STANDINGS = (ANSWERED, ELSEWHERE, UNCLEAR, REPEATED, OPEN, ONE)
# Predibase's ladder as it was measured last, a folder a data set.
LADDERS = tuple(f"predibase_ladder_{one}" for one in ("glue", "drop", "viggo", "gsm8k", "magicoder"))


class Results:
    """All folders of results/ that hold records, by their place below it."""

    def __init__(self, folder: str | Path) -> None:
        self.place = Path(folder)
        self.folders = {name: Analysis.read(self.place / name) for name in sweeps(folder)}

    @cached_property
    def on_gpu(self) -> dict[str, Analysis]:
        """Those to which published numbers are held: all of them are of GPUs. The one measured last comes first."""
        found = [(name, analysis) for name, analysis in self.folders.items() if not name.startswith("cpu/")]
        last = {name: max((s["id"] for s in analysis.sessions), default="") for name, analysis in found}
        return dict(sorted(found, key=lambda item: last[item[0]], reverse=True))

    @cached_property
    def over_other_arms(self) -> list[tuple[str, Analysis]]:
        """Folders once more, each shown over an arm that is the baseline of a claim and not of the sweep."""
        baselines = sorted({toggle for s in load_claims() for claim in s.claims for toggle in claim.must_hold})
        found = []
        for name, analysis in self.on_gpu.items():
            arms = {arm.arm for arm in analysis.arms}
            found += [(name, Analysis.read(self.place / name, against=one)) for one in baselines if one in arms]
        return found

    @cached_property
    def found(self) -> list[tuple[str, Match, Analysis]]:
        """Every claim beside every record of a GPU that says anything about it, with its folder."""
        every = [*self.on_gpu.items(), *self.over_other_arms]
        return [(n, m, a) for n, a in every for m in a.matches if answers(m)]

    @cached_property
    def steps(self) -> list[Step]:
        """Every claim beside every rung of a ladder that stands on the claim's own baseline."""
        rungs = [(n, a, rung) for n, a in self.on_gpu.items() for own in ladders(a) for rung in own.rungs]
        return [
            Step(
                m.claim, rung.added, rung.increment, increment(rung, analysis), increment_is_clear(rung, analysis),
                rung.unpaired, n, m.changed, rung.record.workload.partition("(")[0],
            )
            for n, analysis, rung in rungs if rung.increment
            for m in claimed_of(rung) if not m.differs and not m.inverted
        ]  # fmt: skip


class Step(NamedTuple):
    """A claim about one step of a ladder, and what the step brings in a results folder, also in words."""

    claim: Claim
    toggle: str
    brings: Speedup
    said: str
    clear: bool
    unpaired: bool
    folder: str
    changed: bool  # the workload is not as a file has it
    data: str


class Measured(NamedTuple):
    """What stands beside a claim: the number, by which toggles it was measured, against what, and in which folders;
    and whether any of it has a figure."""

    value: str
    toggles: str
    baseline: str
    folders: list[str]
    clear: bool


class Nearness(NamedTuple):
    """What decides which rows stand beside a claim, the nearest first; `place` is that of the folder, the newest 0."""

    stands_in: bool
    apart: int
    changed: int
    few: bool
    place: int
    differs: str
    tested: str


def beside(claim: Claim, results: Results, form: str = "*") -> Measured | None:
    """The rows whose baseline is nearest to the claim's, of those that test the source's own toggles if there are any,
    and whose workload is as a file has it, and which have rounds enough for a figure, of the folder that was measured
    last; several cells as the range of their ratios. A claim of a range has the cells of all folders, each as it was
    measured last. In the claim's direction. `form`: only rows that test a toggle like this pattern. A claim about a
    step of a ladder takes rows over the claim's own baseline if there are any, whatever toggles they test, and if there
    are none the step, of each data set as it was measured last."""
    newest = list(results.on_gpu).index
    found: dict[Nearness, list[tuple[Match, Analysis]]] = {}
    for folder, m, analysis in results.found:
        asked = m.claim is claim and bool(filter_names(m.record.ablations, form))
        if asked and math.isfinite((value := _value(m, analysis))[0]):
            few = str(judged(m, value, analysis)).endswith("few trials")
            apart = len(re.findall(r"\w+", m.differs)) if m.differs else 0
            tested = "" if claim.over else " + ".join(m.record.ablations)
            key = Nearness(bool(m.stands_for), apart, m.changed, few, newest(folder), m.differs, tested)
            found.setdefault(key, []).append((m, analysis))
    if steps := [step for step in results.steps if step.claim is claim]:
        at_most = min(step.changed for step in steps)  # a step gives way to a row whose workload is no more changed
        same_baseline = {key: pairs for key, pairs in found.items() if key.apart == 0 and key.changed <= at_most}
        if not same_baseline:
            last = {step.data: step for step in sorted(steps, key=lambda step: -newest(step.folder))}
            return _of_steps([*last.values()][::-1])
        found = same_baseline
    if not found:
        return None
    best = min(found)
    places, pairs, differs = [best.place], found[best], best.differs
    if claim.statistic == "range":  # "depending on the dataset": each cell as it was measured last
        alike = sorted((key for key in found if key._replace(place=best.place) == best), reverse=True)
        last = {(m.record.model, m.record.workload): (key.place, (m, a)) for key in alike for m, a in found[key]}
        places, pairs = sorted({place for place, _ in last.values()}), [pair for _, pair in last.values()]
    rows = [m for m, _ in pairs]
    baseline = f"another: {differs}" if differs else SAME
    toggles = " + ".join(f"`{t}`" for t in rows[0].record.ablations)
    toggles += f", in place of `{rows[0].stands_for}`" if rows[0].stands_for else ""
    toggles = "the baseline's own" if claim.of_reference else toggles
    value, clear = _together(claim, pairs)
    return Measured(value, toggles, baseline, [list(results.on_gpu)[place] for place in places], clear)


def _of_steps(steps: Sequence[Step]) -> Measured:
    first = steps[0]
    several = [(step.brings.centre, step.clear) for step in steps]
    value = f"{first.said} ×" if len(steps) == 1 else _several(several, "×", "data sets")
    how = ", unpaired" if any(step.unpaired for step in steps) and len(steps) > 1 else ""
    toggle, folders = f"`{first.toggle}`, as a step of the ladder", list(dict.fromkeys(s.folder for s in steps))
    return Measured(value + how, toggle, SAME, folders, any(step.clear for step in steps))


def _several(values: Sequence[tuple[float, bool]], unit: str, places: str) -> str:
    """The range of those that have a figure, and of how many."""
    if not (clear := [value for value, is_clear in values if is_clear]):
        return f"no figure in any of {len(values)} {places}"
    span = " to ".join(dict.fromkeys((number(min(clear)), number(max(clear)))))
    if len(clear) == len(values):
        return f"{span} {unit} in {len(values)} {places}"
    return f"{span} {unit} in {len(clear)} of {len(values)} {places}, no figure in the others"


def _value(m: Match, analysis: Analysis) -> tuple[float, float, float]:
    value, low, high = measured(m.record, m.claim, analysis.contrasts)
    return (1 / value, 1 / high, 1 / low) if m.inverted else (value, low, high)


def _together(claim: Claim, pairs: Sequence[tuple[Match, Analysis]]) -> tuple[str, bool]:
    """The number of one cell or of several, and whether any has a figure."""
    m, analysis = pairs[0]
    if claim.over:
        (row,) = claims_frame([own for own, _ in pairs], analysis).to_dict("records")
        return f"{ours(row)} ×, {row['model']}", not without_figure(row["verdict"])
    values = [(_value(*pair), _is_clear(*pair)) for pair in pairs]
    unit = "×" if claim.is_ratio else claim.unit
    if len(values) > 1:
        said = _several([(value[0], is_clear) for value, is_clear in values], unit, "cells")
        return said, any(is_clear for _, is_clear in values)
    ((value, is_clear),) = values
    if unit != "×":
        return f"{number(value[0])} {unit}", True
    return f"{ratio(*value) if is_clear else interval(*value[1:], str(judged(m, value, analysis)))} {unit}", is_clear


def _is_clear(m: Match, analysis: Analysis) -> bool:
    """Of a ratio of times; what is no such ratio has no verdict."""
    of_times = m.claim.of_phase == TOTAL if m.claim.ratio_to else m.claim.quantity not in FIT
    return not (m.claim.is_ratio and of_times) or not without_figure(judged(m, _value(m, analysis), analysis))


class Standing(NamedTuple):
    """One of STANDINGS, and what was measured: once for each form of the toggles that the claim asks for."""

    how: str
    found: Sequence[Measured] = ()


def standing(claim: Claim, results: Results) -> Standing:
    """Answered where at least one cell has a figure, whether it agrees or not; unclear where none of those has."""
    if claim.same_as:
        return Standing(REPEATED)
    if claim.counted:
        return Standing(ANSWERED)
    if claim.is_one:
        return Standing(ONE)
    found = [] if claim.open else [one for form in claim.forms or "*" if (one := beside(claim, results, form))]
    if not found:
        return Standing(OPEN)
    if not (clear := [one for one in found if one.clear]):
        return Standing(UNCLEAR, found)
    return Standing(ANSWERED if any(one.baseline == SAME for one in clear) else ELSEWHERE, found)


def totals(results: Results) -> pd.DataFrame:
    """How many published numbers stand how: a row a text, and one of all of them. A range is two numbers."""
    counted = [(s.name, len(c.printed), standing(c, results).how) for s in load_claims() for c in s.claims]
    frame = pd.DataFrame(counted, columns=pd.Index(["text", "numbers", "how"]))
    wide = frame.pivot_table(index="text", columns="how", values="numbers", aggfunc="sum", sort=False, fill_value=0)
    wide = wide.reindex(columns=list(STANDINGS), fill_value=0).astype(int)
    wide.loc["in all"] = wide.sum()
    wide.insert(0, "numbers", wide.sum(axis=1))
    return wide.rename_axis(columns=None).reset_index()


def in_all(counted: pd.DataFrame) -> str:
    """The last row of `totals` in words."""
    row = counted.iloc[-1]
    said = f"Of {row['numbers']} published numbers, {row[ANSWERED]} are answered over their own baseline and "
    said += f"{row[ELSEWHERE]} over another one, {row[UNCLEAR]} are unclear, {row[REPEATED]} are another number again, "
    return said + f"{row[OPEN]} are open, and {row[ONE]} are 1 by definition."
