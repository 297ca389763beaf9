// One step of the pipeline, planned and measured, on a canvas.

const [LABEL, KIND, MICROBATCH, STAGE, START, END, WAIT, CRITICAL, WAITS_FOR, BESIDE] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9];
const KIND_NAMES = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient" };
const LANE = 30;
// Narrower operations are drawn as shares of a column, not one by one.
const NARROW = 1.5;

function scheduleView(state) {
  const part = state.run.schedule;
  if (!isThere(part) && !(part && part.planned)) return [missing(part || state.run.layout)];
  const span = Math.max(part.planned.makespan, part.measured ? part.measured.makespan : 0);
  const zoom = { from: 0, to: span, span };
  const told = el("p", { class: "told", id: "operation", "aria-live": "polite" }, t("Point at an operation, or focus a picture and move with the arrows."));
  const lanes = [];
  const all = () => lanes.forEach((lane) => lane.again());
  const shown = [["measured", t("Measured (step {s})", { s: part.step ?? "–" })], ["planned", t("Planned")]].filter(([key]) => part[key]);
  const pictures = shown.map(([key, title]) => {
    const one = timeline(part[key], part.unit, zoom, told, all, title);
    lanes.push(one);
    return el("section", {}, el("h3", { text: title }), facts(part[key], part.unit), leftOut(part[key]), one.box, operations(part[key], part.unit, key));
  });
  state.drawn.schedule = () => ({ from: zoom.from, to: zoom.to, lanes: lanes.map((l) => l.counted), busy: lanes.map((l) => l.single) });
  const durations = (part.steps || []).map(([n, ms]) => `${n}: ${number(ms)} ms`).join(", ");
  return [
    note(`${safe(part.name)}, pp ${part.pp}, vp ${part.vp}, ${t("{n} micro-batches", { n: part.num_microbatches })}. `, durations ? t("Recorded steps: ") + durations : ""),
    part.measured ? null : note(t("No step was recorded, so only the plan is shown, in times of one forward pass. Record with "), el("code", { text: "--record-schedule 10:13" })),
    el("div", { class: "controls" },
      button("+", () => { zoomBy(zoom, 0.5, 0.5); all(); }, { "aria-label": t("zoom in") }),
      button("−", () => { zoomBy(zoom, 2, 0.5); all(); }, { "aria-label": t("zoom out") }),
      button(t("Whole step"), () => { zoom.from = 0; zoom.to = span; all(); }),
      el("span", { class: "legend" }, Object.entries(KIND_NAMES).map(([kind, name]) => [el("span", { class: `key op-${kind}`, text: kind }), ` ${t(name)} `]), el("span", { class: "key wait" }), ` ${t("waits for a message")} `, el("span", { class: "key critical" }), ` ${t("critical path")}`)),
    told, ...pictures,
  ];
}

function zoomBy(zoom, factor, at) {
  const middle = zoom.from + (zoom.to - zoom.from) * at;
  const width = Math.min(Math.max((zoom.to - zoom.from) * factor, zoom.span / 5000), zoom.span);
  zoom.from = Math.min(Math.max(middle - width * at, 0), zoom.span - width);
  zoom.to = zoom.from + width;
}

function facts(step, unit) {
  const waits = step.ops.map((lane) => lane.reduce((sum, op) => sum + op[WAIT], 0));
  const busy = step.busy.slice(0, step.ops.length).map((ms, r) => `pp${r}: ${t("computes")} ${number(ms)}, ${t("waits")} ${number(waits[r] || 0)}`).join("; ");
  return el("p", { class: "small" }, t("{d} {u} long, bubble {b} of the ideal time. ", { d: number(step.makespan), u: unit, b: percent(step.bubble) }), busy);
}

const leftOut = (step) => (step.ranks_left_out ? note(t("Only the first {n} ranks are shown.", { n: step.ops.length })) : null);

function timeline(step, unit, zoom, told, all, title) {
  const one = { counted: 0, single: 0 };
  const height = step.ops.length * LANE + 22;
  const draw = (context, width) => drawLanes(context, width, step, unit, zoom, one);
  const { box, canvas, again } = drawing(height, draw, title);
  one.box = box;
  one.again = again;
  const at = { lane: 0, index: 0 };
  const tell = (lane, index) => {
    const op = step.ops[lane] && step.ops[lane][index];
    if (op) told.textContent = operationText(lane, op, unit);
    return op;
  };
  canvas.addEventListener("pointermove", (event) => {
    const lane = Math.floor(event.offsetY / LANE);
    const time = zoom.from + (event.offsetX / box.clientWidth) * (zoom.to - zoom.from);
    const isLower = event.offsetY % LANE >= LANE / 2;
    if (step.ops[lane]) tell(lane, opAt(step.ops[lane], time, isLower));
  });
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoomBy(zoom, event.deltaY > 0 ? 1.25 : 0.8, event.offsetX / box.clientWidth);
    all();
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (moves[event.key]) {
      at.lane = Math.min(Math.max(at.lane + moves[event.key][0], 0), step.ops.length - 1);
      at.index = Math.min(Math.max(at.index + moves[event.key][1], 0), step.ops[at.lane].length - 1);
      tell(at.lane, at.index);
    } else if (event.key === "+" || event.key === "=") zoomBy(zoom, 0.5, 0.5);
    else if (event.key === "-") zoomBy(zoom, 2, 0.5);
    else if (event.key === "0" || event.key === "Escape") zoomBy(zoom, Infinity, 0);
    else return;
    event.preventDefault();
    all();
  });
  return one;
}

// The last operation of a lane that begins, or begins to wait, at or before a time; of a pair, which has one place, the lower or the upper one.
function opAt(lane, time, isLower) {
  const at = lastWhere(lane.length, (i) => lane[i][START] - lane[i][WAIT] <= time);
  return at - (lane[at][BESIDE] && lane[at][KIND] !== "F" && !isLower ? 1 : 0);
}

function operationText(lane, op, unit) {
  const times = `${number(op[START])}–${number(op[END])} ${unit}`;
  const waited = op[WAIT] > 0 && op[WAITS_FOR] ? ` ${t("It waits {w} {u} for {op}.", { w: number(op[WAIT]), u: unit, op: op[WAITS_FOR] })}` : "";
  return `pp${lane}, ${op[LABEL]}: ${t(KIND_NAMES[op[KIND]])}, ${t("micro-batch {m}, stage {s}", { m: op[MICROBATCH], s: op[STAGE] })}, ${times}.${op[BESIDE] ? ` ${t("It takes turns with {op}.", { op: op[BESIDE] })}` : ""}` + waited + (op[CRITICAL] ? ` ${t("On the critical path.")}` : "");
}

function drawLanes(context, width, step, unit, zoom, one) {
  const scale = width / (zoom.to - zoom.from);
  const colors = Object.fromEntries(["F", "B", "I", "W"].map((kind) => [kind, color(`op-${kind}`)]));
  const inks = Object.fromEntries(["F", "B", "I", "W"].map((kind) => [kind, color(`on-op-${kind}`)]));
  one.counted = 0;
  one.single = 0;
  step.ops.forEach((lane, r) => {
    const top = r * LANE + 3;
    context.fillStyle = color("idle");
    context.fillRect(0, top, width, LANE - 6);
    const columns = new Map();
    for (const op of lane) {
      if (op[END] < zoom.from || op[START] > zoom.to) continue;
      const left = (op[START] - zoom.from) * scale;
      const wide = (op[END] - op[START]) * scale;
      one.counted += 1;
      if (wide < NARROW) addToColumns(columns, left, wide, op);
      else {
        one.single += 1;
        drawOperation(context, op, left, wide, top, scale, colors, inks);
      }
    }
    for (const [x, kinds] of columns) drawColumn(context, x, kinds, top, colors);
  });
  context.fillStyle = color("ink");
  const y = step.ops.length * LANE + 15;
  context.fillText(`${number(zoom.from)} ${unit}`, 2, y);
  const end = `${number(zoom.to)} ${unit}`;
  context.fillText(end, width - context.measureText(end).width - 2, y);
}

function drawOperation(context, op, left, wide, top, scale, colors, inks) {
  // Of a pair, the forward pass is above and the backward pass below.
  const whole = LANE - 6;
  const high = op[BESIDE] ? whole / 2 : whole;
  const y = top + (op[BESIDE] && op[KIND] !== "F" ? high : 0);
  if (op[WAIT] > 0 && op[WAITS_FOR]) {
    context.fillStyle = color("wait");
    context.fillRect(left - op[WAIT] * scale, top + whole / 2 - 2, op[WAIT] * scale, 4);
  }
  context.fillStyle = colors[op[KIND]];
  context.fillRect(left, y, wide, high);
  context.strokeStyle = op[CRITICAL] ? color("critical") : color("page");
  context.lineWidth = op[CRITICAL] ? 2.5 : 1;
  context.strokeRect(left + 0.5, y + 0.5, Math.max(wide - 1, 0.5), high - 1);
  if (context.measureText(op[LABEL]).width + 4 < wide) {
    context.fillStyle = inks[op[KIND]];
    context.fillText(op[LABEL], left + 3, y + high / 2 + 4);
  }
}

// Time of each kind in the pixel columns that a narrow operation touches; those of a pair share theirs.
function addToColumns(columns, left, wide, op) {
  for (let x = Math.floor(left); x <= Math.floor(left + wide); x += 1) {
    const part = Math.min(left + wide, x + 1) - Math.max(left, x);
    const kinds = columns.get(x) || {};
    kinds[op[KIND]] = (kinds[op[KIND]] || 0) + Math.max(part, 0) / (op[BESIDE] ? 2 : 1);
    columns.set(x, kinds);
  }
}

function drawColumn(context, x, kinds, top, colors) {
  let at = top;
  for (const [kind, share] of Object.entries(kinds)) {
    const high = Math.min(share, 1) * (LANE - 6);
    context.fillStyle = colors[kind];
    context.fillRect(x, at, 1, high);
    at += high;
  }
}

const MOST_OPERATIONS = 400;

function operations(step, unit, key) {
  const rows = step.ops.flatMap((lane, r) => lane.map((op) => [`pp${r}`, op[LABEL], number(op[START]), number(op[END]), number(op[WAIT]), op[WAITS_FOR] || "–", op[CRITICAL] ? t("yes") : "", op[BESIDE] || "–"]));
  return details(t("Operations as a table"),
    rows.length > MOST_OPERATIONS ? note(t("The first {n} of {all}.", { n: MOST_OPERATIONS, all: rows.length })) : null,
    table([t("rank"), t("operation"), `${t("begins")}, ${unit}`, `${t("ends")}, ${unit}`, `${t("waits")}, ${unit}`, t("for"), t("critical path"), t("takes turns with")], rows.slice(0, MOST_OPERATIONS), { id: `ops-${key}` }));
}
