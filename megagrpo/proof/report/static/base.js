"use strict";
// Elements, numbers and data of the page. All text enters the page through `textContent`.

/** Make an element. `attributes` may hold `class`, `on` (event -> function) and any attribute; children are elements or text. */
function el(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG_TAGS.has(tag) ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml", tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (name === "style") for (const [property, text] of Object.entries(value)) node.style.setProperty(property, text);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const SVG_TAGS = new Set(["svg", "path", "rect", "circle", "line", "g", "polyline"]);

/** Decode base64 of gzipped JSON. */
async function decode(text) {
  const bytes = Uint8Array.from(atob(text.trim()), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

const chunks = new Map();

/** Return the groups of a step of a run, as a promise. */
function groupsOf(run, step) {
  const id = `chunk-${run}-${step}`;
  if (!chunks.has(id)) chunks.set(id, decode(document.getElementById(id).textContent));
  return chunks.get(id);
}

const NONE = "–";
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** Format a number for a label: at most four significant digits, thousands apart, no trailing zeros. */
function short(value, digits = 4) {
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value);
  if (size >= 1e9) return value.toExponential(2);
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(digits)}M`;
  if (size >= 1e3) return Math.round(value).toLocaleString("en-US");
  if (size > 0 && size < 1e-3) return value.toExponential(Math.min(2, digits - 1)).replace(/\.?0*e-/, "e−").replace(/^-/, "−");
  return String(+value.toPrecision(digits)).replace("-", "−");
}

/** Format a number in its unit. Every place of the page that shows a quantity uses this function, so it has the same digits everywhere. */
function withUnit(value, unit) {
  if (!isNumber(value)) return NONE;
  if (unit === "share") return percent(value);
  if (unit === "s") return duration(value);
  return unit === "GiB" ? gib(value) : short(value);
}

const plural = (count, noun) => `${count.toLocaleString("en-US")} ${noun}${count === 1 ? "" : "s"}`;
const signed = (value) => (isNumber(value) ? (value > 0 ? "+" : "") + short(value) : NONE);
const percent = (value) => (!isNumber(value) ? NONE : value > 0 && value < 1e-4 ? "< 0.01%" : `${short(value * 100, 3)}%`);

/** Format seconds: 0.42 s, 12.3 s, 4 min 20 s, 3 h 5 min, 2 d 4 h. */
function duration(seconds) {
  if (!isNumber(seconds)) return NONE;
  if (seconds < 1) return seconds === 0 ? "0 s" : seconds < 0.001 ? "< 1 ms" : `${short(seconds * 1000, 3)} ms`;
  if (seconds < 60) return `${short(seconds, 3)} s`;
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const first = units.findIndex(([, size]) => seconds >= size);
  const [[name, size], next] = [units[first], units[first + 1]];
  const whole = Math.floor(seconds / size), rest = Math.floor((seconds % size) / next[1]);
  return rest ? `${whole} ${name} ${rest} ${next[0]}` : `${whole} ${name}`;
}

/** Format the seconds of an axis: one unit, no rest. */
function ticks(seconds, all) {
  const most = Math.max(...all.filter(isNumber));
  const [name, size] = most < 300 ? ["s", 1] : most < 7200 ? ["min", 60] : most < 172800 ? ["h", 3600] : ["d", 86400];
  return `${short(seconds / size, 3)} ${name}`;
}

const gib = (value) => (isNumber(value) ? `${short(value, 3)} GiB` : NONE);

/** A value of the style sheet. */
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const runColor = (index) => css(`--run-${index % 8}`);
const seriesColor = (index) => css(`--series-${index % 7}`);

/** A section of the page with a heading, and text below it. */
function section(id, title, text, ...children) {
  const heading = el("h2", { id: `${id}-title` }, title);
  return el("section", { id, "aria-labelledby": `${id}-title` }, el("header", { class: "section-head" }, heading, text && el("p", {}, text)), children);
}

/** A row of buttons of which one is chosen. `options` are pairs of value and label. */
function choice(label, options, chosen, onChange) {
  const buttons = options.map(([value, text]) =>
    el("button", { type: "button", "aria-pressed": String(value === chosen), "data-value": value, on: { click: () => pick(value) } }, text));
  function pick(value) {
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.value === String(value)));
    onChange(value);
  }
  return el("div", { class: "choice", role: "group", "aria-label": label }, buttons);
}
