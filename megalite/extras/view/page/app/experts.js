// Tokens of every expert over the run, and which ranks hold it.

function expertsView(state) {
  const { run } = state;
  const part = run.experts;
  const where = expertPlaces(run);
  if (!isThere(part)) {
    const rest = isThere(run.grid) && run.grid.num_experts === null ? [note(t("This model has no experts."))] : [missing(part)];
    return [...rest, where];
  }
  const panel = el("div", {});
  const show = (layer) => fill(panel, loadOf(run, part.layers.indexOf(layer), state));
  show(part.layers[0]);
  return [
    note(t("Load: tokens of an expert, over the mean of its layer. 1 is balanced.")),
    choice(t("Layer"), part.layers.map((l) => [l, l]), part.layers[0], (l) => show(Number(l))), panel, where,
  ];
}

function loadOf(run, at, state) {
  const part = run.experts;
  const counts = part.tokens.map((layers) => layers[at]);
  const experts = counts[0].length;
  const mean = (row) => row.reduce((a, b) => a + b, 0) / experts || 1;
  const last = counts.length - 1;
  const lane = Math.max(6, Math.min(22, 360 / experts));
  const draw = (context, width) => {
    const left = 30;
    const wide = (width - left) / counts.length;
    counts.forEach((row, i) => {
      const usual = mean(row);
      row.forEach((tokens, e) => {
        context.fillStyle = color("heat");
        context.globalAlpha = Math.min(tokens / usual / 2, 1);
        context.fillRect(left + i * wide, e * lane, Math.max(wide, 1), lane - 1);
      });
    });
    context.globalAlpha = 1;
    context.fillStyle = color("ink");
    for (let e = 0; e < experts; e += lane < 14 ? Math.ceil(14 / lane) : 1) context.fillText(String(e), 2, e * lane + Math.min(lane, 12));
    context.fillText(`${t("step")} ${part.steps[0]}–${part.steps[last]}`, left, experts * lane + 14);
  };
  const picture = drawing(Math.ceil(experts * lane) + 18, draw, t("Load of each expert over the steps; full color is twice the mean"));
  state.drawn.experts = () => ({ layer: part.layers[at], steps: part.steps, tokens: counts[last] });
  const ranges = expertRanges(run, part.layers[at]);
  const holders = (e) => ranges.flatMap(({ first, count, ranks }) => (e >= first && e < first + count ? ranks : []));
  const rows = counts[last].map((tokens, e) => [e, whole(tokens), (tokens / mean(counts[last])).toFixed(3), spans(holders(e))]);
  return [
    el("p", { class: "small", text: t("Across: steps. Down: experts. Full color is twice the mean, none is no token.") }), picture.box,
    el("h3", { text: t("Step {s}, layer {l}", { s: part.steps[last], l: part.layers[at] }) }),
    table([t("Expert"), t("tokens"), t("load"), t("ranks that hold it")], rows, { id: "load" }),
  ];
}

const expertParams = (grid) => grid.params.filter((p) => p.cut.some(([axis]) => axis === "ep"));
const layerOf = (param) => Number((/^layers\.(\d+)\./.exec(param.name) || [])[1]);

// Ranges of a layer's experts, and the ranks that hold them: once over the ranks, of which there may be thousands.
function expertRanges(run, layer) {
  const param = isThere(run.grid) && expertParams(run.grid).find((p) => layerOf(p) === layer);
  const byRange = new Map();
  if (!param) return [];
  run.grid.ranks.forEach((_, r) => {
    for (const range of new Set((boxesOf(run.grid, param, r) || []).map(([offset, shape]) => `${offset[0]},${shape[0]}`))) {
      if (!byRange.has(range)) byRange.set(range, []);
      byRange.get(range).push(r);
    }
  });
  return [...byRange].map(([range, ranks]) => {
    const [first, count] = range.split(",").map(Number);
    return { first, count, ranks };
  });
}

function expertPlaces(run) {
  if (!isThere(run.grid) || !run.grid.num_experts) return null;
  const layers = [...new Set(expertParams(run.grid).map(layerOf))];
  const rows = layers.flatMap((layer) => expertRanges(run, layer).map(({ first, count, ranks }) =>
    [layer, spans(Array.from({ length: count }, (_, i) => first + i)), spans(ranks)]));
  return details(t("Which ranks hold which experts"), table([t("Layer"), t("experts"), t("ranks")], rows, { id: "expert-places" }));
}
