// A series over time, with the extremes of each point and the events.

import uPlot from "./uplot/uPlot.esm.js";
import { make, say } from "./dom.js";

const HEIGHT = 130;
const SMALLEST_DRAG = 6; // pixels
const TONES = { start: "--bad", restart: "--bad", error: "--bad", draining: "--warn", workers: "--accent", diagnosis: "--quiet" };

const css = (name) => getComputedStyle(document.body).getPropertyValue(name);
const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");

export class Plot {
  #name;
  #title;
  #format;
  #unit;
  #value = make("output");
  #figure;
  #plot;
  #range = [0, 1];
  #marks = [];
  #resize;
  #dark = matchMedia("(prefers-color-scheme: dark)");
  #redraw = () => this.#plot.redraw(false);

  // `most` is the end of the axis; without it, the axis ends above the largest value. Splits of the axis are multiples
  // of `unit`.
  constructor(parent, name, title, { format, most = null, unit = 1 }, { zoom, reset, point }) {
    this.#name = name;
    this.#title = title;
    this.#format = format;
    this.#unit = unit;
    this.#figure = make("figure", {}, make("figcaption", {}, `${title} `, this.#value));
    parent.append(this.#figure);
    const grid = { stroke: () => css("--line"), width: 1 };
    const axis = { stroke: () => css("--quiet"), grid, ticks: { show: false } };
    const extreme = { stroke: "transparent", points: { show: false } };
    const isLarge = (low, high) => [0, most ?? (1.1 * high || unit)];
    this.#plot = new uPlot(
      {
        width: 300,
        height: HEIGHT,
        padding: [8, 30, 0, 0],
        legend: { show: false },
        cursor: {
          sync: { key: "history" },
          drag: { x: true, y: false, setScale: false },
          y: false,
          bind: { dblclick: () => () => reset() },
        },
        scales: { x: { range: () => this.#range }, y: { range: (_, low, high) => isLarge(low, high) } },
        series: [
          {},
          extreme,
          extreme,
          { stroke: () => css("--accent"), fill: () => css("--accent-soft"), width: 1.5, points: { show: false } },
        ],
        bands: [{ series: [1, 2], fill: () => css("--accent-soft") }],
        axes: [
          { ...axis, size: 24, space: 80, values: (_, splits) => splits.map(clock), incrs: [1, 5, 15, 30, 60, 120, 300, 600, 900] },
          {
            ...axis, size: 52, space: 28, values: (_, splits) => splits.map((split) => format(split)),
            ...(unit === 1 ? {} : { splits: (_, i, low, high) => multiples(high, unit) }),
          },
        ],
        hooks: {
          draw: [() => this.#drawMarks()],
          setCursor: [(plot) => this.#tell(plot, point)],
          setSelect: [
            (plot) => {
              const { left, width } = plot.select;
              if (width < SMALLEST_DRAG) return;
              const [low, high] = [left, left + width].map((x) => plot.posToVal(x, "x"));
              plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
              zoom(low, high);
            },
          ],
        },
      },
      [[], [], [], []],
      this.#figure,
    );
    this.#plot.root.setAttribute("role", "img");
    this.#resize = new ResizeObserver(() => {
      if (this.#figure.clientWidth > 0) this.#plot.setSize({ width: this.#figure.clientWidth, height: HEIGHT });
    });
    this.#resize.observe(this.#figure);
    this.#dark.addEventListener("change", this.#redraw);
  }

  remove() {
    this.#resize.disconnect();
    this.#dark.removeEventListener("change", this.#redraw);
    this.#plot.destroy();
    this.#figure.remove();
  }

  show(range, times, columns, marks) {
    this.#range = range;
    this.#marks = marks;
    const none = times.map(() => null);
    const { mean, min, max } = columns[this.#name] ?? { mean: none, min: none, max: none };
    this.#plot.setData([times, max, min, mean]);
    this.#tell(this.#plot, null);
    const known = mean.filter((value) => value !== null);
    const text = (values, extreme) => this.#format(extreme(...values.filter((value) => value !== null)));
    const from = known.length === 0 ? "no values" : `between ${text(min, Math.min)} and ${text(max, Math.max)}, last ${this.#format(known.at(-1))}`;
    this.#plot.root.setAttribute("aria-label", `${this.#title} from ${clock(range[0])} to ${clock(range[1])}: ${from}`);
  }

  // The last value, or the one under the pointer.
  #tell(plot, point) {
    const [times, , , mean] = plot.data;
    const at = plot.cursor.idx ?? null;
    say(this.#value, this.#format(mean[at ?? mean.length - 1] ?? null));
    point?.(at === null ? null : times[at]);
  }

  #drawMarks() {
    const { ctx: context, bbox } = this.#plot;
    context.save();
    context.lineWidth = devicePixelRatio;
    context.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const { at, kind } of this.#marks) {
      const x = Math.round(this.#plot.valToPos(at, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      context.strokeStyle = css(TONES[kind] ?? "--quiet");
      context.beginPath();
      context.moveTo(x, bbox.top);
      context.lineTo(x, bbox.top + bbox.height);
      context.stroke();
    }
    context.restore();
  }
}

// Up to five round multiples of a unit.
function multiples(high, unit) {
  const raw = high / unit / 4;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= raw) * power * unit;
  return Array.from({ length: Math.floor(high / step) + 1 }, (_, i) => i * step);
}
