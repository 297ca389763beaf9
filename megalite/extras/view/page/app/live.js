// With --serve: ask the server for new lines of metrics.jsonl, which is only appended to.

const POLL_MS = 2000;

function follow(state) {
  const marks = state.data.runs.map((run) => run.live);
  let timer = 0;
  const ask = async () => {
    timer = 0;
    if (document.visibilityState === "hidden") return;
    for (let i = 0; i < marks.length; i += 1) {
      try {
        const answer = await fetch(`data?run=${i}&file=${marks[i].file}&after=${marks[i].offset}`);
        if (!answer.ok) throw new Error(String(answer.status));
        const told = await answer.json();
        // Another file, or another start: the server makes the page anew.
        if (told.again) return location.reload();
        marks[i].offset = told.offset;
        if (told.lines.length && !append(state, state.data.runs[i], told.lines)) return location.reload();
      } catch {
        state.status.textContent = t("The server does not answer; asking again.");
        timer = setTimeout(ask, POLL_MS);
        return;
      }
    }
    timer = setTimeout(ask, POLL_MS);
  };
  document.addEventListener("visibilitychange", () => { if (!timer) ask(); });
  timer = setTimeout(ask, POLL_MS);
}

// Add lines to a run's columns and charts; false if the page must be made anew.
function append(state, run, lines) {
  if (!isThere(run.curves)) return false;
  const { steps, columns } = columnsOf(run);
  for (const line of lines) {
    if (line.event) {
      if (line.event === "start" || line.event === "resume") return false;
      run.curves.events.push(line);
      continue;
    }
    if (typeof line.step !== "number") continue;
    // After a rewind or a recovery steps are made again: the last line of each counts.
    const isNew = !steps.length || line.step > steps[steps.length - 1];
    const at = isNew ? steps.length : steps.lastIndexOf(line.step);
    if (at < 0) return false;
    steps[at] = line.step;
    run.newest = line.step;
    for (const [name, value] of Object.entries(line)) {
      if (name === "step" || typeof value !== "number") continue;
      if (!columns.has(name)) columns.set(name, Array(steps.length).fill(null));
      run.curves.last[name] = value;
    }
    for (const [name, column] of columns) column[at] = typeof line[name] === "number" ? line[name] : null;
    if (line.nonfinite) run.curves.events.push({ event: "nonfinite", step: line.step, ...line.nonfinite });
  }
  run.allEvents = null;
  run.curves.points = steps.length;
  state.status.textContent = t("Live: step {s}", { s: run.newest ?? steps[steps.length - 1] ?? 0 });
  if (state.refresh) state.refresh();
  return true;
}
