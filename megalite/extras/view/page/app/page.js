// Elements of the page. Texts become text nodes, never markup.

function el(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (name === "text") node.textContent = value;
    else if (value !== false && value !== null) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

// A text that comes from a run: in a direction of its own, so that it cannot turn its neighbors round.
const foreign = (text) => el("bdi", { text: safe(text) });

// headers: texts; rows: lists of texts, numbers or nodes. Cells with numbers are set right.
function table(headers, rows, options = {}) {
  const head = el("tr", {}, headers.map((text) => el("th", { scope: "col", text })));
  const body = rows.map((row) => el("tr", row.options || {}, (row.cells || row).map(cell)));
  return el("div", { class: "wide" }, el("table", options, el("thead", {}, head), el("tbody", {}, body)));
}

function cell(content) {
  if (content instanceof HTMLTableCellElement) return content;
  if (content instanceof Node) return el("td", {}, content);
  const isNumber = typeof content === "number" || /^[-–]?[\d.,]+( ?(%|[kMGTP]?B|m?s))?$/.test(String(content));
  return el("td", { class: isNumber ? "number" : "", text: typeof content === "number" ? number(content) : safe(content) });
}

const note = (...content) => el("p", { class: "note" }, content);

// Put something in the place of what a node holds; what is not there is left out.
const fill = (node, ...content) => node.replaceChildren(...content.flat(Infinity).filter((child) => child !== null && child !== undefined));

// A view whose data are not there says what writes them.
function missing(part) {
  if (part && part.problem) return note(t("This part could not be made: "), foreign(part.problem));
  const by = part && part.remedy ? [t("It is written with: "), el("code", { text: part.remedy })] : [];
  return note(t("This run has no such data. "), by);
}

const isThere = (part) => Boolean(part) && !part.problem && !part.missing;

function choice(label, values, chosen, onchange) {
  const options = values.map(([value, text]) => el("option", { value, selected: String(value) === String(chosen), text: safe(text) }));
  const select = el("select", { onchange: () => onchange(select.value) }, options);
  return el("label", {}, label + " ", select);
}

const button = (text, onclick, options = {}) => el("button", { type: "button", text, onclick, ...options });

const voice = el("div", { class: "spoken", "aria-live": "polite" });
let spoken = 0;

// Say a value to a screen reader, not more often than it can be heard.
function say(text) {
  clearTimeout(spoken);
  spoken = setTimeout(() => { voice.textContent = text; }, 150);
}

// Colors of the style sheet, each asked for once: the browser may have to compute all styles to answer.
const colors = new Map();
function color(name) {
  if (!colors.has(name)) colors.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return colors.get(name);
}
const RUN_COLORS = 7;
const runColor = (i) => color(`run-${i % RUN_COLORS}`);

// A canvas as wide as its container and sharp on any screen; draw(context, width, height) at each change of size.
function drawing(height, draw, label) {
  const canvas = el("canvas", { tabindex: "0", role: "img", "aria-label": label });
  const box = el("div", { class: "drawing" }, canvas);
  canvas.height = height;
  const again = () => {
    const width = Math.max(50, Math.floor(box.clientWidth));
    const scale = window.devicePixelRatio || 1;
    canvas.width = width * scale;
    canvas.height = height * scale;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = "12px system-ui, sans-serif";
    draw(context, width, height);
  };
  watchSize(box, again);
  return { box, canvas, again };
}

// Calls again at each change of width, and when the colors change. What has left the page is forgotten.
const redrawn = new Set();
function watchSize(box, again) {
  let width = -1;
  const observer = new ResizeObserver(() => {
    if (!box.isConnected) {
      observer.disconnect();
      redrawn.delete(entry);
    } else if (box.clientWidth !== width && box.clientWidth > 0) {
      width = box.clientWidth;
      again();
    }
  });
  const entry = { box, again };
  redrawn.add(entry);
  observer.observe(box);
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  colors.clear();
  for (const { box, again } of redrawn) if (box.isConnected && box.clientWidth > 0) again();
});

function download(name, blob) {
  const link = el("a", { download: name });
  const url = URL.createObjectURL(blob);
  link.setAttribute("href", url);
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

const details = (summary, ...content) => el("details", {}, el("summary", { text: summary }), content);
