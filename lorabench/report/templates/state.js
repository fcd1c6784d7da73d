// What is shown: the family, its baseline, the unit. Whoever draws asks here; a change draws everything anew.
const families = JSON.parse(document.getElementById("data").textContent);
const shown = { family: families[0], base: 0, unit: "ms" };
const $ = (selector, parent = document) => parent.querySelector(selector);
// No text of a record ever becomes markup: all of it is set as textContent.
const add = (parent, name, text, className) => {
  const made = parent.appendChild(document.createElement(name));
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
};

// -- ratios: those of two arms the other way round are the inverse, and only one half is there -------------------------

const pair = (rows, i, j) => (rows?.[i] ?? [])[j - i - 1];
// [ratio, low, high] of the base's time over the arm's; null where the two were not held together.
const ratioOf = (arm, base = shown.base, phase = "total") => {
  if (arm === base) return [1, 1, 1];
  const { ratios } = shown.family, found = arm > base ? pair(ratios[phase], base, arm) : pair(ratios[phase], arm, base);
  if (!found) return null;
  return arm > base ? found : [1 / found[0], 1 / found[2], 1 / found[1]];
};
const howOf = (arm, base = shown.base) => (arm > base ? pair(shown.family.how, base, arm) : pair(shown.family.how, arm, base)) ?? "";
const verdictOf = arm => shown.family.verdicts[shown.base][arm];
const armsWith = fits => shown.family.arms.map((arm, n) => ({ ...arm, n })).filter(fits);

// -- units: each says what a bar is, which way is better, and with what interval ---------------------------------------

const inverse = (ms, by) => ms && [by / ms[0], by / ms[2], by / ms[1]];
const units = {
  ms: { label: "milliseconds", axis: "ms", less: true, of: arm => arm.ms.total },
  ratio: { label: "ratio", axis: "× the baseline", less: false, of: arm => ratioOf(arm.n) },
  tokens: { label: "real tokens / s", axis: "real tokens / s", less: false, of: arm => arm.tokens ? inverse(arm.ms.total, 1000 * arm.tokens) : null },
  joules: { label: "tokens / joule", axis: "real tokens / joule", less: false, of: arm => arm.joules && arm.ms.total ? Array(3).fill(1000 / arm.joules) : null },
  memory: { label: "peak memory", axis: "GiB", less: true, of: arm => arm.peak && arm.ms.total ? Array(3).fill(arm.peak) : null },
};
const unitsThere = () => Object.keys(units).filter(name => armsWith(arm => arm.role !== "least" && units[name].of(arm)).length);
