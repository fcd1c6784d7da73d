// Numbers and verdicts as words, as report/words.py has them.
const say = text => { $("#said").textContent = text; }; // to a screen reader: what a choice changed elsewhere
const number = (value, digits = 3) => {
  if (value === null || value === undefined || !isFinite(value)) return "";
  if (value === 0) return "0";
  return value.toFixed(Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(value)))));
};
const spread = ([value, low, high], unit = "") => `${number(value, 4)}${unit} [${number(low, 4)}, ${number(high, 4)}]`;
const percent = share => (share === null || share === undefined ? "" : (100 * share).toFixed(1) + " %");
const signs = {
  faster: ["▲", "faster"], slower: ["▼", "slower"], same: ["■", "same"], unclear: ["○", "unclear"], failed: ["✕", "failed"],
};
const bare = verdict => verdict !== "" && !["faster", "slower", "same"].includes(verdict);
// Without a figure there is an interval and no ratio.
const times = (three, verdict) => !three ? "" : bare(verdict) ? `${number(three[1])} to ${number(three[2])} ×` : `${number(three[0])} ×`;
const toneOf = arm => (arm.status !== "ok" ? "failed" : (verdictOf(arm.n) || "").split(",")[0]);
const met = { within: "in one process, round by round", between: "between processes, round by round", "": "in a pair of their own",
  "through the reference": "each beside the same reference, not beside one another", unpaired: "never beside one another" };
// Everything that a pointer or a screen reader is told about an arm.
const told = arm => {
  const lines = [arm.name];
  if (!arm.ms.total) return [...lines, `${arm.status.replace("_", " ")}: ${arm.reason ?? ""}`].join("\n");
  lines.push(`${spread(arm.ms.total, " ms")}${shown.family.phases.map(p => arm.ms[p] && `, ${p} ${number(arm.ms[p][0])}`).filter(Boolean).join("")}`);
  const ratio = ratioOf(arm.n), verdict = verdictOf(arm.n);
  if (ratio && arm.n !== shown.base) lines.push(`${spread(ratio, " ×")} ${shown.family.arms[shown.base].name}${verdict ? ": " + verdict : ""}`);
  lines.push([arm.peak && `${number(arm.peak)} GiB`, arm.tokens && `${number(units.tokens.of(arm)[0])} tokens/s`, arm.joules && `${number(1000 / arm.joules)} tokens/J`].filter(Boolean).join(", "));
  return lines.filter(Boolean).join("\n");
};
const legend = (place, entries) => {
  place.replaceChildren();
  for (const [className, label, shape] of entries) {
    const item = add(place, "span");
    if (shape && shape.length === 1) add(item, "b", shape, className).setAttribute("aria-hidden", "true"); else add(item, "i", "", `${className} ${shape ?? ""}`);
    item.append(label);
  }
};
