"use strict";
// Elements, numbers and links. The only place that makes elements: text goes in as text nodes and never as HTML, so that
// nothing a model wrote can become markup.

// Returns an element: `h("span.note.muted", { title: "why" }, "text", child)`. Attributes may be left out. Children are
// elements, texts, numbers or lists of them; null, undefined and false are left out. Of the attributes `on` holds listeners,
// `style` properties; false, null and undefined are left out, true is an empty one.
function h(name, ...parts) {
  const [tag, ...classes] = name.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  return fill(element, parts);
}

// The same for SVG, without classes in the name.
function svg(tag, ...parts) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), parts);
}

function fill(element, parts) {
  const hasAttributes = parts[0] && Object.getPrototypeOf(parts[0]) === Object.prototype;
  const { on = {}, style = {}, value, ...attributes } = hasAttributes ? parts.shift() : {};
  for (const [event, listener] of Object.entries(on)) element.addEventListener(event, listener);
  for (const [property, text] of Object.entries(style)) element.style.setProperty(property, text);
  for (const [name, text] of Object.entries(attributes)) {
    if (text !== null && text !== undefined && text !== false) element.setAttribute(name, text === true ? "" : text);
  }
  element.append(...kept(parts));
  if (value !== undefined) element.value = value; // of a drop-down after its options
  return element;
}

function kept(children) {
  return children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
}

function replaceChildren(element, ...children) {
  element.replaceChildren(...kept(children));
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
  for (const [unit, size] of [
    ["GB", 1e9],
    ["MB", 1e6],
    ["kB", 1e3],
  ])
    if (value >= size) return `${Number((value / size).toPrecision(3))} ${unit}`;
  return `${value} B`;
}

function count(number, noun) {
  return `${shown(number)} ${noun}${number === 1 ? "" : "s"}`;
}

// Returns a section with a heading, which the page's contents can be navigated by.
function section(title, note, ...children) {
  const id = `s-${title.toLowerCase().replace(/[^a-z]+/g, "-")}`;
  return h("section", { "aria-labelledby": id }, h("h2", { id }, title, note ? h("span.note", note) : null), children);
}

// Returns a table: `rows` hold texts, numbers or elements. A column whose first cell is a number is set flush right.
function table(headings, rows, attributes) {
  const isNumeric = headings.map((_, column) => rows.length > 0 && typeof rows[0][column] === "number");
  const cell = (value, column) =>
    h(
      "td",
      { class: isNumeric[column] ? "number" : typeof value === "string" && value.length > 24 ? "long" : null },
      typeof value === "number" ? shown(value) : value,
    );
  return h(
    "div.scroll",
    { tabindex: "0", role: "group", "aria-label": (attributes && attributes.label) || headings.join(", ") },
    h(
      "table",
      h(
        "thead",
        h(
          "tr",
          headings.map((heading, column) =>
            h("th", { scope: "col", class: isNumeric[column] ? "number" : null }, heading),
          ),
        ),
      ),
      h(
        "tbody",
        rows.map((row) => h("tr", row.map(cell))),
      ),
    ),
  );
}

function empty(...message) {
  return h("p.empty", message);
}

// Returns a labelled drop-down of [value, label] pairs.
function choice(label, options, value, changed) {
  const select = h(
    "select",
    { on: { change: (event) => changed(event.target.value) } },
    options.map(([key, text]) => h("option", { value: key, selected: String(key) === String(value) }, text)),
  );
  return h("label.field", label, select);
}

// A button that copies `text`; where the browser allows no clipboard the text is selected instead.
function copyable(text, label) {
  const code = h("code", text);
  const button = h(
    "button",
    {
      type: "button",
      on: {
        click: async () => {
          try {
            await navigator.clipboard.writeText(text);
            button.textContent = "Copied";
          } catch {
            getSelection().selectAllChildren(code);
            button.textContent = "Selected";
          }
          setTimeout(() => {
            button.textContent = "Copy";
          }, 1500);
        },
      },
    },
    "Copy",
  );
  return h("div.copyable", { role: "group", "aria-label": label }, code, button);
}

// Okabe and Ito's colours, which people with any common colour blindness tell apart.
const RUN_COLOURS = ["#1f86c9", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f7f7f", "#a08bd8"];

function dark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}
