"use strict";
// Sorts and filters the table of cells, and opens its rows. No text of a record ever becomes markup: all of it is set as
// textContent.
(() => {
  const cells = JSON.parse(document.getElementById("cells").textContent);
  const rows = [...document.querySelectorAll("tr[data-cell]")];
  const rowOf = new Map(rows.map(row => [row.dataset.cell, row]));
  const charts = new WeakMap();

  const add = (parent, name, text) => {
    const made = parent.appendChild(document.createElement(name));
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const table = (parent, lines) => {
    const body = add(add(parent, "table"), "tbody");
    lines.forEach((line, i) => {
      const tr = add(body, "tr");
      line.forEach(text => add(tr, i ? "td" : "th", text));
    });
  };

  // -- one row, opened ------------------------------------------------------------------------------------------------

  const isOpen = row => row.nextElementSibling?.className === "detail";

  // A chart of one phase: every trial of both arms, the sessions one after the other.
  const draw = (place, trials, phase) => {
    const reference = trials.flatMap(t => t.phases[phase]?.[0] ?? []);
    const candidate = trials.flatMap(t => t.phases[phase]?.[1] ?? []);
    const rounds = Array.from({ length: Math.max(reference.length, candidate.length) }, (_, i) => i + 1);
    const at = (values, i) => values[i] ?? null;
    const colour = getComputedStyle(place).color;
    const axis = { stroke: colour, grid: { stroke: "#88888833" }, ticks: { stroke: "#88888833" } };
    const arm = (label, stroke) => ({ label, stroke, width: 1, points: { show: true, size: 6, fill: stroke } });
    return new uPlot({
      width: Math.max(260, Math.min(760, place.clientWidth - 16)), height: 220,
      scales: { x: { time: false } },
      axes: [{ ...axis, label: "trial", incrs: [1, 2, 5, 10, 20, 50, 100] }, { ...axis, label: "ms", size: 64 }],
      series: [
        { label: "trial" },
        arm("reference", "#888888"),
        arm("candidate", "#2E9BE6"),
      ],
    }, [rounds, rounds.map((_, i) => at(reference, i)), rounds.map((_, i) => at(candidate, i))], place);
  };

  const showTrials = (parent, cell) => {
    const phases = [...new Set(cell.trials.flatMap(t => Object.keys(t.phases)))];
    if (!phases.length) return null;
    const label = add(parent, "label", "trials of the phase ");
    const choice = add(label, "select");
    phases.forEach(name => add(choice, "option", name));
    choice.value = phases.includes("total") ? "total" : phases[0];
    const place = add(parent, "div");
    place.className = "trials";
    let chart = null;
    const again = () => { chart?.destroy(); chart = draw(place, cell.trials, choice.value); };
    choice.addEventListener("change", again);
    const numbers = add(parent, "details");
    add(numbers, "summary", "every trial, ms");
    cell.trials.forEach(t => {
      add(numbers, "p", "session " + t.session);
      const lines = Object.entries(t.phases).flatMap(([phase, arms]) =>
        ["reference", "candidate"].map((arm, i) => [phase + ", " + arm, arms[i].join("  ")]));
      table(numbers, [["phase, arm", "ms"], ...lines]);
    });
    return { again, destroy: () => chart?.destroy() };
  };

  const open = row => {
    const cell = cells[row.dataset.cell];
    const made = document.createElement("tr");
    made.className = "detail";
    const inside = add(made, "td");
    inside.colSpan = row.cells.length;
    const trials = showTrials(inside, cell);
    const body = add(add(inside, "table"), "tbody");
    for (const [name, fact] of Object.entries(cell.facts)) {
      const tr = add(body, "tr");
      add(tr, "th", name);
      const td = add(tr, "td");
      if (typeof fact !== "string") table(td, fact);
      else if (name === "measure it again") add(td, "code", fact);
      else td.textContent = fact;
    }
    if (cell.log) add(inside, "pre", cell.log);
    row.after(made);
    row.querySelector("button").setAttribute("aria-expanded", "true");
    trials?.again(); // once it has a width
    if (trials) charts.set(row, trials);
  };
  const close = row => {
    if (!isOpen(row)) return;
    charts.get(row)?.destroy();
    row.nextElementSibling.remove();
    row.querySelector("button").setAttribute("aria-expanded", "false");
  };
  const toggle = row => (isOpen(row) ? close(row) : open(row));

  const reveal = number => {
    const row = rowOf.get(number);
    if (row.hidden) clear();
    if (!isOpen(row)) open(row);
    row.scrollIntoView({ block: "start" });
    row.querySelector("button").focus({ preventScroll: true });
  };

  rows.forEach(row => {
    const name = row.cells[0], button = document.createElement("button");
    button.type = "button";
    button.setAttribute("aria-expanded", "false");
    button.append(...name.childNodes);
    name.append(button);
    button.addEventListener("click", () => toggle(row));
    button.addEventListener("keydown", event => {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (!step) return;
      const shown = [...document.querySelectorAll("tr[data-cell]:not([hidden])")];
      const next = shown[shown.indexOf(row) + step];
      if (next) { event.preventDefault(); next.querySelector("button").focus(); }
    });
  });
  document.querySelectorAll("a[data-opens]").forEach(link => link.addEventListener("click", event => {
    event.preventDefault();
    reveal(link.dataset.opens);
  }));
  document.querySelectorAll("svg [data-cell]").forEach(mark => mark.addEventListener("click", () => reveal(mark.dataset.cell)));

  // -- a group over one of its rows: ratios that were computed with the records ------------------------------------------

  const chosen = new Map(); // of a group's body, the row that it is shown over
  const show = (cell, text) => {
    cell.before_ ??= [cell.textContent, cell.dataset.value];
    const [words, number] = text === null ? cell.before_ : [text, String(parseFloat(text))];
    cell.textContent = words;
    if (number === undefined || number === "NaN") delete cell.dataset.value; else cell.dataset.value = number;
  };
  const over = (body, row) => {
    const base = row && chosen.get(body) !== row ? row : null;
    base ? chosen.set(body, base) : chosen.delete(body);
    const heads = [...body.closest("table").tHead.rows[0].cells];
    for (const line of [...body.rows].filter(line => line.dataset.cell)) {
      line.querySelector("button.over")?.setAttribute("aria-pressed", String(line === base));
      const ratio = line === base ? "1" : base ? cells[base.dataset.cell].over[line.dataset.cell] ?? "" : "";
      heads.forEach((head, i) => {
        const name = head.textContent, whole = name === "total × [95 %]"; // what else is over the reference is not shown
        if (whole || name === "verdict" || name.endsWith(" ×")) show(line.cells[i], base ? (whole ? ratio : "") : null);
      });
    }
    const title = body.rows[0].cells[0];
    title.before_ ??= title.textContent;
    title.textContent = title.before_ + (base ? ", over " + cells[base.dataset.cell].title : "");
  };
  rows.filter(row => Object.keys(cells[row.dataset.cell].over).length).forEach(row => {
    const button = add(row.cells[0], "button", "÷");
    button.type = "button";
    button.className = "over";
    button.title = "show this group over this row";
    button.setAttribute("aria-pressed", "false");
    button.addEventListener("click", () => over(row.closest("tbody"), row));
  });

  // -- sorting: each group by itself, for rows of two groups do not compare ---------------------------------------------

  const original = new Map(rows.map((row, i) => [row, i]));
  const value = (row, column) => {
    const cell = row.cells[column], text = cell.textContent.trim();
    return cell.dataset.value === undefined ? (text || null) : Number(cell.dataset.value);
  };
  const order = (x, y) => (typeof x === typeof y ? (x < y ? -1 : x > y ? 1 : 0) : typeof x === "number" ? -1 : 1);
  const sort = (heading, direction) => {
    const own = heading.closest("table"), column = heading.cellIndex, sign = direction === "descending" ? -1 : 1;
    const numeric = [...own.querySelectorAll("tr[data-cell]")].some(row => row.cells[column].dataset.value !== undefined);
    // Where a column is of numbers, words (an interval without a ratio) stand with what has none: below, either way.
    const key = row => { const v = value(row, column); return numeric && typeof v !== "number" ? null : v; };
    for (const body of own.tBodies) {
      const lines = [...body.rows].filter(row => row.dataset.cell);
      lines.forEach(close);
      lines.sort((a, b) => {
        if (direction === "none") return original.get(a) - original.get(b);
        const x = key(a), y = key(b);
        if (x === null || y === null) return (x === null) - (y === null);
        return sign * order(x, y);
      }).forEach(row => body.append(row));
    }
    own.querySelectorAll("th[aria-sort]").forEach(th => th.setAttribute("aria-sort", th === heading ? direction : "none"));
  };
  document.querySelectorAll("table.results thead th").forEach(heading => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    heading.setAttribute("aria-sort", "none");
    const next = { none: "ascending", ascending: "descending", descending: "none" };
    button.addEventListener("click", () => sort(heading, next[heading.getAttribute("aria-sort")]));
  });

  // -- filtering --------------------------------------------------------------------------------------------------------

  const form = document.querySelector(".filters");
  const filters = form ? [...form.querySelectorAll("select")] : [];
  const has = {
    model: (cell, wanted) => cell.model === wanted,
    workload: (cell, wanted) => cell.workload === wanted,
    status: (cell, wanted) => cell.status === wanted,
    toggle: (cell, wanted) => cell.toggles.includes(wanted),
  };
  const filter = () => {
    const wanted = filters.filter(select => select.selectedIndex > 0);
    let shown = 0;
    rows.forEach(row => {
      const fits = wanted.every(select => has[select.name](cells[row.dataset.cell], select.value));
      if (!fits) close(row);
      row.hidden = !fits;
      shown += fits;
    });
    document.querySelectorAll("table.results tbody").forEach(body => {
      body.hidden = ![...body.rows].some(row => row.dataset.cell && !row.hidden);
    });
    document.querySelectorAll("svg [data-cell]").forEach(mark =>
      mark.classList.toggle("off", rowOf.get(mark.dataset.cell).hidden));
    form.querySelector("output").textContent = shown + " of " + rows.length + " rows";
  };
  const clear = () => { filters.forEach(select => { select.selectedIndex = 0; }); filter(); };
  if (form) {
    form.hidden = false;
    filters.forEach(select => select.addEventListener("change", filter));
    form.querySelector("button").addEventListener("click", clear);
    filter();
  }
})();
