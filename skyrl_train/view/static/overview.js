"use strict";
// The overview of one run, with the curves of others laid over it. Panels are drawn once and then updated in place: a run
// that goes on moves nothing that is being looked at.

const WITH_EVALUATION = {
  "train/loss": "eval/loss",
  "reward/mean": "eval/reward_mean",
  "env/solved": "eval/accuracy",
  "response_length/mean": "eval/response_length_mean",
};
const X_AXES = [
  ["step", "step"],
  ["tokens", "tokens"],
  ["seconds", "time (s)"],
];

const MOST_AT_ONCE = 3; // runs that are all drawn when the page opens

// Runs that are drawn over this one: those of the address, and where it does not say, all of a few. "-" is none.
function laidOver(state, page) {
  if (state.with !== undefined) return state.with.split(",").filter((id) => id && id !== "-");
  return page.runs.length <= MOST_AT_ONCE ? page.runs.map((run) => run.id).filter((id) => id !== state.run) : [];
}

function labelOf(page, id) {
  const run = page.runs.find((each) => each.id === id);
  return run ? run.label || id : id;
}

async function overviewView(state, page) {
  state = { ...state, with: laidOver(state, page).join(",") };
  const ids = [...new Set([state.run, ...state.with.split(",")])].filter((id) => page.runs.some((run) => run.id === id));
  const [overview, ...metrics] = await Promise.all([
    ask("api/overview", { run: state.run }),
    ...ids.map((run) => ask("api/metrics", { run })),
  ]);
  const model = { ids, metrics, overview, state, page };
  const panels = [
    headPanel,
    stepsPanel,
    curvesPanel,
    phasesPanel,
    timelinePanel,
    memoryPanel,
    ledgerPanel,
    planPanel,
    environmentPanel,
    configPanel,
  ].map((panel) => panel(model));
  const elements = panels.map((panel) => panel.element);
  elements.splice(7, 2, h("div.pair", elements.slice(7, 9))); // plan and environment side by side
  return {
    title: "Overview",
    element: h("div.overview", elements),
    shown: () => {
      panels.forEach((panel) => panel.update(model));
      hideEmpty(model, panels);
    },
    tail: () => followRun(model, panels),
  };
}

// What another trainer dumped of its completions has no timeline, plan or memory, supervised training no engine, and a served
// model none of these: their panels would only say so.
function hideEmpty({ overview, metrics }, panels) {
  for (const { element, body } of panels)
    if (body && (overview.run.kind !== "skyrl" || hasNoRollouts(metrics[0])))
      element.hidden = body.querySelector(":scope > .empty") !== null;
}

const PACE = 20; // last steps that tell what the others will take

// Time and tokens that a run would still take; null for one that is done or does not say how long it is.
function costToTheEnd(run, { steps, tokens, seconds: spent }) {
  const left = (run.total_steps || 0) - (run.last_step || 0),
    from = Math.max(0, steps.length - 1 - PACE);
  if (left <= 0 || run.state === "finished" || steps.length < 2) return null;
  const done = steps.at(-1) - steps[from] || 1;
  const rate = (sums) => ((sums.at(-1) - sums[from]) / done) * left;
  return `${count(left, "step")}, ${seconds(rate(spent))}, ${shown(Math.round(rate(tokens)))} tokens`;
}

function hasNoRollouts({ series }) {
  return ("train/loss" in series && !("reward/mean" in series)) || "serve/loss_sum" in series;
}

// Asks what is new in the runs that go on; only where there is something, the panels get it.
async function followRun(model, panels) {
  const known =
    model.offsets ||
    (model.offsets = model.ids.map((_, index) => ({
      metrics: model.metrics[index].offset,
      timeline: model.overview.offsets.timeline,
    })));
  const answers = await Promise.all(
    model.ids.map((run, index) =>
      ask("api/tail", { run, metrics: known[index].metrics, timeline: index ? null : known[index].timeline }),
    ),
  );
  const changed = answers.map(
    (answer, index) =>
      answer.metrics.length ||
      answer.timeline.length ||
      answer.reset.length ||
      answer.run.state !== model.page.runs.find((run) => run.id === model.ids[index]).state,
  );
  if (!changed.some(Boolean)) return answers[0].run;
  await Promise.all(
    model.ids.map(async (run, index) => {
      if (changed[index]) model.metrics[index] = await ask("api/metrics", { run });
    }),
  );
  if (changed[0]) model.overview = await ask("api/overview", { run: model.ids[0] });
  answers.forEach((answer, index) => {
    known[index] = answer.offsets;
    Object.assign(
      model.page.runs.find((run) => run.id === model.ids[index]),
      answer.run,
    );
  });
  panels.forEach((panel) => panel.update(model));
  return answers[0].run;
}

function panelOf(title, note, draw, className) {
  const body = h("div", { class: className });
  return { element: section(title, note, body), body, update: (model) => draw(model, body) };
}

function headPanel() {
  const element = h("div.facts");
  const fact = (label, value, title) => value !== null && h("div", { title }, h("dt", label), h("dd", value));
  return {
    element,
    update: ({ overview, metrics, page, state }) => {
      const run = overview.run,
        { series, tokens, seconds: spent } = metrics[0];
      const last = (name) => (series[name] || []).findLast((value) => value !== null) ?? null;
      const first = (name) => (series[name] || []).find((value) => value !== null) ?? null;
      const others = page.runs.filter((other) => other.id !== run.id),
        chosen = (state.with || "").split(",").filter(Boolean);
      const change = (name) =>
        first(name) === null
          ? null
          : first(name) === last(name)
            ? shown(last(name))
            : `${shown(first(name))} → ${shown(last(name))}`;
      replaceChildren(
        element,
        h("h1", page.runs.length > 1 ? labelOf(page, run.id) : run.name || run.id, h("span", { class: `state ${run.state}` }, run.state)),
        h("p.path", run.path, run.kind === "skyrl" ? null : ` · completions as ${run.kind} dumps them`),
        h(
          "dl",
          fact("step", `${shown(run.last_step)}${run.total_steps ? ` of ${shown(run.total_steps)}` : ""}`),
          fact("reward", change("reward/mean")),
          fact("loss", change("train/loss")),
          fact("held-out loss", change("eval/loss")),
          fact("held-out accuracy", change("eval/accuracy")),
          // of another trainer's run they are not known
          fact("tokens", tokens.at(-1) ? shown(tokens.at(-1)) : null),
          fact("time in steps", spent.at(-1) ? seconds(spent.at(-1)) : null),
          fact("to the end", costToTheEnd(run, metrics[0]), "at the pace of the last steps"),
          hasNoRollouts(metrics[0])
            ? null
            : fact("failed trajectories", shown(overview.steps.reduce((sum, step) => sum + (step.num_failed || 0), 0))),
          overview.restarts.length
            ? fact("restarts", shown(overview.restarts.length), JSON.stringify(overview.restarts.at(-1)))
            : null,
        ),
        others.length
          ? h(
              "div.chips",
              { role: "group", "aria-label": "Runs laid over this one" },
              h("span.muted", "with"),
              others.map((other) => {
                const isOn = chosen.includes(other.id),
                  next = isOn ? chosen.filter((id) => id !== other.id) : [...chosen, other.id];
                return h(
                  "a",
                  {
                    class: isOn ? "chip on" : "chip",
                    href: link({ ...readState(), with: next.join(",") || "-" }),
                    "aria-pressed": String(isOn),
                    role: "button",
                  },
                  isOn ? h("i.dot", { style: { color: RUN_COLOURS[1 + chosen.indexOf(other.id)] } }) : "+ ",
                  labelOf(page, other.id),
                );
              }),
            )
          : null,
      );
    },
  };
}

function stepsPanel() {
  return panelOf(
    "Steps",
    "each opens its trajectories; coloured by failed trajectories",
    ({ overview, state }, body) => {
      if (!overview.steps.length) return replaceChildren(body, empty("No step has been recorded yet."));
      const steps = overview.steps.map((step) => ({
        step: step.step,
        failures: step.num_failed,
        trajectories: step.num_trajectories,
        failed: step.is_failed,
      }));
      const legend = [
        ["fine", "none"],
        ["few", "under 5 %"],
        ["some", "under 25 %"],
        ["many", "more"],
        ["failed", "the step failed"],
      ];
      const kept =
        body.firstChild && steps.length === body.dataset.length
          ? null
          : stepBar(steps, (part) =>
              link({ view: "trajectories", run: state.run, step_min: part[0].step, step_max: part.at(-1).step }),
            );
      if (kept)
        replaceChildren(
          body,
          kept,
          h(
            "div.legend",
            legend.map(([level, text]) => h("span", h("i", { class: `swatch ${level}` }), text)),
          ),
        );
      return body;
    },
  );
}

// Curves chosen in the address (`curves=a,b`), else the run's default ones. All series can be added by name.
function curvesPanel(model) {
  const grid = h("div.grid");
  let settings = {
    x: model.state.x || "step",
    smooth: Number(model.state.smooth || 0),
    curves: (model.state.curves || "").split(",").filter(Boolean),
  };
  let current = model;
  const names = () => [...new Set(current.metrics.flatMap((each) => Object.keys(each.series)))].sort();
  const change = (changes) => {
    settings = { ...settings, ...changes };
    replaceState({
      x: settings.x === "step" ? "" : settings.x,
      smooth: settings.smooth || "",
      curves: settings.curves.join(","),
    });
    draw();
  };
  const options = h("datalist", { id: "series" });
  const add = h("input", {
    type: "search",
    list: "series",
    placeholder: "add a curve…",
    "aria-label": "Add a curve by its metric's name",
    on: {
      change: (event) => {
        const name = event.target.value.trim();
        if (names().includes(name)) {
          event.target.value = "";
          change({ curves: [...new Set([...chosenCurves(), name])] });
        }
      },
    },
  });
  const chosenCurves = () => (settings.curves.length ? settings.curves : defaultCurves(current));
  const level = h("output", settings.smooth);
  const controls = h(
    "div.controls",
    choice("x by", X_AXES, settings.x, (x) => change({ x })),
    h(
      "label.field",
      "smoothing",
      h("input", {
        type: "range",
        min: 0,
        max: 0.95,
        step: 0.05,
        value: settings.smooth,
        on: {
          input: (event) => {
            level.textContent = event.target.value;
            change({ smooth: Number(event.target.value) });
          },
        },
      }),
      level,
    ),
    h("label.field", add, options),
    h("button", { type: "button", class: "quiet", on: { click: () => change({ curves: [] }) } }, "default curves"),
  );
  const legend = h("div.legend");
  let figures = [];
  function draw() {
    replaceChildren(
      options,
      names().map((name) => h("option", { value: name })),
    );
    replaceChildren(
      legend,
      current.ids.map((id, index) =>
        h("span", h("i.dot", { style: { color: RUN_COLOURS[index % RUN_COLOURS.length] } }), labelOf(current.page, id)),
      ),
      h("span", h("i.dot.hollow"), "held-out evaluation"),
      h("span.muted", "drag to zoom, double click to go back"),
    );
    const key = JSON.stringify([settings, current.ids, chosenCurves()]);
    if (key === grid.dataset.key)
      return figures.forEach((figure) => figure.update(linesOf(current, figure.name, settings.x)));
    grid.dataset.key = key;
    figures = chosenCurves().map((name) =>
      Object.assign(
        curves(name, linesOf(current, name, settings.x), {
          smoothing: settings.smooth,
          x: settings.x,
          removed: settings.curves.length
            ? () => change({ curves: settings.curves.filter((other) => other !== name) })
            : null,
        }),
        { name },
      ),
    );
    replaceChildren(
      grid,
      figures.length ? figures.map((figure) => figure.element) : empty("No metric has been written yet."),
    );
    return figures.forEach((figure) => figure.draw());
  }

  return {
    element: section("Curves", null, controls, legend, grid),
    update: (next) => {
      current = next;
      draw();
    },
  };
}

// A curve that an evaluation belongs to takes its place: both are drawn in one figure.
function defaultCurves({ metrics }) {
  const exists = (name) => metrics.some(({ series }) => series[name]);
  const drawnIn = (name) =>
    Object.keys(WITH_EVALUATION).find((own) => WITH_EVALUATION[own] === name && exists(own)) || name;
  return [...new Set(metrics.flatMap((each) => each.default).map(drawnIn))].slice(0, 12);
}

// One line a run, with its evaluations beside it where the curve has some.
function linesOf({ ids, metrics, page }, name, x) {
  return ids.flatMap((id, index) => {
    const { series, [{ step: "steps" }[x] || x]: at } = metrics[index];
    const colour = RUN_COLOURS[index % RUN_COLOURS.length];
    const points = (values) => (values || []).map((value, number) => [at[number], value]);
    const evaluations = points(series[WITH_EVALUATION[name]]).filter(([, value]) => value !== null);
    const isEvaluation = name.startsWith("eval/");
    return [
      {
        label: labelOf(page, id),
        colour,
        marks: isEvaluation,
        points: isEvaluation ? points(series[name]).filter(([, value]) => value !== null) : points(series[name]),
      },
      ...(evaluations.length ? [{ label: `${labelOf(page, id)}, held out`, colour, marks: true, points: evaluations }] : []),
    ];
  });
}
