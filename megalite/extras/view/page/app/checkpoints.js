// Checkpoints that are there, and all saves that the record tells of.

function checkpointsView(state) {
  const { run } = state;
  const part = run.checkpoints;
  const saves = isThere(run.curves) ? run.curves.events.filter((e) => e.event === "saved") : [];
  return [...(isThere(part) ? foldersOf(part) : [missing(part)]), ...savesOf(saves, part)];
}

function foldersOf(part) {
  const rows = part.folders.map((f) => {
    if (f.problem) return [foreign(f.name), foreign(f.problem), "", "", "", "", "", ""];
    const coded = f.bytes !== f.plain_bytes ? percent(f.bytes / f.plain_bytes) : "–";
    const kinds = Object.entries(f.kinds).map(([kind, n]) => `${kind} ${n}`).join(", ");
    const marks = [f.name === part.best ? t("best") : "", f.whole ? "" : t("no COMMIT")].filter(Boolean).join(", ");
    return { options: { class: f.name === part.best ? "own" : "" }, cells: [foreign(f.name), f.step, bytesText(f.bytes), coded, f.valid_loss === null ? "–" : number(f.valid_loss), f.files, kinds, marks] };
  });
  const sum = part.folders.reduce((n, f) => n + (f.bytes || 0), 0);
  return [
    el("p", {}, t("{n} checkpoints, {b} together. ", { n: part.folders.length, b: bytesText(sum) }), part.best ? t("Best (lowest validation loss): ") : t("None records a validation loss."), part.best ? foreign(part.best) : ""),
    table([t("Folder"), t("step"), t("bytes"), t("of its plain size"), t("validation loss"), t("files"), t("tensors by kind"), ""], rows, { id: "folders" }),
  ];
}

function savesOf(saves, part) {
  const there = new Set(isThere(part) ? part.folders.map((f) => f.name) : []);
  const rows = saves.map((e) => {
    const name = String(e.checkpoint).split("/").pop();
    return [foreign(name), e.step, bytesText(e.bytes), seconds(e.seconds), seconds(e.pause_s), there.has(name) ? t("yes") : t("no")];
  });
  return [
    el("h3", { text: t("Saves") }),
    rows.length ? table([t("Folder"), t("step"), t("bytes"), t("took"), t("training waited"), t("still there")], rows, { id: "saves" }) : note(t("metrics.jsonl tells of no finished save.")),
  ];
}
