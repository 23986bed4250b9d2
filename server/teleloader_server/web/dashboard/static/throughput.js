// Batches and bytes a second in the last five minutes, as far as the page was open.

import uPlot from "./uplot/uPlot.esm.js";
import { byId, make, say } from "./dom.js";
import { number } from "./format.js";

const SECONDS = 300;
const FEWEST_SECONDS = 60; // of the axis, while there is less to show
const HEIGHT = 180;
const MIB = 2 ** 20;

const css = (name) => getComputedStyle(document.body).getPropertyValue(name);
const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");

class Plot {
  #value = make("output");
  #title;
  #figure;
  #plot;
  #times = [];
  #values = [];

  constructor(title) {
    this.#title = title;
    this.#figure = make("figure", {}, make("figcaption", {}, `${title} `, this.#value));
    byId("plots").append(this.#figure);
    const grid = { stroke: () => css("--line"), width: 1 };
    const axis = { stroke: () => css("--quiet"), grid, ticks: { show: false } };
    const colours = { stroke: () => css("--accent"), fill: () => css("--accent-soft") };
    this.#plot = new uPlot(
      {
        width: 300,
        height: HEIGHT,
        padding: [8, 28, 0, 0],
        legend: { show: false },
        cursor: { sync: { key: "throughput" }, drag: { x: false, y: false }, y: false },
        scales: { x: { range: () => this.#range() }, y: { range: (_, low, high) => [0, 1.1 * high || 1] } },
        series: [{}, { ...colours, width: 1.5, points: { show: false } }],
        axes: [
          { ...axis, size: 24, space: 80, values: (_, splits) => splits.map(clock), incrs: [15, 30, 60, 120] },
          { ...axis, size: 48, space: 28, values: (_, splits) => splits.map(number) },
        ],
        hooks: { setCursor: [() => this.#tell()] },
      },
      [[], []],
      this.#figure,
    );
    this.#plot.root.setAttribute("role", "img");
    const fit = () => this.#plot.setSize({ width: this.#figure.clientWidth, height: HEIGHT });
    new ResizeObserver(fit).observe(this.#figure);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#plot.redraw(false));
  }

  // A value of now; null where none is known, so that no line is drawn across.
  add(now, value) {
    this.#times.push(now);
    this.#values.push(value);
    const old = this.#times.findIndex((time) => time >= now - SECONDS);
    this.#times.splice(0, old);
    this.#values.splice(0, old);
  }

  show() {
    this.#plot.setData([this.#times, this.#values]);
    this.#tell();
  }

  // The last value, or the one under the pointer.
  #tell() {
    const known = this.#values.filter((value) => value !== null);
    if (known.length === 0) return;
    const at = this.#plot?.cursor.idx ?? this.#values.length - 1;
    say(this.#value, number(this.#values[at] ?? null));
    const extremes = `between ${number(Math.min(...known))} and ${number(Math.max(...known))}`;
    this.#plot?.root.setAttribute("aria-label", `${this.#title} in the last five minutes, ${extremes}`);
  }

  #range() {
    const now = this.#times.at(-1) ?? Date.now() / 1000;
    return [Math.min(this.#times[0] ?? now, now - FEWEST_SECONDS), now];
  }
}

export class Throughput {
  #batches = new Plot("Sent batches/s");
  #bytes = new Plot("Sent MiB/s");

  note(server) {
    this.#add(server.batches_per_second, server.bytes_per_second / MIB);
  }

  interrupt() {
    this.#add(null, null);
  }

  show() {
    this.#batches.show();
    this.#bytes.show();
  }

  #add(batches, mebibytes) {
    const now = Date.now() / 1000;
    this.#batches.add(now, batches);
    this.#bytes.add(now, mebibytes);
  }
}
