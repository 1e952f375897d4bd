"use strict";
// Routing replay by layer: a cell per step and layer, darker where more experts differ.

class LayerPlot extends Plot {
  /** `runs` have `layers`: numbers of layers, steps, seconds, and shares[point][layer] of experts that agree. */
  constructor(runs) {
    const text = "Experts that the trainer's router would not choose, of those that it replayed. A row is a layer, the first one at the bottom.";
    super({ id: "layers", title: "Replayed experts that differ, by layer", unit: "share", wide: true, text }, runs, []);
    this.most = Math.max(...runs.flatMap(({ layers }) => layers.shares.flat().filter(isNumber).map((share) => 1 - share)));
    const scale = el("span", { class: "scale layers" }, el("span", {}, "0%"), el("span", {}, percent(this.most)));
    this.card.querySelector(".card-head").append(scale);
  }

  draw() {
    this.stale = false;
    this.uplot?.destroy();
    this.mark();
    this.table = this.oneRun.layers;
    const [x, rows] = growing(this.table[view.axis], [this.table.shares]);
    this.rows = rows;
    this.area.setAttribute("aria-label", this.summary());
    this.uplot = new uPlot(this.options([]), [x], this.area);
    this.applyZoom();
    this.show();
  }

  options(lines) {
    const options = super.options(lines), { layers } = this.table, [, y] = options.axes;
    Object.assign(y, { grid: { show: false }, incrs: [1, 2, 5, 10, 20, 50, 100], space: 18, size: 44,
      values: (u, at) => at.map((row) => (Number.isInteger(row) && row in layers ? String(layers[row]) : "")) });
    options.scales.y.range = () => [-0.5, layers.length - 0.5];
    options.hooks.drawAxes = [(u) => this.cells(u)];
    return options;
  }

  cells(u) {
    const { ctx, bbox } = u, x = u.data[0];
    const middle = (i) => (x[i] + x[i + 1]) / 2, end = x.length - 1, half = end ? 0 : 0.5;
    const at = (value) => Math.min(bbox.left + bbox.width, Math.max(bbox.left, Math.round(u.valToPos(value, "x", true))));
    ctx.save();
    ctx.fillStyle = css("--run-1");
    this.rows.forEach((shares, i) => {
      const left = at(i ? middle(i - 1) : x[0] - half), right = at(i < end ? middle(i) : x[end] + half);
      if (right <= left) return;
      shares?.forEach((share, row) => {
        if (!isNumber(share)) return;
        const [bottom, top] = [row - 0.5, row + 0.5].map((value) => Math.round(u.valToPos(value, "y", true)));
        ctx.globalAlpha = this.most ? (1 - share) / this.most : 0;
        ctx.fillRect(left, top, right - left, bottom - top);
      });
    });
    ctx.restore();
  }

  /** Show the layers of the step at the cursor, or of the last one: the one under the pointer, and the extremes. */
  show(u) {
    const hovered = u && isNumber(u.cursor.idx) && u.cursor.left >= 0, index = hovered ? u.cursor.idx : this.rows.length - 1;
    const shares = this.rows[index] || [], known = shares.map((share, row) => [1 - share, row]).filter(([, row]) => isNumber(shares[row]));
    const name = (row) => `layer ${this.table.layers[row]}`, chip = (label, share) => el("span", { class: "chip" }, el("span", { class: "label" }, label), el("b", {}, percent(share)));
    const sorted = known.sort(([a], [b]) => b - a), [most, least] = [sorted[0], sorted.at(-1)], chips = [];
    const row = hovered && this.area.matches(":hover") ? Math.round(u.posToVal(u.cursor.top, "y")) : null;
    if (isNumber(shares[row])) chips.push(chip(name(row), 1 - shares[row]));
    if (most) chips.push(chip(`most: ${name(most[1])}`, most[0]));
    if (least !== most) chips.push(chip(`least: ${name(least[1])}`, least[0]));
    const at = hovered ? [el("span", { class: "at" }, this.atText(u.data[0][index]))] : [];
    this.readout.replaceChildren(...at, ...chips);
  }

  summary() {
    const { layers } = this.table, last = this.rows.at(-1) || [];
    const parts = layers.map((layer, row) => `layer ${layer} ${isNumber(last[row]) ? percent(1 - last[row]) : NONE}`);
    return `${this.chart.title}. Last: ${parts.join(", ")}. Arrow keys move the cursor, Escape resets the zoom.`;
  }
}

/** The agreement of routers with replayed routes by layer, for one run at a time. */
function layersCard(runs) {
  const replayed = runs.filter((run) => run.layers);
  return replayed.length ? [withChoice(new LayerPlot(replayed))] : [];
}
