"""What the page draws, as plain data: of each group its arms, every arm over every other, ladder, trials and details.

JSON holds it, and a browser needs nothing else. Numbers are ms, GiB, tokens a step and joules; what is unknown is None.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lorabench.contract.kind import kind
from lorabench.record.older import is_made_of
from lorabench.record.schema import TOTAL, Record
from lorabench.report.analysis import Analysis
from lorabench.report.arms import CANDIDATE, LEAST, REFERENCE, TWIN, Arm, arms_of, held, rounded, took, trials, used
from lorabench.report.attribution import ladder
from lorabench.report.attribution_tables import increment, increment_is_clear
from lorabench.report.cells import HOST_BOUND, judgement
from lorabench.report.claim_tables import quantity
from lorabench.report.claims import SPEEDUP
from lorabench.report.details import detail
from lorabench.report.groups import Group
from lorabench.report.opening import opening
from lorabench.report.pairwise import held_together
from lorabench.report.shares import columns
from lorabench.report.tidy import kinds_of
from lorabench.report.words import number


def families(analysis: Analysis) -> list[dict[str, Any]]:
    """One for each group, in the groups' order."""
    commands = {s["id"]: s.get("command") or [] for s in analysis.sessions}
    return [_family(group, analysis, commands) for group in analysis.groups]


def _family(group: Group, analysis: Analysis, commands: Mapping[str, Sequence[object]]) -> dict[str, Any]:
    arms = arms_of(group, analysis)
    first = group.records[0]
    phases = [p for p in group.kind.phases if any(p in own.phases for arm in arms for own in arm.timed)]
    said = opening(group, arms, analysis)
    return {
        "title": group.title,
        "asked": f"{first.model} @ {first.workload}",
        "device": analysis.device(first),
        "model": first.model,
        "phases": phases,
        "total": group.kind.total,
        "rounds": not is_made_of(first.family),
        "floor": rounded(max(f for r in group.records if math.isfinite(f := analysis.row(r)["noise_floor"]))),
        "opening": said._asdict() | {"best": arms.index(said.best) if said.best else None},
        "arms": [_arm(arm, name, group, analysis, commands) for arm, name in zip(arms, short_names(arms), strict=True)],
        **held_together(arms, phases, analysis)._asdict(),
        "ladder": _ladder(group, analysis),
    }


def _arm(
    arm: Arm, short: str, group: Group, analysis: Analysis, commands: Mapping[str, Sequence[object]]
) -> dict[str, Any]:
    row = analysis.row(arm.record) if arm.record else {}
    own = arm.own[-1]
    host = row.get(f"{arm.side}_host_share", math.nan)
    found = {
        "name": arm.name, "short": short, "role": arm.role, "toggles": own.toggles, "status": arm.status,
        "reason": own.reason if arm.status != "ok" else None, "said": _said(arm, group, analysis),
        "ms": took(arm), **held(arm), **(used(arm) if arm.role != LEAST else {}),
        "host": rounded(host), "hostBound": bool(host >= HOST_BOUND),
        "padding": rounded(row.get(f"{arm.side}_padded_share")), "bound": _text(row.get(f"{arm.side}_bound")),
        "ceiling": rounded(row.get(f"{arm.side}_of_ceiling")), "trials": trials(arm),
    }  # fmt: skip
    if arm.role == CANDIDATE and arm.record:
        found |= {"shares": _shares(row, analysis)}
    if arm.role != REFERENCE and arm.record:
        found |= {"gradient": _share_of_allowed(row), "claims": _claims(arm.record, analysis)}
        found |= _beside(arm, analysis)
    return found | _facts(arm, analysis, commands)


def _beside(arm: Arm, analysis: Analysis) -> dict[str, Any]:
    """The trials of a reference of its own, which each arm had before there were rounds."""
    if arm.record is None or arm.role == TWIN or not is_made_of(arm.record.family):
        return {}
    own = analysis.contrasts.arms(arm.record, arm.record.reference)
    return {"beside": trials(Arm(REFERENCE, REFERENCE, own, arm.record))}


def _said(arm: Arm, group: Group, analysis: Analysis) -> str:
    """The verdict over the reference, or why there is none, in words."""
    if arm.role == REFERENCE or arm.record is None:
        return arm.own[-1].reason or ""
    return judgement(analysis.row(arm.record), arm.record, group)


def _shares(row: Mapping[Any, Any], analysis: Analysis) -> dict[str, list[float | None]]:
    """Heading → how near the arm is to the least work, with its interval."""
    found = {share.heading: share.column for share in columns(kinds_of(analysis.records))}
    ends = {h: [rounded(row[f"{c}{end}"]) for end in ("", "_low", "_high")] for h, c in found.items() if c in row}
    return {heading: three for heading, three in ends.items() if three[0] is not None}


def _share_of_allowed(row: Mapping[Any, Any]) -> list[float | None] | None:
    """[the worst gradient's error, what it was allowed]."""
    two = [rounded(row.get(name), 2) for name in ("grad_error", "grad_allowed")]
    return two if None not in two else None


def _claims(record: Record, analysis: Analysis) -> list[dict[str, Any]]:
    """Published numbers about the record's toggles; `same`: whether their baseline is the record's too."""
    found = [m for m in analysis.matches if m.record is record]
    return [
        {
            "said": number(m.low) if m.low == m.high else f"≥ {number(m.low)}" if m.high == math.inf
            else f"{number(m.low)}–{number(m.high)}",
            "what": quantity(m.claim.compared), "source": m.source.title,
            "wording": m.claim.wording, "differs": m.differs,
            "ends": [m.low, m.high if m.high < math.inf else None]
            if m.claim.quantity == f"{TOTAL}_{SPEEDUP}" and not m.differs else None,
        }
        for m in found
    ]  # fmt: skip


def _facts(arm: Arm, analysis: Analysis, commands: Mapping[str, Sequence[object]]) -> dict[str, Any]:
    """What the arm's row opens to."""
    if arm.record is None:
        return {"facts": {"candidate": " + ".join(arm.own[-1].toggles)}, "log": arm.own[-1].log or ""}
    measured = analysis.contrasts.measured(arm.record)
    found = detail(arm.record, analysis.row(arm.record), commands.get(arm.record.session, []))
    if arm.role == REFERENCE:
        facts = {name: fact for name, fact in found["facts"].items() if "reference" in name and name != "notes"}
        return {"facts": facts, "log": ""}
    found["facts"] = {"sessions": ", ".join(r.session for r in measured)} | found["facts"]
    return found


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _ladder(group: Group, analysis: Analysis) -> list[dict[str, Any]]:
    """The rungs from the lowest; `low` and `high` are ms, of the interval of what the rung adds."""
    found = []
    for rung in ladder(group.records, analysis.contrasts):
        own, base = (rung.increment, rung.before) if rung.unpaired and rung.increment else (rung.cumulative, rung.start)
        found.append({
            "name": rung.added, "status": rung.record.status, "applied": rung.cumulative is not None,
            "start": rounded(rung.start), "before": rounded(rung.before), "after": rounded(rung.after),
            "low": rounded(base / own.high) if own else None, "high": rounded(base / own.low) if own else None,
            "clear": increment_is_clear(rung, analysis), "said": increment(rung, analysis),
        })  # fmt: skip
    return found if any(rung["applied"] for rung in found) else []


def short_names(arms: Sequence[Arm]) -> list[str]:
    """Names for a crowded drawing: without the toggles that most candidates have, where each still differs."""
    tested = [list(arm.record.ablations) if arm.record and arm.role == CANDIDATE else [] for arm in arms]
    count = Counter(toggle for own in tested for toggle in own)
    common = {t for t, n in count.items() if 2 * n > sum(map(bool, tested)) > 2}
    made = [" + ".join(t for t in own if t not in common) or arm.name for own, arm in zip(tested, arms, strict=True)]
    return made if len(set(made)) == len(made) else [arm.name for arm in arms]


def work(records: Sequence[Record]) -> dict[str, str]:
    """Kind → what was measured, in its own words."""
    found: dict[str, str] = {}
    for own in kinds_of(records):
        found[own.name] = f"{own.summary}; its total is {own.total}"
        if not kind(own.name).candidate:
            found[own.name] += "; no candidate, so it has neither a gate nor a verdict"
            found[f"of {own.name}"] = (
                f"the {own.name}'s time / the row's, over the phases named: 1 would be all else for nothing"
            )
    return found
