"use strict";
// Alarms, configuration, versions.

function alarmsSection(runs) {
  const many = runs.length > 1;
  const blocks = runs.map((run) => {
    const { alarms, passed, unknown } = run.findings;
    return el("div", { class: "alarm-run" }, many && el("h3", {}, el("i", { class: "dot", style: { background: runColorVariable(run.index) } }), run.label),
      alarms.map(alarmCard), checks(alarms, passed, unknown));
  });
  const total = runs.reduce((sum, run) => sum + run.findings.alarms.length, 0);
  const checked = runs.some((run) => run.findings.passed.length);
  const none = checked ? "None of the checks below found a problem." : "The run recorded nothing that could be checked.";
  return section("alarms", "Alarms", total ? `${total} to look at. Each one says what it means and what to do.` : none, blocks);
}

function alarmCard(alarm) {
  return el("article", { class: `alarm ${alarm.severity}` }, el("h3", {}, alarm.title, el("span", { class: "quiet" }, spans(alarm.steps))),
    el("div", { class: "columns" }, el("p", {}, el("b", {}, "What it means"), alarm.meaning), el("p", {}, el("b", {}, "What to do"), alarm.advice)),
    alarm.texts.length > 0 && el("details", {}, el("summary", {}, `${plural(alarm.texts.length, "warning")} of the run`), el("ul", {}, alarm.texts.map((text) => el("li", {}, text)))),
    el("p", { class: "note" }, alarm.page));
}

/** Ranges of steps in words: step 3, 7–12. */
function spans(all) {
  const texts = all.slice(0, 8).map(([a, b]) => (a === b ? short(a, 8) : `${short(a, 8)}–${short(b, 8)}`));
  return all.length ? `step ${texts.join(", ")}${all.length > 8 ? ", …" : ""}` : "";
}

function checks(alarms, passed, unknown) {
  const item = (kind, text) => el("li", { class: kind }, text);
  return el("ul", { class: "checks" }, passed.map(([name, evidence]) => item("ok", evidence ? `${name}: ${evidence}` : name)), unknown.map((text) => item("unknown", `${text} (not recorded)`)));
}

function configSection(runs) {
  const many = runs.length > 1, values = runs.map((run) => new Map(run.config.map(([key, value, standard, changed]) => [key, { value, standard, changed }])));
  const keys = [...new Set(runs.flatMap((run) => run.config.map(([key]) => key)))];
  const differs = (key) => new Set(values.map((map) => map.get(key)?.value ?? null)).size > 1;
  const changed = (key) => values.some((map) => map.get(key)?.changed);
  const state = { show: many ? "differing" : "changed", search: "" }, body = el("tbody", {}), count = el("p", { class: "count", "aria-live": "polite" });
  function update() {
    const shown = keys.filter((key) => (state.show === "all" || (state.show === "changed" ? changed(key) : differs(key))) && key.toLowerCase().includes(state.search));
    count.textContent = `${shown.length} of ${keys.length} keys`;
    body.replaceChildren(...shown.map((key) => el("tr", { class: differs(key) && many ? "differs" : "" }, el("th", { scope: "row" }, key),
      values.map((map) => valueCell(map.get(key))), el("td", { class: "quiet" }, values.find((map) => map.get(key)?.standard !== undefined)?.get(key).standard ?? NONE))));
  }
  const options = [...(many ? [["differing", "differing"]] : []), ["changed", "changed from default"], ["all", "all"]];
  const search = el("input", { type: "search", placeholder: "search keys", "aria-label": "search keys", on: { input: () => { state.search = search.value.toLowerCase(); update(); } } });
  update();
  const head = ["key", ...runs.map((run) => (many ? run.label : "value")), "default"];
  return section("configuration", "Configuration", "From resolved.yaml. Bold values differ from the default.",
    el("div", { class: "filters" }, choice("keys", options, state.show, (name) => { state.show = name; update(); }), search), count,
    el("div", { class: "scroll" }, el("table", { class: "plain config" }, el("thead", {}, el("tr", {}, head.map((text) => el("th", { scope: "col" }, text)))), body)));
}

function valueCell(entry) {
  if (!entry) return el("td", { class: "quiet" }, "not set");
  return el("td", { class: entry.changed ? "changed" : "" }, entry.value === "" ? el("span", { class: "quiet" }, "empty") : entry.value);
}

/** Versions, damaged lines. */
function recordsSection(runs) {
  const blocks = runs.map((run) => {
    const versions = Object.entries(run.versions).map(([name, version]) => `${name} ${version}`).join(" · ");
    const damaged = Object.entries(run.damaged).map(([name, count]) => `${plural(count, "unreadable line")} in ${name}`).join(", ");
    const averaged = run.training.per_point > 1 ? `Each point of a curve is the mean of ${run.training.per_point} steps; metrics.jsonl holds every step.` : "";
    return el("div", { class: "record" }, runs.length > 1 && el("h3", {}, run.label), el("p", { class: "mono" }, run.folder), el("p", { class: "note" }, versions || "Versions were not recorded."),
      averaged && el("p", { class: "note" }, averaged), damaged && el("p", { class: "note warn" }, `${damaged}: left out.`));
  });
  return section("records", "Records", "", blocks);
}
