// A lane for each worker: what it does now, and how busy it was in the last minute.

import { bar, byId, list, make, say, table } from "./dom.js";
import { bytes, count, duration, percent, plural, UNKNOWN } from "./format.js";

const LANES = 100;
const SECONDS = 60;
const LONG = 5; // seconds with one batch after which it should be noticed
const TITLES = ["Worker", "Current task", "Busy", "Last minute", "Batches", "Memory", "Restarts"];

const keyOf = (worker) => `${worker.loader ?? ""} ${worker.worker}`;

function restarts(worker) {
  if (worker.restarts === 0 && worker.recycled === 0) return "none";
  const parts = [];
  if (worker.restarts > 0) parts.push(plural(worker.restarts, "restart"));
  if (worker.recycled > 0) parts.push(`${count(worker.recycled)} times recycled`);
  if (worker.last_exit !== null) parts.push(`last exit: ${worker.last_exit}`);
  if (worker.last_restart !== null) parts.push(`restarted within ${duration(worker.last_restart)}`);
  return parts.join("; ");
}

// The last minute as one picture: a column for each second, as high as the worker was busy, and a line across the lane
// where its process was replaced.
class Lane {
  element = make("canvas", { role: "img", width: SECONDS * 4, height: 44 });

  update(history) {
    const canvas = this.element;
    const style = getComputedStyle(canvas);
    const context = canvas.getContext("2d");
    context.clearRect(0, 0, canvas.width, canvas.height);
    history.forEach(({ share, replaced }, i) => {
      const left = (SECONDS - history.length + i) * 4;
      const height = Math.max(2, share * canvas.height);
      context.fillStyle = style.getPropertyValue("--accent");
      context.fillRect(left, canvas.height - height, 3, height);
      context.fillStyle = style.getPropertyValue("--bad");
      if (replaced) context.fillRect(left, 0, 3, canvas.height);
    });
    const mean = history.reduce((sum, { share }) => sum + share, 0) / history.length;
    const times = history.filter(({ replaced }) => replaced).length;
    canvas.setAttribute("aria-label", `busy ${percent(mean)} on average, ${plural(times, "restart")}`);
  }
}

export class WorkerTable {
  #table = table("Workers and their current tasks", TITLES);
  #histories = new Map();

  constructor() {
    byId("worker-table").append(this.#table.element);
  }

  // Add a second, also while the page is hidden.
  note(workers) {
    const before = this.#histories;
    this.#histories = new Map();
    for (const worker of workers) {
      const history = before.get(keyOf(worker)) ?? [];
      const replacements = worker.restarts + worker.recycled;
      const replaced = history.length > 0 && replacements > history.at(-1).replacements;
      history.push({ share: worker.busy_fraction, replacements, replaced });
      this.#histories.set(keyOf(worker), history.slice(-SECONDS));
    }
  }

  show({ workers, server }) {
    list(this.#table.body, workers.slice(0, LANES), keyOf, () => this.#row());
    this.#table.element.hidden = workers.length === 0;
    byId("more-workers").hidden = workers.length > 0 && workers.length <= LANES;
    say(
      byId("more-workers"),
      workers.length > 0
        ? `${count(workers.length - LANES)} more workers are not shown; see /stats.`
        : server.num_workers === 0
          ? "No worker processes: the server loads in its own process."
          : "None yet: workers start with the first request for a batch.",
    );
  }

  #row() {
    const spans = Array.from({ length: 8 }, () => make("span"));
    const [, process, doing, since, share, batches, memory, replaced] = spans;
    const number = make("a");
    process.className = "quiet";
    const busy = bar("Busy in the last ten seconds");
    const lane = new Lane();
    const element = this.#table.row(
      make("span", {}, number, " ", process),
      make("span", {}, doing, " ", since),
      make("span", { class: "barred" }, busy.element, share),
      lane.element, batches, memory, replaced,
    );
    return {
      element,
      update: (worker) => {
        say(number, `${worker.worker}`);
        number.href = `#worker-${worker.worker}${worker.loader === null ? "" : `-${worker.loader}`}`;
        const own = worker.loader === null ? "" : `, private to loader ${worker.loader.slice(0, 8)}`;
        say(process, worker.pid === null ? `no process${own}` : `process ${worker.pid}${own}`);
        say(doing, worker.current_task ?? { starting: "starting", idle: "idle", busy: UNKNOWN }[worker.state]);
        doing.classList.toggle("quiet", worker.current_task === null);
        say(since, worker.current_task_seconds === null ? "" : `for ${duration(worker.current_task_seconds)}`);
        since.className = worker.current_task_seconds !== null && worker.current_task_seconds > LONG ? "bad" : "quiet";
        busy.update(worker.busy_fraction, percent(worker.busy_fraction));
        say(share, percent(worker.busy_fraction));
        lane.update(this.#histories.get(keyOf(worker)));
        say(batches, count(worker.batches));
        say(memory, bytes(worker.pss));
        say(replaced, restarts(worker));
        replaced.classList.toggle("bad", worker.restarts > 0);
      },
    };
  }
}
