// Time against memory: each point has its name where it finds room, and the front joins what no other beats in both.
const RISE = 15, SIZE = 11.5;
const shapes = { faster: ["triangle", "▲"], slower: ["triangle", "▼"], same: ["square", "■"], unclear: ["circle", "●"], soft: ["diamond", "◆", "baseline"] };
const frontOf = (points, less) => {
  const kept = [];
  for (const point of [...points].sort((a, b) => a.x - b.x || (less ? a.y - b.y : b.y - a.y))) {
    if (!kept.length || (less ? point.y < kept.at(-1).y : point.y > kept.at(-1).y)) kept.push(point);
  }
  return kept;
};
// The nearest of some places about each point in which its name meets neither a point nor another name.
const labelled = (points, width, height, lines) => {
  const taken = [...lines, ...points.map(p => [p.px - 7, p.py - 7, p.px + 7, p.py + 7])];
  const meets = ([a, b, c, d]) => taken.some(([e, f, g, h]) => a < g && e < c && b < h && f < d);
  return points.flatMap(point => {
    const wide = long(point.label) * SIZE / 12.5;
    for (const away of [9, 18, 30, 44]) {
      for (const [sx, sy] of [[1, 0], [-1, 0], [1, -1], [1, 1], [-1, -1], [-1, 1], [0, -1], [0, 1]]) {
        const left = sx > 0 ? point.px + away * (sy ? .6 : 1) : sx < 0 ? point.px - away * (sy ? .6 : 1) - wide : point.px - wide / 2;
        const top = point.py + sy * away - RISE / 2, box = [left, top, left + wide, top + RISE];
        if (left < 2 || box[2] > width - 2 || top < 2 || box[3] > height - 30 || meets(box)) continue;
        taken.push(box);
        return [{ ...point, lx: left, ly: top + RISE / 2, far: away > 18, ex: Math.min(Math.max(point.px, left), left + wide) }];
      }
    }
    return [];
  });
};
const drawTradeoff = () => {
  const name = shown.unit === "memory" ? "ms" : shown.unit, unit = units[name], place = $("#tradeoff .chart");
  const points = armsWith(arm => arm.peak && unit.of(arm) && !["twin", "least"].includes(arm.role)).map(arm => {
    const [y, low, high] = unit.of(arm);
    return { id: arm.n, x: arm.peak, y, low, high, name: arm.name, label: arm.n === shown.base ? `${arm.short} (baseline)` : arm.short, tone: arm.n === shown.base ? "soft" : toneOf(arm) || "same", chosen: arm.n === shown.base };
  });
  $("#tradeoff").hidden = points.length < 2;
  if (points.length < 2) return;
  const front = frontOf(points, unit.less), steps = front.flatMap((p, n) => n ? [{ x: p.x, y: front[n - 1].y }, p] : [p]);
  const width = widthOf(place), height = width < 600 ? 340 : 420;
  const tip = point => told({ ...shown.family.arms[point.id], n: point.id });
  const longest = width < 600 ? 22 : 44;
  points.forEach(p => { if (p.label.length > longest) p.label = p.label.slice(0, longest - 1) + "…"; });
  const settings = {
    ...common(place), height, marginLeft: 58, marginBottom: 40, marginTop: 22, marginRight: 12,
    x: { domain: [0, 1.04 * Math.max(...points.map(p => p.x))], label: "peak GiB, less is better", labelAnchor: "right", labelArrow: "none" },
    y: { domain: [0, 1.04 * Math.max(...points.map(p => p.high))], label: `${unit.axis}, ${unit.less ? "less" : "more"} is better`, labelArrow: "none" },
  };
  const scales = Plot.plot({ ...settings, marks: [] });
  points.forEach(p => { p.px = scales.scale("x").apply(p.x); p.py = scales.scale("y").apply(p.y); });
  const order = [...front, ...points.filter(p => !front.includes(p))].sort((a, b) => b.chosen - a.chosen);
  const corners = steps.map(p => [scales.scale("x").apply(p.x), scales.scale("y").apply(p.y)]);
  const lines = corners.slice(1).map(([x, y], n) => [Math.min(x, corners[n][0]) - 1, Math.min(y, corners[n][1]) - 1, Math.max(x, corners[n][0]) + 1, Math.max(y, corners[n][1]) + 1]);
  const whiskers = points.map(p => [p.px - 2, scales.scale("y").apply(p.high), p.px + 2, scales.scale("y").apply(p.low)]);
  const labels = labelled(order, width, height, [...lines, ...whiskers]);
  // A name that stands far from its point has a line to it.
  const back = (axis, at) => scales.scale(axis).invert(at);
  const leaders = labels.filter(l => l.far).flatMap(l => [{ id: l.id, x: l.x, y: l.y }, { id: l.id, x: back("x", l.ex), y: back("y", l.ly + Math.sign(l.py - l.ly) * 6) }]);
  const drawing = Plot.plot({
    ...settings,
    marks: [
      Plot.gridX({ stroke: "var(--line)", strokeOpacity: 1 }),
      Plot.line(steps, { x: "x", y: "y", stroke: "var(--soft)", strokeDasharray: "5 4" }),
      Plot.line(leaders, { x: "x", y: "y", z: "id", stroke: "var(--soft)", strokeWidth: .8 }),
      Plot.ruleX(points, { x: "x", y1: "low", y2: "high", stroke: p => `var(--${p.tone})`, strokeWidth: 1.5 }),
      ...[true, false].map(waits => Plot.dot(points.filter(p => Boolean(shown.family.arms[p.id].hostBound) === waits), { x: "x", y: "y", r: 5, symbol: p => shapes[p.tone][0], rotate: p => (p.tone === "slower" ? 180 : 0), stroke: p => `var(--${p.tone})`, strokeWidth: 2, fill: waits ? "var(--paper)" : p => `var(--${p.tone})` })),
      Plot.text(labels, { x: "x", y: "y", text: "label", textAnchor: "start", frameAnchor: "middle", fill: "var(--ink)", fontSize: SIZE, className: "labels" }),
      Plot.dot(points, { x: "x", y: "y", r: 12, fill: "transparent", className: "pick" }),
      Plot.tip(points, Plot.pointer({ ...TIP, x: "x", y: "y", title: tip, lineWidth: Math.min(40, letters(place, .8)) })),
    ],
  });
  put(place, drawing, `${unit.axis} against peak GiB of ${points.length} stacks; no other beats in both: ${front.map(p => p.name).join(", ")}`);
  drawing.querySelectorAll(".labels text").forEach((text, n) => text.setAttribute("transform", `translate(${labels[n].lx},${labels[n].ly})`));
  picked(drawing.querySelectorAll(".pick circle"), points, tip, point => rebase(point.id, "#tradeoff"));
  legend($("#tradeoff .legend"), Object.entries(shapes).filter(([tone]) => points.some(p => p.tone === tone)).map(([tone, [, sign, word]]) => [tone, word ?? tone, sign]));
  const waits = points.some(p => shown.family.arms[p.id].hostBound), cut = points.some(p => shown.family.arms[p.id].short !== shown.family.arms[p.id].name);
  $("#tradeoff .lead").textContent = (front.length > 1 ? "The dashed line joins the stacks that no other beats in both." : `${front[0].name} is ahead of all in both.`) + (waits ? " Hollow: the GPU waits for its host." : "") +
    (cut ? ` Names here leave out ${commonToggles().join(" and ")}, which most stacks have.` : "") + (labels.length < points.length ? " One without a name here says it when it is pointed at or focused." : "");
};
const commonToggles = () => [...new Set(shown.family.arms.filter(arm => arm.short !== arm.name).flatMap(arm => {
  const kept = arm.short.split(" + ");
  return arm.name.split(" + ").filter(toggle => !kept.includes(toggle));
}))];
