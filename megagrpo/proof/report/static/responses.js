"use strict";
// The prompts of a step with their groups: choice of the step, filters, sorting, colours.

const PAGE_SIZE = 5; // groups shown at once
const GROUP_ORDERS = [["spread", "largest spread"], ["given", "order in the step"], ["best", "highest reward"], ["worst", "lowest reward"], ["long", "longest responses"]];
const COLUMNS = [["reward", "reward"], ["advantage", "advantage"], ["length", "tokens"]];

function responsesSection(runs) {
  const recorded = runs.filter((run) => run.responses.steps.length);
  if (!recorded.length) return section("responses", "Responses", "completions.jsonl holds no responses, so there is nothing to show.");
  const state = { run: recorded[0], place: recorded[0].responses.steps.length - 1, search: "", low: null, high: null, cut: false, mixed: false,
    logged: false, order: "spread", key: null, down: true, color: "advantage", limit: PAGE_SIZE, groups: [] };
  const parts = { list: el("div", { class: "groups" }), count: el("p", { class: "count", "aria-live": "polite" }), legend: el("p", { class: "color-legend" }) };
  const left = el("p", { class: "note" });
  const update = () => showGroups(state, parts, update);

  async function load() {
    const { run } = state, [step] = stepsOf(state)[state.place];
    left.textContent = leftOut(state);
    const groups = await groupsOf(run.index, step);
    if (state.run !== run || stepsOf(state)[state.place][0] !== step) return; // another choice was made meanwhile
    state.groups = groups;
    state.limit = PAGE_SIZE;
    update();
  }

  const steps = stepControls(state, load);
  /** Show a run, at the step nearest to the current one. */
  function show(run) {
    const before = stepsOf(state)[state.place][0];
    state.run = run;
    const places = stepsOf(state).map(([step], place) => [Math.abs(step - before), place]).sort((a, b) => a[0] - b[0]);
    state.place = places[0][1];
    steps.sync();
    load();
  }
  const options = recorded.map((run) => [run.index, run.label]);
  const chooser = recorded.length > 1 && choice("run", options, state.run.index, (name) => show(recorded.find((run) => run.index === name)));
  load();
  return section("responses", "Responses", "Every prompt of a step with its group of responses: what was rewarded, what was not, and how each token was seen.",
    el("div", { class: "filters" }, chooser, steps.node, filterControls(state, () => { state.limit = PAGE_SIZE; update(); })),
    el("div", { class: "colors" }, el("span", { class: "label" }, "colour by"), choice("colour by", COLORS.map(([name, label]) => [name, label]), state.color, (name) => {
      state.color = name;
      update();
    }), parts.legend), parts.count, parts.list, left);
}

const stepsOf = (state) => state.run.responses.steps;

/** Slider and buttons that choose a recorded step. */
function stepControls(state, load) {
  const slider = el("input", { type: "range", min: 0, id: "step-slider", "aria-label": "step" }), label = el("output", {});
  const button = (text, by, name) => el("button", { type: "button", class: "small", "aria-label": name, on: { click: () => go(state.place + by) } }, text);
  const [back, forward] = [button("←", -1, "previous recorded step"), button("→", 1, "next recorded step")];
  function sync() {
    const steps = stepsOf(state), [step] = steps[state.place];
    slider.max = steps.length - 1;
    slider.value = state.place;
    slider.setAttribute("aria-valuetext", `step ${step}`);
    label.textContent = `step ${short(step, 8)}`;
    back.disabled = state.place === 0;
    forward.disabled = state.place === steps.length - 1;
  }
  function go(place) {
    state.place = Math.max(0, Math.min(stepsOf(state).length - 1, place));
    sync();
    load();
  }
  slider.addEventListener("input", () => go(Number(slider.value)));
  sync();
  return { node: el("div", { class: "step" }, label, back, slider, forward), sync };
}

function filterControls(state, update) {
  const bind = (node, name, read) => {
    node.addEventListener(node.type === "checkbox" || node.tagName === "SELECT" ? "change" : "input", () => {
      state[name] = read(node);
      update();
    });
    return node;
  };
  const numeric = (node) => (node.value === "" ? null : Number(node.value));
  const check = (name, label) => el("label", { class: "check" }, bind(el("input", { type: "checkbox", name }), name, (node) => node.checked), label);
  return [
    bind(el("input", { type: "search", placeholder: "search prompts and responses", "aria-label": "search", name: "search" }), "search", (node) => node.value.toLowerCase()),
    el("label", { class: "check" }, "sort by", bind(el("select", { name: "order" }, GROUP_ORDERS.map(([name, label]) => el("option", { value: name }, label))), "order", (node) => node.value)),
    el("span", { class: "range" }, "reward", bind(el("input", { type: "number", step: "any", "aria-label": "lowest reward", name: "low" }), "low", numeric), "–",
      bind(el("input", { type: "number", step: "any", "aria-label": "highest reward", name: "high" }), "high", numeric)),
    el("span", { class: "range only" }, "only", check("cut", "truncated"), check("mixed", "mixed groups"), check("logged", "logged tokens")),
  ];
}

/** The groups that pass the filters, each with the responses that do, in the chosen order. */
function filtered(state) {
  const passes = (response) => (!state.cut || response.cut) && (!state.logged || response.tokens) &&
    (state.low === null || (isNumber(response.reward) && response.reward >= state.low)) &&
    (state.high === null || (isNumber(response.reward) && response.reward <= state.high));
  const found = (text) => !state.search || text.toLowerCase().includes(state.search);
  const groups = state.groups.map((group, place) => {
    const rewards = group.responses.map((response) => response.reward).filter(isNumber), mean = rewards.reduce((sum, r) => sum + r, 0) / rewards.length;
    const spread = rewards.length ? Math.max(...rewards) - Math.min(...rewards) : 0;
    const inPrompt = group.prompt.some(([, text]) => found(text));
    const responses = group.responses.map((response, i) => ({ ...response, place: i })).filter((r) => passes(r) && (inPrompt || found(r.text) || (r.conversation?.samples > 1 && found(JSON.stringify(r.conversation)))));
    return { ...group, place, mean, spread, rewards, responses, long: Math.max(0, ...group.responses.map((r) => r.length || 0)) };
  }).filter((group) => group.responses.length && (!state.mixed || group.spread > 0));
  const key = { given: (g) => g.place, spread: (g) => -g.spread, best: (g) => -g.mean, worst: (g) => g.mean, long: (g) => -g.long }[state.order];
  const value = (group) => (isNumber(key(group)) ? key(group) : Infinity);
  const logged = (group) => BY_TOKEN.has(state.color) && group.responses.some((response) => response.tokens); // what can be coloured comes first
  groups.sort((a, b) => logged(b) - logged(a) || value(a) - value(b) || a.place - b.place);
  if (state.key) {
    const rank = (response) => (isNumber(response[state.key]) ? response[state.key] : -Infinity);
    for (const group of groups) group.responses.sort((a, b) => (state.down ? rank(b) - rank(a) : rank(a) - rank(b)) || a.place - b.place);
  }
  return groups;
}

function showGroups(state, parts, update) {
  const groups = filtered(state), all = state.groups.reduce((sum, group) => sum + group.responses.length, 0);
  const shown = groups.reduce((sum, group) => sum + group.responses.length, 0);
  const logged = groups.some((group) => group.responses.some((response) => response.tokens));
  parts.count.textContent = `${shown} of ${all} responses in ${groups.length} of ${state.groups.length} groups` +
    (BY_TOKEN.has(state.color) && !logged ? ". None of them has logged tokens: see run.log_tokens_groups." : "");
  parts.legend.replaceChildren(...colorLegend(state.color, groups).filter(Boolean));
  const scale = scaleOf(state.groups);
  parts.list.replaceChildren(...groups.slice(0, state.limit).map((group) => groupCard(group, state, scale, update)));
  if (groups.length > state.limit) {
    const more = () => { state.limit += PAGE_SIZE; update(); };
    parts.list.append(el("button", { type: "button", class: "more", on: { click: more } }, `show ${plural(Math.min(PAGE_SIZE, groups.length - state.limit), "more group")}`));
  }
}

/** The ranges of rewards and advantages of a step, for the bars. */
function scaleOf(groups) {
  const responses = groups.flatMap((group) => group.responses), numbers = (name) => responses.map((r) => r[name]).filter(isNumber);
  const rewards = numbers("reward"), advantages = numbers("advantage").map(Math.abs);
  return { low: Math.min(0, ...rewards), high: Math.max(0, ...rewards), advantage: Math.max(1e-9, ...advantages) };
}

/** A prompt with its group of responses. */
function groupCard(group, state, scale, update) {
  const last = group.prompt.at(-1) || ["", ""], before = group.prompt.slice(0, -1);
  const prompt = el("div", { class: "prompt" },
    before.length > 0 && el("details", {}, el("summary", {}, plural(before.length, "earlier message")),
      before.map(([role, text]) => el("div", { class: "turn" }, el("b", {}, role || "?"), el("span", { dir: "auto" }, text)))),
    clamped(el("p", { dir: "auto" }, last[1]), last[1]));
  return el("article", { class: "group" }, el("header", {}, prompt, groupMeta(group, scale)), responseTable(group, state, scale, update));
}

/** The rewards of a group in one line. */
function groupMeta(group, scale) {
  const strip = el("span", { class: "strip", "aria-hidden": "true" }, group.rewards.map((reward) =>
    el("i", { style: { "--level": scale.high > scale.low ? (reward - scale.low) / (scale.high - scale.low) : 0.5 } })));
  return el("p", { class: "meta" }, strip, `mean reward ${short(group.mean)}`, el("span", {}, `range ${short(group.spread)}`),
    group.task && el("span", {}, `task ${group.task}`), el("span", {}, `prompt ${group.prompt_id ?? NONE}`), group.responses.some((r) => r.tokens) && el("span", { class: "badge" }, "tokens logged"));
}

function responseTable(group, state, scale, update) {
  const functions = [...new Set(group.responses.flatMap((response) => Object.keys(response.rewards)))];
  const extra = functions.length > 1 ? functions : [];
  const head = ([key, label]) => {
    const sorted = state.key === key ? (state.down ? "descending" : "ascending") : "none";
    return el("th", { scope: "col", class: "number", "aria-sort": sorted }, el("button", { type: "button", "data-key": key, on: { click: () => {
      [state.key, state.down] = [key, state.key === key ? !state.down : true];
      update();
    } } }, label));
  };
  const rows = group.responses.map((response) => el("tr", {},
    el("td", { class: "response" }, clamped(responseText(response, state.color), response.text, response.conversation), extraColumns(response)),
    el("td", { class: "number", "data-label": "reward" }, bar(response.reward, scale), short(response.reward)),
    el("td", { class: "number", "data-label": "advantage" }, balance(response.advantage, scale.advantage), signed(response.advantage)),
    el("td", { class: "number", "data-label": "tokens" }, short(response.length, 6)),
    extra.map((name) => el("td", { class: "number", "data-label": name }, short(response.rewards[name])))));
  return el("table", { class: "response-table" },
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "response"), COLUMNS.map(head), extra.map((name) => el("th", { scope: "col", class: "number" }, name)))),
    el("tbody", {}, rows));
}

/** What the reward functions noted about a response (log_extra). */
function extraColumns(response) {
  const notes = Object.entries(response.extra || {}).filter(([, text]) => text !== "");
  return notes.length > 0 && el("p", { class: "extra" }, notes.map(([name, text]) => el("span", {}, el("b", {}, name), ` ${text}`)));
}

function bar(value, scale) {
  const width = isNumber(value) && scale.high > scale.low ? ((value - scale.low) / (scale.high - scale.low)) * 100 : 0;
  return el("i", { class: "bar", style: { "--width": `${width}%` } });
}

function balance(value, most) {
  const share = isNumber(value) ? Math.max(-1, Math.min(1, value / most)) * 50 : 0;
  return el("i", { class: `balance ${share < 0 ? "bad" : "good"}`, style: { "--from": `${share < 0 ? 50 + share : 50}%`, "--width": `${Math.abs(share)}%` } });
}

/** Long text, or a conversation, in a box of limited height with a button that opens it. */
function clamped(node, text, conversation) {
  if (conversation ? isShort(conversation) : text.length < 420 && text.split("\n").length < 7) return node;
  const button = el("button", { type: "button", class: "link", "aria-expanded": "false", on: { click: () => {
    const open = box.classList.toggle("open");
    button.setAttribute("aria-expanded", String(open));
    button.textContent = open ? "show less" : "show all";
  } } }, "show all");
  const box = el("div", { class: `clamped${conversation ? " tall" : ""}` }, node, button);
  return box;
}

/** What of the run is not on the page. */
function leftOut(state) {
  const { steps, count } = state.run.responses, [, shown, all] = steps[state.place];
  const parts = [];
  if (shown < all) parts.push(`This page holds ${shown} of the ${all} groups of this step: those with logged tokens, the best, the worst, and those with the largest spread.`);
  if (count[0] < count[1]) parts.push(`Of the run it holds ${count[0].toLocaleString("en-US")} of ${count[1].toLocaleString("en-US")} responses, from ${steps.length} steps. All are in completions.jsonl in the run's folder.`);
  return parts.join(" ");
}
