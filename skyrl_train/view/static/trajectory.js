"use strict";
// One trajectory: its turns as a chat, as a tree where prefixes are shared, its tokens coloured by a column.

async function trajectoryView(state) {
  const key = { run: state.run, purpose: state.purpose, step: state.step, uid: state.uid, sample: state.sample };
  const trajectory = await ask("api/trajectory", key);
  let column = trajectory.columns.find(({ name }) => name === state.colour) || trajectory.columns[0] || null;
  const chosen = state.turn === undefined ? null : Number(state.turn);
  const onPath = pathTo(trajectory.turns, chosen);
  const legend = h("div.legend", { id: "scale" }),
    found = h("span.muted", { id: "found", role: "status" });
  const turns = trajectory.turns.map((turn) => turnElement(turn, trajectory, onPath));
  const paint = () => {
    replaceChildren(legend, scaleLegend(column));
    turns.forEach((turn) => turn.paint(column));
  };
  const pick = column
    ? choice(
        "colour by",
        trajectory.columns.map(({ name, label }) => [name, label]),
        column.name,
        (name) => {
          column = trajectory.columns.find((each) => each.name === name);
          replaceState({ colour: name });
          paint();
        },
      )
    : h("span.muted", "No column of numbers was recorded for these tokens.");
  if (!trajectory.texts_from && trajectory.turns.some((turn) => turn.tokens.ids.length))
    foundProblems.add(
      "The run's tokenizer is not available offline: texts are shown whole, and a token's numbers under its id.",
    );
  const { previous, next } = trajectory.neighbours;
  const neighbour = (to, text, name) =>
    to ? h("a.button.quiet", { href: trajectoryLink(state, to), id: name, rel: name }, text) : null;
  return {
    title: `${trajectory.uid} #${trajectory.sample}`,
    shown: () => {
      paint();
      const target = chosen === null ? null : document.getElementById(`turn-${chosen}`);
      const first = markFound(state.text, found);
      if (target) target.scrollIntoView({ block: "start" });
      else if (first) first.scrollIntoView({ block: "center" });
    },
    element: h(
      "div",
      h(
        "div.bar",
        crumbs(
          state,
          [`step ${trajectory.step}`, { view: "trajectories", step_min: trajectory.step, step_max: trajectory.step }],
          [trajectory.uid, { view: "group", purpose: state.purpose, step: state.step, uid: state.uid, text: state.text }],
          [`sample ${trajectory.sample}`],
          h("span.muted", `reward ${shown(trajectory.reward)} · ${trajectory.outcome}`),
        ),
        h("span.pager", neighbour(previous, "← previous", "prev"), neighbour(next, "next →", "next")),
      ),
      h(
        "div.trajectory-page",
        asideOf(trajectory, state, onPath),
        h(
          "div.chat",
          trajectory.failure
            ? h(
                "p.failure",
                { role: "alert" },
                `${trajectory.failure.kind}${isNumber(trajectory.failure.turn) ? `, turn ${trajectory.failure.turn}` : ""}: ${trajectory.failure.message}`,
              )
            : null,
          trajectory.error ? h("p.failure", `The step failed: ${trajectory.error}`) : null,
          h("div.controls.sticky", pick, legend, found),
          turns.length
            ? turns.map((turn) => turn.element)
            : [
                trajectory.prompt.map(messageElement),
                empty("The trajectory has no turn: it failed before its first response."),
              ],
        ),
      ),
    ),
  };
}

// Turns from the root to `chosen`; all of them where none is chosen.
function pathTo(turns, chosen) {
  if (chosen === null || !turns[chosen]) return new Set(turns.keys());
  const path = new Set();
  for (let turn = chosen; turn !== null && turn !== undefined && !path.has(turn); turn = turns[turn].parent)
    path.add(turn);
  return path;
}

function asideOf(trajectory, state, onPath) {
  const versions = [...new Set(trajectory.turns.flatMap((turn) => turn.tokens.version || []))].filter(
    (version) => version !== null,
  );
  const tokens = trajectory.turns.reduce((sum, turn) => sum + turn.tokens.ids.length, 0);
  const rows = [
    ["reward", shown(trajectory.reward)],
    ["outcome", trajectory.outcome],
    ["turns", shown(trajectory.turns.length)],
    ["response tokens", tokens ? shown(tokens) : null],
    [
      "weight versions",
      versions.length ? (versions.length > 4 ? `${versions[0]} to ${versions.at(-1)}` : versions.join(", ")) : null,
    ],
    ["greedy reward", trajectory.greedy_reward === null ? null : shown(trajectory.greedy_reward)],
    ["environment", trajectory.environment],
    ["data", trajectory.dataset],
  ].filter(([, value]) => value !== null && value !== undefined);
  return h(
    "aside",
    { "aria-label": "Facts of the trajectory" },
    h(
      "dl.pairs",
      rows.map(([name, value]) => [h("dt", name), h("dd", value)]),
    ),
    whyZero(trajectory),
    facts("Reward components", trajectory.rewards, true),
    facts("Metrics", trajectory.metrics, true),
    trajectory.turns.length > 1
      ? section(trajectory.is_tree ? "Tree of turns" : "Turns", null, treeElement(trajectory, state, onPath))
      : null,
    facts("Extras", trajectory.extras),
    facts("Tools", trajectory.tools),
    trajectory.reexecute
      ? section("Re-execute this step", null, copyable(trajectory.reexecute, "Command that re-executes this step"))
      : null,
  );
}

// Why all advantages of a trajectory are 0, or none are there.
function whyZero(trajectory) {
  const advantages = trajectory.turns.flatMap((turn) => turn.tokens.advantages || []).filter(isNumber);
  if (trajectory.failure) return h("p.why", "A failed trajectory is in no mean and no loss; it has no advantage.");
  if (!advantages.length || advantages.some((value) => value !== 0)) return null;
  return h(
    "p.why",
    "Advantage 0: either all samples of its prompt have the same reward, so that comparing them says nothing, or a filter left it out of the loss. The group shows which.",
  );
}

// Named values as a list, or as folded JSON where they are anything else.
function facts(title, values, open) {
  if (!values || !Object.keys(values).length) return null;
  const isFlat = open && Object.values(values).every((value) => value === null || typeof value !== "object");
  return h(
    "details.fold",
    { open: Boolean(open) },
    h("summary", title),
    isFlat
      ? h(
          "dl.pairs",
          Object.entries(values).map(([name, value]) => [h("dt", name), h("dd", shown(value))]),
        )
      : h("pre.json", JSON.stringify(values, null, 1)),
  );
}

// Turns as nested lists. A turn with one child is followed by it in the same list: only branches are set in.
function treeElement({ turns }, state, onPath) {
  const entry = (index) =>
    h(
      "a",
      {
        href: link({ ...readState(), turn: index }),
        class: state.turn === String(index) ? "on" : onPath.has(index) ? "" : "off",
        "aria-current": state.turn === String(index) ? "true" : null,
      },
      h("b", `turn ${index}`),
      h(
        "span.muted",
        ` ${shown(turns[index].tokens.ids.length)} tok${turns[index].reward ? ` · reward ${shown(turns[index].reward)}` : ""}`,
      ),
    );
  const chain = (first) => {
    const items = [];
    for (let at = first; at !== undefined; at = turns[at].children.length === 1 ? turns[at].children[0] : undefined) {
      items.push(h("li", entry(at), turns[at].children.length > 1 ? h("ul", turns[at].children.map(chain)) : null));
    }
    return items;
  };
  return h("ul.tree", [...turns.keys()].filter((index) => turns[index].parent === null).map(chain));
}

function messageElement(message) {
  const role = String(message.role || "message");
  return h(
    "div",
    { class: `message ${["user", "system", "tool", "assistant"].includes(role) ? role : "other"}` },
    h("span.role", role),
    h("div.content", contentParts(message.content)),
    (message.tool_calls || []).map(callElement),
  );
}

// Text, or texts and images in their order; anything else as JSON.
function contentParts(content) {
  if (typeof content === "string") return content;
  const isImage = (part) => part && part.type === "image" && typeof part.image === "string";
  if (!Array.isArray(content) || !content.some(isImage)) return JSON.stringify(content, null, 1);
  return content.map((part) =>
    isImage(part) ? pictureElement(part.image) : part && typeof part.text === "string" ? part.text : JSON.stringify(part),
  );
}

// An image by its name, the sum of its file. In the place of one that is missing or damaged stands what is wrong with it.
function pictureElement(reference) {
  const sum = reference.replace(/^sha256:/, "");
  const source = address("api/image", { run: readState().run, sum });
  const frame = h("span.picture");
  const lacks = (reason) => replaceChildren(frame, h("span.missing", { role: "img" }, reason));
  const held = exportedReport && (exportedReport.answers[source] || { error: `image ${sum.slice(0, 12)} is not in the report` });
  if (held && held.error) {
    lacks(held.error);
    return frame;
  }
  const failed = () => fromServer(source).catch((error) => lacks(error.message));
  const image = h("img", { src: held ? held.data : source, alt: `image ${sum.slice(0, 12)}`, title: reference, on: { error: failed } });
  frame.append(image);
  return frame;
}

function callElement(call) {
  const { name, arguments: given } = call.function || call;
  return h(
    "div.call",
    h("span.role", "calls "),
    h(
      "code",
      `${name || "?"}(${typeof given === "string" ? given : JSON.stringify(given === undefined ? call : given)})`,
    ),
    call.error ? h("span.outcome.failed", ` ${call.error}`) : null,
  );
}

// What a turn's context adds, its response token by token, what the environment answered. Observations that the next turn
// begins with are shown there.
function turnElement(turn, trajectory, onPath) {
  const index = turn.turn,
    { texts, ids } = turn.tokens;
  const tokens = (texts || ids).map((_, number) =>
    h("span", { "data-n": number }, texts ? pieces(texts[number]) : `${ids[number]} `),
  );
  const response = h(
    "div",
    {
      class: texts ? "content tokens" : "content tokens ids",
      tabindex: "0",
      role: "group",
      "aria-label": `tokens of turn ${index}: the arrow keys left and right tell their numbers`,
      "aria-describedby": "tip",
    },
    tokens,
  );
  inspect(response, tokens, turn, trajectory.columns);
  const versions = [...new Set(turn.tokens.version || [])];
  const whole = texts ? null : h("div.content", turn.text);
  return {
    element: h(
      "article",
      {
        class: onPath.has(index) ? "turn" : "turn off",
        id: `turn-${index}`,
        tabindex: "-1",
        "aria-label": `turn ${index}`,
        style: { "--depth": Math.min(turn.depth || 0, trajectory.is_tree ? 6 : 0) },
      },
      turn.messages.map(messageElement),
      h(
        "div.message.assistant",
        h(
          "span.role",
          "assistant",
          h(
            "small",
            `turn ${index}${turn.parent === null && index > 0 ? ", a new root" : turn.parent !== null && turn.parent !== index - 1 ? `, after turn ${turn.parent}` : ""}${ids.length ? ` · ${count(ids.length, "token")} after ${shown(turn.context_tokens)}` : ""}${turn.stop_reason ? ` · ${turn.stop_reason}` : ""} · reward ${shown(turn.reward)}${versions.length ? ` · version ${versions.join(", ")}` : ""}`,
          ),
        ),
        whole,
        whole ? ids.length > 0 && h("details.fold", h("summary", "token ids"), response) : response,
        (turn.tool_calls || []).map(callElement),
      ),
      turn.added && turn.added.texts && turn.added.texts.length
        ? h(
            "details.fold.raw",
            h("summary", `${count(turn.added.ids.length, "token")} of context as the model saw them`),
            h(
              "div.content.tokens",
              turn.added.texts.map((text) => h("span", pieces(text))),
            ),
          )
        : null,
      turn.children.length ? null : turn.observations.map(messageElement),
    ),
    paint: (column) =>
      tokens.forEach((token, number) => shade(token, column, turn.tokens[column && column.name], number)),
  };
}
