"use strict";
// Builds the page from its data.

function moreMetrics(runs) {
  const names = otherMetrics(runs);
  if (!names.length) return null;
  const holder = el("div", { class: "charts" });
  const details = el("details", { class: "more-metrics" }, el("summary", {}, `${names.length} more metrics`), holder);
  details.addEventListener("toggle", () => {
    if (!details.open || holder.childElementCount) return;
    for (const name of names) {
      const unit = name.startsWith("time/") || name.endsWith("seconds") ? "s" : "";
      holder.append(new Plot({ id: `metric-${names.indexOf(name)}`, title: name, unit, log: true, series: [[name, name]], text: "" }, runs, [[name, "value"]]).card);
    }
  });
  return details;
}

async function main() {
  const app = document.getElementById("app");
  const data = await decode(document.getElementById("head").textContent);
  const runs = data.runs.map((run, index) => ({ ...run, index }));
  const responses = runs.some((run) => !run.rows); // a run on rows samples none
  const sections = [["learning", "Learning"], ["health", "Health"], ["speed", "Speed"], ...(responses ? [["responses", "Responses"]] : []), ["alarms", "Alarms"], ["configuration", "Config"], ["records", "Records"]];
  const bar = toolbar(runs, sections);
  const phases = phasesCard(runs), speed = chartGrid(SPEED, runs, phases ? [phases] : []);
  app.replaceChildren(masthead({ ...data, runs }), bar, el("main", {},
    section("learning", "Learning", "", chartGrid(LEARNING, runs)),
    section("health", "Health", "Do the numbers of the optimizer and of both engines stay in their normal range?", chartGrid(HEALTH, runs)),
    section("speed", "Speed", "Where do the seconds of a step go?", speed, moreMetrics(runs)),
    responses ? responsesSection(runs) : null, alarmsSection(runs), configSection(runs), recordsSection(runs)),
    el("footer", {}, `Made by megagrpo ${data.version}. This file loads nothing from a network.`), tooltip);
  for (const listener of view.listeners) listener();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  document.documentElement.dataset.ready = "true";
}

main().catch((error) => {
  document.getElementById("app").replaceChildren(el("p", { class: "loading" }, `This report cannot be shown: ${error.message}. It needs a browser of 2023 or later.`));
  throw error;
});
