// The ladder as a waterfall: from the start, rung by rung, to the end.
const drawLadder = () => {
  const { ladder } = shown.family, place = $("#ladder .chart");
  $("#ladder").hidden = !ladder.length;
  if (!ladder.length) return;
  const timed = ladder.filter(rung => rung.applied), start = timed.at(-1).start, end = timed.at(-1).after;
  let level = timed[0].before;
  const rows = [{ id: -1, name: "start", note: `${number(start, 4)} ms`, parts: [{ className: "failed", from: 0, to: start }], at: start }];
  ladder.forEach((rung, n) => {
    if (!rung.applied) { rows.push({ id: n, name: rung.name, note: rung.status.replace("_", " "), faint: true }); return; }
    const [low, high] = [Math.min(level, rung.after), Math.max(level, rung.after)];
    const className = !rung.clear && !/^(faster|slower)/.test(rung.said) ? "unclear" : rung.after < level ? "faster" : "slower";
    rows.push({ id: n, name: `+ ${rung.name}`, note: `${rung.after < level ? "−" : "+"}${number(high - low)} ms${narrow(place) ? "" : " · " + rung.said.replace(", unpaired", "")}`, told: `${rung.said} times as fast as what was there before`, parts: [{ className, from: low, to: high }], ends: [rung.low, rung.high], at: high });
    level = rung.after;
  });
  rows.push({ id: ladder.length, name: "end", note: `${number(end, 4)} ms`, parts: [{ className: "failed", from: 0, to: end }], at: end });
  bars(place, rows, { axis: "ms, less is better", label: `the ladder, ${timed.length} rungs from ${number(start)} to ${number(end)} ms`, tip: row => [row.name, row.note, row.told].filter(Boolean).join("\n") });
  legend($("#ladder .legend"), [["faster", "saves"], ["slower", "costs"], ["unclear", "unclear"], ["baseline", "95 % interval", "line"]]);
  $("#ladder .lead").textContent = "Each rung keeps the ones above it. Behind a rung stands how many times as fast it made what was there before." + (ladder.some(rung => rung.said.includes("unpaired")) ? " These rungs shared no rounds: the ratio is that of their own times." : "");
};
