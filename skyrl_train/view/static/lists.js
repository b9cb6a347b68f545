"use strict";
// Lists of trajectories and groups, and their filters.

const RANGES = ["step", "reward", "tokens", "turns", "cut", "age", "metric"].flatMap((name) => [`${name}_min`, `${name}_max`]);
const KINDS_OF_ROWS = ["purpose", "environment", "dataset", "outcome", "failure_kind", "stop_reason", "uid", "sample"];
const FILTERS = [...KINDS_OF_ROWS, ...RANGES, "metric", "text"];

function filtersOf(state) {
  return Object.fromEntries(FILTERS.filter((name) => state[name]).map((name) => [name, state[name]]));
}

// Links to what a row is of. `text`: what is searched, which is marked there.
function trajectoryLink({ run, text }, { purpose, step, uid, sample }) {
  return link({ view: "trajectory", run, purpose, step, uid, sample, text });
}

function groupLink({ run, text }, { purpose, step, uid }) {
  return link({ view: "group", run, purpose, step, uid, text });
}

// The number of a trajectory that a name of `facets.metrics` stands for.
function metricOf(sample, name) {
  const ofRewards = name.startsWith("rewards/");
  return ((ofRewards ? sample.rewards : sample.metrics) || {})[ofRewards ? name.slice(8) : name] ?? null;
}

// What else there is to sort by, as far as this run has it. A group is sorted by the mean of its samples' metric.
function moreSorts({ metric }, { cut_max, age_max }) {
  return [
    cut_max > 0 ? ["cut desc", "most cut answers"] : null,
    age_max > 0 ? ["age desc", "oldest weights"] : null,
    metric ? ["metric desc", `highest ${metric}`] : null,
    metric ? ["metric asc", `lowest ${metric}`] : null,
  ].filter(Boolean);
}

// What a row says beside its reward and size: cut answers, the age of its weights, the metric that is chosen.
function remarks(sample, { metric }) {
  const value = metric ? metricOf(sample, metric) : null;
  return h(
    "span.remarks",
    [
      sample.cut > 0 ? `${shown(sample.cut)}× cut` : null,
      sample.age > 0 ? `age ${shown(sample.age)}` : null,
      metric ? `${metric} ${shown(value)}` : null,
    ]
      .filter(Boolean)
      .join(" · "),
  );
}

// Colour of a reward between the run's lowest (orange) and highest (blue).
function rewardColour(reward, facets) {
  if (!isNumber(reward)) return "var(--muted)";
  const span = facets.reward_max - facets.reward_min;
  const place = span > 0 ? (reward - facets.reward_min) / span : 0.5;
  return `color-mix(in oklab, var(--high) ${Math.round(100 * place)}%, var(--low))`;
}

// The form of filters. `changed` is called with the new state once the typing stops.
function filterForm(state, facets, sorts, changed) {
  let timer = 0,
    current = { ...state };
  const set = (name, value, delay) => {
    current = { ...current, [name]: value };
    clearTimeout(timer);
    timer = setTimeout(() => changed(current), delay);
  };
  const pick = (name, label, pairs) =>
    pairs.length > 1 || current[name]
      ? choice(
          label,
          [["", "all"], ...pairs.map(([value, number]) => [value, `${value} (${shown(number)})`])],
          current[name] || "",
          (value) => set(name, value, 0),
        )
      : null;
  const range = (name, label, low, high) =>
    h(
      "div.field",
      { role: "group", "aria-label": label },
      label,
      ["min", "max"].map((end) =>
        h("input", {
          type: "number",
          step: "any",
          value: current[`${name}_${end}`] || "",
          placeholder: shown(end === "min" ? low : high),
          "aria-label": `${label}, ${end === "min" ? "lowest" : "highest"}`,
          on: { input: (event) => set(`${name}_${end}`, event.target.value, 300) },
        }),
      ),
    );
  const search = h("input", {
    type: "search",
    id: "search",
    value: current.text || "",
    placeholder: "text: a regular expression, (?i) for any case",
    "aria-label": "Search in texts",
    spellcheck: "false",
    on: { input: (event) => set("text", event.target.value, 350) },
  });
  const clear = h("a.button.quiet", { href: link({ view: state.view, run: state.run }) }, "clear");
  const [sort, order] = (current.sort || sorts[0][0]).split(" ");
  const chosen = facets.metrics.find(({ name }) => name === current.metric);
  return h(
    "form.filters",
    { role: "search", "aria-label": "Filters", on: { submit: (event) => event.preventDefault() } },
    search,
    h(
      "details",
      { open: matchMedia("(min-width: 700px)").matches || false },
      h("summary", "Filters"),
      h(
        "div.controls",
        pick("purpose", "purpose", facets.purposes),
        pick("environment", "environment", facets.environments),
        pick("dataset", "data", facets.datasets),
        pick("outcome", "outcome", facets.outcomes),
        pick("failure_kind", "failure", facets.failure_kinds),
        pick("stop_reason", "stopped by", facets.stop_reasons),
        range("step", "steps", facets.step_min, facets.step_max),
        range("reward", "reward", facets.reward_min, facets.reward_max),
        range("tokens", "tokens", 0, facets.tokens_max),
        range("turns", "turns", 0, facets.turns_max),
        facets.cut_max > 0 ? range("cut", "cut answers", 0, facets.cut_max) : null,
        facets.age_max > 0 ? range("age", "age of weights", 0, facets.age_max) : null,
        facets.metrics.length
          ? choice(
              "metric",
              [["", "none"], ...facets.metrics.map(({ name }) => [name, name])],
              current.metric || "",
              (metric) => go({ ...current, metric, metric_min: "", metric_max: "", sort: metric ? current.sort : "" }),
            )
          : null,
        chosen ? range("metric", chosen.name, chosen.min, chosen.max) : null,
        choice("sorted by", [...sorts, ...moreSorts(current, facets)], `${sort}${order ? ` ${order}` : ""}`, (value) => set("sort", value, 0)),
        clear,
      ),
    ),
  );
}

// A list of any length of which only the rows in sight are in the page. Rows have the height `--row` of app.css.
// `fetchRows(offset, limit)` answers {total, rows}; `render(row)` gives an element that is a link.
function virtualList(fetchRows, render, label, whyEmpty = () => "Nothing fits these filters.") {
  const PAGE = 100;
  const element = h("div.list", { role: "list", "aria-label": label });
  const pages = new Map(),
    drawn = new Map();
  let total = 0,
    selected = -1,
    generation = 0,
    failed = null,
    height = 36;

  async function load(page) {
    const mine = generation;
    pages.set(page, null);
    try {
      const answer = await fetchRows(page * PAGE, PAGE);
      if (mine !== generation) return null;
      pages.set(page, answer.rows);
      total = answer.total;
      draw();
      return answer;
    } catch (error) {
      if (mine === generation) {
        failed = error;
        replaceChildren(element, empty(error.message));
      }
      return null;
    }
  }

  function draw() {
    if (!element.isConnected || failed) return;
    height = parseFloat(getComputedStyle(element).getPropertyValue("--row")) || height;
    element.style.height = `${Math.max(total, 1) * height}px`;
    if (!total) {
      drawn.clear();
      replaceChildren(element, pages.get(0) ? empty(whyEmpty()) : null);
      return;
    }
    const above = -element.getBoundingClientRect().top;
    const first = Math.max(0, Math.floor(above / height) - 8),
      last = Math.min(total - 1, Math.ceil((above + innerHeight) / height) + 8);
    for (const [index, row] of drawn)
      if (index < first || index > last) {
        row.remove();
        drawn.delete(index);
      }
    if (!drawn.size) element.replaceChildren();
    for (let index = first; index <= last; index++) {
      const page = Math.floor(index / PAGE),
        rows = pages.get(page);
      if (rows === undefined) load(page);
      if (drawn.has(index) || !rows) continue;
      const content = rows[index - page * PAGE];
      if (!content) continue;
      const row = h(
        "div.row",
        { role: "listitem", "aria-setsize": total, "aria-posinset": index + 1, style: { top: `${index * height}px` } },
        render(content),
      );
      row.firstChild.addEventListener("focus", () => {
        selected = index;
      });
      drawn.set(index, row);
      element.append(row);
    }
  }

  // Moves the focus to a row, and the page so that the row is in sight.
  async function select(index) {
    if (!total) return;
    selected = Math.max(0, Math.min(total - 1, index));
    const page = Math.floor(selected / PAGE);
    if (!pages.get(page)) await load(page);
    const top = element.getBoundingClientRect().top + selected * height;
    if (top < 120) scrollBy(0, top - 120);
    else if (top + height > innerHeight - 20) scrollBy(0, top + height - innerHeight + 20);
    draw();
    const row = drawn.get(selected);
    if (row) row.firstChild.focus({ preventScroll: true });
  }

  return {
    element,
    draw,
    select,
    move: (by) => select(selected < 0 ? 0 : selected + by),
    current: () => drawn.get(selected) || null,
    reload: async () => {
      generation++;
      failed = null;
      selected = -1;
      pages.clear();
      drawn.clear();
      element.replaceChildren();
      return load(0);
    },
  };
}

// A page with filters and a list that obeys them. `found` tells how many there are.
function listView(kind, sorts, render) {
  return async (state, page) => {
    const facets = await ask("api/facets", { run: state.run });
    let current = state;
    const found = h("p.found", { role: "status" });
    const list = virtualList(
      (offset, limit) => {
        const [sort, order] = (current.sort || sorts[0][0]).split(" ");
        return ask(`api/${kind}`, { run: current.run, ...filtersOf(current), sort, order, offset, limit });
      },
      (row) => render(row, current, facets),
      kind,
      () =>
        facets.num_trajectories
          ? "Nothing fits these filters."
          : "This run has recorded no trajectories: supervised training has none, and trainer.dump_rollouts=false writes none.",
    );
    let asked = 0;
    const refresh = async () => {
      const mine = ++asked,
        answer = await list.reload();
      if (mine !== asked) return;
      page.tellProblems();
      replaceChildren(
        found,
        answer
          ? [
              count(answer.total, kind.slice(0, -1).replace("trajectorie", "trajectory")).replace(
                "trajectorys",
                "trajectories",
              ),
              isNumber(answer.seconds) && !exportedReport ? h("span.muted", ` in ${seconds(answer.seconds)}`) : null,
              exportedReport
                ? null
                : h(
                    "a.quiet",
                    {
                      href: address("api/export", { run: current.run, ...filtersOf(current) }),
                      download: "report.html",
                    },
                    "export these",
                  ),
            ]
          : [],
      );
    };
    const form = filterForm(state, facets, sorts, (next) => {
      current = replaceState(next);
      refresh();
    });
    const fresh = h(
      "button",
      {
        type: "button",
        class: "fresh",
        hidden: true,
        on: {
          click: () => {
            fresh.hidden = true;
            refresh();
          },
        },
      },
      "New rollouts: show them",
    );
    let files = null;
    return {
      title: kind[0].toUpperCase() + kind.slice(1),
      list,
      scrolled: list.draw,
      shown: refresh,
      element: h("div", h("h1.visually-hidden", kind), form, h("div.bar", found, fresh), list.element),
      tail: async () => {
        // a list that is being read does not move by itself
        const answer = await ask("api/tail", { run: state.run });
        if (files !== null && answer.rollout_files > files) fresh.hidden = false;
        files = answer.rollout_files;
        return answer.run;
      },
    };
  };
}

const trajectoriesView = listView(
  "trajectories",
  [
    ["step desc", "newest step"],
    ["step asc", "first step"],
    ["reward asc", "lowest reward"],
    ["reward desc", "highest reward"],
    ["tokens desc", "longest"],
    ["turns desc", "most turns"],
  ],
  (row, state, facets) =>
    h(
      "a.trajectory",
      { href: trajectoryLink(state, row) },
      h("span.step", `${row.step}`, h("small", row.purpose === "train" ? "" : row.purpose)),
      h("span.reward", { style: { "--shade": rewardColour(row.reward, facets) } }, shown(row.reward)),
      h("span", { class: `outcome ${row.outcome}`, title: row.failure_message || "" }, row.failure_kind || row.outcome),
      h("span.who", row.uid, h("small", ` #${row.sample}`)),
      h("span.size", `${row.num_turns}×`, h("small", ` ${shown(row.tokens)} tok`)),
      remarks(row, state),
      h("span.text", row.failure_message || row.text_excerpt || row.prompt_excerpt || ""),
    ),
);

const groupsView = listView(
  "groups",
  [
    ["spread desc", "spread of rewards"],
    ["mean asc", "lowest mean"],
    ["mean desc", "highest mean"],
    ["failed desc", "most failed"],
    ["step desc", "newest step"],
    ["uid asc", "prompt"],
  ],
  (row, state, facets) =>
    h(
      "a.group",
      { href: groupLink(state, row) },
      h("span.step", `${row.step}`, h("small", row.purpose === "train" ? "" : row.purpose)),
      h(
        "span.samples",
        { "aria-label": `rewards ${row.samples.map((sample) => shown(sample.reward)).join(", ")}` },
        row.samples.slice(0, 24).map((sample) => sampleMark(sample, facets)),
      ),
      h("span.mean", shown(row.reward_mean), h("small", ` ± ${shown(row.reward_std)}`)),
      remarks({ cut: row.num_cut, age: row.oldest, ...meansOf(row.samples, state.metric) }, state),
      h("span.who", row.uid),
      h("span.text", row.prompt_excerpt || ""),
    ),
);

// The mean of a metric over samples, as one of them would have it.
function meansOf(samples, metric) {
  const values = metric ? samples.map((sample) => metricOf(sample, metric)).filter(isNumber) : [];
  const mean = values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
  return metric ? { metrics: { [metric]: mean }, rewards: { [metric.slice(8)]: mean } } : {};
}

function sampleMark(sample, facets) {
  const isFailed = !isNumber(sample.reward);
  return h("i", {
    class: isFailed ? "sample failed" : "sample",
    title: `sample ${sample.sample}: ${isFailed ? sample.failure_kind || "no reward" : `reward ${shown(sample.reward)}`}`,
    style: isFailed ? {} : { background: rewardColour(sample.reward, facets) },
  });
}
