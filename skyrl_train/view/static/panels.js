"use strict";
// Panels of the overview below the curves: what a step's time went to, memory, the ledger, plan, environment, settings.

const LAYERS = {
  generate: "c1",
  update: "c2",
  score: "c3",
  estimate: "c9",
  assemble: "c6",
  sync: "c5",
  evaluate: "c7",
  checkpoint: "c8",
  rollouts: "c1",
  "engine idle": "c7",
  "engine at work": "c4",
  other: "line",
};

// Phases, waits, and waits for environments apart: those are added up over trajectories, which wait beside each other.
function phasesPanel() {
  const draw = ({ overview }, body) => {
    const steps = overview.steps.slice(-400);
    const figures = [
      stackOf("phases", steps, (step) => step.phases),
      stackOf("waits", steps, ({ waits: { environments, environments_alone, ...others } }) => others),
      stackOf("waits for environments, added up over trajectories", steps, waitsForEnvironments),
    ].filter(Boolean);
    replaceChildren(body, figures.length ? figures.map((figure) => figure.element) : empty("No times were recorded."));
    figures.forEach((figure) => figure.draw());
  };
  return panelOf("Time of a step", "seconds", draw, "grid two");
}

// The share of them in which the engine computed nothing is recorded beside the seconds.
function waitsForEnvironments({ waits: { environments, environments_alone: alone } }) {
  if (!isNumber(environments)) return {};
  const idle = environments * (isNumber(alone) ? alone : 0);
  return { "engine idle": idle, "engine at work": environments - idle };
}

// Returns a figure of the seconds that `read` finds in each step, by name; null where there are none.
function stackOf(title, steps, read) {
  const rows = steps.map((step) => [step.step, read(step)]).filter(([, found]) => Object.keys(found).length);
  const names = [...new Set(rows.flatMap(([, found]) => Object.keys(found)))]
    .filter((name) => rows.some(([, found]) => found[name] > 0))
    .sort((a, b) => (a === "other") - (b === "other"));
  const taken = names.map((name) => LAYERS[name]);
  const free = ["c4", "c6", "c8", "c9", "c7", "c3", "c5", "c2", "c1"].filter((colour) => !taken.includes(colour));
  const layers = names.map((label) => ({
    label,
    colour: colourOf(LAYERS[label] || free.shift() || "muted"),
    values: rows.map(([, found]) => found[label] || 0),
  }));
  const at = rows.map(([step]) => step);
  return layers.length ? stack(title, at, layers, seconds) : null;
}

function timelinePanel() {
  let window_ = 8;
  let current = null;
  const body = h("div");
  const draw = () => replaceChildren(body, gantt(current.overview.timeline.slice(-window_)));
  const controls = h(
    "div.controls",
    choice(
      "last",
      [4, 8, 16, 50].map((steps) => [steps, `${steps} steps`]),
      window_,
      (steps) => {
        window_ = Number(steps);
        draw();
      },
    ),
  );
  return {
    body,
    element: section(
      "Timeline",
      "what ran when; gaps of the engine within a step are waits for environments",
      controls,
      body,
    ),
    update: (model) => {
      current = model;
      draw();
    },
  };
}

function memoryPanel() {
  return panelOf("Memory", "the largest micro-batch that was measured, against the budget", ({ overview }, body) => {
    const { roles = [], measured = {} } = overview.memory || {};
    const bars = roles.map((role) => {
      const most = Math.max(0, ...role.probes.map((probe) => probe.peak_bytes)),
        scale = Math.max(role.limit_bytes || 0, role.predicted_bytes || 0, most) || 1;
      const part = (value) => `${(100 * (value || 0)) / scale}%`;
      return h(
        "div.memory",
        h("span", `${role.role}, ${role.pass}`),
        h(
          "div.bar",
          {
            role: "img",
            "aria-label": `${bytes(most)} measured, ${bytes(role.predicted_bytes)} predicted, limit ${bytes(role.limit_bytes)}`,
          },
          h("i.measured", { style: { width: part(most) } }),
          role.predicted_bytes && h("i.predicted", { style: { left: part(role.predicted_bytes) } }),
          role.limit_bytes && h("i.limit", { style: { left: part(role.limit_bytes) } }),
        ),
        h(
          "span.muted",
          [
            `${bytes(most)} measured`,
            role.predicted_bytes && `${bytes(role.predicted_bytes)} predicted`,
            role.tokens && `micro-batches of ${count(role.tokens, "token")}`,
            role.limit_bytes && `limit ${bytes(role.limit_bytes)}`,
          ]
            .filter(Boolean)
            .join(" · "),
        ),
      );
    });
    const rows = Object.entries(measured)
      .filter(([, points]) => points.length)
      .map(([name, points]) => [
        name,
        points.at(-1)[1],
        Math.max(...points.map(([, value]) => value)),
        spark(points.map(([, value]) => value)),
      ]);
    replaceChildren(
      body,
      bars,
      rows.length ? table(["measured", "last", "highest", "over steps"], rows) : null,
      !bars.length && !rows.length ? empty("Micro-batches were of a fixed size and no memory was measured.") : null,
    );
  });
}

// Mismatch between engine and trainer, and how far the policy had moved on: last value, range, course.
function ledgerPanel() {
  return panelOf(
    "Mismatch and off-policy ledger",
    "engine against trainer; by age of the weights",
    ({ overview, metrics }, body) => {
      const rows = (names) =>
        names
          .map((name) => [name, (metrics[0].series[name] || []).filter((value) => value !== null)])
          .filter(([, values]) => values.length)
          .filter(([, values]) => values.some(Boolean) || values.length < 2) // what was 0 throughout says nothing
          .map(([name, values]) => [
            h("span", { title: meaningOf(name) }, name, h("small.muted.meaning", meaningOf(name))),
            values.at(-1),
            Math.min(...values),
            Math.max(...values),
            spark(values),
          ]);
      const tables = [
        ["mismatch", rows(overview.mismatch)],
        ["off policy", rows(overview.off_policy)],
      ].filter(([, lines]) => lines.length);
      replaceChildren(
        body,
        tables.length
          ? tables.map(([title, lines]) => table([title, "last", "lowest", "highest", "over steps"], lines))
          : empty("Nothing was recorded: engine and trainer were never compared, or agreed to the last digit."),
      );
    },
    "grid two",
  );
}

const LEDGER = [
  [/^mismatch\/logprob_diff/, "nats a token between the engine's log-probability and the trainer's, on the same weights"],
  [/^mismatch\/ratio_outside/, "share of tokens whose probability differs by more than 10 percent between them"],
  [/^mismatch\/ratio/, "probability of a token for the trainer over that for the engine; 1 is no mismatch"],
  [/^off_policy\/numerics/, "the part of the difference that rounding makes: engine and trainer on the same weights"],
  [/^off_policy\/staleness/, "the part that comes of weights which were older when the tokens were sampled"],
  [/^off_policy\/drift/, "the part that this batch's own updates made since it was sampled"],
  [/^off_policy\/unattributed/, "what none of the other parts accounts for"],
  [/^off_policy\/age/, "training steps between the weights that sampled a token and those that train on it"],
  [/^off_policy\/share\/age/, "share of the batch with weights of that age"],
  [/^off_policy\/(k1|kl)/, "estimated KL of the sampling weights to those that are trained, by age"],
  [/^off_policy\/abs/, "absolute difference of log-probabilities, by age"],
  [/^off_policy\/(weight|ratio)/, "importance weight of a token; 1 is on-policy"],
  [/^off_policy\/in_flight/, "responses whose weights changed between two of their tokens"],
  [/^off_policy\/turns/, "share of responses that a mask left out of the loss"],
];

// What a row of the ledger is, in words.
function meaningOf(name) {
  const found = LEDGER.find(([pattern]) => pattern.test(name));
  return found ? found[1] : "";
}

// A course of values as a line of text height.
function spark(values) {
  const kept = values.length > 120 ? values.filter((_, index) => index % Math.ceil(values.length / 120) === 0) : values;
  const low = Math.min(...kept),
    span = Math.max(...kept) - low || 1;
  const points = kept
    .map(
      (value, index) =>
        `${((index / Math.max(1, kept.length - 1)) * 98 + 1).toFixed(1)},${(17 - ((value - low) / span) * 14).toFixed(1)}`,
    )
    .join(" ");
  return svg(
    "svg",
    { class: "spark", viewBox: "0 0 100 20", preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("polyline", { points, "vector-effect": "non-scaling-stroke" }),
  );
}

function planPanel() {
  return panelOf("Plan and what happened", null, ({ overview }, body) => {
    const rows = overview.plan.map(({ name, planned, happened }) => [
      name.replaceAll("_", " "),
      planned,
      happened === null ? "–" : happened,
    ]);
    replaceChildren(body, rows.length ? table(["size", "planned", "happened"], rows) : empty("The run left no plan."));
  });
}

// The first step, and its curve, at which two runs are not the same any more; empty where they are wherever both have a value.
function firstDifference([one, other], names) {
  for (const [index, step] of one.steps.entries()) {
    const there = other.steps.indexOf(step);
    const name = there < 0 ? undefined : names.find((each) => bothHave(one, other, each, index, there));
    if (name !== undefined) return `; ${name} differs first at step ${step}`;
  }
  return "; no curve of theirs differs at a step that both have";
}

function bothHave(one, other, name, index, there) {
  const [a, b] = [(one.series[name] || [])[index], (other.series[name] || [])[there]];
  return isNumber(a) && isNumber(b) && a !== b;
}

function configPanel({ state, ids, overview, metrics }) {
  const body = h("div"),
    wanted = h("input", {
      type: "search",
      placeholder: "setting or value…",
      "aria-label": "Filter the settings",
      on: { input: () => draw() },
    });
  let differences = null;
  function draw() {
    const fits = (texts) => texts.join(" ").toLowerCase().includes(wanted.value.toLowerCase());
    const text = (value) =>
      value === null || value === undefined
        ? "null"
        : typeof value === "object"
          ? JSON.stringify(value)
          : String(value);
    const rows = (
      differences
        ? differences.rows.map((row) => [row.name, ...row.values.map(text)])
        : overview.config.map(([name, value]) => [name, text(value)])
    ).filter(fits);
    const note = differences
      ? `${count(differences.rows.length, "setting")} differ, ${shown(differences.num_equal)} are equal${firstDifference(metrics, metrics[0].default)}`
      : null;
    replaceChildren(
      body,
      note ? h("p.muted", note) : null,
      rows.length
        ? table(["setting", ...(differences ? differences.runs.map((id) => labelOf(page, id)) : ["value"])], rows, { label: "configuration" })
        : empty("No setting fits."),
    );
  }
  if (ids.length > 1)
    ask("api/diff", { runs: ids.join(",") }).then(
      (answer) => {
        differences = answer;
        draw();
      },
      (error) => replaceChildren(body, empty(error.message)),
    );
  return {
    element: h(
      "details.section",
      { open: ids.length > 1 },
      h("summary", ids.length > 1 ? "Configuration: what differs" : "Configuration", h("span.note", state.run)),
      h("div.controls", h("label.field", wanted)),
      body,
    ),
    update: draw,
  };
}

function environmentPanel() {
  return panelOf("Environment", null, ({ overview }, body) => {
    const { versions = {}, ...facts } = overview.environment || {};
    const rows = [...Object.entries(facts), ...Object.entries(versions || {})]
      .filter(([, value]) => value !== null)
      .map(([name, value]) => [name.replaceAll("_", " "), String(value)]);
    if (overview.fork) rows.push(["forked from", JSON.stringify(overview.fork)]);
    replaceChildren(
      body,
      rows.length
        ? table(["what", "value"], rows, { label: "environment" })
        : empty("The run did not record its environment."),
    );
  });
}
