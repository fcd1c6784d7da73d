// What the drawings share: bars with their names above them, an interval on each, rows that can be picked, a tip.
const ROW = 50, NAME = 22;
const widthOf = place => Math.max(260, Math.floor(place.clientWidth));
const narrow = place => widthOf(place) < 600;
const common = place => ({ width: widthOf(place), style: { fontSize: "12.5px" } });
const letters = (place, share = 1) => (share * widthOf(place)) / 13; // em that a line of text may take
const put = (place, drawing, label) => {
  place.replaceChildren(drawing);
  drawing.setAttribute("role", "group");
  drawing.setAttribute("aria-label", label);
};
// rows: {id, name, note, parts: [{className, from, to}], ends: [low, high] or null, at: where the note stands, faint, chosen}
const bars = (place, rows, { axis, label, marks = [], top = 0, tip, pick, right = 170 }) => {
  const ids = rows.map(row => row.id), far = Math.max(0, top, ...rows.flatMap(row => [row.at ?? 0, row.ends?.[1] ?? 0]));
  const parts = rows.flatMap(row => (row.parts ?? []).map(part => ({ ...part, id: row.id })));
  const looks = [...new Set(parts.map(part => part.className))];
  const ends = rows.filter(row => row.ends && row.ends[1] > row.ends[0]);
  const shift = (NAME - 3) / 2;
  const drawing = Plot.plot({
    ...common(place), height: rows.length * ROW + 56, marginLeft: 2, marginRight: narrow(place) ? 74 : right, marginTop: 18, marginBottom: 38,
    y: { type: "band", domain: ids, axis: null, padding: 0 }, x: { domain: [0, far || 1], label: axis, labelAnchor: "right", labelArrow: "none", ticks: narrow(place) ? 4 : 8 },
    marks: [
      Plot.gridX({ stroke: "var(--line)", strokeOpacity: 1 }),
      ...rows.filter(row => row.chosen).map(row => Plot.barX([row], { x1: 0, x2: far || 1, y: "id", fill: "var(--mark)", insetTop: 1, insetBottom: 1 })),
      ...looks.map(look => Plot.barX(parts.filter(part => part.className === look), { x1: "from", x2: "to", y: "id", fill: `var(--${look})`, insetTop: NAME, insetBottom: 4 })),
      Plot.ruleY(ends, { x1: row => row.ends[0], x2: row => row.ends[1], y: "id", dy: shift, stroke: "var(--ink)", strokeWidth: 1.5 }),
      Plot.tickX(ends.flatMap(row => row.ends.map(x => ({ x, id: row.id }))), { x: "x", y: "id", stroke: "var(--ink)", insetTop: NAME + 6, insetBottom: 10 }),
      ...marks,
      Plot.text(rows, { y: "id", frameAnchor: "left", textAnchor: "start", text: "name", dy: -ROW / 2 + 12, stroke: "var(--paper)", strokeWidth: 4, fill: row => (row.faint ? "var(--failed)" : "var(--ink)"), fontWeight: 500, lineWidth: letters(place), textOverflow: "ellipsis" }),
      Plot.text(rows.filter(row => !row.faint), { x: row => Math.max(row.at ?? 0, row.ends?.[1] ?? 0), y: "id", text: "note", textAnchor: "start", dx: 7, dy: shift, fill: "var(--soft)" }),
      Plot.text(rows.filter(row => row.faint), { y: "id", frameAnchor: "left", text: "note", textAnchor: "start", dy: shift, fill: "var(--failed)", lineWidth: letters(place, .9), textOverflow: "ellipsis" }),
      ...(pick ? [Plot.barX(rows, { x1: 0, x2: far || 1, y: "id", fill: "transparent", ariaLabel: row => row.told ?? row.name, className: "pick" })] : []),
      ...(tip ? [Plot.tip(rows, Plot.pointerY({ x: row => (row.at ?? 0) / 2, y: "id", title: tip, anchor: "top-left", lineWidth: Math.min(40, letters(place, .8)), fontSize: 12.5, lineHeight: 1.35, maxRadius: Infinity }))] : []),
    ],
  });
  put(place, drawing, label);
  if (pick) picked(drawing.querySelectorAll("g.pick rect, .pick rect"), rows, pick);
};
// Makes what was drawn of each row a button, for a mouse, a finger and keys.
const picked = (elements, rows, pick) => elements.forEach((element, n) => {
  const row = rows[element.__data__ ?? n] ?? rows[n];
  element.setAttribute("tabindex", "0");
  element.setAttribute("role", "button");
  element.setAttribute("aria-label", row.told ?? row.name);
  element.setAttribute("aria-pressed", String(Boolean(row.chosen)));
  element.addEventListener("click", () => pick(row));
  element.addEventListener("keydown", event => {
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); pick(row, true); }
  });
});
