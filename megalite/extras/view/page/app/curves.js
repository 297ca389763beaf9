// Curves of all runs over each other, with events on them.

const USUAL = ["loss", "grad_norm", "lr", "tokens_per_s", "memory_gib", "data_wait_s"];
// Charts of tasks that are shown at once; the list has the others.
const MOST_TASKS = 6;
const UNITS_OF = { tokens_per_s: "tokens/s", memory_gib: "GiB", data_wait_s: "s", step_time_s: "s", tflops_per_gpu: "TFLOP/s" };
// Letters on the lines of events: never by color alone.
const EVENTS = {
  save: "S", save_model: "M", eval: "E", eval_tasks: "T", resume: "R", start: "0", recovery: "!", spike: "^", rewind: "<", straggler: "s",
  resize: "N", replay: "r", nonfinite: "×", batch_size: "B",
};
const MARKED = ["save", "resume", "recovery", "spike", "rewind", "straggler", "resize", "replay", "nonfinite", "batch_size"];

// Columns of a run, decoded once.
function columnsOf(run) {
  const curves = run.curves;
  if (run.columns) return run.columns;
  const columns = new Map();
  for (const [name, { wide, data }] of Object.entries(curves.series)) {
    columns.set(name, Array.from(decode(data, wide), (x) => (Number.isFinite(x) ? x : null)));
  }
  run.columns = { steps: Array.from(decode(curves.x, true)), columns };
  return run.columns;
}

// Where point i stands: its step, tokens so far, or hours since the first line that tells its time.
function placeAt(run, axis, i) {
  const { steps, columns } = columnsOf(run);
  if (axis === "tokens" && columns.has("consumed_tokens")) return columns.get("consumed_tokens")[i];
  if (axis !== "time" || !columns.has("time")) return steps[i];
  const times = columns.get("time");
  run.began ??= times.find((s) => s !== null);
  return times[i] === null ? null : (times[i] - run.began) / 3600;
}

const places = (run, axis) => columnsOf(run).steps.map((_, i) => placeAt(run, axis, i));

// The step's place on the axis, by the nearest point before it.
function placeOf(run, step, axis) {
  const { steps } = columnsOf(run);
  return axis === "step" ? step : placeAt(run, axis, lastWhere(steps.length, (i) => steps[i] <= step));
}

// Points whose place is known and rises; uPlot needs both.
function rising(xs, ys) {
  const keptX = [];
  const keptY = [];
  for (let i = 0; i < xs.length; i += 1) {
    if (xs[i] !== null && (!keptX.length || xs[i] > keptX[keptX.length - 1])) {
      keptX.push(xs[i]);
      keptY.push(ys[i]);
    }
  }
  return [keptX, keptY];
}

// Events of a run, and the steps at which its batch size changed.
function eventsOf(run) {
  if (run.allEvents) return run.allEvents;
  const events = run.curves.events.filter((e) => typeof e.step === "number").slice();
  const sizes = columnsOf(run).columns.get("global_batch_size") || [];
  sizes.forEach((size, i) => {
    if (i && size !== sizes[i - 1]) events.push({ event: "batch_size", step: columnsOf(run).steps[i], from: sizes[i - 1], to: size });
  });
  run.allEvents = events.sort((a, b) => a.step - b.step);
  return run.allEvents;
}

// Where the events of a run stand on an axis, in order.
function placedEvents(run, axis) {
  if (!run.placed || run.placed.axis !== axis || run.placed.events !== eventsOf(run)) {
    const all = eventsOf(run).map((event) => ({ event, place: placeOf(run, event.step, axis) }));
    run.placed = { axis, events: eventsOf(run), all: all.filter(({ place }) => place !== null).sort((a, b) => a.place - b.place) };
  }
  return run.placed.all;
}

// Points of an evaluation: [step, value], the last of each step. Those of eval have the names of a step's, as the loss;
// those of tasks are task/metric.
function evaluations(run, name) {
  const told = run.curves.events.filter((e) => ["eval", "eval_tasks"].includes(e.event) && typeof e[name] === "number" && typeof e.step === "number");
  return [...new Map(told.map((e) => [e.step, e[name]]))].sort((a, b) => a[0] - b[0]);
}

// Metrics of tasks, without their standard errors.
function metricsOfTasks(runs) {
  const told = runs.flatMap((run) => run.curves.events.filter((e) => e.event === "eval_tasks"));
  return [...new Set(told.flatMap(Object.keys))].filter((name) => name.includes("/") && !name.includes("_stderr")).sort();
}

function curvesView(state) {
  const runs = state.data.runs.filter((run) => isThere(run.curves) && run.curves.points > 0);
  if (!runs.length) {
    state.refresh = state.reopen;
    return [missing(state.data.runs[0].curves)];
  }
  const names = new Set(runs.flatMap((run) => [...columnsOf(run).columns.keys()]));
  const tasks = metricsOfTasks(runs);
  const others = [...names].filter((name) => !USUAL.includes(name) && !["time", "consumed_tokens"].includes(name)).sort();
  others.push(...tasks.slice(MOST_TASKS));
  const shown = [...USUAL.filter((name) => names.has(name)), ...tasks.slice(0, MOST_TASKS)];
  const marked = new Set(MARKED);
  const board = el("div", { class: "charts" });
  const settings = { axis: "step", log: false, marked, charts: [], board };
  const draw = () => {
    settings.charts.forEach((chart) => chart.plot.destroy());
    settings.charts = [];
    board.replaceChildren();
    for (const name of shown) board.append(chartOf(name, runs, settings));
  };
  state.refresh = () => {
    // The same curves, longer; a run that got its first evaluation has one more, and its tasks have charts.
    const more = metricsOfTasks(runs).filter((name) => !tasks.includes(name));
    tasks.push(...more);
    shown.push(...more);
    if (more.length || !settings.charts.every((chart) => prolong(chart, runs, settings.axis))) draw();
  };
  state.drawn.curves = () => settings.charts.map(describeChart);
  const axes = [["step", t("step")], ["tokens", t("tokens")], ["time", t("time of day, hours")]];
  const kinds = MARKED.filter((kind) => runs.some((run) => eventsOf(run).some((e) => e.event === kind)));
  const controls = el("div", { class: "controls" },
    choice(t("Axis"), axes, "step", (value) => { settings.axis = value; draw(); }),
    choice(t("Another curve"), [["", "–"], ...others.map((n) => [n, n])], "", (value) => {
      if (value && !shown.includes(value)) { shown.push(value); draw(); }
    }),
    tick(t("logarithmic"), false, (on) => { settings.log = on; draw(); }),
    kinds.map((kind) => tick(`${EVENTS[kind]} ${kind}`, true, (on) => {
      if (on) marked.add(kind); else marked.delete(kind);
      settings.charts.forEach((chart) => chart.plot.redraw());
    })),
    button(t("Whole run"), () => settings.charts.forEach((chart) => zoomTo(chart.plot, null, null))));
  requestAnimationFrame(draw);
  return [
    note(t("Drag to zoom. With a chart in focus: arrows move, + and − zoom, 0 shows all.")),
    controls, board, ...runs.map(cutNote), eventTable(runs), lastTable(runs),
  ];
}

function tick(label, on, onchange) {
  const box = el("input", { type: "checkbox", checked: on, onchange: () => onchange(box.checked) });
  return el("label", { class: "tick" }, box, " " + label);
}

function cutNote(run) {
  const { per_bucket: per, steps, broken, events_left_out: left, fields_left_out: fields } = run.curves;
  const parts = [];
  if (per > 1) parts.push(t("{n} steps: of each {per} the first, lowest, highest and last are drawn; the newest in full.", { n: whole(steps), per }));
  if (broken) parts.push(t("{n} lines of metrics.jsonl are broken and left out.", { n: whole(broken) }));
  if (fields) parts.push(t("It has too many fields, or such with long names: not all have a curve."));
  if (left) parts.push(t("{n} older or very long events are left out.", { n: whole(left) }));
  return parts.length ? note(foreign(run.name), ": ", parts.join(" ")) : null;
}

// Data of one chart: the x of all runs together, and a series for each run; evaluations beside the loss.
function chartData(name, runs, axis) {
  const tables = [];
  const series = [];
  runs.forEach((run, i) => {
    const ys = columnsOf(run).columns.get(name);
    if (ys) {
      tables.push(rising(places(run, axis), ys));
      series.push({ run, i, evaluation: false });
    }
    const points = evaluations(run, name);
    if (!points.length) return;
    tables.push(rising(points.map(([step]) => placeOf(run, step, axis)), points.map(([, value]) => value)));
    series.push({ run, i, evaluation: true });
  });
  return { data: tables.length === 1 ? tables[0] : uPlot.join(tables), series };
}

function chartOf(name, runs, settings) {
  const { data, series } = chartData(name, runs, settings.axis);
  const unit = UNITS_OF[name] ? `, ${UNITS_OF[name]}` : "";
  const box = el("div", { class: "chart", tabindex: "0", role: "group", "aria-label": safe(name) });
  const legend = el("p", { class: "legend" });
  const holder = el("div", {});
  const frame = el("figure", {}, el("figcaption", {}, foreign(name), unit), legend, box);
  box.append(holder);
  const plot = new uPlot(options(name, runs, series, settings), data, holder);
  const chart = { name, plot, series, legend, box };
  settings.charts.push(chart);
  const show = () => showValues(chart);
  plot.hooks.setCursor = [show];
  show();
  box.addEventListener("keydown", (event) => chartKey(event, chart, settings));
  watchSize(box, () => {
    plot.setSize({ width: box.clientWidth, height: 220 });
    plot.redraw();
  });
  frame.append(el("p", { class: "small" },
    button(t("Picture"), () => plot.ctx.canvas.toBlob((blob) => download(`${name}.png`, blob))), " ",
    button("CSV", () => download(`${name}.csv`, new Blob([csv(chart, settings.axis)], { type: "text/csv" })))));
  return frame;
}

// Give a chart its new points; what was zoomed stays. False if it has other curves now.
function prolong({ name, plot, series }, runs, axis) {
  const old = plot.data[0];
  const { min, max } = plot.scales.x;
  const isWhole = old.length < 2 || (min <= old[0] && max >= old[old.length - 1]);
  const next = chartData(name, runs, axis);
  if (next.series.length !== series.length) return false;
  plot.setData(next.data, isWhole);
  if (isWhole) zoomTo(plot, null, null);
  return true;
}

function options(name, runs, series, settings) {
  const ink = () => color("ink");
  const grid = { stroke: () => color("line"), width: 1 };
  return {
    width: 300, height: 220, legend: { show: false },
    cursor: { sync: { key: "runs" }, drag: { x: true, y: false } },
    scales: { x: { time: false }, y: { distr: settings.log ? 3 : 1 } },
    axes: [
      { stroke: ink, grid, size: 30, values: (u, ticks) => ticks.map(number) },
      { stroke: ink, grid, size: 64, values: (u, ticks) => ticks.map((x) => (x === null ? "" : number(x))) },
    ],
    series: [{}, ...series.map(({ i, evaluation }) => ({
      stroke: () => runColor(i),
      ...lineOf(i, evaluation),
      spanGaps: evaluation || runs.length > 1,
      // A line needs two points.
      points: { show: (u, k) => u.data[0].length === 1 || (evaluation && !isDense(u, k)), size: 7, fill: () => color("page") },
    }))],
    hooks: { drawClear: [(u) => thinOut(u, series)], draw: [(u) => drawEvents(u, runs, settings)] },
  };
}

const lineOf = (i, evaluation) => ({ width: evaluation ? 2 : 1.4, dash: evaluation ? [2, 3] : i ? [8, 3] : undefined });

// Whether a curve has more points in view than its picture has columns.
function isDense(u, k) {
  const [first, last] = u.series[0].idxs;
  let left = u.bbox.width / devicePixelRatio;
  for (let i = first; i <= last && left >= 0; i += 1) if (u.data[k][i] !== null && u.data[k][i] !== undefined) left -= 1;
  return left < 0;
}

// A dense curve is a hairline, which a browser draws several times faster than a wider or dashed line that crosses itself so often.
function thinOut(u, series) {
  series.forEach(({ i, evaluation }, k) => {
    Object.assign(u.series[k + 1], isDense(u, k + 1) ? { width: 1 / devicePixelRatio, dash: undefined } : lineOf(i, evaluation));
  });
}

// Pixels between lines, and between letters; what would lie closer is left out, and the table below has all.
const LINE_GAP = 3;
const LETTER_GAP = 9;

function drawEvents(u, runs, settings) {
  const { ctx, bbox } = u;
  const { min, max } = u.scales.x;
  let letter = -Infinity;
  ctx.save();
  ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
  ctx.fillStyle = color("ink");
  ctx.setLineDash([2, 4]);
  runs.forEach((run, i) => {
    let line = -Infinity;
    ctx.beginPath();
    for (const { event, place } of placedEvents(run, settings.axis)) {
      if (place < min || place > max || !settings.marked.has(event.event)) continue;
      const at = Math.round(u.valToPos(place, "x", true)) + 0.5;
      if (at - line >= LINE_GAP * devicePixelRatio) {
        ctx.moveTo(at, bbox.top);
        ctx.lineTo(at, bbox.top + bbox.height);
        line = at;
      }
      if (at - letter > LETTER_GAP * devicePixelRatio) {
        ctx.fillText(EVENTS[event.event] || "•", at + 2, bbox.top + 10 * devicePixelRatio);
        letter = at;
      }
    }
    ctx.strokeStyle = runColor(i);
    ctx.globalAlpha = 0.45;
    ctx.stroke();
    ctx.globalAlpha = 1;
  });
  ctx.restore();
}

function showValues({ plot, series, legend }) {
  const at = plot.cursor.idx;
  const x = at === null || at === undefined ? null : plot.data[0][at];
  legend.replaceChildren(...series.map(({ run, i, evaluation }, k) => {
    const value = x === null ? "" : ` ${number(plot.data[k + 1][at])}`;
    const key = el("span", { class: `key run-${i % RUN_COLORS}${evaluation ? " dotted" : ""}` });
    return el("span", { class: "entry" }, key, foreign(run.name), evaluation ? " " + t("evaluation") : "", value);
  }), x === null ? "" : `  x ${number(x)}`);
}

function zoomTo(plot, min, max) {
  const xs = plot.data[0];
  plot.setScale("x", { min: min === null ? xs[0] : min, max: max === null ? xs[xs.length - 1] : max });
}

function chartKey(event, chart, settings) {
  const { plot } = chart;
  const xs = plot.data[0];
  const { min, max } = plot.scales.x;
  const at = plot.cursor.idx === null || plot.cursor.idx === undefined ? xs.length - 1 : plot.cursor.idx;
  const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: xs.length - 1 };
  if (event.key in moves) {
    const to = Math.min(Math.max(moves[event.key], 0), xs.length - 1);
    if (xs[to] < min || xs[to] > max) zoomTo(plot, null, null);
    plot.setCursor({ left: plot.valToPos(xs[to], "x"), top: 10 });
    say(`${chart.name}, ${settings.axis} ${number(xs[to])}: ` + chart.series.map((s, k) => `${safe(s.run.name)} ${number(plot.data[k + 1][to])}`).join(", "));
  } else if (event.key === "+" || event.key === "=" || event.key === "-") {
    const half = ((max - min) / 2) * (event.key === "-" ? 2 : 0.5);
    const middle = xs[at] >= min && xs[at] <= max ? xs[at] : (min + max) / 2;
    settings.charts.forEach((c) => zoomTo(c.plot, Math.max(middle - half, xs[0]), Math.min(middle + half, xs[xs.length - 1])));
  } else if (event.key === "0" || event.key === "Escape") {
    settings.charts.forEach((c) => zoomTo(c.plot, null, null));
  } else {
    return;
  }
  event.preventDefault();
}

// The visible range as CSV; names are quoted, and a leading formula sign is made text.
function csv({ plot, series, name }, axis) {
  const quoted = (text) => `"${safe(text).replace(/^[=+\-@]/, "'$&").replace(/"/g, '""')}"`;
  const { min, max } = plot.scales.x;
  const rows = [[axis, ...series.map((s) => `${s.run.name} ${name}${s.evaluation ? " evaluation" : ""}`)].map(quoted).join(",")];
  plot.data[0].forEach((x, i) => {
    if (x >= min && x <= max) rows.push([x, ...series.map((s, k) => plot.data[k + 1][i] ?? "")].join(","));
  });
  return rows.join("\n") + "\n";
}

function describeChart({ name, plot, series }) {
  return {
    name, x: [plot.scales.x.min, plot.scales.x.max], points: plot.data[0].length,
    runs: series.map((s) => s.run.name + (s.evaluation ? " evaluation" : "")),
    valueAt: (x, k = 0) => plot.data[k + 1][plot.data[0].indexOf(x)],
  };
}

const MOST_EVENTS_SHOWN = 500;

function eventTable(runs) {
  const all = runs.flatMap((run) => eventsOf(run).map((event) => ({ run, event }))).sort((a, b) => a.event.step - b.event.step);
  const rows = all.slice(-MOST_EVENTS_SHOWN).reverse().map(({ run, event: { event: kind, step, time, ...rest } }) => {
    const told = Object.entries(rest).map(([key, value]) => `${key} ${typeof value === "object" ? JSON.stringify(value) : number(value)}`).join(", ");
    return [foreign(run.name), step, `${EVENTS[kind] || "•"} ${kind}`, clockText(time), foreign(told.slice(0, 400))];
  });
  return details(t("Events ({n})", { n: all.length }),
    table([t("Run"), t("step"), t("Event"), t("Time (UTC)"), t("What it says")], rows, { id: "events" }));
}

function lastTable(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.curves.last)))].sort();
  const rows = names.map((name) => [foreign(name), ...runs.map((run) => number(run.curves.last[name] ?? null))]);
  return details(t("Newest values"), table([t("Field"), ...runs.map((run) => safe(run.name))], rows, { id: "newest" }));
}
