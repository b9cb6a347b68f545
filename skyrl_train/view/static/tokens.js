"use strict";
// Tokens of a response: their colours, the legend, their numbers under the pointer or the arrow keys.

const NUMBERS = [
  ["logprob", "log-prob, engine"],
  ["policy_logprob", "log-prob, trainer"],
  ["reference_logprob", "log-prob, reference"],
  ["difference", "difference"],
  ["ratio", "ratio"],
  ["clipped", "clipped"],
  ["advantage", "advantage"],
  ["entropy", "entropy"],
  ["mask", "trained on"],
  ["version", "weight version"],
];

// A token's text; a line break is shown and breaks the line.
function pieces(text) {
  return text.includes("\n")
    ? text.split(/(\n)/).map((part) => (part === "\n" ? [h("i.break", "↵"), "\n"] : part))
    : text;
}

// Sets the colour of one token. Diverging: orange below the centre, blue above; sequential: stronger for larger sizes.
function shade(token, column, values, number) {
  const value = values ? values[number] : null;
  token.className = value === null || value === undefined ? "none" : "";
  const colour = value === null || value === undefined ? "" : colourFor(column, value);
  token.style.background = colour;
}

function colourFor(column, value) {
  const tint = (name, strength) =>
    `color-mix(in srgb, var(--${name}) ${Math.round(8 + 62 * Math.min(1, Math.max(0, strength)))}%, transparent)`;
  if (column.kind === "flag") return (column.name === "mask" ? !value : value) ? "var(--flagged)" : "";
  if (column.kind === "category")
    return `color-mix(in srgb, ${RUN_COLOURS[Math.abs(Math.round(value)) % RUN_COLOURS.length]} 32%, transparent)`;
  if (column.kind === "diverging") {
    const centre = column.centre || 0,
      reach = Math.max(Math.abs(column.max - centre), Math.abs(column.min - centre)) || 1;
    return value === centre ? "" : tint(value > centre ? "high" : "low", Math.abs(value - centre) / reach);
  }
  const reach = column.max - column.min || 1; // of log-probs the lowest are of interest, of the others the highest
  const part = (value - column.min) / reach;
  return tint("level", column.name.endsWith("logprob") ? 1 - part : part);
}

function scaleLegend(column) {
  if (!column) return [];
  const box = (value, text) =>
    h("span", h("i.swatch", { style: { background: colourFor(column, value) || "var(--panel)" } }), text);
  const entries =
    column.kind === "flag"
      ? [box(column.name !== "mask", column.name === "mask" ? "not trained on" : column.label)]
      : column.kind === "category"
        ? Array.from({ length: Math.min(8, column.max - column.min + 1) }, (_, index) =>
            box(column.min + index, `${column.min + index}`),
          )
        : [
            h(
              "span.ramp",
              shown(column.min),
              h(
                "span.steps-of-ramp",
                Array.from({ length: 13 }, (_, index) =>
                  h("i", {
                    style: {
                      background:
                        colourFor(column, column.min + ((column.max - column.min) * index) / 12) || "transparent",
                    },
                  }),
                ),
              ),
              shown(column.max),
            ),
          ];
  return [...entries, h("span.muted", { title: column.meaning }, column.meaning)];
}

// Marks what a search finds in the texts on the page, as ranges of them: no element is made, and a match may span tokens.
// Tells how many there are in `told`; returns the element of the first.
function markFound(text, told) {
  if (!window.Highlight) return null;
  CSS.highlights.delete("found");
  if (!text) return null;
  const ranges = [];
  try {
    for (const element of document.querySelectorAll("#main .content:not(.ids, .raw .content), #main .call code, #main .failure"))
      ranges.push(...rangesOf(element, patternOf(text)));
  } catch (error) {
    if (told) told.textContent = error.message;
    return null;
  }
  CSS.highlights.set("found", new Highlight(...ranges));
  if (told) told.textContent = `${count(ranges.length, "match").replace("matchs", "matches")} of ${text}`;
  return ranges.length ? ranges[0].startContainer.parentElement : null;
}

function rangesOf(element, pattern) {
  const isText = (node) => (node.parentElement.closest(".break") ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT);
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT, isText);
  const nodes = [];
  let whole = "";
  while (walker.nextNode()) {
    nodes.push({ node: walker.currentNode, start: whole.length });
    whole += walker.currentNode.data;
  }
  const found = [...whole.matchAll(pattern)].filter(([match]) => match);
  return found.map(({ 0: match, index }) => {
    const range = new Range(),
      first = nodes.findLast(({ start }) => start <= index),
      last = nodes.findLast(({ start }) => start < index + match.length);
    range.setStart(first.node, index - first.start);
    range.setEnd(last.node, index + match.length - last.start);
    return range;
  });
}

// Tells a token's numbers: under the pointer, after a tap, or with the arrow keys.
function inspect(response, tokens, turn) {
  const tip = document.getElementById("tip");
  let current = -1;
  const tell = (index) => {
    if (current >= 0 && tokens[current]) tokens[current].classList.remove("current");
    current = index;
    if (index < 0) {
      tip.hidden = true;
      return;
    }
    tokens[index].classList.add("current");
    const values = NUMBERS.filter(([name]) => turn.tokens[name]).map(([name, label]) => [
      label,
      turn.tokens[name][index],
    ]);
    replaceChildren(
      tip,
      h(
        "div.token",
        turn.tokens.texts ? JSON.stringify(turn.tokens.texts[index]) : "",
        h("small", ` id ${turn.tokens.ids[index]}, number ${index}`),
      ),
      h(
        "dl.pairs",
        values.map(([label, value]) => [
          h("dt", label),
          h("dd", typeof value === "boolean" ? (value ? "yes" : "no") : shown(value)),
        ]),
      ),
    );
    tip.hidden = false;
    const box = tokens[index].getBoundingClientRect(),
      size = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - size.width - 8))}px`;
    tip.style.top = `${box.bottom + size.height + 10 > innerHeight ? Math.max(8, box.top - size.height - 6) : box.bottom + 6}px`;
  };
  const over = (event) => {
    const token = event.target.closest("[data-n]");
    if (token) tell(Number(token.dataset.n));
  };
  response.addEventListener("pointerover", over);
  response.addEventListener("click", over);
  response.addEventListener("pointerleave", () => tell(-1));
  response.addEventListener("blur", () => tell(-1));
  response.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by || !tokens.length) return;
    event.preventDefault();
    event.stopPropagation();
    tell(Math.max(0, Math.min(tokens.length - 1, current + by)));
    tokens[current].scrollIntoView({ block: "nearest" });
  });
}
