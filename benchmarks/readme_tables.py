"""The tables of README.md and of the pages under docs/, from what lies in results/.

    python benchmarks/readme_tables.py              # write them anew
    python benchmarks/readme_tables.py FILE         # also those of another file with the same markers

A table stands between `<!-- NAME -->` and `<!-- /NAME -->`; what is outside of markers is nobody's but the author's.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lorabench.compare import hardware
from lorabench.record.schema import Record
from lorabench.record.stats import without_figure
from lorabench.report import cells
from lorabench.report.analysis import Analysis, Row
from lorabench.report.answers import fastest
from lorabench.report.attribution_tables import SHAPLEY, AnyTable, attribution_tables
from lorabench.report.claims import BY_DEFINITION, Claim, Source, load_claims
from lorabench.report.groups import Group
from lorabench.report.ladder_summary import conclusions, start_to_end, steps_table
from lorabench.report.shown import show
from lorabench.report.standings import LADDERS, ONE, OPEN, REPEATED, SAME, Results, in_all, standing, totals
from lorabench.report.tables import md, md_table
from lorabench.report.words import number, ratio

sys.path.insert(0, str(Path(__file__).parent))
import bubble_tables
import claim_words
import longest_table
import markers
from suite_columns import SUITES

ROOT = Path(__file__).resolve().parents[1]
OURS = "lora_kernels"
DIRTY = "†"
ONE_SESSION = "one session"
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
# Ours against the best peer: results folder, model, workload. The 1.7B twice: in the newer folder a slow host holds up
# every peer that is not captured, so that alone it would show ours too well.
DUELS = (
    ("h200/peers_rounds_8b", "llama-3.1-8b", "4x2048"),
    ("h200/peers_rounds_8b_8192", "llama-3.1-8b", "1x8192"),
    ("h200/qlora", "llama-3.1-8b", "4x2048"),
    ("h200/peers_rounds_1_7b", "smollm2-1.7b", "4x2048"),
    ("h200/peers", "smollm2-1.7b", "4x2048"),
    ("h200/peers", "smollm2-135m", "4x2048"),
    ("h200/peers_rounds", "smollm2-135m", "1x512"),
)


# -- published against measured ---------------------------------------------------------------------------------------


def answer(claim: Claim, results: Results) -> list[str]:
    """What was measured, against which baseline, where; or why nothing was. Three cells of Markdown."""
    how, found = standing(claim, results)
    if how == REPEATED:
        return [f"says the same as {claim.same_as}", "", ""]
    if claim.counted:
        said, where = bubble_tables.beside(claim.counted, claim.unit, results.place)
        return [md(said), SAME, where]
    if how == ONE:
        return [BY_DEFINITION, "", ""]
    if how == OPEN:
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
    rows = [[f"{s.name}: **{claim_words.printed(c)}**", claim_words.what(c), *answer(c, results)] for s, c in shown]
    return "\n\n".join([md_table(heads, rows), in_all(totals(results))]).replace("RESULTS/", "results/")


def claims_counted(results: Results) -> str:
    """docs/claims.md's table of totals."""
    counted = totals(results)
    return md_table([*counted], [list(map(str, row)) for row in counted.itertuples(index=False)])


def every_claim(results: Results) -> str:
    """docs/claims.md's tables, one a source."""
    return "\n\n".join(_of_source(source, results) for source in load_claims()).replace("RESULTS/", "../results/")


def _of_source(source: Source, results: Results) -> str:
    heads = ["id", "in the source's words", "number", "what", "measured here", "baseline", "in"]
    rows = [
        [c.id, f"“{md(c.wording)}”", claim_words.printed(c), claim_words.what(c), *answer(c, results)]
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
    return ONE_SESSION if fewest == 1 else f"{fewest} sessions"


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
    if _sessions(rows) == ONE_SESSION:
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
    "claims counted": claims_counted,
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
    results = Results(ROOT / "results")
    for file in (*FILES, *parser.parse_args(arguments).file):
        text = file.read_text(encoding="utf-8")
        if (made := filled(text, results)) != text:
            file.write_text(made, encoding="utf-8")
            print(f"written: {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
