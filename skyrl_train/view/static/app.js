"use strict";
// The frame: which view is open, the run, keyboard, theme, live tail.

const VIEWS = {
  overview: overviewView,
  groups: groupsView,
  group: groupView,
  trajectories: trajectoriesView,
  trajectory: trajectoryView,
  failures: failuresView,
  findings: findingsView,
};
const TABS = [
  ["overview", "Overview"],
  ["groups", "Groups"],
  ["trajectories", "Trajectories"],
  ["failures", "Failures"],
  ["findings", "Findings"],
];
const POLL_MS = 2000;
const KEYS = [
  ["j / ↓, k / ↑", "next and previous row, turn or panel"],
  ["Enter", "open the row"],
  ["← / →", "previous and next trajectory; in a response: its tokens"],
  ["1 2 3 4 5", "overview, groups, trajectories, failures, findings"],
  ["/", "search"],
  ["t", "dark or light"],
  ["u", "up: to the list"],
  ["?", "these keys"],
  ["Esc", "close, leave a field"],
];
const page = { runs: [], tellProblems };
const places = new Map(); // how far each view was scrolled when it was left
let view = null,
  generation = 0;

// Links back: [text, state] for each; [text] is the heading; an element stands as it is.
function crumbs(state, ...parts) {
  return h(
    "nav.crumbs",
    { "aria-label": "Where this is" },
    parts.map((part) => {
      if (part instanceof Node) return part;
      const [text, target] = part;
      return target
        ? [h("a.up", { href: link({ run: state.run, ...target }) }, text), h("span.muted", "/")]
        : h("h1", text);
    }),
  );
}

function tellProblems() {
  const texts = [...foundProblems];
  replaceChildren(
    document.getElementById("notices"),
    texts.length
      ? h(
          "details.problems",
          { open: texts.length < 3 },
          h("summary", count(texts.length, "note")),
          h(
            "ul",
            texts.map((text) => h("li", text)),
          ),
        )
      : null,
  );
}

// Opens the view that the address names. What arrives after another has been opened is dropped.
async function route() {
  const mine = ++generation,
    main = document.getElementById("main");
  if (shownAddress !== null) places.set(shownAddress, scrollY);
  const state = readState();
  if (!page.runs.some((run) => run.id === state.run)) state.run = page.runs.length ? page.runs[0].id : "";
  frame(state);
  foundProblems.clear();
  const waiting = setTimeout(() => replaceChildren(main, h("p.empty", { role: "status" }, "Reading…")), 200);
  let next;
  try {
    if (!VIEWS[state.view]) throw new Error(`There is no view named ${state.view}.`);
    if (!state.run) throw new Error("No run was given.");
    next = await VIEWS[state.view](state, page);
  } catch (error) {
    next = {
      title: "Not found",
      element: h(
        "div",
        h("h1", "This cannot be shown"),
        empty(error.message),
        h("p", h("a", { href: link({ view: "overview", run: state.run }) }, "Overview")),
      ),
    };
  }
  clearTimeout(waiting);
  if (mine !== generation) return;
  view = next;
  document.getElementById("tip").hidden = true;
  replaceChildren(main, view.element);
  document.title = `${view.title} · ${state.run} · skyrl-view`;
  shownAddress = location.hash;
  if (view.shown) await view.shown();
  if (mine === generation) {
    if (state.view !== "trajectory" || state.turn === undefined) scrollTo(0, places.get(location.hash) || 0);
    tellProblems();
    main.dataset.view = state.view;
    main.dataset.ready = location.hash || "#";
    performance.mark("shown");
  }
}

// Tabs, the run and the tools of the top line.
function frame(state) {
  const isOpen = (name) =>
    state.view === name ||
    (name === "groups" && state.view === "group") ||
    (name === "trajectories" && state.view === "trajectory");
  replaceChildren(
    document.getElementById("nav"),
    h("span.brand", "skyrl", h("b", "view")),
    TABS.map(([name, label]) =>
      h("a", { href: link({ view: name, run: state.run }), "aria-current": isOpen(name) ? "page" : null }, label),
    ),
  );
  const run = page.runs.find((each) => each.id === state.run);
  const pick =
    page.runs.length > 1
      ? choice(
          "run",
          page.runs.map((each) => [each.id, each.label || each.id]),
          state.run,
          (id) => go({ view: TABS.some(([name]) => name === state.view) ? state.view : "overview", run: id }),
        )
      : h("span.muted.run", state.run);
  replaceChildren(
    document.getElementById("tools"),
    pick,
    h(
      "span",
      { id: "live", class: run && run.state === "running" && !exportedReport ? "live on" : "live", role: "status" },
      exportedReport ? `report of ${exportedReport.made}` : run && run.state === "running" ? "live" : "",
    ),
    exportedReport || !run
      ? null
      : h(
          "a.button.quiet.wide-only",
          { href: address("api/export", { run: run.id }), download: "report.html" },
          "Export",
        ),
    h(
      "button",
      {
        type: "button",
        class: "quiet",
        "aria-label": "Dark or light",
        title: "dark or light (t)",
        on: { click: switchTheme },
      },
      "◐",
    ),
    h(
      "button",
      { type: "button", class: "quiet", "aria-label": "Keyboard", title: "keyboard (?)", on: { click: showHelp } },
      "?",
    ),
  );
}

function switchTheme() {
  document.documentElement.dataset.theme = dark() ? "light" : "dark";
  try {
    localStorage.setItem("theme", document.documentElement.dataset.theme);
  } catch {
    /* a file may have no storage */
  }
  shownAddress = null; // stays where it is: only colours change
  const place = scrollY;
  route().then(() => scrollTo(0, place));
}

function showHelp() {
  const help = document.getElementById("help");
  replaceChildren(
    help,
    h("h2", "Keyboard"),
    h(
      "dl.pairs",
      KEYS.map(([keys, meaning]) => [h("dt", h("kbd", keys)), h("dd", meaning)]),
    ),
    h("form", { method: "dialog" }, h("button", { autofocus: true }, "Close")),
  );
  help.showModal();
}

// Moves through what can be walked in a view: rows of a list, turns, panels.
function walk(by) {
  if (view.list) return view.list.move(by);
  const stops = [...document.querySelectorAll("#main article, #main section")].filter((stop) => !stop.closest("aside"));
  const line = 90,
    tops = stops.map((stop) => stop.getBoundingClientRect().top - line);
  const index = by > 0 ? tops.findIndex((top) => top > 4) : tops.findLastIndex((top) => top < -4);
  if (!stops[index]) return null;
  scrollBy({ top: tops[index], behavior: "instant" });
  stops[index].tabIndex = -1;
  return stops[index].focus({ preventScroll: true });
}

function pressed(event) {
  const isField = event.target.closest("input, select, textarea, dialog");
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape" && isField) {
    event.target.blur();
    return;
  }
  if (isField) return;
  const follow = (selector) => {
    const target = document.querySelector(selector);
    if (target) target.click();
  };
  const search = () => {
    const field = document.getElementById("search");
    if (field) field.focus();
    else go({ view: "trajectories", run: readState().run || page.runs[0].id });
  };
  const actions = {
    j: () => walk(1),
    ArrowDown: () => view.list && walk(1),
    k: () => walk(-1),
    ArrowUp: () => view.list && walk(-1),
    ArrowLeft: () => follow("#prev"),
    ArrowRight: () => follow("#next"),
    "/": search,
    "?": showHelp,
    t: switchTheme,
    u: () => follow(".crumbs .up"),
  };
  TABS.forEach(([name], index) => {
    actions[index + 1] = () => go({ view: name, run: readState().run });
  });
  const isArrow = event.key.startsWith("Arrow");
  if (!Object.hasOwn(actions, event.key) || (isArrow && !view.list && !event.key.match(/Left|Right/))) return;
  event.preventDefault();
  actions[event.key]();
}

// Asks for what is new while a run goes on. A view decides what it does with it; a failed poll is told and tried again.
async function poll() {
  const live = document.getElementById("live"),
    run = page.runs.find((each) => each.id === readState().run) || page.runs[0];
  if (view && view.tail && run && run.state === "running" && !document.hidden) {
    try {
      const told = await view.tail(); // of the view's run, which may be another than the address names by now
      Object.assign(
        page.runs.find((each) => each.id === told.id),
        told,
      );
      live.textContent = run.state === "running" ? "live" : run.state;
      live.className = run.state === "running" ? "live on" : "live";
      live.dataset.polled = Number(live.dataset.polled || 0) + 1;
    } catch (error) {
      live.textContent = error.message;
      live.className = "live lost";
    }
  }
  setTimeout(poll, POLL_MS);
}

async function start() {
  readReport();
  try {
    document.documentElement.dataset.theme = localStorage.getItem("theme") || "";
  } catch {
    /* a file may have no storage */
  }
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault();
    document.getElementById("main").focus();
  });
  addEventListener("keydown", pressed);
  addEventListener("hashchange", route);
  addEventListener("scroll", () => view && view.scrolled && view.scrolled(), { passive: true });
  addEventListener("resize", () => view && view.scrolled && view.scrolled());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", route);
  history.scrollRestoration = "manual";
  try {
    page.runs = (await ask("api/runs")).runs;
  } catch (error) {
    replaceChildren(document.getElementById("main"), empty(error.message));
    return;
  }
  await route();
  if (!exportedReport) setTimeout(poll, POLL_MS);
}

document.addEventListener("DOMContentLoaded", start);
