// The page of one worker: what it does now and its stack, its memory over time, and its last batches.

import { byId, list, make, say, table } from "./dom.js";
import { ago, bytes, count, duration, number, plural, UNKNOWN } from "./format.js";

const EVERY = 2_000;
const WIDTH = 600;
const HEIGHT = 80;

export class WorkerPage {
  #section = byId("worker");
  #table = null;
  #shown = null;
  #timer = 0;

  constructor() {
    byId("stack").addEventListener("click", () => this.#stack());
    byId("close-worker").addEventListener("click", () => {
      location.hash = "workers";
    });
  }

  // Show a worker, {worker, loader}, or none.
  open(shown) {
    clearTimeout(this.#timer);
    this.#shown = shown;
    this.#section.hidden = shown === null;
    byId("worker-stack").hidden = true;
    say(byId("stack-status"), "");
    if (shown === null) return;
    say(byId("worker-title"), `Worker ${shown.worker}`);
    this.#section.scrollIntoView();
    this.#section.focus();
    this.#refresh(shown);
  }

  async #refresh(shown) {
    try {
      const found = await ask(shown, "");
      if (shown === this.#shown) this.#show(found);
    } catch (error) {
      if (shown === this.#shown) say(byId("worker-state"), `Request failed: ${error.message}`);
    }
    if (shown === this.#shown) this.#timer = setTimeout(() => this.#refresh(shown), EVERY);
  }

  #show(found) {
    const { task, history } = found;
    const process = found.pid === null ? "no process" : `process ${found.pid}`;
    const own = found.loader === null ? "" : `, private to loader ${found.loader.slice(0, 8)}`;
    const sample = task?.sample == null ? "" : `, fetching sample ${task.sample}`;
    const doing = task === null ? found.state
      : `batch ${count(task.batch)} of epoch ${count(task.epoch)} of ${task.dataset} for ${duration(task.seconds)}${sample}`;
    say(byId("worker-state"), `${process}${own}: ${doing}.`);
    const exit = found.last_exit === null ? "" : ` Last exit: ${found.last_exit}.`;
    const now = history.at(-1);
    const use = now === undefined ? "" : ` ${bytes(now.rss)} resident, ${number(now.cpu)} CPUs.`;
    say(byId("worker-facts"), `${plural(found.batches, "batch", "batches")}, ${plural(found.restarts, "restart")}, ` +
      `${plural(found.recycled, "planned replacement")}.${use}${exit}`);
    byId("worker-history").replaceChildren(...chart(history));
    this.#table ??= this.#columns(found.stages);
    const last = found.recent[0]?.ready_at ?? 0;
    const recent = found.recent.map((one) => ({ ...one, before: last - one.ready_at }));
    list(this.#table.body, recent, ({ number: key }) => key, () => this.#row());
    this.#table.element.hidden = found.recent.length === 0;
  }

  // The table has a column for each loading stage of the server.
  #columns(stages) {
    const names = stages.map((stage) => stage[0].toUpperCase() + stage.slice(1));
    const titles = ["Batch", "Ended", "Queue", ...names, "Samples"];
    const found = table("Last batches of the worker", titles);
    byId("worker-batches").append(found.element);
    return { ...found, width: titles.length };
  }

  #row() {
    const cells = Array.from({ length: this.#table.width }, () => make("span"));
    return {
      element: this.#table.row(...cells),
      update(one) {
        const texts = [
          `${one.batch} of epoch ${one.epoch}${one.failed ? ", failed" : ""}`,
          one.before === 0 ? "last" : `${duration(one.before)} before`,
          duration(Math.max(0, one.began_at - one.assigned_at)),
          ...one.stages.map(duration),
          count(one.samples),
        ];
        cells.forEach((cell, i) => say(cell, texts[i] ?? UNKNOWN));
      },
    };
  }

  async #stack() {
    const shown = this.#shown;
    byId("stack").disabled = true;
    say(byId("stack-status"), "Reading the stack …");
    try {
      const found = await ask(shown, "/stack");
      say(byId("worker-stack"), found.stack);
      byId("worker-stack").hidden = false;
      say(byId("stack-status"), `Stack of process ${found.pid ?? UNKNOWN}, most recent call first.`);
    } catch (error) {
      say(byId("stack-status"), `No stack: ${error.message}`);
    } finally {
      byId("stack").disabled = false;
    }
  }
}

async function ask({ worker, loader }, path) {
  const query = loader === null ? "" : `?loader=${loader}`;
  const answer = await fetch(`v1/workers/${worker}${path}${query}`);
  if (answer.ok) return await answer.json();
  const problem = await answer.json().catch(() => ({}));
  throw new Error(problem.detail ?? `HTTP status ${answer.status}`);
}

// Resident memory over time, with its range as text.
function chart(history) {
  if (history.length < 2) return [make("p", { class: "quiet" }, "Memory over time: measured every 5 seconds, for up to an hour.")];
  const [oldest, most] = [history[0].age, Math.max(...history.map(({ rss }) => rss))];
  const least = Math.min(...history.map(({ rss }) => rss));
  const x = (age) => WIDTH * (1 - age / Math.max(1, oldest));
  const y = (rss) => HEIGHT - 2 - (HEIGHT - 4) * (rss / Math.max(1, most));
  const svg = (tag, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };
  const text = `Resident memory of the last ${duration(Math.round(oldest))}: ${bytes(least)} to ${bytes(most)}, now ` +
    `${bytes(history.at(-1).rss)}.`;
  const plot = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": text });
  let before = null;
  for (const one of history) {
    // a new process begins a new line
    if (before === null || before.pid !== one.pid) plot.append(svg("polyline", { points: "" }));
    const line = plot.lastElementChild;
    line.setAttribute("points", `${line.getAttribute("points")} ${x(one.age).toFixed(1)},${y(one.rss).toFixed(1)}`);
    before = one;
  }
  return [make("p", { class: "quiet" }, text, ` The first measurement is ${ago(oldest)}.`), plot];
}
