// Checkpoints that are there, and all saves that the record tells of.

function checkpointsView(state) {
  const { run } = state;
  const part = run.checkpoints;
  const saves = isThere(run.curves) ? run.curves.events.filter((e) => e.event === "saved") : [];
  return [...(isThere(part) ? foldersOf(part) : [missing(part)]), ...savesOf(saves, part)];
}

function foldersOf(part) {
  const chains = chainsOf(part.folders);
  const rows = chains.flat().map((f) => {
    if (f.problem) return [foreign(f.name), foreign(f.problem), "", "", "", "", "", ""];
    const coded = f.bytes !== f.plain_bytes ? percent(f.bytes / f.plain_bytes) : "–";
    const kinds = Object.entries(f.kinds).map(([kind, n]) => `${kind} ${n}`).join(", ");
    const chain = chains.find((members) => members[0] === f && members.length > 1);
    const marks = [
      f.name === part.best ? t("best") : "",
      f.whole ? "" : t("no COMMIT"),
      chain ? t("with {n} differences: {b}", { n: chain.length - 1, b: bytesText(chain.reduce((n, member) => n + member.bytes, 0)) }) : "",
      f.base && !f.base_folder ? t("its base {name} is missing", { name: f.base }) : "",
    ].filter(Boolean).join(", ");
    return { options: { class: f.name === part.best ? "own" : "" }, cells: [f.base_folder ? el("span", {}, "└ ", foreign(f.name)) : foreign(f.name), f.step, bytesText(f.bytes), coded, f.valid_loss === null ? "–" : number(f.valid_loss), f.files, kinds, marks] };
  });
  const sum = part.folders.reduce((n, f) => n + (f.bytes || 0), 0);
  return [
    el("p", {}, t("{n} checkpoints, {b} together. ", { n: part.folders.length, b: bytesText(sum) }), part.best ? t("Best (lowest validation loss): ") : t("None records a validation loss."), part.best ? foreign(part.best) : ""),
    table([t("Folder"), t("step"), t("bytes"), t("of its plain size"), t("validation loss"), t("files"), t("tensors by kind"), ""], rows, { id: "folders" }),
  ];
}

// Each folder without a base, followed by the differences that refer to it.
function chainsOf(folders) {
  const follows = (f) => f.base_folder && f.base_folder !== f.name && folders.some((g) => g.name === f.base_folder && !g.base_folder);
  return folders.filter((f) => !follows(f)).map((f) => [f, ...folders.filter((g) => follows(g) && g.base_folder === f.name)]);
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
