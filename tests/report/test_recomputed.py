"""The numbers that are printed, computed once more from the lines of records.jsonl, with none of the report's own code.

Of results/*/summary.md every row, of README.md every table. A printed number may differ from the recomputed one by half
a unit of its last digit; a ratio also by what the rounding of the times in a line can make of it.
"""

import json
import math
import re
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers import benchmark

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
FOLDERS = sorted(path.parent for path in RESULTS.rglob("records.jsonl"))
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
GIB = 2**30
LAST = 5e-5  # ms: half a unit of the last digit of a time in a line. The ratio in a line was made before rounding.


# -- from the lines of records.jsonl ----------------------------------------------------------------------------------


@cache
def lines(folder):
    """Every line, with the lines of its cell that were measured under `sessions`: several make one row."""
    found = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    found = [pair for line in found for pair in pairs(line, found)]
    for line in found:
        line["sessions"] = [x for x in found if x["key"] == line["key"] and x["status"] == "ok"] or [line]
    return found


def pairs(line, found):
    """A line of two arms as it is; of one arm (schema 3) its pairs, over the turns that both had in one process. Beside
    an arm that sat alone stands the reference again where that sat alone, round by round; and this one itself, where it
    sat alone, is held against the reference as well. Two arms that were never in one round are no pairs of turns, and
    there, too, the reference again stands where it sat alone."""
    if line["schema"] != 3:
        return [line]
    family = [x for x in found if (x.get("family"), x["session"]) == (line["family"], line["session"])]
    made = []
    for shown in line["shown"]:
        there = (x for x in family if x["role"] != "twin" and set(x["toggles"]) == set(shown["against"]))
        if (base := next(there, None)) is None:
            continue  # the time was up before what it is held against had its turn
        both, own = {"reference": base, "candidate": line}, dict(shown)
        own |= {
            k: line[k] for k in ("model", "workload", "kind", "session", "status", "reason", "numerics") if k in line
        }
        own |= {"reference": shown["against"], "candidate": line["toggles"], "schema": 3}
        for field in ("memory", "energy", "roofline"):
            own[field] = {arm: x[field] for arm, x in both.items() if field in x}
        if "tokens" in line:
            own["tokens"] = {"real": line["tokens"]["real"], "trained": line["tokens"]["trained"]}
            own["tokens"] |= {f"{arm}_padded": x["tokens"]["padded"] for arm, x in both.items() if "tokens" in x}
        if base["status"] != "ok":
            own |= {"status": base["status"], "reason": base["reason"]}
        if own["status"] != "ok":
            made.append(own)
            continue
        if together(base, line):
            made.append(timed(own, base, line, together(base, line)))
        elif beside(family, base, line) is None:
            made.append(apart(own, alone(family, base) or base, line))
        elif line["role"] != "twin":  # which never sat beside the reference: it has the row between processes alone
            made.append(timed(own, *beside(family, base, line)))
        if line["role"] == "twin" and (lone := outside(line, base)):
            between = own | {"key": f"{own['key']} between processes"}
            turns = by_round(base, lone)  # none where each had a block of its own
            made.append(timed(between, base, lone, turns) if turns else apart(between, base, lone))
    return made


def together(a, b):
    """(place in a, place in b, process) of each turn that two arms had in one process."""
    first, second = ({turn: n for n, turn in enumerate(zip(x["rounds"], x["seats"], strict=True))} for x in (a, b))
    return [(first[turn], second[turn], 0) for turn in sorted(first.keys() & second.keys())]


def by_round(a, b):
    """The same of two arms that sat apart, by the process in which b sat."""
    first, second = ({number: n for n, number in enumerate(x["rounds"])} for x in (a, b))
    found = [(first[number], second[number], b["seats"][second[number]]) for number in first.keys() & second.keys()]
    return sorted(found, key=lambda turn: (turn[2], turn[1]))


def outside(arm, other):
    """The arm with its turns in processes in which the other never sat; None where it had none."""
    kept = [n for n, seat in enumerate(arm["seats"]) if seat not in other["seats"]]
    if not kept:
        return None
    phases = {p: [ms[n] for n in kept] for p, ms in arm["phases"].items()}
    return arm | {k: [arm[k][n] for n in kept] for k in ("rounds", "seats")} | {"phases": phases}


def beside(family, base, line):
    """Of an arm that sat alone: the reference where that did, the arm, and the turns of rounds that both have. None
    where the reference never had a round of the arm's."""
    lone = alone(family, base)
    turns = lone and by_round(lone, line)
    return (lone, line, turns) if turns else None


def alone(family, base):
    """The reference where that sat alone, None where it never did; any other arm as it is."""
    twin = next(x for x in family if x["role"] == "twin")
    return outside(twin, base) if set(twin["toggles"]) == set(base["toggles"]) else base


def timed(own, base, line, turns):
    """The pair with the times of these turns."""
    several = len({process for *_, process in turns}) > 1
    made = own | {"pairing": "turns" if several else "paired"}
    made["raw"] = base if line["role"] == "twin" else line  # what is shown of the limit's share is the reference's
    made["turns_of"] = [process for *_, process in turns]
    return made | {"phases": of_turns((base, line), [[turn[place] for turn in turns] for place in (0, 1)])}


def apart(own, base, line):
    """The pair of two arms with all their turns, by the processes in which each sat."""
    both = base, line
    order = [sorted(range(len(x["seats"])), key=x["seats"].__getitem__) for x in both]
    sizes = [[x["seats"].count(seat) for seat in sorted(set(x["seats"]))] for x in both]
    made = own | {"pairing": "abba", "processes": dict(zip(("reference", "candidate"), sizes, strict=True))}
    return made | {"raw": line, "phases": of_turns(both, order)}


def of_turns(both, order):
    """The phases and their total of two arms, at these places of each."""
    named = list(zip(("reference_ms", "candidate_ms"), both, order, strict=True))
    phases = {
        phase: {arm: [x["phases"][phase][n] if phase in x["phases"] else 0.0 for n in own] for arm, x, own in named}
        for phase in {**both[1]["phases"], **both[0]["phases"]}
    }
    total = {arm: [float(sum(ms)) for ms in zip(*(p[arm] for p in phases.values()), strict=True)] for arm, *_ in named}
    return phases | {"total": total}


def is_limit(line):
    return bool(line.get("limit")) or line.get("kind") == "limit"


def is_named(line, name):
    own = " + ".join(line["ablations"])
    return name == own if own else name.startswith("reference again (A/A")


def phases_of(line):
    return [p for p in line["phases"] if p != "total" and not (is_limit(line) and p == "step")]


def trials(line, arm, phases=None):
    """ms, trial by trial: of these phases together, or of the whole; None where the arm was not timed. The whole is as
    the line has it, but for a limit's, to which older lines add the reference's step."""
    wanted = phases or (phases_of(line) if is_limit(line) else ["total"])
    found = [line.get("phases", {}).get(p, {}).get(f"{arm}_ms") for p in wanted]
    return np.sum(found, axis=0) if all(found) else None


def unpaired(a, b, processes=None):
    """The ratio of two lists that are no pairs, by each of its fair centres: the median of all differences of the
    logarithms; the difference of the lists' own centres; the same of their processes, which are their halves where the
    line does not say how many trials each made."""
    a, b = np.log(a), np.log(b)
    sizes = processes or {}

    def by_process(logs, arm):
        parts = np.split(logs, np.cumsum(sizes[arm])[:-1]) if arm in sizes else np.array_split(logs, 2)
        return np.mean([middle(part) for part in parts])

    apart = by_process(a, "reference") - by_process(b, "candidate")
    return np.exp([np.median(np.subtract.outer(a, b)), middle(a) - middle(b), apart])


def of_processes(logs, process):
    """The mean of the processes' centres."""
    parts = [logs[np.array(process) == one] for one in sorted(set(process))]
    return np.repeat(np.exp(np.mean([middle(part) for part in parts])), 3)


def middle(logs):
    """Hodges–Lehmann's centre: the median of the means of two."""
    i, j = np.triu_indices(logs.size)
    return np.median((logs[i] + logs[j]) / 2)


def speedup(line, phases=None):
    """By each centre that may be printed; of several sessions their geometric mean."""
    return np.exp(np.mean([np.log(of_session(x, phases)) for x in line["sessions"]], axis=0))


def of_session(line, phases=None):
    """The centres are one where the rounds are pairs."""
    before, after = (trials(line, arm, phases) for arm in ("reference", "candidate"))
    if line.get("pairing") == "abba":
        return unpaired(before, after, line.get("processes"))
    if line.get("pairing") == "turns" and "turns_of" in line:
        return of_processes(np.log(before / after), line["turns_of"])
    return np.repeat(np.exp(middle(np.log(before / after))), 3)


def rounding(line, phases=None):
    """How far the ratio of a line may be from the one that its rounded times make, at most."""
    medians = [np.median(trials(line, arm, phases)) for arm in ("reference", "candidate")]
    return speedup(line, phases)[0] * sum(len(phases or phases_of(line)) * LAST / ms for ms in medians)


def share(folder, line, phases, paired):
    """The limit's time over the row's, by each centre."""
    place = lambda x: (x["model"], x["workload"], sorted(x["reference"]))  # noqa: E731
    *_, least = [x for x in lines(folder) if is_limit(x) and x["status"] == "ok" and place(x) == place(line)]
    if (held := held_together(least, line, phases)) is not None:
        return held
    if paired:
        return speedup(line, phases) / speedup(least, phases)
    return unpaired(trials(least, "candidate", phases), trials(line, "candidate", phases))


def held_together(first, second, phases):
    """The first's time over the second's, by each centre, over the rounds that both had; None where they had none: they
    are of two families, or of two blocks of one."""
    if "raw" not in first or "raw" not in second or first["raw"]["family"] != second["raw"]["family"]:
        return None
    arms = a, b = first["raw"], second["raw"]
    if turns := together(*arms):
        processes = ["one"] * len(turns)
    elif turns := by_round(*arms):
        processes = [f"{a['seats'][i]} beside {b['seats'][j]}" for i, j, _ in turns]  # either may sit alone
    else:
        return None
    before, after = (
        np.sum([arm["phases"][p] for p in phases], axis=0)[[turn[n] for turn in turns]] for n, arm in enumerate(arms)
    )
    return of_processes(np.log(before / after), processes)


def median(line, arm, phases=None):
    """ms of the whole or of these phases, over sessions that of their medians; None where the arm was not timed."""
    found = [trials(x, arm, phases) for x in line["sessions"]]
    return None if any(ms is None for ms in found) else float(np.median([np.median(ms) for ms in found]))


def peaks(line):
    return [line["sessions"][-1]["memory"].get(arm, {}).get("peak") for arm in ("reference", "candidate")]


# -- as they are printed ----------------------------------------------------------------------------------------------


def tables(text):
    """(heading above, rows as {column: cell}) of every Markdown table."""
    title, found, head = "", [], None
    for line in [*text.splitlines(), ""]:
        if line.startswith("#"):
            title = plain(line.lstrip("# "))
        if not line.startswith("|"):
            head = None
            continue
        cells = [plain(cell.strip()) for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if head is None:
            head = cells
            found.append((title, []))
        elif set("".join(cells)) - set("-: "):
            found[-1][1].append(dict(zip(head, cells, strict=True)))
    return found


def plain(text):
    return text.replace("\\", "").replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")


def agrees(printed, value, slack=0.0):
    """Whether a number as text is this value, rounded once to as many digits."""
    digits = len(printed.partition(".")[2])
    return abs(float(printed) - value) <= 0.5 * 10**-digits * (1 + 1e-9) + slack + 1e-12


def all_agree(cell, values, slack=0.0):
    """Whether a cell's numbers, an interval's apart, are these in their order; what is unknown is not printed."""
    shown = NUMBER.findall(re.sub(r"\[.*?\]", "", cell))
    values = [v for v in values if v is not None]
    return len(shown) == len(values) and all(agrees(*pair, slack) for pair in zip(shown, values, strict=True))


def half_a_digit(number):
    """Of the last one that is shown, by which a bound was rounded."""
    return 0.5 * 10.0 ** -len(number.partition(".")[2])


def is_ratio(cell, centres, slack=0.0):
    """Whether a ratio with its interval is one of these, within the interval; or the interval alone about one."""
    interval = re.search(r"\[(.*?), (.*?)\]", cell)
    shown = NUMBER.findall(re.sub(r"\[.*?\]", "", cell))
    if not shown:
        ends = interval and [
            float(interval[1]) - half_a_digit(interval[1]),
            float(interval[2]) + half_a_digit(interval[2]),
        ]
        return bool(ends) and any(ends[0] <= c <= ends[1] for c in centres)
    there = interval is None or float(interval[1]) <= float(shown[0]) <= float(interval[2])
    return there and any(all_agree(cell, [c], slack) for c in centres)


def checks(folder, line, row):
    """(column, whether its numbers are those of the record) for every column that is known here and holds any."""
    medians = [median(line, arm) for arm in ("reference", "candidate")]
    for column, cell in row.items():
        if not NUMBER.search(cell):
            continue
        if column == "median ms, ref → cand":
            yield column, all_agree(cell, medians)
        elif column.startswith("total ×") and "(range)" in cell:  # the sessions' references were too far apart
            ratios = [of_session(x) for x in line["sessions"]]
            yield column, any(all_agree(cell, ends) for ends in zip(np.min(ratios, 0), np.max(ratios, 0), strict=True))
        elif column.startswith("total ×"):
            yield column, is_ratio(cell, speedup(line), rounding(line))
        elif cell.startswith("candidate only, "):  # a phase that the reference does not have
            yield column, all_agree(cell, [median(line, "candidate", [column[:-2]])])
        elif column.endswith(" ×") and column[:-2] in phases_of(line):
            phases = [column[:-2]]
            yield column, is_ratio(cell, speedup(line, phases), rounding(line, phases))
        elif column.startswith("of limit [95 %], "):
            phases, unpaired = column.split(", ")[1].split(" + "), "unpaired" in cell
            slack = 2 * rounding(line, phases)  # a share of 1 at most, and the limit's own
            yield column, is_ratio(cell, share(folder, line, phases, not unpaired), slack)
        elif column == "peak GiB, ref → cand":
            before, after = peaks(line)
            saved = None if None in (before, after) else 100 * (after / before - 1)
            yield column, all_agree(cell.replace("+", ""), [p and p / GIB for p in (before, after)] + [saved])
        elif column == "real tokens/s, ref → cand":
            yield column, all_agree(cell, [ms and 1000 * line["tokens"]["real"] / ms for ms in medians])
        elif column == "padding, ref → cand":
            tokens = line["tokens"]
            padded = [tokens[f"{arm}_padded"] for arm in ("reference", "candidate")]
            yield column, all_agree(cell, [100 * p / (tokens["real"] + p) for p in padded])


def groups(folder):
    """The tables of summary.md whose rows are cells: (model, workload, rows)."""
    for title, rows in tables((folder / "summary.md").read_text()):
        if rows and "toggle" in rows[0] and "verdict" in rows[0]:
            place, _, workload = title.partition(" @ ")
            yield place, re.split(r", (?![^(]*\))", workload)[0], rows


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_total_is_the_sum_of_its_phases_trial_by_trial(folder):
    for line in lines(folder):
        for arm in ("reference", "candidate"):
            if "phases" in line and not is_limit(line) and (whole := trials(line, arm)) is not None:
                phases = phases_of(line)
                assert trials(line, arm, phases) == pytest.approx(whole, abs=(len(phases) + 1) * LAST)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_number_of_a_summary_is_in_its_records(folder):
    counted, ok = 0, {x["key"]: x for x in lines(folder) if x["status"] == "ok"}
    for model, workload, rows in groups(folder):
        here = [x for x in lines(folder) if (x["model"], x["workload"]) == (model, workload)]
        for row in rows:
            timed = [x for x in here if is_named(x, row["toggle"]) and x["status"] in ("ok", "oom") and "phases" in x]
            found = [list(checks(folder, x, row)) for x in timed]
            # Several references: the row is of the one whose numbers it has.
            assert not found or any(all(ok for _, ok in own) for own in found), (model, workload, row, found)
            counted += max(map(len, found), default=0)
    assert counted >= 5 * sum(len(trials(x, "candidate")) >= 6 for x in ok.values())  # fewer rounds make no figure


# -- README -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def script():
    with benchmark("readme_tables") as module:
        yield module


@pytest.fixture(scope="module")
def readme():
    """Rows of the tables of README.md and docs/results.md by the heading above them."""
    return dict(tables("\n".join((ROOT / file).read_text() for file in ("README.md", "docs/results.md"))))


def record(folder, model, workload, ablations):
    here = [x for x in lines(RESULTS / folder) if (x["model"], x["workload"]) == (model, workload)]
    found = [x for x in here if set(x["ablations"]) == set(ablations) and x["status"] == "ok" and not is_limit(x)]
    return found[-1] if found else None


def summary(folder, line):
    table = pd.read_csv(RESULTS / folder / "summary.csv")
    return table[table.key == line["key"]].iloc[0]


def test_the_tables_of_readme_and_claims_are_those_that_the_script_makes(script):
    results, filled = script.Results(script.ROOT / "results"), set()
    for file in script.FILES:
        text = file.read_text()
        filled |= {name for name in script.TABLES if f"<!-- /{name} -->" in text}
        assert script.filled(text, results) == text, f"run: python benchmarks/readme_tables.py ({file.name})"
    assert filled == set(script.TABLES), "a table that stands on no page"


def test_a_suites_page_has_a_table_of_each_group_and_says_where_nothing_is_published(
    script, record, session, folder, tmp_path
):
    page = "".join(f"<!-- suite {name} -->\n<!-- /suite {name} -->\n" for name in ("checkpointing", "packing"))
    made = [record(["save_on_cpu"], speedup=0.5), record(["save_on_cpu"], speedup=0.25, workload="1x512")]
    folder(tmp_path / "h200/checkpointing", made, [session()])
    filled = script.filled(page, script.Results(tmp_path))
    assert filled.count("| save\\_on\\_cpu | ") == 2 and "0.25" in filled and "0.5" in filled
    assert filled.count("Not measured yet") == 1 and "suite=packing output=results/h200/packing" in filled


def test_a_claim_with_forms_has_a_value_of_each(script, record, session, folder, tmp_path):
    plain, wide = "prequantized_loading(threads=1, pinned=False)", "prequantized_loading"
    of_loads = {"kind": "load", "workload": "warm_cache", "reference": ("quantize_at_load",)}
    claim = next(c for s in script.load_claims() for c in s.claims if c.id == "step-6-loading")
    for shown in ([plain], [plain, wide]):
        made = [record([form], speedup=2.0 + len(form), **of_loads) for form in shown]
        folder(tmp_path / "h200/loading", made, [session()])
        value, baseline, where = script.answer(claim, script.Results(tmp_path))
        assert re.findall(r"\(`(.*?)`\)", value) == shown and baseline == "the same", value
        assert where == "[loading](RESULTS/h200/loading/summary.md)"


STACK = re.compile(
    r"(?P<bold>\*\*)?(?P<said>unclear|[\d.]+)(?:, (?P<ms>[\d.]+) ms)?(?: (?P<reached>\(\d+ %\)))?"
    r"(?:\*\*)?(?P<dirty> †)?"
)


def test_every_number_of_readmes_stacks_is_in_its_records(script, readme):
    rows = readme["Stacks that a user could pick, and our own kernels"]
    for (_, ablations), row in zip(script.STACKS, rows, strict=True):
        for (_, *place), (head, cell) in zip(script.PLACES, list(row.items())[1:], strict=True):
            line = record(*place, ablations)
            if line is None:
                assert cell == "–"
                continue
            at, found, told = (place, ablations, cell), STACK.fullmatch(cell), summary(place[0], line)
            assert found, at
            assert (found["said"] == "unclear") == (told.verdict == "unclear"), at
            assert found["said"] == "unclear" or is_ratio(found["said"], speedup(line)), at
            assert bool(found["dirty"]) == (told.dirty in (True, "True")), at
            waits = head.endswith("*")
            assert bool(found["ms"]) == waits and not (waits and found["bold"]), at
            assert not waits or agrees(found["ms"], median(line, "candidate")), at
            of_limit = told.get("of_limit", math.nan)
            assert found["reached"] == (f"({100 * of_limit:.0f} %)" if math.isfinite(of_limit) else None), at
            if found["reached"]:
                paired = told["of_limit_paired"]
                own = share(RESULTS / place[0], line, ["forward", "backward"], paired in (True, "True"))
                assert is_ratio(found["reached"], 100 * own), (*at, own)


def test_every_number_of_readmes_toggles_is_in_its_records(readme):
    for row in readme["Every toggle alone"]:
        ablations = [t.strip("`") for t in row["toggle"].split(" + ") if t.startswith("`")]
        for head, cell in list(row.items())[1:]:
            model, workload = head.removesuffix(" *").replace(" × ", "x").split(", ")
            line = record("h200/first_sweep", model, workload, ablations)
            if line is None:
                assert not NUMBER.search(cell)
                continue
            told = summary("h200/first_sweep", line)
            assert cell.startswith("unclear ") == (told.verdict == "unclear"), (row, head, cell)
            assert cell.endswith(" †") == (told.dirty in (True, "True")), (row, head, cell)
            shown = cell.removesuffix(" †")
            if told.verdict == "unclear":
                low, high = map(float, re.findall(r"[\d.]+", shown))
                assert low <= speedup(line)[0] <= high
            else:
                assert is_ratio(shown, speedup(line), rounding(line)), (row, head, cell)


def test_every_number_of_readmes_best_peers_is_of_the_very_rows(script, readme):
    rows = readme["Ours against the best peer"]
    for (folder, model, workload), row in zip(script.DUELS, rows, strict=True):
        pair = [toggles_of(script, row[who]) for who in ("best peer", "ours")]
        both = [_with_common(script, folder, model, workload, toggles) for toggles in pair]
        printed = row["ms, peer → ours"].split(" → ")
        found = [
            next(x for x in own if agrees(ms, median(x, "candidate"))) for ms, own in zip(printed, both, strict=True)
        ]
        assert all_agree(row["GiB, peer → ours"], [peaks(x)[1] / GIB for x in found])
        faster = row["faster by [95 %]"].strip("*")
        paired = "unpaired" not in faster
        own = held_together(*found, phases_of(found[0]))
        if own is None:
            ways = speedup(found[1]) / speedup(found[0]), unpaired(*(trials(x, "candidate") for x in found))
            own = ways[0] if paired else ways[1]
        assert is_ratio(faster, own)
        peers, ours = (
            [x for x in _candidates(folder, model, workload) if (script.OURS in x["ablations"]) == own]
            for own in (False, True)
        )
        assert speedup(found[0])[0] == max(speedup(x)[0] for x in peers)
        assert median(found[1], "candidate") <= 1.02 * min(median(x, "candidate") for x in ours), "or level with it"


def toggles_of(script, name):
    stack, _, how = name.partition(", ")
    return {t.strip("`") for t in stack.split(" + ") if t != "PEFT"} | ({"cuda_graph"} if how == "captured" else set())


def _with_common(script, folder, model, workload, toggles):
    """The rows with these toggles, with and without adapters in the compute dtype."""
    both = [record(folder, model, workload, toggles | extra) for extra in (set(), {script.COMMON}) if toggles | extra]
    return [x for x in both if x]


def _candidates(folder, model, workload):
    here = [x for x in lines(RESULTS / folder) if (x["model"], x["workload"]) == (model, workload)]
    return [x for x in here if x["status"] == "ok" and x["ablations"] and not is_limit(x)]


@pytest.mark.parametrize(
    ("printed", "value", "expected"), [("12", 12.47, True), ("13", 12.47, False), ("0.40", 0.404, True)]
)
def test_a_number_is_rounded_once(printed, value, expected):
    assert agrees(printed, value) == expected
