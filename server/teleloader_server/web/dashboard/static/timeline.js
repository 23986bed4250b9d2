// Timeline of the last batches: one row per worker, per consumer of the server, and per client, drawn on a canvas. The
// same numbers are in the sentence below it, which follows the pointer and the arrow keys, and in a table.

import { byId, list, make, say, table } from "./dom.js";
import { count, duration, UNKNOWN } from "./format.js";

const EVERY = 2_000;
const ROW = 22;
const LABEL = 150;
const NARROW_LABEL = 84;
const SLOWEST = 10;
const MAX_ROWS = 40;
const AFTER = ["send", "receive", "decode", "wait"];
const TITLES = ["Batch", "Worker", "Total", "Queue", "Stages", "Result", "Until sent", "Send", "Receive", "Decode", "Wait"];

// All iterations of a training loop have the part of the name before "#" in common.
const loopOf = (consumer) => consumer.replace(/#[^#]*$/, "");
const keyOf = (one, batch = one.batch) => `${one.loader} ${one.epoch} ${batch}`;

export class Timeline {
  #details = byId("timeline-details");
  #canvas = byId("timeline-canvas");
  #table = table("Slowest of these batches", TITLES);
  #most = byId("timeline-most");
  #timer = 0;
  #stages = [];
  #rows = [];
  #batches = new Map();
  #selected = null; // {row, place}
  #range = [0, 1];

  constructor() {
    byId("timeline-table").append(this.#table.element);
    this.#details.addEventListener("toggle", () => this.#refresh());
    this.#most.addEventListener("change", () => this.#refresh());
    this.#canvas.addEventListener("mousemove", (event) => this.#point(event));
    this.#canvas.addEventListener("keydown", (event) => this.#key(event));
    this.#canvas.addEventListener("focus", () => this.#step(0, 0));
    new ResizeObserver(() => this.#draw()).observe(this.#canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#draw());
  }

  get #isHeld() {
    return this.#canvas.matches(":hover, :focus") || this.#table.body.contains(document.activeElement);
  }

  async #refresh() {
    clearTimeout(this.#timer);
    if (!this.#details.open) return;
    if (!document.hidden && !(this.#isHeld && this.#rows.length > 0)) {
      try {
        const answer = await fetch("v1/timeline?clients=true");
        if (!answer.ok) throw new Error(`HTTP status ${answer.status}`);
        this.#take(await answer.json());
      } catch (error) {
        say(byId("timeline-status"), `Request failed: ${error.message}`);
      }
    }
    this.#timer = setTimeout(() => this.#refresh(), EVERY);
  }

  #take(found) {
    this.#stages = found.stages;
    const computed = found.computed.slice(-Number(this.#most.value));
    this.#selected = null;
    if (computed.length === 0) {
      say(byId("timeline-status"), "No batch was computed since the server started.");
      this.#canvas.hidden = true;
      return;
    }
    this.#canvas.hidden = false;
    this.#batches = joined(found, computed);
    this.#rows = rowsOf(found, computed, this.#batches).slice(0, MAX_ROWS);
    const spans = this.#rows.flatMap(({ spans: each }) => each);
    this.#range = [Math.min(...spans.map(({ from }) => from)), Math.max(...spans.map(({ to }) => to))];
    const clients = found.clients.length === 0 ? " No client has reported its part yet." : "";
    say(byId("timeline-status"), `Batches ${computed[0].number} to ${computed.at(-1).number} since the server started, ` +
      `${duration(this.#range[1] - this.#range[0])}.${clients}`);
    this.#legend();
    this.#draw();
    this.#list();
  }

  #legend() {
    const kinds = [...this.#stages, ...AFTER];
    const items = kinds.map((kind) => make("li", {}, make("span", { class: "swatch", "data-kind": this.#kindOf(kind) }), kind));
    byId("timeline-legend").replaceChildren(...items);
  }

  #kindOf(kind) {
    const place = this.#stages.indexOf(kind);
    return place < 0 ? kind : `stage-${Math.min(place, 4)}`;
  }

  #label() {
    return this.#canvas.parentElement.clientWidth < 500 ? NARROW_LABEL : LABEL;
  }

  #draw() {
    if (this.#rows.length === 0 || this.#canvas.hidden) return;
    const ratio = window.devicePixelRatio || 1;
    const width = this.#canvas.parentElement.clientWidth;
    const height = ROW * this.#rows.length;
    this.#canvas.width = width * ratio;
    this.#canvas.height = height * ratio;
    this.#canvas.style.height = `${height}px`;
    const context = this.#canvas.getContext("2d");
    context.scale(ratio, ratio);
    const style = getComputedStyle(byId("timeline"));
    const colour = (name) => style.getPropertyValue(name).trim();
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    const label = this.#label();
    this.#rows.forEach(({ title, spans }, row) => {
      context.fillStyle = colour("--track");
      context.fillRect(label, row * ROW + 3, width - label, ROW - 6);
      context.fillStyle = colour("--ink");
      context.fillText(shortened(context, title, label - 8), 0, row * ROW + ROW / 2);
      spans.forEach((span) => {
        const [from, to] = [this.#x(span.from), this.#x(span.to)];
        context.fillStyle = colour(`--kind-${this.#kindOf(span.kind)}`);
        context.fillRect(from, row * ROW + 3, Math.max(1, to - from), ROW - 6);
      });
    });
    const chosen = this.#chosen();
    if (chosen !== null) {
      const [from, to] = [this.#x(chosen.from), this.#x(chosen.to)];
      context.strokeStyle = colour("--ink");
      context.lineWidth = 2;
      context.strokeRect(from - 1, this.#selected.row * ROW + 2, Math.max(3, to - from + 2), ROW - 4);
    }
  }

  #x(at) {
    const label = this.#label();
    const width = this.#canvas.parentElement.clientWidth - label;
    return label + (width * (at - this.#range[0])) / Math.max(1e-9, this.#range[1] - this.#range[0]);
  }

  #chosen() {
    return this.#selected === null ? null : (this.#rows[this.#selected.row]?.spans[this.#selected.place] ?? null);
  }

  #point(event) {
    const box = this.#canvas.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top) / ROW);
    const spans = this.#rows[row]?.spans ?? [];
    const x = event.clientX - box.left;
    // the nearest one, of which many are narrower than a pixel
    const gap = (span) => Math.max(this.#x(span.from) - x, x - this.#x(span.to), 0);
    let place = 0;
    spans.forEach((span, i) => {
      if (gap(span) < gap(spans[place])) place = i;
    });
    if (spans.length > 0) this.#select(row, place);
  }

  #key(event) {
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (!(event.key in steps)) return;
    event.preventDefault();
    this.#step(...steps[event.key]);
  }

  #step(down, right) {
    if (this.#rows.length === 0) return;
    const { row, place } = this.#selected ?? { row: 0, place: 0 };
    const next = Math.min(Math.max(row + down, 0), this.#rows.length - 1);
    const at = this.#chosen()?.from ?? 0;
    const spans = this.#rows[next].spans;
    const beside = down === 0 ? place + right : spans.findIndex(({ to }) => to >= at);
    this.#select(next, Math.min(Math.max(beside, 0), spans.length - 1));
  }

  #select(row, place) {
    this.#selected = { row, place };
    const span = this.#chosen();
    if (span !== null) say(byId("timeline-detail"), `${this.#rows[row].title}: ${describe(span, this.#batches, this.#stages)}`);
    this.#draw();
  }

  #list() {
    const slowest = [...this.#batches.values()].filter(({ total }) => total !== undefined)
      .sort((one, other) => other.total - one.total).slice(0, SLOWEST);
    list(this.#table.body, slowest, ({ key }) => key, () => this.#row());
  }

  #row() {
    const button = make("button", { type: "button", class: "plain" });
    const cells = TITLES.slice(1).map(() => make("span"));
    let key = null;
    button.addEventListener("click", () => this.#find(key));
    return {
      element: this.#table.row(button, ...cells),
      update: (one) => {
        key = one.key;
        say(button, `${one.batch} of epoch ${one.epoch}`);
        const stages = one.stages.map((seconds, i) => `${this.#stages[i]} ${duration(seconds)}`).join(", ");
        const texts = [`${one.worker}`, duration(one.total), duration(one.queue), stages, duration(one.result),
          ...["unsent", "send", "receive", "decode", "wait"].map((name) => (one[name] === undefined ? UNKNOWN : duration(one[name])))];
        cells.forEach((cell, i) => say(cell, texts[i]));
      },
    };
  }

  #find(key) {
    for (const [row, { spans }] of this.#rows.entries()) {
      const place = spans.findIndex((span) => span.keys.includes(key) && span.kind !== "queue");
      if (place >= 0) {
        this.#canvas.focus();
        this.#select(row, place);
        return;
      }
    }
  }
}

// The times of each computed batch, from all sides, by its key.
function joined(found, computed) {
  const batches = new Map();
  for (const one of computed) {
    const spent = one.stages.reduce((sum, seconds) => sum + seconds, 0);
    batches.set(keyOf(one), {
      ...one, key: keyOf(one), queue: Math.max(0, one.began_at - one.assigned_at),
      result: Math.max(0, one.ready_at - one.began_at - spent), total: one.ready_at - one.assigned_at,
    });
  }
  const add = (key, values, until) => {
    const batch = batches.get(key);
    if (batch === undefined || until < batch.assigned_at) return; // of an earlier computation of the same batch
    Object.assign(batch, values);
    batch.total = Math.max(batch.total, until - batch.assigned_at);
  };
  for (const one of found.sent) {
    for (const batch of one.batches) {
      const known = batches.get(keyOf(one, batch));
      if (known === undefined || known.send !== undefined || one.ended_at < known.ready_at) continue;
      add(known.key, { unsent: Math.max(0, one.began_at - known.ready_at), send: one.ended_at - one.began_at }, one.ended_at);
    }
  }
  for (const client of found.clients) {
    for (const one of client.received) {
      for (let k = one.first; k < one.first + one.batches; k++) {
        add(keyOf(client, k), { receive: one.last_byte_at - one.first_byte_at, decode: one.decoded_at - one.last_byte_at }, one.decoded_at);
      }
    }
    for (const one of client.waits) add(keyOf(client, one.batch), { wait: one.ended_at - one.began_at }, one.ended_at);
  }
  return batches;
}

function rowsOf(found, computed, batches) {
  const rows = new Map();
  const add = (title, span) => {
    if (!rows.has(title)) rows.set(title, { title, spans: [] });
    rows.get(title).spans.push(span);
  };
  const start = Math.min(...computed.map(({ began_at }) => began_at));
  for (const one of [...computed].sort((a, b) => a.pool === b.pool ? a.worker - b.worker : a.pool === null ? -1 : 1)) {
    const title = one.pool === null ? `worker ${one.worker}` : `worker ${one.worker} of ${one.pool.slice(0, 8)}`;
    const keys = [keyOf(one)];
    let at = one.began_at;
    one.stages.forEach((seconds, i) => {
      add(title, { kind: found.stages[i], from: at, to: at + seconds, keys });
      at += seconds;
    });
  }
  for (const one of found.sent) {
    const keys = one.batches.map((batch) => keyOf(one, batch));
    if (one.ended_at < start || !keys.some((key) => batches.has(key))) continue;
    add(`send to ${loopOf(one.consumer)}`, { kind: "send", from: one.began_at, to: one.ended_at, keys });
  }
  for (const client of found.clients) {
    const name = client.run ?? loopOf(client.consumer);
    for (const one of client.received) {
      const keys = Array.from({ length: one.batches }, (_, i) => keyOf(client, one.first + i));
      if (one.decoded_at < start) continue;
      add(`${name}: receive`, { kind: "receive", from: one.first_byte_at, to: one.last_byte_at, keys });
      add(`${name}: receive`, { kind: "decode", from: one.last_byte_at, to: one.decoded_at, keys });
    }
    for (const one of client.waits) {
      if (one.ended_at >= start) add(`${name}: wait`, { kind: "wait", from: one.began_at, to: one.ended_at, keys: [keyOf(client, one.batch)] });
    }
  }
  for (const { spans } of rows.values()) spans.sort((one, other) => one.from - other.from);
  return [...rows.values()];
}

function describe(span, batches, stages) {
  const first = batches.get(span.keys[0]);
  const many = span.keys.length > 1 ? ` and ${count(span.keys.length - 1)} more` : "";
  if (first === undefined) return `${span.kind} ${duration(span.to - span.from)}, batch ${span.keys[0].split(" ")[2]}${many}.`;
  const parts = [`queue ${duration(first.queue)}`, ...first.stages.map((seconds, i) => `${stages[i]} ${duration(seconds)}`),
    `result ${duration(first.result)}`];
  for (const [name, title] of [["unsent", "until sent"], ["send", "send"], ["receive", "receive"], ["decode", "decode"], ["wait", "wait"]]) {
    if (first[name] !== undefined) parts.push(`${title} ${duration(first[name])}`);
  }
  return `${span.kind} ${duration(span.to - span.from)}. Batch ${count(first.batch)} of epoch ${count(first.epoch)}${many}: ${parts.join(", ")}.`;
}

function shortened(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  let kept = text;
  while (kept.length > 1 && context.measureText(`${kept}…`).width > room) kept = kept.slice(0, -1);
  return `${kept}…`;
}
