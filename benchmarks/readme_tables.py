"""The tables of README.md and of the pages under docs/, from what lies in results/.

    python benchmarks/readme_tables.py              # write them anew
    python benchmarks/readme_tables.py FILE         # also those of another file with the same markers

A table stands between `<!-- NAME -->` and `<!-- /NAME -->`; what is outside of markers is nobody's but the author's.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from fnmatch import filter as filter_names
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from lorabench.compare import hardware
from lorabench.record.contrast import Speedup
from lorabench.record.schema import TOTAL, Record
from lorabench.record.stats import without_figure
from lorabench.report import cells
from lorabench.report.analysis import Analysis, Row
from lorabench.report.answers import fastest
from lorabench.report.attribution_tables import (
    SHAPLEY,
    AnyTable,
    attribution_tables,
    claimed_of,
    increment,
    increment_is_clear,
)
from lorabench.report.claim_tables import claims_frame, judged, ours
from lorabench.report.claims import (
    BY_DEFINITION,
    FIT,
    Claim,
    Match,
    Source,
    answers,
    load_claims,
    measured,
)
from lorabench.report.groups import Group
from lorabench.report.ladder_summary import conclusions, ladders, start_to_end, steps_table
from lorabench.report.shown import show
from lorabench.report.tables import md, md_table
from lorabench.report.words import interval, number, ratio

sys.path.insert(0, str(Path(__file__).parent))
import bubble_tables
import claim_words
import longest_table
import markers
from suite_columns import SUITES

ROOT = Path(__file__).resolve().parents[1]
OURS = "lora_kernels"
DIRTY = "†"
ONE = "one session"
Place = tuple[str, str, str, str]  # what a column is called, and its results folder, model and workload
COMMON = "adapters_in_compute_dtype"  # every stack that can has it: it tells none apart
# What README shows of the claims, by source and id; docs/claims.md has them all.
SHOWN = (
    ("axolotl_blog", "llama-3.1-8b-forward-speedup"),
    ("axolotl_blog", "llama-3.1-8b-backward-speedup"),
    ("axolotl_blog", "llama-3.1-8b-backward-memory"),
    ("lorafusion", "kernels-average"),
    ("lorafusion", "over-megatron-average"),
    ("lorafusion", "over-mlora-most"),
    ("predibase_ladder", "step-3-batch-size"),
    ("predibase_ladder", "step-9-kernels"),
    ("mlora", "faster-than-one-after-the-other"),
)
# The stacks that README lists, by the toggles of their rows, and where: results folder, model, workload.
STACKS = (
    ("PEFT, adapters in the compute dtype", [COMMON]),
    ("the same, captured (`cuda_graph`)", [COMMON, "cuda_graph"]),
    ("`axolotl`", ["axolotl", COMMON]),
    ("`torch_compile`", ["torch_compile", COMMON]),
    ("`liger`", ["liger", COMMON]),
    ("`unsloth`", ["unsloth"]),
    ("`axolotl_liger`", ["axolotl_liger", COMMON]),
    ("`lora_kernels` (ours)", [OURS, COMMON]),
    ("`lora_kernels`, captured", [OURS, COMMON, "cuda_graph"]),
)
PLACES: tuple[Place, ...] = (
    ("8B, 4 × 2048", "h200/peers", "llama-3.1-8b", "4x2048"),
    ("8B, 1 × 8192", "h200/peers", "llama-3.1-8b", "1x8192"),
    ("8B in NF4, 4 × 2048", "h200/qlora", "llama-3.1-8b", "4x2048"),
    ("1.7B, 4 × 2048", "h200/peers", "smollm2-1.7b", "4x2048"),
    ("135M, 4 × 2048", "h200/peers", "smollm2-135m", "4x2048"),
    ("8B, 1 × 512", "h200/peers", "llama-3.1-8b", "1x512"),
    ("1.7B, 1 × 512", "h200/peers", "smollm2-1.7b", "1x512"),
    ("135M, 1 × 512", "h200/peers", "smollm2-135m", "1x512"),
)
# Ours against the best peer: results folder, model, workload.
DUELS = (
    ("h200/peers_rounds_8b", "llama-3.1-8b", "4x2048"),
    ("h200/peers", "llama-3.1-8b", "1x8192"),
    ("h200/qlora", "llama-3.1-8b", "4x2048"),
    ("h200/peers", "smollm2-1.7b", "4x2048"),
    ("h200/peers", "smollm2-135m", "4x2048"),
    ("h200/peers_rounds", "smollm2-135m", "1x512"),
)


class Results:
    """All folders of results/ that hold records, by their place below it."""

    def __init__(self, folder: Path = ROOT / "results") -> None:
        self.place = folder
        places = sorted(path.parent for path in folder.rglob("records.jsonl"))
        self.folders = {place.relative_to(folder).as_posix(): Analysis.read(place) for place in places}

    @cached_property
    def on_gpu(self) -> dict[str, Analysis]:
        """Those to which published numbers are held: all of them are of GPUs. The one measured last comes first."""
        found = [(name, analysis) for name, analysis in self.folders.items() if not name.startswith("cpu/")]
        return dict(sorted(found, key=lambda item: max(s["id"] for s in item[1].sessions), reverse=True))

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
    """What stands beside a claim: the number, by which toggles it was measured, against what, and in which folder."""

    value: str
    toggles: str
    baseline: str
    folders: list[str]


# -- published against measured ---------------------------------------------------------------------------------------


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
    baseline = f"another: {differs}" if differs else "the same"
    toggles = " + ".join(f"`{t}`" for t in rows[0].record.ablations)
    toggles += f", in place of `{rows[0].stands_for}`" if rows[0].stands_for else ""
    toggles = "the baseline's own" if claim.of_reference else toggles
    return Measured(_together(claim, pairs), toggles, baseline, [list(results.on_gpu)[place] for place in places])


def _of_steps(steps: Sequence[Step]) -> Measured:
    first = steps[0]
    several = [(step.brings.centre, step.clear) for step in steps]
    value = f"{first.said} ×" if len(steps) == 1 else _several(several, "×", "data sets")
    how = ", unpaired" if any(step.unpaired for step in steps) and len(steps) > 1 else ""
    toggle, folders = f"`{first.toggle}`, as a step of the ladder", list(dict.fromkeys(s.folder for s in steps))
    return Measured(value + how, toggle, "the same", folders)


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


def _together(claim: Claim, pairs: Sequence[tuple[Match, Analysis]]) -> str:
    m, analysis = pairs[0]
    if claim.over:
        (row,) = claims_frame([own for own, _ in pairs], analysis).to_dict("records")
        return f"{ours(row)} ×, {row['model']}"
    values = [(_value(*pair), _is_clear(*pair)) for pair in pairs]
    unit = "×" if claim.is_ratio else claim.unit
    if len(values) > 1:
        return _several([(value[0], is_clear) for value, is_clear in values], unit, "cells")
    ((value, is_clear),) = values
    if unit != "×":
        return f"{number(value[0])} {unit}"
    return f"{ratio(*value) if is_clear else interval(*value[1:], str(judged(m, value, analysis)))} {unit}"


def _is_clear(m: Match, analysis: Analysis) -> bool:
    """Of a ratio of times; what is no such ratio has no verdict."""
    of_times = m.claim.of_phase == TOTAL if m.claim.ratio_to else m.claim.quantity not in FIT
    return not (m.claim.is_ratio and of_times) or not without_figure(judged(m, _value(m, analysis), analysis))


def standing(claim: Claim, results: Results) -> list[str]:
    """What was measured, against which baseline, where; or why nothing was. Three cells of Markdown."""
    if claim.same_as:
        return [f"says the same as {claim.same_as}", "", ""]
    if claim.counted:
        said, where = bubble_tables.beside(claim.counted, claim.unit, results.place)
        return [md(said), "the same", where]
    if claim.is_one:
        return [BY_DEFINITION, "", ""]
    found = [] if claim.open else [one for form in claim.forms or "*" if (one := beside(claim, results, form))]
    if not found:
        why, where = f"open: {md(claim.open or 'no published results measure it')}", ""
        if claim.simulated:
            said, where = bubble_tables.beside(claim.simulated, claim.unit, results.place)
            why = f"simulated, not measured: {md(said)}; {why}"
        return [why, "", where]
    rows = [(f"{one.value} ({one.toggles})", md(one.baseline), _link(*one.folders)) for one in found]
    return ["; ".join(dict.fromkeys(column)) for column in zip(*rows, strict=True)]


def _link(folder: str, *more: str) -> str:
    gpu, _, name = folder.rpartition("/")
    where = name if gpu == "h200" else f"{name}, {gpu.upper()}"  # all pages say that an H200 is meant elsewhere
    where += f" and {len(more)} more" if more else ""
    return f"[{where}](RESULTS/{folder}/summary.md)"


def some_claims(results: Results) -> str:
    """README's table."""
    heads = ["published", "what", "measured here", "baseline", "in"]
    every = {(s.id, c.id): (s, c) for s in load_claims() for c in s.claims}
    shown = [every[key] for key in SHOWN]
    rows = [[f"{s.name}: **{claim_words.printed(c)}**", claim_words.what(c), *standing(c, results)] for s, c in shown]
    return md_table(heads, rows).replace("RESULTS/", "results/")


def every_claim(results: Results) -> str:
    """docs/claims.md's tables, one a source."""
    return "\n\n".join(_of_source(source, results) for source in load_claims()).replace("RESULTS/", "../results/")


def _of_source(source: Source, results: Results) -> str:
    heads = ["id", "in the source's words", "number", "what", "measured here", "baseline", "in"]
    rows = [
        [c.id, f"“{md(c.wording)}”", claim_words.printed(c), claim_words.what(c), *standing(c, results)]
        for c in source.claims
    ]
    said = f"{sum(len(c.printed) for c in source.claims)} numbers. Hardware: {source.hardware}. {source.protocol}."
    notes = "\n".join(f"- {md(caveat)}" for caveat in source.caveats)
    parts = [f"## {md(source.title)} ({md(source.publisher)})", md(said), notes]
    return "\n\n".join([*parts, md_table(heads, rows)] if rows else parts)


# -- ours against the best peer ---------------------------------------------------------------------------------------


def duels(results: Results) -> str:
    """README's table: our fastest row of each model and workload against the fastest of anybody else."""
    heads = ["model, batch × length", "best peer", "ours", "ms, peer → ours", "faster by [95 %]", "interval is of"]
    heads += ["GiB, peer → ours", "of the limit, peer → ours"]
    return md_table(heads, [_duel(results.folders[folder], folder, *at) for folder, *at in DUELS])


def _duel(analysis: Analysis, folder: str, model: str, workload: str) -> list[str]:
    here = _rows(analysis, model, workload)
    mine, others = ([r for r in here if (OURS in r.ablations) == own] for own in (True, False))
    ours, peer = (fastest(some, analysis)[0] for some in (mine, others))
    found = analysis.contrasts.beside(ours, peer)
    assert found is not None
    faster = f"**{ratio(*found.contrast.speedup)} ×**" + ("" if found.paired else " unpaired")
    base = " in NF4" if "nf4_base" in ours.reference else ""
    where = f"[{model}{base}, {workload.replace('x', ' × ')}](results/{folder}/summary.md)"
    rows = [analysis.row(r) for r in (peer, ours)]
    both = lambda column, show: " → ".join(show(row.get(column, math.nan)) for row in rows)  # noqa: E731
    took, held = both("total_candidate_ms", number), both("candidate_peak_gib", number)
    return [where, _name(peer), _name(ours), took, faster, _sessions(rows), held, both("of_limit", share)]


def _sessions(rows: Sequence[Row]) -> str:
    """Of how many sessions the rows are; tables of before `repeat=` do not say, and have one."""
    fewest = min(int(row.get("sessions", 1)) or 1 for row in rows)
    return ONE if fewest == 1 else f"{fewest} sessions"


def _rows(analysis: Analysis, model: str, workload: str) -> list[Record]:
    """The candidates that were measured there."""
    return [
        r for r in analysis.records
        if (r.model, r.workload, r.status) == (model, workload, "ok") and r.is_candidate and not r.is_noise_floor
    ]  # fmt: skip


def _name(record: Record) -> str:
    """A stack by its toggles; PEFT where it is PEFT's own."""
    named = [t for t in record.ablations if t not in (COMMON, "cuda_graph")]
    name = " + ".join(f"`{t}`" for t in named) or "PEFT"
    return f"{name}, captured" if "cuda_graph" in record.ablations else name


def share(value: float) -> str:
    """A share in whole per cent, rounded once, from the record's own figure; – for what has none."""
    return f"{100 * value:.0f} %" if math.isfinite(value) else "–"


# -- every toggle, every stack ----------------------------------------------------------------------------------------


def stacks(results: Results) -> str:
    """The table of all stacks: speed-up over PEFT as it comes, and the share of the limit. The fastest, and what is
    level with it, is bold where PEFT does not wait for its host; where it does, milliseconds stand beside the ratio."""
    columns, shown = [], []
    for _, folder, *at in PLACES:
        analysis = results.folders[folder]
        by_toggles = {frozenset(r.ablations): r for r in _rows(analysis, *at)}
        records = [by_toggles.get(frozenset(toggles)) for _, toggles in STACKS]
        best = fastest([r for r in records if r], analysis)
        waits = _waits(analysis, *at)
        columns.append([_stack(analysis.row(r), r in best, waits) if r else "–" for r in records])
        shown += [analysis.row(r) for r in records if r]
    heads = ["stack", *(_starred(results, place) for place in PLACES)]
    rows = [[name, *cells] for (name, _), cells in zip(STACKS, zip(*columns, strict=True), strict=True)]
    return "\n\n".join([md_table(heads, rows), _hosts(results, PLACES), *_marks(shown)])


def _stack(row: Row, best: bool, waits: bool) -> str:
    reached, ms = row.get("of_limit", math.nan), row["total_candidate_ms"]
    said = row["verdict"] if without_figure(row["verdict"]) else number(row["total_speedup"])
    said += f", {number(ms)} ms" if waits else ""
    said += f" ({share(reached)})" if math.isfinite(reached) else ""
    return (f"**{said}**" if best and not waits else said) + _dirty(row)


def _dirty(row: Row) -> str:
    return f" {DIRTY}" if row.get("dirty") is True else ""


def _marks(rows: Sequence[Row]) -> Iterator[str]:
    """What a table's intervals and marks mean, of the rows that it shows."""
    if any(_dirty(row) for row in rows):
        yield f"{DIRTY} The checkout had uncommitted changes, so the commit does not say all of what ran."
    if _sessions(rows) == ONE:
        yield "Every figure of this table is of one session: what differs between two sessions is in no interval."


def _waits(analysis: Analysis, model: str, workload: str) -> bool:
    """Whether PEFT itself waits for its host there."""
    labels = [analysis.row(r)["reference_bound"] for r in _rows(analysis, model, workload)]
    return labels.count("host-bound") > len(labels) / 2


def _starred(results: Results, place: Place) -> str:
    name, folder, *at = place
    return f"{name} \\*" if _waits(results.folders[folder], *at) else name


def _hosts(results: Results, places: Sequence[Place]) -> str:
    """The note of the columns with a star: how long PEFT itself took, from the fastest host to the slowest."""
    said = []
    for name, folder, *at in places:
        analysis = results.folders[folder]
        if _waits(analysis, *at):
            there = [r for r in analysis.records if [r.model, r.workload] == at and r.is_candidate]
            took = [ms for r in there if math.isfinite(ms := analysis.row(r)["total_reference_ms"])]
            said.append(f"{name}: {number(min(took))} to {number(max(took))} ms")
    return (
        "\\* PEFT waits for its host here, and the host was not always the same. A step of PEFT took, from cell to "
        f"cell, {'; '.join(said)}. Two rows of such a column compare only if they are of one session."
    )


def toggles_alone(results: Results) -> str:
    """The table of every toggle alone: speed-up with its interval, or why there is none."""
    folder = "h200/first_sweep"
    analysis = results.folders[folder]
    order = [r.ablations for r in analysis.ordered(analysis.groups[0])]
    places: list[Place] = [(_title(g), folder, g.records[0].model, g.records[0].workload) for g in analysis.groups]
    rows, shown = [], list[Row]()
    for toggles in order:
        own = {_title(g): analysis.row(r) for g in analysis.groups for r in g.records if r.ablations == toggles}
        name = " + ".join(f"`{t}`" for t in toggles) or "reference again (A/A)"
        rows.append([name, *(_alone(own.get(title)) for title, *_ in places)])
        shown += own.values()
    heads = ["toggle", *(_starred(results, place) for place in places)]
    return "\n\n".join([md_table(heads, rows), _hosts(results, places), *_marks(shown)])


def _title(group: Group) -> str:
    return group.title.replace(" @ ", ", ").replace("x", " × ")


def _alone(row: Row | None) -> str:
    if row is None:
        return "–"
    centre, low, high = (row[f"total_{x}"] for x in ("speedup", "low", "high"))
    if not math.isfinite(centre):
        return str(row["status"]) + _dirty(row)
    shown = row["verdict"] if without_figure(row["verdict"]) else f"{centre:.2f}"
    return f"{shown} [{low:.2f}, {high:.2f}]" + _dirty(row)


# -- a suite on a page of its own -------------------------------------------------------------------------------------


def of_suite(name: str) -> Callable[[Results], str]:
    """Tables of the published folder of that name, an H200's if no GPU is named; or the sentence that there is none."""

    def made(results: Results) -> str:
        analysis = next(filter(None, map(results.folders.get, (f"h200/{name}", f"h100/{name}", name))), None)
        return _not_measured(name) if analysis is None else "\n\n".join(_of_groups(analysis, SUITES[name]))

    return made


def _of_groups(analysis: Analysis, columns: Sequence[str]) -> Iterator[str]:
    for group in show(analysis).groups:
        shown = [c for c in (cells.TOGGLE, *columns, cells.VERDICT) if c in group.columns]
        yield f"**{md(group.title)}**\n\n{_markdown(('', shown, [[row[c] for c in shown] for row in group.rows]))}"


def _not_measured(name: str) -> str:
    return f"*Not measured yet*: `python -m lorabench.sweep suite={name} output=results/h200/{name}` would measure it."


# -- Predibase's ladder -----------------------------------------------------------------------------------------------

LADDER = "predibase_ladder"  # the suite
LADDERS = tuple(f"{LADDER}_{one}" for one in ("glue", "drop", "viggo", "gsm8k", "magicoder"))  # its folders


def of_ladder(make: Callable[..., str], other: str = "") -> Callable[[Results], str]:
    """What is made of those of the ladder's folders, or of the `other` suite's, that are there; else that none is."""

    def made(results: Results) -> str:
        found = [own for name in ([other] if other else LADDERS) if (own := results.folders.get(f"h200/{name}"))]
        return (make(*found) if found else "") or _not_measured(other or LADDER)

    return made


def _markdown(table: AnyTable) -> str:
    _, headings, rows = table
    return md_table(list(map(md, headings)), [list(map(md, row)) for row in rows]) if rows else ""


def _split(*analyses: Analysis) -> str:
    """Interactions and Shapley values, by model @ workload."""
    return "\n\n".join(
        f"{md(group.title)}: {md(table[0])}\n\n{_markdown(table)}"
        for analysis in analyses
        for group in analysis.groups
        for table in attribution_tables(group.records, analysis)
        if table[0].startswith((SHAPLEY, "Interaction"))
    )


def machines(results: Results) -> str:
    """The same references on the GPU and on a CPU: all folders of results/h200 that results/cpu has too."""
    pairs = [(f"h200/{name[4:]}", name) for name in results.folders if name.startswith("cpu/")]
    rows = [
        [row.title, row.reference, number(row.before_ms), number(row.after_ms), number(row.after_ms / row.before_ms)]
        for gpu, cpu in pairs if gpu in results.folders
        for row in hardware(results.folders[gpu], results.folders[cpu])
    ]  # fmt: skip
    headings = ["model @ workload", "reference", "NVIDIA H200, ms", "CPU, ms", "CPU / GPU"]
    return _markdown(("", headings, rows)) or "*Not measured yet*: results/ has no folder of a second machine."


def of_bubbles(column: str, figure: str, most: bool) -> Callable[[Results], str]:
    return lambda results: md_table(*bubble_tables.of(results.place, column, figure, most))


# -- into the files ---------------------------------------------------------------------------------------------------


TABLES: dict[str, Callable[[Results], str]] = {
    "some claims": some_claims,
    "best peer": duels,
    "stacks": stacks,
    "toggles alone": toggles_alone,
    "every claim": every_claim,
    "ladder, start to end": of_ladder(lambda *found: _markdown(start_to_end(*found))),
    "ladder, steps": of_ladder(lambda *found: _markdown(steps_table(*found))),
    "ladder, split": of_ladder(_split, "predibase_factorial"),
    "ladder, today": of_ladder(lambda *found: "\n".join(f"- {said}" for said in conclusions(*found))),
    "two machines": machines,
    **{name: of_bubbles(*shown) for name, shown in bubble_tables.SHOWN.items()},
    "longest sample": lambda results: md_table(*longest_table.of(results.place)),
    "pipeline bubbles": lambda results: md_table(*bubble_tables.of_sleepers(results.place)),
    **{f"suite {name}": of_suite(name) for name in SUITES},
}


def filled(text: str, results: Results) -> str:
    """The text with every table that it has markers for."""
    for name, make in TABLES.items():
        if f"<!-- /{name} -->" in text:
            text = markers.filled(text, name, make(results))
    return text


FILES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", nargs="*", type=Path, help="files with markers, beside those of this project")
    results = Results()
    for file in (*FILES, *parser.parse_args(arguments).file):
        text = file.read_text(encoding="utf-8")
        if (made := filled(text, results)) != text:
            file.write_text(made, encoding="utf-8")
            print(f"written: {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
