// Why the run is distributed: the model against one GPU, and the plan's best layouts.

function whyView(state) {
  const { run } = state;
  if (!isThere(run.plan)) return [missing(run.plan || run.layout)];
  const { plan } = run;
  const alone = run.memory && run.memory.alone;
  const rows = plan.best.map((row, i) => [i + 1, row.words, number(row.step_time_s), whole(Math.round(row.tokens_per_s)), (row.mem_gb).toPrecision(3), percent(row.mfu)]);
  if (plan.own) rows.push({ options: { class: "own" }, cells: [t("this run"), plan.own.words, number(plan.own.step_time_s), whole(Math.round(plan.own.tokens_per_s)), plan.own.mem_gb.toPrecision(3), percent(plan.own.mfu)] });
  return [
    ...(alone && alone.ranks ? oneGpu(run, alone.ranks[0], plan) : []),
    el("h3", { text: t("The best layouts on {c}", { c: plan.cluster }) }),
    note(plan.assumed ? t("No cluster was named, so as many H100s as the run has ranks are assumed (--cluster names another). ") : "",
      t("Predicted, not measured. {n} layouts, {f} fit. Picked, the simplest near the fastest: {w}", { n: whole(plan.layouts), f: whole(plan.fit), w: plan.picked || "–" })),
    table(["", t("layout"), t("step, s"), "tokens/s", "GB", "MFU"], rows, { id: "plan" }),
  ];
}

function oneGpu(run, rank, plan) {
  const states = rank.weights + rank.main_grad + rank.optimizer;
  const own = run.memory.own.ranks ? Math.max(...run.memory.own.ranks.map((r) => r.total)) : null;
  const verdict = rank.total > plan.gpu_bytes ? t("One GPU cannot hold it.") : t("One GPU can hold it: here ranks are for speed, or for learning.");
  const rows = [
    [t("weights, gradients and optimizer of the whole model"), bytesText(states)],
    [t("one rank alone, with activations"), bytesText(rank.total)],
    [t("the fullest rank of this run"), bytesText(own)],
    [t("memory of one GPU"), bytesText(plan.gpu_bytes)],
  ];
  return [el("h3", { text: t("The model against one GPU") }), el("p", { id: "verdict" }, verdict), table([t("What"), t("bytes")], rows, { id: "alone" })];
}
