// Every rank's place, its groups, its layers, and what it holds of each parameter.

// Index of a rank among those of its group over some axes, in grid order.
function indexOver(grid, rank, axes) {
  const sizes = new Map([...(grid.experts || []), ...grid.axes]);
  return axes.reduce((index, axis) => index * (sizes.get(axis) || 1) + (grid.ranks[rank][axis] || 0), 0);
}

// Ranks that differ from this one on some axes only.
function groupOf(grid, rank, axes) {
  const isExperts = axes.some((axis) => axis === "ep" || axis === "edp");
  const others = (isExperts ? grid.experts : grid.axes).map(([name]) => name).filter((name) => !axes.includes(name));
  const own = grid.ranks[rank];
  return grid.ranks.flatMap((place, r) => (others.every((name) => place[name] === own[name]) ? [r] : []));
}

const axesOf = (param) => [...new Set(param.cut.map(([axis]) => axis))];

// Boxes of the global tensor that a rank holds; none if its stage has no part in it.
function boxesOf(grid, param, rank) {
  const place = grid.ranks[rank];
  if (!param.pp.includes(place.pp)) return null;
  return param.boxes[axesOf(param).map((axis) => place[axis] || 0).join(",")];
}

const elements = (boxes) => boxes.reduce((sum, [, shape]) => sum + shape.reduce((a, b) => a * b, 1), 0);

// "rows 0–127, columns 64–127"; of stacked experts the first dimension is theirs.
function boxText(param, [offset, shape]) {
  const stacked = param.cut.some(([axis]) => axis === "ep");
  const names = stacked ? [t("experts"), t("rows"), t("columns")] : [t("rows"), t("columns")];
  const parts = shape.map((n, d) => {
    const all = n === param.shape[d];
    const range = n === 1 ? `${offset[d]}` : `${offset[d]}–${offset[d] + n - 1}`;
    return `${names[d] || t("dimension {d}", { d })} ${range}${all ? " " + t("(all)") : ""}`;
  });
  return parts.join(", ");
}

// What a rank holds of each parameter at a ZeRO stage: elements and bytes of weights, gradients, optimizer state.
function holdings(run, rank, zero) {
  const out = new Map();
  const grid = run.grid;
  const stages = isThere(run.step) && run.step.buckets[zero];
  const buckets = Array.isArray(stages) ? stages[grid.ranks[rank].pp] : null;
  if (!buckets) return null;
  for (const bucket of buckets) {
    const share = bucket.numel / bucket.shares;
    const first = (indexOver(grid, rank, bucket.over) % bucket.shares) * share;
    for (const [name, start, count] of bucket.params) {
      const from = Math.min(Math.max(first - start, 0), count);
      const to = Math.min(Math.max(first + share - start, 0), count);
      const own = { from, to };
      for (const kind of ["weights", "grads", "states"]) {
        own[kind] = (bucket[kind] ? to - from : count) * bucket.bytes[kind];
      }
      own.cut = bucket.states ? [from, to] : [0, count];
      out.set(name, own);
    }
  }
  return out;
}

// A run as it was with another number of ranks (--elastic); buckets are told for the newest alone.
function atSize(run, size) {
  const grid = run.grid.earlier.find(({ world }) => world === size);
  return grid ? { ...run, grid, step: { problem: t("shares are those of the newest size") } } : run;
}

// A number of ranks, and the steps that it has done.
function sizeText(run, size) {
  if (!isThere(run.curves)) return `${size}`;
  const { steps, columns } = columnsOf(run);
  const ranks = columns.get("ranks") || [];
  return `${size}: ${t("step")} ${spans(steps.filter((_, i) => ranks[i] === size))}`;
}

function gridView(state) {
  if (!isThere(state.run.grid)) return [missing(state.run.grid || state.run.layout)];
  const run = atSize(state.run, state.size);
  const { grid } = run;
  const panel = el("div", { id: "rank" });
  const settings = { rank: 0, zero: grid.zero, filter: "", all: false };
  const show = () => fill(panel, rankPanel(run, settings, show, select));
  const buttons = [];
  const select = (rank) => {
    settings.rank = rank;
    buttons.forEach((b, r) => {
      b.setAttribute("aria-pressed", r === rank);
      b.setAttribute("tabindex", r === rank ? "0" : "-1");
    });
    show();
    // Not the whole panel, which has a table of all parameters.
    say([...panel.children].slice(0, 2).map((node) => node.textContent).join(": "));
  };
  state.drawn.grid = () => ({ ...settings, ranks: buttons.length });
  const board = rankBoard(run, buttons, select);
  select(0);
  const sizes = [...grid.axes, ...(grid.experts || []).filter(([name]) => ["ep", "edp"].includes(name))].map(([name, size]) => `${name} ${size}`);
  const all = [state.run.grid, ...state.run.grid.earlier].map(({ world }) => [world, sizeText(state.run, world)]);
  return [
    all.length > 1 ? choice(t("Ranks of the run"), all, grid.world, (n) => { state.size = Number(n); state.reopen(); }) : null,
    note(t("{n} ranks: ", { n: grid.world }) + sizes.join(" × ") + ". ", t("Rows are pipeline ranks (pp). Click a rank, or move with the arrows.")),
    grid.world > grid.ranks.length ? note(t("Only the first {n} ranks are shown.", { n: grid.ranks.length })) : null,
    board, panel, holdersOf(run), stageTable(run),
  ];
}

function rankBoard(run, buttons, select) {
  const { grid } = run;
  const board = el("div", { class: "ranks", role: "toolbar", "aria-label": t("Ranks") });
  const rows = new Map();
  const used = [...grid.axes, ...(grid.experts || [])].filter(([name, size], i, all) => name !== "pp" && size > 1 && all.findIndex(([other]) => other === name) === i).map(([name]) => name);
  grid.ranks.forEach((place, rank) => {
    const words = used.map((name) => `${name}${place[name]}`).join(" ");
    const b = button("", () => select(rank), { "aria-pressed": false, tabindex: "-1", "data-rank": rank, class: `rank dp-${place.dp % 4}` });
    b.append(el("strong", { text: String(rank) }), el("small", { text: words }));
    buttons.push(b);
    if (!rows.has(place.pp)) rows.set(place.pp, el("div", { class: "row" }, el("span", { class: "pp", text: `pp${place.pp}` })));
    rows.get(place.pp).append(b);
  });
  board.append(...rows.values());
  const perRow = grid.ranks.length / rows.size;
  board.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -perRow, ArrowDown: perRow };
    const at = buttons.indexOf(document.activeElement);
    const to = event.key === "Home" ? 0 : event.key === "End" ? buttons.length - 1 : at + (steps[event.key] || 0);
    if (at < 0 || to === at || !buttons[to]) return;
    event.preventDefault();
    select(to);
    buttons[to].focus();
  });
  return board;
}

function rankPanel(run, settings, show, select) {
  const { grid } = run;
  const { rank } = settings;
  const place = grid.ranks[rank];
  const link = (r) => button(String(r), () => select(r), { class: "small" });
  const axes = [...grid.axes.map(([name]) => [name]), ...(grid.experts ? [["edp"], ["ep"]] : [])];
  const groups = axes.map((names) => [names.join("×"), place[names[0]] ?? "–", el("span", {}, groupOf(grid, rank, names).map(link))]);
  const stage = grid.stages[place.pp];
  return [
    el("h3", { text: t("Rank {r}", { r: rank }) }),
    el("p", { text: axes.map(([name]) => `${name} ${place[name]}`).join(", ") + `; ${t("layers")} ${spans(stage.layers)}` }),
    table([t("Axis"), t("place"), t("group (ranks)")], groups, { id: "groups" }),
    ...parameterTable(run, settings, show),
  ];
}

const MOST_ROWS = 60;

function parameterTable(run, settings, show) {
  const { grid } = run;
  const held = holdings(run, settings.rank, settings.zero);
  const mine = grid.params.filter((p) => p.pp.includes(grid.ranks[settings.rank].pp) && p.name.includes(settings.filter));
  const rows = mine.slice(0, settings.all ? mine.length : MOST_ROWS).map((param) => {
    const boxes = boxesOf(grid, param, settings.rank);
    const own = held && held.get(param.name);
    const share = own ? (own.cut[1] > own.cut[0] ? `${whole(own.cut[0])}–${whole(own.cut[1] - 1)}` : t("none")) : "–";
    const size = (kind) => (own ? bytesText(own[kind]) : "–");
    const parts = el("span", {}, boxes.map((box) => el("div", { text: boxText(param, box) })));
    return [foreign(param.name), foreign(param.shape.join(" × ")), parts, size("weights"), size("grads"), share, size("states")];
  });
  const sums = ["weights", "grads", "states"].map((kind) => (held ? [...held.values()].reduce((n, own) => n + own[kind], 0) : null));
  const filter = el("input", { type: "search", value: settings.filter, "aria-label": t("filter"), onchange: (e) => { settings.filter = e.target.value; show(); } });
  const zeros = [0, 1, 2, 3].map((z) => [z, `ZeRO ${z}${z === grid.zero ? " " + t("(this run)") : ""}`]);
  return [
    el("div", { class: "controls" },
      choice(t("Shown at"), zeros, settings.zero, (z) => { settings.zero = Number(z); show(); }),
      el("label", {}, t("Parameter contains") + " ", filter)),
    held ? el("p", { id: "held" }, t("Between steps this rank holds {w} of weights, {g} of gradients, {s} of optimizer state.", { w: bytesText(sums[0]), g: bytesText(sums[1]), s: bytesText(sums[2]) })) : missing(isThere(run.step) ? run.step.buckets[settings.zero] : run.step),
    table([t("Parameter"), t("whole shape"), t("this rank's shard"), t("weights"), t("gradients"), t("its elements of the optimizer's share"), t("optimizer")], rows, { id: "params" }),
    rows.length < mine.length ? button(t("Show all {n}", { n: mine.length }), () => { settings.all = true; show(); }) : null,
    grid.params_left_out ? note(t("{n} parameters of a large model are left out.", { n: grid.params_left_out })) : null,
  ];
}

// Who holds a parameter: ranks by their boxes.
function holdersOf(run) {
  const { grid } = run;
  const panel = el("div", {});
  const show = (name) => {
    const param = grid.params.find((p) => p.name === name);
    const byBox = new Map();
    grid.ranks.forEach((_, rank) => {
      const boxes = boxesOf(grid, param, rank);
      if (!boxes) return;
      const key = boxes.map((box) => boxText(param, box)).join("; ");
      byBox.set(key, [...(byBox.get(key) || []), rank]);
    });
    fill(panel, table([t("Part"), t("ranks that hold it")], [...byBox].map(([key, ranks]) => [key, spans(ranks)]), { id: "holders" }));
  };
  show(grid.params[0].name);
  return el("section", {}, el("h3", { text: t("Who holds a parameter") }),
    choice(t("Parameter"), grid.params.map((p) => [p.name, p.name]), grid.params[0].name, show), panel);
}

function stageTable(run) {
  const { grid } = run;
  const rows = grid.stages.map((stage, pp) => [pp, stage.stages.join(", "), spans(stage.layers), spans(grid.ranks.flatMap((p, r) => (p.pp === pp ? [r] : [])))]);
  return el("section", {}, el("h3", { text: t("Layers by pipeline rank") }),
    table(["pp", t("stages"), t("layers"), t("ranks")], rows, { id: "stages" }));
}
