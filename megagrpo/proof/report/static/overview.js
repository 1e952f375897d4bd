"use strict";
// The head of the page: names, results, main figures, the bar with the controls of all plots.

function masthead(data) {
  const runs = data.runs;
  const made = new Date(data.made * 1000);
  const brand = el("p", { class: "brand" }, el("span", { class: "mark", "aria-hidden": "true" }), "megagrpo report",
    el("time", { datetime: made.toISOString() }, made.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" })));
  const title = runs.length === 1 ? runs[0].label : `${runs.length} runs compared`;
  document.title = `${title} · megagrpo report`;
  return el("header", { class: "masthead" }, brand, el("h1", {}, title), runs.length === 1 ? oneRun(runs[0]) : comparison(runs));
}

function statePill(run) {
  return el("span", { class: `pill ${run.state.state}` }, run.state.text);
}

function oneRun(run) {
  const facts = [["model", run.model], ...run.facts].filter(([, text]) => text);
  const line = el("dl", { class: "facts" }, facts.map(([name, text]) => el("div", {}, el("dt", {}, name), el("dd", {}, text))));
  return [el("p", { class: "under" }, statePill(run), alarmPills(run, 3), began(run)), line, tiles(run)];
}

/** Links to the alarms: their titles, or their number. */
function alarmPills(run, most) {
  const { alarms } = run.findings, named = alarms.length <= most ? alarms : [];
  const pill = (text, worst) => el("a", { class: `pill alarms ${worst}`, href: "#alarms" }, text);
  if (!alarms.length || named.length) return named.map(({ title, severity }) => pill(title, severity));
  return pill(plural(alarms.length, "alarm"), alarms.some(({ severity }) => severity === "error") ? "error" : "warning");
}

const startOf = ({ result }) => isNumber(result.began) && new Date(result.began * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });

function began(run) {
  const when = startOf(run);
  return when && el("span", { class: "quiet" }, `started ${when}${run.result.starts > 1 ? `, ${run.result.starts} starts` : ""}`);
}

/** Large figures: what the run reached and what it took. */
function tiles(run) {
  const { result } = run, list = [], { evaluation, reward } = result, [from, to] = result.reward_steps;
  const evaluated = evaluation && evaluation.count > 1;
  if (evaluation) {
    const unit = evaluation.name.includes("@") ? "share" : "reward";
    const detail = evaluated ? change(evaluation.first, evaluation.last, unit) : `only at step ${short(evaluation.steps[0], 8)}`;
    list.push(tile(`Evaluation ${evaluation.name}`, withUnit(evaluation.last, unit), detail, evaluated ? "result" : ""));
  }
  if (isNumber(reward[1])) list[evaluated ? "push" : "unshift"](tile(`Reward, step ${short(to, 8)}`, withUnit(reward[1]), to > from ? change(...reward) : "the only one", evaluated ? "" : "result"));
  list.push(tile("Steps", short(result.steps, 6), isNumber(result.max_steps) ? `of ${short(result.max_steps, 6)}` : ""));
  list.push(tile("Duration", duration(result.wall_seconds), `${duration(result.training_seconds)} in steps`));
  list.push(tile("Tokens", short(result.tokens), `${short(result.tokens_per_second)} per second`));
  list.push(tile("Peak memory", gib(result.peak_memory_gb), run.device || "rank 0"));
  return el("div", { class: "tiles" }, list);
}

function tile(label, value, detail, kind = "") {
  return el("div", { class: `tile ${kind}` }, el("span", { class: "label" }, label), el("strong", {}, value), el("span", { class: "detail" }, detail));
}

function change(first, last, unit) {
  if (!isNumber(first) || !isNumber(last) || first === last) return `from ${withUnit(first, unit)}`;
  const better = last > first;
  return el("span", { class: better ? "up" : "down" }, `${better ? "↑" : "↓"} from ${withUnit(first, unit)}`);
}

/** One row per run: results side by side. */
function comparison(runs) {
  const columns = ["Run", "State", "Evaluation", "Reward", "Steps", "Duration", "Tokens", "Tokens/s", "Peak memory"];
  const rows = runs.map((run) => {
    const { result } = run, { evaluation, reward } = result, unit = evaluation && evaluation.name.includes("@") ? "share" : "reward";
    const arrow = (first, last, kind) => `${withUnit(first, kind)} → ${withUnit(last, kind)}`;
    return el("tr", {},
      el("th", { scope: "row" }, el("i", { class: "dot", style: { background: runColorVariable(run.index) } }), run.label, el("small", {}, startOf(run) && `started ${startOf(run)}`)),
      el("td", { class: "states" }, statePill(run), alarmPills(run, 0)),
      el("td", { "data-label": "Evaluation" }, evaluation ? [arrow(evaluation.first, evaluation.last, unit), el("small", {}, ` ${evaluation.name}`)] : NONE),
      el("td", { "data-label": "Reward" }, isNumber(reward[1]) ? arrow(reward[0], reward[1]) : NONE),
      [short(result.steps, 6), duration(result.wall_seconds), short(result.tokens), short(result.tokens_per_second), gib(result.peak_memory_gb)]
        .map((text, i) => el("td", { class: "number", "data-label": columns[i + 4] }, text)));
  });
  return el("div", { class: "scroll" }, el("table", { class: "comparison" },
    el("thead", {}, el("tr", {}, columns.map((name) => el("th", { scope: "col" }, name)))), el("tbody", {}, rows)));
}

const runColorVariable = (index) => `var(--run-${index % 8})`;

/** The bar that stays in view: sections, zoom; on a narrow screen the runs and smoothing scroll away. */
function toolbar(runs, sections) {
  const links = el("nav", { "aria-label": "Sections" }, sections.map(([id, title]) => el("a", { href: `#${id}` }, title)));
  const many = runs.length > 1, points = Math.max(...runs.map((run) => run.training.step.length));
  view.smoothing = points > 60 ? 0.6 : 0;
  const value = el("output", {}, String(view.smoothing));
  const slider = el("input", { type: "range", min: "0", max: "0.98", step: "0.02", value: view.smoothing, id: "smoothing", on: { input: () => {
    view.smoothing = Number(slider.value);
    value.textContent = slider.value;
    redraw();
  } } });
  const reset = el("button", { type: "button", class: "small", id: "reset-zoom", disabled: true, on: { click: () => zoom(null) } }, "reset zoom");
  view.listeners.push(() => (reset.disabled = !view.range));
  return el("div", { class: "toolbar" },
    el("div", { class: "pinned" }, links, el("div", { class: "controls zoom" }, reset)),
    el("div", { class: "unpinned" }, many && legend(runs),
      el("div", { class: "controls" }, el("label", { for: "smoothing" }, "smoothing"), slider, value)));
}

function legend(runs) {
  const buttons = runs.map((run) => {
    const button = el("button", { type: "button", "aria-pressed": "true", title: "show or hide", on: { click: () => {
      const hide = !view.hidden.has(run.index);
      if (hide) view.hidden.add(run.index);
      else view.hidden.delete(run.index);
      button.setAttribute("aria-pressed", String(!hide));
      redraw();
    } } }, el("i", { class: "dot", style: { background: runColorVariable(run.index) } }), run.label);
    return button;
  });
  return el("div", { class: "legend", role: "group", "aria-label": "Runs" }, buttons);
}

