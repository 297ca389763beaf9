// Messages of one step, and how their collectives work.

const PHASES = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient", before: "before the pipeline", after: "outside of passes" };
const phaseName = (key) => t(PHASES[key] || "between stages");

function messagesView(state) {
  const part = state.run.step;
  const stages = isThere(part) ? part.stages : null;
  if (!stages || !stages.length || stages[0].problem) return [missing(stages && stages[0] ? stages[0] : part || state.run.layout)];
  const panel = el("div", {});
  const show = (pp) => fill(panel, messageTable(stages[pp]), animation(stages[pp]));
  show(0);
  const curves = state.run.curves;
  const sent = isThere(curves) && curves.last.grad_bytes_sent;
  return [
    note(t("Counted in the real step of one rank of each pipeline stage, run without a GPU: ranks of one stage send the same. Bytes are of the largest batch.")),
    typeof sent === "number" ? el("p", { id: "measured-sent" }, t("Measured in the newest step: rank 0 sent {b} of gradients ({n} bytes).", { b: bytesText(sent), n: whole(sent) })) : null,
    choice(t("Pipeline rank"), stages.map((_, pp) => [pp, `pp${pp}`]), 0, (pp) => show(Number(pp))), panel,
  ];
}

function messageTable(stage) {
  if (stage.problem) return [missing(stage)];
  const rows = stage.messages.map((m) => [
    m.axis, m.kind, m.size, m.calls, bytesText(m.bytes), bytesText(m.sent), seconds(m.exposed_s),
    Object.entries(m.phases).map(([phase, n]) => `${phaseName(phase)} ${bytesText(n)}`).join(", "),
  ]);
  const byAxis = new Map();
  for (const m of stage.messages) byAxis.set(m.axis, (byAxis.get(m.axis) || 0) + m.sent);
  const sums = [...byAxis].map(([axis, n]) => [axis, bytesText(n), whole(n)]);
  return [
    table([t("Axis"), t("operation"), t("ranks"), t("calls"), t("whole tensors"), t("sent by this rank"), t("exposed (predicted, H100)"), t("when (whole tensors)")], rows, { id: "messages" }),
    el("h3", { text: t("Sent by this rank in one step, by axis") }),
    table([t("Axis"), t("sent"), t("bytes")], sums, { id: "sent" }),
  ];
}

// Steps of a collective over n ranks in n chunks. Each state is [rank][chunk] -> number of ranks whose data are in it.
function collectiveSteps(kind, n) {
  const ranks = [...Array(n).keys()];
  const own = (make) => ranks.map((r) => ranks.map((c) => make(r, c)));
  const steps = [];
  const ring = (first, add, count) => {
    for (let s = 0; s < count; s += 1) {
      const before = steps[steps.length - 1].state;
      const moves = ranks.map((r) => ({ from: r, to: (r + 1) % n, chunk: (((r + first - s) % n) + n) % n }));
      const state = before.map((row) => row.slice());
      for (const { from, to, chunk } of moves) state[to][chunk] = add ? before[from][chunk] + 1 : before[from][chunk];
      steps.push({ moves, state });
    }
  };
  if (kind === "all_gather") {
    steps.push({ moves: [], state: own((r, c) => (r === c ? n : 0)) });
    ring(0, false, n - 1);
  } else if (kind === "reduce_scatter" || kind === "all_reduce") {
    steps.push({ moves: [], state: own(() => 1) });
    ring(0, true, n - 1);
    if (kind === "all_reduce") ring(1, false, n - 1);
  } else if (kind === "all_to_all") {
    steps.push({ moves: [], state: own((r, c) => (r === c ? 1 : 0)) });
    for (let s = 1; s < n; s += 1) {
      const moves = ranks.map((r) => ({ from: r, to: (r + s) % n, chunk: (r + s) % n }));
      const state = steps[steps.length - 1].state.map((row) => row.slice());
      for (const { from, to } of moves) state[to][from] = 1;
      steps.push({ moves, state });
    }
  } else {
    steps.push({ moves: [], state: [[1], [0]] });
    steps.push({ moves: [{ from: 0, to: 1, chunk: 0 }], state: [[1], [1]] });
  }
  return steps;
}

const MOST_DRAWN = 8;
const PAUSE_MS = 900;

function animation(stage) {
  const kinds = stage.messages.filter((m) => m.kind !== "recv" && m.size > 1);
  if (!kinds.length) return [];
  const board = el("div", { id: "collective" });
  const show = { message: kinds[0], step: 0, timer: 0 };
  const draw = () => fill(board, collectivePicture(show));
  const stop = () => { clearInterval(show.timer); show.timer = 0; };
  const go = (by) => {
    const steps = collectiveSteps(show.message.kind, Math.min(show.message.size, MOST_DRAWN)).length;
    show.step = (show.step + by + steps) % steps;
    draw();
  };
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const play = () => {
    if (show.timer) return stop();
    show.timer = setInterval(() => (board.isConnected ? go(1) : stop()), PAUSE_MS);
    return undefined;
  };
  draw();
  return [
    el("h3", { text: t("How such a message travels") }),
    el("div", { class: "controls" },
      choice(t("Operation"), kinds.map((m, i) => [i, `${m.axis}: ${m.kind}`]), 0, (i) => { show.message = kinds[Number(i)]; show.step = 0; draw(); }),
      button("◀", () => { stop(); go(-1); }, { "aria-label": t("step back") }), button("▶", () => { stop(); go(1); }, { "aria-label": t("step") }),
      still ? null : button(t("Play / stop"), play)),
    board,
  ];
}

function collectivePicture({ message, step }) {
  const n = Math.min(message.size, MOST_DRAWN);
  const pair = message.kind === "send";
  const steps = collectiveSteps(message.kind, n);
  const { moves, state } = steps[step];
  const whole1 = message.bytes / message.calls;
  const chunk = pair ? whole1 : whole1 / message.size;
  const arrived = new Set(moves.map((m) => (message.kind === "all_to_all" ? `${m.to},${m.from}` : `${m.to},${m.chunk}`)));
  const peers = pair ? message.ranks.slice(0, 2) : message.ranks.slice(0, n);
  const rows = peers.map((rank, r) => [
    `${t("rank")} ${rank}`,
    ...state[r].map((have, c) => el("span", { class: `chunk ${have ? (arrived.has(`${r},${c}`) ? "arrived" : "have") : "empty"}`, text: have ? (message.kind === "all_reduce" || message.kind === "reduce_scatter" ? `${have}/${n}` : "✓") : "·" })),
  ]);
  const told = moves.map((m) => `${peers[m.from]} → ${peers[m.to]}`).join(", ");
  return [
    el("p", {}, t("Step {s} of {n}: each message carries {b}. ", { s: step, n: steps.length - 1, b: bytesText(chunk) }), told,
      message.size > MOST_DRAWN ? " " + t("(drawn with {n} of {all} ranks)", { n, all: message.size }) : ""),
    table([t("rank"), ...state[0].map((_, c) => t("piece {c}", { c }))], rows),
  ];
}
