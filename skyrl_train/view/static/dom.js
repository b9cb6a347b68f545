"use strict";
// Elements, numbers and links. The only place that makes elements: text goes in as text nodes and never as HTML, so that
// nothing a model wrote can become markup.

// Returns an element. Children are elements, texts or numbers; null and false are left out. Attributes: `on` holds
// listeners, `class` and the others are set as attributes; false, null and undefined are left out, true is an empty one.
function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

// The same for SVG.
function svg(tag, attributes, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (name === "style") for (const [property, text] of Object.entries(value)) element.style.setProperty(property, text);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

function replaceChildren(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// Returns a number in at most five significant digits, "–" where there is none.
function shown(value) {
  if (value === null || value === undefined || value === "") return "–";
  if (typeof value !== "number") return String(value);
  if (!Number.isFinite(value)) return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size >= 1e5) return Math.round(value).toLocaleString("en-US");
  if (size < 1e-3) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

function seconds(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 100) return `${Number(value.toPrecision(3))} s`;
  if (value < 6000) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
}

function bytes(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) if (value >= size) return `${Number((value / size).toPrecision(3))} ${unit}`;
  return `${value} B`;
}

function count(number, noun) {
  return `${shown(number)} ${noun}${number === 1 ? "" : "s"}`;
}

// Returns a section with a heading, which the page's contents can be navigated by.
function section(title, note, ...children) {
  const id = `s-${title.toLowerCase().replace(/[^a-z]+/g, "-")}`;
  return h("section", { "aria-labelledby": id }, h("h2", { id }, title, note ? h("span", { class: "note" }, note) : null), children);
}

// Returns a table: `rows` hold texts, numbers or elements. A column whose first cell is a number is set flush right.
function table(headings, rows, attributes) {
  const isNumeric = headings.map((_, column) => rows.length > 0 && typeof rows[0][column] === "number");
  const cell = (value, column) => h("td", { class: isNumeric[column] ? "number" : typeof value === "string" && value.length > 24 ? "long" : null }, typeof value === "number" ? shown(value) : value);
  return h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": (attributes && attributes.label) || headings.join(", ") },
    h("table", {}, h("thead", {}, h("tr", {}, headings.map((heading, column) => h("th", { scope: "col", class: isNumeric[column] ? "number" : null }, heading)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map(cell))))));
}

function empty(...message) {
  return h("p", { class: "empty" }, message);
}

// Returns a labelled drop-down of [value, label] pairs.
function choice(label, options, value, changed) {
  const select = h("select", { on: { change: (event) => changed(event.target.value) } },
    options.map(([key, text]) => h("option", { value: key, selected: String(key) === String(value) }, text)));
  return h("label", { class: "field" }, label, select);
}

// A button that copies `text`; where the browser allows no clipboard the text is selected instead.
function copyable(text, label) {
  const code = h("code", {}, text);
  const button = h("button", { type: "button", on: { click: async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code);
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  } } }, "Copy");
  return h("div", { class: "copyable", role: "group", "aria-label": label }, code, button);
}

// Okabe and Ito's colours, which people with any common colour blindness tell apart.
const RUN_COLOURS = ["#1f86c9", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f7f7f", "#a08bd8"];

function dark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}
