// Memory by kind over a step, and what each saving does to it.

const KINDS = ["weights", "main_grad", "optimizer", "activations", "logits", "temporary", "update"];
const HOLDERS = ["weights", "optimizer states", "gradients", "activations", "deferred weight gradients", "gradients of activations", "messages", "other states", "other", "workspace"];

function memoryView(state) {
  const { run } = state;
  if (!isThere(run.memory)) return [missing(run.memory || run.layout)];
  const panel = el("div", {});
  const show = (pp) => fill(panel, memoryOf(run, pp, state));
  show(0);
  const ranks = run.grid && run.grid.stages ? run.grid.stages : [0];
  return [
    note(t("Predicted from the run's options; all ranks of one pipeline stage hold the same. Measured memory is among the curves.")),
    choice(t("Pipeline rank"), ranks.map((_, pp) => [pp, `pp${pp}`]), 0, (pp) => show(Number(pp))), panel,
  ];
}

function memoryOf(run, pp, state) {
  const { own, changed } = run.memory;
  if (own.problem) return [missing(own)];
  const most = Math.max(...changed.filter((c) => c.ranks).map((c) => c.ranks[pp].total), 1);
  const rows = changed.map((c) => ({
    options: { class: c.own ? "own" : "" },
    cells: [
      c.option, foreign(`${c.value}${c.own ? " " + t("(this run)") : ""}`),
      ...(c.ranks
        ? [...KINDS.slice(0, 4).map((kind) => bytesText(c.ranks[pp][kind])), bytesText(c.ranks[pp].host), bytesText(c.ranks[pp].total), bar(c.ranks[pp].total / most)]
        : [el("td", { colspan: "7" }, foreign(c.problem))]),
    ],
  }));
  return [
    el("h3", { text: t("By kind, at the peak of a step") }),
    table([t("Kind"), t("bytes")], [...KINDS.map((kind) => [t(kind), bytesText(own.ranks[pp][kind])]), [t("all together"), bytesText(own.ranks[pp].total)], [t("in host memory"), bytesText(own.ranks[pp].host)]], { id: "kinds" }),
    ...overStep(run, pp, state),
    el("h3", { text: t("What each saving changes") }),
    note(t("Each row is this run with one option changed. What leaves the device under offload is in host memory.")),
    table([t("Option"), t("value"), t("weights"), t("main_grad"), t("optimizer"), t("activations"), t("in host memory"), t("device, all together"), ""], rows, { id: "savings" }),
    ...travelOf(run, pp),
  ];
}

// What goes between device and host in one step, by rank, from the shares of the run's real optimizer.
function travelOf(run, pp) {
  const buckets = isThere(run.step) && isThere(run.grid) && run.step.buckets[run.grid.zero];
  const sum = (bytes) => (Array.isArray(buckets) ? buckets[pp].reduce((n, b) => n + (b.numel / (b.states ? b.shares : 1)) * bytes(b), 0) : null);
  // The gradients of a rank's share are fp32, whatever the weights are.
  const [grads, weights] = [sum(() => 4), sum((b) => b.bytes.weights)];
  const inputs = run.memory.inputs[pp];
  return [
    el("h3", { text: t("What travels under offload") }),
    note(t("In one step, by rank. Under optimizer, gradients go to the host and new weights come back: masters and moments stay there, where the CPU updates them. Under optimizer+params, a share of the weights also comes before each use of its layers. Under activations, the input of each recomputed block goes after its forward pass and comes back before its backward pass.")),
    table(["offload", t("to the host"), t("to the device")], [["optimizer", bytesText(grads), bytesText(weights)], ["activations", bytesText(inputs), bytesText(inputs)]], { id: "travel" }),
  ];
}

function bar(share) {
  const inner = el("span", { class: "bar" });
  inner.style.width = `${Math.round(120 * share)}px`;
  return inner;
}

// Bytes by holder before each operation, stacked, from the real step under fake tensors.
function overStep(run, pp, state) {
  const stage = isThere(run.step) && run.step.stages[pp];
  if (!stage || stage.problem) return [missing(stage || run.step)];
  const held = HOLDERS.filter((name) => stage.timeline.some((row) => row.held[name]));
  const top = Math.max(...stage.timeline.map((row) => row.peak), 1);
  const draw = (context, width, height) => {
    const wide = width / stage.timeline.length;
    const high = height - 18;
    stage.timeline.forEach((row, i) => {
      let y = high;
      held.forEach((name) => {
        const h = ((row.held[name] || 0) / top) * high;
        y -= h;
        context.fillStyle = color(`holder-${HOLDERS.indexOf(name)}`);
        context.fillRect(i * wide, y, Math.max(wide - 0.5, 0.5), h);
      });
      const peak = high - (row.peak / top) * high;
      context.fillStyle = color("critical");
      context.fillRect(i * wide, peak, Math.max(wide - 0.5, 0.5), 2);
      if (wide > 24) {
        context.fillStyle = color("ink");
        context.fillText(row.op, i * wide + 1, height - 4);
      }
    });
  };
  const picture = drawing(200, draw, t("Memory over one step"));
  state.drawn.memory = () => ({ operations: stage.timeline.length, peak: stage.peak, holders: held });
  const keys = held.map((name) => [el("span", { class: `key holder-${HOLDERS.indexOf(name)}` }), ` ${t(name)} `]);
  const rows = stage.timeline.map((row) => [row.op, bytesText(row.before), bytesText(row.peak), ...held.map((name) => bytesText(row.held[name] || 0))]);
  return [
    el("h3", { text: t("Over one step, operation by operation") }),
    el("p", { id: "peak", text: t("{s} between steps, {p} at most, during {op} (rank {r}, on a GPU).", { s: bytesText(stage.states), p: bytesText(stage.peak), op: stage.during, r: stage.rank }) }),
    el("p", { class: "legend" }, keys, el("span", { class: "key critical" }), ` ${t("peak during the operation")}`),
    picture.box,
    details(t("As a table"), table([t("operation"), t("before it"), t("peak"), ...held.map((name) => t(name))], rows, { id: "timeline" })),
  ];
}
