// The race: a bar an arm, the best first, its phases stacked where it is of milliseconds; what failed stands below in grey.
const rankBy = (unit, arms) => arms.sort((a, b) => (units[unit].less ? 1 : -1) * (units[unit].of(a)[0] - units[unit].of(b)[0]));
// The medians of the phases, stretched to the median of their sum: medians need not add up.
const stacked = (arm, phases) => {
  const own = phases.map(phase => arm.ms[phase]?.[0] ?? 0), sum = own.reduce((a, b) => a + b, 0) || 1;
  let at = 0;
  return own.map((ms, n) => ({ className: `phase${n % 5 + 1}`, from: at, to: (at += ms * arm.ms.total[0] / sum) }));
};
const partsOf = (arm, value) => {
  if (shown.unit === "ms") return stacked(arm, shown.family.phases);
  if (shown.unit !== "memory") return [{ className: arm.n === shown.base ? "soft" : toneOf(arm) || "same", from: 0, to: value }];
  const still = Math.min(arm.static ?? 0, value);
  return [{ className: "memory", from: 0, to: still }, { className: "memory2", from: still, to: value }];
};
const noteOf = (arm, value, brief) => {
  const unit = { ms: " ms", ratio: " ×", tokens: "", joules: "", memory: " GiB" }[shown.unit];
  if (shown.unit === "ratio") return arm.n === shown.base ? "baseline" : `${times(units.ratio.of(arm), verdictOf(arm.n))} ${signs[toneOf(arm)]?.[0] ?? ""}`;
  const ratio = arm.n !== shown.base && ["ms", "tokens"].includes(shown.unit) ? times(ratioOf(arm.n), verdictOf(arm.n)) : "";
  return brief ? number(value) + unit : `${number(value)}${unit}${ratio ? " · " + ratio : arm.n === shown.base ? " · baseline" : ""}`;
};
const drawRace = () => {
  const unit = units[shown.unit], place = $("#race .chart"), { family } = shown;
  const runners = rankBy(shown.unit, armsWith(arm => !["twin", "least"].includes(arm.role) && unit.of(arm)));
  const failed = armsWith(arm => !arm.ms.total && arm.role !== "twin" && arm.role !== "least");
  const limit = ["ms", "ratio", "tokens"].includes(shown.unit) ? armsWith(arm => arm.role === "least" && arm.ms.total)[0] : null;
  const bound = limit && (shown.unit === "tokens" ? 1000 * (family.arms.find(arm => arm.tokens)?.tokens ?? NaN) / limit.ms.total[0] : unit.of(limit)?.[0]);
  const rows = runners.map(arm => {
    const [value, low, high] = unit.of(arm);
    return { id: arm.n, name: arm.name, note: noteOf(arm, value, narrow(place)), parts: partsOf(arm, value), ends: [low, high], at: value, chosen: arm.n === shown.base };
  });
  rows.push(...failed.map(arm => ({ id: arm.n, name: arm.name, note: `${arm.status.replace("_", " ")}: ${arm.reason ?? ""}`, faint: true })));
  const marks = [], most = Math.max(...rows.map(row => row.ends?.[1] ?? 0));
  if (isFinite(bound) && bound > 0 && bound <= 3 * most) {
    marks.push(Plot.ruleX([bound], { stroke: "var(--limit)", strokeWidth: 2 }));
    marks.push(Plot.text([`${limit.name} ${number(bound)}`], { x: bound, frameAnchor: "top", dy: -9, textAnchor: bound > most / 2 ? "end" : "start", fill: "var(--limit)" }));
  }
  if (shown.unit === "ratio") {
    marks.unshift(Plot.rect([0], { x1: 1 / (1 + family.floor), x2: 1 + family.floor, fill: "var(--soft)", fillOpacity: .15 }));
    marks.push(Plot.ruleX([1], { stroke: "var(--soft)", strokeDasharray: "3 3" }));
  }
  bars(place, rows, {
    axis: unit.axis + (unit.less ? ", less is better" : ", more is better"), marks, top: isFinite(bound) && bound <= 3 * most ? bound : 0,
    label: `${unit.label} of ${runners.length} stacks, a bar each, the best first` + (failed.length ? `; ${failed.length} failed` : "") + (marks.length && limit ? `; ${limit.name} ${number(bound)} ${unit.axis}` : ""),
    tip: row => told({ ...family.arms[row.id], n: row.id }), pick: row => rebase(row.id, "#race"),
  });
  const legends = { ms: family.phases.map((phase, n) => [`phase${n % 5 + 1}`, phase]), memory: [["memory", "stays between two steps"], ["memory2", "only during a step"]] };
  const tones = [...new Set(runners.filter(arm => arm.n !== shown.base).map(arm => toneOf(arm)))].filter(tone => signs[tone]);
  legend($("#race .legend"), [
    ...(legends[shown.unit] ?? tones.map(tone => [tone, signs[tone][1], signs[tone][0]])),
    ...(["ms", "ratio", "tokens"].includes(shown.unit) ? [["ink", "95 % interval", "line"]] : []),
    ...(marks.length && limit ? [["limit", `${limit.name}: no step can be faster`, "line"]] : []),
    ...(shown.unit === "ratio" ? [["baseline", `noise floor ±${percent(family.floor)}`]] : []),
  ]);
  $("#race .lead").textContent = `Everything is over ${family.arms[shown.base].name}` +
    (family.arms[shown.base].role === "reference" ? ` (${family.arms[shown.base].toggles.join(" + ") || "plain"}). ` : ". ") +
    (family.rounds ? "All took turns in the same rounds, on the same tokens. " : "Each was measured beside a reference of its own, before there were rounds. ") +
    "Click a bar, or press Enter on it, to hold everything against it.";
};
