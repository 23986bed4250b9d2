// The last hour: the server's own series, or those of a dataset or consumer, with events and diagnoses. The page loads
// them once for each view, and then adds the seconds since.

import { labelOf } from "./diagnoses.js";
import { byId, list, make, say } from "./dom.js";
import { duration, number, percent, plural } from "./format.js";
import { Plot } from "./plot.js";
import { Points } from "./points.js";

const RANGES = [[60, "1 min"], [300, "5 min"], [900, "15 min"], [3600, "1 h"]];
const FIRST_RANGE = 300;
const FEWEST_SECONDS = 5; // of a zoomed view
const FEWEST_LIVE_SECONDS = 60; // of the axis, while there is less to show
const FIRST_PLOTS = 4; // the others are below, and can be hidden
const MAX_MARKS = 100;
const MIB = 2 ** 20;

const mebibytes = (value) => number(value === null ? null : value / MIB);
const share = { format: percent, most: 1 };
const PLOTS = {
  server: [
    ["batches_per_second", "Sent batches/s", { format: number }],
    ["bytes_per_second", "Sent MiB/s", { format: mebibytes, unit: MIB }],
    ["data_wait", "Data wait", share],
    ["workers_busy", "Workers busy", share],
    ["machine_cpu", "CPUs of the machine", share],
    ["main_process_cpu", "CPU of the main process", share],
    ["memory", "Batch memory", share],
    ["prefetched", "Prefetched batches", { format: number }],
    ["errors_per_second", "Failed batches/s", { format: number }],
    ["event_loop_lag", "Event loop lag", { format: duration }],
    ["consumers", "Active consumers", { format: number }],
  ],
  dataset: [
    ["batches_per_second", "Sent batches/s", { format: number }],
    ["bytes_per_second", "Sent MiB/s", { format: mebibytes, unit: MIB }],
    ["samples_per_second", "Computed samples/s", { format: number }],
    ["errors_per_second", "Failed batches/s", { format: number }],
  ],
  consumer: [
    ["batches_per_second", "Consumed batches/s", { format: number }],
    ["bytes_per_second", "Sent MiB/s", { format: mebibytes, unit: MIB }],
    ["data_wait", "Data wait", share],
    ["starved", "Batch not ready", share],
    ["in_transit", "Response in transit", share],
    ["round_trip_time", "Round-trip time", { format: duration }],
  ],
};
const KINDS = {
  start: "server started", restart: "worker restarted", workers: "number of workers", error: "error", draining: "shutdown",
  diagnosis: "diagnosis",
};

const clock = (time) => new Date(time * 1000).toLocaleTimeString("en-GB");

function markRow() {
  const [time, kind, text] = [make("time"), make("strong"), make("span")];
  return {
    element: make("li", {}, time, " ", kind, " ", text),
    update(mark) {
      say(time, clock(mark.at));
      say(kind, KINDS[mark.kind] ?? mark.kind);
      say(text, mark.text);
    },
  };
}

export class HistoryView {
  #points = new Points();
  #kind = "server"; // of the series that are shown
  #plots = [];
  #range = FIRST_RANGE;
  #fixed = null; // [low, high] in Unix seconds while paused or zoomed; null for the latest seconds
  #zoomed = false;
  #views = 0; // number of requests for a whole view
  #reading = false;
  #subject = byId("subject");
  #buttons = new Map();

  constructor() {
    for (const [seconds, text] of RANGES) {
      const button = make("button", { type: "button", "aria-pressed": seconds === this.#range }, text);
      button.addEventListener("click", () => this.#select(seconds));
      this.#buttons.set(seconds, button);
    }
    byId("ranges").append(...this.#buttons.values());
    byId("pause").addEventListener("click", () => (this.#fixed === null ? this.#pause() : this.#resume()));
    byId("zoom-out").addEventListener("click", () => this.#resume());
    this.#subject.addEventListener("change", () => {
      this.#points.clear();
      this.#load();
    });
    byId("charts").addEventListener("keydown", (event) => this.#press(event));
    this.#build("server");
  }

  // Read the points that are missing since the latest one.
  async show() {
    if (this.#fixed !== null || this.#reading) return;
    this.#reading = true;
    try {
      const views = this.#views;
      const { next } = this.#points;
      const response = next === null ? null : await this.#read({ since: next });
      if (views !== this.#views) return;
      if (response !== null && this.#points.append(response)) this.#draw(response);
      else if (next === null || response !== null) await this.#load();
    } finally {
      this.#reading = false;
    }
  }

  // --- reading

  // Read all points of the view.
  async #load() {
    const views = (this.#views += 1);
    const read = async (query) => {
      const response = await this.#read(query);
      return views === this.#views ? response : null;
    };
    const { pid } = this.#points;
    let response = await read(this.#query());
    if (response === null) return;
    if (response.pid !== pid && pid !== null) response = await read({}); // its seconds are others
    if (response === null) return;
    this.#points.load(response);
    if (pid === null && response.step > 1) response = await read(this.#query()); // the range, with more points
    if (response === null) return;
    this.#points.load(response);
    this.#draw(response);
  }

  // Return the seconds of the view; all seconds if the current one is unknown.
  #query() {
    const { latest } = this.#points;
    if (latest === null) return {};
    if (this.#fixed === null) return { since: this.#points.secondOf(latest - this.#range) };
    const [low, high] = this.#fixed.map((time) => this.#points.secondOf(time));
    return { since: low, until: high + 1 };
  }

  // Request series; null without a response, which the state of the page shows.
  async #read(query) {
    const [kind, id] = this.#selected();
    if (kind !== "server") query[kind] = id;
    try {
      const response = await fetch(`stats/history?${new URLSearchParams(query)}`);
      if (response.status === 404 && kind !== "server") {
        this.#subject.value = "server"; // no longer kept
        this.#points.clear();
        return null;
      }
      return response.ok ? await response.json() : null;
    } catch {
      return null;
    }
  }

  #selected() {
    const value = this.#subject.value || "server";
    const at = value.indexOf(" ");
    return at < 0 ? [value, null] : [value.slice(0, at), value.slice(at + 1)];
  }

  // --- what is selected

  #select(seconds) {
    this.#range = seconds;
    for (const [each, button] of this.#buttons) button.setAttribute("aria-pressed", each === seconds);
    this.#resume();
  }

  #pause() {
    this.#fixed = this.#view();
    this.#draw();
  }

  #resume() {
    this.#fixed = null;
    this.#zoomed = false;
    this.#draw();
    this.#load();
  }

  #zoom(view) {
    this.#fixed = this.#bounded(view, this.#points.latest ?? 0);
    this.#zoomed = true;
    this.#draw();
    this.#load();
  }

  #press(event) {
    const [low, high] = this.#view();
    const middle = (low + high) / 2;
    const half = (high - low) / 2;
    const views = {
      ArrowLeft: [low - half / 2, high - half / 2],
      ArrowRight: [low + half / 2, high + half / 2],
      "+": [middle - half / 2, middle + half / 2],
      "-": [middle - 2 * half, middle + 2 * half],
      Escape: null,
    };
    if (!(event.key in views) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const view = views[event.key];
    if (view === null) this.#resume();
    else this.#zoom(view);
  }

  #bounded([low, high], now) {
    const length = Math.min(RANGES.at(-1)[0], Math.max(FEWEST_SECONDS, high - low));
    const end = Math.min(now, Math.max(high, now - RANGES.at(-1)[0] + length));
    return [end - length, end];
  }

  #view() {
    if (this.#fixed !== null) return this.#fixed;
    const now = this.#points.now ?? Date.now() / 1000;
    const first = Math.min(this.#points.first ?? now, now - FEWEST_LIVE_SECONDS);
    return [Math.max(first, now - this.#range), now];
  }

  // --- drawing

  #build(kind) {
    for (const plot of this.#plots) plot.remove();
    this.#kind = kind;
    this.#plots = PLOTS[kind].map(([name, title, options], i) => {
      const parent = byId(i < FIRST_PLOTS ? "plots" : "more-plots");
      const zoom = (...view) => this.#zoom(view);
      return new Plot(parent, name, title, options, { zoom, reset: () => this.#resume(), point: (at) => this.#point(at) });
    });
    byId("more-series").hidden = this.#plots.length <= FIRST_PLOTS;
  }

  #draw(response = null) {
    if (response !== null) this.#offer(response);
    const [kind] = this.#selected();
    if (kind !== this.#kind) this.#build(kind);
    const view = this.#view();
    const { times, columns, marks, labels } = this.#points.between(...view);
    const events = [...marks, ...changes(labels)].sort((one, other) => one.at - other.at);
    for (const plot of this.#plots) plot.show(view, times, columns, events);
    this.#showLane(view, labels);
    list(byId("mark-list"), events.slice(-MAX_MARKS).reverse(), ({ at, kind: event, text }) => `${at} ${event} ${text}`, markRow);
    byId("events").hidden = events.length === 0;
    say(byId("event-count"), plural(events.length, "event"));
    byId("zoom-out").disabled = !this.#zoomed;
    byId("pause").setAttribute("aria-pressed", this.#fixed !== null);
    say(byId("pause"), this.#fixed === null ? "Pause" : "Resume");
    this.#point(null);
  }

  // The time under the pointer, or the shown period.
  #point(at) {
    const [low, high] = this.#view();
    const state = this.#zoomed ? ", zoomed" : this.#fixed !== null ? ", paused" : "";
    say(byId("period"), at === null ? `${clock(low)} to ${clock(high)}${state}` : clock(at));
  }

  #showLane([low, high], labels) {
    const known = labels.filter(({ bottleneck }) => bottleneck !== null);
    byId("lane").hidden = known.length === 0;
    const percentOf = (time) => (100 * (Math.min(high, Math.max(low, time)) - low)) / (high - low);
    // the view moves, and elements are kept: each update has its own positions
    const placed = known.map((label) => ({ ...label, left: percentOf(label.at), right: percentOf(label.until) }));
    list(byId("lane"), placed, ({ at, bottleneck }) => `${at} ${bottleneck}`, () => {
      const element = make("span");
      return {
        element,
        update({ at, until, bottleneck, left, right }) {
          const { name, tone } = labelOf(bottleneck);
          element.dataset.tone = tone;
          element.title = `${name}, ${clock(at)} to ${clock(until)}`;
          element.style.left = `${left}%`;
          element.style.width = `${right - left}%`;
          say(element, right - left > 8 ? name : "");
        },
      };
    });
    const told = known.map(({ at, bottleneck }) => `${labelOf(bottleneck).name} from ${clock(at)}`);
    byId("lane").setAttribute("aria-label", `Diagnosis: ${told.slice(-5).join(", ")}`);
  }

  // Offer the datasets and consumers whose series the server keeps.
  #offer({ datasets, consumers }) {
    const names = consumers.map(({ id, run, consumer, token, dataset }) => {
      const client = token === "anyone" ? consumer : `${consumer} (${token})`;
      return [`consumer ${id}`, `${run == null ? client : `${run}, ${client}`} of ${dataset}`];
    });
    const offered = [["server", "Server"], ...datasets.map((name) => [`dataset ${name}`, `Dataset ${name}`]), ...names];
    const before = [...this.#subject.options].map(({ value, text }) => [value, text]);
    if (JSON.stringify(before) === JSON.stringify(offered)) return;
    const { value } = this.#subject;
    this.#subject.replaceChildren(...offered.map(([each, text]) => make("option", { value: each }, text)));
    this.#subject.value = offered.some(([each]) => each === value) ? value : "server";
  }
}

// Changes from one known diagnosis to another.
function changes(labels) {
  const known = labels.filter(({ bottleneck }) => bottleneck !== null && bottleneck !== "unknown");
  return known.slice(1).flatMap(({ at, bottleneck }, i) => {
    const before = known[i].bottleneck;
    return before === bottleneck ? [] : [{ at, kind: "diagnosis", text: `${before} to ${bottleneck}` }];
  });
}
