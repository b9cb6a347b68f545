"use strict";
// What skyrl-doctor finds in the run: the worst first, each with its evidence and links to the rows that show it.

async function findingsView(state) {
  const { findings } = await ask("api/findings", { run: state.run });
  return {
    title: "Findings",
    element: h(
      "div",
      crumbs(state, ["Findings"]),
      h("p.muted", "What the rules of skyrl-doctor find in this folder; what a note says is no fault."),
      findings.length ? findings.map((finding) => findingOf(state, finding)) : empty("Nothing is found to be wrong."),
    ),
  };
}

function findingOf(state, { level, what, rule, certainty, since, follows_from: cause, evidence, rows, remedy }) {
  const facts = [
    rule,
    `${Math.round(100 * certainty)}% sure`,
    since === null ? "" : `since step ${since}`,
    cause ? `follows from ${cause}` : "",
  ];
  return h(
    "section.finding",
    h("h2", `${level}: ${what}`),
    h("p.muted", facts.filter(Boolean).join(" · ")),
    h(
      "ul",
      evidence.filter((text) => !text.endsWith(": ")).map((text) => h("li", text)),
    ),
    rows.map((row) =>
      h(
        "p.wrap",
        h("a.jump", { href: trajectoryLink(state, row) }, `${row.purpose} step ${row.step}, ${row.uid} #${row.sample}`),
        ` ${row.quote}`,
      ),
    ),
    h("p", h("b", "Do: "), `${remedy}.`),
  );
}
