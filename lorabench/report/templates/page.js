// Puts it together: what is chosen at the top, and what a choice draws anew. The address keeps the choice.
const drawAll = () => { drawRace(); drawTradeoff(); drawLadder(); drawTrials(); drawTable(); };
const remember = () => {
  const said = new URLSearchParams({ of: families.indexOf(shown.family), base: shown.base, unit: shown.unit });
  history.replaceState(null, "", `#${said}`);
};
const rebase = (n, place) => {
  shown.base = n;
  picks.first = n;
  $("#baseline").value = n;
  drawAll();
  remember();
  say(`The baseline is now ${shown.family.arms[n].name}.`);
  if (place === "#results") $(`tr[data-arm="${n}"] button.open`)?.focus();
  else if (place) $(`${place} [role="button"][aria-pressed="true"]`)?.focus();
};
const drawUnits = () => {
  const there = unitsThere(), set = $("#units");
  if (!there.includes(shown.unit)) shown.unit = there[0] ?? "ms";
  set.querySelectorAll("label").forEach(label => label.remove());
  for (const name of there) {
    const label = add(set, "label"), input = add(label, "input");
    Object.assign(input, { type: "radio", name: "unit", value: name, checked: name === shown.unit });
    add(label, "span", units[name].label);
    input.addEventListener("change", () => { shown.unit = name; drawRace(); drawTradeoff(); remember(); say(`The race is now of ${units[name].label}.`); });
  }
};
const showFamily = (n, base) => {
  const family = families[n] ?? families[0], { opening } = family;
  const timed = family.arms.map((arm, i) => (arm.ms.total && arm.role !== "least" ? i : -1)).filter(i => i >= 0);
  shown.family = family;
  shown.base = timed.includes(base) ? base : timed[0] ?? 0;
  Object.assign(picks, { first: null, second: null });
  opened.clear();
  $("#family").value = families.indexOf(family);
  $("#baseline").replaceChildren(...timed.map(i => new Option(family.arms[i].name, i)));
  $("#baseline").value = shown.base;
  $("#answer").textContent = opening.sentence;
  $("#doubts").textContent = opening.doubts.join(" ");
  const settings = $("#settings"), place = $("#settings div");
  settings.hidden = !opening.code.length;
  place.replaceChildren();
  for (const [title, , text] of opening.code) {
    add(place, "h2", title);
    const pre = add(place, "pre", text);
    Object.assign(pre, { tabIndex: 0, role: "group", ariaLabel: title });
    if (!navigator.clipboard) continue; // an old browser: the text can still be selected
    const copy = add(place, "button", "copy");
    add(copy, "span", ` ${title}`, "unseen");
    copy.type = "button";
    copy.addEventListener("click", async () => { await navigator.clipboard.writeText(text); copy.firstChild.data = "copied"; say(`Copied: ${title}.`); });
  }
  drawUnits();
  fillFilters();
  drawAll();
};
const drawPlaces = () => families.forEach((family, n) => {
  const body = $("#places tbody"), best = family.arms[family.opening.best], row = body && add(body, "tr");
  if (!row) return;
  const button = add(add(row, "th"), "button", family.title);
  row.cells[0].scope = "row";
  button.type = "button";
  button.addEventListener("click", () => { showFamily(n); remember(); say($("#answer").textContent); scrollTo({ top: 0 }); $("#family").focus(); });
  const ratio = best && family.ratios.total[0][family.opening.best - 1];
  for (const text of [best?.name ?? "none is clearly faster", best ? number(best.ms.total[0], 4) : "", ratio && !bare(family.verdicts[0][family.opening.best]) ? number(ratio[0]) : ratio ? `${number(ratio[1])} to ${number(ratio[2])}` : "", number(best?.peak)]) add(row, "td", text);
});
if (families.length) {
  $("#controls").hidden = $("#drawn").hidden = $(".skip").hidden = false;
  $("#family").addEventListener("change", event => { showFamily(Number(event.target.value)); remember(); say($("#answer").textContent); });
  $("#baseline").addEventListener("change", event => rebase(Number(event.target.value)));
  for (const name of ["first", "second"]) $("#trials form")[name].addEventListener("change", event => { picks[name] = Number(event.target.value); drawTrials(); say($("#trials .lead").textContent); });
  $("#trials form").phase.addEventListener("change", event => { picks.phase = event.target.value; drawTrials(); say($("#trials .lead").textContent); });
  $("#more").addEventListener("change", event => $(".results").classList.toggle("whole", event.target.checked));
  const filters = $("#results form");
  [filters.status, filters.toggle].forEach(select => select.addEventListener("change", drawTable));
  filters.addEventListener("reset", event => { event.preventDefault(); filters.status.value = filters.toggle.value = ""; drawTable(); });
  document.querySelectorAll("form").forEach(form => form.addEventListener("submit", event => event.preventDefault()));
  $(".results tbody").addEventListener("keydown", event => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key], buttons = [...document.querySelectorAll(".results button.open")];
    const next = step && buttons[buttons.indexOf(document.activeElement) + step];
    if (next) { event.preventDefault(); next.focus(); }
  });
  // Escape closes what is open where one is: a tip, a row, some details.
  document.addEventListener("keydown", event => {
    if (event.key !== "Escape") return;
    document.querySelectorAll(".chart svg").forEach(svg => hover(svg, "pointerleave"));
    const row = event.target.closest(".results tbody tr"), details = event.target.closest("details[open]");
    const n = Number((row?.matches(".detail") ? row.previousSibling : row)?.dataset.arm);
    if (row && opened.has(n)) toggleRow(n);
    else if (details) { details.open = false; $("summary", details).focus(); }
  });
  const kept = new URLSearchParams(location.hash.slice(1));
  if (kept.get("unit") in units) shown.unit = kept.get("unit");
  showFamily(Number(kept.get("of") ?? 0), Number(kept.get("base") ?? 0));
  drawPlaces();
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; drawAll(); } });
  for (const [event, px] of [["beforeprint", 760], ["afterprint", 0]]) addEventListener(event, () => { paper = px; drawAll(); });
}
