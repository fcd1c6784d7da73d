// The table: an arm a row, over the baseline that is chosen. It sorts, filters, and its rows open.
const sorting = { column: "ms", down: false };
const opened = new Set();
// Each column: its heading, the number that it sorts by, its text; more: behind "all columns"; roomy: not on a phone.
const columnsOf = () => {
  const { family } = shown, has = of => armsWith(arm => of(arm) !== null && of(arm) !== undefined).length;
  const ratio = phase => ({ key: `× ${phase}`, value: arm => ratioOf(arm.n, shown.base, phase)?.[0], three: arm => ratioOf(arm.n, shown.base, phase), ratio: true });
  const shares = [...new Set(family.arms.flatMap(arm => Object.keys(arm.shares ?? {})))];
  return [
    { key: "ms", value: arm => arm.ms.total?.[0], text: arm => arm.ms.total ? number(arm.ms.total[0], 4) : "" },
    { ...ratio("total"), key: "×" },
    ...family.phases.map(phase => ({ ...ratio(phase), roomy: true })),
    { key: "GiB", value: arm => arm.peak, text: arm => number(arm.peak) },
    ...shares.map(name => ({ key: name, value: arm => arm.shares?.[name]?.[0], text: arm => percent(arm.shares?.[name]?.[0]), roomy: true, more: shares.indexOf(name) > 0, title: arm => arm.shares?.[name] && spread(arm.shares[name]) })),
    { key: "real tokens/s", value: arm => units.tokens.of(arm)?.[0], text: arm => number(units.tokens.of(arm)?.[0], 4), roomy: true },
    { key: "tokens/J", value: arm => units.joules.of(arm)?.[0], text: arm => number(units.joules.of(arm)?.[0]), roomy: true },
    { key: "padding", value: arm => arm.padding, text: arm => percent(arm.padding), more: true },
    { key: "host's share", value: arm => arm.host, text: arm => percent(arm.host), more: true },
    { key: "bound (of ceiling)", value: arm => arm.ceiling, text: arm => [arm.bound, arm.ceiling && `(${percent(arm.ceiling)})`].filter(Boolean).join(" "), more: true },
    { key: "gradient error / allowed", value: arm => arm.gradient?.[0], text: arm => arm.gradient?.map(x => number(x, 2)).join(" / ") ?? "", more: true },
    { key: "published", value: arm => arm.claims?.length || null, text: arm => published(arm), roomy: true },
    ...others().map(other => ({ key: `ms on ${other.device}`, value: arm => twinOn(other, arm)?.ms.total?.[0], text: arm => abroad(other, arm) })),
  ].filter(column => column.ratio || has(column.value));
};
const published = arm => (arm.claims ?? []).filter(claim => claim.ends || /speedup/.test(claim.what)).slice(0, 2).map(claim => claim.said + (claim.differs ? " *" : "")).join(", ") || (arm.claims?.length ? "in the row" : "");
// The same question on another machine, as `lorabench gather` brings it: a column of its own.
const others = () => families.filter(family => family !== shown.family && family.asked === shown.family.asked && family.device !== shown.family.device);
const twinOn = (family, arm) => family.arms.find(other => other.role === arm.role && other.toggles.join() === arm.toggles.join());
const abroad = (family, arm) => {
  const other = twinOn(family, arm);
  return other ? (other.ms.total ? number(other.ms.total[0], 4) : other.status) : "";
};
const scaleOf = columns => {
  const every = columns.filter(column => column.ratio).flatMap(column => armsWith(arm => arm.role !== "least").flatMap(arm => column.three(arm) ?? [])).filter(x => x > 0);
  const low = Math.log(Math.min(1, ...every)), high = Math.log(Math.max(1.02, ...every));
  return value => 100 * (Math.log(value) - low) / (high - low);
};
const bar = (cell, three, tone, scale) => {
  const made = add(cell, "span", "", `bar ${tone}`), [value, low, high] = three.map(x => Math.min(100, Math.max(0, scale(x))));
  made.setAttribute("aria-hidden", "true");
  const one = add(made, "i", "", "one"), line = add(made, "i"), dot = add(made, "i", "", "dot");
  one.style.left = `${scale(1)}%`; line.style.left = `${low}%`; line.style.width = `${high - low}%`; dot.style.left = `${value}%`;
};
const fill = (cell, column, arm, scale) => {
  cell.className = `number ${column.roomy ? "roomy" : ""} ${column.more ? "more" : ""}`;
  if (!column.ratio) { cell.textContent = column.text(arm); cell.title = column.title?.(arm) ?? ""; return; }
  const three = column.three(arm), verdict = verdictOf(arm.n);
  if (!three) return;
  cell.textContent = arm.n === shown.base ? "1" : times(three, verdict);
  cell.title = spread(three, " ×");
  if (arm.n !== shown.base && arm.role !== "least") bar(cell, three, toneOf(arm) || "same", scale);
};
const nameCell = (row, arm) => {
  const cell = add(row, "th"), button = add(cell, "button", undefined, "open"), tone = toneOf(arm);
  cell.scope = "row";
  arm.name.split(/(?<=_)/).forEach((part, n) => button.append(...(n ? [document.createElement("wbr"), part] : [part]))); // long names break there
  button.type = "button";
  button.setAttribute("aria-expanded", String(opened.has(arm.n)));
  button.addEventListener("click", () => toggleRow(arm.n));
  const verdict = add(cell, "span", "", `verdict ${tone}`);
  if (signs[tone]) add(verdict, "span", signs[tone][0] + " ").setAttribute("aria-hidden", "true");
  verdict.append(arm.status !== "ok" ? arm.status.replace("_", " ") : arm.n === shown.base ? "baseline" : { twin: "noise floor", least: "limit, no stack" }[arm.role] ?? (verdictOf(arm.n) || (arm.role === "reference" ? "reference" : "")));
  if (arm.ms.total && arm.n !== shown.base && arm.role !== "least") {
    const base = add(verdict, "button", "as baseline");
    base.type = "button";
    base.setAttribute("aria-label", `take ${arm.name} as baseline`);
    base.addEventListener("click", () => rebase(arm.n, "#results"));
  }
};
const fits = arm => {
  const form = $("#results form"), { status, toggle } = form;
  return (!status.value || arm.status === status.value) && (!toggle.value || arm.toggles.includes(toggle.value));
};
const drawTable = () => {
  const columns = columnsOf(), scale = scaleOf(columns), head = $(".results thead"), body = $(".results tbody");
  head.replaceChildren();
  const line = add(head, "tr");
  [{ key: "stack and verdict" }, ...columns].forEach(column => {
    const th = add(line, "th", undefined, column.value ? `number ${column.roomy ? "roomy" : ""} ${column.more ? "more" : ""}` : ""), button = add(th, "button", column.key.replace(" [95 %]", ""));
    th.scope = "col";
    button.type = "button";
    th.setAttribute("aria-sort", sorting.column === column.key ? (sorting.down ? "descending" : "ascending") : "none");
    button.addEventListener("click", () => { Object.assign(sorting, sorting.column === column.key ? { down: !sorting.down } : { column: column.key, down: false }); drawTable(); say(`Sorted by ${column.key}, ${sorting.down ? "descending" : "ascending"}.`); head.rows[0].cells[th.cellIndex].firstChild.focus(); });
    if (column.ratio) button.setAttribute("aria-label", `${column.key}, ratio over the baseline`);
  });
  const by = columns.find(column => column.key === sorting.column), sign = sorting.down ? -1 : 1;
  // What has no number stands below, either way, and below that the least work, which no stack can be.
  const order = (a, b) => {
    if ((a.role === "least") !== (b.role === "least")) return (a.role === "least") - (b.role === "least");
    if (!by) return sign * a.name.localeCompare(b.name);
    const [x, y] = [by.value(a) ?? null, by.value(b) ?? null];
    return x === null || y === null ? (x === null) - (y === null) : sign * (x - y);
  };
  const arms = armsWith(fits).sort(order);
  body.replaceChildren();
  for (const arm of arms) {
    const row = add(body, "tr", undefined, arm.n === shown.base ? "chosen" : "");
    row.dataset.arm = arm.n;
    nameCell(row, arm);
    columns.forEach(column => fill(add(row, "td"), column, arm, scale));
    if (opened.has(arm.n)) openRow(row, arm);
  }
  $(".results caption").textContent = `Every stack over ${shown.family.arms[shown.base].name}, sorted by ${sorting.column}`;
  $("#results output").textContent = `${arms.length} of ${shown.family.arms.length} rows`;
  legend($("#results .legend"), Object.entries(signs).map(([tone, [sign, word]]) => [tone, word, sign]));
  $("#results .lead").textContent = `Ratios over ${shown.family.arms[shown.base].name}, more is faster; on a logarithmic scale the dot is the ratio, the line its 95 % interval, the stroke 1.` +
    (shown.family.arms.some(arm => arm.claims?.some(claim => claim.differs)) ? " * published against another baseline: the open row says which." : "");
};
const factTable = (parent, lines) => {
  const body = add(add(parent, "table"), "tbody");
  lines.forEach((line, n) => { const tr = add(body, "tr"); line.forEach(text => { const cell = add(tr, n ? "td" : "th", text); if (!n) cell.scope = "col"; }); });
};
const openRow = (row, arm) => {
  const made = document.createElement("tr"), inside = add(made, "td");
  made.className = "detail";
  inside.colSpan = row.cells.length;
  const ratios = arm.n === shown.base ? [] : ["total", ...shown.family.phases].map(phase => [phase, ratioOf(arm.n, shown.base, phase)]).filter(([, three]) => three);
  if (ratios.length) add(inside, "p", `Over ${shown.family.arms[shown.base].name}: ${ratios.map(([phase, three]) => `${phase} ${spread(three, " ×")}`).join(", ")}.`);
  if (arm.said) add(inside, "p", `Over its reference: ${arm.said}`);
  for (const claim of arm.claims ?? []) {
    const quote = add(inside, "p");
    quote.append(`Published: ${claim.said} ${claim.what}, “${claim.wording}” (${claim.source})${claim.differs ? `; against another baseline: ${claim.differs}` : ""}.`);
  }
  const body = add(add(inside, "table"), "tbody");
  for (const [name, fact] of Object.entries(arm.facts)) {
    const tr = add(body, "tr");
    add(tr, "th", name).scope = "row";
    const td = add(tr, "td");
    if (typeof fact !== "string") factTable(td, fact);
    else if (name === "measure it again") add(td, "code", fact);
    else td.textContent = fact;
  }
  if (arm.log) add(inside, "pre", arm.log, "log");
  row.after(made);
};
const toggleRow = n => {
  opened.has(n) ? opened.delete(n) : opened.add(n);
  drawTable();
  $(`tr[data-arm="${n}"] button.open`)?.focus();
};
const fillFilters = () => {
  const form = $("#results form"), options = (select, values) => select.replaceChildren(new Option("all", ""), ...values.map(value => new Option(value, value)));
  options(form.status, [...new Set(shown.family.arms.map(arm => arm.status))]);
  options(form.toggle, [...new Set(shown.family.arms.flatMap(arm => arm.toggles))].sort());
};
