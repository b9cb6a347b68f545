"use strict";
// One group, and the failures of a run.

// One prompt: how it was solved over the steps, and the samples of one step side by side, best first.
async function groupView(state) {
  const key = { run: state.run, purpose: state.purpose, step: state.step, uid: state.uid };
  const [group, facets, history] = await Promise.all([
    ask("api/group", key),
    ask("api/facets", { run: state.run }),
    ask("api/prompt", { run: state.run, uid: state.uid }),
  ]);
  const rank = (sample) => (isNumber(sample.reward) ? sample.reward : -Infinity);
  const samples = [...group.samples].sort((a, b) => rank(b) - rank(a));
  const points = (purpose, name) =>
    history.points
      .filter((point) => (point.purpose === "eval") === (purpose === "eval"))
      .map((point) => [point.step, point[name]]);
  const lines = ["train", "eval"]
    .map((purpose, index) => ({
      label: purpose,
      colour: RUN_COLOURS[index],
      marks: true,
      points: points(purpose, "solved"),
    }))
    .filter((line) => line.points.length);
  const figure = curves(`solved over steps (${history.solved_means})`, lines, {});
  const visited = h(
    "div.chips",
    history.points
      .slice(-30)
      .map((point) =>
        h(
          "a",
          {
            class: String(point.step) === state.step && point.purpose === state.purpose ? "chip on" : "chip",
            href: groupLink(state, { ...point, uid: state.uid }),
          },
          `${point.purpose === "eval" ? "eval " : ""}step ${point.step}: ${shown(point.solved)}`,
        ),
      ),
  );
  return {
    title: `Group ${state.uid}`,
    shown: () => {
      figure.draw();
      markFound(state.text);
    },
    element: h(
      "div",
      crumbs(
        state,
        [`step ${group.step}`, { view: "groups", step_min: group.step, step_max: group.step }],
        [group.uid],
      ),
      h(
        "div.grid.prompt",
        h("div", section("Prompt", group.environment, group.prompt.map(messageElement)), facts("Extras", group.extras)),
        section("This prompt over steps", null, figure.element, visited),
      ),
      noSpread(group.samples),
      section(
        "Samples",
        "best first",
        h(
          "div.columns",
          { tabindex: "0", role: "group", "aria-label": "samples side by side" },
          samples.map((sample) => sampleColumn(sample, state, facets)),
        ),
      ),
    ),
  };
}

// Why nothing is learnt from a group, where that is so.
function noSpread(samples) {
  const rewards = samples.map((sample) => sample.reward).filter(isNumber);
  if (samples.length < 2) return null;
  if (!rewards.length) return h("p.why", "No sample of this group has a reward: all of them failed, and none is trained on.");
  if (rewards.length < 2 || rewards.some((reward) => reward !== rewards[0])) return null;
  const failed = samples.length - rewards.length;
  return h(
    "p.why",
    `No spread in this group: ${failed ? `the ${rewards.length} samples that did not fail` : `all ${rewards.length} samples`} have the reward ${shown(rewards[0])}. An advantage that compares them is 0, so nothing is learnt from it.`,
  );
}

function sampleColumn(sample, state, facets) {
  return h(
    "article.sample-column",
    { "aria-label": `sample ${sample.sample}` },
    h(
      "header",
      h("span.reward", { style: { "--shade": rewardColour(sample.reward, facets) } }, shown(sample.reward)),
      h("a.jump", { href: trajectoryLink(state, { ...state, sample: sample.sample }) }, `sample ${sample.sample}`),
      h("small.muted", `${count(sample.num_turns, "turn")}, ${count(sample.tokens, "token")}`),
    ),
    sample.failure_kind ? h("p.failure", `${sample.failure_kind}: ${sample.failure_message || ""}`) : null,
    sample.turns.map((turn) => [
      h("div.message.assistant", h("span.role", `turn ${turn.turn}`), h("div.content", turn.text)),
      turn.observations.map(messageElement),
    ]),
  );
}

async function failuresView(state) {
  const answer = await ask("api/failures", { run: state.run, ...filtersOf(state) });
  const kinds = answer.kinds.map((kind) => [
    h("a", { href: link({ view: "trajectories", run: state.run, failure_kind: kind.kind }) }, kind.kind),
    kind.count,
    h(
      "a.jump",
      { href: trajectoryLink(state, kind.first) },
      `step ${kind.first.step}, ${kind.first.uid} #${kind.first.sample}${kind.first.turn === null ? "" : `, turn ${kind.first.turn}`}`,
    ),
    h(
      "span.wrap",
      kind.messages.slice(0, 3).map(([message, times]) => h("div", h("b", `${shown(times)}× `), message)),
    ),
    h(
      "span.wrap",
      kind.steps
        .slice(0, 12)
        .map(([step, times]) =>
          h(
            "a.chip",
            {
              href: link({
                view: "trajectories",
                run: state.run,
                failure_kind: kind.kind,
                step_min: step,
                step_max: step,
              }),
            },
            `${step}: ${times}`,
          ),
        ),
    ),
  ]);
  const steps = answer.failed_steps.map((step) => [
    h(
      "a.jump",
      {
        href: link({
          view: "trajectories",
          run: state.run,
          purpose: "failed",
          step_min: step.step,
          step_max: step.step,
        }),
      },
      `step ${step.step}`,
    ),
    step.num_trajectories,
    h("span.wrap", step.error),
  ]);
  return {
    title: "Failures",
    element: h(
      "div",
      h("h1.visually-hidden", "Failures"),
      section(
        "Failed trajectories",
        `${shown(answer.total)} in all; none of them counts as a reward of 0`,
        kinds.length ? table(["kind", "count", "first", "messages", "by step"], kinds) : empty("No trajectory failed."),
      ),
      section(
        "Failed steps",
        null,
        steps.length ? table(["step", "trajectories", "error"], steps) : empty("No step failed."),
      ),
      section(
        "Log",
        answer.log.length ? `warnings and errors: the last ${answer.log.length} of ${answer.log_total}` : null,
        answer.log.length
          ? h(
              "ol.log",
              answer.log.map((line) => h("li", { class: line.level, value: line.line }, h("pre", line.text))),
            )
          : empty("The log has no warning and no error, and says of none that ended the run."),
      ),
    ),
  };
}
