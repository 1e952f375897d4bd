"use strict";
// Interactive plots: hover, zoom by dragging, arrow keys, logarithmic axis, smoothing. All plots share cursor and zoom.

/** What all plots show: visible runs, zoom, smoothing. `plots` are redrawn by `redraw`. */
const view = { hidden: new Set(), range: null, smoothing: 0, plots: [], listeners: [] };

function redraw() {
  for (const plot of view.plots) plot.invalidate();
  for (const listener of view.listeners) listener();
}

function zoom(range) {
  view.range = range;
  for (const plot of view.plots) plot.applyZoom();
  for (const listener of view.listeners) listener();
}

/** Exponential moving average without the bias of its start; a missing value stays missing. */
function smoothed(values, weight) {
  if (!weight) return values;
  let sum = 0, norm = 0;
  return values.map((value) => {
    if (!isNumber(value)) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

/** [x, ...columns] without the rows whose x is missing or does not grow. */
function growing(x, columns) {
  let last = -Infinity;
  const rows = [];
  x.forEach((value, row) => {
    if (isNumber(value) && value > last) rows.push(row), (last = value);
  });
  return [x, ...columns].map((column) => rows.map((row) => column[row] ?? null));
}

const visible = (runs) => runs.filter((run) => !view.hidden.has(run.index));
const visiblePlots = new IntersectionObserver((entries) => {
  for (const entry of entries) entry.target.plot.seen(entry.isIntersecting);
}, { rootMargin: "300px" });

/** The lines of a chart: {x, y, label, color, dash, width, kind, unit}. Kinds: `main`, `raw`, `points`. */
function linesOf(chart, runs, series) {
  const lines = [], many = runs.length > 1;
  for (const run of visible(runs)) {
    const table = chart.evaluation ? run.evaluations : run.training;
    series.forEach(([metric, label], place) => {
      const values = table.metrics[metric]?.map((value) => (isNumber(value) ? value - (chart.minus || 0) : null));
      if (!values || !values.some(isNumber)) return;
      const color = many || series.length === 1 ? runColor(run.index) : seriesColor(place);
      const x = table.step, dash = many && place ? [6 - (place % 3) * 2, 4] : run.index > 7 ? [2, 4] : null; // colours repeat from the ninth run on
      const name = !many ? label : series.length === 1 ? run.label : `${run.label} ${label}`;
      const weight = chart.points ? 0 : view.smoothing, main = smoothed(values, weight);
      if (weight) lines.push({ x, y: values, kind: "raw", color });
      lines.push({ x, y: main, kind: chart.points ? "points" : "main", color, dash, label: name, metric });
    });
  }
  return lines;
}

/** The lines of stacked phases of one run, from the bottom up. `own` holds the values before stacking. */
function stackOf(run) {
  const names = PHASES.filter(([metric]) => run.training.metrics[metric]), step = run.training.metrics["time/step"] || [];
  const columns = names.map(([metric]) => run.training.metrics[metric].map((value) => (isNumber(value) ? value : 0)));
  if (step.length) {
    columns.push(step.map((value, i) => (isNumber(value) ? Math.max(0, value - columns.reduce((sum, column) => sum + column[i], 0)) : 0)));
    names.push(["", "other"]);
  }
  let below = null;
  return columns.map((column, place) => {
    const own = smoothed(column, view.smoothing), y = own.map((value, i) => value + (below ? below[i] : 0));
    below = y;
    return { x: run.training.step, y, own, kind: "stack", color: seriesColor(place), label: names[place][1] };
  });
}

class Plot {
  /** A card with a plot. `chart` is a row of charts.js, with `stack` for phases of `oneRun`. */
  constructor(chart, runs, series) {
    Object.assign(this, { chart, runs, series, log: false, stale: true, near: false, uplot: null, oneRun: runs[0] });
    this.readout = el("div", { class: "readout", "aria-live": "off" });
    this.area = el("div", { class: "plot", tabindex: "0", role: "img", on: { keydown: (event) => this.key(event) } });
    this.logButton = chart.log && el("button", { type: "button", class: "small", "aria-pressed": "false", title: "logarithmic axis",
      on: { click: () => this.toggleLog() } }, "log");
    this.badge = el("a", { href: "#alarms", hidden: true });
    this.note = el("p", { class: "note" });
    const head = el("div", { class: "card-head" }, el("h3", {}, chart.title), this.badge, this.logButton);
    this.card = el("article", { class: `card chart${chart.hero ? " hero" : ""}${chart.wide ? " wide" : ""}`, id: `chart-${chart.id}` },
      head, this.readout, this.area, this.note);
    this.card.plot = this;
    this.mark();
    this.sized = new ResizeObserver(() => this.uplot && this.uplot.setSize(this.size()));
    this.sized.observe(this.area);
    visiblePlots.observe(this.card);
    view.plots.push(this);
  }

  size() {
    return { width: Math.max(160, this.area.clientWidth), height: Math.max(120, this.area.clientHeight) };
  }

  seen(near) {
    this.near = near;
    if (near && this.stale) this.draw();
  }

  /** Say on the card whether an alarm concerns its metric. */
  mark() {
    const { healthy } = this.chart, runs = visible(this.runs);
    const worst = runs.flatMap((run) => alarmsOf(this.chart, run)).map(({ severity }) => severity).sort()[0];
    const evidence = healthy && runs.length && runs.every((run) => run.findings.passed.some(([name]) => name === healthy)) && `Healthy: ${healthy}.`;
    this.badge.hidden = !worst && !evidence;
    this.badge.className = `badge ${worst || "fine"}`;
    this.badge.textContent = worst || "healthy";
    this.card.classList.toggle("alarmed", Boolean(worst));
    this.note.textContent = [evidence, this.chart.text].filter(Boolean).join(" ");
  }

  invalidate() {
    this.stale = true;
    if (this.near) this.draw();
  }

  toggleLog() {
    this.log = !this.log;
    this.logButton.setAttribute("aria-pressed", String(this.log));
    this.draw();
  }

  draw() {
    this.stale = false;
    this.uplot?.destroy();
    this.uplot = null;
    this.lines = this.chart.stack ? stackOf(this.oneRun) : linesOf(this.chart, this.runs, this.series);
    const shown = this.lines.filter((line) => line.x.some(isNumber));
    this.mark();
    this.area.classList.toggle("empty", !shown.length);
    this.area.setAttribute("aria-label", this.summary());
    if (!shown.length) return this.readout.replaceChildren();
    const tables = shown.map((line) => growing(line.x, [this.log ? line.y.map((v) => (v > 0 ? v : null)) : line.y]));
    this.uplot = new uPlot(this.options(shown), uPlot.join(tables), this.area);
    this.applyZoom();
    this.show();
  }

  options(lines) {
    const { log } = this, text = css("--muted"), grid = css("--line"), font = `11px ${css("--font")}`;
    const common = { stroke: text, font, grid: { stroke: grid, width: 1 }, ticks: { show: false }, border: { show: false } };
    const bands = [];
    lines.forEach((line, i) => {
      if (line.kind === "stack" && i) bands.push({ series: [i + 1, i], fill: `${line.color}d0` });
    });
    return {
      ...this.size(),
      padding: [10, 14, 0, 0],
      legend: { show: false },
      series: [{}, ...lines.map((line, i) => seriesOptions(line, i))],
      bands,
      scales: { x: { time: false, range: (u, low, high) => xRange(low, high) }, y: { distr: log ? 3 : 1, range: (u, low, high) => this.yRange(low, high) } },
      axes: [
        { ...common, size: 26, gap: 4, space: 60, grid: { show: false },
          incrs: STEP_INCREMENTS, values: (u, at) => at.map((v) => short(v)) },
        { ...common, size: (u, labels) => Math.max(44, ...(labels || []).map((label) => 16 + 6.3 * label.length)), gap: 6, space: log ? 24 : 34, values: (u, at) => at.map((v) => (v === null ? "" : this.unit() === "s" ? ticks(v, at) : withUnit(v, this.unit()))) },
      ],
      cursor: { y: false, sync: { key: "report", scales: ["x", null] }, drag: { x: true, y: false, setScale: false },
        points: { size: (u, i) => (this.hasPoint(lines[i - 1]) ? 7 : 0), width: 1.5, stroke: (u, i) => lines[i - 1].color, fill: () => css("--card") },
        dataIdx: (u, i, hovered) => nearest(u.data[i], hovered) },
      hooks: { drawAxes: [(u) => this.markAlarms(u)], setSelect: [(u) => this.select(u)], setCursor: [(u) => this.show(u)] },
    };
  }

  hasPoint(line) {
    return line && (line.kind === "main" || line.kind === "points");
  }

  unit() {
    if (this.chart.unit !== "auto") return this.chart.unit;
    return this.series.every(([metric]) => metric.includes("@")) ? "share" : "reward";
  }

  yRange(low, high) {
    if (low === null || low === undefined) return [0, 1];
    if (this.log) return uPlot.rangeLog(low, high, 10, false);
    if (this.chart.zero || this.chart.stack) low = Math.min(0, low);
    const pad = (high - low || Math.abs(high) || 1) * 0.08;
    const bottom = low === 0 && (this.chart.zero || this.chart.stack) ? 0 : low - pad;
    return [bottom, this.unit() === "share" && high <= 1 ? Math.min(1.02, high + pad) : high + pad];
  }

  /** Mark the steps of this metric's alarms behind the curves. */
  markAlarms(u) {
    const { ctx, bbox } = u, { limit } = this.chart;
    if (limit > u.scales.y.min && limit < u.scales.y.max) {
      ctx.fillStyle = css("--warn");
      const y = u.valToPos(limit, "y", true);
      for (let x = bbox.left; x < bbox.left + bbox.width; x += 8) ctx.fillRect(x, y, 4, 1);
    }
    if (!this.chart.alarm) return;
    ctx.fillStyle = `${css("--warn")}38`;
    for (const run of visible(this.runs)) {
      for (const alarm of alarmsOf(this.chart, run)) {
        for (const [first, last] of alarm.steps) {
          const [left, right] = [first - 0.5, last + 0.5].map((step) => Math.max(bbox.left, Math.min(bbox.left + bbox.width, u.valToPos(step, "x", true))));
          if (right > left || (left > bbox.left && left < bbox.left + bbox.width)) ctx.fillRect(left, bbox.top, Math.max(2, right - left), bbox.height);
        }
      }
    }
  }

  select(u) {
    if (u.select.width < 4) return;
    zoom([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]);
    u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  }

  applyZoom() {
    if (!this.uplot) return;
    const x = this.uplot.data[0], [low, high] = view.range || [x[0], x[x.length - 1]];
    this.uplot.setScale("x", { min: low, max: high });
  }

  /** Show the values at the cursor, or the last ones. */
  show(u) {
    const index = u && isNumber(u.cursor.idx) && u.cursor.left >= 0 ? u.cursor.idx : null, chips = [];
    const lines = this.lines.filter((line) => line.x.some(isNumber));
    lines.forEach((line, i) => {
      if (!line.label) return;
      const raw = lines[i - 1]?.kind === "raw"; // the label shows the value of the step, not the smoothed one
      const column = this.chart.stack ? line.own : this.uplot.data[raw ? i : i + 1];
      const at = nearest(column, index === null ? column.length - 1 : index);
      const swatch = el("i", { style: { background: line.color } });
      chips.push(el("span", { class: "chip" }, swatch, el("span", { class: "label" }, line.label), el("b", {}, withUnit(column[at], this.unit()))));
    });
    if (index !== null) chips.unshift(el("span", { class: "at" }, `step ${short(this.uplot.data[0][index])}`));
    this.readout.replaceChildren(...chips);
  }

  summary() {
    const parts = this.lines.filter((line) => line.label).map((line) => {
      const values = (line.own || line.y).filter(isNumber);
      return `${line.label}: first ${withUnit(values[0], this.unit())}, last ${withUnit(values[values.length - 1], this.unit())}`;
    });
    return `${this.chart.title}. ${parts.join("; ") || "No values."} Arrow keys move the cursor, Escape resets the zoom.`;
  }

  key(event) {
    const u = this.uplot, step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") zoom(null);
    if (!u || (!step && !["Home", "End"].includes(event.key))) return;
    event.preventDefault();
    const last = u.data[0].length - 1, here = isNumber(u.cursor.idx) ? u.cursor.idx : last;
    const index = event.key === "Home" ? 0 : event.key === "End" ? last : Math.min(last, Math.max(0, here + step));
    u.setCursor({ left: u.valToPos(u.data[0][index], "x"), top: 10 });
  }
}

const STEP_INCREMENTS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6];

const POINT = 7;

/** The alarms of a run that concern a chart. An alarm of several metrics concerns those with missing values. */
function alarmsOf({ alarm, series }, run) {
  const incomplete = ([metric]) => run.training.metrics[metric]?.includes(null) ?? true;
  return run.findings.alarms.filter(({ metric }) => {
    const metrics = metric.split(" ");
    return metrics.some((name) => [alarm].flat().includes(name)) && (metrics.length === 1 || series.some(incomplete));
  });
}

/** Rows of a column that have no neighbour to draw a line to. A row that the column's run lacks is undefined, and no gap. */
function isolated(column) {
  const rows = [...column.keys()].filter((row) => column[row] !== undefined);
  return rows.filter((row, i) => isNumber(column[row]) && !isNumber(column[rows[i - 1]]) && !isNumber(column[rows[i + 1]]));
}

function seriesOptions(line, index) {
  const hidden = { show: false };
  const all = line.kind === "points", points = { show: true, size: all ? POINT : 5, fill: line.color, stroke: line.color };
  if (!all) points.filter = (u, i) => isolated(u.data[i]);
  const gaps = { spanGaps: line.kind === "points" };
  if (line.kind === "raw") return { stroke: `${line.color}44`, width: 1, points: hidden };
  if (line.kind === "stack") return { stroke: line.color, width: 1, points, fill: index ? undefined : `${line.color}d0` };
  return { stroke: line.color, width: 1.75, dash: line.dash || undefined, points, ...gaps };
}

function xRange(low, high) {
  return low === high ? [low - 0.5, high + 0.5] : [low, high];
}

/** The index nearest to `index` at which a column has a number. */
function nearest(column, index) {
  if (index === null || index === undefined || isNumber(column[index])) return index;
  for (let distance = 1; distance < column.length; distance++) {
    if (isNumber(column[index - distance])) return index - distance;
    if (isNumber(column[index + distance])) return index + distance;
  }
  return index;
}

/** The cards of the charts that have values in any run, after `first`. */
function chartGrid(charts, runs, first = []) {
  const filled = ordered(charts, runs).map((chart) => [chart, seriesOf(chart, runs)]).filter(([, series]) => series.length);
  const cards = [...first, ...filled.map(([chart, series]) => new Plot(chart, runs, series).card)];
  widen(cards);
  return el("div", { class: "charts" }, cards);
}

/** Widen as many cards as it takes to fill the last row, in four columns and in two. */
function widen(cards) {
  const cells = { hero: 4, wide: 2 }, size = (card) => cells[[...card.classList].find((name) => name in cells)] || 1;
  const total = cards.reduce((sum, card) => sum + size(card), 0), single = cards.filter((card) => size(card) === 1);
  single.slice(0, (4 - (total % 4)) % 4).forEach((card) => card.classList.add("fill-4"));
  single.slice(0, single.length % 2).forEach((card) => card.classList.add("fill-2"));
}

/** The stacked seconds of each phase, for one run at a time. */
function phasesCard(runs) {
  const timed = runs.filter((run) => run.training.metrics["time/step"]);
  if (!timed.length) return null;
  const chart = { id: "phases", title: "Seconds of a step", unit: "s", stack: true, wide: true, text: "Seconds of rank 0 by phase. “other” is the time between phases." };
  const plot = new Plot(chart, timed, []);
  if (plot.runs.length > 1) {
    const options = plot.runs.map((run) => [run.index, run.label]);
    plot.card.querySelector(".card-head").append(choice("run", options, plot.oneRun.index, (index) => {
      plot.oneRun = plot.runs.find((run) => run.index === index);
      plot.invalidate();
    }));
  }
  return plot.card;
}
