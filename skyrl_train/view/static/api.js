"use strict";
// Where data come from: the server, or, in a report that was exported, the answers inside the page.

let exportedReport = null; // set before the first view, where this page is a report
const foundProblems = new Set(); // of the view that is open; app.js shows them

function readReport() {
  const element = document.getElementById("skyrl-view-data");
  exportedReport = element ? JSON.parse(element.textContent) : null;
}

// Returns `path?a=1&b=2`, without what is empty; a list gives its name several times.
function address(path, parameters) {
  const pairs = Object.entries(parameters || {}).flatMap(([name, value]) => [value].flat().map((each) => [name, each]));
  const query = pairs
    .filter(([, value]) => value !== "" && value !== null && value !== undefined)
    .map(([name, value]) => `${name}=${encodeURIComponent(value)}`)
    .join("&");
  return query ? `${path}?${query}` : path;
}

// Returns the answer to a request. Throws an Error with the server's own words where there is none.
async function ask(path, parameters) {
  const answer = exportedReport ? fromReport(path, parameters) : await fromServer(address(path, parameters));
  for (const problem of answer.problems || []) foundProblems.add(problem);
  return answer;
}

async function fromServer(url) {
  let response;
  try {
    response = await fetch(url, { cache: "no-store", signal: AbortSignal.timeout(30000) });
  } catch {
    throw new Error("The server does not answer. Is skyrl-view still running?");
  }
  const answer = await response
    .json()
    .catch(() => ({ error: `${url}: the answer is no JSON (status ${response.status})` }));
  if (!response.ok || answer.error) throw new Error(answer.error || `${url}: status ${response.status}`);
  return answer;
}

// A report holds the first rows of each list, unfiltered: they are filtered and sorted here.
function fromReport(path, parameters) {
  const { answers } = exportedReport;
  const whole = answers[address(path, parameters)];
  if (whole) return whole;
  const list = answers[address(path, { run: parameters.run })];
  if (!list || !["api/trajectories", "api/groups"].includes(path))
    throw new Error("This is not in the report. Open the run with skyrl-view to see it.");
  const rows = list.rows.filter((row) => fits(row, parameters, path));
  const { sort, order = "desc", offset = 0, limit = 50 } = parameters;
  const isGroup = path === "api/groups";
  const key = { turns: "num_turns", mean: "reward_mean", failed: "num_failed", ...(isGroup && { cut: "num_cut", age: "oldest" }) }[sort] || sort;
  const { metric } = parameters;
  const valueOf = (row) => (sort !== "metric" ? row[key] : metricOf(isGroup ? meansOf(row.samples, metric) : row, metric));
  const inOrder = (a, b) => (a < b ? -1 : a > b ? 1 : 0) * (order === "asc" ? 1 : -1);
  if (key) rows.sort((a, b) => inOrder(valueOf(a), valueOf(b)));
  const isFiltered = rows.length < list.rows.length;
  if (list.total > list.rows.length)
    foundProblems.add(
      `The report holds ${list.rows.length} of ${list.total} ${path.slice(4)} (${exportedReport.chosen}).`,
    );
  return {
    ...list,
    total: isFiltered ? rows.length : list.rows.length,
    offset,
    rows: rows.slice(offset, offset + limit),
  };
}

function fits(row, filters, path) {
  const among = (name, value) =>
    [filters[name] || []].flat().length === 0 || [filters[name]].flat().map(String).includes(String(value));
  const within = (name, low, high = low) =>
    (!filters[`${name}_min`] || (high !== null && high >= Number(filters[`${name}_min`]))) &&
    (!filters[`${name}_max`] || (low !== null && low <= Number(filters[`${name}_max`])));
  const samples = path === "api/groups" ? row.samples : [row];
  return (
    ["purpose", "environment", "uid"].every((name) => among(name, row[name])) &&
    within("step", row.step) &&
    samples.some(
      (sample) =>
        ["sample", "dataset", "outcome", "failure_kind", "stop_reason"].every((name) => among(name, sample[name])) &&
        within("reward", sample.reward) &&
        within("tokens", sample.tokens) &&
        within("turns", sample.num_turns) &&
        within("cut", sample.cut) &&
        within("age", sample.age) &&
        within("metric", filters.metric ? metricOf(sample, filters.metric) : null) &&
        (!filters.text || textFits(row, sample, filters)),
    )
  );
}

// Returns a search as JavaScript has it: RE2's flag `(?i)` is its `i`. Throws an Error for what is no pattern here, and
// for what repeats a repetition, which takes exponential time here.
function patternOf(text) {
  const isAnyCase = text.startsWith("(?i)");
  if (/[*+}]\)*[*+{]/.test(text.replace(/\\./g, "")))
    throw new Error(`text=${text}: repetitions of repetitions are searched by the server alone.`);
  try {
    return new RegExp(isAnyCase ? text.slice(4) : text, isAnyCase ? "gimu" : "gmu");
  } catch (error) {
    throw new Error(`text=${text} is no regular expression here: ${error.message}`);
  }
}

function textFits(row, sample, filters) {
  const pattern = patternOf(filters.text);
  const full =
    exportedReport.answers[
      address("api/trajectory", {
        run: filters.run,
        purpose: row.purpose,
        step: row.step,
        uid: row.uid,
        sample: sample.sample,
      })
    ];
  const texts = full
    ? [
        JSON.stringify(full.prompt),
        full.failure && full.failure.message,
        ...full.turns.flatMap((turn) => [turn.text, JSON.stringify(turn.observations), JSON.stringify(turn.tool_calls)]),
      ]
    : [row.prompt_excerpt, row.text_excerpt];
  return texts.some((text) => (text || "").search(pattern) >= 0);
}

// The address of a view: `#/trajectories?run=quickstart&step_from=3`. All that a view shows follows from it, so that a link
// brings back the same.

let shownAddress = null; // of the view that is open

function readState() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { view: path || "overview", ...Object.fromEntries(new URLSearchParams(query || "")) };
}

// Returns the link of a state; what is empty is left out.
function link(state) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(state))
    if (key !== "view" && value !== "" && value !== null && value !== undefined) query.set(key, value);
  const text = query.toString();
  return `#/${state.view}${text ? `?${text}` : ""}`;
}

function go(state) {
  location.hash = link(state);
}

// Changes the address without a new entry in the history, as for a slider that moves.
function replaceState(changes) {
  const state = { ...readState(), ...changes };
  history.replaceState(null, "", link(state));
  shownAddress = location.hash;
  return state;
}
