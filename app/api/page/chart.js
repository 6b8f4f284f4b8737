// Line charts of the last minutes, in SVG.

import { element, svg } from "./dom.js";

export const SPAN = 120; // seconds
const WIDTH = 300;
const HEIGHT = 64;
const GAP = 5; // seconds without a sample that end a line

/** A card: a title, the last value of each line, and the lines. */
export class Chart {
  /** `lines`: pairs of a name and a function from a sample to a number, or null where it says nothing. */
  constructor({ title, unit = "", lines, most = 0, format = plain }) {
    Object.assign(this, { title, unit, lines, most, format });
    this._values = lines.map(() => element("strong"));
    this._paths = lines.map((_, at) => svg("path", { class: `line line-${at}` }));
    this._area = svg("path", { class: "area" });
    this._scale = element("span", {}, "–");
    const about = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" };
    this._svg = svg("svg", about, this._area, ...this._paths);
    const named = lines.map(([name], at) =>
      element("span", { className: `value value-${at}` }, this._values[at], ` ${name}`));
    this.node = element("section", { className: "card", ariaLabel: title },
      element("h2", {}, title), element("div", { className: "values" }, ...named), this._svg,
      element("div", { className: "scale" }, this._scale, element("span", {}, `${SPAN / 60} min`)));
  }

  /** Draw samples, which have a time `t` in seconds; the last one is now. */
  draw(samples) {
    const now = samples.at(-1).t;
    const rows = this.lines.map(([, value]) => samples.map((each) => [each.t - now + SPAN, value(each)]));
    const highest = Math.max(...rows.flat().map(([, value]) => value ?? 0));
    const top = this.most || round(highest);
    rows.forEach((points, at) => {
      this._values[at].textContent = this._told(points.at(-1)[1]);
      this._paths[at].setAttribute("d", path(points, top));
    });
    this._area.setAttribute("d", area(rows[0], top));
    this._scale.textContent = `0 to ${this._told(top)}`;
    const told = this.lines.map(([name], at) => `${name}: ${this._values[at].textContent}`);
    this._svg.setAttribute("aria-label", told.join(", "));
  }

  _told(value) {
    return value === null ? "–" : this.format(value) + this.unit;
  }
}

/** A number in few characters. */
export function plain(value) {
  if (value >= 1000) return Math.round(value).toLocaleString("en");
  return String(value >= 100 ? Math.round(value) : Number(value.toPrecision(value < 1 ? 2 : 3)));
}

/** The next number that reads well. */
function round(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value) * power;
}

/** Pieces of a line: without a value, or after a pause of the view, it begins anew. */
function pieces(points) {
  const found = [];
  let before = -Infinity;
  for (const [t, value] of points) {
    if (value === null) continue;
    if (t - before > GAP) found.push([]);
    found.at(-1).push([t, value]);
    before = t;
  }
  return found;
}

function path(points, top) {
  return pieces(points).map((piece) => "M" + piece.map((point) => place(point, top)).join("L")).join("");
}

function area(points, top) {
  return pieces(points).map((piece) => {
    const [[from], [to]] = [piece[0], piece.at(-1)];
    return `M${place([from, 0], top)}L${piece.map((point) => place(point, top)).join("L")}L${place([to, 0], top)}Z`;
  }).join("");
}

const place = ([t, value], top) =>
  `${((t / SPAN) * WIDTH).toFixed(1)},${(HEIGHT - 2 - (Math.min(value / top, 1)) * (HEIGHT - 4)).toFixed(1)}`;
