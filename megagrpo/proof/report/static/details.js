"use strict";
// Alarms, configuration, layout, the plan against measurements, messages.

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

// ------------------------------------------------------------------------------------------------------------ layout and plan

function machineSection(runs) {
  const cards = runs.flatMap((run) => [layoutCard(run, runs.length > 1), planCard(run, runs.length > 1), timesCard(run, runs.length > 1)]);
  return section("machine", "Layout and plan", "Where the ranks are, and what the plan predicts against what the run measured.", el("div", { class: "pair" }, cards));
}

const titled = (run, many, title) => el("h3", {}, many && el("i", { class: "dot", style: { background: runColorVariable(run.index) } }), title, many && el("span", { class: "quiet" }, run.label));

/** Ranks as a grid: one block per data-parallel replica, one row per pipeline stage, one cell per rank. */
function layoutCard(run, many) {
  if (!run.layout.ranks && !run.layout.tp) return null;
  const { tp, cp, pp, dp, ep, ranks, servers, server_tp: serverTp, server_pp: serverPp, server_dp: serverDp, placed } = run.layout;
  const workers = { tp: serverTp || 1, pp: serverPp || 1, dp: serverDp || 1 }, serverWidth = workers.tp * workers.dp;
  const sizes = { tp: tp || 1, cp: cp || 1, pp: pp || 1 }, width = sizes.tp * sizes.cp;
  const replicas = dp || (ranks ? ranks / (width * sizes.pp) : 1), most = 8;
  const blocks = Array.from({ length: Math.min(replicas, most) }, (_, replica) => el("div", { class: "replica" }, el("span", { class: "label" }, `replica ${replica}`),
    Array.from({ length: sizes.pp }, (_, stage) => el("div", { class: "stage" }, Array.from({ length: Math.min(width, 16) }, (_, i) => {
      const rank = i + width * (replica + replicas * stage);
      return el("span", { class: "rank", title: `rank ${rank}: tp ${i % sizes.tp}, cp ${Math.floor(i / sizes.tp)}, dp ${replica}, pp ${stage}` }, String(rank));
    }), width > 16 && el("span", { class: "quiet" }, `+${width - 16}`)))));
  const engines = Array.from({ length: Math.min(servers || 0, most) }, (_, server) => el("div", { class: "replica server" }, el("span", { class: "label" }, `vLLM ${server}`),
    Array.from({ length: workers.pp }, (_, stage) => el("div", { class: "stage" }, Array.from({ length: Math.min(serverWidth, 16) }, (_, i) => {
      const copy = Math.floor(i / workers.tp), worker = (copy * workers.pp + stage) * workers.tp + (i % workers.tp);
      return el("span", { class: "rank", title: `worker ${worker}: tp ${i % workers.tp}, dp ${copy}, pp ${stage}` }, String(worker));
    })))));
  const serverText = `tp ${serverTp || NONE}${workers.pp > 1 ? ` × pp ${workers.pp}` : ""}${workers.dp > 1 ? ` × dp ${workers.dp}` : ""}`;
  const more = (all) => all > most && el("span", { class: "quiet" }, `and ${all - most} more`);
  const text = `${ranks ? `${ranks} rank${ranks > 1 ? "s" : ""}` : "ranks not recorded"} = tp ${sizes.tp}${sizes.cp > 1 ? ` × cp ${sizes.cp}` : ""} × pp ${sizes.pp}${dp ? ` × dp ${dp}` : ""}${ep > 1 ? `, experts over ep ${ep}` : ""}`;
  return el("article", { class: "card" }, titled(run, many, "Layout"), el("p", { class: "note" }, text), el("div", { class: "layout" }, blocks, more(replicas)),
    el("p", { class: "note" }, `${servers || NONE} vLLM server${servers === 1 ? "" : "s"} × ${serverText}${placed ? `, ${placed}` : ""}`), el("div", { class: "layout" }, engines, more(servers || 0)));
}

const PARTS = ["weights", "fp8_weights", "gradients", "optimizer", "reference", "activations", "logits", "ref_hidden", "staging"];

/** Predicted memory by phase as stacked bars, with the measured peak as a line. */
function planCard(run, many) {
  const { memory, measured_peak: measured, memory_notes: notes } = run.plan, phases = Object.entries(memory);
  const most = Math.max(measured || 0, ...phases.map(([, parts]) => parts.total || 0)) || 1;
  const names = [...new Set(phases.flatMap(([, parts]) => Object.keys(parts)))].filter((name) => name !== "total");
  names.sort((a, b) => (PARTS.indexOf(a) + 99) % 99 - (PARTS.indexOf(b) + 99) % 99);
  const used = names.filter((name) => phases.some(([, parts]) => (parts[name] || 0) > most / 400));
  const bars = phases.map(([phase, parts]) => el("div", { class: "memory" }, el("span", { class: "label" }, phase),
    el("div", { class: "track" }, used.map((name) => el("i", { title: `${name}: ${gib(parts[name])}`, style: { width: `${((parts[name] || 0) / most) * 100}%`, background: `var(--series-${used.indexOf(name) % 7})` } }))),
    el("b", {}, gib(parts.total))));
  const line = measured !== null && el("div", { class: "memory measured" }, el("span", { class: "label" }, "measured peak"),
    el("div", { class: "track" }, el("i", { style: { width: `${(measured / most) * 100}%` } })), el("b", {}, gib(measured)));
  return el("article", { class: "card" }, titled(run, many, "Memory: plan and measurement"),
    el("p", { class: "legend-row" }, used.map((name, i) => el("span", { class: "chip" }, el("i", { style: { background: `var(--series-${i % 7})` } }), name))),
    bars, line, notes.map((text) => el("p", { class: "note" }, text)));
}

/** Seconds of each phase as measured, beside the plan's where it predicts them. */
function timesCard(run, many) {
  const { predicted, measured, mfu, measured_mfu: measuredMfu, times_notes: notes } = run.plan, planned = Object.keys(predicted).length > 0;
  const rows = ["generate", "logprobs", "train", "sync", "step"].filter((name) => isNumber(measured[name]) || isNumber(predicted[name])).map((name) => {
    const [plan, real] = [predicted[name], measured[name]], known = isNumber(real) ? duration(real) : "not measured";
    return [name, ...(planned ? [duration(plan), known, plan > 0 && isNumber(real) ? `${short(real / plan, 2)}×` : NONE] : [known, percent(real / measured.step)])];
  });
  if (!rows.length) return null;
  if (planned) rows.push(["MFU of train", percent(mfu), isNumber(measuredMfu) ? percent(measuredMfu) : "not measured", NONE]);
  else if (isNumber(measuredMfu)) rows.push(["MFU of train", percent(measuredMfu), ""]);
  const head = ["phase", ...(planned ? ["plan", "measured", "ratio"] : ["measured", "of a step"])];
  const cells = ([name, ...texts]) => el("tr", {}, el("th", { scope: "row" }, name), texts.map((text) => el("td", { class: "number" }, text)));
  return el("article", { class: "card" }, titled(run, many, planned ? "Seconds: plan and measurement" : "Seconds of a step"), el("p", { class: "note" }, "Mean of the steps after the first one."),
    el("table", { class: "plain" }, el("thead", {}, el("tr", {}, head.map((text, i) => el("th", { scope: "col", class: i ? "number" : "" }, text)))), el("tbody", {}, rows.map(cells))), notes.map((text) => el("p", { class: "note" }, text)));
}

// ------------------------------------------------------------------------------------------------------------- configuration

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

/** Versions, damaged lines, the run's messages. */
function recordsSection(runs) {
  const blocks = runs.map((run) => {
    const versions = Object.entries(run.versions).map(([name, version]) => `${name} ${version}`).join(" · ");
    const damaged = Object.entries(run.damaged).map(([name, count]) => `${plural(count, "unreadable line")} in ${name}`).join(", ");
    const averaged = run.training.per_point > 1 ? `Each point of a curve is the mean of ${run.training.per_point} steps; metrics.jsonl holds every step.` : "";
    return el("div", { class: "record" }, runs.length > 1 && el("h3", {}, run.label), el("p", { class: "mono" }, run.folder), el("p", { class: "note" }, versions || "Versions were not recorded."),
      averaged && el("p", { class: "note" }, averaged), damaged && el("p", { class: "note warn" }, `${damaged}: left out.`),
      run.messages.length > 0 && el("details", {}, el("summary", {}, `${run.messages.length} messages of the run`), el("ol", { class: "messages" }, run.messages.map(([step, , text]) => el("li", {}, el("span", { class: "quiet" }, `step ${step}`), text)))));
  });
  return section("records", "Records", "", blocks);
}
