// What the drawings share: bars with their names above them, an interval on each, rows that can be picked, a tip.
const ROW = 50, NAME = 22;
let paper = 0; // px, while the page is printed
const widthOf = place => paper || Math.max(260, Math.floor(place.clientWidth));
const narrow = place => widthOf(place) < 600;
const common = place => ({ width: widthOf(place), style: { fontSize: "12.5px" } });
const letters = (place, share = 1) => (share * widthOf(place)) / 14; // em that a line of text may take
const ruler = document.createElement("canvas").getContext("2d");
ruler.font = "12.5px system-ui, sans-serif";
const long = text => ruler.measureText(text).width; // px
// Who hears the page is told the label, and of each row what the tip says; the lines, ticks and names are for the eye.
const TIP = { ariaHidden: true, fontSize: 12.5, lineHeight: 1.35 };
const put = (place, drawing, label, role = "group") => {
  place.replaceChildren(drawing);
  for (const part of drawing.children) part.matches(".pick") ? part.removeAttribute("aria-label") : part.setAttribute("aria-hidden", "true");
  drawing.setAttribute("role", role);
  drawing.setAttribute("aria-label", label);
};
// rows: {id, name, note, parts: [{className, from, to}], ends: [low, high] or null, at: where the note stands, faint, chosen}
const bars = (place, rows, { axis, label, marks = [], top = 0, tip, pick }) => {
  const ids = rows.map(row => row.id), far = Math.max(0, top, ...rows.flatMap(row => [row.at ?? 0, row.ends?.[1] ?? 0]));
  const parts = rows.flatMap(row => (row.parts ?? []).map(part => ({ ...part, id: row.id })));
  const looks = [...new Set(parts.map(part => part.className))];
  const ends = rows.filter(row => row.ends && row.ends[1] > row.ends[0]);
  const shift = (NAME - 3) / 2;
  const drawing = Plot.plot({
    ...common(place), height: rows.length * ROW + 56, marginLeft: 10, marginRight: 16 + Math.max(0, ...rows.filter(row => !row.faint).map(row => long(row.note))), marginTop: 24, marginBottom: 38,
    y: { type: "band", domain: ids, axis: null, padding: 0 }, x: { domain: [0, far || 1], label: axis, labelAnchor: "right", labelArrow: "none", ticks: narrow(place) ? 4 : 8 },
    marks: [
      Plot.gridX({ stroke: "var(--line)", strokeOpacity: 1 }),
      ...rows.filter(row => row.chosen).map(row => Plot.barX([row], { x1: 0, x2: far || 1, y: "id", fill: "var(--mark)", insetTop: 1, insetBottom: 1 })),
      ...looks.map(look => Plot.barX(parts.filter(part => part.className === look), { x1: "from", x2: "to", y: "id", fill: `var(--${look})`, insetTop: NAME, insetBottom: 4 })),
      Plot.ruleY(ends, { x1: row => row.ends[0], x2: row => row.ends[1], y: "id", dy: shift, stroke: "var(--ink)", strokeWidth: 1.5 }),
      Plot.tickX(ends.flatMap(row => row.ends.map(x => ({ x, id: row.id }))), { x: "x", y: "id", stroke: "var(--ink)", insetTop: NAME + 6, insetBottom: 10 }),
      ...marks,
      Plot.text(rows, { y: "id", frameAnchor: "left", textAnchor: "start", text: "name", dy: -ROW / 2 + 12, stroke: "var(--paper)", strokeWidth: 4, fill: row => (row.faint ? "var(--soft)" : "var(--ink)"), fontWeight: 500, lineWidth: letters(place), textOverflow: "ellipsis-middle" }),
      Plot.text(rows.filter(row => !row.faint), { x: row => Math.max(row.at ?? 0, row.ends?.[1] ?? 0), y: "id", text: "note", textAnchor: "start", dx: 7, dy: shift, fill: "var(--soft)" }),
      Plot.text(rows.filter(row => row.faint), { y: "id", frameAnchor: "left", text: "note", textAnchor: "start", dy: shift, fill: "var(--soft)", lineWidth: letters(place, .9), textOverflow: "ellipsis" }),
      Plot.barX(rows, { x1: 0, x2: far || 1, y: "id", fill: "transparent", className: "pick" }),
      Plot.tip(rows, Plot.pointerY({ ...TIP, x: row => (row.at ?? 0) / 2, y: "id", title: tip, anchor: "top-left", lineWidth: Math.min(40, letters(place, .8)), maxRadius: Infinity })),
    ],
  });
  put(place, drawing, label);
  picked(drawing.querySelectorAll(".pick rect"), rows, tip, pick);
};
const hover = (svg, type, at = {}) => svg.dispatchEvent(new PointerEvent(type, { ...at, pointerType: "mouse" }));
// Gives what was drawn of each row to a mouse, a finger, keys and a screen reader: a button, where it can be picked. Who
// comes by keys is shown the tip that a pointer is shown.
const picked = (elements, rows, tip, pick) => elements.forEach((element, n) => {
  const row = rows[element.__data__ ?? n] ?? rows[n], svg = element.ownerSVGElement;
  element.setAttribute("tabindex", "0");
  element.setAttribute("role", pick ? "button" : "img");
  element.setAttribute("aria-label", tip(row).replaceAll("\n", "; "));
  element.addEventListener("focus", () => {
    const { left, top, width, height } = element.getBoundingClientRect();
    hover(svg, "pointermove", { clientX: left + width / 2, clientY: top + height / 2 });
  });
  element.addEventListener("blur", () => hover(svg, "pointerleave"));
  if (!pick) return;
  if (row.faint) { element.setAttribute("aria-disabled", "true"); return; }
  element.setAttribute("aria-pressed", String(Boolean(row.chosen)));
  element.addEventListener("click", () => pick(row));
  element.addEventListener("keydown", event => {
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); pick(row); }
  });
});
