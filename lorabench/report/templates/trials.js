// Two arms, trial by trial: noise, drift and pairing can be seen. The first is the baseline unless another is picked.
const picks = { first: null, second: null, phase: "total" };
// Before there were rounds every stack had a reference of its own, whose trials stand beside it.
const trialsOf = (arm, other) => (shown.family.arms[arm].role === "reference" && shown.family.arms[other].beside) || shown.family.arms[arm].trials;
const turnsOf = (arm, other, phase) => trialsOf(arm, other).flatMap((session, s) => (session.ms[phase] ?? []).map((ms, n) => ({ ms, session: s, round: session.rounds[n], seat: session.seats[n], name: session.session })));
const timedArms = () => armsWith(arm => arm.trials.length);
const chooseTrials = () => {
  const arms = timedArms(), best = shown.family.opening.best, form = $("#trials form");
  if (!arms.some(arm => arm.n === picks.first)) picks.first = arms.some(arm => arm.n === shown.base) ? shown.base : arms[0]?.n;
  if (!arms.some(arm => arm.n === picks.second) || picks.second === picks.first) picks.second = [best, ...arms.map(arm => arm.n)].find(n => n !== null && n !== picks.first);
  for (const name of ["first", "second"]) {
    form[name].replaceChildren(...arms.map(arm => new Option(arm.name, arm.n)));
    form[name].value = picks[name];
  }
  const phases = ["total", ...shown.family.phases];
  if (!phases.includes(picks.phase)) picks.phase = "total";
  form.phase.replaceChildren(...phases.map(phase => new Option(phase, phase)));
  form.phase.value = picks.phase;
};
const drawTrials = () => {
  $("#trials").hidden = timedArms().length < 2;
  if ($("#trials").hidden) return;
  chooseTrials();
  const looks = [[picks.first, "phase5", "circle"], [picks.second, "phase1", "triangle"]], { arms } = shown.family;
  const both = [[picks.first, picks.second], [picks.second, picks.first]];
  const sessions = [...new Set(both.flatMap(([arm, other]) => trialsOf(arm, other).map(t => t.session)))];
  const together = both.map(([arm, other]) => turnsOf(arm, other, picks.phase));
  const longest = Math.max(...together.flat().map(t => t.round), 0) + 3;
  const at = turn => sessions.indexOf(turn.name) * longest + turn.round + 1;
  const shared = together[0].flatMap(a => together[1].filter(b => b.name === a.name && b.round === a.round).map(b => ({ x: at(a), ratio: a.ms / b.ms, a, b })));
  // Two arms that never shared a round are still shown, each by its own: older folders have a reference for every row.
  const place = $("#trials .chart"), said = (arm, t) => `${arms[arm].name}\nround ${t.round + 1}, process ${t.seat}: ${number(t.ms, 4)} ms`;
  const x = { label: sessions.length > 1 ? "round, session after session" : "round", labelArrow: "none", labelAnchor: "right", tickFormat: tick => (Number.isInteger(tick) ? String(tick) : "") };
  const points = looks.flatMap(([arm, look, symbol], n) => together[n].map(t => ({ x: at(t), y: t.ms, look, symbol, told: said(arm, t), session: t.name })));
  const drawing = Plot.plot({
    ...common(place), height: 260, marginLeft: 52, marginBottom: 38, marginTop: 28, x, y: { label: `${picks.phase}, ms`, labelArrow: "none", nice: true, grid: false },
    marks: [
      ...looks.flatMap(([arm, look, symbol]) => {
        const own = points.filter(p => p.look === look);
        return [Plot.line(own, { x: "x", y: "y", z: "session", stroke: `var(--${look})`, strokeOpacity: .45, sort: "x" }), Plot.dot(own, { x: "x", y: "y", r: 3.5, symbol, fill: `var(--${look})` })];
      }),
      Plot.tip(points, Plot.pointer({ ...TIP, x: "x", y: "y", title: "told" })),
    ],
  });
  const range = own => `${number(Math.min(...own.map(t => t.ms)), 4)} to ${number(Math.max(...own.map(t => t.ms)), 4)} ms in ${own.length} rounds`;
  put(place, drawing, `${picks.phase} of ${looks.map(([arm], n) => `${arms[arm].name}, ${range(together[n])}`).join(", and of ")}`, "img");
  legend($("#trials .legend"), looks.map(([arm, look, symbol]) => [look, arms[arm].name, symbol === "circle" ? "●" : "▲"]));
  const below = $("#trials .ratio"), ratio = ratioOf(picks.second, picks.first, picks.phase);
  below.hidden = !shared.length || !ratio;
  if (!below.hidden) {
    put(below, Plot.plot({
      ...common(below), height: 170, marginLeft: 52, marginBottom: 38, marginTop: 28, x, y: { label: "first / second in the same round", labelArrow: "none", nice: true },
      marks: [
        Plot.rect([ratio], { y1: r => r[1], y2: r => r[2], fill: "var(--phase1)", fillOpacity: .18 }), Plot.ruleY([ratio[0]], { stroke: "var(--phase1)", strokeWidth: 2 }),
        Plot.ruleY([1], { stroke: "var(--soft)", strokeDasharray: "3 3" }), Plot.dot(shared, { x: "x", y: "ratio", r: 3, fill: "var(--ink)" }),
        Plot.tip(shared, Plot.pointer({ ...TIP, x: "x", y: "ratio", title: p => `round ${p.a.round + 1}: ${number(p.a.ms, 4)} / ${number(p.b.ms, 4)} ms = ${number(p.ratio, 4)}` })),
      ],
    }), `ratio of the two by round, ${spread(ratio)}`, "img");
  }
  const table = $("#trials .wide"), process = t => (sessions.length > 1 ? `${t.seat} of ${t.name}` : t.seat);
  table.replaceChildren();
  factTable(table, [["round", "process", "stack", "ms"], ...looks.flatMap(([arm], n) => together[n].map(t => [t.round + 1, process(t), arms[arm].name, number(t.ms, 4)])).sort((a, b) => String(a[1]).localeCompare(b[1]) || a[0] - b[0])]);
  const how = met[howOf(picks.second, picks.first)] ?? "";
  $("#trials .lead").textContent = shared.length ? `${shared.length} rounds in common, ${how}. ` + (ratio ? `The ratio is ${spread(ratio)}: the line, with its interval as a band.` : "") :
    `These two have no round in common${ratio ? `, ${how}; their ratio is ${spread(ratio)}` : ""}.`;
};
