// The frame: header, one tab for each view, the run that is looked at.

const VIEWS = [
  ["curves", "Curves", curvesView], ["grid", "Ranks and shards", gridView], ["schedule", "Schedule", scheduleView],
  ["messages", "Messages", messagesView], ["memory", "Memory", memoryView], ["experts", "Experts", expertsView],
  ["checkpoints", "Checkpoints", checkpointsView], ["why", "Why distribute", whyView],
];

function start() {
  const data = JSON.parse(document.getElementById("data").textContent);
  chooseLanguage(new URLSearchParams(location.search).get("lang") || navigator.language);
  const state = { data, run: data.runs[0], drawn: {}, view: "", status: el("span", { class: "status" }) };
  const frame = el("div", { id: "frame" });
  document.body.append(frame, voice);
  const build = () => frame.replaceChildren(...frameOf(state, build));
  build();
  window.addEventListener("hashchange", () => open(state, location.hash.slice(1)));
  if (data.live) follow(state);
  // For tests: what is drawn, which cannot be read off a canvas.
  window.megalite = Object.freeze({ view: () => state.view, drawn: (name) => state.drawn[name] && state.drawn[name]() });
  document.documentElement.dataset.ready = "yes";
}

function frameOf(state, build) {
  const { data } = state;
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
  const tabs = el("div", { role: "tablist", class: "tabs", "aria-label": t("Views") }, VIEWS.map(([key, title]) =>
    el("button", { type: "button", role: "tab", id: `tab-${key}`, "aria-controls": "view", tabindex: "-1", text: t(title), onclick: () => { location.hash = key; open(state, key); } })));
  tabs.addEventListener("keydown", (event) => moveTab(event, tabs));
  state.main = el("main", { id: "view", role: "tabpanel", tabindex: "-1" });
  const other = language === "zh" ? "en" : "zh";
  const header = el("header", {},
    el("a", { class: "skip", href: "#view", text: t("To the view"), onclick: (e) => { e.preventDefault(); state.main.focus(); } }),
    el("h1", {}, data.runs.map((run, i) => [i ? ", " : "", foreign(run.name)]).flat()),
    el("p", { class: "small" }, layoutText(state.run), " ", state.status),
    data.runs.length > 1 ? choice(t("Run of all views but the curves"), data.runs.map((run, i) => [i, run.name]), data.runs.indexOf(state.run), (i) => { state.run = data.runs[i]; build(); }) : null,
    button(language === "zh" ? "English" : "中文", () => { chooseLanguage(other); build(); }, { class: "small", lang: other }),
    button(t("Print"), () => window.print(), { class: "small" }));
  const view = location.hash.slice(1) || state.view || "curves";
  queueMicrotask(() => open(state, VIEWS.some(([key]) => key === view) ? view : "curves"));
  return [header, tabs, state.main, sources(state)];
}

function layoutText(run) {
  if (!isThere(run.layout)) return t("layout unknown: ") + safe((run.layout && run.layout.problem) || "");
  const { model, parallel, train, ranks } = run.layout;
  const sizes = ["tp", "pp", "vp", "cp", "ep"].filter((name) => parallel[name] > 1).map((name) => `${name} ${parallel[name]}`);
  const experts = model.num_experts ? `, ${model.num_experts} ${t("experts")}` : "";
  return `${safe(model.arch)}, ${model.num_layers} ${t("layers")}, ${t("hidden size")} ${model.hidden_size}${experts}; ${t("{n} ranks: ", { n: ranks })}${sizes.join(", ")}${sizes.length ? ", " : ""}ZeRO ${parallel.zero}; ${train.precision}, ${parallel.device}`;
}

function moveTab(event, tabs) {
  const all = [...tabs.children];
  const at = all.indexOf(document.activeElement);
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1 }[event.key];
  if (to === undefined || at < 0) return;
  event.preventDefault();
  const tab = all[(to + all.length) % all.length];
  tab.focus();
  tab.click();
}

function open(state, name) {
  const found = VIEWS.find(([key]) => key === name);
  if (!found || state.view === name && state.main.childNodes.length) return;
  const [key, title, view] = found;
  state.view = key;
  for (const [other] of VIEWS) {
    const tab = document.getElementById(`tab-${other}`);
    tab.setAttribute("aria-selected", other === key);
    tab.setAttribute("tabindex", other === key ? "0" : "-1");
  }
  const show = () => {
    try {
      fill(state.main, el("h2", { text: t(title) }), view(state));
    } catch (error) {
      // One view that fails leaves the others.
      fill(state.main, note(t("This view could not be drawn: "), foreign(error.message)));
      if (!state.data.live) throw error;
    }
  };
  state.refresh = null;
  state.reopen = show;
  show();
}

function sources(state) {
  const { data } = state;
  const used = [
    [t("Curves"), "metrics.jsonl"], [t("Ranks and shards"), "config.yaml; megalite estimate"], [t("Schedule"), "schedule/*.jsonl; megalite schedule --run"],
    [t("Messages"), "megalite estimate"], [t("Memory"), "megalite plan explain; megalite estimate"], [t("Experts"), "experts.jsonl"],
    [t("Checkpoints"), "checkpoints/*/manifest.json; megalite inspect"], [t("Why distribute"), "megalite plan"],
  ];
  return el("footer", {}, details(t("Where this page's figures come from"),
    el("p", { text: `megalite ${data.megalite}, ${t("made")} ${data.made}` }), table([t("View"), t("from")], used)));
}

start();
