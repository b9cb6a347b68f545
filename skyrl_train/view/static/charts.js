"use strict";
// Curves and bars (uPlot), the bar of steps and the timeline (SVG). They take colours from app.css, so that both themes hold.

const KINDS = ["wait", "update", "sync", "save", "eval", "other"]; // of a learner's phases, as timeline.png has them

function colourOf(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// Exponential moving average of weight `smoothing` (0 to 0.99), corrected for its start; nulls stay nulls.
function smoothed(values, smoothing) {
  let sum = 0,
    weight = 0;
  return values.map((value) => {
    if (!isNumber(value)) return null;
    sum = smoothing * sum + (1 - smoothing) * value;
    weight = smoothing * weight + (1 - smoothing);
    return sum / weight;
  });
}

// A number as an axis shows it: 12k for 12,000.
function shortNumber(value) {
  if (value === null) return "";
  for (const [unit, size] of [
    ["M", 1e6],
    ["k", 1e3],
  ]) {
    if (Math.abs(value) >= 10 * size) return `${Number((value / size).toPrecision(3))}${unit}`;
  }
  return String(Number(value.toPrecision(4)));
}

function axes(height) {
  const common = {
    stroke: colourOf("muted"),
    grid: { stroke: colourOf("grid"), width: 1 },
    ticks: { show: false },
    font: "11px system-ui",
  };
  const compact = (_, ticks) => ticks.map(shortNumber);
  return [
    { ...common, size: 24, space: 60, values: compact },
    { ...common, size: 46, space: height > 120 ? 30 : 22, values: compact },
  ];
}

// Draws into `parent` and keeps the width of what is around. Returns {update(data)}, which leaves a zoomed view where it is.
function plot(parent, options, data) {
  const height = 150;
  let zoomed = false;
  const chart = new uPlot(
    {
      width: Math.max(160, parent.clientWidth),
      height,
      padding: [8, 12, 0, 0],
      axes: axes(height),
      legend: { show: false },
      cursor: { sync: { key: "steps" }, points: { size: 5 }, drag: { x: true, y: false } },
      scales: { x: { time: false } },
      ...options,
      hooks: {
        ...options.hooks,
        setSelect: [
          (self) => {
            zoomed = self.select.width > 0;
          },
        ],
      },
    },
    data,
    parent,
  );
  chart.over.addEventListener("dblclick", () => {
    zoomed = false;
  });
  new ResizeObserver(() => {
    const width = parent.clientWidth;
    if (width > 0 && Math.abs(width - chart.width) > 1) chart.setSize({ width, height });
  }).observe(parent);
  return { update: (next) => chart.setData(next, !zoomed) };
}

// A figure of lines. `lines`: [{label, colour, points: [[x, y]], marks}], where `marks` draws points on a thin line. The
// caption shows the last values, or those under the cursor. `update` takes new lines and keeps what is zoomed into.
function curves(title, lines, { smoothing = 0, x = "step", removed = null } = {}) {
  const values = h("span.values");
  const area = h("div.plot", { role: "img", "aria-label": `${title} by ${x}` });
  const remove =
    removed &&
    h("button", { type: "button", class: "quiet", "aria-label": `remove ${title}`, on: { click: removed } }, "×");
  const element = h("figure", h("figcaption", { title }, h("span.title", title), values, remove), area);
  let chart = null,
    data = [],
    series = [];

  function tell(index) {
    replaceChildren(
      values,
      lines.map((line, number) => {
        const column = data[number * 2 + 2] || [];
        const at = index === null || index === undefined ? column.findLastIndex(isNumber) : index;
        return line.marks && lines.length > 1 && !isNumber(column[at])
          ? null
          : h(
              "span",
              { title: line.label },
              h("i", { class: line.marks ? "dot hollow" : "dot", style: { color: line.colour } }),
              shown(column[at]),
            );
      }),
    );
  }

  function compute() {
    lines = lines.map((line) => ({ ...line, points: line.points.filter(([at]) => isNumber(at)) }));
    const tables = lines.map((line) => {
      const ys = line.points.map(([, y]) => (isNumber(y) ? y : null));
      return [line.points.map(([at]) => at), ys, line.marks ? ys : smoothed(ys, smoothing)];
    });
    data = uPlot.join(tables);
    series = [
      {},
      ...lines.flatMap((line) =>
        line.marks
          ? [
              { show: false },
              {
                stroke: line.colour,
                width: 1,
                dash: [2, 3],
                spanGaps: true,
                points: { show: true, size: 7, width: 1.5, fill: colourOf("panel") },
              },
            ]
          : [
              { stroke: line.colour, alpha: 0.25, width: 1, show: smoothing > 0, points: { show: false } },
              {
                stroke: line.colour,
                width: 1.75,
                spanGaps: true,
                points: { show: line.points.filter(([, y]) => isNumber(y)).length < 2, size: 5 },
              },
            ],
      ),
    ];
  }

  function draw() {
    compute();
    tell(null);
    if (!lines.some((line) => line.points.some(([, y]) => isNumber(y))))
      return replaceChildren(area, h("p.empty", "no values"));
    replaceChildren(area);
    chart = plot(area, { series, hooks: { setCursor: [(self) => tell(self.cursor.idx)] } }, data);
    return area;
  }

  return {
    element,
    draw,
    update: (next) => {
      const isSame = chart && next.length === lines.length;
      lines = next;
      if (!isSame) return draw();
      compute();
      tell(null);
      return chart.update(data);
    },
  };
}

function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

// A figure of bars, one upon another. `layers`: [{label, colour, values}], each as long as `xs`.
function stack(title, xs, layers, unit = shown) {
  const values = h("span.values");
  const area = h("div.plot", { role: "img", "aria-label": `${title} by step` });
  const figure = h("figure.wide", h("figcaption", h("span.title", title), values), area);
  const below = xs.map(() => 0);
  const tops = layers.map((layer) =>
    layer.values.map((value, index) => {
      below[index] += value || 0;
      return below[index];
    }),
  );
  const tell = (index) =>
    replaceChildren(
      values,
      layers.map((layer) =>
        h(
          "span",
          h("i.swatch", { style: { color: layer.colour } }),
          layer.label,
          index === null ? null : ` ${unit(layer.values[index] || 0)}`,
        ),
      ),
    );
  tell(null);
  if (!xs.length) return { element: figure, draw: () => replaceChildren(area, h("p.empty", "no steps yet")) };
  const bars = uPlot.paths.bars({ size: [0.85, 60] });
  const drawn = layers.map((layer, index) => ({ layer, top: tops[index] })).reverse(); // the tallest first: others cover it
  return {
    element: figure,
    draw: () =>
      plot(
        area,
        {
          series: [
            {},
            ...drawn.map(({ layer }) => ({
              fill: layer.colour,
              stroke: layer.colour,
              width: 0,
              paths: bars,
              points: { show: false },
            })),
          ],
          scales: {
            x: { time: false, range: (_, low, high) => [low - 0.6, high + 0.6] },
            y: { range: (_, low, high) => [0, high * 1.05 || 1] },
          },
          hooks: { setCursor: [(self) => tell(self.cursor.idx)] },
        },
        [xs, ...drawn.map(({ top }) => top)],
      ),
  };
}

// The steps of a run as a bar, coloured by the share of failed trajectories; red where the step itself failed. Long runs are
// drawn as at most 240 parts, each as bad as its worst step. `steps`: [{step, failures, trajectories, failed}].
function stepBar(steps, href) {
  const size = Math.max(1, Math.ceil(steps.length / 240)),
    parts = [];
  for (let begin = 0; begin < steps.length; begin += size) parts.push(steps.slice(begin, begin + size));
  return h(
    "div.steps",
    { role: "group", "aria-label": "steps by failures" },
    parts.map((part) => {
      const failures = part.reduce((sum, step) => sum + (step.failures || 0), 0);
      const total = part.reduce((sum, step) => sum + (step.trajectories || 0), 0);
      const share = Math.max(...part.map((step) => (step.trajectories ? (step.failures || 0) / step.trajectories : 0)));
      const failed = part.some((step) => step.failed);
      const name = part.length > 1 ? `steps ${part[0].step} to ${part.at(-1).step}` : `step ${part[0].step}`;
      const level = failed ? "failed" : failures === 0 ? "fine" : share < 0.05 ? "few" : share < 0.25 ? "some" : "many";
      const text = `${name}: ${failed ? "the step failed; " : ""}${shown(failures)}${total ? ` of ${shown(total)}` : ""} trajectories failed`;
      return h("a", { href: href(part), class: level, title: text, "aria-label": text, tabindex: "-1" });
    }),
  );
}

// What ran when: the learner's phases, the engine, groups in flight. `lines` as timeline.jsonl has them, in order; what came
// before a long gap, when the run stood still, is left out.
function gantt(lines) {
  const isGap = (line, index) =>
    index > 0 && line.began - lines[index - 1].began - lines[index - 1].seconds > Math.max(60, 4 * line.seconds);
  lines = lines.slice(Math.max(0, lines.findLastIndex(isGap)));
  if (!lines.length) return h("p.empty", "No timeline was recorded.");
  const origin = lines[0].began,
    end = Math.max(...lines.map((line) => line.began + line.seconds));
  const width = 1000,
    at = (moment) => ((moment - origin) / Math.max(1e-9, end - origin)) * width;
  const rect = (line, from, to, y, name, kind) =>
    svg(
      "rect",
      {
        x: at(line.began + from).toFixed(2),
        y,
        height: 18,
        width: Math.max(0.6, at(line.began + to) - at(line.began + from)).toFixed(2),
        class: kind,
      },
      svg("title", {}, `step ${line.step}: ${name}, ${seconds(to - from)}`),
    );
  const groups = lines.flatMap((line) => line.groups.map(([moment, number]) => [at(line.began + moment), number]));
  const most = Math.max(1, ...groups.map(([, number]) => number));
  const path = groups
    .map(
      ([x, number], index) =>
        `${index ? `H${x.toFixed(1)}V` : `M${x.toFixed(1)} `}${(110 - (number / most) * 44).toFixed(1)}`,
    )
    .join("");
  return h(
    "div.gantt",
    h("div.lanes", { "aria-hidden": "true" }, h("span", "learner"), h("span", "engine"), h("span", `groups ≤ ${most}`)),
    svg(
      "svg",
      {
        viewBox: `0 0 ${width} 124`,
        preserveAspectRatio: "none",
        role: "img",
        "aria-label": `steps ${lines[0].step} to ${lines.at(-1).step}: what ran when, over ${seconds(end - origin)}`,
      },
      lines.map((line) =>
        svg("line", {
          x1: at(line.began),
          x2: at(line.began),
          y1: 0,
          y2: 114,
          class: "tick",
          "vector-effect": "non-scaling-stroke",
        }),
      ),
      lines.flatMap((line) =>
        line.learner.map(({ name, kind, begin, end: to }) => rect(line, begin, to, 8, name, kind)),
      ),
      lines.flatMap((line) => line.engine.map(([from, to]) => rect(line, from, to, 34, "engine busy", "engine"))),
      path ? svg("path", { d: path + `H${width}`, class: "groups", "vector-effect": "non-scaling-stroke" }) : null,
    ),
    h("div.ends", h("span", `step ${lines[0].step}`), h("span", seconds(end - origin))),
    h(
      "div.legend",
      KINDS.map((kind) => h("span", h("i", { class: `swatch ${kind}` }), kind)),
      h("span", h("i.swatch.engine"), "engine busy"),
    ),
  );
}
